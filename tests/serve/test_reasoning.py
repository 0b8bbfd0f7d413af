"""Reasoning: told apart, counted, limited and switched, where the template thinks."""

from __future__ import annotations

import openai
import pytest

from dflash_jax.engine.rules import NO_RULES, Thinking
from dflash_jax.serve.chats import EFFORT_TOKENS
from tests.serve import scripted, templates
from tests.serve.test_chat_format import CLOCK
from tests.serve.test_reply_parser import hermes

QUESTION = {"role": "user", "content": "Rome?"}
BEGIN, END = 264, 265  # ids of the tags


@pytest.fixture(scope="module")
def hermes_server():
    """The reply begins its thinking itself."""
    with scripted.serving(templates.HERMES_THINKS) as running:
        yield running


@pytest.fixture(scope="module")
def xml_server():
    """The prompt has begun it."""
    with scripted.serving(templates.XML_THINKS) as running:
        yield running


@pytest.fixture(scope="module")
def effort_server():
    with scripted.serving(templates.EFFORT) as running:
        yield running


@pytest.fixture(scope="module")
def plain_server():
    with scripted.serving(templates.PLAIN) as running:
        yield running


def ask(server, **settings):
    messages = settings.pop("messages", [QUESTION])
    return server.openai.chat.completions.create(model="scripted", messages=messages, **settings)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("sizes", [(1,), (4, 1), (1000,)])
def test_reasoning_is_told_apart(hermes_server, xml_server, stream, sizes):
    for (server, script), tag in ((hermes_server, "<think>\n"), (xml_server, "")):
        thought = f"{tag}I wonder.\n</think>"
        script.says(f"{thought}\n\nSun.", tokens_per_round=sizes)
        if stream:
            reasoning = content = ""
            chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
            for chunk in chunks[:-1]:
                delta = chunk.choices[0].delta
                assert not (content and getattr(delta, "reasoning_content", None))
                reasoning += getattr(delta, "reasoning_content", None) or ""
                content += delta.content or ""
            usage = chunks[-1].usage
        else:
            reply = ask(server)
            message, usage = reply.choices[0].message, reply.usage
            reasoning, content = message.reasoning_content, message.content
        assert (reasoning, content) == ("I wonder.", "Sun.")
        tokens = script.tokenizer.encode
        assert usage.completion_tokens_details.reasoning_tokens == len(tokens(thought))
        assert usage.completion_tokens == len(tokens(f"{thought}\n\nSun.")) + 1
        # The reply as part of the next chat.
        if not stream:
            ask(server, messages=[QUESTION, message.model_dump(), QUESTION])


def test_without_reasoning(hermes_server, plain_server):
    for server, script in (hermes_server, plain_server):
        script.says("Sun.")
        reply = ask(server)
        message = reply.choices[0].message
        assert (message.content, message.reasoning_content) == ("Sun.", None)
        assert reply.usage.completion_tokens_details.reasoning_tokens == 0
    server, script = plain_server
    script.says("<think>a</think>b")  # this template's models do not think
    assert ask(server).choices[0].message.content == "<think>a</think>b"


def test_a_reply_cut_in_its_reasoning(xml_server):
    server, script = xml_server
    script.says("I wonder for long.")
    choice = ask(server, max_tokens=8).choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "length")
    assert choice.message.reasoning_content == "I wonder"
    script.says("Sun.")
    reply = ask(server, messages=[QUESTION, choice.message.model_dump(), QUESTION])
    assert reply.choices[0].message.reasoning_content == "Sun."


def test_a_call_after_reasoning(hermes_server):
    server, script = hermes_server
    script.says(f"<think>\nThe clock: {hermes('clock', '{}')}\n</think>\n\n{hermes('clock', '{}')}")
    message = ask(server, tools=[CLOCK]).choices[0].message
    assert (message.content, len(message.tool_calls)) == (None, 1)
    assert message.reasoning_content == f"The clock: {hermes('clock', '{}')}"


def test_tags_that_are_special_tokens():
    with scripted.serving(templates.HERMES_THINKS, special=True) as (server, script):
        script.says("<think>hm</think>Sun.")
        message = ask(server).choices[0].message
        assert (message.reasoning_content, message.content) == ("hm", "Sun.")


def test_a_stop_string_ends_reasoning_too(xml_server):
    server, script = xml_server
    script.says("I wonder.</think>Sun.")
    choice = ask(server, stop="won").choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == ("I", None)
    assert choice.finish_reason == "stop"


# Switches and budgets ----------------------------------------------------------------------


def prompt_and_rules(running, **settings):
    server, script = running
    script.says("x")
    ask(server, **settings)
    return script.prompt, script.requests[-1].rules


@pytest.mark.parametrize(
    "settings",
    [
        {"reasoning_effort": "none"},
        {"reasoning_effort": "minimal"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ],
)
def test_thinking_switched_off(hermes_server, xml_server, settings):
    for running in (hermes_server, xml_server):
        prompt, rules = prompt_and_rules(running, **settings)
        assert prompt.endswith("<think>\n\n</think>\n\n")
        assert rules == NO_RULES
        server, script = running
        script.says("Sun.")
        message = ask(server, **settings).choices[0].message
        assert (message.content, message.reasoning_content) == ("Sun.", None)


def test_effort_limits_the_tokens_of_reasoning(hermes_server, xml_server):
    for running, begin in ((hermes_server, BEGIN), (xml_server, None)):
        closing = tuple(running[1].tokenizer.encode("\n</think>\n\n"))
        for effort, tokens in (*EFFORT_TOKENS.items(), ("xhigh", None), ("max", None)):
            prompt, rules = prompt_and_rules(running, reasoning_effort=effort)
            assert not prompt.endswith("</think>\n\n")
            if tokens is None:
                assert rules == NO_RULES
            else:
                assert rules.thinking == Thinking(END, begin, tokens, closing)
    assert sorted(EFFORT_TOKENS.values()) == list(EFFORT_TOKENS.values())


def test_a_template_that_knows_effort_is_told(effort_server):
    prompt, rules = prompt_and_rules(effort_server, reasoning_effort="high")
    assert "effort high\n" in prompt
    assert rules == NO_RULES
    assert "effort medium\n" in prompt_and_rules(effort_server)[0]
    for effort in ("none", "minimal"):
        with pytest.raises(openai.BadRequestError, match="cannot be switched off"):
            ask(effort_server[0], reasoning_effort=effort)


@pytest.mark.parametrize("budget", [0, 7])
def test_a_budget(hermes_server, xml_server, budget):
    for running, begin in ((hermes_server, BEGIN), (xml_server, None)):
        for more in ({}, {"reasoning_effort": "low"}):
            extra = {"thinking_budget": budget}
            _, rules = prompt_and_rules(running, extra_body=extra, **more)
            thinking = rules.thinking
            assert (thinking.budget, thinking.begin, thinking.end) == (budget, begin, END)
            assert rules.grammar is None


def test_a_forced_call_comes_after_the_reasoning(hermes_server, xml_server):
    for running, begin in ((hermes_server, BEGIN), (xml_server, None)):
        forced = {"tools": [CLOCK], "tool_choice": "required"}
        _, rules = prompt_and_rules(running, **forced, reasoning_effort="none")
        assert rules.thinking is None  # at once
        assert rules.grammar is not None
        _, rules = prompt_and_rules(running, **forced)
        assert (rules.thinking.begin, rules.thinking.end) == (begin, END)
        assert rules.thinking.budget is None
        assert rules.grammar is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reasoning_effort", "low"),
        ("reasoning_effort", "none"),
        ("thinking_budget", 5),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_a_template_that_does_not_think_refuses_by_name(plain_server, name, value):
    server, script = plain_server
    reply = server.post("/v1/chat/completions", messages=[QUESTION], **{name: value})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, name)
    assert error["code"] == "unsupported_parameter"
    script.says("x")
    for neutral in (None, *([{}] if name == "chat_template_kwargs" else [])):
        body = {"messages": [QUESTION], name: neutral}
        assert server.post("/v1/chat/completions", **body).status_code == 200


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        ({"reasoning_effort": "some"}, "'none'", "reasoning_effort"),
        ({"thinking_budget": -1}, "0", "thinking_budget"),
        ({"chat_template_kwargs": {"think": 1}}, "set of it: enable_thinking", None),
        ({"chat_template_kwargs": {"messages": []}}, "reads no 'messages'", None),
        ({"chat_template_kwargs": {"enable_thinking": "false"}}, "true or false", None),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
            "contradicts",
            "reasoning_effort",
        ),
    ],
)
def test_refusals(xml_server, body, says, param):
    reply = xml_server[0].post("/v1/chat/completions", messages=[QUESTION], **body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert says in error["message"]
    assert param is None or error["param"] == param


def test_tags_that_are_no_tokens():
    with scripted.serving(templates.XML_THINKS, tags=()) as (server, script):
        script.says("hm</think>Sun.")
        message = ask(server).choices[0].message
        assert (message.reasoning_content, message.content) == ("hm", "Sun.")
        for settings in (
            {"extra_body": {"thinking_budget": 3}},
            {"tools": [CLOCK], "tool_choice": "required"},
        ):
            with pytest.raises(openai.BadRequestError, match="has no tokens <think>"):
                ask(server, **settings)
