"""Rules at one context: going back to the prompt changes no token; the interval is paired."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_jax.bench import contexts
from dflash_jax.decode.sampling import GREEDY, Sampling
from dflash_jax.engine import LoneDriver, Request
from dflash_jax.errors import InputError
from tests.decode import tiny


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
def test_a_rewound_stream_gives_the_tokens_of_a_whole_one(sampling):
    decoder = tiny.decoder()
    request = Request(tiny.prompt_of(50), sampling, 30)
    drivers = {rule: LoneDriver(decoder, rule=rule) for rule in ("renewal", "fixed:0", "fixed:15")}
    whole = tiny.decode(drivers["renewal"], request)[0]
    prefilled = contexts.prefill(drivers["renewal"], request)
    for rule in ("fixed:15", "fixed:0", "renewal", "fixed:15"):
        with contexts.rewound(drivers[rule], request, prefilled) as stream:
            records = list(stream.rounds())
        assert stream.tokens == whole
        assert {record.width for record in records[1:]} == {0} or rule != "fixed:0"


class Words:
    """A tokenizer of which a word is a token."""

    def encode_chat(self, messages):
        return [1, *range(2, 2 + len(messages[0]["content"].split())), *[0] * contexts.TAIL]


@pytest.mark.parametrize("size", [30, 100, 1001])
def test_a_prompt_has_the_wanted_length_and_the_templates_end(size):
    texts = ["one two three", "four five", "six"]
    prompt = contexts.prompt_of_length(Words(), texts, size, start=1)
    assert len(prompt) == size
    assert prompt[-contexts.TAIL :] == [0] * contexts.TAIL


def test_a_prompt_shorter_than_the_template_is_refused():
    with pytest.raises(InputError, match="a context of 20 tokens"):
        contexts.prompt_of_length(Words(), ["one"], 20, start=0)


def test_the_interval_is_paired():
    rng = np.random.default_rng(0)
    seconds = rng.uniform(1, 9, 12)  # replies differ much, the rules little
    best = np.stack([np.full(12, 100.0), seconds], axis=1)
    auto = np.stack([np.full(12, 100.0), seconds * 0.98], axis=1)
    ratio, low, high = contexts.interval(auto, best)
    assert ratio == pytest.approx(1 / 0.98)
    assert high - low < 1e-9
    noisy = auto * [1, 1] * rng.uniform(0.97, 1.03, (12, 1)) ** np.array([[0, 1]])
    _, low, high = contexts.interval(noisy, best)
    assert low < 1 / 0.98 < high
