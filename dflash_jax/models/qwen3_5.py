"""The text part of Qwen3.5 and its successors of the same shape: a hybrid target in Linen.

Most blocks mix tokens by Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024), some by attention whose
output is gated (Qwen Team 2025, Gated Attention, arXiv 2505.06708). Parameters carry Hugging Face's
names and orientation; linear maps of one input are joined (`qkv_proj`, `in_proj`, `gate_up_proj`).
A weight may be an Int8Matrix. The module holds no cache, no mask and no state: see `layers.Attend`
for its attention and `Recur` for its recurrences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.models import delta_rule, layers
from dflash_jax.models.layers import Attend, Linear, Rotary
from dflash_jax.models.llama import COMPUTE_DTYPES, FLOAT32
from dflash_jax.models.target_base import MLP, Target, TargetOutput

LINEAR = "linear_attention"
FULL = "full_attention"
_L2_EPSILON = 1e-6  # of the norm of queries and keys: a constant of the architecture


_MOST_LAYERS = 4096  # a damaged count would fill the memory with their kinds


def layer_kinds(num_layers: Any, full_attention_interval: Any) -> tuple[str, ...]:
    """Every n-th layer is attention. Raises InputError for numbers that cannot be."""
    for name, value, most in (
        ("num_layers", num_layers, _MOST_LAYERS),
        ("full_attention_interval", full_attention_interval, num_layers),
    ):
        if type(value) is not int or not 1 <= value <= most:
            raise InputError(f"model config: {name} must be from 1 to {most}, got {value!r}")
    return tuple(
        LINEAR if (layer + 1) % full_attention_interval else FULL for layer in range(num_layers)
    )


@dataclasses.dataclass(frozen=True)
class Qwen35Config:
    """Sizes of a target, and the dtype it computes in. Field names are Hugging Face's.

    Raises InputError when the values do not fit each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]  # LINEAR or FULL, one a layer
    num_heads: int
    num_kv_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float  # of a head's dimensions, the first ones
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    dtype: np.dtype = FLOAT32  # a name such as "bfloat16" is taken too

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or value < 1):
                raise InputError(
                    f"model config: {field.name} must be a positive integer, got {value!r}"
                )
            if field.type == "float" and not 0 < value < math.inf:
                raise InputError(f"model config: {field.name} must be positive")
        unknown = sorted(set(self.layer_types) - {LINEAR, FULL})
        if unknown or not self.layer_types:
            raise InputError(f"model config: layer_types {unknown} are neither {LINEAR} nor {FULL}")
        for many, few in (
            ("num_heads", "num_kv_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                raise InputError(
                    f"model config: {many} {getattr(self, many)} is no multiple of {few} "
                    f"{getattr(self, few)}"
                )
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise InputError(
                f"model config: partial_rotary_factor {self.partial_rotary_factor} of head_dim "
                f"{self.head_dim} gives {self.rotary_dim} rotary dimensions"
            )
        if str(jnp.dtype(self.dtype)) not in COMPUTE_DTYPES:
            raise InputError(f"model config: dtype {self.dtype} is none of {COMPUTE_DTYPES}")
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_full_layers(self) -> int:
        """Layers that call `attend`: those with keys and values to keep."""
        return self.layer_types.count(FULL)

    @property
    def num_linear_layers(self) -> int:
        """Layers that call `recur`: those with a recurrent state."""
        return self.layer_types.count(LINEAR)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: queries, keys, values."""
        return 2 * self.linear_key_dim + self.linear_value_dim


def inverse_frequencies(config: Qwen35Config) -> np.ndarray:
    """Rotary frequencies [R/2] float32 of the dimensions that turn; for `layers.rotary_table`."""
    return layers.inverse_frequencies(config.rotary_dim, config.rope_theta)


class Recur(Protocol):
    """What the caller does for the recurrent layers, as `Attend` for attention.

    `index` counts the recurrent layers alone (and `attend`'s the attention layers alone).
    """

    def inputs(self, index: int, x: jax.Array) -> jax.Array:
        """x [..., T, C] -> [..., T, W, C]: each row's own input last, behind those of the W - 1
        tokens before it on its path, zeros before the first token."""

    def delta_rule(
        self,
        index: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array,
        beta: jax.Array,
    ) -> jax.Array:
        """q, k [..., T, Hk, Dk], v [..., T, Hv, Dv], g, beta [..., T, Hv], all float32:
        [..., T, Hv, Dv]; see `models.delta_rule`."""


class WholeSequence:
    """`Recur` for whole sequences from the first token on, without a cache: training, tests."""

    def __init__(self, config: Qwen35Config):
        self._config = config

    def inputs(self, index: int, x: jax.Array) -> jax.Array:
        size = self._config.linear_conv_kernel_dim
        rows = x.shape[-2]
        padded = jnp.pad(x, (*((0, 0),) * (x.ndim - 2), (size - 1, 0), (0, 0)))
        return jnp.stack([padded[..., w : w + rows, :] for w in range(size)], axis=-2)

    def delta_rule(
        self,
        index: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array,
        beta: jax.Array,
    ) -> jax.Array:
        state = jnp.zeros((v.shape[-2], k.shape[-1], v.shape[-1]), jnp.float32)

        def one(*parts: jax.Array) -> jax.Array:
            return delta_rule.chunked(state, *parts).out

        for _ in range(v.ndim - 3):
            one = jax.vmap(one)
        return one(q, k, v, g, beta)


class CentredRMSNorm(nn.Module):
    """Root-mean-square norm whose weight is stored less one; float32 inside."""

    epsilon: float
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(layers.row_sum(x * x) / x.shape[-1] + self.epsilon)
        return (x * (1 + weight.astype(jnp.float32))).astype(self.dtype)


class GatedRMSNorm(nn.Module):
    """Root-mean-square norm with a plain weight, then times silu(gate)."""

    epsilon: float
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        x = x * jax.lax.rsqrt(layers.row_sum(x * x) / x.shape[-1] + self.epsilon)
        x = x * weight.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        return x.astype(self.dtype)


class GatedAttention(nn.Module):
    """Grouped-query attention, normed queries and keys, partial rotary, a sigmoid gate behind."""

    config: Qwen35Config
    index: int  # among the attention layers

    @nn.compact
    def __call__(self, x: jax.Array, rotary: Rotary, attend: Attend) -> jax.Array:
        config = self.config

        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        sizes = (2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        qkv = Linear(sum(sizes), config.attention_bias, config.dtype, name="qkv_proj")(x)
        both, k, v = (
            part.reshape(*x.shape[:-1], count, -1)
            for part, count in zip(_cut(qkv, sizes), (heads, kv_heads, kv_heads), strict=True)
        )
        q, gate = jnp.split(both, 2, axis=-1)
        q = CentredRMSNorm(config.rms_norm_eps, config.dtype, name="q_norm")(q)
        k = CentredRMSNorm(config.rms_norm_eps, config.dtype, name="k_norm")(k)
        out = attend(self.index, _rotate_first(q, rotary), _rotate_first(k, rotary), v)
        out = (out * jax.nn.sigmoid(gate)).reshape(*x.shape[:-1], -1)
        return Linear(config.hidden_size, config.attention_bias, config.dtype, name="o_proj")(out)


def _cut(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Parts of the last axis, one behind the other."""
    return jnp.split(x, np.cumsum(sizes)[:-1], axis=-1)


def _rotate_first(x: jax.Array, rotary: Rotary) -> jax.Array:
    """Turns the first dimensions of x [..., T, N, H], as many as `rotary` has; keeps the rest."""
    size = 2 * rotary.cos.shape[-1]
    return jnp.concatenate([layers.rotate(x[..., :size], rotary), x[..., size:]], axis=-1)


class GatedDeltaNet(nn.Module):
    """Projections, short convolution, gates and norm; the caller's `recur` does the rest."""

    config: Qwen35Config
    index: int  # among the recurrent layers

    @nn.compact
    def __call__(self, x: jax.Array, recur: Recur) -> jax.Array:
        config = self.config
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads

        keys, values = config.linear_key_dim, config.linear_value_dim

        sizes = (config.conv_dim, values, value_heads, value_heads)
        joined = Linear(sum(sizes), dtype=config.dtype, name="in_proj")(x)
        qkv, z, b, a = _cut(joined, sizes)
        qkv = recur.inputs(self.index, qkv)
        qkv = ShortConvolution(config.linear_conv_kernel_dim, name="conv1d")(qkv)
        q, k, v = (
            part.reshape(*x.shape[:-1], heads, -1)
            for part, heads in zip(
                _cut(qkv, (keys, keys, values)), (key_heads, key_heads, value_heads), strict=True
            )
        )
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        rate = self.param("A_log", nn.initializers.zeros, (value_heads,), jnp.float32)
        bias = self.param("dt_bias", nn.initializers.ones, (value_heads,), jnp.float32)
        step = jax.nn.softplus(a.astype(jnp.float32) + bias.astype(jnp.float32))
        g = -jnp.exp(rate.astype(jnp.float32)) * step
        # Never positive, and so unchanged; but it keeps the compiler from merging this product
        # into sums of g, whose bits would then depend on which of the g come from memory.
        g = jnp.minimum(g, 0)
        q = _unit(q) * config.linear_key_head_dim**-0.5
        out = recur.delta_rule(self.index, q, _unit(k), v, g, beta)
        norm = GatedRMSNorm(config.rms_norm_eps, config.dtype, name="norm")
        out = norm(out, z.reshape(out.shape)).reshape(*x.shape[:-1], -1)
        return Linear(config.hidden_size, dtype=config.dtype, name="out_proj")(out)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(layers.row_sum(x * x) + _L2_EPSILON)


class ShortConvolution(nn.Module):
    """Causal convolution of each channel by itself, then silu; in float32."""

    size: int

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """[..., T, W, C], oldest first -> float32 [..., T, C]."""
        init = nn.initializers.normal(0.5)
        weight = self.param("weight", init, (inputs.shape[-1], 1, self.size), jnp.float32)
        weight = weight.astype(jnp.float32)
        terms = [inputs[..., w, :] * weight[:, 0, w] for w in range(self.size)]
        return jax.nn.silu(sum(terms[1:], terms[0]))


class Block(nn.Module):
    """A token mixer and a feed-forward, each on the normed residual stream."""

    config: Qwen35Config
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, rotary: Rotary, attend: Attend, recur: Recur) -> jax.Array:
        config = self.config
        kind = config.layer_types[self.layer]
        index = config.layer_types[: self.layer].count(kind)
        normed = CentredRMSNorm(config.rms_norm_eps, config.dtype, name="input_layernorm")(x)
        if kind == FULL:
            mixed = GatedAttention(config, index, name="self_attn")(normed, rotary, attend)
        else:
            mixed = GatedDeltaNet(config, index, name="linear_attn")(normed, recur)
        x = x + mixed
        norm = CentredRMSNorm(config.rms_norm_eps, config.dtype, name="post_attention_layernorm")
        return x + MLP(config.intermediate_size, False, config.dtype, name="mlp")(norm(x))


class Qwen35(Target):
    """The target."""

    config: Qwen35Config

    def setup(self) -> None:
        config = self.config
        self.setup_ends()
        self.layers = [Block(config, layer) for layer in range(config.num_layers)]
        self.norm = CentredRMSNorm(config.rms_norm_eps, config.dtype)

    def __call__(
        self,
        tokens: jax.Array,
        rotary: Rotary,
        attend: Attend,
        recur: Recur,
        tap_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Runs every block.

        Args:
          tokens: int32 [..., T].
          rotary: cosines and sines of the rows' positions, [..., T, R/2].
          attend: the caller's attention; its layer counts the attention layers alone.
          recur: the caller's recurrences.
          tap_layers: blocks whose outputs are wanted; 0 is the first of all.
        """
        return self.through_blocks(
            tokens, lambda block, x: block(x, rotary, attend, recur), tap_layers
        )

    def init_all(
        self, tokens: jax.Array, rotary: Rotary, attend: Attend, recur: Recur
    ) -> jax.Array:
        """Touches every parameter, the head included: the method for `init`."""
        return self.logits(self(tokens, rotary, attend, recur).hidden)
