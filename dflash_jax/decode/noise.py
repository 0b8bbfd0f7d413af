"""Keyed Gumbel noise with the same bits on the host and on the device.

A draw's noise is a pure function of (seed, absolute position, token id): Threefry-2x32 with 20
rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") gives 32 bits, and a
piecewise linear table turns them into a Gumbel variate. Logarithms differ between NumPy, XLA and
backends, and multiply-adds may or may not be fused, so everything up to the last conversion is
integer arithmetic, which is exact everywhere. NumPy and jax.numpy run the same code below.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)

# The table: a variate is looked up by half (u below or above 1/2), by octave (leading zeros of the
# distance to the nearer end of the interval) and by cell within the octave, then interpolated.
# Both tails are thus as fine as the middle: |error| < 4e-5, largest variate 22.9.
_CELL_BITS = 6
_FRACTION_BITS = 16
_SCALE_BITS = 20  # fixed point: units of 2^-20


@functools.cache
def _table() -> tuple[np.ndarray, np.ndarray]:
    """(base, slope), int32 [2 * 32 * 64]: fixed-point Gumbel at each cell's start, and its rise."""
    octave = np.arange(32)[:, None]
    edge = np.arange(2**_CELL_BITS + 1)[None, :]
    # Distance to the nearer end of (0, 1), at every cell's edges; octave z: 2^-(z+2)..2^-(z+1).
    distance = (1 + edge / 2**_CELL_BITS) * 2.0 ** -(octave + 2.0)
    low = -np.log(-np.log(distance))
    high = -np.log(-np.log1p(-distance))
    fixed = np.round(np.stack([low, high]) * 2**_SCALE_BITS).astype(np.int64)
    base = fixed[..., :-1].astype(np.int32).reshape(-1)
    slope = np.diff(fixed, axis=-1).astype(np.int32).reshape(-1)
    return base, slope


def _threefry2x32(xp: ModuleType, key: tuple[Any, Any], x0: Any, x1: Any) -> tuple[Any, Any]:
    """Threefry-2x32, 20 rounds; uint32 arrays of one shape in, two of it out."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << xp.uint32(rotation)) | (x1 >> xp.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + xp.uint32(group + 1)
    return x0, x1


def _leading_zeros(xp: ModuleType, x: Any) -> Any:
    """Leading zeros of non-zero uint32 values, as uint32."""
    if xp is jnp:
        return jax.lax.clz(x)
    # frexp's exponent is the bit length, exact for 32-bit integers in float64.
    return (32 - np.frexp(x.astype(np.float64))[1]).astype(np.uint32)


def _gumbel_from_bits(xp: ModuleType, bits: Any) -> Any:
    """Standard Gumbel variates, float32, from uint32 bits."""
    upper = bits >> xp.uint32(31)
    # Distance to the nearer end in units of 2^-32, odd so that it is never zero.
    distance = ((bits ^ (xp.uint32(0) - upper)) << xp.uint32(1)) | xp.uint32(1)
    octave = _leading_zeros(xp, distance)
    mantissa = distance << octave  # top bit set
    cell = (mantissa >> xp.uint32(31 - _CELL_BITS)) & xp.uint32(2**_CELL_BITS - 1)
    fraction = (mantissa >> xp.uint32(31 - _CELL_BITS - _FRACTION_BITS)) & xp.uint32(
        2**_FRACTION_BITS - 1
    )
    index = (((upper << xp.uint32(5)) | octave) << xp.uint32(_CELL_BITS)) | cell
    base, slope = (xp.asarray(part) for part in _table())
    rise = (slope[index] * fraction.astype(xp.int32)) >> xp.int32(_FRACTION_BITS)
    # A power of two only moves the exponent: exact, fused or not.
    return (base[index] + rise).astype(xp.float32) * xp.float32(2.0**-_SCALE_BITS)


def split_seed(seed: int) -> np.ndarray:
    """uint32 [2], low word first, of a seed of up to 64 bits."""
    return np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)


def gumbel(seed: Any, positions: Any, ids: Any, xp: ModuleType = np) -> Any:
    """The noise of some token ids, on the host (xp = numpy) or the device (xp = jax.numpy).

    Args:
      seed: uint32 [2] from `split_seed`.
      positions: int, absolute positions of the tokens to be drawn; broadcasts against `ids`.
      ids: int token ids.

    Returns:
      float32 of the broadcast shape; the same bits whichever xp.
    """
    positions, ids = xp.broadcast_arrays(xp.asarray(positions), xp.asarray(ids))
    ids = ids.astype(xp.uint32)
    with np.errstate(over="ignore"):
        even, odd = _threefry2x32(
            xp, (seed[0], seed[1]), positions.astype(xp.uint32), ids >> xp.uint32(1)
        )
        return _gumbel_from_bits(xp, xp.where(ids & xp.uint32(1), odd, even))


def gumbel_rows(seed: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """The noise of the whole vocabulary, on the device.

    Args:
      seed: uint32 [2].
      positions: int32 [T], absolute positions of the tokens to be drawn.
      vocab_size: V.

    Returns:
      float32 [T, V], what `gumbel` gives for every id, at half its cost.
    """
    # One Threefry call gives two words: ids 2j and 2j + 1 share the counter j.
    pairs = jnp.arange((vocab_size + 1) // 2, dtype=jnp.uint32)[None, :]
    rows = positions.astype(jnp.uint32)[:, None]
    rows, pairs = jnp.broadcast_arrays(rows, pairs)
    words = jnp.stack(_threefry2x32(jnp, (seed[0], seed[1]), rows, pairs), axis=-1)
    return _gumbel_from_bits(jnp, words.reshape(positions.shape[0], -1)[:, :vocab_size])
