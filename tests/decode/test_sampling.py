"""The target's own pick: against NumPy in float64, and against the filtered softmax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dflash_jax.decode import sampling as sampling_module
from dflash_jax.decode.noise import gumbel
from dflash_jax.decode.rules import neutral
from dflash_jax.decode.sampling import FEW, GREEDY, Sampling, filtered, picks
from dflash_jax.errors import InputError
from dflash_jax.tree.masks import MAX_ROWS
from tests.decode import tiny

_picks = jax.jit(picks)
_filtered = jax.jit(filtered)
# A switch under vmap runs every branch: rows are given as rows instead.
FILTERS = {
    "temperature alone": Sampling(1.0),
    "cold": Sampling(0.3),
    "hot": Sampling(2.5),
    "few": Sampling(1.0, top_k=10),
    "just few": Sampling(1.0, top_k=FEW),
    "just not few": Sampling(1.0, top_k=FEW + 1),
    "top-p": Sampling(1.0, top_p=0.8),
    "min-p": Sampling(1.0, min_p=0.05),
    "few, top-p, min-p": Sampling(0.7, top_k=20, top_p=0.9, min_p=0.02),
    "not few, top-p, min-p": Sampling(1.5, top_k=80, top_p=0.9, min_p=0.02),
}


def some_logits(rows: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, vocabulary)).astype(np.float32)


def pick(logits: np.ndarray, sampling: Sampling, first: int = 0) -> np.ndarray:
    positions = first + np.arange(len(logits), dtype=np.int32)
    return np.asarray(_picks(logits, positions, sampling.arrays()))


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_picks_equal_a_float64_reference_with_the_same_noise(name, seed):
    sampling = Sampling(**(vars(FILTERS[name]) | {"seed": seed}))
    logits = some_logits(500, 200)
    got = pick(logits, sampling, first=1000)
    wanted = [tiny.reference_pick(row, 1000 + i, sampling) for i, row in enumerate(logits)]
    assert got.tolist() == wanted


@pytest.mark.parametrize("name", FILTERS)
def test_what_is_kept_equals_a_float64_reference(name):
    logits = some_logits(300, 200, seed=1)
    sampling = FILTERS[name]
    got = np.asarray(_filtered(logits, sampling.arrays()))
    wanted = np.stack([tiny.reference_scores(row, sampling) for row in logits])
    # A token at the very edge of top-p or min-p may fall either way in float32.
    assert (np.isfinite(got) != np.isfinite(wanted)).sum() <= 1
    both = np.isfinite(got) & np.isfinite(wanted)
    np.testing.assert_allclose(got[both], wanted[both], atol=1e-4)


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_softmax(name):
    """Chi-square over 120,000 draws of one row at as many positions."""
    draws, vocabulary = 120_000, 100
    logits = np.random.default_rng(3).normal(0, 1.2, vocabulary).astype(np.float32)
    sampling = Sampling(**(vars(FILTERS[name]) | {"seed": 11}))
    found = pick(np.broadcast_to(logits, (draws, vocabulary)), sampling)
    counts = np.bincount(found, minlength=vocabulary)
    weights = np.exp(tiny.reference_scores(logits, sampling))
    expected = draws * weights / weights.sum()
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (expected < 5)
    common = expected >= 5
    counts_in = np.append(counts[common], counts[rare].sum())
    expected_in = np.append(expected[common], expected[rare].sum())
    if not rare.any():
        counts_in, expected_in = counts_in[:-1], expected_in[:-1]
    assert len(counts_in) >= 5  # the filter leaves something to test
    assert scipy.stats.chisquare(counts_in, expected_in).pvalue > 1e-3


def test_successive_draws_of_one_row_are_independent():
    logits = np.random.default_rng(4).normal(0, 0.5, 6).astype(np.float32)
    found = pick(np.broadcast_to(logits, (100_000, 6)), Sampling(1.0, seed=4))
    for lag in (1, 2, 16):
        table = np.zeros((6, 6))
        np.add.at(table, (found[:-lag], found[lag:]), 1)
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-3


def test_seeds_give_distinct_draws_and_one_seed_the_same():
    logits = some_logits(64, 200)
    replies = [tuple(pick(logits, Sampling(1.0, seed=seed))) for seed in range(8)]
    assert len(set(replies)) == 8
    assert replies[3] == tuple(pick(logits, Sampling(1.0, seed=3)))


@pytest.mark.parametrize("top_k", [1, 7, FEW - 1, FEW])
@pytest.mark.parametrize("rest", [{}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_the_few_branch_agrees_with_the_pass_over_all(top_k, rest):
    logits = some_logits(400, 300, seed=5)
    positions = np.arange(400, dtype=np.int32)
    arrays = Sampling(1.1, top_k=top_k, seed=6, **rest).arrays()
    few = jax.jit(sampling_module._pick_among_few)(logits, positions, arrays)
    everyone = jax.jit(sampling_module._pick_among_all)(logits, positions, arrays)
    assert np.array_equal(few, everyone)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1e-6), Sampling(1e-300), Sampling(9e-6)])
def test_greedy_and_tiny_temperatures_take_the_lowest_id_among_equals(sampling):
    logits = some_logits(50, 100)
    logits[:, [20, 60, 61]] = 9.0
    assert set(pick(logits, sampling)) == {20}
    assert sampling.greedy


@pytest.mark.parametrize("temperature", [2e-5, 1e-4, 1e-3])
def test_small_temperatures_do_not_overflow(temperature):
    logits = 1e4 * some_logits(50, 100)
    wanted = logits.argmax(axis=1)
    assert np.array_equal(pick(logits, Sampling(temperature, seed=1)), wanted)


def test_top_k_one_is_greedy_whatever_the_temperature():
    logits = some_logits(50, 100)
    assert np.array_equal(pick(logits, Sampling(50.0, top_k=1)), logits.argmax(axis=1))


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_zero_and_minus_one_mean_off(off):
    logits = some_logits(200, 100)
    wanted = pick(logits, Sampling(1.0, seed=2))
    assert np.array_equal(pick(logits, Sampling(1.0, top_k=off, seed=2)), wanted)


@pytest.mark.parametrize("top_k", [FEW, 100, 101, 2**31 - 1])
def test_top_k_beyond_the_vocabulary_keeps_all(top_k):
    logits = some_logits(200, 40)
    wanted = pick(logits, Sampling(1.0, seed=2))
    assert np.array_equal(pick(logits, Sampling(1.0, top_k=top_k, seed=2)), wanted)


@pytest.mark.parametrize("top_k", [3, FEW + 3])
def test_ties_with_the_last_one_kept_by_top_k_are_kept(top_k):
    logits = np.full(100, -5.0, np.float32)
    logits[: top_k - 1] = 1.0
    logits[90:95] = 0.0  # five share the last place
    found = pick(np.broadcast_to(logits, (20_000, 100)), Sampling(1.0, top_k=top_k, seed=1))
    assert set(found) == {*range(top_k - 1), *range(90, 95)}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_p=1e-6),
        Sampling(1.0, min_p=1.0),
        Sampling(1.0, top_k=50, top_p=1e-6),
    ],
)
def test_filters_at_their_tightest_leave_the_best(sampling):
    logits = some_logits(100, 200)
    assert np.array_equal(pick(logits, sampling), logits.argmax(axis=1))


@pytest.mark.parametrize("rows", [2, 8, 12])
def test_what_top_p_keeps_does_not_depend_on_the_count_of_rows(rows):
    logits = some_logits(48, 5003, seed=3)
    arrays = Sampling(1.0, top_p=0.9).arrays()
    run = jax.jit(filtered)
    whole = np.asarray(run(logits, arrays))
    parts = [run(logits[at : at + rows], arrays) for at in range(0, 48, rows)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert 0 < np.isfinite(whole).mean() < 0.9


@pytest.mark.parametrize("name", [*FILTERS, "greedy"])
def test_padding_ids_are_never_picked(name):
    sampling = FILTERS.get(name, GREEDY)
    logits = some_logits(2000, 100, seed=7)
    padded = np.full((2000, 128), -np.inf, np.float32)
    padded[:, :100] = logits
    found = pick(padded, sampling)
    assert found.max() < 100
    assert np.array_equal(found, pick(logits, sampling))


@functools.cache
def padded_target_picks() -> np.ndarray:
    """Picks of a target whose padding rows have the highest logits of all."""
    from dflash_jax.decode import programs

    base = tiny.decoder().spec
    params = jax.tree.map(lambda x: x, tiny.target_params())
    weight = params["embed_tokens"]["weight"]
    params["embed_tokens"] = {"weight": weight.at[tiny.KNOWN :].multiply(50.0)}
    weights = programs.target_weights(base, params)
    hidden = jnp.asarray(some_logits(64, tiny.TARGET.hidden_size))
    rules = neutral(64, tiny.TARGET.vocab_size)
    paths = np.full((64, MAX_ROWS), programs.NO_TOKEN, np.int32)
    run = jax.jit(lambda w, h, p, s: programs._pick(base, w, h, p, s, paths, rules))
    found = [
        run(weights, hidden, np.arange(64, dtype=np.int32), sampling.arrays())[0]
        for sampling in (GREEDY, *FILTERS.values())
    ]
    return np.stack(found)


def test_rows_beyond_the_tokenisers_vocabulary_are_never_picked():
    assert padded_target_picks().max() < tiny.KNOWN


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_bad_values_are_one_line_that_names_them(values, name):
    with pytest.raises(InputError, match=f"^{name} ") as caught:
        Sampling(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [{"top_k": 2**31}, {"top_k": 2**40}, {"min_p": 1e-320}])
def test_values_that_their_arrays_cannot_hold_of_their_arrays_still_sample(values):
    logits = some_logits(50, 100)
    found = pick(logits, Sampling(1.0, seed=3, **values))
    assert np.array_equal(found, pick(logits, Sampling(1.0, seed=3)))


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1e300])
def test_the_hottest_draws_are_uniform_and_keep_filters_and_padding(temperature):
    logits = np.full((4000, 40), -np.inf, np.float32)
    logits[:, :20] = np.arange(20)
    assert set(pick(logits, Sampling(temperature, seed=1))) == set(range(20))
    assert set(pick(logits, Sampling(temperature, top_k=3, seed=1))) == {17, 18, 19}


@pytest.mark.parametrize("top_k", [0, 2, FEW + 10])
def test_a_draw_that_ties_takes_the_lowest_id(top_k):
    """Two ids with the same noise bits and the same logit, far above the rest."""
    vocabulary, sampling = 3000, Sampling(1.0, top_k=top_k, seed=8)
    ids = np.arange(vocabulary)
    found = 0
    for position in range(40):
        noise = gumbel(sampling.arrays().seed, position, ids)
        order = np.argsort(noise, kind="stable")
        twins = np.flatnonzero(np.diff(noise[order]) == 0)
        for twin in twins[:1]:
            low, high = sorted(order[twin : twin + 2].tolist())
            logits = np.full((1, vocabulary), -60.0, np.float32)
            logits[0, [low, high]] = 2.0
            assert pick(logits, sampling, first=position).tolist() == [low]
            found += 1
    assert found > 5
