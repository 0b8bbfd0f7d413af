"""Layers shared by every model: linear maps, norms, rotary positions, plain attention.

The models know nothing of caches, trees or masks. They hand each attention layer's queries, keys
and values to a function that their caller gives (`Attend`), so that one module serves training,
prefill, tree verification and drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

# Masked scores. Finite, so that a row without any visible key gives no NaN.
MASKED = -1e30
# The largest magnitude in int8; -128 is left out, so that a range is symmetric.
INT8_PEAK = 127

# attend(layer, q [..., T, N, H], k [..., T, K, H], v [..., T, K, H]) -> [..., T, N, H];
# q and k carry their rotary positions already.
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


class Rotary(NamedTuple):
    """Cosines and sines of some positions, or of all positions 0..S-1 when used as a table."""

    cos: jax.Array  # [..., T, H/2] float32
    sin: jax.Array  # [..., T, H/2] float32

    def at(self, positions: jax.Array) -> Rotary:
        """The rows of a table at `positions` [..., T]; looked up, so their bits never vary."""
        return Rotary(self.cos[positions], self.sin[positions])


def rotary_table(inverse_frequencies: np.ndarray, length: int) -> Rotary:
    """Table of positions 0..length-1 for `inverse_frequencies` [H/2] (Su et al. 2021, RoFormer)."""
    positions = np.arange(length, dtype=np.float32)
    angles = positions[:, None] * inverse_frequencies.astype(np.float32)[None]
    return Rotary(jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles)))


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """theta^(-2i/H) for i in 0..H/2-1, float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


def rotate(x: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotates x [..., T, N, H] by its rows' positions; halves are paired (x[i], x[i + H/2])."""
    cos = rotary.cos[..., None, :].astype(x.dtype)
    sin = rotary.sin[..., None, :].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Int8Matrix(NamedTuple):
    """A weight [out, in] as int8 with one scale a row: value = values * scale[:, None]."""

    values: jax.Array  # [out, in] int8, -127..127
    scale: jax.Array  # [out] float32


Weight = jax.Array | Int8Matrix


def int8_rows_and_scale(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An Int8Matrix's two arrays: [out, in] rounded to nearest, each row over its largest value."""
    matrix = np.asarray(matrix, np.float32)
    peak = np.maximum(matrix.max(axis=1), -matrix.min(axis=1))
    scale = np.where(peak == 0, 1, peak / INT8_PEAK).astype(np.float32)
    rounded = matrix / scale[:, None]
    np.rint(rounded, out=rounded)
    np.clip(rounded, -INT8_PEAK, INT8_PEAK, out=rounded)
    return rounded.astype(np.int8), scale


def linear(x: jax.Array, weight: Weight) -> jax.Array:
    """x [..., in] times weight [out, in], transposed: [..., out] in x's dtype."""
    if isinstance(weight, Int8Matrix):
        return _int8_linear(x, weight).astype(x.dtype)
    return jax.lax.dot_general(x, weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


def _int8_linear(x: jax.Array, weight: Int8Matrix) -> jax.Array:
    """`linear` to float32 in whole numbers: a row's bits do not depend on how many rows there are.

    A row of x is rounded to some 12 bits and given as two int8 rows, a coarse and a fine one. Eight
    bits alone lose much where one channel is far larger than the others (SmolLM2: a KL of 0.07
    instead of 0.006 to the float weights), and on a CPU twice the rows cost next to nothing, since
    the weights are read once.
    """
    inner = x.shape[-1]
    fine = _fine_steps(inner)
    rows = x.reshape(-1, inner).astype(jnp.float32)
    peak = jnp.abs(rows).max(axis=-1, keepdims=True)
    step = jnp.where(peak == 0, 1.0, peak / (INT8_PEAK * fine))
    whole = jnp.round(rows / step)
    coarse = jnp.round(whole / fine)
    planes = jnp.concatenate([coarse, whole - fine * coarse]).astype(jnp.int8)
    sums = jax.lax.dot_general(
        planes, weight.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    count = rows.shape[0]
    total = (sums[:count] * fine + sums[count:]).astype(jnp.float32)
    y = total * (step * weight.scale)
    return y.reshape(*x.shape[:-1], -1)


def _fine_steps(inner: int) -> int:
    """Fine steps in a coarse one: a power of two, at most 16, whose sums fit 32 bits."""
    fine = 16
    while inner * INT8_PEAK * (INT8_PEAK * fine + fine // 2) >= 2**31:
        fine //= 2
    return fine


def logits(hidden: jax.Array, head: Weight) -> jax.Array:
    """hidden [..., D] times a head [V, D], transposed: float32 [..., V]."""
    if isinstance(head, Int8Matrix):
        return _int8_linear(hidden, head)
    return jax.lax.dot_general(
        hidden,
        head.astype(hidden.dtype),
        (((hidden.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def rows_of(weight: Weight, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of a matrix [rows, D]: ids int32 [...] -> [..., D] of `dtype`."""
    if isinstance(weight, Int8Matrix):
        return (weight.values[ids] * weight.scale[ids][..., None]).astype(dtype)
    return weight[ids].astype(dtype)


def row_sum(x: jax.Array) -> jax.Array:
    """x [..., n] summed over its last axis: [..., 1].

    On the CPU as a matmul: XLA picks how to reduce by the size of the whole array, so that a row's
    bits would depend on how many rows are beside it. Its matmul kernels do not (`decode.rows`);
    eight columns, since one would be rewritten as the reduction again.
    """

    def by_matmul(x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        return linear(rows, jnp.ones((8, x.shape[-1]), x.dtype))[:, :1].reshape(*x.shape[:-1], 1)

    def by_reduction(x: jax.Array) -> jax.Array:
        return x.sum(axis=-1, keepdims=True)

    return jax.lax.platform_dependent(x, cpu=by_matmul, default=by_reduction)


class Linear(nn.Module):
    """A linear map; its weight is [out, in], as checkpoints store it, or an Int8Matrix."""

    features: int
    use_bias: bool = False
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.normal(0.02)
        weight = self.param("weight", init, (self.features, x.shape[-1]), jnp.float32)
        y = linear(x.astype(self.dtype), weight)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
            y = y + bias.astype(self.dtype)
        return y


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32 (Zhang and Sennrich 2019), scaled by a plain weight."""

    epsilon: float
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(row_sum(x * x) / x.shape[-1] + self.epsilon)
        return weight.astype(self.dtype) * x.astype(self.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    intermediate_size: int
    use_bias: bool = False
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = Linear(self.intermediate_size, self.use_bias, self.dtype, name="gate_proj")(x)
        up = Linear(self.intermediate_size, self.use_bias, self.dtype, name="up_proj")(x)
        return Linear(x.shape[-1], self.use_bias, self.dtype, name="down_proj")(
            jax.nn.silu(gate) * up
        )


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Plain grouped-query attention: training, parity tests, drafting.

    Args:
      q: [..., T, N, H].
      k, v: [..., S, K, H]; N is a multiple of K.
      mask: bool, broadcastable to [..., T, S]; True where a row sees a key.

    Returns:
      [..., T, N, H] in q's dtype; softmax in float32.
    """
    *batch, rows, heads, head_dim = q.shape
    groups = heads // k.shape[-2]
    q = q.reshape(*batch, rows, k.shape[-2], groups, head_dim)
    scores = jnp.einsum("...tkgh,...skh->...kgts", q, k).astype(jnp.float32) * head_dim**-0.5
    scores = jnp.where(mask[..., None, None, :, :], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("...kgts,...skh->...tkgh", weights, v)
    return out.reshape(*batch, rows, heads, head_dim)
