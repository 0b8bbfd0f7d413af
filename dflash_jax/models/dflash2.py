"""The DFlash and DFlash2 drafters: a block of tokens from the target's hidden states, in one pass.

    context   c = hidden_norm(fc(taps)): keys and values only, one row a committed token
    block     [anchor, mask, mask, ...]: rows see the context and each other, and are not cached

DFlash2 adds grouped dynamic convolutions around attention and MLP, and a selector that scores pairs
of neighbouring candidates. Source: the PyPI package `dflash` 0.1.0 (the oracle in the tests) and
arXiv 2602.06036. Where implementations differ: the window is two-sided unless the layer is causal,
a layer whose `is_causal` is not given is causal when it slides, scores of pairs are float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dflash_jax.errors import InputError
from dflash_jax.models.layers import (
    Attend,
    Linear,
    RMSNorm,
    Rotary,
    SwiGLU,
    attention,
    inverse_frequencies,
    rotary_table,
    rotate,
)
from dflash_jax.tree.lattice import Lattice

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Sizes and options of a drafter; hashable, so it may be a static argument.

    Raises InputError when the values do not fit each other.
    """

    vocab_size: int
    hidden_size: int  # the target's
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int  # past it the caller drops to plain decoding
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # tap l is the output of the target's block l
    mask_token_id: int
    block_size: int  # as trained: the anchor and block_size - 1 drafted positions
    layer_types: tuple[str, ...]  # FULL or SLIDING, one a layer
    sliding_window: int | None = None
    is_causal: bool | None = None  # None: sliding layers are causal
    conv_kernel_size: int = 0  # taps; 0: no convolutions
    conv_group_size: int = 0
    selector_rank: int = 0  # 0: no selector
    selector_top_k: int = 0
    input_embedding_scale: float = 1.0  # the caller scales the target's embeddings by it
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    attention_bias: bool = False
    # Our own extension: the head covers only these many ids, listed in the parameter `draft_vocab`.
    draft_vocab_size: int = 0  # 0: the whole vocabulary
    dtype: Any = jnp.float32  # of the computation

    def __post_init__(self) -> None:
        for name in ("target_layer_ids", "layer_types"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        self._check_sizes()
        self._check_layers()
        self._check_vocabulary()

    def _check_sizes(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            required = field.default is dataclasses.MISSING
            if required and isinstance(value, int | float) and field.name != "mask_token_id":
                _require(value > 0, f"{field.name} is {value}, must be positive")
        _require(
            self.num_heads % self.num_kv_heads == 0, "num_heads not a multiple of its kv heads"
        )
        _require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd")
        _require(self.block_size > 1, f"block_size {self.block_size} leaves nothing to draft")
        _require(
            (self.conv_kernel_size > 0) == (self.conv_group_size > 0)
            and self.conv_kernel_size >= 0,
            f"conv_kernel_size {self.conv_kernel_size} and conv_group_size"
            f" {self.conv_group_size} must both be given or both be 0",
        )
        if self.has_convolutions:
            _require(
                self.hidden_size % self.conv_group_size == 0,
                f"conv_group_size {self.conv_group_size} does not divide {self.hidden_size}",
            )

    def _check_layers(self) -> None:
        _require(
            len(self.layer_types) == self.num_layers
            and all(kind in (FULL, SLIDING) for kind in self.layer_types),
            f"layer_types must be {self.num_layers} times {FULL} or {SLIDING}",
        )
        if SLIDING in self.layer_types:
            _require(
                self.sliding_window is not None and self.sliding_window > 0,
                f"layer_types has {SLIDING}, but sliding_window is {self.sliding_window}",
            )
        ids = self.target_layer_ids
        _require(len(ids) > 0, "target_layer_ids is empty")
        _require(
            all(0 <= layer < self.num_target_layers for layer in ids),
            f"target_layer_ids {list(ids)} must be within 0..{self.num_target_layers - 1}"
            " (num_target_layers)",
        )

    def _check_vocabulary(self) -> None:
        _require(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}",
        )
        _require(
            0 <= self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size {self.draft_vocab_size} exceeds the vocabulary of {self.vocab_size}",
        )
        _require(
            (self.selector_rank > 0) == (self.selector_top_k > 0) and self.selector_rank >= 0,
            f"selector_rank {self.selector_rank} and selector_top_k {self.selector_top_k}"
            " must both be given or both be 0",
        )
        _require(
            self.selector_top_k <= self.head_rows,
            f"selector_top_k {self.selector_top_k} exceeds the {self.head_rows} ids of the head",
        )

    @property
    def has_convolutions(self) -> bool:
        return self.conv_kernel_size > 0

    @property
    def has_selector(self) -> bool:
        return self.selector_rank > 0

    @property
    def head_rows(self) -> int:
        """Rows of the head: the draft vocabulary's, or the whole vocabulary's."""
        return self.draft_vocab_size or self.vocab_size

    def window(self, layer: int) -> int | None:
        """The layer's window in tokens; None sees the whole context."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def causal(self, layer: int) -> bool:
        """Whether rows of the layer see no later row."""
        if self.is_causal is None:
            return self.layer_types[layer] == SLIDING
        return self.is_causal


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(f"drafter config: {message}")


def visible(
    config: DrafterConfig, layer: int, query_positions: jax.Array, key_positions: jax.Array
) -> jax.Array:
    """Which rows see which keys, by absolute position alone.

    Args:
      query_positions: [..., T] int.
      key_positions: [..., S] int.

    Returns:
      bool [..., T, S]: |q - k| < window, and k <= q where the layer is causal. Whether a cache slot
      is filled, or belongs to the row's own block, is the caller's to add.
    """
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    mask = distance == distance
    window = config.window(layer)
    if window is not None:
        mask &= abs(distance) < window
    if config.causal(layer):
        mask &= distance >= 0
    return mask


class KernelProjection(nn.Module):
    """Linear map to the convolutions' dynamic kernels; starts at zero: no change."""

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.features, x.shape[-1])
        weight = self.param("weight", nn.initializers.zeros, shape, jnp.float32)
        return jnp.einsum("...i,oi->...o", x.astype(self.dtype), weight.astype(self.dtype))


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

    def logits(self, hidden: jax.Array, head_weight: jax.Array) -> jax.Array:
        """hidden [..., D] times the target's head [V or Vd, D]: float32 [..., V or Vd]."""
        c = self.config
        contract = (((hidden.ndim - 1,), (1,)), ((), ()))
        logits = jax.lax.dot_general(
            hidden.astype(c.dtype),
            head_weight.astype(c.dtype),
            contract,
            preferred_element_type=jnp.float32,
        )
        logits = logits * c.output_multiplier
        if c.final_logit_softcapping:
            logits = jnp.tanh(logits / c.final_logit_softcapping) * c.final_logit_softcapping
        return logits

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
        # Equal logits: top_k gives the lower row first, and draft_vocab rises.
        unary, rows = jax.lax.top_k(logits, count)
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
