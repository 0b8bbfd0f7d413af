"""Replies are read into their parts alike wherever the pieces end, and nothing of them is lost."""

from __future__ import annotations

import json

import hypothesis
import pytest
from hypothesis import strategies

from dflash_jax.serve.call_reader import Syntax
from dflash_jax.serve.reply_parser import ReplyParser, Start
from dflash_jax.serve.reply_parts import Arguments, CallStart, Content, Part, Reasoning, joined

FUNCTIONS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "near": {"type": ["string", "null"]},
            "when": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "any": {},
        },
    },
    "stop": {},
}
HERMES, XML = Syntax.HERMES, Syntax.QWEN_XML


def parse(
    pieces: list[str],
    syntax: Syntax | None = HERMES,
    start: Start = Start.NEVER,
    cut: bool = False,
    **settings,
) -> tuple[list[Part], ReplyParser]:
    parser = ReplyParser(start, syntax, FUNCTIONS, **settings)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    return joined([*parts, *parser.finish(cut)]), parser


def call(name: str, arguments: str, index: int = 0) -> list[Part]:
    return [CallStart(index, name), Arguments(index, arguments)]


def hermes(name: str = "weather", arguments: str = '{"city": "Rome"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml(name: str = "weather", **parameters: str) -> str:
    written = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(written)}</function>\n</tool_call>"


ROME = call("weather", '{"city": "Rome"}')
HERMES_REPLIES = {
    "content": ("Hello.\n", [Content("Hello.\n")]),
    "call": (hermes(), ROME),
    "after text": (f"I look.\n{hermes()}\n", [Content("I look."), *ROME]),
    "two": (
        f"{hermes()}\n{hermes('stop', '{}')}",
        [*ROME, *call("stop", "{}", 1)],
    ),
    "two in a row": (hermes() + hermes("stop", "{}"), [*ROME, *call("stop", "{}", 1)]),
    "text around": (f"a{hermes()}\nb", [Content("a"), *ROME, Content("b")]),
    "no blanks": (
        '<tool_call>{"name":"weather","arguments":{"city":"Rome"}}</tool_call>',
        call("weather", '{"city":"Rome"}'),
    ),
    "parameters": (hermes().replace("arguments", "parameters"), ROME),
    "nested": (
        hermes(arguments='{"a": [{"b": {}}, "]}"], "c": "\\"}"}'),
        call("weather", '{"a": [{"b": {}}, "]}"], "c": "\\"}"}'),
    ),
    "tags in a string": (
        hermes(arguments='{"city": "</tool_call><tool_call>"}'),
        call("weather", '{"city": "</tool_call><tool_call>"}'),
    ),
    "line break in a string": (
        hermes(arguments='{"city": "a\nb\t"}'),
        call("weather", '{"city": "a\\nb\\t"}'),
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}</tool_call>',
        ROME,
    ),
    "JSON in JSON": (
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
        ROME,
    ),
    "no arguments": ('<tool_call>{"name": "stop"}</tool_call>', call("stop", "{}")),
    "a list": (
        '<tool_call>[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "stop"}]'
        "</tool_call>",
        [*ROME, *call("stop", "{}", 1)],
    ),
    "one bracket too few": (hermes().replace("}}", "}"), ROME),
    "no closing tag": (hermes().removesuffix("\n</tool_call>"), ROME),
    "no closing tag between": (
        f"{hermes().removesuffix('</tool_call>')}{hermes('stop', '{}')}",
        [*ROME, *call("stop", "{}", 1)],
    ),
}
# Calls that are none: the text as it is.
MALFORMED = {
    "unknown function": hermes("nothing"),
    "no JSON": "<tool_call>call the weather</tool_call>",
    "broken JSON": '<tool_call>{"name": weather}</tool_call>',
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "arguments of text": '<tool_call>{"name": "weather", "arguments": "Rome"}</tool_call>',
    "one of a list": '<tool_call>[{"name": "stop"}, {"name": "go"}]</tool_call>',
    "empty": "<tool_call></tool_call>",
    "half a tag": "so <tool_ca",
    "a tag alone": "the tag <tool_call> begins a call",
    "cut in the name": '<tool_call>\n{"name": "wea',
    "infinite": '<tool_call>{"arguments": {"a": Infinity}, "name": "stop"}</tool_call>',
}
BROKEN = {
    "cut": ('<tool_call>\n{"name": "weather", "arguments": {"city": "Ro', '{"city": "Ro'),
    "broken": (hermes(arguments='{"city": Rome}'), '{"city": Rome}}\n'),
    "no value": (hermes(arguments='{"city": }'), '{"city": }'),
    "wrong bracket": (hermes(arguments='{"city": ["Rome"}'), '{"city": ["Rome"}}\n'),
}
XML_REPLIES = {
    "call": (xml(city="Rome"), ROME),
    "kinds": (
        xml(city="5", days="3", unit="C", near="null", when="7", any="[1]", other="x y"),
        call(
            "weather",
            '{"city": "5", "days": 3, "unit": "C", "near": null, "when": "7", "any": [1], '
            '"other": "x y"}',
        ),
    ),
    "lines": (
        xml(city='\n a "b"\n\n<c>', near="x\ny"),
        call("weather", json.dumps({"city": '\n a "b"\n\n<c>', "near": "x\ny"})),
    ),
    "python's words": (
        xml(any="True", near="None"),
        call("weather", '{"any": true, "near": null}'),
    ),
    "no number": (xml(days="soon", any="NaN"), call("weather", '{"days": "soon", "any": "NaN"}')),
    "without parameters": (xml("stop"), call("stop", "{}")),
    "two": (
        f"go\n{xml(city='Rome')}\n{xml('stop')}",
        [Content("go"), *ROME, *call("stop", "{}", 1)],
    ),
    "in a line": (
        "<tool_call><function=weather><parameter=city>Rome</parameter></function></tool_call>",
        ROME,
    ),
    "function not closed": (xml(city="Rome").replace("</function>\n", ""), ROME),
    "no closing tag": (xml(city="Rome").removesuffix("\n</tool_call>"), ROME),
}
XML_MALFORMED = {
    "unknown function": xml("nothing", city="Rome"),
    "hermes": hermes(),
    "half a head": "<tool_call>\n<function=weath",
    "no head": "<tool_call> <func></tool_call>",
    "a line in the head": "<tool_call><function=wea\nther></tool_call>",
}
XML_BROKEN = {
    "cut": (xml(city="Rome").partition("e\n</par")[0], '{"city": "Rom'),
    "cut in a tag": (xml(city="Rome", days="1").partition("ys>")[0], '{"city": "Rome"'),
    "cut number": (xml(days="12").partition("2")[0], '{"days": \n1'),
    "text between": (
        xml(city="Rome").replace("</function>", "and"),
        '{"city": "Rome"\nand\n',
    ),
}


def cases(replies, syntax):
    return [
        pytest.param(*case, syntax, id=f"{syntax.value}: {name}") for name, case in replies.items()
    ]


@pytest.mark.parametrize(
    ("text", "parts", "syntax"), cases(HERMES_REPLIES, HERMES) + cases(XML_REPLIES, XML)
)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_replies(text, parts, syntax, size):
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    got, parser = parse(pieces, syntax)
    assert got == parts
    assert parser.whole
    for part in got:
        assert not isinstance(part, Arguments) or isinstance(json.loads(part.text), dict)


@pytest.mark.parametrize(
    ("text", "syntax"),
    cases({name: (text,) for name, text in MALFORMED.items()}, HERMES)
    + cases({name: (text,) for name, text in XML_MALFORMED.items()}, XML),
)
def test_malformed_calls_are_content(text, syntax):
    good = hermes() if syntax is HERMES else xml(city="Rome")
    for pieces in ([text], list(text)):
        assert parse(pieces, syntax)[0] == [Content(text)]
    if text.endswith("</tool_call>"):  # and what follows is read as ever
        assert parse([f"{text}\n{good}"], syntax)[0] == [Content(text), *ROME]


@pytest.mark.parametrize(
    ("text", "arguments", "syntax"), cases(BROKEN, HERMES) + cases(XML_BROKEN, XML)
)
def test_what_breaks_later_stays_in_the_arguments(text, arguments, syntax):
    for pieces in ([text], list(text)):
        got, parser = parse(pieces, syntax)
        assert got == call("weather", arguments)
        assert not parser.whole


def test_arguments_come_as_they_are_written():
    parser = ReplyParser(Start.NEVER, HERMES, FUNCTIONS)
    assert parser.push('<tool_call>{"name": "weather", "argum') == []
    assert parser.push('ents": {"ci') == call("weather", '{"ci')
    assert parser.push('ty": "Ro') == [Arguments(0, 'ty": "Ro')]
    parser = ReplyParser(Start.NEVER, XML, FUNCTIONS)
    assert parser.push("<tool_call>\n<function=weather>\n<para") == [CallStart(0, "weather")]
    assert parser.push("meter=city>\nRo") == [Arguments(0, '{"city": "Ro')]
    assert parser.push('me "x\n') == [Arguments(0, 'me \\"x')]  # the line break may be the last
    assert parser.push("y") == [Arguments(0, "\\ny")]


def test_a_tag_waits_and_text_does_not():
    parser = ReplyParser(Start.NEVER, HERMES, FUNCTIONS)
    assert parser.push("one <to") == [Content("one")]
    assert parser.push("ast") == [Content(" <toast")]
    # What can be no call is handed on at once.
    assert parser.push("<tool_call>no") == [Content("<tool_call>no")]
    plain = ReplyParser()
    assert plain.push("one \n<tool_call> ") == [Content("one \n<tool_call> ")]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("so <tool_ca", "so "),
        ('so\n<tool_call>\n{"name": "wea', "so"),
        ("so\n<tool_call>", "so"),
        ("so <tool_call>no", "so <tool_call>no"),  # which is none, however it goes on
        ("so <tool_call>no <tool", "so <tool_call>no "),
        ("so <", "so "),
        ("so", "so"),
    ],
)
def test_the_beginning_of_a_call_is_no_content_of_a_cut_reply(text, content):
    for pieces in ([text], list(text)):
        parser = ReplyParser(Start.NEVER, HERMES, FUNCTIONS)
        parts = [part for piece in pieces for part in parser.push(piece)]
        assert joined([*parts, *parser.finish(cut=True)]) == [Content(content)]
    xml_head = ReplyParser(Start.OPEN, XML, FUNCTIONS)
    parts = [*xml_head.push("a</think>b<tool_call>\n<function=we"), *xml_head.finish(cut=True)]
    assert joined(parts) == [Reasoning("a"), Content("b")]
    thought = ReplyParser(Start.OPEN)
    assert joined([*thought.push("a</thi"), *thought.finish(cut=True)]) == [Reasoning("a")]
    plain = ReplyParser()
    assert joined([*plain.push("a <tool"), *plain.finish(cut=True)]) == [Content("a <tool")]


def test_one_call_ends_the_reply():
    text = f"so\n{hermes()}"
    for pieces in ([text + "\nmore"], list(text)):
        got, parser = parse(pieces, one_call=True)
        assert got == [Content("so"), *ROME]
        assert parser.done
    parser = ReplyParser(Start.NEVER, HERMES, FUNCTIONS, one_call=True)
    parser.push(text[:-1])
    assert not parser.done  # the closing tag belongs to it
    assert not parse(["no call"], one_call=True)[1].done


# Reasoning ---------------------------------------------------------------------------------

THOUGHTS = [
    ("<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
    ("\n<think>hm</think>Yes.", "hm", "Yes."),
    ("<think>\n a\n\n b \n</think>\n    code\n", " a\n\n b", "    code\n"),
    ("<think></think>Yes", "", "Yes"),
    ("<think>\n\n</think>\n\n", "", ""),
    ("<think>cut", "cut", ""),
    ("<think>a</thin", "a</thin", ""),
    ("<think>a<think>b</think>c</think>", "a<think>b", "c</think>"),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), THOUGHTS)
@pytest.mark.parametrize("start", [Start.POSSIBLE, Start.OPEN, Start.ENDED])
@pytest.mark.parametrize("syntax", [None, HERMES])
def test_reasoning(text, reasoning, content, start, syntax):
    wanted = joined([Reasoning(reasoning), Content(content)])
    texts = [text]
    if start is Start.OPEN:  # the tag may be the prompt's
        texts.append(text.partition("<think>")[2])
    for text in texts:
        for pieces in ([text], list(text)):
            got, parser = parse(pieces, syntax, start)
            assert got == wanted
            assert not parser.calls


def test_a_reply_may_not_think():
    for text in ("Yes.", "\n Yes <think>no</think>", "<thin", "<thing>"):
        for pieces in ([text], list(text)):
            assert parse(pieces, None, Start.POSSIBLE)[0] == [Content(text)]
    assert parse(["<think>a</think>b"], None)[0] == [Content("<think>a</think>b")]


def test_calls_in_reasoning_are_none():
    text = f"<think>I write {hermes()}.</think>\n{hermes()}"
    got, _ = parse([text], HERMES, Start.POSSIBLE)
    assert got == [Reasoning(f"I write {hermes()}."), *ROME]


def test_whether_the_reply_is_in_its_reasoning():
    parser = ReplyParser(Start.OPEN)
    seen = [parser.reasoning]
    for piece in ("\n", "hm", "</thi", "nk>", "\n", "Yes"):
        parser.push(piece)
        seen.append(parser.reasoning)
    assert seen == [True, True, True, True, False, False, False]
    parser = ReplyParser(Start.POSSIBLE)
    assert not parser.reasoning
    parser.push("<think>")
    assert parser.reasoning


# Any text, any pieces ----------------------------------------------------------------------

fragments = strategies.lists(
    strategies.sampled_from(
        [
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "</function>", "</parameter>"),
            *("<function=weather>", "<function=stop>", "<parameter=city>", "<parameter=days>"),
            *('{"name": "weather", "arguments": ', '{"name": "stop"', '{"city": "', '"}', "}"),
            *(" ", "\n", "a", "5", '"', "\\", "<", "{", "[", "]", ",", "日", "\x85", "null"),
            *(hermes(), xml(city="Rome"), xml("stop")),
        ]
    ),
    max_size=24,
)


@hypothesis.settings(max_examples=500, deadline=None)
@hypothesis.given(
    fragments,
    strategies.data(),
    strategies.sampled_from(Start),
    strategies.sampled_from([*Syntax, None]),
    strategies.booleans(),
)
def test_any_pieces_give_the_same_parts(texts, data, start, syntax, cut):
    text = "".join(texts)
    cuts = sorted(data.draw(strategies.lists(strategies.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, parser = parse([text], syntax, start, cut)
    in_pieces, other = parse(pieces, syntax, start, cut)
    by_character, _ = parse(list(text), syntax, start, cut)
    assert whole == in_pieces == by_character
    assert (parser.calls, parser.whole) == (other.calls, other.whole)
    if parser.whole:
        for part in whole:
            assert not isinstance(part, Arguments) or isinstance(json.loads(part.text), dict)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(strategies.text(), strategies.sampled_from([*Syntax, None]))
def test_text_without_tags_is_passed_on(text, syntax):
    if "<tool_call>" not in text and "<think>" not in text:
        assert parse(list(text), syntax, Start.POSSIBLE)[0] == joined([Content(text)])


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
    strategies.dictionaries(
        strategies.sampled_from(["city", "near", "other"]), strategies.text(max_size=20), max_size=3
    )
)
def test_arguments_survive_the_way_there_and_back(arguments):
    written = hermes(arguments=json.dumps(arguments, ensure_ascii=False))
    (_, got), _ = parse(list(written))
    assert json.loads(got.text) == arguments
    if "</parameter>" not in "".join(arguments.values()):
        strings = {"city": arguments["city"]} if "city" in arguments else {}
        (_, got), _ = parse(list(xml(**strings)), XML)
        assert json.loads(got.text) == strings
