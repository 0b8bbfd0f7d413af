"""Llama in Linen (Touvron et al. 2023), and Qwen3 dense, which adds a norm to queries and keys.

Parameters carry Hugging Face's names (`layers.0` becomes `layers_0`) and orientation ([out, in]);
linear maps of one input are joined (`qkv_proj`, `gate_up_proj`). A weight may be an Int8Matrix.
The module holds no cache and no mask: see `layers.Attend`.
"""

from __future__ import annotations

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.models import layers
from dflash_jax.models.layers import Attend, Linear, RMSNorm, Rotary
from dflash_jax.models.target_base import MLP, Target, TargetOutput

COMPUTE_DTYPES = ("float32", "bfloat16")
FLOAT32 = np.dtype("float32")


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor`."""

    factor: float

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / np.float32(self.factor)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, blended in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if not self.high_freq_factor > self.low_freq_factor:
            raise InputError(
                f"llama3 rope scaling: high_freq_factor {self.high_freq_factor} must be above "
                f"low_freq_factor {self.low_freq_factor}"
            )

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return (kept * frequencies + (1 - kept) * frequencies / self.factor).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class FactorScaling:
    """Every frequency divided by its own factor, as GGUF stores llama3's (`rope_freqs`)."""

    factors: tuple[float, ...]  # [H/2]

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        if len(self.factors) != len(frequencies):
            raise InputError(
                f"rope scaling has {len(self.factors)} factors for {len(frequencies)} frequencies"
            )
        return frequencies / np.asarray(self.factors, np.float32)


RopeScaling = LinearScaling | Llama3Scaling | FactorScaling


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a target, and the dtype it computes in. Field names are Hugging Face's.

    `qk_norm` is Qwen3's RMSNorm over each head of the queries and keys.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    dtype: np.dtype = FLOAT32  # a name such as "bfloat16" is taken too

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"model config: {name} must be a positive integer, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"model config: {name} must be positive")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model config: num_heads {self.num_heads} is no multiple of num_kv_heads "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise InputError(f"model config: head_dim {self.head_dim} must be even")
        if str(jnp.dtype(self.dtype)) not in COMPUTE_DTYPES:
            raise InputError(f"model config: dtype {self.dtype} is none of {COMPUTE_DTYPES}")
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Rotary frequencies [H/2] float32, scaled as the config says; for `layers.rotary_table`."""
    frequencies = layers.inverse_frequencies(config.head_dim, config.rope_theta)
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling.scale(frequencies)
    return frequencies


class Attention(nn.Module):
    """Grouped-query attention; the caller's `attend` does all but the projections and rotary."""

    config: LlamaConfig
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, rotary: Rotary, attend: Attend) -> jax.Array:
        config = self.config

        heads, kv_heads = config.num_heads, config.num_kv_heads
        width = (heads + 2 * kv_heads) * config.head_dim
        qkv = Linear(width, config.attention_bias, config.dtype, name="qkv_proj")(x)
        qkv = qkv.reshape(*x.shape[:-1], heads + 2 * kv_heads, config.head_dim)
        q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=-2)
        if config.qk_norm:
            q = RMSNorm(config.rms_norm_eps, config.dtype, name="q_norm")(q)
            k = RMSNorm(config.rms_norm_eps, config.dtype, name="k_norm")(k)
        out = attend(self.layer, layers.rotate(q, rotary), layers.rotate(k, rotary), v)
        out = out.reshape(*x.shape[:-1], config.num_heads * config.head_dim)
        return Linear(config.hidden_size, config.attention_bias, config.dtype, name="o_proj")(out)


class Block(nn.Module):
    """Attention and feed-forward, each on the normed residual stream."""

    config: LlamaConfig
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, rotary: Rotary, attend: Attend) -> jax.Array:
        config = self.config
        normed = RMSNorm(config.rms_norm_eps, config.dtype, name="input_layernorm")(x)
        x = x + Attention(config, self.layer, name="self_attn")(normed, rotary, attend)
        normed = RMSNorm(config.rms_norm_eps, config.dtype, name="post_attention_layernorm")(x)
        mlp = MLP(config.intermediate_size, config.mlp_bias, config.dtype, name="mlp")
        return x + mlp(normed)


class Llama(Target):
    """The target."""

    config: LlamaConfig

    def setup(self) -> None:
        config = self.config
        self.setup_ends()
        self.layers = [Block(config, layer) for layer in range(config.num_layers)]
        self.norm = RMSNorm(config.rms_norm_eps, config.dtype)

    def __call__(
        self,
        tokens: jax.Array,
        rotary: Rotary,
        attend: Attend,
        tap_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Runs every block.

        Args:
          tokens: int32 [..., T].
          rotary: cosines and sines of the rows' positions, [..., T, H/2].
          attend: the caller's attention.
          tap_layers: blocks whose outputs are wanted; 0 is the first.
        """
        return self.through_blocks(tokens, lambda block, x: block(x, rotary, attend), tap_layers)

    def init_all(self, tokens: jax.Array, rotary: Rotary, attend: Attend) -> jax.Array:
        """Touches every parameter, the head included: the method for `init`."""
        return self.logits(self(tokens, rotary, attend).hidden)
