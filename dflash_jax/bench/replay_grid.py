"""The cells of a replay, from a config, and what is measured in each."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.bench.replay import (
    CALIBRATES,
    Cell,
    Share,
    World,
    against_best,
    build_world,
    jackknife,
    oracle,
    run_rule,
    totals,
)
from dflash_jax.bench.surfaces import find_surface
from dflash_jax.bench.traces import find_text
from dflash_jax.errors import InputError
from dflash_jax.pricing import make_rule

FIRST = slice(0, 64)  # rounds that count as a fresh server's first request
STEADY = slice(64, None)
RECOVERY = 50  # rounds after an event within which a rule must have recovered
EVENT_ROUND = 200
EVENT_ROUNDS = EVENT_ROUND + RECOVERY + 80
DRIFT_STEP = 8.0  # with drift: tokens a round that the context grows by,
DRIFT_HEAT = 0.15  # and how much slower the card is at the end
EXAMPLE_ROUNDS = 160  # of stream 0, kept in the record for the picture

Place = tuple[str, int, str, str, str]
"""(surface, context_length, text, event, after): event "", "slow", or "slope" (to `after`)."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """A config, checked: every combination of its tuples is a cell."""

    places: tuple[Place, ...]
    rules: tuple[str, ...] = ("renewal", "ratio", "band:5", "tiers")
    kinds: tuple[str, ...] = ("greedy", "sampled")
    noises: tuple[float, ...] = (0.03, 0.10)
    drifts: tuple[bool, ...] = (False, True)
    outliers: tuple[float, ...] = (0.0, 0.01)
    drafters: tuple[str, ...] = ("",)
    priors: tuple[bool, ...] = (True,)
    calibrates: tuple[str, ...] = ("evaluated",)
    traces: tuple[str, ...] = ()
    streams: int = 40
    rounds: int = 384
    seed: int = 0

    def __post_init__(self) -> None:
        for rule in self.rules:
            make_rule(rule)
        if self.rounds <= FIRST.stop + 1:
            raise InputError(f"rounds={self.rounds}: give more than {FIRST.stop + 1}")
        if not self.places:
            raise InputError("the config has no places")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Grid:
        """From an ml_collections config. Raises `InputError` for a key that a grid has not."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(config) - known)
        if unknown:
            raise InputError(f"config: unknown {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**{name: config[name] for name in config})

    def cells(self) -> list[Cell]:
        """All cells, in a fixed order."""
        product = itertools.product(
            self.places,
            self.kinds,
            self.drafters,
            self.priors,
            self.calibrates,
            self.noises,
            self.drifts,
            self.outliers,
        )
        return [self._cell(*choice) for choice in product]

    def _cell(
        self,
        place: Place,
        kind: str,
        drafter: str,
        prior: bool,
        calibrate: str,
        noise: float,
        drift: bool,
        outliers: float,
    ) -> Cell:
        surface, context_length, text, event, after = place
        parts = [f"{surface}@{context_length}", " ".join(filter(None, (event, after))), kind]
        parts += [drafter, "" if prior else "no prior", str(CALIBRATES.get(calibrate, calibrate))]
        parts += [f"noise {noise:.0%}", "drift" if drift else ""]
        parts += [f"outliers {outliers:.0%}" if outliers else ""]
        return Cell(
            name=", ".join(filter(None, parts)),
            surface=find_surface(surface),
            context_length=context_length,
            text=find_text(f"{text}-{kind}", drafter),
            noise=noise,
            outliers=outliers,
            prior=prior,
            calibrate=calibrate,
            event=event,
            event_round=EVENT_ROUND,
            after=find_surface(after) if after else None,
            traces=self.traces,
            streams=self.streams,
            rounds=EVENT_ROUNDS if event else self.rounds,
            seed=self.seed,
            context_step=DRIFT_STEP if drift else 0.0,
            heat=DRIFT_HEAT if drift else 0.0,
        )


def windows(cell: Cell) -> dict[str, slice]:
    """The rounds that each number is taken over."""
    if not cell.event:
        return {"first": FIRST, "steady": STEADY}
    start = cell.event_round
    return {
        "before": slice(64, start),
        "hit": slice(start, start + RECOVERY),
        "recovered": slice(start + RECOVERY, None),
    }


def measure(cell: Cell, rules: tuple[str, ...]) -> dict[str, Any]:
    """Runs a cell: for each rule and the oracle, shares of the best fixed width, by window."""
    world = build_world(cell)
    begin = time.perf_counter()
    chosen = {name: run_rule(name, world) for name in rules}
    chosen["oracle"] = oracle(world)
    parts = windows(cell)
    record: dict[str, Any] = {
        "cell": cell.name,
        "place": cell.name.split(", noise")[0],
        "context_length": cell.context_length,
        "event": cell.event,
        "streams": cell.streams,
        "rounds": cell.rounds,
        "seed": cell.seed,
        "seconds": round(time.perf_counter() - begin, 2),
        "rules": {},
    }
    for name, widths in chosen.items():
        shares = {part: against_best(world, widths, where) for part, where in parts.items()}
        entry: dict[str, Any] = {part: _numbers(share) for part, share in shares.items()}
        entry["mean_width"] = round(float(widths[:, STEADY].mean()), 2)
        entry["example_widths"] = widths[0, :EXAMPLE_ROUNDS].tolist()
        if "ratio" in chosen and name not in ("ratio", "oracle"):
            entry["over_ratio"] = {
                part: _numbers(_against(world, widths, chosen["ratio"], where))
                for part, where in parts.items()
            }
        record["rules"][name] = entry
    return record


def _against(world: World, widths: np.ndarray, other: np.ndarray, part: slice) -> Share:
    """One rule's rate over another's, paired."""
    return jackknife(*totals(world, widths, part), *totals(world, other, part), best=-1)


def _numbers(share: Share) -> list[float]:
    """[ratio, low, high, best fixed width], rounded for the record."""
    return [round(share.ratio, 5), round(share.low, 5), round(share.high, 5), share.best]
