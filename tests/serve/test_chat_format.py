"""Chats through templates of each family: what they are given, and what they cannot do."""

from __future__ import annotations

import json

import pytest

from dflash_jax.errors import InputError
from dflash_jax.serve.call_reader import Syntax
from dflash_jax.serve.chat_format import ChatFormat
from dflash_jax.serve.chat_requests import Message, Tool
from dflash_jax.serve.reply_parser import Start
from tests.serve import templates

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's <weather>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
DESCRIBED = {
    "weather": json.dumps(
        {
            "type": "function",
            "function": {
                name: WEATHER["function"][name] for name in ("name", "description", "parameters")
            },
        }
    ),
    "clock": json.dumps(
        {
            "type": "function",
            "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
        }
    ),
}


def called(call_id: str, name: str, arguments: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


QUESTION = {"role": "user", "content": "Rome?"}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [called("a", "weather", '{"city": "Röm", "days": 2}'), called("b", "clock", "")],
}
ANSWERS = [
    {"role": "tool", "tool_call_id": "a", "content": "sun"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "noon"}]},
]


def render(template: str, messages: list[dict], tools: list[dict] = (), **variables) -> str:
    format_ = ChatFormat(templates.tokenizer(template))
    turns = [Message.model_validate(message) for message in messages]
    return format_.render(turns, [Tool.model_validate(tool) for tool in tools], variables)


def test_hermes():
    text = render(templates.HERMES, [QUESTION, CALLS, *ANSWERS], [WEATHER, CLOCK])
    assert f"<tools>\n{DESCRIBED['weather']}\n{DESCRIBED['clock']}\n</tools>" in text
    assert text.endswith(
        "<|im_start|>user\nRome?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Röm", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n"
        "<tool_response>\nsun\n</tool_response>\n"
        "<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "# Tools" not in render(templates.HERMES, [QUESTION])


def test_xml_takes_arguments_as_an_object():
    text = render(templates.XML_THINKS, [QUESTION, CALLS, *ANSWERS], [WEATHER])
    assert DESCRIBED["weather"] in text
    assert (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRöm\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=clock>\n</function>\n</tool_call><|im_end|>\n"
    ) in text
    assert text.endswith("<|im_start|>assistant\n<think>\n")


def test_a_template_that_prints_arguments_gets_json():
    template = (
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}{{ tools }}"
    )
    assert render(template, [CALLS]) == '{"city": "Röm", "days": 2}'


def test_reasoning_and_names_reach_the_template():
    message = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}
    assert "<think>\nhm\n</think>\n\nYes<|im_end|>" in render(templates.XML_THINKS, [message])
    named = {"role": "user", "name": "bo", "content": "x"}
    assert render("{{ messages[0].name }}", [named]) == "bo"


def test_a_template_without_tools_gets_them_as_text():
    text = render(templates.PLAIN, [QUESTION, CALLS, *ANSWERS], [WEATHER, CLOCK])
    assert text.startswith("<|im_start|>system\nYou can call functions.")
    assert f"<tools>\n{DESCRIBED['weather']}\n{DESCRIBED['clock']}\n</tools>" in text
    assert text.endswith(
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Röm", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n"
        "<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # Behind the client's own system text; after the calls' turn the next answer is its own.
    system = {"role": "developer", "content": "Be brief."}
    text = render(templates.PLAIN, [system, QUESTION, CALLS, ANSWERS[0], QUESTION], [WEATHER])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert text.count("<|im_start|>system") == 1
    assert "</tool_response><|im_end|>\n<|im_start|>user\nRome?" in text
    assert render(templates.PLAIN, [QUESTION]) == (
        "<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [templates.HERMES, templates.XML_THINKS, templates.PLAIN])
def test_answers_come_in_the_order_of_their_calls(template):
    wanted = render(template, [QUESTION, CALLS, *ANSWERS, QUESTION], [WEATHER])
    assert render(template, [QUESTION, CALLS, *ANSWERS[::-1], QUESTION], [WEATHER]) == wanted
    assert wanted.index("sun") < wanted.index("noon")


@pytest.mark.parametrize(
    "messages",
    [[ANSWERS[0]], [CALLS, QUESTION, ANSWERS[0]], [CALLS, {**ANSWERS[0], "tool_call_id": "c"}]],
)
def test_an_answer_to_no_call_is_refused(messages):
    with pytest.raises(
        InputError, match=r"messages\[\d\].tool_call_id: '[ac]' is the id of no call"
    ):
        render(templates.HERMES, messages)


def test_what_templates_can_do():
    formats = {
        name: ChatFormat(templates.tokenizer(getattr(templates, name)))
        for name in (
            "HERMES",
            "HERMES_THINKS",
            "XML_THINKS",
            "EFFORT",
            "OTHER_CALLS",
            "OTHER_IN_TAGS",
            "PLAIN",
        )
    }
    assert {name: format_.syntax for name, format_ in formats.items()} == {
        "HERMES": Syntax.HERMES,
        "HERMES_THINKS": Syntax.HERMES,
        "XML_THINKS": Syntax.QWEN_XML,
        "EFFORT": Syntax.HERMES,
        "OTHER_CALLS": None,
        "OTHER_IN_TAGS": None,
        "PLAIN": Syntax.HERMES,
    }
    assert [name for name, format_ in formats.items() if format_.thinks] == [
        "HERMES_THINKS",
        "XML_THINKS",
        "EFFORT",
    ]
    assert formats["XML_THINKS"].variables == {"enable_thinking"}
    assert formats["EFFORT"].variables == {"reasoning_effort"}
    assert not formats["PLAIN"].variables


@pytest.mark.parametrize(
    "written",
    [
        # As Qwen2.5, Hermes 2 and Hermes 3 have it in their templates.
        r"""{{- '<tool_call>\n{"name": "' }}""",
        r"""{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}" }}""",
        """<tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>""",
    ],
)
def test_calls_of_json_in_a_templates_source(written):
    format_ = ChatFormat(templates.tokenizer(f"{{{{ tools }}}}{written}"))
    assert format_.syntax is Syntax.HERMES


def test_where_the_reply_stands():
    starts = {
        templates.HERMES: {None: Start.NEVER},
        templates.HERMES_THINKS: {None: Start.POSSIBLE, False: Start.ENDED},
        templates.XML_THINKS: {None: Start.OPEN, True: Start.OPEN, False: Start.ENDED},
    }
    for template, wanted in starts.items():
        format_ = ChatFormat(templates.tokenizer(template))
        for switch, start in wanted.items():
            variables = {} if switch is None else {"enable_thinking": switch}
            text = format_.render([Message.model_validate(QUESTION)], [], variables)
            assert format_.start(text) is start
