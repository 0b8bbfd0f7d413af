"""What one drafter block gives: candidates, their logits and pair scores; and what a tree needs.

Imports no JAX: the host reads the same fields as NumPy arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# A jax.Array on the device, a np.ndarray on the host.
Array = Any


class Lattice(NamedTuple):
    """The K best tokens at each of D drafted positions, and how well neighbours fit.

    The score of a path a_0, ..., a_{D-1} (indices into the candidates) is
    sum over d of unary[d, a_d] + edge[d, a_{d-1}, a_d]. At d = 0 the predecessor is the anchor,
    and edge[0, a] is the same for every a.
    """

    candidates: Array  # [..., D, K] int32 ids of the target; by (logit falling, id rising)
    unary: Array  # [..., D, K] float32 logits of the candidates
    edge: Array  # [..., D, K, K] float32: [d, a, b], candidate a of position d-1 before b of d


class Proposals(NamedTuple):
    """A lattice as a tree grows from it, under a request's sampling."""

    candidates: Array  # [D, K] int32
    log_chances: Array  # [D, K, K] float32: `growth.own_log_chances`
