"""Decodes replayed on the host: trees against what the target said, at every width. NumPy only.

The tree at an anchor, and what of it lands, does not depend on the width (the tree of w nodes is
the first w of the cap's), so one tree an anchor serves all widths; only the anchors that a walk
visits differ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dflash_jax.decode.noise import gumbel, split_seed
from dflash_jax.train.replies import Reply
from dflash_jax.tree.growth import CAP, NO_PARENT, DraftTree, grow, own_log_chances
from dflash_jax.tree.lattice import Lattice


class Judged(NamedTuple):
    """The tree at one anchor, and which of its nodes the target said."""

    tree: DraftTree
    landed: np.ndarray  # [W] bool


class Walk(NamedTuple):
    """All rounds at one width."""

    rounds: int
    tokens: int  # committed after the first
    visited: tuple[int, ...]  # offsets of the anchors from the reply's start


def anchor_chances(
    lattice: Lattice, reply: Reply, offset: int, temperature: float, selector: bool
) -> np.ndarray:
    """Log chances [D, K, K] at one anchor, as serving computes them.

    Args:
      lattice: of all anchors of the reply.
      reply: the reply.
      offset: the anchor's position less the reply's start.
      temperature: 0 when greedy.
      selector: False drops the pair scores.
    """
    unary, edge = lattice.unary[offset], lattice.edge[offset]
    one = Lattice(lattice.candidates[offset], unary, edge if selector else np.zeros_like(edge))
    if not temperature:
        return own_log_chances(one)
    positions = reply.start + offset + 1 + np.arange(len(unary))[:, None]
    noise = gumbel(split_seed(reply.seed), positions, one.candidates)
    return own_log_chances(one, temperature, noise)


def judge(tree: DraftTree, truth: np.ndarray) -> np.ndarray:
    """Which nodes the target said, their ancestors included. truth: tokens after the anchor."""
    landed = np.zeros(len(tree.tokens), bool)
    for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
        if depth <= len(truth) and tree.tokens[node] == truth[depth - 1]:
            landed[node] = parent == NO_PARENT or landed[parent]
    return landed


def chain(candidates: np.ndarray, log_chances: np.ndarray) -> DraftTree:
    """The single path that takes the best child at each depth."""
    depth, before = len(candidates), 0
    tokens, own = np.zeros(depth, np.int32), np.zeros(depth)
    for position in range(depth):
        after = int(np.argmax(log_chances[position, before]))
        tokens[position] = candidates[position, after]
        own[position] = log_chances[position, before, after]
        before = after
    steps = np.arange(depth, dtype=np.int32)
    return DraftTree(tokens, steps - 1, steps + 1, own)


def judge_reply(
    lattice: Lattice, reply: Reply, temperature: float, selector: bool, trees: bool
) -> list[Judged]:
    """Trees (or chains) at every anchor of a reply."""
    judged = []
    for offset in range(reply.end - reply.start):
        chances = anchor_chances(lattice, reply, offset, temperature, selector)
        candidates = lattice.candidates[offset]
        tree = grow(candidates, chances) if trees else chain(candidates, chances)
        truth = reply.tokens[reply.start + offset + 1 : reply.end + 1]
        judged.append(Judged(tree, judge(tree, truth)))
    return judged


def walk(judged: list[Judged], width: int) -> Walk:
    """The rounds of a whole reply at a width."""
    offset, visited = 0, []
    while offset < len(judged):
        visited.append(offset)
        # The accepted nodes and the bonus token.
        offset += int(judged[offset].landed[:width].sum()) + 1
    return Walk(len(visited), len(judged), tuple(visited))


def tokens_a_round(replies: list[list[Judged]]) -> list[float]:
    """For each width 0..CAP: tokens over rounds of all replies together."""
    rates = []
    for width in range(CAP + 1):
        walks = [walk(judged, width) for judged in replies]
        rates.append(sum(w.tokens for w in walks) / max(sum(w.rounds for w in walks), 1))
    return rates


def recall(lattices: list[Lattice], replies: list[Reply]) -> dict[int, list[float]]:
    """For k = 1, 4 and all: share of true tokens among the k best candidates, by depth."""
    depth, count = lattices[0].candidates.shape[1:]
    hits, total = np.zeros((depth, count)), np.zeros(depth)
    for lattice, reply in zip(lattices, replies, strict=True):
        for position in range(depth):
            truth = reply.tokens[reply.start + 1 + position : reply.end + 1]
            found = lattice.candidates[: len(truth), position] == truth[:, None]
            hits[position] += found.sum(axis=0)
            total[position] += len(truth)
    share = np.cumsum(hits, axis=1) / np.maximum(total, 1)[:, None]
    return {k: share[:, k - 1].tolist() for k in sorted({1, min(4, count), count})}
