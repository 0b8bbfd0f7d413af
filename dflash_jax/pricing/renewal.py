"""The default rule: a node is verified if its chance exceeds what its milliseconds are worth.

The rate over many rounds is the ratio of two sums, tokens and milliseconds. It is maximised not
by the best ratio of each round but by argmax over w of E[w] − λ·c[w], where λ is that best rate
itself (renewal reward theorem: Ross 1970; ratio programming: Dinkelbach 1967). docs/pricing.md
derives it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.pricing.cost import CostModel, Knot, octaves
from dflash_jax.pricing.rule import LEARN_ROUNDS, Limits, PriorRow, Rule, band_of
from dflash_jax.pricing.trust import Trust

MEMORY = 1.0 - 1.0 / 200.0  # of λ, per round
FIRST_ROUNDS = 2.0  # the first round's own best ratio counts as so many rounds of λ
KEPT_ROUNDS = 30.0  # a record's λ counts as at most so many rounds of the next stream
SURE = 1.0  # stds of doubt up to which a price is taken to equal the usual program's,
SURE_MOST = 0.03  # but never more than so much of it: ignorance is no reason to stay
JUMP_MEMORY = 0.05  # how much of λ's memory a jump of the prices leaves
SETTLED = 24  # rounds after a jump that are learned from one by one
PROBES = 4  # most rounds spent on timing other widths when prices are unknown or have jumped,
PROBE_EVERY = 100  # and rounds between two later ones,
UNKNOWN = 0.2  # while a price is in doubt by so much of it;
PROBE_STDS = 2.0  # each only if a price lower by so many stds would make it the better width


def best_width(expected: Sequence[float], prices: Sequence[float], rate: float) -> int:
    """argmax over w of expected[w] − rate · prices[w]; the widest if several are equal.

    expected [n] tokens, prices [n] ms, rate in tokens per ms.
    """
    best, most = 0, -math.inf
    for width, (tokens, ms) in enumerate(zip(expected, prices, strict=True)):
        gain = tokens - rate * ms
        if gain >= most:
            best, most = width, gain
    return best


class Renewal(Rule):
    """argmax of E[w] − λ·c[w], λ = discounted tokens ÷ the present prices of the programs run."""

    def __init__(self, limits: Limits, prior: Sequence[PriorRow]) -> None:
        super().__init__("renewal", limits)
        self.cost = CostModel(limits.cap, limits.tile, prior)
        self.trust = Trust(limits.cap)
        programs = self.cost.programs
        # A tree of n nodes is verified at the widest width of a program, or whole.
        self._offers = [
            [*(width for width in programs if limits.least <= width < n), n]
            for n in range(limits.cap + 1)
        ]
        self._kept: dict[str, Any] = {}
        self._restart()

    def _restart(self) -> None:
        """Nothing chosen or observed yet; what is known are the cost model's prices."""
        programs = self.cost.programs
        self._tokens = 0.0
        self._rounds = [0.0] * len(programs)  # discounted, by program
        self._usual = 0  # the program of their mean width
        self._doubt = [0.0] * len(programs)  # how far, relative to its price, others may be off
        self._probes = 0 if self.cost.known else PROBES
        self._settled = SETTLED if self.cost.known else 0  # rounds since the last jump
        self._why: tuple[int, int, float, list[float], list[float], list[float]] | None = None
        self._band = -1

    def _choose(self, chances: list[float], context_length: int) -> int:
        expected = list(itertools.accumulate(self.trust.apply(chances), initial=1.0))
        prices = self.cost.program_prices(context_length)
        if not self._tokens:
            self._start(expected, prices, context_length)
        rate = self._tokens / sum(map(operator.mul, self._rounds, prices))
        offers = self._offers[len(chances)]
        believed = self._believed(prices)
        offered = [believed[self.cost.program_of[w]] for w in offers]
        best = offers[best_width([expected[w] for w in offers], offered, rate)]
        width = self._probe(best, expected, prices, rate) if self._probes else best
        self._why = (width, best, rate, prices, believed, expected)
        return width

    def _believed(self, prices: list[float]) -> list[float]:
        """Prices [G] less what doubt explains of their distance from the usual program's."""
        usual = prices[self._usual]
        believed = []
        for ms, doubt in zip(prices, self._doubt, strict=True):
            added, luck = ms - usual, doubt * usual
            size = max(abs(added), luck) + 1e-12
            believed.append(usual + added * (1.0 - (luck / size) ** 2))
        return believed

    def _probe(self, width: int, expected: list[float], prices: list[float], rate: float) -> int:
        """A width well above or below `width` that is better if its price is luckily low; or it."""
        n, program_of = len(expected) - 1, self.cost.program_of
        doubt = self.cost.doubt(program_of[width])
        luck = PROBE_STDS * rate * prices[program_of[width]]

        def gain(w: int, lucky: float) -> float:
            return expected[w] - rate * prices[program_of[w]] + lucky * doubt[program_of[w]]

        wide = max(2 * width, width + self.limits.tile)
        narrow = max(width // 2, self.limits.least, 1)
        ends = (self.cost.programs[program_of[min(w, n)]] for w in (wide, narrow))
        probe = max((min(end, n) for end in ends), key=lambda w: gain(w, luck))
        if gain(probe, luck) <= gain(width, 0.0) or probe == width:
            return width
        self._probes -= 1
        return probe

    def _observe(
        self,
        width: int,
        context_length: int,
        ms: float | None,
        landed: Sequence[bool],
        chances: Sequence[float],
    ) -> None:
        self._tokens = MEMORY * self._tokens + 1.0 + sum(landed)
        self._rounds = [MEMORY * rounds for rounds in self._rounds]
        self._rounds[self.cost.program_of[width]] += 1.0
        self.trust.observe(chances, landed)
        band = band_of(context_length)
        if band != self._band:
            self._save_band()
            self._band = band
        if ms is not None:
            self._settled += 1
            if self.cost.observe(width, context_length, ms):
                self._settled, self._probes = 0, PROBES
                # λ was earned by widths that suited the old prices.
                self._tokens *= JUMP_MEMORY
                self._rounds = [JUMP_MEMORY * rounds for rounds in self._rounds]
            mean = sum(map(operator.mul, self._rounds, self.cost.programs)) / sum(self._rounds)
            self._usual = self.cost.program_of[round(mean)]
            doubts = self.cost.doubt(self._usual)
            if self._settled % PROBE_EVERY == 0 and not self._probes and max(doubts) > UNKNOWN:
                self._probes = 1
            self._doubt = [min(SURE * doubt, SURE_MOST) for doubt in doubts]

    @property
    def learn_every(self) -> int:
        """One after a jump, when one may be under way, and where prices start from nothing."""
        if self._settled < SETTLED or self.cost.may_jump:
            return 1
        return LEARN_ROUNDS

    def _save_band(self) -> None:
        """Puts what is believed now under the band of the last observation."""
        knot = self.cost.knot()
        if knot is None:
            return
        share = min(1.0, KEPT_ROUNDS / sum(self._rounds))
        widths = [0.0] * (self.cap + 1)
        for width, rounds in zip(self.cost.programs, self._rounds, strict=True):
            widths[width] = rounds * share
        self._kept[str(band_of(knot.context_length))] = {
            **knot.to_record(),
            "tokens": self._tokens * share,
            "widths": widths,
        }

    def _bands(self) -> dict[str, Any]:
        self._save_band()
        return dict(self._kept)

    def _load(self, bands: Mapping[str, Any]) -> None:
        knots, kept = [], {}
        for band, record in bands.items():
            knot = Knot.from_record(record, self.cap)
            widths = np.array(record["widths"], float)
            tokens, rounds = float(record["tokens"]), float(widths.sum())
            if widths.shape != knot.curve.shape or not widths.min() >= 0.0:
                raise ValueError(f"widths {record['widths']}")
            if not 0.0 < 0.99 * rounds < tokens < 1.01 * (self.cap + 1) * rounds < math.inf:
                raise ValueError(f"{tokens} tokens of {rounds} rounds")
            if str(band_of(knot.context_length)) != band:
                raise ValueError(f"band {band} of {knot.context_length} tokens")
            knots.append(knot)
            kept[band] = {**knot.to_record(), "tokens": tokens, "widths": widths.tolist()}
        self._kept = kept
        self.cost.add_knots(knots)
        self._restart()

    def _start(self, expected: list[float], prices: list[float], context_length: int) -> None:
        """The first λ: the nearest band's, or else the first round's own best ratio."""
        self._rounds = [0.0] * len(self._rounds)
        if self._kept:
            band = min(
                self._kept.values(), key=lambda b: abs(octaves(b["context_length"], context_length))
            )
            self._tokens = band["tokens"]
            for width, rounds in enumerate(band["widths"]):
                self._rounds[self.cost.program_of[width]] += rounds
            return
        program_of = self.cost.program_of
        width = max(
            self._offers[len(expected) - 1], key=lambda w: expected[w] / prices[program_of[w]]
        )
        self._tokens = FIRST_ROUNDS * expected[width]
        self._rounds[program_of[width]] = FIRST_ROUNDS

    def explain(self) -> dict[str, Any]:
        if self._why is None:
            return {"rule": self.name}
        width, best, rate, prices, believed, expected = self._why
        return {
            "rule": self.name,
            "width": width,
            "probe": width != best,
            "tokens_per_ms": rate,
            "prices_ms": [prices[program] for program in self.cost.program_of],
            "believed_ms": [believed[program] for program in self.cost.program_of],
            "expected_tokens": list(expected),
            "noise": self.cost.noise,
            "jumps": self.cost.jumps,
        }
