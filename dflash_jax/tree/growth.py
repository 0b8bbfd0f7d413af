"""Best-first growth of a draft tree from a lattice, on the host.

    lattice position:   0        1        2
    anchor ──┬── a ──┬── c ───── f
             │       └── d
             └── b ───── e

A node's own score is the log-probability of its candidate among its siblings; a path's score is
the sum along it. The tree takes the best path first, so that the tree of w nodes is the first w
pops of any larger one, and a parent pops before its children.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from dflash_jax.tree.lattice import Lattice

CAP = 15  # most nodes of a tree: a window is then 16 rows
CHILDREN = 4  # most children of a node
NO_PARENT = -1  # parent of the nodes that follow the anchor


class DraftTree(NamedTuple):
    """Nodes in pop order; the first w of them are the tree of width w."""

    tokens: np.ndarray  # [W] int32
    parents: np.ndarray  # [W] int32: index of the parent node, or NO_PARENT
    depths: np.ndarray  # [W] int32: 1 for a child of the anchor
    own: np.ndarray  # [W] float64: log-chance of a node among its siblings, before calibration


_NONE = np.zeros(0, np.int32)
EMPTY = DraftTree(_NONE, _NONE, _NONE, np.zeros(0))


def own_log_chances(
    lattice: Lattice, temperature: Any = 1.0, noise: Any = None, xp: ModuleType = np
) -> Any:
    """Log-probability of every candidate among its siblings, for every candidate before it.

    Args:
      lattice: one block's lattice.
      temperature: the target's sampling temperature; 1 when greedy.
      noise: [D, K] the target's keyed Gumbel noise at the candidates, or None. With it a
        score is the chance that the candidate is the target's own draw, not its probability.
      xp: numpy, or jax.numpy on the device.

    Returns:
      [D, K, K] float32; entry (d, a, b): candidate b of position d after candidate a of d - 1.
    """
    scores = (lattice.unary[:, None, :] + lattice.edge) / xp.float32(temperature)
    if noise is not None:
        scores = scores + noise[:, None, :]
    scores = scores - scores.max(axis=-1, keepdims=True)
    return scores - xp.log(xp.exp(scores).sum(axis=-1, keepdims=True))


# (tokens on a path, candidate ids [K]) -> which of them may follow, bool [K].
Permits = Callable[[tuple[int, ...], np.ndarray], np.ndarray]


def grow(
    candidates: np.ndarray,
    log_chances: np.ndarray,
    cap: int = CAP,
    permits: Permits | None = None,
) -> DraftTree:
    """Grows the best-first tree.

    Args:
      candidates: [D, K] int32 token ids, distinct within a position.
      log_chances: [D, K, K] from `own_log_chances`.
      cap: most nodes.
      permits: what a grammar allows; a candidate that it does not is no sibling at all.

    Returns:
      A tree of `cap` nodes, fewer when the lattice has no more or nothing else is permitted. Equal
      path scores go to the node that was proposed earlier: by the parent's pop, then by rank among
      its siblings.
    """
    depth_limit, count = candidates.shape
    ids = candidates.tolist()

    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    own: list[float] = []
    paths: dict[int, tuple[int, ...]] = {NO_PARENT: ()}  # of each node, its tokens
    proposals = 0
    heap: list[tuple[float, int, int, int, int, float]] = []

    def propose(parent: int, position: int, before: int, path_score: float) -> None:
        nonlocal proposals
        own_scores, siblings = log_chances[position, before], list(range(count))
        if permits is not None:
            siblings = np.flatnonzero(permits(paths[parent], candidates[position])).tolist()
            own_scores = _among(own_scores, siblings)
        scores = own_scores.tolist()
        # Stable, so equal scores stay in order. Ranked here, since most siblings are never asked.
        ranks = sorted(siblings, key=scores.__getitem__, reverse=True)
        for candidate in ranks[:CHILDREN]:
            score = scores[candidate]
            entry = (-(path_score + score), proposals, parent, position, candidate, score)
            heapq.heappush(heap, entry)
            proposals += 1

    if depth_limit and cap:
        propose(NO_PARENT, 0, 0, 0.0)
    while heap and len(tokens) < cap:
        negative_score, _, parent, position, candidate, score = heapq.heappop(heap)
        tokens.append(ids[position][candidate])
        parents.append(parent)
        depths.append(position + 1)
        own.append(score)
        paths[len(tokens) - 1] = (*paths[parent], tokens[-1])
        if position + 1 < depth_limit:
            propose(len(tokens) - 1, position + 1, candidate, -negative_score)
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.array(own, np.float64),
    )


def _among(log_chances: np.ndarray, siblings: list[int]) -> np.ndarray:
    """Log-chances [K] as those of `siblings` among themselves."""
    if not siblings:
        return log_chances
    kept = log_chances[siblings]
    return log_chances - kept.max() - np.log(np.exp(kept - kept.max()).sum())
