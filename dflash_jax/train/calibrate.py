"""Makes landing chances honest: a logistic fit on judged nodes, and how far off they were.

The fit is the landing model's own (`dflash_jax.pricing.LandingModel`), found for all nodes at once
rather than online; its record is the prior that serving starts from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dflash_jax.pricing.landing import DEPTHS, EDGE, EVALUATED, LandingModel
from dflash_jax.train.walks import Judged
from dflash_jax.tree.growth import NO_PARENT

BINS = 15
NEWTON_STEPS = 30
RIDGE = 4.0  # pulls towards slope 1 and offsets 0, in judged nodes


class Reliability(NamedTuple):
    """Landing chances against what landed."""

    error: float  # expected calibration error: mean |chance - share landed| over the nodes
    chance: tuple[float, ...]  # mean of each bin that has nodes
    landed: tuple[float, ...]
    nodes: tuple[int, ...]


class Nodes(NamedTuple):
    """Nodes that were judged: those whose parent landed."""

    logit: np.ndarray  # of the own chance
    depth: np.ndarray  # from 0
    first: np.ndarray  # bool: the first child of its parent
    landed: np.ndarray  # bool


def judged_nodes(judged: list[Judged]) -> Nodes:
    parts = []
    for tree, hit in judged:
        root = tree.parents == NO_PARENT
        asked = root | hit[np.where(root, 0, tree.parents)]
        own = np.clip(np.exp(tree.own[asked]), EDGE, 1 - EDGE)
        first = np.zeros(len(tree.parents), bool)
        first[np.unique(tree.parents, return_index=True)[1]] = True
        depth = np.minimum(tree.depths[asked] - 1, DEPTHS - 1)
        parts.append(Nodes(np.log(own) - np.log1p(-own), depth, first[asked], hit[asked]))
    return Nodes(*map(np.concatenate, zip(*parts, strict=True)))


def fit(judged: list[Judged]) -> dict[str, Any]:
    """One way of decoding ("greedy" or "sampled") in a LandingModel record."""
    nodes = judged_nodes(judged)
    halves = {"first": nodes.first, "later": ~nodes.first}
    return {
        name: _fit_logistic(Nodes(*(f[chosen] for f in nodes))) for name, chosen in halves.items()
    }


def _fit_logistic(nodes: Nodes) -> dict[str, Any]:
    """Slope, offset and depth offsets of largest likelihood, by Newton's method."""
    logit, depth, _, landed = nodes
    features = np.zeros((len(logit), 2 + DEPTHS))
    features[:, 0], features[:, 1] = logit, 1
    features[np.arange(len(logit)), 2 + depth] = 1
    start = np.zeros(2 + DEPTHS)
    start[0] = 1

    def loss(weights: np.ndarray) -> float:
        eta = features @ weights
        pull = RIDGE / 2 * np.sum((weights - start) ** 2)
        return float(np.sum(np.logaddexp(0, eta) - landed * eta) + pull)

    weights, best = start, loss(start)
    for _ in range(NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(features @ weights, -30, 30)))
        gradient = features.T @ (landed - chance) - RIDGE * (weights - start)
        curvature = (features * (chance * (1 - chance))[:, None]).T @ features
        step = np.linalg.solve(curvature + RIDGE * np.eye(len(weights)), gradient)
        # Far from the optimum a whole step may overshoot.
        while (value := loss(weights + step)) > best and np.abs(step).max() > 1e-9:
            step = step / 2
        weights, best = weights + step, value
    return {
        "slope": max(float(weights[0]), 0.05),
        "offset": float(weights[1]),
        "depth": weights[2:].tolist(),
        **EVALUATED,
    }


def chances(record: dict[str, Any] | None, judged: list[Judged]) -> tuple[np.ndarray, np.ndarray]:
    """Landing chances of all nodes, and which landed. record None: the drafter's own."""
    model = LandingModel(record and {"greedy": record, "sampled": record})
    found = [model.chances(tree.own, tree.parents, tree.depths - 1) for tree, _ in judged]
    return np.concatenate(found), np.concatenate([hit for _, hit in judged])


def reliability(chance: np.ndarray, landed: np.ndarray) -> Reliability:
    """Bins of equal width in the chance."""
    place = np.minimum((chance * BINS).astype(int), BINS - 1)
    nodes = np.bincount(place, minlength=BINS)
    used = nodes > 0
    mean_chance = np.bincount(place, chance, BINS)[used] / nodes[used]
    mean_landed = np.bincount(place, landed, BINS)[used] / nodes[used]
    error = np.sum(nodes[used] * np.abs(mean_chance - mean_landed)) / len(chance)
    return Reliability(
        float(error),
        tuple(mean_chance.tolist()),
        tuple(mean_landed.tolist()),
        tuple(nodes[used].tolist()),
    )
