"""The default rule: a node is verified if its chance exceeds what its milliseconds are worth.

The rate over many rounds is the ratio of two sums, tokens and milliseconds. It is maximised not
by the best ratio of each round but by argmax over w of E[w] − λ·c[w], where λ is that best rate
itself (renewal reward theorem: Ross 1970; ratio programming: Dinkelbach 1967). docs/pricing.md
derives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.pricing.cost import CostModel, Knot, octaves
from dflash_jax.pricing.rule import Limits, PriorRow, Rule, band_of
from dflash_jax.pricing.trust import Trust

MEMORY = 1.0 - 1.0 / 200.0  # of λ, per round
FIRST_ROUNDS = 2.0  # the first round's own best ratio counts as so many rounds of λ
KEPT_ROUNDS = 30.0  # a record's λ counts as at most so many rounds of the next stream
SURE_MOST = 0.03  # but never more than so much of the price: ignorance is no reason to stay
SURE = 1.0  # stds of doubt up to which a price is taken to equal the usual width's
JUMP_MEMORY = 0.05  # how much of λ's memory a jump of the prices leaves
PROBES = 4  # most rounds spent on timing other widths when prices are unknown or have jumped,
PROBE_STDS = 2.0  # each only if a price lower by so many stds would make it the better width


def best_width(expected: np.ndarray, prices: np.ndarray, rate: float) -> int:
    """argmax over w of expected[w] − rate · prices[w]; the widest if several are equal.

    expected [n+1] tokens, prices [n+1] ms, rate in tokens per ms.
    """
    gain = expected - rate * prices
    return int(len(gain) - 1 - np.argmax(gain[::-1]))


class Renewal(Rule):
    """argmax of E[w] − λ·c[w], λ = discounted tokens ÷ the present prices of the widths run."""

    def __init__(self, limits: Limits, prior: Sequence[PriorRow]) -> None:
        super().__init__("renewal", limits)
        self.cost = CostModel(limits.cap, limits.tile, prior)
        self.trust = Trust(limits.cap)
        self._tokens = 0.0
        self._widths = np.zeros(limits.cap + 1)
        self._expected = np.ones(limits.cap + 1)
        self._probes = 0 if self.cost.known else PROBES
        self._why: tuple[int, float, np.ndarray, np.ndarray] | None = None
        self._kept: dict[str, Any] = {}
        self._band = -1
        self._every = np.arange(limits.cap + 1)
        self._usual = 0
        self._doubt = np.zeros(limits.cap + 1)

    def _choose(self, chances: np.ndarray, context_length: int) -> int:
        n = len(chances)
        expected = self._expected[: n + 1]
        np.add.accumulate(self.trust.apply(chances), out=expected[1:])
        expected[1:] += 1.0
        full = self.cost.prices(context_length)
        if not self._tokens:
            self._start(expected, context_length)
        rate = self._tokens / float(self._widths @ full)
        w = best_width(expected, self._believed(full)[: n + 1], rate)
        if self._probes:
            w = self._probe(w, n, full, rate)
        self._why = (w, rate, full, expected)
        return w

    def _believed(self, prices: np.ndarray) -> np.ndarray:
        """Prices [cap+1] less what doubt explains of their distance from the usual width's."""
        usual = prices[self._usual]
        added = prices - usual
        luck = self._doubt * usual
        size = np.maximum(np.abs(added), luck)
        size += 1e-12
        luck *= luck
        added *= 1.0 - luck / (size * size)
        return added + usual

    def _probe(self, width: int, n: int, prices: np.ndarray, rate: float) -> int:
        """A width well above or below `width` that is better if its price is luckily low; or it."""
        wide = max(2 * width, width + self.limits.tile)
        narrow = max(width // 2, self.limits.least, 1)
        wide, narrow = (min(int(self.cost.ends[min(w, n)]), n) for w in (wide, narrow))
        gain = self._expected - rate * prices
        hope = gain + PROBE_STDS * rate * prices[width] * self.cost.doubt(width)
        probe = max((wide, narrow), key=lambda w: float(hope[w]))
        if hope[probe] <= gain[width] or probe == width:
            return width
        self._probes -= 1
        return probe

    def _observe(
        self,
        width: int,
        context_length: int,
        ms: float | None,
        landed: np.ndarray,
        chances: np.ndarray,
    ) -> None:
        self._tokens = MEMORY * self._tokens + 1.0 + float(np.count_nonzero(landed))
        self._widths *= MEMORY
        self._widths[width] += 1.0
        self.trust.observe(chances, landed)
        band = band_of(context_length)
        if band != self._band:
            self._save_band()
            self._band = band
        if ms is not None:
            if self.cost.observe(width, context_length, ms):
                self._probes = PROBES
                # λ was earned by widths that suited the old prices.
                self._tokens *= JUMP_MEMORY
                self._widths *= JUMP_MEMORY
            self._usual = round(float(self._widths @ self._every) / float(self._widths.sum()))
            self._doubt = np.minimum(SURE * self.cost.doubt(self._usual), SURE_MOST)

    def _save_band(self) -> None:
        """Puts what is believed now under the band of the last observation."""
        knot = self.cost.knot()
        if knot is None:
            return
        share = min(1.0, KEPT_ROUNDS / float(self._widths.sum()))
        self._kept[str(band_of(knot.context_length))] = {
            **knot.to_record(),
            "tokens": self._tokens * share,
            "widths": (self._widths * share).tolist(),
        }

    def _bands(self) -> dict[str, Any]:
        self._save_band()
        return dict(self._kept)

    def _load(self, bands: Mapping[str, Any]) -> None:
        knots = []
        for band, record in bands.items():
            knot = Knot.from_record(record, self.cap)
            widths = np.array(record["widths"], float)
            tokens, rounds = float(record["tokens"]), float(widths.sum())
            if widths.shape != knot.curve.shape or not widths.min() >= 0.0:
                raise ValueError(f"widths {record['widths']}")
            if not (0.0 < tokens < math.inf and 0.0 < rounds < math.inf):
                raise ValueError(f"{tokens} tokens of {rounds} rounds")
            if str(band_of(knot.context_length)) != band:
                raise ValueError(f"band {band} of {knot.context_length} tokens")
            knots.append(knot)
        self._kept = dict(bands)
        self.cost.add_knots(knots)
        self._tokens = 0.0
        if self.cost.known:
            self._probes = 0

    def _start(self, expected: np.ndarray, context_length: int) -> None:
        """The first λ: the nearest band's, or else the first round's own best ratio."""
        if self._kept:
            band = min(
                self._kept.values(), key=lambda b: abs(octaves(b["context_length"], context_length))
            )
            self._tokens, self._widths = band["tokens"], np.array(band["widths"])
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
