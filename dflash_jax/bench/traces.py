"""Traces for replay: what the drafter offered in each round, and what the target took.

A round at the cap tells what every narrower width would have landed, since the tree of w nodes
is the first w pops of the cap-node tree. So one trace serves every rule, paired.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from dflash_jax.errors import InputError

NO_PARENT = -1
CHILDREN = 4  # candidates of a position that the tree may use
POSITIONS = 15  # drafted positions of a block


class Trace(NamedTuple):
    """S streams of T rounds, cap nodes a round, in pop order."""

    own: np.ndarray  # float [S, T, cap]: the drafter's own log chance, over siblings
    parents: np.ndarray  # int [S, T, cap]: NO_PARENT for a child of the anchor
    depths: np.ndarray  # int [S, T, cap]: 0 for a child of the anchor
    landed: np.ndarray  # bool [S, T, cap]
    true: np.ndarray  # float [S, T, cap]: the true landing chance (what the oracle knows)

    @property
    def tokens(self) -> np.ndarray:
        """[S, T, cap+1]: tokens that each width gives."""
        total = np.cumsum(self.landed, axis=-1, dtype=float)
        return 1.0 + np.concatenate([np.zeros((*total.shape[:2], 1)), total], axis=-1)


@dataclasses.dataclass(frozen=True)
class TextSpec:
    """How drafts land on a kind of text, and how well the drafter knows it.

    A position's best candidate is right with chance sigmoid(level + spread·stretch + jitter −
    decay·depth): `stretch` changes slowly over rounds (easy and hard passages; `memory` is its
    correlation from round to round), `jitter` at each position. The other candidates share the
    rest by `share`. What the drafter reports is sigmoid(confidence·logit + bias + blur·noise).
    """

    level: float = 2.0
    spread: float = 1.0
    jitter: float = 1.5
    decay: float = 0.1
    memory: float = 0.9
    share: tuple[float, ...] = (0.45, 0.15, 0.08)
    confidence: float = 1.0
    bias: float = 0.0
    blur: float = 0.3
    sampled: bool = False

    def __post_init__(self) -> None:
        if len(self.share) != CHILDREN - 1 or sum(self.share) > 1.0 or min(self.share) < 0.0:
            raise InputError(
                f"share={self.share}: give {CHILDREN - 1} shares that sum to 1 at most"
            )
        if not 0.0 <= self.memory < 1.0:
            raise InputError(f"memory={self.memory}: give 0 up to, not including, 1")


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def synthesise(spec: TextSpec, streams: int, rounds: int, seed: int, cap: int = 15) -> Trace:
    """A seeded synthetic trace: lattices with true and reported chances, trees, landings."""
    rng = np.random.default_rng(seed)
    shape = (streams, rounds, POSITIONS)
    stretch = rng.standard_normal((streams, rounds))
    fresh = np.sqrt(1.0 - spec.memory**2)
    for t in range(1, rounds):
        stretch[:, t] = spec.memory * stretch[:, t - 1] + fresh * stretch[:, t]
    logit = spec.level + spec.spread * stretch[..., None] + spec.jitter * rng.standard_normal(shape)
    first = _sigmoid(logit - spec.decay * np.arange(POSITIONS))
    rest = (1.0 - first)[..., None] * np.array(spec.share)
    true_own = np.concatenate([first[..., None], rest], axis=-1)  # [S, T, D, 4]
    taken = _take(rng, true_own)
    clipped = np.clip(true_own, 1e-4, 1.0 - 1e-4)
    told = _sigmoid(
        spec.confidence * np.log(clipped / (1.0 - clipped))
        + spec.bias
        + spec.blur * rng.standard_normal(true_own.shape)
    )
    told /= np.maximum(told.sum(axis=-1, keepdims=True), 1.0)
    order = np.argsort(-told, axis=-1, kind="stable")
    told = np.take_along_axis(told, order, axis=-1)
    true_own = np.take_along_axis(true_own, order, axis=-1)
    hit = order == taken[..., None]  # [S, T, D, 4]: is this the target's pick?
    flat = (streams * rounds, POSITIONS, CHILDREN)
    parts = _grow(np.log(told).reshape(flat), true_own.reshape(flat), hit.reshape(flat), cap)
    return Trace(*(part.reshape(streams, rounds, cap) for part in parts))


def _take(rng: np.random.Generator, chances: np.ndarray) -> np.ndarray:
    """The target's pick at each position: a candidate's index, or CHILDREN for none of them."""
    draw = rng.random(chances.shape[:-1])
    return (draw[..., None] >= np.cumsum(chances, axis=-1)).sum(axis=-1)


def _grow(
    own: np.ndarray, true_own: np.ndarray, hit: np.ndarray, cap: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Best-first trees for a batch of lattices [B, D, 4]: own, parents, depths, landed, true.

    The frontier holds unpopped nodes. A pop adds its first child and its next sibling, which is
    enough, since siblings are sorted.
    """
    batch, positions, children = own.shape
    slots = 2 * cap + 1
    score = np.full((batch, slots), -np.inf)
    parent = np.full((batch, slots), NO_PARENT)
    depth = np.zeros((batch, slots), int)
    rank = np.zeros((batch, slots), int)
    score[:, 0] = own[:, 0, 0]
    every = np.arange(batch)
    out_own, out_true, out_score = (np.zeros((batch, cap)) for _ in range(3))
    out_parent, out_depth = (np.zeros((batch, cap), int) for _ in range(2))
    out_landed = np.zeros((batch, cap), bool)
    for pop in range(cap):
        slot = np.argmax(score, axis=1)  # ties to the earlier node
        p, d, k = parent[every, slot], depth[every, slot], rank[every, slot]
        popped = score[every, slot]
        root = p == NO_PARENT
        out_own[:, pop], out_parent[:, pop], out_depth[:, pop] = own[every, d, k], p, d
        out_score[:, pop] = popped
        out_true[:, pop] = true_own[every, d, k] * np.where(root, 1.0, out_true[every, p])
        out_landed[:, pop] = hit[every, d, k] & (root | out_landed[every, p])
        score[every, slot] = -np.inf
        child, sibling = 1 + 2 * pop, 2 + 2 * pop
        deeper = np.minimum(d + 1, positions - 1)
        ok = d + 1 < positions
        score[:, child] = np.where(ok, popped + own[every, deeper, 0], -np.inf)
        parent[:, child], depth[:, child] = pop, deeper
        next_rank = np.minimum(k + 1, children - 1)
        moved = popped - own[every, d, k] + own[every, d, next_rank]
        score[:, sibling] = np.where(k + 1 < children, moved, -np.inf)
        parent[:, sibling], depth[:, sibling], rank[:, sibling] = p, d, next_rank
    return out_own, out_parent, out_depth, out_landed, out_true
