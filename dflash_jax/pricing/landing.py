"""Calibrates a node's own chance of landing, online, from what was verified."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.errors import InputError

NO_PARENT = -1
KINDS = ("greedy", "sampled")  # indexed by `sampled`
DEPTHS = 6  # depths 0..4 have their own offset; all deeper nodes share the last
TILT_STD = 0.35  # prior doubt of the slope,
OFFSET_STD = 0.4  # of the offset all depths share,
DEPTH_STD = 0.2  # and of each depth's own
# What a prompt may differ by from the mean of an evaluation's: the same three, in a record.
EVALUATED = {"vs": 0.1**2, "vo": 0.25**2, "c": 0.0, "vd": [0.1**2] * DEPTHS}
FORGET = 0.9997  # a judged node; some thousand nodes of memory
LOGIT_MAX = 8.0
EDGE = 1e-4  # chances stay inside [EDGE, 1 − EDGE]


class _Logistic:
    """logit p = slope · logit(own) + offset + depth_offset[depth], Bayesian and online.

    Each judged node is one Gaussian update of (slope, offset) and of its depth's offset, in the
    manner of an extended Kalman filter (West, Harrison & Migon 1985).
    """

    def __init__(self) -> None:
        self.slope, self.offset = 1.0, 0.0
        self.vs, self.vo, self.c = TILT_STD**2, OFFSET_STD**2, 0.0
        self.depth = [0.0] * DEPTHS
        self.vd = [DEPTH_STD**2] * DEPTHS

    def chance(self, logit: float, depth: int) -> float:
        eta = self.slope * logit + self.offset + self.depth[depth]
        return 1.0 / (1.0 + math.exp(-max(-LOGIT_MAX, min(LOGIT_MAX, eta))))

    def judge(self, logit: float, depth: int, landed: bool) -> None:
        p = self.chance(logit, depth)
        info = p * (1.0 - p) + 1e-6
        gs = self.vs * logit + self.c  # covariance of the slope with eta
        go = self.c * logit + self.vo
        gd = self.vd[depth]
        var = gs * logit + go + gd
        step = ((1.0 if landed else 0.0) - p) / (1.0 + info * var)
        shrink = info / (1.0 + info * var)
        self.slope = max(self.slope + gs * step, 0.05)
        self.offset += go * step
        self.depth[depth] += gd * step
        # Forgetting, towards but never beyond the prior doubt.
        self.vs = min((self.vs - gs * gs * shrink) / FORGET, TILT_STD**2)
        self.vo = min((self.vo - go * go * shrink) / FORGET, OFFSET_STD**2)
        edge = 0.95 * math.sqrt(self.vs * self.vo)
        self.c = max(-edge, min(edge, self.c - gs * go * shrink))
        self.vd[depth] = min((gd - gd * gd * shrink) / FORGET, DEPTH_STD**2)

    def to_record(self) -> dict[str, Any]:
        names = ("slope", "offset", "vs", "vo", "c", "depth", "vd")
        values = {name: getattr(self, name) for name in names}
        return {**values, "depth": list(self.depth), "vd": list(self.vd)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> _Logistic:
        """Of `to_record`. Raises KeyError, TypeError or ValueError for anything else."""
        self = cls()
        for name, default in self.to_record().items():
            value = np.array(record[name], float)
            if value.shape != np.shape(default) or not np.isfinite(value).all():
                raise ValueError(f"{name}: {record[name]!r}")
            setattr(self, name, value.tolist())
        if not (self.slope > 0.0 and min(self.vs, self.vo, *self.vd) >= 0.0):
            raise ValueError("slope or variances below 0")
        if self.c * self.c > self.vs * self.vo:
            raise ValueError(f"covariance {self.c} of variances {self.vs} and {self.vo}")
        return self


class LandingModel:
    """Landing chances of a tree's nodes: calibrated own chance × the parent's landing chance.

    Greedy and sampled rounds are calibrated apart, and so are a parent's first child and its later
    ones: the drafter's order of siblings is itself a guess. The engine holds one beside its rule:

        chances = landing.chances(own, parents, depths, sampled)
        width = rule.choose(chances, context_length)
        ...
        landing.observe(own, parents, depths, landed, sampled)
    """

    def __init__(self, prior: Mapping[str, Any] | None = None) -> None:
        """prior: a record (`to_record`) from the drafter's evaluation; None trusts the drafter."""
        self._fits = {name: (_Logistic(), _Logistic()) for name in KINDS}
        if prior is not None:
            try:
                self._fits = {
                    name: (
                        _Logistic.from_record(prior[name]["first"]),
                        _Logistic.from_record(prior[name]["later"]),
                    )
                    for name in KINDS
                }
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"landing prior: not a LandingModel record ({error!r})") from error

    def chances(
        self,
        own: Sequence[float] | np.ndarray,
        parents: Sequence[int] | np.ndarray,
        depths: Sequence[int] | np.ndarray,
        sampled: bool = False,
    ) -> np.ndarray:
        """Float array, one landing chance a node.

        own: log-softmax scores over siblings, in pop order. parents: index of each node's parent,
        `NO_PARENT` for a child of the anchor; a parent comes before its children. depths: 0 for a
        child of the anchor.
        """
        first, later = self._fits[KINDS[sampled]]
        out: list[float] = []
        parents_seen: set[int] = set()
        for score, parent, depth in zip(_plain(own), _plain(parents), _plain(depths), strict=True):
            if parent in parents_seen:
                p = later.chance(_logit(score), min(depth, DEPTHS - 1))
            else:
                p = first.chance(_logit(score), min(depth, DEPTHS - 1))
                parents_seen.add(parent)
            out.append(p if parent == NO_PARENT else p * out[parent])
        return np.array(out)

    def observe(
        self,
        own: Sequence[float] | np.ndarray,
        parents: Sequence[int] | np.ndarray,
        depths: Sequence[int] | np.ndarray,
        landed: Sequence[bool] | np.ndarray,
        sampled: bool = False,
    ) -> None:
        """Learns from the verified prefix: landed is bool [width], width ≤ len(own).

        A node is judged only if its parent landed: below a rejected node nothing was asked. A
        round that landed to its end is thereby censored, as it must be: the node after the last
        verified one is not judged, so it counts neither for nor against.
        """
        first, later = self._fits[KINDS[sampled]]
        landed = _plain(landed)
        parents_seen: set[int] = set()
        width = len(landed)
        for score, parent, depth, hit in zip(
            _plain(own)[:width],
            _plain(parents)[:width],
            _plain(depths)[:width],
            landed,
            strict=True,
        ):
            if parent == NO_PARENT or landed[parent]:
                fit = later if parent in parents_seen else first
                fit.judge(_logit(score), min(depth, DEPTHS - 1), hit)
                parents_seen.add(parent)

    def to_record(self) -> dict[str, Any]:
        """Plain and JSON-ready; the constructor's `prior` takes it."""
        return {
            name: {"first": first.to_record(), "later": later.to_record()}
            for name, (first, later) in self._fits.items()
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> LandingModel:
        return cls(prior=record)


def _plain(values: Any) -> list[Any]:
    """A list of Python numbers: the loops here are shorter than numpy's call overhead."""
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _logit(log_chance: float) -> float:
    """log p − log(1 − p), with p kept inside [EDGE, 1 − EDGE]; of no number, that of EDGE."""
    p = 1.0 if log_chance >= 0.0 else math.exp(log_chance)
    p = min(max(EDGE, p), 1.0 - EDGE)
    return math.log(p / (1.0 - p))
