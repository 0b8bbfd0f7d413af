"""The gated delta rule of Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464).

A head's state S [Dk, Dv] forgets by exp(g), g <= 0, then learns one association of a key and a
value at the rate beta (`step` is the definition):

    S' = exp(g) S        u = beta (v - k S')        S = S' + k u^T        out = q S

Unrolled from an older state B, with s(i..j) the sum of g from token i to token j,

    S_n = exp(s(1..n)) B + sum over i <= n of exp(s(i+1..n)) k_i u_i^T

so that the vectors u stand for all that was learned since B: `chunked` gets those of a chunk at
once, `tree` those of a window's rows, and `advance` turns them into a state.

Everything here is float32; q and k come normed, q scaled too. Value heads share key heads in
order: Hk key heads, each serving Hv / Hk neighbouring value heads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Without it a GPU would multiply in TF32, whose ten bits of mantissa are no float32 state.
_PRECISE = jax.lax.Precision.HIGHEST
_einsum = functools.partial(jnp.einsum, precision=_PRECISE)

CHUNK = 64  # tokens whose u `chunked` finds at once

# A window's rows start from the state at a multiple of BLOCK tokens, at least BLOCK - 1 tokens
# before their own; a window is at most that deep, so the state is of committed tokens alone.
BLOCK = 16
RECENT = 2 * BLOCK - 1  # committed tokens that a row may need besides that state
_NEAR = 2 * BLOCK  # distances of a row from the tokens of its path, rounded up


def step(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token.

    Args:
      state: [Hv, Dk, Dv].
      q, k: [Hk, Dk]; v: [Hv, Dv]; g, beta: [Hv].

    Returns:
      The output [Hv, Dv] and the new state.
    """
    heads = v.shape[0]
    q, k = _per_value_head(q, heads, 0), _per_value_head(k, heads, 0)
    state = jnp.exp(g)[:, None, None] * state
    u = beta[:, None] * (v - _einsum("hk,hkv->hv", k, state))
    state = state + k[:, :, None] * u[:, None, :]
    return _einsum("hk,hkv->hv", q, state), state


def _per_value_head(x: jax.Array, heads: int, axis: int) -> jax.Array:
    """Repeats each key head's part of x for the value heads that it serves."""
    return jnp.repeat(x, heads // x.shape[axis], axis=axis)


class Chunked(NamedTuple):
    """What `chunked` gives."""

    out: jax.Array  # [T, Hv, Dv]
    u: jax.Array  # [T, Hv, Dv]; zeros in rows that do not count
    state: jax.Array  # [Hv, Dk, Dv] after the last row that counts


def chunked(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    count: jax.Array | None = None,
) -> Chunked:
    """A sequence, chunk by chunk (Yang et al. 2024, arXiv 2406.06484, section 3.2).

    Within a chunk the u solve a unit lower triangular system, whose inverse is the UT transform.

    Args:
      state: [Hv, Dk, Dv] before the first row.
      q, k: [T, Hk, Dk]; v: [T, Hv, Dv]; g, beta: [T, Hv]; any T.
      count: [] int32: rows from there on are padding, change nothing, and give no output.
    """
    rows, heads = v.shape[:2]
    if count is not None:
        valid = jnp.arange(rows) < count
        g, beta = jnp.where(valid[:, None], g, 0), jnp.where(valid[:, None], beta, 0)
    parts = _Chunk(*(_cut(x) for x in (q, k, v, g, beta)))
    state, (out, u) = jax.lax.scan(_one_chunk, state, parts)
    out, u = (x.reshape(-1, heads, v.shape[-1])[:rows] for x in (out, u))
    return Chunked(out, u, state)


class _Chunk(NamedTuple):
    q: jax.Array  # [C, Hk, Dk]
    k: jax.Array  # [C, Hk, Dk]
    v: jax.Array  # [C, Hv, Dv]
    g: jax.Array  # [C, Hv]
    beta: jax.Array  # [C, Hv]


def _cut(x: jax.Array) -> jax.Array:
    """[T, ...] -> [chunks, C, ...], zeros behind the last row: beta 0 and g 0 change nothing."""
    x = jnp.pad(x, ((0, -x.shape[0] % CHUNK), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(-1, CHUNK, *x.shape[1:])


def _one_chunk(state: jax.Array, c: _Chunk) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    rows, heads = c.v.shape[:2]
    lower = np.tri(rows, dtype=bool)[:, :, None]
    below = np.tri(rows, k=-1, dtype=bool)[:, :, None]
    # sums[i, j] = s(j+1..i): summed as such, since a difference of two long sums loses digits.
    sums = jnp.cumsum(jnp.where(below, c.g[:, None, :], 0), axis=0)
    decay = jnp.where(lower, jnp.exp(sums), 0)
    since_start = jnp.exp(sums[:, 0] + c.g[0])[:, :, None]  # [C, Hv, 1]
    keys = _per_value_head(c.k, heads, 1)
    queries = _per_value_head(c.q, heads, 1)
    similar = _per_value_head(_einsum("ihd,jhd->ijh", c.k, c.k), heads, 2)
    system = jnp.where(below, c.beta[:, None] * similar * decay, 0)
    inverse = _unit_lower_inverse(system.transpose(2, 0, 1))  # [Hv, C, C]
    old = since_start * _einsum("ihk,hkv->ihv", keys, state)
    u = _einsum("hij,jhv->ihv", inverse, c.beta[:, :, None] * (c.v - old))
    attended = _per_value_head(_einsum("ihd,jhd->ijh", c.q, c.k), heads, 2) * decay
    out = since_start * _einsum("ihk,hkv->ihv", queries, state)
    out = out + _einsum("ijh,jhv->ihv", attended, u)
    return advance(state, c.k, u, c.g, jnp.int32(rows)), (out, u)


def _unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 for strictly lower triangular `lower` [..., C, C].

    By blocks of doubled size: the inverse of [[A, 0], [B, D]] is [[a, 0], [-d B a, d]], with a and
    d the inverses of A and D. As stable as substitution, which the powers of `lower` are not.
    """
    size = lower.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    half = 1
    while half < size:
        block = np.arange(size) // half
        corner = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
        inverse = inverse - _einsum(
            "...ij,...jk,...kl->...il", inverse, jnp.where(corner, lower, 0), inverse
        )
        half *= 2
    return inverse


def advance(
    state: jax.Array, k: jax.Array, u: jax.Array, g: jax.Array, count: jax.Array
) -> jax.Array:
    """The state after the first `count` of some rows; `state` itself, bit for bit, after none.

    Args:
      state: [Hv, Dk, Dv] before the first row.
      k: [T, Hk, Dk]; u: [T, Hv, Dv]; g: [T, Hv].
      count: [] int32, 0..T.
    """
    rows, heads = u.shape[:2]
    valid = (jnp.arange(rows) < count)[:, None]
    g = jnp.where(valid, g, 0)
    later = _einsum("ij,jh->ih", np.tri(rows, k=-1, dtype=np.float32).T, g)  # s(i+1..count)
    keys = _per_value_head(k, heads, 1) * jnp.where(valid, jnp.exp(later), 0)[:, :, None]
    decay = jnp.exp(later[0] + g[0])
    return decay[:, None, None] * state + _einsum("ihk,ihv->hkv", keys, u)


class Recent(NamedTuple):
    """The last RECENT committed tokens, oldest first; zeros before the first token."""

    k: jax.Array  # [RECENT, Hk, Dk]
    u: jax.Array  # [RECENT, Hv, Dv]
    g: jax.Array  # [RECENT, Hv]


class Paths(NamedTuple):
    """Where the rows of a window find the tokens of their root paths; the same in every layer.

    Columns are the recent tokens, then the window's rows: ancestors before descendants.
    """

    near: jax.Array  # [T, 2 * BLOCK] int32: column of the token at a distance from the row
    reach: jax.Array  # [T] int32: distance of the oldest token that its state does not hold
    slot: jax.Array  # [T] int32: which of the two block states is its own
    distance: jax.Array  # [T, RECENT + T] int32: of a column's token from the row
    seen: jax.Array  # [T, RECENT + T] bool: the token is on its path and not in its state


def paths_of(length: jax.Array, depths: jax.Array, paths: jax.Array) -> Paths:
    """Paths of a window's rows.

    A row at position p starts from the state before position f, the multiple of BLOCK with
    p - f in BLOCK - 1 .. 2 * BLOCK - 2: a matter of p alone, however it was reached.

    Args:
      length: [] int32, committed tokens; row r stands at position length + depths[r].
      depths: [T] int32, below BLOCK.
      paths: [T, BLOCK] int32, row of each ancestor by depth, itself included (`tree.masks`).
    """
    rows = depths.shape[0]
    positions = length + depths
    reach = (positions + 1) % BLOCK + BLOCK - 1
    block = (positions - reach) // BLOCK
    depth = depths[:, None] - jnp.arange(_NEAR, dtype=jnp.int32)[None, :]  # < 0: committed
    drafted = jnp.take_along_axis(paths, jnp.clip(depth, 0, BLOCK - 1), axis=1)
    near = jnp.where(depth >= 0, RECENT + drafted, jnp.maximum(RECENT + depth, 0))

    committed = depths[:, None] + RECENT - jnp.arange(RECENT, dtype=jnp.int32)[None, :]
    between = depths[:, None] - depths[None, :]
    on_path = paths[:, jnp.clip(depths, 0, BLOCK - 1)] == jnp.arange(rows)[None, :]
    distance = jnp.concatenate([committed, between], axis=1)
    seen = jnp.concatenate([committed <= reach[:, None], on_path & (between >= 0)], axis=1)
    return Paths(near, reach, block % 2, jnp.clip(distance, 0, _NEAR - 1), seen)


def tree(
    blocks: jax.Array,
    recent: Recent,
    paths: Paths,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    tile: int = BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """Each row one step from its parent, siblings apart; no row's state is formed.

    A row's bits depend on its root path alone, not on the other rows, nor on which of its
    ancestors are committed:
      - its state is that of `paths_of`, multiplied in tiles of one shape;
      - its dot products and decays are taken by distance, in one shape a row;
      - its sum over the tokens since then is a chain of multiply-adds in the order of positions,
        one loop body for committed and drafted tokens. Tokens off the path add 0 times something.

    Args:
      blocks: [2, Hv, Dk, Dv]: the states before positions BLOCK * m, in slot m % 2, for the two
        greatest m with BLOCK * m <= length.
      recent: the tokens before position length.
      paths: of the window.
      q, k: [T, Hk, Dk]; v: [T, Hv, Dv]; g, beta: [T, Hv].
      tile: rows of one product with a state.

    Returns:
      out [T, Hv, Dv], and u [T, Hv, Dv], which `advance` needs of the rows that are committed.
    """
    rows, heads = v.shape[:2]
    both = jnp.stack([q, k], axis=2)  # [T, Hk, 2, Dk]
    near_g = jnp.concatenate([recent.g, g])[paths.near]  # [T, near, Hv]
    # Adds alone, in an order that the shape of one row fixes: [T, Hv, near].
    sums = jax.lax.associative_scan(jnp.add, near_g.transpose(0, 2, 1), axis=2)
    # By distance i: what is left, at the row, of what the token at that distance learned.
    decay = jnp.exp(jnp.pad(sums[:, :, :-1], ((0, 0), (0, 0), (1, 0))))
    near_k = jnp.concatenate([recent.k, k])[paths.near]  # [T, near, Hk, Dk]
    similar = jax.lax.dot_general(
        both, near_k, (((3,), (3,)), ((0, 1), (0, 2))), precision=_PRECISE
    )  # [T, Hk, 2, near]
    weights = _per_value_head(similar, heads, 1) * decay[:, :, None, :]
    weights = jax.vmap(lambda w, distance: w[..., distance])(weights, paths.distance)
    weights = jnp.where(paths.seen[:, None, None, :], weights, 0)  # [T, Hv, 2, columns]

    left = jnp.exp(jax.vmap(lambda s, reach: s[:, reach])(sums, paths.reach))  # [T, Hv]
    old = left[:, :, None, None] * _old(blocks, paths.slot, both, tile)  # [T, Hv, 2, Dv]
    columns = _Column(
        weights.transpose(3, 0, 1, 2),
        jnp.concatenate([recent.u, v - old[:, :, 1]]),
        jnp.concatenate([jnp.zeros((RECENT, heads), beta.dtype), beta]),
        jnp.concatenate([jnp.full(RECENT, _COMMITTED), jnp.arange(rows)]),
    )
    sums, u = _over_columns(jnp.zeros_like(old), columns)
    return old[:, :, 0] + sums[:, :, 0], u[RECENT:]


_COMMITTED = -1


class _Column(NamedTuple):
    """A token as the rows of a window meet it."""

    weight: jax.Array  # [T, Hv, 2]: of its u in the rows' outputs, and in their own u
    value: jax.Array  # [Hv, Dv]: its u if committed, else v less what its block state says
    beta: jax.Array  # [Hv]
    row: jax.Array  # [] int32, or _COMMITTED


def _over_columns(sums: jax.Array, columns: _Column) -> tuple[jax.Array, jax.Array]:
    """Adds every column to the rows' sums [T, Hv, 2, Dv]; all columns' u [columns, Hv, Dv]."""

    def add(sums: jax.Array, column: _Column) -> tuple[jax.Array, jax.Array]:
        known = sums[column.row, :, 1]  # complete: a row's ancestors are columns before it
        u = column.beta[:, None] * (column.value - known)
        u = jnp.where(column.row == _COMMITTED, column.value, u)
        return sums + column.weight[..., None] * u[:, None, :], u

    # A loop's step costs a GPU several launches; unrolled, XLA fuses the steps.
    return jax.lax.platform_dependent(
        sums,
        columns,
        cpu=lambda sums, columns: jax.lax.scan(add, sums, columns),
        default=lambda sums, columns: jax.lax.scan(add, sums, columns, unroll=True),
    )


def _old(blocks: jax.Array, slot: jax.Array, both: jax.Array, tile: int) -> jax.Array:
    """Queries and keys times each row's block state: [T, Hv, 2, Dv]."""
    rows, heads = both.shape[0], blocks.shape[1]
    tiles = -(-rows // tile)
    padded = jnp.pad(both, ((0, tiles * tile - rows), (0, 0), (0, 0), (0, 0)))
    padded = _per_value_head(padded, heads, 1).transpose(1, 0, 2, 3)  # [Hv, rows, 2, Dk]
    tiled = padded.reshape(heads, tiles, 2 * tile, -1)

    def times(block: jax.Array) -> jax.Array:
        parts = [_einsum("hik,hkv->hiv", tiled[:, t], block) for t in range(tiles)]
        out = jnp.concatenate(parts, axis=1).reshape(heads, tiles * tile, 2, -1)
        return out[:, :rows].transpose(1, 0, 2, 3)

    return jnp.where(slot[:, None, None, None] == 0, times(blocks[0]), times(blocks[1]))


class Layer(NamedTuple):
    """One layer's state, as `tree` takes it."""

    blocks: jax.Array  # [2, Hv, Dk, Dv]
    recent: Recent


def settle(
    layers: Sequence[Layer],
    windows: Sequence[Recent],
    length: jax.Array,
    path: jax.Array,
    count: jax.Array,
) -> tuple[Layer, ...]:
    """Commits a path of a window in every layer: nothing of the other rows stays.

    Args:
      layers: as `tree` had them.
      windows: k, u and g of the window's rows, [T, ...], by layer.
      length: [] int32, committed tokens before the window.
      path: [BLOCK] int32, the rows to commit, by depth.
      count: [] int32, 1..BLOCK, how many.
    """
    columns = last_of_path(RECENT, path, count)
    recents = [
        Recent(*(jnp.concatenate(pair)[columns] for pair in zip(layer.recent, rows, strict=True)))
        for layer, rows in zip(layers, windows, strict=True)
    ]
    done = length // BLOCK  # the newest block states are before position BLOCK * done

    def learn(states: list[jax.Array]) -> list[jax.Array]:
        first = BLOCK * done - (length + count - RECENT)
        for index, recent in enumerate(recents):
            block = Recent(*(jax.lax.dynamic_slice_in_dim(x, first, BLOCK) for x in recent))
            state = advance(states[index][done % 2], *block, jnp.int32(BLOCK))
            states[index] = states[index].at[(done + 1) % 2].set(state)
        return states

    full = (length + count) // BLOCK > done
    states = [layer.blocks for layer in layers]
    states = jax.lax.cond(full, learn, lambda states: states, states)  # one for all layers
    return tuple(map(Layer, states, recents))


def last_of_path(size: int, path: jax.Array, count: jax.Array) -> jax.Array:
    """Columns (`size` committed tokens, then rows) of the last `size` tokens once `count` rows of
    `path` are committed: [size] int32."""
    depth = count - size + jnp.arange(size, dtype=jnp.int32)
    return jnp.where(depth < 0, size + depth, size + path[jnp.maximum(depth, 0)])
