"""A prompt that is known in part gives the bits of one that is read from its first token."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from dflash_jax.decode.chunk_copies import ChunkCopies, compile_copies
from dflash_jax.decode.executables import CompileCounter
from dflash_jax.decode.sampling import GREEDY, Sampling
from dflash_jax.engine import Decoder, LoneDriver, Request
from dflash_jax.engine import turns as turns_module
from dflash_jax.engine.prompt_cache import PromptCache
from tests.decode import tiny
from tests.engine import test_hybrid as hybrid

CHUNK = tiny.CHUNK
BASES = {"llama": tiny.decoder, "hybrid": hybrid.decoder}
SAMPLINGS = {"greedy": GREEDY, "sampled": Sampling(1.0, top_k=40, top_p=0.95, seed=3)}
RULES = ("fixed:0", "fixed:7", "renewal")
LARGE = 2**30


@functools.cache
def copies(name: str) -> ChunkCopies:
    return compile_copies(BASES[name]().spec, lambda line: None)


def decoder_of(name: str, capacity: int) -> Decoder:
    """Buffers and a prompt cache (none of 0 bytes) of its own."""
    base = BASES[name]()
    cache = PromptCache(copies(name), CHUNK, capacity) if capacity else None
    return dataclasses.replace(base, buffers=tiny.new_buffers(base.spec), prompt_cache=cache)


def cached(driver: LoneDriver, prompt) -> int:
    """Tokens that were known of a prompt; it is read."""
    with driver.stream(Request(tuple(prompt), max_tokens=1)) as stream:
        return next(stream.rounds()).cached_tokens


def after_prompt(driver: LoneDriver, request: Request) -> dict[str, Any]:
    """Behind a prompt: the reply's first token, the proposals, committed rows, states."""
    with driver.stream(request) as stream:
        first = next(stream.rounds())
    buffers, size = driver.decoder.buffers, len(request.prompt)
    kept = {
        "first": first.tokens,
        "length": buffers.state.length,
        "target": [rows[:, :, :size] for rows in buffers.state.cache],
        "states": buffers.state.states,
    }
    if not driver.plain:
        kept["drafter"] = [rows[:, :, :size] for rows in buffers.drafter_cache]
        kept["proposals"] = stream.proposals
    return jax.device_get(kept)


def same(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(tiny.same_bits(x, y) for x, y in pairs)


def prompts() -> list[tuple[int, ...]]:
    """A chat that goes on, one that begins alike, a foreign one, whole chunks, a short one."""
    first = tiny.prompt_of(100)
    other = (*first[:70], *tiny.prompt_of(60, seed=1))
    goes_on = (*first, *tiny.prompt_of(90, seed=2))
    return [
        first,
        other,
        goes_on,
        tiny.prompt_of(150, seed=3),
        first,
        other,
        goes_on,
        first[: 3 * CHUNK],
        first[: 2 * CHUNK + 1],
        first[:5],
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BASES)
def test_a_hit_changes_no_bit_of_state_and_reply(name, rule, sampling):
    with_cache = LoneDriver(decoder_of(name, LARGE), rule=rule)
    without = LoneDriver(decoder_of(name, 0), rule=rule)
    hits = 0
    for prompt in prompts():
        request = Request(prompt, SAMPLINGS[sampling], 12)
        assert same(after_prompt(with_cache, request), after_prompt(without, request))
        tokens, reason, records = tiny.decode(with_cache, request)
        assert (tokens, reason) == tiny.decode(without, request)[:2]
        hits += records[0].cached_tokens > 0
    assert hits == len(prompts()) - 1  # all but the last, of less than a chunk


@pytest.mark.parametrize("name", BASES)
def test_plain_and_drafted_streams_share_what_they_keep(name):
    decoder = decoder_of(name, LARGE)
    drafted, plain = (LoneDriver(decoder, rule=rule) for rule in ("fixed:7", "fixed:0"))
    alone = LoneDriver(decoder_of(name, 0), rule="fixed:7")
    request = Request(tiny.prompt_of(120), GREEDY, 20)
    tokens = tiny.decode(plain, request)[0]
    assert same(after_prompt(drafted, request), after_prompt(alone, request))
    assert cached(plain, request.prompt) == 3 * CHUNK
    assert tiny.decode(drafted, request)[0] == tiny.decode(plain, request)[0] == tokens


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7])
@pytest.mark.parametrize("name", BASES)
def test_all_whole_chunks_are_known_but_the_last_token_is_read(name, size):
    driver = LoneDriver(decoder_of(name, LARGE), rule="fixed:7")
    assert cached(driver, tiny.prompt_of(size)) == 0
    assert cached(driver, tiny.prompt_of(size)) == (size - 1) // CHUNK * CHUNK


def test_a_hybrids_states_are_kept_where_prompts_part():
    driver = LoneDriver(decoder_of("hybrid", LARGE), rule="fixed:0")
    first = tiny.prompt_of(150)
    others = [(*first[:70], *tiny.prompt_of(60, seed=seed)) for seed in (1, 2)]
    assert cached(driver, first) == 0
    assert cached(driver, others[0]) == 0  # its rows are known up to 64, no state stands there
    assert cached(driver, others[1]) == 64
    assert cached(driver, others[0]) == 128
    assert cached(driver, (*first, 1, 2, 3)) == 128


def test_nothing_compiles_after_the_start():
    driver = LoneDriver(decoder_of("hybrid", LARGE), rule="fixed:7")
    request = Request(tiny.prompt_of(150), GREEDY, 4)
    tiny.decode(LoneDriver(decoder_of("hybrid", 0), rule="fixed:7"), request)
    counter = CompileCounter()
    tiny.decode(driver, request)
    assert tiny.decode(driver, request)[2][0].cached_tokens
    assert counter.count == 0


@pytest.mark.parametrize("name", BASES)
def test_an_interrupted_prompt_leaves_the_chunks_that_were_read(name):
    driver = LoneDriver(decoder_of(name, LARGE), rule="fixed:7")
    request = Request(tiny.prompt_of(200), GREEDY, 12)
    asked = iter([False, False, False, True])
    with driver.stream(request) as stream:
        assert list(stream.rounds(lambda: next(asked))) == []
    tokens, _, records = tiny.decode(driver, request)
    # A hybrid's state would have stood at the prompt's end.
    assert records[0].cached_tokens == (0 if name == "hybrid" else 3 * CHUNK)
    assert tokens == tiny.decode(LoneDriver(decoder_of(name, 0), rule="fixed:7"), request)[0]


def test_what_decoding_commits_has_other_bits_than_a_prompt():
    """Why a reply's rows are not kept: should this fail one day, they may be."""
    driver = LoneDriver(decoder_of("llama", 0), rule="fixed:0")
    prompt = tiny.prompt_of(CHUNK)
    tokens, _, _ = tiny.decode(driver, Request(prompt, GREEDY, CHUNK + 1))
    both = slice(CHUNK, 2 * CHUNK)
    decoded = np.asarray(driver.decoder.buffers.state.cache.k)[:, :, both]
    cached(driver, (*prompt, *tokens[:CHUNK]))
    read = np.asarray(driver.decoder.buffers.state.cache.k)[:, :, both]
    np.testing.assert_allclose(decoded, read, rtol=1e-3, atol=1e-3)
    assert not tiny.same_bits(decoded, read)


# Memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BASES)
def test_the_longest_unused_is_dropped_within_the_limit(name):
    sizes = copies(name)
    capacity = 10 * sizes.rows_bytes + 3 * sizes.states_bytes
    decoder = decoder_of(name, capacity)
    driver = LoneDriver(decoder, rule="fixed:7")
    first, second, third = (tiny.prompt_of(4 * CHUNK + 1, seed=seed) for seed in range(3))
    for prompt in (first, second, first, third):
        cached(driver, prompt)
        assert 0 < decoder.prompt_cache.bytes <= capacity
    assert cached(driver, first) == cached(driver, third) == 4 * CHUNK
    assert cached(driver, second) < 4 * CHUNK


@pytest.mark.parametrize("name", BASES)
def test_of_a_prompt_that_does_not_fit_the_beginning_is_kept(name):
    sizes = copies(name)
    decoder = decoder_of(name, 3 * sizes.rows_bytes + sizes.states_bytes)
    driver = LoneDriver(decoder, rule="fixed:7")
    prompt = tiny.prompt_of(200)
    assert [cached(driver, prompt) for _ in range(3)] == [0, 3 * CHUNK, 3 * CHUNK]


def test_a_limit_below_a_chunk_is_said_and_keeps_nothing():
    said = []
    base = BASES["llama"]()
    cache = PromptCache(copies("llama"), CHUNK, 10, said.append)
    decoder = dataclasses.replace(base, buffers=tiny.new_buffers(), prompt_cache=cache)
    assert "give it 1 MiB" in said[0]
    driver = LoneDriver(decoder, rule="fixed:7")
    assert [cached(driver, tiny.prompt_of(100)) for _ in range(2)] == [0, 0]
    assert cache.bytes == 0


def test_a_failed_stream_leaves_nothing_in_the_cache():
    decoder = decoder_of("llama", LARGE)
    driver = LoneDriver(decoder, rule="fixed:7")
    cached(driver, tiny.prompt_of(100))
    turns_module._renew_buffers(decoder)
    assert (decoder.prompt_cache.bytes, cached(driver, tiny.prompt_of(100))) == (0, 0)


class FakeCopies:
    """Of buffers that are the tokens read so far; states too, if there are any."""

    rows_bytes = 2

    def __init__(self, recurrent: bool) -> None:
        self.states_bytes = 5 if recurrent else 0
        self.copy_states = (lambda states: states) if recurrent else None

    def save_rows(self, cache, drafter_cache, start):
        return cache[int(start) : int(start) + 2]

    def load_rows(self, caches, rows, start):
        assert len(caches[0]) == int(start)
        return (caches[0] + rows, None)


class FakeState:
    def __init__(self, cache=(), states=(), length=0) -> None:
        self.cache, self.states, self.length = cache, states, int(length)

    def _replace(self, **fields):
        return FakeState(**({"cache": self.cache, "states": self.states} | fields))


@hypothesis.given(
    recurrent=st.booleans(),
    capacity=st.integers(0, 60),
    texts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=25),
)
def test_whatever_comes_the_limit_holds_and_hits_are_right(recurrent, capacity, texts):
    """Against a cache of lists: two tokens a chunk; a state is the tokens themselves."""
    cache = PromptCache(FakeCopies(recurrent), 2, capacity)
    for text in texts:
        reading = cache.read(np.array(text, np.int32))
        assert reading.tokens < len(text)
        state, _ = reading.load(FakeState(), None)
        assert state.cache == tuple(text[: reading.tokens])
        assert state.length == reading.tokens
        assert state.states == (state.cache if recurrent and reading.tokens else ())
        for begin in range(reading.tokens, len(text), 2):
            read = tuple(text[: begin + 2])
            reading.save(begin, FakeState(read, read if recurrent else ()), None)
            assert cache.bytes <= capacity
        again = cache.read(np.array(text, np.int32)).tokens
        room = (capacity - cache.copies.states_bytes) // 2
        assert again == 2 * max(0, min((len(text) - 1) // 2, room))
