"""What every width rule shares: its limits, its record per clock, and its two calls a round."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.errors import InputError

CLOCKS = ("lone", "shared")
"""Two clocks time different work (a lone stream's rounds, shared rounds): never one table."""

PriorRow = tuple[int, int, float]
"""One warm-up timing: (width, context_length in tokens, ms)."""

LEARN_ROUNDS = 4
"""Rounds observed at once where time allows: alone, most of what one costs is cold caches."""

CONTEXT_MAX = 10**9  # tokens

MS_RANGE = (1e-6, 1e9)  # a time outside is no round's: a broken clock, or other units


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a rule may choose from.

    cap: most nodes of a tree. least: fewest nodes verified. tile: rows per kernel tile, so that a
    step in price is looked for every `tile` rows (row 0 is the anchor). clock: whose rounds are
    timed. Raises `InputError` when a value is out of range.
    """

    cap: int = 15
    least: int = 0
    tile: int = 4
    clock: str = "lone"

    def __post_init__(self) -> None:
        if self.cap < 0:
            raise InputError(f"cap={self.cap}: a tree has 0 nodes or more")
        if not 0 <= self.least <= self.cap:
            raise InputError(f"least={self.least}: give 0 to cap={self.cap}")
        if self.tile < 1:
            raise InputError(f"tile={self.tile}: give 1 row or more")
        if self.clock not in CLOCKS:
            raise InputError(f"clock={self.clock!r}: give one of {', '.join(CLOCKS)}")


def checked_prior(prior: Sequence[PriorRow] | None, cap: int) -> list[PriorRow]:
    """Warm-up rows as plain numbers; rows wider than `cap` are left out.

    Raises `InputError` for a row that is not (width ≥ 0, context_length ≥ 0, ms in `MS_RANGE`).
    """
    rows: list[PriorRow] = []
    for row in prior if prior is not None else ():
        try:
            width, context_length, ms = int(row[0]), int(row[1]), float(row[2])
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise InputError(f"prior row {row!r}: give (width, context_length, ms)") from error
        if width < 0 or not is_context(context_length) or not possible(ms):
            raise InputError(
                f"prior row {row!r}: give width ≥ 0, context_length from 0 to {CONTEXT_MAX} and ms "
                f"from {MS_RANGE[0]:g} to {MS_RANGE[1]:g}"
            )
        if width <= cap:
            rows.append((width, context_length, ms))
    return rows


def is_context(length: float) -> bool:
    """Whether a stream can have so many tokens before the anchor; False for NaN."""
    return 0 <= length <= CONTEXT_MAX


def possible(ms: float) -> bool:
    """Whether a round can take so long; False for 0, less, infinity and NaN."""
    return MS_RANGE[0] <= ms <= MS_RANGE[1]


def in_range(chances: Sequence[float] | np.ndarray) -> list[float]:
    """Chances kept inside [0, 1]; one that is no number is 0: it offers nothing."""
    plain = chances.tolist() if isinstance(chances, np.ndarray) else map(float, chances)
    return [min(max(0.0, chance), 1.0) for chance in plain]


def band_of(context_length: int) -> int:
    """The band of a context: one per doubling, from 256 tokens on."""
    return max(int(context_length), 256).bit_length()


class Rule(abc.ABC):
    """Chooses how many nodes of the cap-node tree to verify, and learns from the round.

    One rule serves one stream (or the one shared engine). It is host code, not thread-safe.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.limits = limits
        self.cap = limits.cap
        self._chances: list[float] = []  # of the last call of `choose`

    def choose(self, chances: np.ndarray, context_length: int) -> int:
        """The width of this round, `least`..len(chances) (all of them if there are fewer).

        chances: float array, the landing chance of each node in pop order, of which the first
        `cap` count; see `in_range` for those that are no chances. context_length: committed
        tokens before the anchor. Raises `InputError` if it is no such count.
        """
        if not is_context(context_length):
            raise InputError(f"context_length={context_length}: give 0 to {CONTEXT_MAX} tokens")
        self._chances = in_range(chances[: self.cap])
        n = len(self._chances)
        width = self._choose(self._chances, int(context_length))
        return min(max(width, self.limits.least), n)

    def observe(
        self,
        *,
        width: int,
        context_length: int,
        round_ms: float,
        landed: np.ndarray,
        sample: bool = True,
        chances: np.ndarray | None = None,
    ) -> None:
        """Learns from a round that `choose` priced.

        landed: bool array [width], which verified nodes were accepted. round_ms: the whole round,
        synchronised at its end; one that is not `possible` is no sample. sample: False for a
        round whose time says nothing about its width (the first after a prompt, the first after a
        cold restart of the drafter's context, any that compiled); what it landed still counts.
        chances: what `choose` was given for this round, if it has been called again since; None:
        the last call's. Raises `InputError` if these do not belong to one round.
        """
        offered = self._chances if chances is None else in_range(chances[: self.cap])
        fits = 0 <= width <= len(offered) and len(landed) == width
        if not (fits and is_context(context_length)):
            raise InputError(
                f"observe: width={width} of {len(offered)} chances, {len(landed)} landed, "
                f"context_length={context_length}: give a round that `choose` priced"
            )
        ms = float(round_ms) if sample and possible(round_ms) else None
        self._observe(width, int(context_length), ms, list(map(bool, landed)), offered[:width])

    @property
    def learn_every(self) -> int:
        """Rounds that may wait before they are observed, together: 1 to `LEARN_ROUNDS`."""
        return LEARN_ROUNDS

    @abc.abstractmethod
    def _choose(self, chances: list[float], context_length: int) -> int:
        """`choose` before the limits, from chances that are in range, at most `cap`."""

    @abc.abstractmethod
    def _observe(
        self,
        width: int,
        context_length: int,
        ms: float | None,
        landed: Sequence[bool],
        chances: Sequence[float],
    ) -> None:
        """`observe`, checked. ms: None if the round is no sample. landed, chances: [width]."""

    def keep(self) -> dict[str, Any]:
        """A plain, JSON-ready record of what this rule's clock has taught, by band."""
        return {
            "rule": self.name.partition(":")[0],
            "clock": self.limits.clock,
            "cap": self.cap,
            "bands": self._bands(),
        }

    def seed(self, calibration: Mapping[str, Any] | None) -> None:
        """Starts from what an earlier stream kept; None starts afresh.

        Raises `InputError` if the record is of another rule, clock or cap, or is no record.
        """
        if calibration is None:
            return
        if not isinstance(calibration, Mapping):
            raise InputError(f"calibration {calibration!r}: not what `keep` gives; drop the record")
        mine = {"clock": self.limits.clock, "rule": self.name.partition(":")[0], "cap": self.cap}
        for key, value in mine.items():
            if not (type(calibration.get(key)) is type(value) and calibration[key] == value):
                raise InputError(
                    f"a calibration of {key} {calibration.get(key)!r} cannot seed a rule of {key} "
                    f"{value!r}: keep a record for each, or drop this one"
                )
        try:
            self._load(calibration["bands"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InputError(
                f"calibration: not what `keep` gives ({error!r}); drop the record"
            ) from error

    def _bands(self) -> dict[str, Any]:
        """The record of each band; rules that learn nothing keep nothing."""
        return {}

    def _load(self, bands: Mapping[str, Any]) -> None:  # noqa: B027 - most rules keep nothing
        """Takes what `_bands` gave; whatever else it is given raises, and changes nothing."""

    def explain(self) -> dict[str, Any]:
        """What the rule believes and why it chose as it did, for logs and pictures."""
        return {"rule": self.name}
