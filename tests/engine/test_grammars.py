"""Grammars over a checkpoint's own tokens."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.decode import rules
from dflash_jax.engine import Request, grammars
from dflash_jax.engine.grammars import (
    Grammar,
    GrammarVocabulary,
    of_choices,
    of_grammar,
    of_json_schema,
    of_regex,
)
from dflash_jax.engine.reply_rules import ReplyRules
from dflash_jax.engine.rules import Rules, Thinking
from dflash_jax.errors import InputError
from dflash_jax.tree.growth import EMPTY
from tests import tiny_llama

STOPS = frozenset({256, 258})
SIZE = 264


def vocabulary(stops=STOPS) -> GrammarVocabulary:
    tokenizer = Tokenizer(
        tiny_llama.byte_tokenizer(), SIZE, None, 256, frozenset({256, 257, 258}), None
    )
    return GrammarVocabulary(tokenizer, stops)


def allowed(matcher) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_matcher_allows_the_checkpoints_tokens_and_all_stops_at_the_end():
    grammar = Grammar(of_regex("ab?"), vocabulary())
    matcher, ids = grammar.matcher(), tiny_llama.byte_tokenizer().encode("ab").ids
    assert allowed(matcher) == {ids[0]}
    matcher.consume_token(ids[0])
    assert allowed(matcher) == {ids[1], *STOPS}
    assert allowed(grammar.matcher()) == {ids[0]}  # each stream has its own


@pytest.mark.parametrize("chosen", ["yes", 'a "quoted"\n\tone\\', "😀\u0001ü", "yes, but"])
def test_choices_are_texts_as_they_are(chosen):
    grammar = Grammar(
        of_choices(["yes", 'a "quoted"\n\tone\\', "😀\u0001ü", "yes, but"]), vocabulary()
    )
    matcher = grammar.matcher()
    assert matcher.consume_tokens(tiny_llama.byte_tokenizer().encode(chosen).ids)
    assert matcher.is_accepting()
    assert not grammar.matcher().try_consume_tokens(tiny_llama.byte_tokenizer().encode("no").ids)


@pytest.mark.parametrize("text", ['start: "a" | "b"', 'root ::= "a" | [b-c]'])
def test_grammars_are_lark_or_gbnf(text):
    matcher = Grammar(of_grammar(text), vocabulary()).matcher()
    assert matcher.consume_tokens(tiny_llama.byte_tokenizer().encode("b").ids)
    assert matcher.is_accepting()


def test_a_schema_nested_too_deeply_is_one_line():
    schema: dict = {}
    for _ in range(900):
        schema = {"items": schema}
    with pytest.raises(InputError, match="JSON schema: recursion"):
        of_json_schema(schema)


def test_limits_on_a_drafted_path_refuse_nothing_until_it_is_the_reply(monkeypatch):
    """Plain decoding may never go there: then the tokens must be the same, drafted or not."""
    few = functools.partial(grammars.LLParserLimits, max_items_in_row=10)
    monkeypatch.setattr(grammars, "LLParserLimits", few)
    grammar = Grammar('start: "n" /[a-z]+/ | "x" a\na: a a | "x" | "y"', vocabulary())
    neutral = {rows: rules.neutral(rows, SIZE) for rows in (2, 4)}
    request = Request((1,), stop_token_ids=STOPS, rules=Rules(grammar=grammar))
    n, x, y = (tiny_llama.byte_tokenizer().encode(text).ids[0] for text in "nxy")
    ids = np.array([n, x, y])

    def follow(reply: ReplyRules, path: tuple[int, ...]) -> list[bool]:
        return reply.permits(path, ids).tolist()

    reply = ReplyRules(request, SIZE, neutral)
    before = reply.of_window(EMPTY, 0, 2).allowed
    assert follow(reply, (x, x)) == [False, True, True]
    depth = next(depth for depth in range(2, 20) if not any(follow(reply, (x,) * depth)))
    assert follow(reply, (n,)) == [True, True, True]  # what failed is left behind
    np.testing.assert_array_equal(reply.of_window(EMPTY, 0, 2).allowed, before)
    assert not reply.commit(n)
    assert follow(reply, (x, y)) == [True, True, True]

    reply = ReplyRules(request, SIZE, neutral)
    assert not any(follow(reply, (x,) * depth))
    assert not any(reply.commit(x) for _ in range(depth - 1))
    with pytest.raises(InputError, match="too complex"):
        reply.commit(x)


def test_a_checkpoint_without_stop_tokens_ends_with_no_text():
    matcher = Grammar(of_regex("a"), vocabulary(frozenset())).matcher()
    matcher.consume_token(tiny_llama.byte_tokenizer().encode("a").ids[0])
    assert allowed(matcher) == {256}  # a control token
    assert matcher.is_stopped()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (of_regex("(ab"), "unclosed group"),
        (of_regex(r"[^\s\S]"), "no text matches"),
        (of_choices([""]), "no text but the empty one matches"),
        ("start: ", "no text but the empty one matches"),
        (of_json_schema({"type": "foo"}), "Invalid type: foo"),
        ("start: foo", "unknown name"),
        ("", "Empty grammar"),
        ("{}", "grammar: "),
    ],
)
def test_a_grammar_that_is_malformed_or_matches_nothing_is_one_line(text, said):
    with pytest.raises(InputError, match=said) as caught:
        Grammar(text, vocabulary())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": ((5, 101.0),)}, "logit_bias 5"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias -1"),
        ({"min_tokens": -1}, "min_tokens"),
    ],
)
def test_rules_out_of_range_are_refused_by_name(fields, said):
    with pytest.raises(InputError, match=said):
        Rules(**fields)


def test_a_thinking_budget_needs_its_closing():
    with pytest.raises(InputError, match="closing"):
        Thinking(end=7, budget=3)
    with pytest.raises(InputError, match="budget -1"):
        Thinking(end=7, budget=-1, closing=(7,))
