"""What every target shares: embedding, head, the run through its blocks, and the feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dflash_jax.errors import InputError
from dflash_jax.models import layers
from dflash_jax.models.layers import Linear


class TargetOutput(NamedTuple):
    """What one forward gives. Logits are taken from `hidden` by `Target.logits`."""

    hidden: jax.Array  # [..., T, D], after the final norm
    taps: tuple[
        jax.Array, ...
    ]  # each [..., T, D]: the outputs of the tapped blocks, in their order


class Matrix(nn.Module):
    """A bare [rows, D] matrix named `weight`: the embedding and the untied head."""

    rows: int
    features: int

    def setup(self) -> None:
        init = nn.initializers.normal(0.02)
        self.weight = self.param("weight", init, (self.rows, self.features), jnp.float32)

    def __call__(self) -> layers.Weight:
        return self.weight


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020); gate and up are one map."""

    intermediate_size: int
    use_bias: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def linear(features: int, name: str) -> Linear:
            return Linear(features, self.use_bias, self.dtype, name=name)

        gate_up = linear(2 * self.intermediate_size, "gate_up_proj")(x)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return linear(x.shape[-1], "down_proj")(jax.nn.silu(gate) * up)


class Target(nn.Module):
    """A subclass gives the blocks as `layers` and the final norm as `norm`, after `setup_ends`.

    `embed`, `head` and `logits` are for `apply(..., method="embed")` too.
    """

    config: Any

    def setup_ends(self) -> None:
        """The embedding and, unless it is tied, the head."""
        config = self.config
        self.embed_tokens = Matrix(config.vocab_size, config.hidden_size)
        if not config.tie_word_embeddings:
            self.lm_head = Matrix(config.vocab_size, config.hidden_size)

    def through_blocks(
        self,
        tokens: jax.Array,
        run: Callable[[nn.Module, jax.Array], jax.Array],
        tap_layers: tuple[int, ...],
    ) -> TargetOutput:
        """Every block, unrolled.

        Args:
          tokens: int32 [..., T].
          run: (block, its input [..., T, D]) -> its output.
          tap_layers: blocks whose outputs are wanted; 0 is the first.
        """
        for layer in tap_layers:
            if not 0 <= layer < self.config.num_layers:
                raise InputError(f"tap layer {layer} is not in 0..{self.config.num_layers - 1}")
        x = self.embed(tokens)
        outputs = []
        for block in self.layers:
            # The barrier makes every block's output an array of its own, tapped or not: else a GPU
            # fuses across blocks that are not tapped, and the bits depend on the drafter's taps.
            x = jax.lax.optimization_barrier(run(block, x))
            outputs.append(x)
        return TargetOutput(self.norm(x), tuple(outputs[layer] for layer in tap_layers))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [..., T] -> [..., T, D]."""
        return layers.rows_of(self.embed_tokens(), tokens, self.config.dtype)

    def head(self) -> layers.Weight:
        """The output head [V, D]: a drafter shares it."""
        return self.embed_tokens() if self.config.tie_word_embeddings else self.lm_head()

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., T, D], normed -> float32 [..., T, V]; accumulated and kept in float32."""
        return layers.logits(hidden.astype(self.config.dtype), self.head())
