"""A parameter tree as few buffers: passing each costs microseconds, in every round.

Matrices stay as they are. Vectors and other small arrays, most of a model's leaves by count, lie in
one flat vector for each dtype; the compiled function slices them out, which costs it nothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp


class _Place(NamedTuple):
    """Where a small leaf lies."""

    dtype: str
    start: int
    shape: tuple[int, ...]


@flax.struct.dataclass
class Packed:
    """A packed tree; a pytree itself."""

    matrices: tuple[jax.Array, ...]
    vectors: dict[str, jax.Array]  # dtype -> [sum of sizes]
    treedef: Any = flax.struct.field(pytree_node=False)
    places: tuple[_Place | None, ...] = flax.struct.field(pytree_node=False)  # None: a matrix

    def unpack(self) -> Any:
        """The tree that was packed."""
        matrices = iter(self.matrices)
        leaves = [next(matrices) if place is None else self._small(place) for place in self.places]
        return jax.tree.unflatten(self.treedef, leaves)

    def _small(self, place: _Place) -> jax.Array:
        end = place.start + math.prod(place.shape)
        return self.vectors[place.dtype][place.start : end].reshape(place.shape)


def pack(tree: Any) -> Packed:
    """Packs a tree of arrays."""
    leaves, treedef = jax.tree.flatten(tree)
    matrices: list[jax.Array] = []
    small: dict[str, list[jax.Array]] = {}
    sizes: dict[str, int] = {}
    places: list[_Place | None] = []
    for leaf in leaves:
        if leaf.ndim == 2:
            matrices.append(leaf)
            places.append(None)
            continue
        dtype = str(leaf.dtype)
        start = sizes.get(dtype, 0)
        places.append(_Place(dtype, start, leaf.shape))
        small.setdefault(dtype, []).append(jnp.ravel(leaf))
        sizes[dtype] = start + leaf.size
    vectors = {dtype: jnp.concatenate(parts) for dtype, parts in small.items()}
    return Packed(tuple(matrices), vectors, treedef, tuple(places))
