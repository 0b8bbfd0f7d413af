"""Copying what one prompt chunk left in a stream's buffers: out of them, and back into them.

Fixed shapes, one program each, whatever the chunk's position; a copy has the bits of the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.decode.attention import Cache
from dflash_jax.decode.executables import compile_all
from dflash_jax.decode.programs import DecodeSpec, Program, new_drafter_cache, new_target_state
from dflash_jax.decode.recurrence import States, copied


class Rows(NamedTuple):
    """Keys and values of one chunk of P tokens."""

    target: Cache  # [L, K, P, H]
    drafter: Cache | None  # its context, [L, K, P, H]; None without a drafter


def save_rows(
    spec: DecodeSpec, cache: Cache, drafter_cache: Cache | None, start: jax.Array
) -> Rows:
    """The rows at positions start.. of both caches."""

    def cut(buffer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(buffer, start, spec.policy.prefill_chunk, axis=2)

    return Rows(*jax.tree.map(cut, (cache, drafter_cache)))


def load_rows(
    spec: DecodeSpec, caches: tuple[Cache, Cache | None], rows: Rows, start: jax.Array
) -> tuple[Cache, Cache | None]:
    """Both caches with `rows` at positions start.., the rest as it was."""
    del spec

    def put(buffer: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, rows, start, axis=2)

    return jax.tree.map(put, caches, tuple(rows))


def copy_states(spec: DecodeSpec, states: States) -> States:
    """States of their own: those of a stream are donated in its next round."""
    del spec
    return copied(states)


class ChunkCopies(NamedTuple):
    """The compiled functions, and what they give."""

    save_rows: Callable[[Cache, Cache | None, Any], Rows]
    load_rows: Callable[[tuple[Cache, Cache | None], Rows, Any], tuple[Cache, Cache | None]]
    copy_states: Callable[[States], States] | None  # None: the target has no recurrent layers
    rows_bytes: int  # of one chunk
    states_bytes: int  # of all recurrent layers


def compile_copies(spec: DecodeSpec, say: Callable[[str], None]) -> ChunkCopies:
    """Compiles the functions, or loads them as an earlier start has kept them."""
    state = jax.eval_shape(lambda: new_target_state(spec))
    drafter = jax.eval_shape(lambda: new_drafter_cache(spec)) if spec.drafter else None
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    rows = jax.eval_shape(lambda c, d, s: save_rows(spec, c, d, s), state.cache, drafter, scalar)

    def describe(function: Callable[..., Any], *inputs: Any, donated: tuple[int, ...] = ()):
        def bound(*inputs: Any) -> Any:
            return function(spec, *inputs)

        bound.__name__ = function.__name__
        return Program(function.__name__, spec, bound, inputs, donated)

    programs = [
        describe(save_rows, state.cache, drafter, scalar),
        describe(load_rows, (state.cache, drafter), rows, scalar, donated=(0,)),
    ]
    if state.states:
        programs.append(describe(copy_states, state.states))
    compiled = compile_all(programs, say=say)
    return ChunkCopies(
        compiled["save_rows"],
        compiled["load_rows"],
        compiled.get("copy_states"),
        _bytes(rows),
        _bytes(state.states),
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
