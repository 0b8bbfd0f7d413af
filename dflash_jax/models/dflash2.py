"""The DFlash and DFlash2 drafters: a block of tokens from the target's hidden states, in one pass.

    context   c = hidden_norm(fc(taps)): keys and values only, one row a committed token
    block     [anchor, mask, mask, ...]: rows see the context and each other, and are not cached

DFlash2 adds grouped dynamic convolutions around attention and MLP, and a selector that scores pairs
of neighbouring candidates. Source: the PyPI package `dflash` 0.1.0 (the oracle in the tests) and
arXiv 2602.06036. Where implementations differ: the window is two-sided unless the layer is causal,
a layer whose `is_causal` is not given is causal when it slides, scores of pairs are float32.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dflash_jax.models import layers
from dflash_jax.models.dflash2_config import DrafterConfig, visible
from dflash_jax.models.layers import (
    Attend,
    Linear,
    RMSNorm,
    Rotary,
    SwiGLU,
    Weight,
    attention,
    inverse_frequencies,
    linear,
    rotary_table,
    rotate,
)
from dflash_jax.tree.lattice import Lattice


class KernelProjection(nn.Module):
    """Linear map to the convolutions' dynamic kernels; starts at zero: no change."""

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.features, x.shape[-1])
        weight = self.param("weight", nn.initializers.zeros, shape, jnp.float32)
        return linear(x.astype(self.dtype), weight)


def _identity_taps(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Taps (1, 0, ...): each row is itself."""
    del key
    return jnp.zeros(shape, dtype).at[:, 0].set(1)


def convolve(x: jax.Array, base: jax.Array, dynamic: jax.Array) -> jax.Array:
    """Causal convolution along the block, whose kernel is a base plus one of each row's own.

    Args:
      x: [..., T, D].
      base: [taps, D].
      dynamic: [..., T, taps, G]; group g of D/G neighbouring channels shares a value.

    Returns:
      [..., T, D]: y[t] = sum over i of (base[i] + dynamic[t, i]) * x[t - i], with x 0 before the
      block.
    """
    *batch, rows, hidden = x.shape
    taps, groups = dynamic.shape[-2:]
    base = base.astype(x.dtype).reshape(taps, groups, hidden // groups)
    grouped = x.reshape(*batch, rows, groups, hidden // groups)
    y = jnp.zeros_like(grouped)
    for tap in range(min(taps, rows)):
        edge = [(0, 0)] * len(batch) + [(tap, 0), (0, 0), (0, 0)]
        shifted = jnp.pad(grouped[..., : rows - tap, :, :], edge)
        y = y + (base[tap] + dynamic[..., tap, :, None]) * shifted
    return y.reshape(x.shape)


class GroupedDynamicConv(nn.Module):
    """Two convolutions around a sublayer, both with kernels read from the sublayer's input."""

    taps: int
    group_size: int
    hidden_size: int
    dtype: Any

    def setup(self) -> None:
        groups = self.hidden_size // self.group_size
        shape = (2, self.taps, self.hidden_size)
        self.base_kernel = self.param("base_kernel", _identity_taps, shape, jnp.float32)
        self.kernel_projection = KernelProjection(2 * self.taps * groups, self.dtype)

    def prepare(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [..., T, D] -> the sublayer's input [..., T, D], and the kernel for `finish`."""
        groups = self.hidden_size // self.group_size
        kernels = self.kernel_projection(x).reshape(*x.shape[:-1], 2, self.taps, groups)
        return convolve(x, self.base_kernel[0], kernels[..., 0, :, :]), kernels[..., 1, :, :]

    def finish(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """The sublayer's output x [..., T, D], convolved with the kernel of `prepare`."""
        return convolve(x, self.base_kernel[1], kernel)


class DrafterAttention(nn.Module):
    """Qwen3's attention; its keys come from the context too, through `keys_values`."""

    config: DrafterConfig
    layer: int

    def setup(self) -> None:
        c = self.config
        bias, dtype = c.attention_bias, c.dtype
        self.q_proj = Linear(c.num_heads * c.head_dim, bias, dtype)
        self.k_proj = Linear(c.num_kv_heads * c.head_dim, bias, dtype)
        self.v_proj = Linear(c.num_kv_heads * c.head_dim, bias, dtype)
        self.o_proj = Linear(c.hidden_size, bias, dtype)
        self.q_norm = RMSNorm(c.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(c.rms_norm_eps, dtype)

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.config.head_dim)

    def keys_values(self, x: jax.Array, rotary: Rotary) -> tuple[jax.Array, jax.Array]:
        """x [..., T, D] -> keys and values [..., T, K, H]."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), rotary)
        return keys, self._heads(self.v_proj(x))

    def __call__(self, x: jax.Array, rotary: Rotary, attend: Attend) -> jax.Array:
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), rotary)
        out = attend(self.layer, q, *self.keys_values(x, rotary))
        return self.o_proj(out.reshape(*out.shape[:-2], -1))


class DrafterLayer(nn.Module):
    """Attention and MLP, each behind a norm and, in DFlash2, between two convolutions."""

    config: DrafterConfig
    layer: int

    def setup(self) -> None:
        c = self.config
        self.self_attn = DrafterAttention(c, self.layer)
        self.mlp = SwiGLU(c.intermediate_size, dtype=c.dtype)
        self.input_layernorm = RMSNorm(c.rms_norm_eps, c.dtype)
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps, c.dtype)
        if c.has_convolutions:
            sizes = (c.conv_kernel_size, c.conv_group_size, c.hidden_size, c.dtype)
            self.attention_conv = GroupedDynamicConv(*sizes)
            self.mlp_conv = GroupedDynamicConv(*sizes)

    def __call__(self, x: jax.Array, rotary: Rotary, attend: Attend) -> jax.Array:
        h = self.input_layernorm(x)
        if self.config.has_convolutions:
            h, kernel = self.attention_conv.prepare(h)
            x = x + self.attention_conv.finish(self.self_attn(h, rotary, attend), kernel)
            h, kernel = self.mlp_conv.prepare(self.post_attention_layernorm(x))
            return x + self.mlp_conv.finish(self.mlp(h), kernel)
        x = x + self.self_attn(h, rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class CandidateSelector(nn.Module):
    """Scores of neighbouring candidates: <pred[a] * proj(h), succ[b]>, in float32 throughout."""

    vocab_size: int
    rank: int

    def setup(self) -> None:
        init, shape = nn.initializers.normal(0.02), (self.vocab_size, self.rank)
        self.predecessor_codebook = self.param("predecessor_codebook", init, shape, jnp.float32)
        self.successor_codebook = self.param("successor_codebook", init, shape, jnp.float32)
        self.hidden_projection = Linear(self.rank)

    def __call__(self, hidden: jax.Array, before: jax.Array, after: jax.Array) -> jax.Array:
        """hidden [..., D]; ids before [..., A], after [..., B] -> scores [..., A, B] float32."""
        # "float32" matters on GPUs, whose default would round the factors to TF32.
        with jax.default_matmul_precision("float32"):
            gate = self.hidden_projection(hidden)[..., None, :]
            predecessor = self.predecessor_codebook[before].astype(jnp.float32) * gate
            successor = self.successor_codebook[after].astype(jnp.float32)
            return jnp.einsum("...ar,...br->...ab", predecessor, successor)


class DFlash2(nn.Module):
    """The drafter. Embedding and head are the target's: rows and weights are given by the caller.

    Parameters mirror the checkpoint's tensors. `draft_vocab` [Vd] int32 (with a draft vocabulary)
    is read by `lattice` alone: a trainer keeps it out of the differentiated tree.
    """

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.fc = Linear(c.hidden_size, dtype=c.dtype)
        self.hidden_norm = RMSNorm(c.rms_norm_eps, c.dtype)
        self.layers = [DrafterLayer(c, layer) for layer in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps, c.dtype)
        if c.has_selector:
            self.candidate_selector = CandidateSelector(c.vocab_size, c.selector_rank)

    def context(self, taps: jax.Array, rotary: Rotary) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """Keys and values of committed tokens, for each layer. No input norm, no convolution.

        Args:
          taps: [..., S, len(target_layer_ids) * D], the target's taps side by side.
          rotary: of the tokens' absolute positions.

        Returns:
          For each layer k, v [..., S, K, H]; k carries its positions.
        """
        c = self.hidden_norm(self.fc(taps))
        return tuple(layer.self_attn.keys_values(c, rotary) for layer in self.layers)

    def block(self, embeds: jax.Array, rotary: Rotary, attend: Attend) -> jax.Array:
        """Hidden states of a block of any size T from 1, after the final norm.

        Args:
          embeds: [..., T, D], the target's embeddings of the anchor and of T - 1 mask tokens, times
            `input_embedding_scale`.
          rotary: of the rows' absolute positions.
          attend: gets the block's own q, k, v; joins k, v to the context's and masks (`visible`).
            The block's keys and values are never kept.

        Returns:
          [..., T, D]; row d + 1 speaks of the d-th drafted token.
        """
        x = embeds.astype(self.config.dtype)
        for layer in self.layers:
            x = layer(x, rotary, attend)
        return self.norm(x)

    def logits(self, hidden: jax.Array, head_weight: Weight) -> jax.Array:
        """hidden [..., D] times the target's head [V or Vd, D]: float32 [..., V or Vd]."""
        c = self.config
        logits = layers.logits(hidden.astype(c.dtype), head_weight)
        logits = logits * c.output_multiplier
        cap = c.final_logit_softcapping
        return jnp.tanh(logits / cap) * cap if cap else logits

    @nn.compact
    def target_ids(self, rows: jax.Array) -> jax.Array:
        """Rows of the head [...] -> the target's ids int32 [...]."""
        if not self.config.draft_vocab_size:
            return rows.astype(jnp.int32)
        size = self.config.draft_vocab_size
        ids = self.param("draft_vocab", lambda _: jnp.arange(size, dtype=jnp.int32))
        return ids[rows]

    def lattice(
        self, hidden: jax.Array, logits: jax.Array, anchor: jax.Array, top_k: int | None = None
    ) -> Lattice:
        """The candidates of the drafted positions and their scores.

        Args:
          hidden: [..., P, D], the block's rows from 1 on.
          logits: [..., P, V or Vd] float32, theirs.
          anchor: [...] int32, the block's token 0.
          top_k: candidates a position; None takes the selector's own number.

        Returns:
          A Lattice of P positions; without a selector its edges are 0.
        """
        count = top_k or self.config.selector_top_k
        if not count:
            raise ValueError("a drafter without a selector needs top_k")
        # Equal logits: top_k gives the lower row first, and draft_vocab rises. But it would put 0
        # before -0, so -0 becomes 0.
        unary, rows = jax.lax.top_k(jnp.where(logits == 0, 0.0, logits), count)
        # Without the barrier XLA merges the slices below into top_k's own and, no longer seeing a
        # top_k, sorts the vocabulary: 150 ms instead of 0.7 for 7 x 49,152 on a CPU.
        rows = jax.lax.optimization_barrier(rows)
        candidates = self.target_ids(rows)
        if not self.config.has_selector:
            edge = jnp.zeros((*candidates.shape, count), jnp.float32)
            return Lattice(candidates, unary, edge)
        first = jnp.broadcast_to(anchor[..., None, None], (*anchor.shape, 1, count))
        before = jnp.concatenate([first.astype(jnp.int32), candidates[..., :-1, :]], axis=-2)
        return Lattice(candidates, unary, self.candidate_selector(hidden, before, candidates))

    def __call__(
        self,
        taps: jax.Array,
        embeds: jax.Array,
        anchor: jax.Array,
        head_weight: jax.Array,
        top_k: int | None = None,
    ) -> Lattice:
        """One block after a context at positions 0..S-1, without a cache: the plain reference.

        Args:
          taps: [..., S, len(target_layer_ids) * D].
          embeds: [..., T, D].
          anchor: [...] int32.
          head_weight: [V or Vd, D].
        """
        c, context, rows = self.config, taps.shape[-2], embeds.shape[-2]
        table = rotary_table(inverse_frequencies(c.head_dim, c.rope_theta), context + rows)
        positions = jnp.arange(context + rows)
        cached = self.context(taps, table.at(positions[:context]))

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            keys = jnp.concatenate([cached[layer][0], k], axis=-3)
            values = jnp.concatenate([cached[layer][1], v], axis=-3)
            return attention(q, keys, values, visible(c, layer, positions[context:], positions))

        hidden = self.block(embeds, table.at(positions[context:]), attend)[..., 1:, :]
        return self.lattice(hidden, self.logits(hidden, head_weight), anchor, top_k)


def init_params(config: DrafterConfig, key: jax.Array) -> dict[str, Any]:
    """Parameters (float32) at which training starts: convolutions the identity, the rest normal."""
    top_k = config.selector_top_k or 1
    taps = jnp.zeros((1, len(config.target_layer_ids) * config.hidden_size), jnp.float32)
    embeds = jnp.zeros((2, config.hidden_size), jnp.float32)
    head = jnp.zeros((top_k, config.hidden_size), jnp.float32)
    model = DFlash2(config)
    init = jax.jit(lambda key: model.init(key, taps, embeds, jnp.int32(0), head, top_k))
    return init(key)["params"]
