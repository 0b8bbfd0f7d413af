"""Rules give plain decoding's tokens at every width, and those of a plain Python loop."""

from __future__ import annotations

import functools
import json
from collections import Counter

import jsonschema
import numpy as np
import pytest

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.decode.executables import CompileCounter
from dflash_jax.decode.sampling import GREEDY, Sampling
from dflash_jax.engine import LoneDriver, Request, Rules, Thinking, token_sha256
from dflash_jax.engine.grammars import Grammar, GrammarVocabulary, of_json_schema, of_regex
from dflash_jax.engine.lone import LENGTH, STOP
from tests import tiny_llama
from tests.decode import tiny

STOPS = frozenset({256, 258})
THINK, END_THINK = 300, 301  # tokens that carry no text
CLOSING = (10, END_THINK, 11)
SIZE, MOST = 40, 64
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "size", "tags"],
    "additionalProperties": False,
}
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": Sampling(1.0, seed=11),
    "filtered": Sampling(0.8, top_k=40, top_p=0.95, min_p=0.001, seed=2**40 + 3),
}
DRAFTING = [*(f"fixed:{width}" for width in tiny.WIDTHS), "renewal"]


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_llama.byte_tokenizer(), 264, None, 256, frozenset({256, 257, 258}), None)


@functools.cache
def grammar(text: str) -> Grammar:
    return Grammar(text, GrammarVocabulary(tokenizer(), STOPS))


PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
JSON = of_json_schema(SCHEMA)
BYTES = tiny_llama.byte_tokenizer().get_vocab()
NO_SPACE = tuple((BYTES[token], -100.0) for token in ("Ġ", "Ċ", "ĉ", "č"))  # else it indents on
WORDS = of_regex("([a-f]{2,4}[ .]){3,9}")
BUDGET = Thinking(end=END_THINK, budget=9, closing=CLOSING)


def the_rules(name: str) -> Rules:
    return {
        "presence": lambda: Rules(presence_penalty=2.0),
        "frequency": lambda: Rules(frequency_penalty=-0.4),
        "repetition": lambda: Rules(repetition_penalty=1.4),
        "bias": lambda: Rules(logit_bias=((3, 6.0), (77, -100.0), (309, 4.5))),
        "min_tokens": lambda: Rules(min_tokens=30, logit_bias=((256, 100.0),)),
        "logprobs": lambda: Rules(logprobs=True),
        "json": lambda: Rules(grammar=grammar(JSON), logit_bias=NO_SPACE),
        "regex": lambda: Rules(grammar=grammar(WORDS)),
        "budget": lambda: Rules(thinking=BUDGET),
        "thinks, then json": lambda: Rules(
            grammar=grammar(JSON),
            thinking=Thinking(end=END_THINK, begin=THINK, budget=5, closing=CLOSING),
            logit_bias=((THINK, 100.0), *NO_SPACE),
        ),
        "all": lambda: Rules(
            **PENALTIES,
            logit_bias=((BYTES["a"], 2.0), (BYTES["7"], 3.0), *NO_SPACE),
            min_tokens=50,
            grammar=grammar(JSON),
            thinking=BUDGET,
            logprobs=True,
        ),
    }[name]()


NAMES = (
    "presence",
    "frequency",
    "repetition",
    "bias",
    "min_tokens",
    "logprobs",
    "json",
    "regex",
    "budget",
    "thinks, then json",
    "all",
)


def request(name: str, sampling: str) -> Request:
    stops = frozenset() if name in ("presence", "frequency", "repetition") else STOPS
    return Request(tiny.prompt_of(SIZE), SAMPLINGS[sampling], MOST, stops, the_rules(name))


@functools.cache
def plain(name: str, sampling: str):
    """(tokens, finish reason, records) of plain decoding."""
    return tiny.decode(LoneDriver(tiny.decoder(), rule="fixed:0"), request(name, sampling))


# The reference: everything anew for each token ----------------------------------------------


def part_of(rules: Rules, reply: list[int]) -> tuple[str, list[int]]:
    """("thinking", tokens thought), ("closing", tokens closed) or ("answer", its tokens)."""
    thinking = rules.thinking
    if thinking is None:
        return "answer", reply
    if thinking.begin is not None:
        if not reply:
            return "beginning", []
        if reply[0] != thinking.begin:
            return "answer", reply
        reply = reply[1:]
    thought = reply[: thinking.budget]
    if END_THINK in thought:
        return "answer", reply[thought.index(END_THINK) + 1 :]
    if len(reply) < thinking.budget:
        return "thinking", thought
    closed = reply[thinking.budget :]
    if len(closed) < len(CLOSING):
        return "closing", closed
    return "answer", closed[len(CLOSING) :]


def permitted(wanted: Request, reply: list[int]) -> set[int]:
    rules, everything = wanted.rules, set(range(tiny.KNOWN))
    part, tokens = part_of(rules, reply)
    if part == "closing" or (part == "thinking" and len(tokens) == rules.thinking.budget):
        return {CLOSING[len(tokens) if part == "closing" else 0]}
    allowed = everything
    if rules.grammar is not None:
        if part == "thinking":
            allowed = everything - STOPS
        else:
            matcher = rules.grammar.matcher()
            assert matcher.consume_tokens(tokens)
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())
            if part == "beginning":
                allowed |= {rules.thinking.begin}
    if len(reply) < rules.min_tokens:
        allowed = allowed - wanted.stop_token_ids or allowed
    return allowed


def changed(logits: np.ndarray, wanted: Request, reply: list[int]) -> np.ndarray:
    rules, counts = wanted.rules, Counter(reply)
    logits = logits.copy()
    for token in {*counts, *wanted.prompt}:
        if logits[token] > 0:
            logits[token] /= np.float32(rules.repetition_penalty)
        else:
            logits[token] *= np.float32(rules.repetition_penalty)
    for token, count in counts.items():
        logits[token] -= np.float32(count) * np.float32(rules.frequency_penalty)
        logits[token] -= np.float32(rules.presence_penalty)
    for token, bias in rules.logit_bias:
        logits[token] += np.float32(bias)
    forbidden = sorted(set(range(tiny.KNOWN)) - permitted(wanted, reply))
    logits[forbidden] = -np.inf
    return logits


def reference(wanted: Request) -> tuple[list[int], str]:
    reply: list[int] = []
    while len(reply) < wanted.max_tokens:
        logits = tiny.reference_logits([*wanted.prompt, *reply])[-1]
        position = len(wanted.prompt) + len(reply)
        logits = changed(logits, wanted, reply)
        reply.append(tiny.reference_pick(logits, position, wanted.sampling))
        if reply[-1] in wanted.stop_token_ids:
            return reply, STOP
        in_answer = part_of(wanted.rules, reply)[0] == "answer"
        if wanted.rules.grammar and in_answer and permitted(wanted, reply) <= STOPS:
            return reply, STOP
    return reply, LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_plain_tokens_equal_a_python_loop(name, sampling):
    tokens, reason, _ = plain(name, sampling)
    assert (tokens, reason) == reference(request(name, sampling))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_rules_change_the_reply(name, sampling):
    """Else the other tests would not see them."""
    free = Request(
        tiny.prompt_of(SIZE), SAMPLINGS[sampling], MOST, request(name, sampling).stop_token_ids
    )
    tokens = tiny.decode(LoneDriver(tiny.decoder(), rule="fixed:0"), free)[0]
    assert (plain(name, sampling)[0] == tokens) is (name == "logprobs")


@pytest.mark.slow
@pytest.mark.parametrize("rule", DRAFTING)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_width_gives_plain_decodings_tokens(rule, sampling):
    rounds = landed = 0
    for number, name in enumerate(NAMES):
        wanted = request(name, sampling)
        tokens, reason, plain_records = plain(name, sampling)
        # Beyond its end the drafter offers tokens that no grammar has.
        offered = tokens + [305] * 40
        decoder = tiny.knowing_decoder(wanted.prompt, offered, seed=number)
        got, why, records = tiny.decode(LoneDriver(decoder, rule=rule), wanted)
        assert token_sha256(got) == token_sha256(tokens), name
        assert why == reason, name
        rounds += len(records) - 1
        landed += sum(int(record.landed.sum()) for record in records)
        if wanted.rules.logprobs:
            for field in ("chosen", "top_ids", "top"):
                pieces = [getattr(record.logprobs, field) for record in records]
                whole = [getattr(record.logprobs, field) for record in plain_records]
                assert tiny.same_bits(np.concatenate(pieces), np.concatenate(whole)), field
        else:
            assert all(record.logprobs is None for record in records)
    width = int(rule[6:]) if rule.startswith("fixed") else 15
    assert landed > (100 if width >= 4 else 0 if width else -1)
    assert rounds > 40  # of all rules together


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_a_grammar_gives_is_valid(sampling):
    for name in ("json", "thinks, then json"):
        tokens, reason, _ = plain(name, sampling)
        assert reason == STOP
        if END_THINK in tokens:
            tokens = tokens[tokens.index(END_THINK) + 2 :]
        jsonschema.validate(json.loads(tokenizer().decode(tokens)), SCHEMA)


def test_new_rules_compile_nothing():
    driver = LoneDriver(tiny.decoder(), rule="fixed:3")
    tiny.decode(driver, Request(tiny.prompt_of(20), GREEDY, 8, STOPS, the_rules("all")))
    counter = CompileCounter()
    for name in NAMES:
        tiny.decode(driver, Request(tiny.prompt_of(20), GREEDY, 8, STOPS, the_rules(name)))
    assert counter.count == 0
