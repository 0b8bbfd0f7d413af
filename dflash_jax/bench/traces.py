"""Traces for replay: what the drafter offered in each round, and what the target took.

A round at the cap tells what every narrower width would have landed, since the tree of w nodes
is the first w pops of the cap-node tree. So one trace serves every rule, paired.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_jax.errors import InputError

NO_PARENT = -1
CHILDREN = 4  # candidates of a position that the tree may use
POSITIONS = 15  # drafted positions of a block
BLOCK = 16  # rounds that a resampled stream takes in one piece


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


# Fitted so that the mean tokens of 3, 7 and 15 nodes are near what the reference thread's card
# served (short: 34 tokens of context, mid: 7,588, deep: 28,946 and on).
TEXTS = {
    "short-greedy": TextSpec(2.6, 0.6, 1.3, 0.25),
    "mid-greedy": TextSpec(3.8, 1.4, 1.0, 0.55, share=(0.2, 0.06, 0.03)),
    "deep-greedy": TextSpec(2.4, 0.75, 1.0, 0.65),
    "short-sampled": TextSpec(3.55, 1.2, 1.95, 0.36, share=(0.3, 0.1, 0.05), sampled=True),
    "mid-sampled": TextSpec(3.6, 1.2, 1.5, 0.5, share=(0.3, 0.1, 0.05), sampled=True),
    "deep-sampled": TextSpec(2.0, 0.65, 0.9, 0.56, sampled=True),
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "": {},
    "over-confident": {"confidence": 1.7, "bias": 0.3},
    "under-confident": {"confidence": 0.6, "bias": -0.3},
    "vague": {"blur": 1.5},
}
"""How a drafter may be wrong about itself: changes to a `TextSpec`."""


def find_text(name: str, drafter: str = "") -> TextSpec:
    """A text by name, seen by a drafter by name. Raises `InputError` for unknown ones."""
    if name not in TEXTS:
        raise InputError(f"text {name!r}: give one of {', '.join(TEXTS)}")
    if drafter not in DRAFTERS:
        raise InputError(f"drafter {drafter!r}: give one of {', '.join(map(repr, DRAFTERS))}")
    return dataclasses.replace(TEXTS[name], **DRAFTERS[drafter])


def load_trace(paths: list[str], streams: int, rounds: int, seed: int, cap: int = 15) -> Trace:
    """Rounds that `scripts/decode.py --width=15 --trace_out=…` wrote, resampled into streams.

    Each stream takes whole stretches of `BLOCK` consecutive rounds, drawn with replacement, so
    that easy and hard passages stay together (moving-block bootstrap, Künsch 1989). What the
    oracle knows is then the recorded chance. Raises `InputError` if there are too few rounds.
    """
    lines = [line for path in paths for line in _read(path) if _whole(line, cap)]
    if len(lines) < 2 * BLOCK:
        raise InputError(
            f"traces {', '.join(paths)}: {len(lines)} rounds verified all {cap} nodes; give "
            f"{2 * BLOCK} or more (decode.py --width={cap} --trace_out=…)"
        )
    parents = np.array([line["parents"] for line in lines])
    chances = np.array([line["chances"] for line in lines], float)
    landed = np.array([line["landed"] for line in lines], bool)
    depths, own = _derived(parents, chances)
    if all("own" in line for line in lines):
        own = np.array([line["own"] for line in lines], float)
    rng = np.random.default_rng(seed)
    blocks = -(-rounds // BLOCK)
    starts = rng.integers(0, len(lines) - BLOCK + 1, (streams, blocks))
    index = (starts[..., None] + np.arange(BLOCK)).reshape(streams, -1)[:, :rounds]
    return Trace(own[index], parents[index], depths[index], landed[index], chances[index])


def _read(path: str) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise InputError(f"trace {path}: {error}; give a file of decode.py --trace_out") from error


def _whole(line: dict[str, Any], cap: int) -> bool:
    """Whether a trace line is a round that verified all `cap` nodes."""
    parts = ("parents", "chances", "landed")
    return line.get("width") == cap and all(len(line.get(part, ())) == cap for part in parts)


def _derived(parents: np.ndarray, chances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depths and own log chances from parents and landing chances, all [B, cap]."""
    depths = np.zeros(parents.shape, int)
    own = np.log(np.clip(chances, 1e-12, 1.0))
    every = np.arange(len(parents))
    for i in range(parents.shape[1]):
        inner = parents[:, i] != NO_PARENT
        above = np.where(inner, parents[:, i], 0)
        depths[:, i] = np.where(inner, depths[every, above] + 1, 0)
        parent = np.clip(chances[every, above], 1e-12, 1.0)
        own[:, i] = np.minimum(own[:, i] - np.where(inner, np.log(parent), 0.0), 0.0)
    return depths, own
