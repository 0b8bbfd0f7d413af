"""Attention of a few rows over a long cache, whose bits depend on a row's path alone.

A row's keys are of two kinds, and which is which depends on the row's absolute position p alone:

    far    positions 0..p-16: the cache, shared by all rows, in chunks of fixed size by absolute
           position, merged in order (online softmax, Milakov and Gimelshein 2018)
    near   positions p-15..p: at most 16 keys, gathered for each row along its own root path,
           from the cache where committed and from the window where drafted

A window is at most 16 tokens deep, so a drafted token is always near, and a token's share in a sum
stays the same when it moves from the window to the cache. Chunks that a row does not reach change
nothing in it, so rows of different reach share one loop, and a loop ends with the context in use.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.decode.rows import RowPolicy
from dflash_jax.models.layers import MASKED, row_sum
from dflash_jax.tree.masks import MAX_ROWS

NEAR = MAX_ROWS  # keys of a row's own path, itself included


class Cache(NamedTuple):
    """Keys and values of committed tokens, all layers, by absolute position."""

    k: jax.Array  # [L, K, S, H]
    v: jax.Array  # [L, K, S, H]


class Part(NamedTuple):
    """A softmax over some of the keys, not yet normalised; float32."""

    top: jax.Array  # [T, K, G] greatest score
    total: jax.Array  # [T, K, G] sum of exp(score - top)
    out: jax.Array  # [T, K, G, H] sum of exp(score - top) * value


def merge(a: Part, b: Part) -> Part:
    """The softmax over both key sets."""
    top = jnp.maximum(a.top, b.top)
    scale_a, scale_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return Part(
        top,
        a.total * scale_a + b.total * scale_b,
        a.out * scale_a[..., None] + b.out * scale_b[..., None],
    )


def grouped(q: jax.Array, kv_heads: int) -> jax.Array:
    """q [T, N, H] -> [T, K, G, H]: query heads beside the key head that they share."""
    rows, heads, head_dim = q.shape
    return q.reshape(rows, kv_heads, heads // kv_heads, head_dim)


def finish(part: Part, dtype: jnp.dtype) -> jax.Array:
    """[T, N, H], normalised."""
    rows, kv_heads, groups, head_dim = part.out.shape
    out = part.out / part.total[..., None]
    return out.reshape(rows, kv_heads * groups, head_dim).astype(dtype)


def _partial_softmax(scores: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(top, weights, total) over the last axis; masked keys weigh exactly 0."""
    scores = jnp.where(mask, scores, MASKED)
    top = scores.max(axis=-1)
    weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
    return top, weights, row_sum(weights)[..., 0]


def cache_part(
    q: jax.Array,
    cache: Cache,
    layer: int,
    first: jax.Array,
    end: jax.Array,
    tile: int,
    chunk: int,
) -> Part:
    """Rows against the cache at positions first..end-1.

    Args:
      q: [T, K, G, H], T a multiple of `tile`.
      cache: the cache; S is a multiple of `chunk`.
      layer: whose keys and values.
      first, end: int32 [T], each row's range.
      tile: rows of one matmul.
      chunk: keys of one matmul.
    """
    rows, kv_heads, groups, head_dim = q.shape
    tiles = rows // tile
    # [tiles, K, tile * G, H]: one matmul a tile and key head, of one shape whatever T is.
    tiled = q.reshape(tiles, tile, kv_heads, groups, head_dim).transpose(0, 2, 1, 3, 4)
    tiled = tiled.reshape(tiles, kv_heads, tile * groups, head_dim)

    def spread(x: jax.Array) -> jax.Array:  # int32 [T] -> [tiles, 1, tile * G, 1]
        return jnp.repeat(x.reshape(tiles, 1, tile), groups, axis=-1)[..., None]

    first_of_row, end_of_row = spread(first), spread(end)
    scale = head_dim**-0.5

    def step(index: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array]):
        start = index * chunk
        where, sizes = (layer, 0, start, 0), (1, kv_heads, chunk, head_dim)
        k = jax.lax.dynamic_slice(cache.k, where, sizes)[0]
        v = jax.lax.dynamic_slice(cache.v, where, sizes)[0]
        positions = start + jnp.arange(chunk, dtype=jnp.int32)
        mask = (positions >= first_of_row) & (positions < end_of_row)
        scores = jnp.stack([_matmul_transposed(tiled[t], k) for t in range(tiles)]) * scale
        top, weights, total = _partial_softmax(scores, mask)
        weights = weights.astype(v.dtype)
        out = jnp.stack([_matmul(weights[t], v) for t in range(tiles)])
        return tuple(merge(Part(*part), Part(top, total, out)))

    shape = (tiles, kv_heads, tile * groups)
    empty = (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    chunks_end = (end.max() + chunk - 1) // chunk
    part = jax.lax.fori_loop(first.min() // chunk, chunks_end, step, empty)

    def untile(x: jax.Array) -> jax.Array:  # [tiles, K, tile * G, ...] -> [T, K, G, ...]
        x = x.reshape(tiles, kv_heads, tile, groups, *x.shape[3:])
        return jnp.swapaxes(x, 1, 2).reshape(rows, kv_heads, groups, *x.shape[4:])

    return Part(*(untile(x) for x in part))


def _matmul_transposed(a: jax.Array, b: jax.Array) -> jax.Array:
    """[K, M, H] x [K, C, H] -> float32 [K, M, C]."""
    return jax.lax.dot_general(
        a, b, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """[K, M, C] x [K, C, H] -> float32 [K, M, H]."""
    return jax.lax.dot_general(
        a, b, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )


def shared_part(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Part:
    """Rows against keys that they share: a prompt's chunk, a drafter's block.

    Args:
      q: [T, K, G, H].
      k, v: [U, K, H].
      mask: bool [T, U].
    """
    rows, kv_heads, groups, head_dim = q.shape
    by_head = q.transpose(1, 0, 2, 3).reshape(kv_heads, rows * groups, head_dim)
    scores = _matmul_transposed(by_head, k.transpose(1, 0, 2)) * head_dim**-0.5
    mask = jnp.repeat(mask, groups, axis=0)
    top, weights, total = _partial_softmax(scores, mask)
    out = _matmul(weights.astype(v.dtype), v.transpose(1, 0, 2))

    def untile(x: jax.Array) -> jax.Array:  # [K, T * G, ...] -> [T, K, G, ...]
        return jnp.swapaxes(x.reshape(kv_heads, rows, groups, *x.shape[2:]), 0, 1)

    return Part(untile(top), untile(total), untile(out))


class NearKeys(NamedTuple):
    """Where each row's near keys lie in the pool of recent cache rows and window rows."""

    start: jax.Array  # [] int32: first of the NEAR cache positions of the pool
    slots: jax.Array  # [T, NEAR] int32 into the pool [NEAR + T]
    mask: jax.Array  # [T, NEAR] bool: position exists


def near_keys(length: jax.Array, depths: jax.Array, paths: jax.Array) -> NearKeys:
    """Near keys of every window row, in order of their positions.

    Args:
      length: [] int32, tokens in the cache; row r stands at position length + depths[r].
      depths: [T] int32.
      paths: [T, MAX_ROWS] int32, rows of the ancestors by depth (`tree.masks`).
    """
    start = jnp.maximum(length - NEAR, 0)
    offsets = jnp.arange(NEAR, dtype=jnp.int32) - (NEAR - 1)
    positions = length + depths[:, None] + offsets[None, :]
    depth = positions - length
    drafted = jnp.take_along_axis(paths, jnp.clip(depth, 0, MAX_ROWS - 1), axis=1)
    slots = jnp.where(depth >= 0, NEAR + drafted, jnp.clip(positions - start, 0, NEAR - 1))
    return NearKeys(start, slots, positions >= 0)


def near_part(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: Cache, layer: int, near: NearKeys
) -> Part:
    """Rows against their own near keys; one matmul of one shape a row and key head.

    Args:
      q: [T, K, G, H].
      k, v: [T, K, H], the window's own keys and values.
    """
    _, kv_heads, _, head_dim = q.shape

    def gathered(all_layers: jax.Array, window: jax.Array) -> jax.Array:  # -> [T, K, NEAR, H]
        where, sizes = (layer, 0, near.start, 0), (1, kv_heads, NEAR, head_dim)
        recent = jax.lax.dynamic_slice(all_layers, where, sizes)[0]
        pool = jnp.concatenate([recent.transpose(1, 0, 2), window.astype(recent.dtype)])
        return pool[near.slots].transpose(0, 2, 1, 3)

    batch = ((0, 1), (0, 1))
    scores = jax.lax.dot_general(
        q, gathered(cache.k, k), (((3,), (3,)), batch), preferred_element_type=jnp.float32
    )
    top, weights, total = _partial_softmax(scores * head_dim**-0.5, near.mask[:, None, None, :])
    out = jax.lax.dot_general(
        weights.astype(v.dtype),
        gathered(cache.v, v),
        (((3,), (2,)), batch),
        preferred_element_type=jnp.float32,
    )
    return Part(top, total, out)


def window_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: Cache,
    layer: int,
    length: jax.Array,
    depths: jax.Array,
    near: NearKeys,
    policy: RowPolicy,
) -> jax.Array:
    """Tree attention of a window's rows: the committed context and each row's own ancestors.

    Args:
      q: [T, N, H]; k, v: [T, K, H]; cache, length, depths, near: as above.

    Returns:
      [T, N, H].
    """
    rows = q.shape[0]
    q_grouped = grouped(q, k.shape[1])
    padded = -rows % policy.query_tile
    end = jnp.maximum(length + depths - (NEAR - 1), 0)
    far = cache_part(
        jnp.pad(q_grouped, ((0, padded), (0, 0), (0, 0), (0, 0))),
        cache,
        layer,
        jnp.zeros(rows + padded, jnp.int32),
        jnp.pad(end, (0, padded)),
        policy.query_tile,
        policy.key_chunk,
    )
    far = Part(*(x[:rows] for x in far))
    return finish(merge(far, near_part(q_grouped, k, v, cache, layer, near)), q.dtype)
