"""Makes landing chances honest: a logistic fit on judged nodes, and how far off they were.

The fit is the landing model's own (`dflash_jax.pricing.LandingModel`), found for all nodes at once
rather than online; its record is the prior that serving starts from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dflash_jax.pricing.landing import DEPTHS, EDGE, LandingModel
from dflash_jax.train.walks import Judged
from dflash_jax.tree.growth import NO_PARENT

BINS = 15
# What a prompt may still differ by from the evaluation's mean, as standard deviations.
SLOPE_DOUBT, OFFSET_DOUBT, DEPTH_DOUBT = 0.1, 0.25, 0.1
RIDGE = 4.0  # pulls towards slope 1 and offsets 0, in judged nodes


class Reliability(NamedTuple):
    """Landing chances against what landed."""

    error: float  # expected calibration error: mean |chance - share landed| over the nodes
    chance: tuple[float, ...]  # mean of each bin that has nodes
    landed: tuple[float, ...]
    nodes: tuple[int, ...]


def judged_nodes(judged: list[Judged]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logit of the own chance, depth from 0, landed: of the nodes whose parent landed."""
    logits, depths, landed = [], [], []
    for tree, hit in judged:
        root = tree.parents == NO_PARENT
        asked = root | hit[np.where(root, 0, tree.parents)]
        own = np.clip(tree.own[asked], EDGE, 1 - EDGE)
        logits.append(np.log(own) - np.log1p(-own))
        depths.append(np.minimum(tree.depths[asked] - 1, DEPTHS - 1))
        landed.append(hit[asked])
    return np.concatenate(logits), np.concatenate(depths), np.concatenate(landed)


def fit(judged: list[Judged]) -> dict[str, Any]:
    """One half ("greedy" or "sampled") of a LandingModel record, by Newton's method."""
    logit, depth, landed = judged_nodes(judged)
    features = np.zeros((len(logit), 2 + DEPTHS))
    features[:, 0], features[:, 1] = logit, 1
    features[np.arange(len(logit)), 2 + depth] = 1
    start = np.zeros(2 + DEPTHS)
    start[0] = 1
    weights = start.copy()
    for _ in range(20):
        chance = 1 / (1 + np.exp(-np.clip(features @ weights, -30, 30)))
        gradient = features.T @ (landed - chance) - RIDGE * (weights - start)
        curvature = (features * (chance * (1 - chance))[:, None]).T @ features
        weights += np.linalg.solve(curvature + RIDGE * np.eye(len(weights)), gradient)
    return {
        "slope": max(float(weights[0]), 0.05),
        "offset": float(weights[1]),
        "vs": SLOPE_DOUBT**2,
        "vo": OFFSET_DOUBT**2,
        "c": 0.0,
        "depth": weights[2:].tolist(),
        "vd": [DEPTH_DOUBT**2] * DEPTHS,
    }


def chances(record: dict[str, Any] | None, judged: list[Judged]) -> tuple[np.ndarray, np.ndarray]:
    """Landing chances of all nodes, and which landed. record None: the drafter's own."""
    model = LandingModel(record and {"greedy": record, "sampled": record})
    found = [
        model.chances(np.log(np.maximum(tree.own, 1e-30)), tree.parents, tree.depths - 1)
        for tree, _ in judged
    ]
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
