"""Tools through the openai client: the loop, the stream's layout, choices and refusals."""

from __future__ import annotations

import json

import openai
import pytest

from tests.serve import scripted, templates
from tests.serve.test_chat_format import CLOCK, DESCRIBED, WEATHER
from tests.serve.test_reply_parser import hermes, xml

QUESTION = {"role": "user", "content": "Rome?"}
TOOLS = [WEATHER, CLOCK]
FAMILIES = {
    "hermes": (templates.HERMES, hermes(), hermes("clock", "{}")),
    "xml": (templates.XML_THINKS, xml(city="Rome"), xml("clock")),
    "plain": (templates.PLAIN, hermes(), hermes("clock", "{}")),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    template, weather, clock = FAMILIES[request.param]
    before = "</think>\n\n" if template is templates.XML_THINKS else ""
    with scripted.serving(template) as (server, script):
        yield server, script, before, weather, clock


@pytest.fixture(scope="module")
def hermes_server():
    with scripted.serving(templates.HERMES) as running:
        yield running


def ask(server, messages=(QUESTION,), tools=TOOLS, **settings):
    return server.openai.chat.completions.create(
        model="scripted", messages=list(messages), tools=tools, **settings
    )


def gather(chunks) -> dict:
    """A message from a stream, with checks of its layout."""
    message: dict = {"content": "", "tool_calls": []}
    finish = None
    for chunk in chunks:
        (choice,) = chunk.choices
        delta = choice.delta
        assert finish is None  # nothing comes after it
        finish = choice.finish_reason
        message["content"] += delta.content or ""
        for call in delta.tool_calls or ():
            calls = message["tool_calls"]
            if call.index == len(calls):  # a call begins: all but its arguments
                assert call.id.startswith("call_")
                assert (call.type, call.function.arguments) == ("function", "")
                calls.append({"id": call.id, "name": call.function.name, "pieces": []})
            else:
                assert call.index == len(calls) - 1
                assert (call.id, call.type, call.function.name) == (None, None, None)
                calls[-1]["pieces"].append(call.function.arguments)
    message["finish"] = finish
    return message


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("sizes", [(1,), (3, 1, 16), (1000,)])
def test_a_loop(family, stream, sizes):
    server, script, before, weather, clock = family
    script.says(f"{before}I look.\n{weather}\n{clock}", tokens_per_round=sizes)
    if stream:
        got = gather(ask(server, stream=True))
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": "".join(call["pieces"])},
            }
            for call in got["tool_calls"]
        ]
        if sizes == (1,):
            assert len(got["tool_calls"][0]["pieces"]) > 5
        content, reason = got["content"], got["finish"]
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
    else:
        choice = ask(server).choices[0]
        content, reason = choice.message.content, choice.finish_reason
        answer = choice.message.model_dump()
        calls = answer["tool_calls"]
    assert (content, reason) == ("I look.", "tool_calls")
    assert [call["function"]["name"] for call in calls] == ["weather", "clock"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Rome"}
    assert json.loads(calls[1]["function"]["arguments"]) == {}
    assert len({call["id"] for call in calls}) == 2
    assert DESCRIBED["weather"] in script.prompt
    # The answers, which the client gives in any order; the template writes all of it.
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"] + "!"}
        for call in reversed(calls)
    ]
    script.says(f"{before}Sun.")
    final = ask(server, [QUESTION, answer, *answers]).choices[0]
    assert (final.message.content, final.message.tool_calls) == ("Sun.", None)
    assert final.finish_reason == "stop"
    assert f"I look.\n{weather}\n{clock}<|im_end|>" in script.prompt
    assert script.prompt.index("weather!") < script.prompt.index("clock!")


def test_content_is_null_beside_calls_alone(hermes_server):
    server, script = hermes_server
    script.says(hermes())
    message = ask(server).choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.arguments == '{"city": "Rome"}'


@pytest.mark.parametrize("stream", [True, False])
def test_a_malformed_call_is_content(hermes_server, stream):
    server, script = hermes_server
    text = f"so {hermes('nothing')}"
    script.says(text)
    if stream:
        got = gather(ask(server, stream=True))
        assert (got["content"], got["tool_calls"], got["finish"]) == (text, [], "stop")
    else:
        choice = ask(server).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (text, None)
        assert choice.finish_reason == "stop"


def test_a_cut_call_has_the_cuts_reason(hermes_server):
    server, script = hermes_server
    script.says(hermes())
    whole = len(script.tokenizer.encode(hermes()))
    choice = ask(server, max_tokens=whole - 12).choices[0]
    assert choice.finish_reason == "length"
    arguments = choice.message.tool_calls[0].function.arguments
    assert '{"city": "Rome"}'.startswith(arguments)
    choice = ask(server, max_tokens=12).choices[0]  # in the head: neither call nor content
    assert (choice.message.content, choice.message.tool_calls) == ("", None)
    assert ask(server, max_tokens=whole).choices[0].finish_reason == "length"
    assert ask(server, max_tokens=whole + 1).choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("stop", "content", "calls", "reason"),
    [
        ("look", "I ", 0, "stop"),
        ("<tool_call>", "I look.\n", 0, "stop"),
        ('"arguments"', "I look.", 0, "stop"),
        ("ome", "I look.", 1, "stop"),
        ("after", "I look.", 1, "tool_calls"),
    ],
)
def test_stop_strings_end_the_reply_wherever_they_are(
    hermes_server, stream, stop, content, calls, reason
):
    server, script = hermes_server
    script.says(f"I look.\n{hermes()}\nafter that", tokens_per_round=(5,))
    if stream:
        got = gather(ask(server, stream=True, stop=stop))
        seen = (got["content"], len(got["tool_calls"]), got["finish"])
    else:
        choice = ask(server, stop=stop).choices[0]
        message = choice.message
        seen = (message.content, len(message.tool_calls or ()), choice.finish_reason)
    assert seen == (content, calls, reason)


def test_one_call_when_they_may_not_be_parallel(hermes_server):
    server, script = hermes_server
    script.says(f"{hermes()}\n{hermes('clock', '{}')}", tokens_per_round=(7,))
    for stream in (True, False):
        reply = ask(server, parallel_tool_calls=False, stream=stream)
        if stream:
            got = gather(reply)
            assert (len(got["tool_calls"]), got["finish"]) == (1, "tool_calls")
        else:
            choice = reply.choices[0]
            assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")
            # Up to the token that completed the call.
            assert reply.usage.completion_tokens == len(script.tokenizer.encode(hermes()))
    assert len(ask(server, parallel_tool_calls=True).choices[0].message.tool_calls) == 2


def test_none_offers_no_tools(hermes_server):
    server, script = hermes_server
    script.says(hermes())
    choice = ask(server, tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (hermes(), None)
    assert "# Tools" not in script.prompt
    ask(server, tool_choice="auto")
    assert "# Tools" in script.prompt
    for settings in ({"tools": []}, {"tools": None, "tool_choice": "none"}):
        assert ask(server, **settings).choices[0].message.tool_calls is None


def test_several_choices_are_read_apart(hermes_server):
    server, script = hermes_server
    script.says(hermes(), "no call", hermes("clock", "{}"))
    choices = ask(server, n=3).choices
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    assert choices[1].message.content == "no call"
    assert choices[2].message.tool_calls[0].function.name == "clock"


@pytest.mark.parametrize(
    ("choice", "several"),
    [
        ("required", True),
        ({"type": "function", "function": {"name": "clock"}}, False),
    ],
)
def test_forced_calls_have_a_grammar(family, choice, several):
    server, script, before, weather, clock = family
    script.says(f"{before}{clock}")
    reply = ask(server, tool_choice=choice).choices[0]
    assert reply.message.tool_calls[0].function.name == "clock"
    rules = script.requests[-1].rules
    tokens = script.tokenizer.encode
    for text, good in (
        (clock, True),
        (f"{clock}\n{clock}", several),
        (weather, several),
        ("Hello", False),
        (clock.replace("clock", "nothing"), False),
    ):
        ids = [*tokens(text), scripted.END]
        assert (rules.grammar.matcher().validate_tokens(ids) == len(ids)) == good
    ask(server, tool_choice="auto", tools=[CLOCK])
    assert script.requests[-1].rules.grammar is None


def test_strict_functions_have_a_grammar_too(family):
    server, script, before, weather, clock = family
    script.says(f"{before}Hello")
    ask(server)  # WEATHER is strict
    grammar = script.requests[-1].rules.grammar
    for text, good in (
        ("Hello", True),
        (f"So\n{weather} and {clock}", True),
        (weather.replace("weather", "nothing"), False),
    ):
        ids = [*script.tokenizer.encode(text), scripted.END]
        assert (grammar.matcher().validate_tokens(ids) == len(ids)) == good


def test_tags_that_are_special_tokens_are_read():
    with scripted.serving(templates.HERMES, special=True) as (server, script):
        script.says(f"日{hermes()}")
        message = ask(server).choices[0].message
        assert (message.content, message.tool_calls[0].function.name) == ("日", "weather")


def test_calls_of_another_form_are_refused():
    with scripted.serving(templates.OTHER_CALLS) as (server, script):
        with pytest.raises(openai.BadRequestError, match="not known here") as raised:
            ask(server)
        assert raised.value.param == "tools"
        script.says("Hello")
        assert ask(server, tool_choice="none").choices[0].message.content == "Hello"


def test_tokenize_has_the_same_prompt(hermes_server):
    server, script = hermes_server
    script.says("Hello")
    ask(server)
    tokens = server.post("/tokenize", messages=[QUESTION], tools=TOOLS).json()["tokens"]
    assert tuple(tokens) == script.requests[-1].prompt
    assert server.post("/tokenize", prompt="x", tools=TOOLS).status_code == 400


CALL = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
# (body, what the message must say, param)
REFUSED = {
    "no tools": ({"tool_choice": "required"}, "no tools to choose", "tool_choice"),
    "no tools in parallel": (
        {"tools": [], "parallel_tool_calls": True},
        "no tools to call",
        "parallel_tool_calls",
    ),
    "other choice": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "'x' is none of the tools",
        "tool_choice",
    ),
    "odd choice": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "tool_choice"),
    "twice": ({"tools": [CLOCK, CLOCK]}, "two functions have the name 'clock'", "tools"),
    "many": ({"tools": [CLOCK] * 129}, "128", "tools"),
    "custom": (
        {"tools": [{"type": "custom", "custom": {}}]},
        "custom is not supported",
        "tools[0].custom",
    ),
    "allowed tools": (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "allowed_tools is not supported",
        "tool_choice.allowed_tools",
    ),
    "name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name", None),
    "schema": (
        {
            "tools": [
                {"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}
            ]
        },
        'needs "type": "object"',
        "tools[0].function.parameters",
    ),
    "schema that no text matches": (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "a",
                        "strict": True,
                        "parameters": {"properties": {"a": {"type": "nothing"}}, "required": ["a"]},
                    },
                }
            ],
            "tool_choice": "required",
        },
        "tools: ",
        "tools",
    ),
    "functions": ({"functions": [{"name": "x"}]}, "functions is not supported", "functions"),
    "tool without id": (
        {"messages": [{"role": "tool", "content": "x"}]},
        "tool_call_id",
        "messages[0]",
    ),
    "id without tool": (
        {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]},
        "tool_call_id",
        "messages[0]",
    ),
    "answer to nothing": (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]},
        "the id of no call",
        None,
    ),
    "user's calls": (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
        "only an assistant's",
        "messages[0]",
    ),
    "broken arguments": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{**CALL, "function": {"name": "clock", "arguments": '{"a'}}],
                }
            ]
        },
        "a JSON object",
        "messages[0].tool_calls[0].function.arguments",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "content", "messages[0]"),
    "surrogate": (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"\ud800": 1}}}]},
        "surrogate",
        None,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(hermes_server, name):
    server, _ = hermes_server
    body, says, param = REFUSED[name]
    reply = server.http.post(
        "/v1/chat/completions",
        content=json.dumps({"messages": [QUESTION], **body}),
        headers={"Content-Type": "application/json"},
    )
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert says in error["message"]
    assert param is None or error["param"] == param


@pytest.mark.parametrize("depth", [100, 480, 980])
def test_deep_arguments_and_schemas_are_no_error_of_ours(hermes_server, depth):
    server, script = hermes_server
    script.says("Hello")
    deep = '{"properties":' * depth + "{}" + "}" * depth
    call = {**CALL, "function": {"name": "clock", "arguments": deep}}
    tool = f'{{"type": "function", "function": {{"name": "a", "parameters": {deep}}}}}'
    for body in (
        json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}),
        f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}',
    ):
        headers = {"Content-Type": "application/json"}
        reply = server.http.post("/v1/chat/completions", content=body, headers=headers)
        assert reply.status_code in (200, 400)
