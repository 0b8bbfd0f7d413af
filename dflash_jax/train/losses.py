"""What the drafter learns from: the target's distributions, and for the selector, what followed.

Logits are the largest arrays of training by far (rows × vocabulary). They live in one chunk of
blocks at a time: a chunk's gradient with respect to its hidden states is taken where its logits
are, so that none are kept or computed twice. The head is frozen, so nothing else is needed.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.models.dflash2 import DFlash2
from dflash_jax.models.dflash2_config import DrafterConfig

GROUP = 128  # ids; `grouped_top_k` looks at whole groups
NOT_DRAFTED = -1  # row of an id that the draft vocabulary lacks


class Head(NamedTuple):
    """The frozen head, limited to the ids that the drafter may say."""

    weight: jax.Array  # [R, D]: the target's head, R = V or the draft vocabulary's size
    ids: jax.Array  # [R] int32, rising
    row_of: jax.Array  # [V] int32: row of an id, or NOT_DRAFTED


class Rows(NamedTuple):
    """What the loss of each drafted position needs. A blocks, P positions each."""

    target_hidden: jax.Array  # [B, A, P, D]: normed, at the token before the label
    label_rows: jax.Array  # [B, A, P] int32: row of the label, 0 when it has none
    weights: jax.Array  # [B, A, P] float32


class HeadOutput(NamedTuple):
    """Sums and candidates of all rows."""

    loss: jax.Array  # [] float32, weighted sum
    top_logits: jax.Array  # [B, A, P, K] float32
    top_rows: jax.Array  # [B, A, P, K] int32
    label_logits: jax.Array  # [B, A, P] float32


class HeadSpec(NamedTuple):
    """Static choices of `head_loss`; hashable."""

    config: DrafterConfig
    candidates: int  # K
    chunks: int  # the blocks are split into so many
    label_weight: float  # share of the cross-entropy with the label; the rest is distillation


def make_head(weight: jax.Array, draft_vocab: jax.Array | None) -> Head:
    """The head [V, D] of the target, limited to `draft_vocab` [R], rising, when there is one."""
    vocabulary = weight.shape[0]
    if draft_vocab is None:
        every = jnp.arange(vocabulary, dtype=jnp.int32)
        return Head(weight, every, every)
    rows = jnp.arange(len(draft_vocab), dtype=jnp.int32)
    row_of = jnp.full(vocabulary, NOT_DRAFTED, jnp.int32).at[draft_vocab].set(rows)
    return Head(weight[draft_vocab], jnp.asarray(draft_vocab, jnp.int32), row_of)


def grouped_top_k(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of the last axis, by two small sorts instead of one large one.

    The largest elements lie in the groups with the largest maxima. Among equal values another one
    may be chosen than `lax.top_k` would.
    """
    size = x.shape[-1]
    groups = size // GROUP
    if size % GROUP or groups <= count:
        return jax.lax.top_k(x, count)
    grouped = x.reshape(*x.shape[:-1], groups, GROUP)
    best_groups = jax.lax.top_k(grouped.max(axis=-1), count)[1]
    members = jnp.take_along_axis(grouped, best_groups[..., None], axis=-2)
    values, index = jax.lax.top_k(members.reshape(*x.shape[:-1], count * GROUP), count)
    group = jnp.take_along_axis(best_groups, index // GROUP, axis=-1)
    return values, group * GROUP + index % GROUP


def _chunk_loss(
    spec: HeadSpec, hidden: jax.Array, rows: Rows, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    logits: Any = DFlash2(spec.config).apply({}, hidden, weight, method="logits")
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    label_logits = jnp.take_along_axis(logits, rows.label_rows[..., None], axis=-1)[..., 0]
    target = jax.lax.dot_general(
        rows.target_hidden,
        weight.astype(rows.target_hidden.dtype),
        (((hidden.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    # Cross-entropy with the target's distribution: the divergence, up to a constant.
    expected = jnp.sum(jax.nn.softmax(target, axis=-1) * logits, axis=-1)
    mixed = (1 - spec.label_weight) * expected + spec.label_weight * label_logits
    loss = jnp.sum(rows.weights * (normalizer - mixed))
    top = grouped_top_k(jax.lax.stop_gradient(logits), spec.candidates)
    return loss, (*top, label_logits)


def _split(array: jax.Array, chunks: int) -> jax.Array:
    """[B, A, ...] -> [chunks, B, A/chunks, ...]; devices share the batch axis, so it stays."""
    batch, blocks, *rest = array.shape
    return array.reshape(batch, chunks, blocks // chunks, *rest).swapaxes(0, 1)


def _join(array: jax.Array) -> jax.Array:
    chunks, batch, blocks, *rest = array.shape
    return array.swapaxes(0, 1).reshape(batch, chunks * blocks, *rest)


def _head_forward(
    spec: HeadSpec, hidden: jax.Array, rows: Rows, weight: jax.Array
) -> tuple[HeadOutput, jax.Array]:
    """The output, and the loss's gradient with respect to hidden."""
    chunk_loss = jax.value_and_grad(functools.partial(_chunk_loss, spec), has_aux=True)

    def one(loss: jax.Array, chunk: Any) -> Any:
        chunk_hidden, chunk_rows = chunk
        (value, aux), gradient = chunk_loss(chunk_hidden, chunk_rows, weight)
        return loss + value, (aux, gradient)

    split = jax.tree.map(lambda x: _split(x, spec.chunks), (hidden, rows))
    loss, (aux, gradient) = jax.lax.scan(one, jnp.float32(0), split)
    return HeadOutput(loss, *map(_join, aux)), _join(gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def head_loss(spec: HeadSpec, hidden: jax.Array, rows: Rows, weight: jax.Array) -> HeadOutput:
    """Weighted cross-entropy of the drafted positions, and their candidates.

    Args:
      spec: static choices.
      hidden: [B, A, P, D], the drafter's.
      rows: what each position should say. Not differentiated.
      weight: [R, D], the head. Not differentiated.

    Returns:
      HeadOutput; only its loss has a gradient, and only with respect to hidden.
    """
    return _head_forward(spec, hidden, rows, weight)[0]


def _head_backward(spec: HeadSpec, gradient: jax.Array, cotangent: HeadOutput) -> Any:
    del spec
    return (cotangent.loss * gradient).astype(gradient.dtype), None, None


head_loss.defvjp(_head_forward, _head_backward)


def selector_loss(
    config: DrafterConfig,
    params: Any,
    hidden: jax.Array,
    output: HeadOutput,
    before: jax.Array,
    label_rows: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    replace: bool,
) -> jax.Array:
    """Cross-entropy among the unary candidates, the true previous token as predecessor.

    The unary logits are constants here: they learn from `head_loss`.

    Args:
      params: the drafter's.
      hidden: [B, A, P, D].
      output: of `head_loss`.
      before: [B, A, P] int32, the token before each label.
      label_rows: [B, A, P] int32.
      weights: [B, A, P] float32.
      ids: [R] int32, the head's ids.
      replace: a label that is no candidate takes the last one's place; else its row is left out.

    Returns:
      The weighted sum, float32.
    """
    found = output.top_rows == label_rows[..., None]
    missing = ~found.any(axis=-1)
    last = jnp.arange(output.top_rows.shape[-1]) == output.top_rows.shape[-1] - 1
    replaced = missing[..., None] & last
    candidates = jnp.where(replaced, label_rows[..., None], output.top_rows)
    unary = jnp.where(replaced, output.label_logits[..., None], output.top_logits)
    is_label = jnp.where(missing[..., None], last, found)
    edge: Any = DFlash2(config).apply(
        {"params": params},
        hidden,
        before[..., None],
        ids[candidates],
        method=lambda drafter, *args: drafter.candidate_selector(*args),
    )
    log_chance = jax.nn.log_softmax(jax.lax.stop_gradient(unary) + edge[..., 0, :], axis=-1)
    if not replace:
        weights = jnp.where(missing, 0, weights)
    return -jnp.sum(weights * jnp.sum(jnp.where(is_label, log_chance, 0), axis=-1))
