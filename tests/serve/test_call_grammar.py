"""The grammar of calls takes what the models write and the reader reads, and nothing else."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies

from dflash_jax.engine.grammars import Grammar, GrammarVocabulary
from dflash_jax.errors import InputError
from dflash_jax.serve.call_grammar import call_grammar
from dflash_jax.serve.call_reader import Syntax
from dflash_jax.serve.reply_parser import ReplyParser, Start
from tests.serve import templates
from tests.serve.test_reply_parser import HERMES, XML, hermes, xml

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["C", "F"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}},
}
FUNCTIONS = {
    "weather": WEATHER,
    "weather_now": {},
    "ünits": {"properties": {"größe": {"type": "null"}}},
}
STOP = 256


def matches(
    text: str, syntax: Syntax, tags=templates.TAGS, special=False, several=True, **settings
) -> bool:
    tokenizer = templates.tokenizer(templates.PLAIN, tags, special)
    written = call_grammar(syntax, FUNCTIONS, tokenizer, several=several, **settings)
    matcher = Grammar(written, GrammarVocabulary(tokenizer, [STOP])).matcher()
    assert not matcher.get_grammar_warnings()
    tokens = [*tokenizer.encode(text), STOP]
    return matcher.validate_tokens(tokens) == len(tokens)


ROME = '{"city": "Rome", "days": 2, "unit": "C", "place": {"x": 1.5}}'
ONE = {
    HERMES: hermes(arguments=ROME),
    XML: xml(city="Rome", days="2", unit="C", place='{"x": 1.5}'),
}
GOOD = [
    (HERMES, ONE[HERMES]),
    (HERMES, f"{ONE[HERMES]}\n{hermes('weather_now', '{}')}"),
    (HERMES, hermes("ünits", '{"größe": null}')),
    (HERMES, hermes("weather_now", '{"any": [1, {"b": "</tool>"}]}')),
    (XML, ONE[XML]),
    (XML, f"{ONE[XML]}\n{xml('weather_now')}"),
    (XML, xml("ünits", größe="null")),
    (XML, xml(city="<a>\n\n")),
    (XML, xml(city="")),
]
BAD = [
    (HERMES, "Hello"),
    (HERMES, ""),
    (HERMES, f"Hello {ONE[HERMES]}"),
    (HERMES, hermes("nothing", ROME)),
    (HERMES, hermes(arguments="{}")),
    (HERMES, hermes(arguments='{"city": "Rome", "more": 1}')),
    (HERMES, hermes(arguments='{"city": "Constantinople"}')),
    (HERMES, hermes(arguments='{"city": "Rome", "days": 0}')),
    (HERMES, hermes(arguments='{"city": "Rome", "unit": "K"}')),
    (HERMES, hermes(arguments='{"city": "Rome", "place": {"x": "y"}}')),
    (HERMES, ONE[HERMES].removesuffix("</tool_call>")),
    (XML, xml()),
    (XML, xml("nothing", city="Rome")),
    (XML, xml(city="Constantinople")),
    (XML, xml(city="Rome", days="0")),
    (XML, xml(city="Rome", days="two")),
    (XML, xml(city="Rome", unit="K")),
    (XML, xml(city="Rome", place='{"x": "y"}')),
    (XML, xml(city="Rome", more="1")),
    (XML, xml(days="2", city="Rome")),  # the schema's order
    (XML, ONE[XML].removesuffix("</tool_call>")),
]


@pytest.mark.parametrize("tags", [templates.TAGS, ()])
@pytest.mark.parametrize(("syntax", "text"), GOOD)
def test_calls_match(syntax, text, tags):
    assert matches(text, syntax, tags)
    assert matches(f"\n\n{text}", syntax, tags, after_thinking=True)
    assert matches(text, syntax, tags, free_text=True)
    assert matches(f"I look: {text} So.", syntax, tags, free_text=True)


@pytest.mark.parametrize("tags", [templates.TAGS, ()])
@pytest.mark.parametrize(("syntax", "text"), BAD)
def test_what_is_no_call_does_not(syntax, text, tags):
    assert not matches(text, syntax, tags)
    if text.startswith("<tool_call>"):
        assert not matches(text, syntax, tags, free_text=True)
    else:
        assert matches(text, syntax, tags, free_text=True)


def test_tags_that_are_special_tokens():
    assert matches(ONE[HERMES], HERMES, special=True)
    assert not matches("Hello", HERMES, special=True)


@pytest.mark.parametrize("syntax", Syntax)
def test_one_call_or_several(syntax):
    two = f"{ONE[syntax]}\n{ONE[syntax]}"
    assert not matches(two, syntax, several=False)
    assert matches(ONE[syntax], syntax, several=False)
    assert not matches(f"so {two}", syntax, several=False, free_text=True)
    assert matches(f"so {ONE[syntax]}", syntax, several=False, free_text=True)
    assert matches("none", syntax, several=False, free_text=True)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, 'weather: a: "pattern"'),
        ({"anyOf": [{"type": "object"}]}, 'weather: "anyOf" cannot be enforced'),
        ({"properties": {"a>": {}}}, "cannot have a parameter 'a>'"),
    ],
)
def test_what_the_xml_form_cannot_enforce(schema, says):
    tokenizer = templates.tokenizer(templates.XML_THINKS)
    with pytest.raises(InputError) as raised:
        call_grammar(XML, {"weather": schema}, tokenizer, several=False)
    assert says in str(raised.value)


KEYWORDS = [
    *(
        "type",
        "properties",
        "required",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
    ),
    *("minLength", "maxLength", "pattern", "items", "a"),
]
values = strategies.recursive(
    strategies.sampled_from(
        [None, True, -1, 2, 0.5, "string", "object", "a", "#/$defs/a", "(", {}]
    ),
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(strategies.sampled_from(KEYWORDS), inner, max_size=3)
    ),
    max_leaves=8,
)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
    strategies.dictionaries(strategies.sampled_from(KEYWORDS), values, max_size=4),
    strategies.dictionaries(strategies.sampled_from(["a", "b"]), values, max_size=2),
    strategies.sampled_from(Syntax),
)
def test_odd_schemas_are_taken_or_refused(schema, properties, syntax):
    schema = {**schema, "type": "object", "properties": properties}
    tokenizer = templates.tokenizer(templates.PLAIN)
    said = ""
    try:
        text = call_grammar(syntax, {"weather": schema}, tokenizer, several=True)
        Grammar(text, GrammarVocabulary(tokenizer, [STOP]))
    except InputError as error:
        said = str(error)
    assert len(said) < 1000
    # And calls are read whatever the schema says of their types.
    parser = ReplyParser(Start.NEVER, syntax, {"weather": schema})
    written = hermes() if syntax is HERMES else xml(a="5", b="x")
    parser.push(written)
    assert parser.whole
    assert parser.calls == 1
