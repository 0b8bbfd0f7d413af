"""The default rule: a node is verified if its chance exceeds what its milliseconds are worth.

The rate over many rounds is the ratio of two sums, tokens and milliseconds. It is maximised not
by the best ratio of each round but by argmax over w of E[w] − λ·c[w], where λ is that best rate
itself (renewal reward theorem: Ross 1970; ratio programming: Dinkelbach 1967). docs/pricing.md
derives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.pricing.cost import CostModel, Knot, octaves
from dflash_jax.pricing.rule import Limits, PriorRow, Rule, band_of

MEMORY = 1.0 - 1.0 / 200.0  # of λ, per round
FIRST_ROUNDS = 2.0  # the first round's own best ratio counts as so many rounds of λ
KEPT_ROUNDS = 30.0  # a record's λ counts as at most so many rounds of the next stream
OPTIMISM = 1.0  # a width is priced this many stds of doubt below its expected added price


class Renewal(Rule):
    """argmax of E[w] − λ·c[w], λ = discounted tokens ÷ the present prices of the widths run."""

    def __init__(self, limits: Limits, prior: Sequence[PriorRow]) -> None:
        super().__init__("renewal", limits)
        self.cost = CostModel(limits.cap, limits.tile, prior)
        self._tokens = 0.0
        self._widths = np.zeros(limits.cap + 1)
        self._expected = np.ones(limits.cap + 1)
        self._discount = np.zeros(limits.cap + 1)
        self._why: tuple[int, float, np.ndarray, np.ndarray] | None = None
        self._kept: dict[str, Any] = {}
        self._band = -1

    def _choose(self, chances: np.ndarray, n: int, context_length: int) -> int:
        expected = self._expected[: n + 1]
        np.add.accumulate(chances[:n], out=expected[1:])
        expected[1:] += 1.0
        full = self.cost.prices(context_length)
        if not self._tokens:
            self._start(expected, context_length)
        rate = self._tokens / float(self._widths @ full)
        prices = np.maximum.accumulate((full * (1.0 - self._discount))[: n + 1])
        gain = expected - rate * prices
        w = int(n - np.argmax(gain[::-1]))
        self._why = (w, rate, full, expected)
        return w

    def observe(
        self,
        *,
        width: int,
        context_length: int,
        round_ms: float,
        landed: np.ndarray,
        sample: bool = True,
    ) -> None:
        self._tokens = MEMORY * self._tokens + 1.0 + float(np.count_nonzero(landed))
        self._widths *= MEMORY
        self._widths[width] += 1.0
        band = band_of(context_length)
        if band != self._band:
            self._save_band()
            self._band = band
        if sample:
            self.cost.observe(width, context_length, round_ms)
            self._discount = np.minimum(OPTIMISM * self.cost.doubt(), 0.5)

    def _save_band(self) -> None:
        """Puts what is believed now under the band of the last observation."""
        knot = self.cost.knot()
        if knot is None:
            return
        total = float(self._widths.sum())
        share = min(1.0, KEPT_ROUNDS / total)
        self._kept[str(band_of(knot.context_length))] = {
            "context_length": knot.context_length,
            "prices_ms": knot.curve.tolist(),
            "cov": knot.cov.tolist(),
            "noise": self.cost.noise,
            "tokens": self._tokens * share,
            "widths": (self._widths * share).tolist(),
        }

    def _bands(self) -> dict[str, Any]:
        self._save_band()
        return dict(self._kept)

    def _load(self, bands: Mapping[str, Any]) -> None:
        self._kept = dict(bands)
        knots = [
            Knot(band["context_length"], np.array(band["prices_ms"]), np.array(band["cov"]))
            for band in bands.values()
        ]
        self.cost.add_knots(knots)
        self._tokens = 0.0

    def _start(self, expected: np.ndarray, context_length: int) -> None:
        """The first λ: the nearest band's, or else the first round's own best ratio."""
        if self._kept:
            band = min(
                self._kept.values(), key=lambda b: abs(octaves(b["context_length"], context_length))
            )
            self._tokens, self._widths = band["tokens"], np.array(band["widths"])
            self.cost.noise = band["noise"]
            return
        width = int(np.argmax(expected / self.cost.prices(context_length)[: len(expected)]))
        self._tokens = FIRST_ROUNDS * float(expected[width])
        self._widths = np.zeros(self.cap + 1)
        self._widths[width] = FIRST_ROUNDS

    def explain(self) -> dict[str, Any]:
        if self._why is None:
            return {"rule": self.name}
        width, rate, prices, expected = self._why
        return {
            "rule": self.name,
            "width": width,
            "tokens_per_ms": rate,
            "prices_ms": prices.tolist(),
            "expected_tokens": expected.tolist(),
            "noise": self.cost.noise,
            "jumps": self.cost.jumps,
        }
