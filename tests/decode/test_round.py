"""A verified window against a plain Python loop and against feeding its tokens one by one."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decode.noise import gumbel, split_seed
from dflash_jax.decode.programs import HEAD_ROWS, NO_TOKEN, accepted
from dflash_jax.decode.sampling import GREEDY, Sampling
from dflash_jax.tree.growth import EMPTY, NO_PARENT, own_log_chances
from dflash_jax.tree.lattice import Lattice, Proposals
from dflash_jax.tree.masks import DEPTH, MAX_ROWS, PATH, TOKEN, window_array
from tests.decode import tiny
from tests.tree.test_masks import random_tree, root_path

SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": Sampling(1.0, top_k=50, top_p=0.95, min_p=0.001, seed=5),
}
SIZES = (1, 30, tiny.CHUNK + 15, 120)  # the window crosses the edge of a chunk in the middle two
SERIAL = 20  # tokens fed one by one


class Serial(NamedTuple):
    """Plain decoding of SERIAL tokens; NumPy."""

    tokens: list[int]
    logits: np.ndarray  # [SERIAL]
    taps: np.ndarray  # [SERIAL, taps * D]
    k: np.ndarray  # [L, K, S, H] after all of it
    v: np.ndarray
    anchor: int  # the token after the prompt


@functools.cache
def serial(size: int, name: str) -> Serial:
    sampling = SAMPLINGS[name]
    state = tiny.prefilled(tiny.prompt_of(size), sampling)
    anchor = int(state.anchor)
    tokens, logits, taps = [], [], []
    for _ in range(SERIAL):
        done = tiny.verify(state, EMPTY, 0, sampling)
        state = done.state
        assert int(done.report.emitted) == 1
        tokens.append(int(done.report.tokens[0]))
        logits.append(np.asarray(done.report.logits[0]))
        taps.append(np.asarray(done.taps[0]))
    return Serial(
        tokens,
        np.array(logits),
        np.array(taps),
        np.asarray(state.cache.k),
        np.asarray(state.cache.v),
        anchor,
    )


def reference_round(prompt, anchor: int, tree, width: int, sampling: Sampling):
    """(emitted tokens, landed nodes), each pick from a forward over the whole sequence."""
    sequence, node, emitted, landed = [*prompt, anchor], NO_PARENT, [], []
    while True:
        logits = tiny.reference_logits(sequence)[-1]
        token = tiny.reference_pick(logits, len(sequence), sampling)
        emitted.append(token)
        sequence.append(token)
        children = [
            child
            for child in range(width)
            if tree.parents[child] == node and tree.tokens[child] == token
        ]
        if not children:
            return emitted, landed
        node = children[0]
        landed.append(node)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("size", SIZES)
def test_rounds_equal_a_plain_loop_at_every_width(size, name):
    sampling, prompt, run = SAMPLINGS[name], tiny.prompt_of(size), serial(size, name)
    start = tiny.prefilled(prompt, sampling)
    rng = np.random.default_rng(size)
    most = 0
    for width in tiny.WIDTHS:
        for _ in range(2):
            tree = tiny.tree_around(rng, run.tokens, 15)
            tokens, nodes = reference_round(prompt, run.anchor, tree, width, sampling)
            done = tiny.verify(tiny.copied(start), tree, width, sampling)
            report = jax.device_get(done.report)
            count = int(report.emitted)
            assert report.tokens.tolist() == tokens + [NO_TOKEN] * (MAX_ROWS - count)
            assert np.flatnonzero(report.landed).tolist() == nodes
            assert int(done.state.length) == size + count
            assert int(done.state.anchor) == tokens[-1]
            most = max(most, count)
    assert most > 5  # some trees landed deep


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("size", SIZES)
def test_what_a_round_commits_has_the_bits_of_feeding_its_tokens_one_by_one(size, name):
    sampling, run = SAMPLINGS[name], serial(size, name)
    start = tiny.prefilled(tiny.prompt_of(size), sampling)
    rng = np.random.default_rng(size)
    for width in tiny.WIDTHS:
        tree = tiny.tree_around(rng, run.tokens, 15)
        done = tiny.verify(tiny.copied(start), tree, width, sampling)
        count = int(done.report.emitted)
        end = size + count
        assert done.report.tokens[:count].tolist() == run.tokens[:count]
        assert tiny.same_bits(done.report.logits[:count], run.logits[:count])
        assert tiny.same_bits(done.taps[:count], run.taps[:count])
        for got, wanted in zip(done.state.cache, (run.k, run.v), strict=True):
            assert tiny.same_bits(got[:, :, :end], wanted[:, :, :end])


@pytest.mark.parametrize("name", SAMPLINGS)
def test_two_histories_of_rejection_leave_one_state(name):
    """Target and drafter: the same text through different trees and widths."""
    sampling, size = SAMPLINGS[name], 40
    run, base = serial(size, name), tiny.decoder()
    start = tiny.prefilled(tiny.prompt_of(size), sampling)
    blank = tiny.new_buffers().drafter_cache
    arrays = jax.tree.map(jnp.asarray, sampling.arrays())
    ends, rounds = [], []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        state, context = tiny.copied(start), tiny.copied(blank)
        length, trips = size, 0
        while length < size + 16:
            right = run.tokens[length - size :]
            left = size + 16 - length  # the last round ends all histories at one length
            width = int(rng.integers(0, min(16, left)))
            tree = tiny.tree_around(rng, right + [0] * 16, width)
            done = tiny.verify(state, tree, width, sampling)
            state = done.state
            inputs = (done.taps, done.report.emitted, state.length, state.anchor, arrays)
            context, _ = base.executables.draft(base.drafter, context, *inputs)
            length, trips = int(state.length), trips + 1
        assert length == size + 16
        ends.append((state, context))
        rounds.append(trips)
    assert len(set(rounds)) > 1
    for state, context in ends[1:]:
        assert int(state.anchor) == int(ends[0][0].anchor)
        for got, wanted in zip(
            (*state.cache, *context), (*ends[0][0].cache, *ends[0][1]), strict=True
        ):
            assert tiny.same_bits(got[:, :, : size + 16], wanted[:, :, : size + 16])


@pytest.mark.parametrize("width", [0, 4, 15])
@pytest.mark.parametrize("size", SIZES)
def test_garbage_behind_the_context_changes_no_bit(size, width):
    run = serial(size, "greedy")
    start = tiny.prefilled(tiny.prompt_of(size))
    tree = tiny.tree_around(np.random.default_rng(width), run.tokens, 15)
    clean = tiny.verify(tiny.copied(start), tree, width)
    garbage = [x.at[:, :, size:].set(-3e38) for x in start.cache]
    # Chunks beyond the context's and the window's are not even read.
    beyond = -(-(size + MAX_ROWS) // tiny.CHUNK) * tiny.CHUNK
    garbage = [x.at[:, :, beyond:].set(jnp.nan) for x in garbage]
    dirty = tiny.verify(start._replace(cache=type(start.cache)(*garbage)), tree, width)
    for got, wanted in zip(
        jax.tree.leaves((dirty.report, dirty.taps)),
        jax.tree.leaves((clean.report, clean.taps)),
        strict=True,
    ):
        assert tiny.same_bits(got, wanted)
    end = int(clean.state.length)
    for got, wanted in zip(dirty.state.cache, clean.state.cache, strict=True):
        assert tiny.same_bits(got[:, :, :end], wanted[:, :, :end])


def test_caches_are_donated():
    base, state = tiny.decoder(), tiny.prefilled(tiny.prompt_of(5))
    context = tiny.new_buffers().drafter_cache
    done = tiny.verify(state, EMPTY, 0)
    assert state.cache.k.is_deleted()
    assert state.cache.v.is_deleted()
    arrays = jax.tree.map(jnp.asarray, GREEDY.arrays())
    inputs = (done.taps, done.report.emitted, done.state.length, done.state.anchor, arrays)
    base.executables.draft(base.drafter, context, *inputs)
    assert context.k.is_deleted()
    assert context.v.is_deleted()
    chunk = jnp.zeros(tiny.CHUNK, jnp.int32)
    base.executables.prefill(
        base.weights, done.state, chunk, jnp.int32(1), arrays, base.neutral[HEAD_ROWS]
    )
    assert done.state.cache.k.is_deleted()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_a_draft_scores_candidates_as_the_target_will_draw_them(temperature):
    base, state = tiny.decoder(), tiny.prefilled(tiny.prompt_of(40))
    done = tiny.verify(state, EMPTY, 0)

    def drafted(sampling: Sampling) -> Proposals:
        context = tiny.new_buffers().drafter_cache
        inputs = (done.taps, done.report.emitted, done.state.length, done.state.anchor)
        arrays = jax.tree.map(jnp.asarray, sampling.arrays())
        _, proposals = base.executables.draft(base.drafter, context, *inputs, arrays)
        return jax.tree.map(np.asarray, proposals)

    greedy, sampled = drafted(GREEDY), drafted(Sampling(temperature, seed=2**40 + 3))
    np.testing.assert_array_equal(sampled.candidates, greedy.candidates)
    np.testing.assert_allclose(np.exp(greedy.log_chances).sum(axis=-1), 1, rtol=1e-5)
    # Greedy scores are the lattice's own, but for a constant among siblings.
    lattice = Lattice(greedy.candidates, np.zeros(greedy.candidates.shape), greedy.log_chances)
    positions = int(done.state.length) + 1 + np.arange(len(greedy.candidates))[:, None]
    noise = gumbel(split_seed(2**40 + 3), positions, greedy.candidates)
    wanted = own_log_chances(lattice, temperature, noise)
    np.testing.assert_allclose(sampled.log_chances, wanted, atol=2e-4)


@pytest.mark.parametrize("seed", range(8))
def test_the_accept_walk_equals_a_walk_from_the_anchor(seed):
    rng = np.random.default_rng(seed)
    run = jax.jit(accepted)
    landed_any = 0
    for _ in range(50):
        tree = random_tree(int(rng.integers(2**31)), 15)
        # Few ids, so that matches are frequent; siblings of one token do not occur in real trees,
        # but the walk must then take both.
        tree = tree._replace(tokens=rng.integers(0, 3, 15).astype(np.int32))
        width = int(rng.integers(0, 16))
        window = window_array(tree, width, MAX_ROWS)
        chosen = rng.integers(0, 3, MAX_ROWS).astype(np.int32)
        tokens = np.where(window[:, DEPTH] == 0, 1, window[:, TOKEN])
        got = np.asarray(run(tokens, chosen, window[:, DEPTH], window[:, PATH:]))
        for row in range(MAX_ROWS):
            path = root_path(tree, row) if 0 < row <= width else [0]
            agrees = [tokens[b] == chosen[a] for a, b in itertools.pairwise(path)]
            assert got[row] == (len(path) > 1 and all(agrees))
        landed_any += got.any()
    assert landed_any > 10


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 65, 130])
def test_taps_and_picks_of_a_prompt_equal_a_forward_over_all_of_it(size):
    prompt = tiny.prompt_of(size)
    state = tiny.prefilled(prompt)
    assert int(state.length) == size
    logits = tiny.reference_logits(prompt)[-1]
    assert int(state.anchor) == tiny.reference_pick(logits, size, GREEDY)


def test_a_prompts_chunk_behind_an_earlier_request_has_the_bits_of_a_clean_one():
    """A hit in a prompt cache, or a slot used before, changes nothing."""
    prompt, base = tiny.prompt_of(100), tiny.decoder()
    clean = tiny.prefilled(prompt)
    other = tiny.prefilled(tiny.prompt_of(200, seed=1))
    arrays = jax.tree.map(jnp.asarray, GREEDY.arrays())
    state = other._replace(length=jnp.int32(0))
    for begin in range(0, 100, tiny.CHUNK):
        piece = np.asarray(prompt[begin : begin + tiny.CHUNK], np.int32)
        tokens = jnp.asarray(np.pad(piece, (0, tiny.CHUNK - len(piece))))
        count = jnp.int32(len(piece))
        state = base.executables.prefill(
            base.weights, state, tokens, count, arrays, base.neutral[HEAD_ROWS]
        ).state
    assert int(state.anchor) == int(clean.anchor)
    for got, wanted in zip(state.cache, clean.cache, strict=True):
        assert tiny.same_bits(got[:, :, :100], wanted[:, :, :100])
