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
from collections.abc import Sequence

UPDATE_ROUNDS = 4  # rounds that are counted before what they say is taken
FORGET = (1.0 - 1.0 / 500.0) ** UPDATE_ROUNDS  # per update
EXPLAINED = 3.0  # standard errors of a bias or of the slope that are put down to luck


class _Place:
    """Discounted sums over the rounds that verified one place of the pop order."""

    __slots__ = ("chance", "error", "rounds", "var")

    def __init__(self) -> None:
        self.rounds = self.chance = self.error = self.var = 0.0  # n, Σp, Σ(landed − p), Σp(1 − p)


class Trust:
    """Online regression of landings on chances, one place (0..cap-1) at a time."""

    def __init__(self, cap: int) -> None:
        self.slope = 0.0
        self.bias = [0.0] * cap
        self._shift = [0.0] * cap  # trusted = (1 + slope) · p + shift
        self._corrects = False
        self._places = [_Place() for _ in range(cap)]
        self._xx = self._xy = self._xv = 0.0  # Σ over places of d², d·error, d²·p(1 − p)
        self._waiting = 0  # rounds since the last update

    def apply(self, chances: Sequence[float]) -> Sequence[float]:
        """[n] given chances to [n] trusted ones, in [0, 1]."""
        if not self._corrects:
            return chances
        scale = 1.0 + self.slope
        return [
            min(max(scale * p + shift, 0.0), 1.0)
            for p, shift in zip(chances, self._shift, strict=False)
        ]

    def observe(self, chances: Sequence[float], landed: Sequence[bool]) -> None:
        """chances [width], as they were given; landed [width], of the same nodes.

        Only verified nodes count. That selects rounds by their chances, which a regression on
        the chances does not mind.
        """
        if not len(chances):
            return
        xx = xy = xv = 0.0
        for p, hit, place in zip(chances, landed, self._places, strict=False):
            error, var = hit - p, p * (1.0 - p)
            place.rounds += 1.0
            place.chance += p
            place.error += error
            place.var += var
            deviation = p - place.chance / place.rounds
            xx += deviation * deviation
            xy += deviation * (error - place.error / place.rounds)
            xv += deviation * deviation * var
        self._xx += xx
        self._xy += xy
        self._xv += xv
        self._waiting += 1
        if self._waiting == UPDATE_ROUNDS:
            self._update()

    def _update(self) -> None:
        self._waiting = 0
        excess = max(abs(self._xy) - EXPLAINED * math.sqrt(self._xv), 0.0)
        slope = math.copysign(excess, self._xy) / self._xx if self._xx > 0.0 else 0.0
        self.slope = min(max(slope, -1.0), 0.5)
        self._xx *= FORGET
        self._xy *= FORGET
        self._xv *= FORGET
        for index, place in enumerate(self._places):
            luck = EXPLAINED * math.sqrt(place.var)
            seen = max(place.rounds, 1.0)
            unexplained = place.error - min(max(place.error, -luck), luck)
            self.bias[index] = unexplained / seen
            self._shift[index] = self.bias[index] - self.slope * place.chance / seen
            place.rounds *= FORGET
            place.chance *= FORGET
            place.error *= FORGET
            place.var *= FORGET
        self._corrects = self.slope != 0.0 or any(self.bias)
