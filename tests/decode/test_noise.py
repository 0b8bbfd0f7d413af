"""Keyed noise: the same bits on host and device, the right distribution, no correlation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.decode import noise
from dflash_jax.decode.noise import gumbel, gumbel_rows, split_seed

seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**31 - 1)

_on_device = jax.jit(lambda seed, p, ids: gumbel(seed, p, ids, xp=jnp))
_rows_on_device = jax.jit(gumbel_rows, static_argnums=2)


def host(seed: int, at, ids) -> np.ndarray:
    return gumbel(split_seed(seed), at, ids)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, at=st.lists(positions, min_size=4, max_size=4), shift=st.integers(0, 2**20))
def test_host_and_device_give_the_same_bits(seed, at, shift):
    at = np.array(at, np.int32)[:, None]
    ids = shift + np.arange(33, dtype=np.int32)[None]
    device = np.asarray(_on_device(split_seed(seed), at, ids))
    assert device.dtype == np.float32
    assert device.tobytes() == host(seed, at, ids).tobytes()


@settings(max_examples=50, deadline=None)
@given(seed=seeds, at=st.lists(positions, min_size=3, max_size=3))
@pytest.mark.parametrize("vocabulary", [256, 257])
def test_whole_rows_are_what_single_ids_get(vocabulary, seed, at):
    at = np.array(at, np.int32)
    rows = np.asarray(_rows_on_device(split_seed(seed), at, vocabulary))
    assert rows.tobytes() == host(seed, at[:, None], np.arange(vocabulary)).tobytes()


def test_a_million_draws_have_the_same_bits_on_host_and_device():
    at, ids = np.arange(1000, dtype=np.int32)[:, None], np.arange(1000, dtype=np.int32)[None]
    device = np.asarray(_on_device(split_seed(77), at, ids))
    assert device.tobytes() == host(77, at, ids).tobytes()


@pytest.mark.parametrize("xp", [np, jnp])
def test_threefry_equals_the_published_vectors(xp):
    """Random123's known answers for threefry2x32 with 20 rounds."""
    for counter, key, wanted in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ):
        words = [xp.asarray([word], dtype=xp.uint32) for word in (*key, *counter)]
        with np.errstate(over="ignore"):
            got = noise._threefry2x32(xp, (words[0], words[1]), words[2], words[3])
        assert tuple(int(word[0]) for word in got) == wanted


def test_the_table_is_the_gumbel_quantile_of_the_bits_everywhere():
    near_ends = np.concatenate([2 ** np.arange(31), 2 ** np.arange(31) - 1]).astype(np.uint32)
    middle = np.random.default_rng(0).integers(0, 2**32, 200_000).astype(np.uint32)
    bits = np.concatenate([near_ends, ~near_ends, middle, np.uint32([2**31 - 1, 2**31])])
    got = noise._gumbel_from_bits(np, bits)
    u = (2.0 * bits + 1) / 2.0**33
    # Above one half from the distance to 1, which float64 keeps exactly.
    wanted = np.where(u < 0.5, -np.log(-np.log(u)), -np.log(-np.log1p(-(1 - u))))
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert np.isfinite(got).all()
    assert got.max() > 22  # the rarest draws are there
    assert got.min() < -3.1
    order = np.argsort(bits)
    assert (np.diff(got[order]) >= 0).all()


def test_draws_are_gumbel_distributed():
    draws = host(5, np.arange(1000)[:, None], np.arange(1000)[None]).ravel()
    assert scipy.stats.kstest(draws, "gumbel_r").pvalue > 1e-3
    for edge in (-2.2, 8.0, 10.0):  # tails: counts within 5 standard deviations
        chance = scipy.stats.gumbel_r.cdf(edge) if edge < 0 else scipy.stats.gumbel_r.sf(edge)
        count = (draws < edge).sum() if edge < 0 else (draws > edge).sum()
        assert abs(count - len(draws) * chance) < 5 * np.sqrt(len(draws) * chance)


@pytest.mark.parametrize(
    ("seeds", "shift_position", "shift_id"),
    [
        ((3, 3), 1, 0),
        ((3, 3), 0, 1),
        ((3, 3), 0, 2),
        ((3, 3), 1, 1),
        ((3, 4), 0, 0),
        ((3, 3 + 2**32), 0, 0),
        ((0, 1), 0, 0),
        ((1, 0), 1, 0),
    ],
)
def test_neighbours_are_uncorrelated(seeds, shift_position, shift_id):
    at, ids = np.arange(600)[:, None], np.arange(600)[None]
    a = host(seeds[0], at, ids).ravel()
    b = host(seeds[1], at + shift_position, ids + shift_id).ravel()
    # Ranks see dependence in the tails too; bound: 5 standard deviations.
    assert abs(scipy.stats.spearmanr(a, b).statistic) < 5 / np.sqrt(len(a))
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(len(a))
    assert abs(np.corrcoef(a**2, b**2)[0, 1]) < 8 / np.sqrt(len(a))


def test_draws_of_distinct_keys_are_distinct():
    draws = host(9, np.arange(400)[:, None], np.arange(400)[None])
    lone = np.unique(draws, return_counts=True)[1]
    assert (lone == 1).mean() > 0.9  # of a few million values, some meet by chance


@given(seed=seeds)
def test_a_seed_is_split_without_loss(seed):
    low, high = split_seed(seed).tolist()
    assert (high << 32) | low == seed
