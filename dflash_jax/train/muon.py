"""Muon for the drafter's matrices: momentum made orthogonal (Jordan 2024; Liu et al. 2502.16982).

optax has Muon too, but orthogonalises one matrix after another in float32: fifteen small matmuls
for each of some forty matrices, a quarter of a drafter's step on a GPU. Here the matrices of one
shape go together, in bfloat16.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# Quintic iteration whose singular values end between 0.7 and 1.2 (Jordan 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# The root mean square of an update's entries, about Adam's, so that both share a learning rate.
UPDATE_RMS = 0.2


class MuonState(NamedTuple):
    """Momentum of each matrix, float32."""

    momentum: Any


def orthogonalize(matrices: jax.Array) -> jax.Array:
    """[N, m, n] float32, m <= n -> about U·Vᵀ of each matrix's U·S·Vᵀ, bfloat16."""
    a, b, c = COEFFICIENTS
    norms = jnp.linalg.norm(matrices, axis=(-2, -1), keepdims=True)
    x = (matrices / (norms + 1e-12)).astype(jnp.bfloat16)
    for _ in range(ITERATIONS):
        square = x @ x.swapaxes(-2, -1)
        x = a * x + (b * square + c * square @ square) @ x
    return x


def scale_by_muon(beta: float = 0.95) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised and scaled; every parameter must be a matrix."""

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(gradients: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        del params
        momentum = jax.tree.map(lambda m, g: beta * m + g, state.momentum, gradients)
        ahead = jax.tree.map(lambda m, g: beta * m + g, momentum, gradients)
        leaves, tree = jax.tree.flatten(ahead)
        return jax.tree.unflatten(tree, _together(leaves)), MuonState(momentum)

    return optax.GradientTransformation(init, update)


def _together(leaves: list[jax.Array]) -> list[jax.Array]:
    """Updates of all matrices; those of one shape, or of one and its transpose, are stacked."""
    groups: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    for place, leaf in enumerate(leaves):
        groups[min(leaf.shape), max(leaf.shape)].append(place)
    updates = list(leaves)
    for (_, columns), places in groups.items():
        wide = [leaves[p] if leaves[p].shape[1] == columns else leaves[p].T for p in places]
        orthogonal = orthogonalize(jnp.stack(wide)).astype(jnp.float32)
        scaled = orthogonal * (UPDATE_RMS * columns**0.5)
        for place, one in zip(places, scaled, strict=True):
            updates[place] = one if one.shape == leaves[place].shape else one.T
    return updates
