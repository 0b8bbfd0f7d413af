"""Many masked blocks of one sequence in one forward of the drafter.

A block stands for one round of serving: its anchor is committed, the tokens before the anchor have
context rows, and nothing after is known.

    tokens     t0 t1 t2 t3 t4 t5 t6 t7      anchor at 3, block of 4
    context    c0 c1 c2                     rows strictly before the anchor
    block               t3  m  m  m         sees c0..c2 and itself, no other block
    labels                 t4 t5 t6
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.models.dflash2 import DFlash2
from dflash_jax.models.dflash2_config import DrafterConfig, visible
from dflash_jax.models.layers import MASKED, Attend, Rotary


class Blocks(NamedTuple):
    """Anchors of a batch, and what follows each. P = block_size - 1 drafted positions."""

    anchors: jax.Array  # [B, A] int32 positions
    anchor_tokens: jax.Array  # [B, A] int32
    labels: jax.Array  # [B, A, P] int32: the tokens that followed
    valid: jax.Array  # [B, A, P] bool: the label is the target's own, as are all before it


def choose_anchors(own: jax.Array, count: int, key: jax.Array) -> jax.Array:
    """Random anchors, distinct while there are enough: bool [B, S] -> int32 [B, A], rising.

    An anchor is a token that the target chose and after which it chose another. In a row without
    so many anchors the rest are others, whose labels `cut_blocks` finds invalid.
    """
    possible = own & jnp.pad(own[:, 1:], ((0, 0), (0, 1)))
    possible = possible.at[:, 0].set(False)  # an anchor needs a context
    scores = jax.random.uniform(key, own.shape) + possible
    return jnp.sort(jax.lax.top_k(scores, count)[1].astype(jnp.int32), axis=-1)


def cut_blocks(tokens: jax.Array, own: jax.Array, anchors: jax.Array, drafted: int) -> Blocks:
    """Anchor tokens and labels at `anchors` [B, A] of tokens and own [B, S]."""
    length = tokens.shape[1]
    positions = anchors[..., None] + jnp.arange(1, drafted + 1)

    def at(array: jax.Array, index: jax.Array) -> jax.Array:
        flat = index.reshape(index.shape[0], -1)
        return jnp.take_along_axis(array, flat, axis=1).reshape(index.shape)

    inside = jnp.minimum(positions, length - 1)
    chosen = at(own, inside) & (positions < length) & at(own, anchors)[..., None]
    chosen &= anchors[..., None] > 0
    valid = jnp.cumprod(chosen.astype(jnp.int32), axis=-1).astype(bool)
    return Blocks(anchors, at(tokens, anchors), at(tokens, inside), valid)


def block_attention(
    config: DrafterConfig,
    context: tuple[tuple[jax.Array, jax.Array], ...],
    anchors: jax.Array,
) -> Attend:
    """Attention of isolated blocks.

    Args:
      config: the drafter's.
      context: for each layer keys and values [B, S, K, H] of every token of the sequence.
      anchors: [B, A] positions.

    Returns:
      attend(layer, q [B, A, T, N, H], k, v [B, A, T, K, H]) -> [B, A, T, N, H].
    """

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys, values = context[layer]
        batch, blocks, rows, heads, head_dim = q.shape
        kv_heads = keys.shape[2]
        grouped = q.reshape(batch, blocks, rows, kv_heads, heads // kv_heads, head_dim)
        own_positions = anchors[..., None] + jnp.arange(rows)
        key_positions = jnp.arange(keys.shape[1])
        before = key_positions < anchors[..., None, None]
        sees_context = visible(config, layer, own_positions, key_positions) & before
        sees_block = visible(config, layer, own_positions, own_positions)

        def masked(scores: jax.Array, mask: jax.Array) -> jax.Array:
            scores = scores.astype(jnp.float32) * head_dim**-0.5
            return jnp.where(mask[:, None, None], scores, MASKED)

        # [B, K, G, A, T, S] and [B, K, G, A, T, T]
        far = masked(jnp.einsum("batkgh,bskh->bkgats", grouped, keys), sees_context)
        near = masked(jnp.einsum("batkgh,baukh->bkgatu", grouped, k), sees_block)
        weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1).astype(v.dtype)
        out = jnp.einsum("bkgats,bskh->batkgh", weights[..., : keys.shape[1]], values)
        out += jnp.einsum("bkgatu,baukh->batkgh", weights[..., keys.shape[1] :], v)
        return out.reshape(q.shape)

    return attend


def block_hidden(
    config: DrafterConfig,
    params: Any,
    taps: jax.Array,
    embedding: jax.Array,
    blocks: Blocks,
    table: Rotary,
) -> jax.Array:
    """Hidden states of every block's drafted positions.

    Args:
      params: the drafter's.
      taps: [B, S, n·D], the target's, side by side.
      embedding: [V, D], the target's.
      blocks: of the batch.
      table: rotary rows of positions 0..S + block_size - 1 at least.

    Returns:
      [B, A, P, D], after the final norm.
    """
    model, variables = DFlash2(config), {"params": params}
    rows = blocks.labels.shape[-1] + 1
    context: Any = model.apply(
        variables, taps, table.at(jnp.arange(taps.shape[1])), method="context"
    )
    masks = jnp.full((*blocks.anchors.shape, rows - 1), config.mask_token_id, jnp.int32)
    ids = jnp.concatenate([blocks.anchor_tokens[..., None], masks], axis=-1)
    embeds = embedding[ids].astype(config.dtype) * config.input_embedding_scale
    rotary = table.at(blocks.anchors[..., None] + jnp.arange(rows))
    attend = block_attention(config, context, blocks.anchors)
    hidden: Any = model.apply(variables, embeds, rotary, attend, method="block")
    return hidden[..., 1:, :]
