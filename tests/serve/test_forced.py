"""Forced calls and budgets with a real driver: a random model, whose replies are all forced."""

from __future__ import annotations

import json

import jsonschema
import pytest

from dflash_jax.engine import LoneDriver
from dflash_jax.engine.turns import Drivers
from dflash_jax.serve.service import ServedModel
from tests.decode import tiny
from tests.serve import templates, tiny_server

pytestmark = pytest.mark.slow  # for the decoder's compilation

QUESTION = {"role": "user", "content": "hi"}
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SCHEMAS = {
    "weather": PLACE,
    "clock": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
WEATHER = {"type": "function", "function": {"name": "weather"}}
BUDGET = 6
# As many tokens as the model has rows, in whole words of a mask (as SmolLM2's): no row is padding.
TAGS = (*templates.TAGS, *(f"<unused{k}>" for k in range(tiny.VOCABULARY - templates.KNOWN)))
# What tells the families apart; the functions themselves would fill the tiny model's context.
HERMES = '{{ tools | length if tools }} <tool_call>{"name": \n<|im_start|>assistant\n'
XML_THINKS = (
    "{{ tools | length if tools }} <tool_call><function=>\n<|im_start|>assistant\n<think>\n"
)


@pytest.fixture(scope="module")
def drivers() -> Drivers:
    decoder = tiny.make_decoder(vocab_size=tiny.VOCABULARY, widths=tiny_server.WIDTHS)
    return Drivers(
        LoneDriver(decoder, rule="renewal", cap=max(tiny_server.WIDTHS)),
        LoneDriver(decoder, rule="fixed:0"),
    )


@pytest.fixture(scope="module", params=[HERMES, XML_THINKS], ids=["hermes", "xml"])
def server(request, drivers):
    model = ServedModel(
        "tiny",
        templates.tokenizer(request.param, TAGS),
        tiny_server.STOP_TOKENS,
        tiny.VOCABULARY,
        tiny.CONTEXT_LIMIT,
        drivers,
    )
    with tiny_server.running(load=lambda say: model) as running:
        while running.http.get("/health").status_code != 200:
            pass
        running.thinks = request.param is XML_THINKS
        yield running


def ask(server, **settings):
    extra = {"thinking_budget": BUDGET} if server.thinks else {}
    extra |= settings.pop("extra_body", {})
    return server.openai.chat.completions.create(
        model="tiny",
        messages=[QUESTION],
        extra_body=extra,
        **{"tools": TOOLS, "max_tokens": 300, **settings},
    )


@pytest.mark.parametrize("settings", [{"temperature": 0}, *({"seed": seed} for seed in range(4))])
@pytest.mark.parametrize("choice", ["required", WEATHER], ids=["required", "named"])
def test_a_random_model_calls_when_it_must(server, settings, choice):
    reply = ask(server, tool_choice=choice, parallel_tool_calls=False, **settings)
    (got,) = reply.choices
    (call,) = got.message.tool_calls
    assert (got.finish_reason, got.message.content) == ("tool_calls", None)
    if choice is WEATHER:
        assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    plain = ask(
        server,
        tool_choice=choice,
        parallel_tool_calls=False,
        extra_body={"draft": False},
        **settings,
    ).choices[0]
    assert plain.token_sha256 == got.token_sha256
    assert plain.message.tool_calls[0].function == call.function
    chunks = list(
        ask(server, tool_choice=choice, parallel_tool_calls=False, stream=True, **settings)
    )
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == call.function.name
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].choices[0].token_sha256 == got.token_sha256


def test_several_calls_may_be_required(server):
    for seed in range(3):
        choice = ask(server, tool_choice="required", seed=seed).choices[0]
        assert choice.finish_reason in ("tool_calls", "length")
        assert choice.message.content is None
        calls = choice.message.tool_calls
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, SCHEMAS[call.function.name])


@pytest.mark.parametrize("server", [XML_THINKS], ids=["xml"], indirect=True)
def test_a_budget_ends_the_reasoning(server):
    closing = 2  # a line break and the tag, of "\n</think>\n\n"
    for budget in (0, 1, BUDGET):
        hashes = set()
        for draft in (True, False):
            extra = {"thinking_budget": budget, "draft": draft}
            reply = ask(server, tool_choice=WEATHER, seed=1, extra_body=extra)
            details = reply.usage.completion_tokens_details
            assert details.reasoning_tokens <= budget + closing
            assert reply.choices[0].message.tool_calls[0].function.name == "weather"
            hashes.add(reply.choices[0].token_sha256)
        assert len(hashes) == 1
    # Without tools: the answer is free.
    reply = ask(server, tools=None, seed=1, max_tokens=40, extra_body={"thinking_budget": 3})
    assert reply.usage.completion_tokens_details.reasoning_tokens <= 3 + closing


def test_a_strict_function_leaves_the_reply_free(server):
    strict = [{"type": "function", "function": {**TOOLS[1]["function"], "strict": True}}]
    for seed in range(3):
        hashes = {
            ask(server, tools=strict, seed=seed, max_tokens=40, extra_body={"draft": draft})
            .choices[0]
            .token_sha256
            for draft in (True, False)
        }
        assert len(hashes) == 1
