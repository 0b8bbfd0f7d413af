"""Recurrent layers of a hybrid target while it decodes: their state, and the two `Recur`s.

A layer's state after n tokens does not depend on how the tokens were grouped into rounds, bit for
bit (`models.delta_rule`): full states stand at multiples of BLOCK tokens alone, and what was
learned since then is kept token by token, each token's part computed from its own path.

    tokens   0 ........... b-16 ............ b ....... n-1 | window, at most 16 deep
    blocks                 ^ state           ^ state
    recent               [ (k, u, g) of the last 31 tokens ]
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.models import delta_rule
from dflash_jax.models.delta_rule import BLOCK, RECENT, Layer, Paths, Recent
from dflash_jax.models.llama import LlamaConfig
from dflash_jax.models.targets import TargetConfig


class LayerState(NamedTuple):
    """One recurrent layer after n tokens; b is the greatest multiple of BLOCK up to n."""

    blocks: jax.Array  # [2, Hv, Dk, Dv] float32, before b - BLOCK and before b: see `tree`
    recent: Recent  # float32
    inputs: jax.Array  # [W - 1, C], the last inputs of the convolution, oldest first


States = tuple[LayerState, ...]  # by recurrent layer


def new_states(config: TargetConfig) -> States:
    """Before the first token; () of a model without recurrent layers."""
    if isinstance(config, LlamaConfig):
        return ()
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim

    def layer() -> LayerState:
        recent = Recent(
            jnp.zeros((RECENT, key_heads, key_dim), jnp.float32),
            jnp.zeros((RECENT, heads, value_dim), jnp.float32),
            jnp.zeros((RECENT, heads), jnp.float32),
        )
        inputs = jnp.zeros((config.linear_conv_kernel_dim - 1, config.conv_dim), config.dtype)
        return LayerState(jnp.zeros((2, heads, key_dim, value_dim), jnp.float32), recent, inputs)

    return tuple(layer() for _ in range(config.num_linear_layers))


def copied(states: States) -> States:
    """States that a program's donation of the others leaves alone: to go back to."""
    return jax.tree.map(jnp.copy, states)


class PromptRecur:
    """`Recur` of a prompt's chunk, which begins at a multiple of BLOCK tokens.

    Args:
      states: after the tokens before the chunk; those of an earlier text do, if there are none.
      start: [] int32, how many those are.
      count: [] int32, rows of the chunk that are the prompt's, at least 1.
    """

    def __init__(self, states: States, start: jax.Array, count: jax.Array):
        empty = start == 0
        self._states = jax.tree.map(lambda x: jnp.where(empty, jnp.zeros_like(x), x), states)
        self._start, self._count = start, count
        self._inputs: list[jax.Array] = []
        self._rules: list[tuple[jax.Array, Recent]] = []

    def inputs(self, index: int, x: jax.Array) -> jax.Array:
        before = self._states[index].inputs
        pool = jnp.concatenate([before, x])
        self._inputs.append(_ending_at(pool, self._count, len(before)))
        rows = x.shape[0]
        return jnp.stack([pool[w : w + rows] for w in range(len(before) + 1)], axis=1)

    def delta_rule(
        self,
        index: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array,
        beta: jax.Array,
    ) -> jax.Array:
        old, count = self._states[index], self._count
        block = self._start // BLOCK
        start = old.blocks[block % 2]
        done = delta_rule.chunked(start, q, k, v, g, beta, count)
        full = count // BLOCK  # blocks that the chunk completes
        newest = delta_rule.advance(start, k, done.u, g, BLOCK * full)
        second = delta_rule.advance(start, k, done.u, g, BLOCK * jnp.maximum(full - 1, 0))
        second = jnp.where(full == 0, old.blocks[(block + 1) % 2], second)
        even = (block + full) % 2 == 0
        blocks = jnp.where(even, jnp.stack([newest, second]), jnp.stack([second, newest]))
        recent = Recent(
            *(
                _ending_at(jnp.concatenate(pair), count, RECENT)
                for pair in zip(old.recent, (k, done.u, g), strict=True)
            )
        )
        self._rules.append((blocks, recent))
        return done.out

    def states(self) -> States:
        """After the chunk's first `count` rows; once the model has run."""
        return tuple(
            LayerState(*rule, inputs)
            for rule, inputs in zip(self._rules, self._inputs, strict=True)
        )


def _ending_at(pool: jax.Array, count: jax.Array, size: int) -> jax.Array:
    """The last `size` of `size` old rows and `count` new ones."""
    return jax.lax.dynamic_slice_in_dim(pool, count, size)


class WindowRecur:
    """`Recur` of a window: each row from its parent's state, siblings apart.

    Args:
      states: after the committed tokens; the anchor is the next.
      length: [] int32, how many those are.
      depths, paths: the window's, [T] and [T, BLOCK] int32 (`tree.masks`).
      tile: rows of one product with a state (`RowPolicy.query_tile`).
    """

    def __init__(
        self,
        states: States,
        length: jax.Array,
        depths: jax.Array,
        paths: jax.Array,
        tile: int = BLOCK,
    ):
        self._states, self._length, self._tile = states, length, tile
        self._depths, self._rows = depths, paths
        # The barrier keeps these small arrays from being computed anew inside every layer.
        self._paths: Paths = jax.lax.optimization_barrier(
            delta_rule.paths_of(length, depths, paths)
        )
        self._inputs: list[jax.Array] = []
        self._rules: list[Recent] = []

    def inputs(self, index: int, x: jax.Array) -> jax.Array:
        before = self._states[index].inputs
        self._inputs.append(x)
        size = len(before)
        # [T, W]: columns (old inputs, then rows) of each row's tokens by age.
        depth = self._depths[:, None] + jnp.arange(-size, 1, dtype=jnp.int32)[None, :]
        drafted = jnp.take_along_axis(self._rows, jnp.maximum(depth, 0), axis=1)
        columns = size + jnp.where(depth < 0, depth, drafted)
        return jnp.concatenate([before, x])[columns]

    def delta_rule(
        self,
        index: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array,
        beta: jax.Array,
    ) -> jax.Array:
        old = self._states[index]
        out, u = delta_rule.tree(old.blocks, old.recent, self._paths, q, k, v, g, beta, self._tile)
        self._rules.append(Recent(k, u, g))
        return out

    def settle(self, path: jax.Array, count: jax.Array) -> States:
        """The states with the first `count` rows of `path` [BLOCK] committed, nothing else."""
        layers = [Layer(old.blocks, old.recent) for old in self._states]
        new = delta_rule.settle(layers, self._rules, self._length, path, count)
        settled = []
        for old, layer, x in zip(self._states, new, self._inputs, strict=True):
            columns = delta_rule.last_of_path(len(old.inputs), path, count)
            settled.append(LayerState(*layer, jnp.concatenate([old.inputs, x])[columns]))
        return tuple(settled)
