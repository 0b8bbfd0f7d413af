"""The price of a round: a Kalman filter over one price per program, which share what they learn.

A program is one compiled forward; widths padded to the same row count run the same one, and cost
the same. State: a multiplier m[g] for each program, and its covariance.
price(g, L) = m[g] · ref(g, L), where ref is a reference surface through *knots* (contexts with a
known price curve: warm-up timings, or a band's record), linear in the context L between and
beyond them. The covariance is structured: widths share their scale (a slow card) and their tilt
(the price of a row), and neighbours share steps, larger where a tile of rows begins. So one timing
moves every price, as far as it should, and the covariance says how sure each is.

What runs in every round is plain Python over short lists: between two rounds the model's weights
push all else out of the caches, and a NumPy call then costs ten times what it does in a loop.

Sources: Kalman (1960); Rasmussen & Williams, Gaussian Processes for Machine Learning (2006),
ch. 2 and 5; the redescending weight: Huber & Ronchetti, Robust Statistics (2009), ch. 4.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.pricing.rule import MS_RANGE, PriorRow, band_of, is_context

BEND = 0.003  # prior std of a change of slope at a width, relative to the price of a round
STEP = 0.004  # of a step in price between neighbouring widths
TILE_STEPS = (0.005, 0.03, 0.1)  # of one where a tile of rows begins: the warm-up picks,
FLATTER = 1.0  # a higher one only if its timings are e times likelier: under noise all fit alike,
BLIND_TILE_STEP = 0.05  # or without one, this.
TILE_OWN = 0.15  # share of a tile's step that it does not have in common with the others
ONE_ROW_STEP = 0.10  # and of one from one row (plain decoding) to two
SCALE_DOUBT = 0.15  # a warm-up round may be this much slower than a served one, at all widths
TILT_DOUBT = 0.10  # and the dearest width this much further off than the cheapest
KEPT_DOUBT = 0.03  # the same for a band's record, which served rounds have taught
DRIFT_SCALE = 0.001  # random walk a round: the card's speed,
START_DRIFT = 0.05  # the same in the first rounds of a stream, fading over
START_ROUNDS = 12
DRIFT_TILT = 0.001  # the price of a row (at the cap, relative to the round),
DRIFT_SHAPE = 0.01  # and its shape, as a share of the prior's std
CONTEXT_TILT = 0.05  # doubt of the tilt for each doubling of the context away from a knot
BLIND_SLOPE = 0.04  # without any prior: a row costs this share of a round,
BLIND_TILT = 2.0  # or not at all like that (std at the cap, relative to the round)
NOISE_START = 0.05  # timing noise of served rounds, relative, at least; then learned,
NOISE_RATE = 0.03  # by steps of this share
WARMUP_NOISES = (0.01, 0.02, 0.04, 0.07, 0.1, 0.15)  # the candidates for the warm-up's
NOISE_RANGE = (0.005, 0.3)
PRICE_RANGE = (1e-6 * MS_RANGE[0], 1e6 * MS_RANGE[1])  # ms of a record: beliefs may overshoot
CLIP = 2.5  # a residual beyond this many sigmas counts for less, the less the further
ABSURD = 1.5  # times too dear or too cheap beside its neighbour: a price that cannot be
JUMP_WINDOW = 10  # rounds over which the clipped residuals are averaged:
JUMP_MEAN = 1.3  # white noise hardly ever reaches this mean (4 stds); a changed price soon does
JUMP_CLIP = 2.0  # so that an outlier or two are no jump
JUMP_SCALE = 1.0  # after a jump the scale is in doubt by so much,
JUMP_TILT = 1.0  # and the tilt


@dataclasses.dataclass
class Knot:
    """A context whose price curve is known.

    curve: [cap+1] ms. cov: [cap+1, cap+1], noise (std of one timing) and tilt_doubt (std at the
    cap: how far off the price of a row may be all the same): relative to the price.
    """

    context_length: int
    curve: np.ndarray
    cov: np.ndarray
    noise: float
    tilt_doubt: float

    def to_record(self) -> dict[str, Any]:
        """Plain and JSON-ready."""
        return {
            "context_length": self.context_length,
            "prices_ms": self.curve.tolist(),
            "cov": self.cov.tolist(),
            "noise": self.noise,
            "tilt_doubt": self.tilt_doubt,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], cap: int) -> Knot:
        """Of `to_record`. Raises KeyError, TypeError or ValueError for anything else."""
        knot = cls(
            int(record["context_length"]),
            np.array(record["prices_ms"], float),
            np.array(record["cov"], float),
            float(record["noise"]),
            float(record["tilt_doubt"]),
        )
        if knot.curve.shape != (cap + 1,) or knot.cov.shape != (cap + 1, cap + 1):
            raise ValueError(f"prices {knot.curve.shape}, cov {knot.cov.shape} at cap {cap}")
        if not (
            is_context(knot.context_length)
            and PRICE_RANGE[0] <= knot.curve.min() <= knot.curve.max() <= PRICE_RANGE[1]
            and NOISE_RANGE[0] <= knot.noise <= NOISE_RANGE[1]
            and 0.0 <= knot.tilt_doubt <= BLIND_TILT
        ):
            raise ValueError("numbers out of range")
        size = float(np.abs(knot.cov).max())
        if not (
            size < math.inf
            and np.allclose(knot.cov, knot.cov.T, rtol=0.0, atol=1e-6 * size)
            and np.linalg.eigvalsh(knot.cov).min() >= -1e-6 * size
        ):
            raise ValueError("cov is no covariance")
        return knot


def shape_kernel(cap: int, tile: int, tile_step: float) -> np.ndarray:
    """Covariance [cap+1, cap+1] of how a price curve departs from a straight line.

    It bends at any width, steps a little between any two, and steps more where a tile of rows
    begins (width w has w + 1 rows) and from one row to two: by a height all tiles share and by
    one of its own.
    """
    width = np.arange(cap + 1)
    bends = np.maximum(width[:, None] - np.arange(1, cap), 0.0)  # [cap+1, knots]
    stair = (width // tile).astype(float)
    var = np.full(cap + 1, STEP**2)
    var[tile::tile] += (TILE_OWN * tile_step) ** 2
    var[0] = 0.0
    var[1:2] += ONE_ROW_STEP**2
    total = np.cumsum(var)
    return (
        BEND**2 * bends @ bends.T
        + tile_step**2 * np.outer(stair, stair)
        + np.minimum.outer(total, total)
    )


def tilt_of(curve: np.ndarray) -> np.ndarray:
    """The direction [cap+1] in which the multipliers move if a row's price is off; 1 at the cap."""
    width = np.arange(len(curve))
    tilt = width / curve
    return tilt / tilt[-1] if len(curve) > 1 else tilt


class Smoother:
    """Timings at one context, taken to be a price curve with so much relative noise.

    A Gaussian process whose curves are straight lines plus `shape`, [cap+1, cap+1].
    """

    def __init__(self, rows: Sequence[PriorRow], shape: np.ndarray, noise: float) -> None:
        widths = np.array([row[0] for row in rows])
        ms = np.array([row[2] for row in rows])
        self._scale = float(np.median(ms))
        tilt = np.arange(len(shape)) / max(len(shape) - 1, 1)
        self._prior = 1.0 + np.outer(tilt, tilt) + shape
        gram = self._prior[np.ix_(widths, widths)]
        gram = gram + np.diag((noise * ms / self._scale) ** 2 + 1e-9)
        self._chol = np.linalg.cholesky(gram)
        self._white = np.linalg.solve(self._chol, ms / self._scale - 1.0)
        self._rows, self._widths, self._noise = rows, widths, noise

    def evidence(self) -> float:
        """Log likelihood of the timings, but for a constant."""
        return float(-0.5 * self._white @ self._white - np.log(np.diag(self._chol)).sum())

    def knot(self) -> Knot:
        """The curve at every width, and its doubt."""
        cross = np.linalg.solve(self._chol, self._prior[self._widths])
        mean, cov = cross.T @ self._white, self._prior - cross.T @ cross
        curve = np.maximum.accumulate(self._scale * np.maximum(1.0 + mean, 0.05))
        cov = cov * np.outer(self._scale / curve, self._scale / curve)
        return Knot(self._rows[0][1], curve, cov, self._noise, TILT_DOUBT)


def programs_of(prior: Sequence[PriorRow], cap: int) -> list[int]:
    """The widest width of each program, ascending; the last is `cap`.

    One program is timed once, so its widths have the very same timings at every context.
    """
    timings: dict[int, list[tuple[int, float]]] = {}
    for width, context_length, ms in prior:
        timings.setdefault(width, []).append((context_length, ms))
    known = {width: sorted(set(rows)) for width, rows in timings.items()}
    return [w for w in range(cap + 1) if w == cap or known.get(w, w) != known.get(w + 1, -1)]


class CostModel:
    """Prices every width at every context from whole-round timings.

    `programs` is the widest width of each program, and `program_of` the program of each width.
    Lists [G] and matrices [G][G] below are by program.
    """

    def __init__(self, cap: int, tile: int, prior: Sequence[PriorRow]) -> None:
        self.cap = cap
        self.tile = tile
        self.known = bool(prior)  # are there any real milliseconds yet?
        self.programs = programs_of(prior, cap)
        self.program_of = [bisect.bisect_left(self.programs, width) for width in range(cap + 1)]
        if self.known:
            self._take_warmup(prior)
        else:
            self._shape = shape_kernel(cap, tile, BLIND_TILE_STEP)
            curve = 1.0 + BLIND_SLOPE * np.arange(cap + 1)
            self.knots = [Knot(0, curve, self._shape, NOISE_START, BLIND_TILT)]
        self._reset()

    def _take_warmup(self, prior: Sequence[PriorRow]) -> None:
        """A knot for each context; noise and steps under which all timings are most likely."""
        contexts = sorted({row[1] for row in prior})
        timings = [[row for row in prior if row[1] == context] for context in contexts]
        shapes = [shape_kernel(self.cap, self.tile, step) for step in TILE_STEPS]
        best = -math.inf
        for (higher, shape), noise in itertools.product(enumerate(shapes), WARMUP_NOISES):
            smoothers = [Smoother(rows, shape, noise) for rows in timings]
            evidence = sum(each.evidence() for each in smoothers) - FLATTER * higher
            if evidence > best:
                best, self._shape, found = evidence, shape, smoothers
        self.knots = [each.knot() for each in found]

    def _reset(self) -> None:
        """Back to the knots: nothing observed since."""
        curves = np.maximum.accumulate([knot.curve for knot in self.knots])  # never falls with L
        self.knots = [
            dataclasses.replace(knot, curve=curve)
            for knot, curve in zip(self.knots, curves, strict=True)
        ]
        self.at: int | None = None  # context of the last observation
        self._segment = (-1.0, -1.0)  # contexts between which _base and _slope hold
        self._residuals: list[float] = []
        self.jumps = 0
        self._rounds = 0
        self.noise = max(NOISE_START, *(knot.noise for knot in self.knots))
        self.m = [1.0] * len(self.programs)
        self.cov: list[list[float]] = []
        self._best_known = 0  # the program whose price is least in doubt

    def _start(self, context_length: int) -> None:
        """Doubt at the first round: the nearest knot's own, the scale, the tilt, the distance."""
        knot = min(self.knots, key=lambda k: abs(octaves(k.context_length, context_length)))
        tilt = np.outer(*2 * [tilt_of(knot.curve)])
        far = CONTEXT_TILT * min(abs(octaves(knot.context_length, context_length)), 4.0)
        cov = knot.cov + SCALE_DOUBT**2 + (knot.tilt_doubt**2 + far**2) * tilt
        drift = DRIFT_SCALE**2 + DRIFT_TILT**2 * tilt + DRIFT_SHAPE**2 * self._shape
        jump = JUMP_SCALE**2 + JUMP_TILT**2 * tilt + self._shape
        chosen = np.ix_(self.programs, self.programs)
        self.cov, self._drift, self._jump = (x[chosen].tolist() for x in (cov, drift, jump))
        self.m = [1.0] * len(self.programs)
        self.at = context_length

    def reference(self, context_length: int) -> list[float]:
        """ref(·, L), [G] ms: linear in the context through the knots, never falling."""
        low, high = self._segment
        if not low <= context_length < high:
            self._new_segment(context_length)
        beyond = context_length - self._origin
        return [base + slope * beyond for base, slope in zip(self._base, self._slope, strict=True)]

    def _new_segment(self, context_length: int) -> None:
        knots = self.knots
        if context_length < knots[0].context_length or len(knots) == 1:
            # Below the first knot its curve holds: an extrapolation could go below zero.
            index = 0
            self._segment = (0.0, knots[0].context_length if len(knots) > 1 else math.inf)
            slope = np.zeros(self.cap + 1)
        else:
            index = sum(k.context_length <= context_length for k in knots) - 1
            last = index == len(knots) - 1
            a, b = knots[index - last], knots[index - last + 1]
            rise = b.curve - a.curve
            if last:  # beyond the last knot the last slope holds, and wider rises by more
                rise = np.maximum.accumulate(rise)
            slope = rise / (b.context_length - a.context_length)
            self._segment = (
                knots[index].context_length,
                math.inf if last else knots[index + 1].context_length,
            )
        self._origin, base = knots[index].context_length, knots[index].curve
        self._base, self._slope = base[self.programs].tolist(), slope[self.programs].tolist()

    def program_prices(self, context_length: int) -> list[float]:
        """[G] ms, positive, never falling in the width.

        Where the multipliers would have it fall, the program that is known best is believed.
        """
        if self.at is None:
            self._start(context_length)
        return self._never_falling(list(map(operator.mul, self.m, self.reference(context_length))))

    def _never_falling(self, prices: list[float]) -> list[float]:
        best = self._best_known
        wider = itertools.accumulate(prices[best:], max)
        narrower = list(itertools.accumulate(prices[best::-1], min))
        return [*narrower[:0:-1], *wider]

    def prices(self, context_length: int) -> np.ndarray:
        """[cap+1] ms, one for each width."""
        return np.array(self.program_prices(context_length))[self.program_of]

    def doubt(self, program: int) -> list[float]:
        """[G] std of what each program costs beyond `program`, relative to the latter's price."""
        row = self.cov[program]
        own, m = row[program], self.m[program]
        return [
            math.sqrt(max(other[index] - 2.0 * row[index] + own, 0.0)) / m
            for index, other in enumerate(self.cov)
        ]

    def observe(self, width: int, context_length: int, ms: float) -> bool:
        """One timed round: predict (drift), correct (robustly). Returns whether prices jumped."""
        program = self.program_of[width]
        if self.at is None:
            self._start(context_length)
        if not self.known:
            self._rescale(ms / self.reference(context_length)[program])
        reference = self.reference(context_length)
        expected = reference[program]
        drift = self._drift
        if self._rounds < START_ROUNDS:
            start = (START_DRIFT * (1.0 - self._rounds / START_ROUNDS)) ** 2
            drift = [[x + start for x in row] for row in drift]
            self._rounds += 1
        row = list(map(operator.add, self.cov[program], drift[program]))
        y = ms / expected
        predicted = self.m[program]
        sigma = self.noise * predicted
        var = row[program] + sigma * sigma
        error = y - predicted
        z = error / math.sqrt(var)
        self._learn_noise(abs(error) / predicted, var / (predicted * predicted))
        if abs(z) > CLIP:
            var *= (z / CLIP) ** 2
        gain = [x / var for x in row]
        self.m = [max(m + k * error, 0.02) for m, k in zip(self.m, gain, strict=True)]
        self.cov = [
            [c + d - k * x for c, d, x in zip(cov, drifted, row, strict=True)]
            for cov, drifted, k in zip(self.cov, drift, gain, strict=True)
        ]
        self._best_known = min(
            range(len(gain)), key=lambda g: self.cov[g][g] / (self.m[g] * self.m[g])
        )
        self._mend(reference)
        self.at = context_length
        return self._jumped(max(-JUMP_CLIP, min(JUMP_CLIP, z)), self.m[program])

    def _mend(self, reference: list[float]) -> None:
        """Takes back multipliers by which a wider program would be far cheaper than a narrower."""
        prices = list(map(operator.mul, self.m, reference))
        stated = self._never_falling(prices)
        for program, (ms, right) in enumerate(zip(prices, stated, strict=True)):
            if not right < ABSURD * ms < ABSURD * ABSURD * right:
                self.m[program] = right / reference[program]

    def _rescale(self, factor: float) -> None:
        self.knots = [dataclasses.replace(k, curve=k.curve * factor) for k in self.knots]
        self._segment = (-1.0, -1.0)
        self.known = True

    def _learn_noise(self, error: float, var: float) -> None:
        """Follows the median of |error| (0.6745 sigma): an outlier moves it no more than any."""
        share = self.noise * self.noise / var  # how much of the residual's variance is noise
        typical = 0.6745 * self.noise / math.sqrt(share)
        step = NOISE_RATE * share
        self.noise *= 1.0 + (step if error > typical else -step)
        self.noise = min(max(self.noise, NOISE_RANGE[0]), NOISE_RANGE[1])

    @property
    def may_jump(self) -> bool:
        """Whether the last rounds are half way to a jump."""
        return abs(sum(self._residuals)) > 0.5 * JUMP_MEAN * JUMP_WINDOW

    def _jumped(self, z: float, m: float) -> bool:
        """After a jump the scale and the tilt are in doubt again, so the next rounds decide."""
        window = self._residuals
        window.append(z)
        if len(window) > JUMP_WINDOW:
            window.pop(0)
        if abs(sum(window)) <= JUMP_MEAN * JUMP_WINDOW:
            return False
        self.cov = [
            [c + m * m * j for c, j in zip(cov, jump, strict=True)]
            for cov, jump in zip(self.cov, self._jump, strict=True)
        ]
        self.jumps += 1
        window.clear()
        return True

    def knot(self) -> Knot | None:
        """What is believed now, as a knot at the context of the last observation."""
        if self.at is None or not self.known:
            return None
        cov = (np.array(self.cov) / np.outer(self.m, self.m))[
            np.ix_(self.program_of, self.program_of)
        ]
        curve = np.clip(self.prices(self.at), *PRICE_RANGE)  # a slope may lead far beyond
        return Knot(self.at, curve, cov, self.noise, KEPT_DOUBT)

    def add_knots(self, knots: Sequence[Knot]) -> None:
        """Takes knots from a record: they replace the warm-up's in their bands. Starts afresh."""
        if not knots:
            return
        taken = {band_of(k.context_length) for k in knots}
        old = [k for k in self.knots if self.known and band_of(k.context_length) not in taken]
        self.knots = sorted([*old, *knots], key=lambda k: k.context_length)
        self.known = True
        self._reset()


def octaves(a: int, b: int) -> float:
    """Doublings of the context from a to b, counted from 256 tokens on."""
    return math.log2((b + 256) / (a + 256))
