"""Penalties, biases, log-probabilities and grammars through OpenAI's client and plain HTTP."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest

from dflash_jax.decode.sampling import Sampling
from dflash_jax.engine import Rules
from dflash_jax.engine.grammars import Grammar, GrammarVocabulary, of_json_schema
from dflash_jax.serve.text import ReplyText
from tests.decode import tiny
from tests.serve import tiny_server

MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = "hello wo"
SAMPLED = {"temperature": 1.0, "seed": 5}
SAMPLING = Sampling(1.0, seed=5)
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


def encode(text: str = PROMPT) -> list[int]:
    return tiny_server.tokenizer().encode(text)


def grammar(text: str) -> Grammar:
    return Grammar(text, GrammarVocabulary(tiny_server.tokenizer(), tiny_server.STOP_TOKENS))


FIELDS = {
    "penalties": (
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
        lambda: Rules(1.5, -0.5, 1.2),
    ),
    "bias": (
        {"logit_bias": {"70": 5, "3": -100.0}},
        lambda: Rules(logit_bias=((70, 5.0), (3, -100.0))),
    ),
    "schema": (
        {"response_format": FORMAT, "repetition_penalty": 1.5},
        lambda: Rules(repetition_penalty=1.5, grammar=grammar(of_json_schema(SCHEMA))),
    ),
    "least": (
        {"min_tokens": 20, "logit_bias": {"256": 100}},
        lambda: Rules(min_tokens=20, logit_bias=((256, 100.0),)),
    ),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("draft", [True, False])
def test_fields_reach_the_engine(server, name, draft):
    fields, rules = FIELDS[name]
    for sampled, sampling in (({"temperature": 0}, Sampling()), (SAMPLED, SAMPLING)):
        text, reason, sha = tiny_server.alone(encode(), sampling, 40, rules=rules())
        body = {"prompt": PROMPT, "max_tokens": 40, "draft": draft, **sampled, **fields}
        choice = server.post(COMPLETE, **body).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, reason)
        assert choice["token_sha256"] == sha


# Log-probabilities -------------------------------------------------------------------------


def wanted_logprobs(prompt: list[int], reply: list[int]) -> np.ndarray:
    """[len(reply), known ids], by a forward of everything."""
    logits = tiny.reference_logits([*prompt, *reply])[len(prompt) - 1 : -1, : tiny_server.KNOWN]
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def ids_of(entries) -> list[int]:
    vocabulary = grammar(of_json_schema(SCHEMA)).vocabulary.tokens
    by_bytes = {vocabulary.decode_bytes([token]): token for token in range(tiny_server.KNOWN)}
    return [by_bytes[bytes(entry.bytes)] for entry in entries]


@pytest.mark.parametrize("stream", [True, False])
def test_a_chats_logprobs_are_the_models_own(server, stream):
    """Before penalties, bias and temperature."""
    asked = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 3,
        "presence_penalty": 1.0,
        "temperature": 0.7,
        "seed": 5,
    }
    reply = server.openai.chat.completions.create(**asked, stream=stream)
    entries, count = [], 12
    if stream:
        for chunk in reply:
            found = chunk.choices[0].logprobs
            entries += found.content if found else []
    else:
        entries, count = reply.choices[0].logprobs.content, reply.usage.completion_tokens
    assert len(entries) == count
    tokens = ids_of(entries)
    wanted = wanted_logprobs(tiny_server.tokenizer().encode_chat(MESSAGES), tokens)
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(wanted[row, tokens[row]], abs=1e-3)
        likeliest = np.sort(wanted[row])[::-1][:3]
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(likeliest, abs=1e-3)
        assert [wanted[row, one] for one in ids_of(entry.top_logprobs)] == pytest.approx(
            likeliest, abs=1e-3
        )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("top", [0, 2])
def test_a_completions_logprobs_are_in_the_old_layout(server, stream, top):
    reply = server.openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=10, logprobs=top, stream=stream, **SAMPLED
    )
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens, logprobs, tops, offsets = (
        [one for part in parts for one in getattr(part, field)]
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert len(tokens) == len(logprobs) == len(tops) == len(offsets) == 10
    for token, logprob, likeliest in zip(tokens, logprobs, tops, strict=True):
        assert likeliest[token] == logprob
        assert top <= len(likeliest) <= top + 1
    text = "".join(choice.text for choice in choices)
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if token.isascii() and not token.startswith(("bytes:", "<|")):
            # A broken character before it comes with it.
            assert text[offset:].lstrip("\ufffd").startswith(token)


def test_logprobs_are_null_unless_asked_for(server):
    reply = server.post(CHAT, messages=MESSAGES, max_tokens=2, logprobs=False).json()
    assert reply["choices"][0]["logprobs"] is None
    reply = server.post(CHAT, messages=MESSAGES, max_tokens=2, logprobs=True).json()
    assert [one["top_logprobs"] for one in reply["choices"][0]["logprobs"]["content"]] == [[], []]


def test_logprobs_change_no_token(server):
    body = {"prompt": PROMPT, "max_tokens": 16, **SAMPLED}
    plain, with_them = (
        server.post(COMPLETE, **body, **more).json()["choices"][0] for more in ({}, {"logprobs": 5})
    )
    assert plain["token_sha256"] == with_them["token_sha256"]


# Grammars ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_schemas_reply_is_valid(server, seed):
    reply = server.openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format=FORMAT,
        seed=seed,
        max_tokens=150,
        logit_bias={str(encode(space)[0]): -100 for space in " \n\t\r"},
    )
    assert reply.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)


def test_a_json_object_is_one(server):
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "seed": 1}
    bias = {str(token): 4 for token in encode('{"}:,')} | {str(encode(" ")[0]): -100}
    choice = server.post(CHAT, **body, max_tokens=300, logit_bias=bias).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no, never"]}, "yes|no, never"),
        ({"grammar": 'start: "a" b\nb: "x" | "y"'}, "a[xy]"),
        ({"grammar": 'root ::= "a" [0-9]'}, "a[0-9]"),
        ({"json": {"enum": [1, "two"]}}, '1|"two"'),
    ],
)
def test_structured_outputs(server, wanted, pattern):
    body = {"prompt": PROMPT, "structured_outputs": wanted, "max_tokens": 30, **SAMPLED}
    reply = server.post(COMPLETE, **body)
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["text"])


# Ends --------------------------------------------------------------------------------------


def test_stop_tokens_of_a_request_and_ignoring_the_checkpoints(server):
    body = {"prompt": PROMPT, "max_tokens": 12, "logit_bias": {"256": 100}}
    assert server.post(COMPLETE, **body).json()["usage"]["completion_tokens"] == 1
    ignored = server.post(COMPLETE, **body, ignore_eos=True).json()
    assert ignored["usage"]["completion_tokens"] == 12
    assert ignored["choices"][0]["finish_reason"] == "length"
    stopped = server.post(COMPLETE, **body, ignore_eos=True, stop_token_ids=[256]).json()
    assert stopped["usage"]["completion_tokens"] == 1
    assert stopped["choices"][0]["finish_reason"] == "stop"
    # The bias wants the stop token again once it may.
    least = server.post(COMPLETE, **body, min_tokens=7).json()
    assert least["usage"]["completion_tokens"] == 8


def test_a_stop_string_is_none_before_the_least_tokens():
    text = ReplyText(tiny_server.tokenizer(), ("b",), min_tokens=2)
    pieces = [text.push(token) for token in encode("abcabc")]
    assert "".join(pieces) + text.finish() == "abca"
    assert text.stopped


REFUSED = {
    "penalty": (COMPLETE, {"presence_penalty": 2.5}, "presence_penalty"),
    "no number": (COMPLETE, {"frequency_penalty": "1"}, "frequency_penalty"),
    "repetition": (COMPLETE, {"repetition_penalty": 0}, "repetition_penalty"),
    "bias": (COMPLETE, {"logit_bias": {"5": 101}}, "logit_bias"),
    "bias of a text": (COMPLETE, {"logit_bias": {"five": 1}}, "logit_bias"),
    "bias beyond": (COMPLETE, {"logit_bias": {"999": 1}}, "logit_bias"),
    "stop beyond": (COMPLETE, {"stop_token_ids": [999]}, "stop_token_ids"),
    "least above most": (COMPLETE, {"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    "six logprobs": (COMPLETE, {"logprobs": 6}, "logprobs"),
    "21 logprobs": (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top alone": (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    "format": (CHAT, {"response_format": {"type": "yaml"}}, "response_format"),
    "no schema": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
    ),
    "bad schema": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
        "response_format",
    ),
    "impossible schema": (
        COMPLETE,
        {"structured_outputs": {"json": {"type": "integer", "minimum": 3, "maximum": 2}}},
        "structured_outputs",
    ),
    "bad regex": (COMPLETE, {"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    "bad grammar": (
        COMPLETE,
        {"structured_outputs": {"grammar": "start: x"}},
        "structured_outputs",
    ),
    "two kinds": (
        COMPLETE,
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs",
    ),
    "two formats": (
        COMPLETE,
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    "no end": (COMPLETE, {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    "tools too": (
        CHAT,
        {
            "response_format": {"type": "json_object"},
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        "response_format",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_field(server, name):
    path, fields, said = REFUSED[name]
    prompt = {"prompt": "x"} if path == COMPLETE else {"messages": MESSAGES}
    reply = server.post(path, **{"max_tokens": 3, **prompt, **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert said in error["message"]
    assert "\n" not in error["message"]
    assert server.post(path, **prompt, max_tokens=1).status_code == 200
