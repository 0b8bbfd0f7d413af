"""Rules to compare with: fixed widths, the reference thread's rule and its variants, tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.pricing.rule import Limits, PriorRow, Rule, band_of, possible

TIMING_WEIGHT = 0.25  # of the newest timing in a width's price
TRIAL_EVERY = 8  # rounds between trials
TRIAL_STALE = 64  # rounds after which a price is stale
TRIAL_REACH = 0.9  # a width is tried if its guessed ratio is at least this share of the best
TIER_MEMORY = 0.9  # of the acceptance average, per round
TIER_UP = 0.5  # go up when this share of the tier's nodes land,
TIER_DOWN = 0.35  # down when less than this share of the next lower tier's would


class Fixed(Rule):
    """Always the same width; learns nothing."""

    def __init__(self, name: str, limits: Limits, width: int) -> None:
        super().__init__(name, limits)
        self.width = width

    def _choose(self, chances: list[float], context_length: int) -> int:
        return self.width

    def _observe(self, *_: Any) -> None:
        """A fixed width has nothing to learn."""


class Ratio(Rule):
    """The thread's rule: the best one-round ratio E[w] / c[w], from one price per width.

    A price is a running mean of the width's own timings; widths without one are interpolated.
    Probes every `tile` rows from row 2 (widths 1, 5, 9, 13 and the cap) come first, then now and
    then a trial of a width that looks near the best and is untimed or stale. `band` widens the
    choice: the widest width whose ratio is within that share of the best (its variant).
    """

    def __init__(
        self, name: str, limits: Limits, prior: Sequence[PriorRow], band: float = 0.0
    ) -> None:
        super().__init__(name, limits)
        self.band = band
        self._ms: dict[int, float] = {}
        self._timed_at: dict[int, int] = {}
        self._round = 0
        self._asked = 0  # the probe that the last choice was; 0 for none
        self._context = 0
        self._kept: dict[int, dict[int, float]] = {}
        self._loaded = False
        self._probes = sorted({*range(1, limits.cap + 1, limits.tile), limits.cap})
        # As on the thread's servers, start-up prices only bridge the time until the first probe.
        self._start = {width: ms for width, _, ms in prior}

    def _choose(self, chances: list[float], context_length: int) -> int:
        n = len(chances)
        self._context = context_length
        self._load_band(context_length)
        # A round is observed while the next one runs: the probe just asked for is not missing.
        missing = (p for p in self._probes if p <= n and p not in self._ms and p != self._asked)
        self._asked = next(missing, 0)
        if self._asked:
            return self._asked
        table = self._ms or self._start or {n: 1.0}
        widths = sorted(table)
        prices = np.interp(np.arange(n + 1), widths, [table[w] for w in widths])
        expected = 1.0 + np.concatenate([[0.0], np.cumsum(chances)])
        ratio = expected / prices
        least = min(self.limits.least, n)
        ratio[:least] = 0.0
        best = float(ratio.max())
        if self._round % TRIAL_EVERY == TRIAL_EVERY - 1:
            for width in np.argsort(-ratio, kind="stable").tolist():
                if ratio[width] < TRIAL_REACH * best:
                    break
                if self._round - self._timed_at.get(width, -TRIAL_STALE) >= TRIAL_STALE:
                    return int(width)
        if self.band:
            return int(np.flatnonzero(ratio >= (1.0 - self.band) * best)[-1])
        return int(np.argmax(ratio))

    def _observe(
        self,
        width: int,
        context_length: int,
        ms: float | None,
        landed: Sequence[bool],
        chances: Sequence[float],
    ) -> None:
        self._round += 1
        if ms is None:
            return
        old = self._ms.get(width, ms)
        self._ms[width] = old + TIMING_WEIGHT * (ms - old)
        self._timed_at[width] = self._round

    @property
    def learn_every(self) -> int:
        """As published: each round."""
        return 1

    def _load_band(self, context_length: int) -> None:
        if not self._loaded:
            self._ms = dict(self._kept.get(band_of(context_length), {}))
            self._loaded = True

    def _bands(self) -> dict[str, Any]:
        bands = dict(self._kept)
        if self._ms:
            bands[band_of(self._context)] = self._ms
        return {str(band): {str(w): ms for w, ms in table.items()} for band, table in bands.items()}

    def _load(self, bands: Mapping[str, Any]) -> None:
        kept = {
            int(band): {int(width): float(ms) for width, ms in table.items()}
            for band, table in bands.items()
        }
        for table in kept.values():
            if not all(0 <= width <= self.cap and possible(ms) for width, ms in table.items()):
                raise ValueError(f"prices {table}")
        self._kept, self._loaded, self._ms = kept, False, {}

    def explain(self) -> dict[str, Any]:
        return {"rule": self.name, "prices_ms": dict(sorted(self._ms.items()))}


class Tiers(Rule):
    """A few widths, and an acceptance average with hysteresis to step between them.

    It knows no prices. A round whose nodes all landed is censored: it says "at least", so it
    never pulls the average down.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        super().__init__(name, limits)
        self.tiers = sorted({min(w, limits.cap) for w in (3, 7, limits.cap)})
        self._tier = len(self.tiers) // 2
        self._mean = 0.5 * self.tiers[self._tier]

    def _choose(self, chances: list[float], context_length: int) -> int:
        return self.tiers[self._tier]

    def _observe(
        self,
        width: int,
        context_length: int,
        ms: float | None,
        landed: Sequence[bool],
        chances: Sequence[float],
    ) -> None:
        count = float(sum(landed))
        if count >= width:
            count = max(count, self._mean)
        self._mean += (1.0 - TIER_MEMORY) * (count - self._mean)
        if self._mean > TIER_UP * self.tiers[self._tier]:
            self._tier = min(self._tier + 1, len(self.tiers) - 1)
        elif self._tier and self._mean < TIER_DOWN * self.tiers[self._tier - 1]:
            self._tier -= 1

    @property
    def learn_every(self) -> int:
        """As published: each round."""
        return 1

    def explain(self) -> dict[str, Any]:
        return {"rule": self.name, "tier": self.tiers[self._tier], "mean_landed": self._mean}
