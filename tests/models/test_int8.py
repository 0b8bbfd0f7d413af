"""Int8 matrices: whole-number sums, whatever the number of rows, and close to the floats."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.models import layers
from dflash_jax.models.layers import INT8_PEAK, Int8Matrix, int8_rows_and_scale


def matrix(rng: np.random.Generator, out: int, inner: int) -> tuple[np.ndarray, Int8Matrix]:
    floats = rng.normal(0, 1, (out, inner)).astype(np.float32)
    return floats, Int8Matrix(*map(jnp.asarray, int8_rows_and_scale(floats)))


def exact(x: np.ndarray, weight: Int8Matrix) -> np.ndarray:
    """The product with the rounded weights, in float64."""
    values = np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)[:, None]
    return x.astype(np.float64) @ values.T


linear = jax.jit(layers.linear)


def test_rounding_is_within_half_a_step_of_each_row():
    floats, weight = matrix(np.random.default_rng(0), 40, 96)
    values = np.asarray(weight.values, np.float32) * np.asarray(weight.scale)[:, None]
    half_steps = np.abs(floats).max(axis=1) / INT8_PEAK / 2
    assert np.all(np.abs(values - floats).max(axis=1) <= half_steps * 1.0001)
    assert np.abs(np.asarray(weight.values)).max() == INT8_PEAK


@pytest.mark.parametrize("inner", [16, 576, 1536])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(inner):
    rng = np.random.default_rng(inner)
    _, weight = matrix(rng, 72, inner)
    x = rng.normal(0, 1, (33, inner)).astype(np.float32)
    whole = np.asarray(linear(jnp.asarray(x), weight))
    for rows in (1, 2, 3, 8, 16, 32):
        part = np.asarray(linear(jnp.asarray(x[-rows:]), weight))
        assert part.tobytes() == whole[-rows:].tobytes()


def test_one_huge_channel_leaves_the_others_their_precision():
    rng = np.random.default_rng(2)
    _, weight = matrix(rng, 64, 256)
    x = rng.normal(0, 1, (4, 256)).astype(np.float32)
    x[:, 7] *= 100.0
    got, want = np.asarray(linear(jnp.asarray(x), weight)), exact(x, weight)
    # Steps of 1/2032 of a row's peak, uniform errors: sqrt(256/12) of them a sum, at unit weights.
    step = np.abs(x).max(axis=1, keepdims=True) / (INT8_PEAK * 16)
    assert np.all(np.abs(got - want) < 6 * step * np.sqrt(256 / 12))
    eight_bits = np.round(x / step / 16) * step * 16  # what a single int8 row would have lost
    assert np.abs(exact(eight_bits, weight) - want).max() > 5 * np.abs(got - want).max()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 8), (3, 40), (2, 200)]),
    st.floats(1e-20, 1e20, allow_nan=False),
)
def test_any_scale_stays_close_to_the_exact_product(seed, shape, size):
    rng = np.random.default_rng(seed)
    _, weight = matrix(rng, 24, shape[1])
    x = (rng.normal(0, 1, shape) * size).astype(np.float32)
    got, want = np.asarray(linear(jnp.asarray(x), weight), np.float64), exact(x, weight)
    bound = np.abs(x).max(axis=1, keepdims=True) / (INT8_PEAK * 16)
    assert np.all(np.abs(got - want) <= bound * np.abs(exact(np.ones_like(x), weight)).max() * 8)


def test_rows_of_zeros_give_zeros_and_no_nan():
    weight = Int8Matrix(jnp.zeros((8, 32), jnp.int8), jnp.ones(8))
    assert not np.asarray(linear(jnp.zeros((2, 32)), weight)).any()
    values, scale = int8_rows_and_scale(np.zeros((4, 16), np.float32))
    assert not values.any()
    assert np.isfinite(scale).all()


@pytest.mark.parametrize("inner", [576, 8192, 17408, 131072])
def test_sums_fit_32_bits_at_any_inner_size(inner):
    """The worst case: every weight and every activation at its peak."""
    weight = Int8Matrix(jnp.full((8, inner), INT8_PEAK, jnp.int8), jnp.ones(8))
    got = np.asarray(linear(jnp.ones((2, inner)), weight))
    np.testing.assert_allclose(got, inner * INT8_PEAK, rtol=1e-6)


def test_rows_logits_and_leading_dimensions():
    rng = np.random.default_rng(3)
    _, weight = matrix(rng, 24, 32)
    values = np.asarray(weight.values, np.float32) * np.asarray(weight.scale)[:, None]
    ids = jnp.asarray([[3, 0], [23, 3]])
    np.testing.assert_array_equal(layers.rows_of(weight, ids, jnp.float32), values[np.asarray(ids)])
    x = jnp.asarray(rng.normal(0, 1, (2, 5, 32)).astype(np.float32))
    np.testing.assert_array_equal(linear(x, weight)[1], linear(x[1], weight))
    half = layers.linear(x.astype(jnp.bfloat16), weight)
    assert half.dtype == jnp.bfloat16
    assert layers.logits(x.astype(jnp.bfloat16), weight).dtype == jnp.float32
