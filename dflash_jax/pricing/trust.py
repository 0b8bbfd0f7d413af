"""The fallback: how far to trust the chances, judged by what landed.

For each place i in the pop order, the chances given are compared with what landed there:

    trusted = p + bias[i] + slope · (p − mean p[i])

With no bias and slope 0 that is p. If the chances say nothing about a round, slope goes to −1,
every round gets the mean landed at each place, and the rule chooses one width for all rounds: the
best fixed one. So chances that are wrong cost the gain of adapting, not more. Only what
`EXPLAINED` standard errors cannot explain is corrected (soft thresholding, Donoho 1995), so that
good chances are left alone.
"""

from __future__ import annotations

import math

import numpy as np

FORGET = 1.0 - 1.0 / 500.0  # per round
EXPLAINED = 3.0  # standard errors of a bias or of the slope that are put down to luck


class Trust:
    """Online regression of landings on chances, one place (0..cap-1) at a time."""

    def __init__(self, cap: int) -> None:
        self.slope = 0.0
        self.bias = np.zeros(cap)
        self._scale = 1.0
        self._shift = np.zeros(cap)  # trusted = _scale · p + _shift
        self._sums = np.zeros((4, cap))  # rounds, Σp, Σ(landed − p), Σp(1 − p): discounted
        self._xx = self._xy = self._xv = 0.0  # Σ over places of d², d·error, d²·p(1 − p)

    def apply(self, chances: np.ndarray) -> np.ndarray:
        """[n] given chances to [n] trusted ones, in [0, 1]."""
        trusted = chances * self._scale
        trusted += self._shift[: len(chances)]
        np.maximum(trusted, 0.0, out=trusted)
        return np.minimum(trusted, 1.0, out=trusted)

    def observe(self, chances: np.ndarray, landed: np.ndarray) -> None:
        """chances [width], as they were given; landed [width], of the same nodes.

        Only verified nodes count. That selects rounds by their chances, which a regression on
        the chances does not mind.
        """
        width = len(chances)
        if not width:
            return
        sums = self._sums
        sums *= FORGET
        rounds, total, error_sum, var_sum = sums[:, :width]
        error = landed - chances
        var = chances * (1.0 - chances)
        rounds += 1.0
        total += chances
        error_sum += error
        var_sum += var
        deviation = chances - total / rounds
        square = deviation * deviation
        error -= error_sum / rounds
        self._xx = FORGET * self._xx + float(square.sum())
        self._xy = FORGET * self._xy + float(deviation @ error)
        self._xv = FORGET * self._xv + float(square @ var)
        self._update()

    def _update(self) -> None:
        rounds, total, error_sum, var_sum = self._sums
        luck = EXPLAINED * np.sqrt(var_sum)
        seen = np.maximum(rounds, 1.0)
        self.bias = (error_sum - np.minimum(np.maximum(error_sum, -luck), luck)) / seen
        excess = max(abs(self._xy) - EXPLAINED * math.sqrt(self._xv), 0.0)
        slope = math.copysign(excess, self._xy) / self._xx if self._xx > 0.0 else 0.0
        self.slope = min(max(slope, -1.0), 0.5)
        self._scale = 1.0 + self.slope
        self._shift = self.bias - self.slope * total / seen
