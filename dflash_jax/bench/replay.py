"""Replays width rules over traces under a price surface, paired: same rounds, same noise."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from dflash_jax.bench.surfaces import Surface
from dflash_jax.bench.traces import TEXTS, TextSpec, Trace, load_trace, synthesise
from dflash_jax.errors import InputError
from dflash_jax.pricing import LandingModel, PriorRow, make_rule
from dflash_jax.pricing.landing import EVALUATED, KINDS

WARMUP_SLOW = 0.10  # warm-up rounds and a fresh server's first rounds are this much slower,
WARMUP_TIMINGS = 3  # rounds timed for each warm-up price, as `engine/decoder.py` has it
WARMUP_ROUNDS = 8  # the latter fading over so many rounds
CALIBRATES = {"evaluated": "", "online": "not evaluated", "": "uncalibrated"}  # in a cell's name
EVALUATION = 8, 64  # streams and rounds of each text that a drafter is evaluated on
PRIOR_WRONG = 0.15  # the widest width's warm-up price may be this much further off


@dataclasses.dataclass(frozen=True)
class Cell:
    """One condition of the replay.

    context_length: tokens at the first round. context_step: tokens a round that it grows by.
    noise: relative std of a round's time. outliers: share of rounds ten times slow. heat: how
    much slower the card is at the end than at the start. prior: whether the rules get warm-up
    timings, and at which contexts. event: "slow" (× 1.5) or "slope" (`after` takes over) at round
    `event_round`. calibrate: "evaluated" (a `LandingModel` stands between drafter and rule and
    starts from the drafter's evaluation, as in the engine), "online" (it starts from nothing) or
    "" (none).
    """

    name: str
    surface: Surface
    context_length: int
    text: TextSpec
    noise: float = 0.03
    outliers: float = 0.0
    context_step: float = 0.0
    heat: float = 0.0
    prior: bool = True
    prior_contexts: tuple[int, ...] = (64, 8_192, 65_536)
    event: str = ""
    event_round: int = 200
    after: Surface | None = None
    calibrate: str = "evaluated"
    traces: tuple[str, ...] = ()  # files of decode.py --trace_out, instead of `text`
    streams: int = 40
    rounds: int = 384
    seed: int = 0

    def __post_init__(self) -> None:
        if self.calibrate not in CALIBRATES:
            raise InputError(f"calibrate={self.calibrate!r}: give one of {list(CALIBRATES)}")
        if self.event not in ("", "slow", "slope"):
            raise InputError(f"event={self.event!r}: give '', 'slow' or 'slope'")
        if self.event == "slope" and self.after is None:
            raise InputError(f"cell {self.name}: event 'slope' needs a surface `after`")
        if self.streams < 2 or self.rounds < 2:
            raise InputError(f"cell {self.name}: give 2 streams and 2 rounds or more")


class World(NamedTuple):
    """A cell with everything drawn: what each rule would meet at each width."""

    cell: Cell
    trace: Trace
    context: np.ndarray  # int [T]
    ms: np.ndarray  # float [S, T, cap+1]: what the clock shows
    mean_ms: np.ndarray  # float [T, cap+1]: the same without noise (what the oracle knows)
    priors: list[list[PriorRow]]  # per stream
    landing: dict[str, Any] | None  # a `LandingModel` record, of the drafter's evaluation


def build_world(cell: Cell) -> World:
    """Draws a cell's trace, times and warm-up timings from its seed."""
    size = cell.streams, cell.rounds, cell.seed, cell.surface.cap
    if cell.traces:
        trace = load_trace(list(cell.traces), *size)
    else:
        trace = synthesise(cell.text, *size)
    streams, rounds = trace.landed.shape[:2]
    rng = np.random.default_rng([cell.seed, 1])
    t = np.arange(rounds)
    context = (cell.context_length + cell.context_step * t).astype(int)
    mean_ms = cell.surface.prices(context)
    if cell.event == "slow":
        mean_ms[cell.event_round :] *= 1.5
    elif cell.event == "slope":
        assert cell.after is not None
        mean_ms[cell.event_round :] = cell.after.prices(context[cell.event_round :])
    start = WARMUP_SLOW * np.maximum(1.0 - t / WARMUP_ROUNDS, 0.0)
    mean_ms = mean_ms * (1.0 + start + cell.heat * t / rounds)[:, None]
    factor = _factors(rng, cell, (streams, rounds))
    priors = [_warmup(rng, cell) if cell.prior else [] for _ in range(streams)]
    ms = mean_ms * factor[..., None]
    return World(cell, trace, context, ms, mean_ms, priors, _evaluation(cell))


def _evaluation(cell: Cell) -> dict[str, Any] | None:
    """What judging the cell's drafter on all texts of its kind says of its chances."""
    if cell.calibrate != "evaluated" or cell.traces:
        return None
    drafter = {name: getattr(cell.text, name) for name in ("confidence", "bias", "blur")}
    landing, kind = LandingModel(), cell.text.sampled
    for text in TEXTS.values():
        if text.sampled == kind:
            seen = synthesise(dataclasses.replace(text, **drafter), *EVALUATION, cell.seed + 1)
            rounds = (part.reshape(-1, part.shape[-1]).tolist() for part in seen[:4])
            for own, parents, depths, landed in zip(*rounds, strict=True):
                landing.observe(own, parents, depths, landed, kind)
    record = landing.to_record()
    for fit in record[KINDS[kind]].values():
        fit.update(EVALUATED)
    return record


def _factors(rng: np.random.Generator, cell: Cell, shape: tuple[int, ...]) -> np.ndarray:
    """What times are off by: noise of mean 1, skewed to the slow side as clocks are (log-normal),
    and outliers.
    """
    sigma = math.sqrt(math.log1p(cell.noise**2))
    factors = np.exp(sigma * rng.standard_normal(shape) - 0.5 * sigma * sigma)
    factors[rng.random(shape) < cell.outliers] *= 10.0
    return factors


def _warmup(rng: np.random.Generator, cell: Cell) -> list[PriorRow]:
    """Warm-up timings as the engine takes them, medians of three: slow, noisy, and tilted."""
    widths = np.arange(cell.surface.cap + 1)
    tilt = rng.uniform(-PRIOR_WRONG, PRIOR_WRONG) * widths / cell.surface.cap
    rows: list[PriorRow] = []
    for context in cell.prior_contexts:
        ms = cell.surface.prices(np.array([context]))[0] * (1.0 + WARMUP_SLOW) * (1.0 + tilt)
        ms = ms * np.median(_factors(rng, cell, (WARMUP_TIMINGS, *ms.shape)), axis=0)
        rows += [(int(w), context, float(ms[w])) for w in widths]
    return rows


def run_rule(name: str, world: World) -> np.ndarray:
    """Widths [S, T] that a rule chooses, each stream a fresh rule (a fresh server's first)."""
    streams, rounds, cap = world.trace.landed.shape
    if name.startswith("fixed:"):
        return np.full((streams, rounds), make_rule(name, cap).choose(np.ones(cap), 0))
    widths = np.zeros((streams, rounds), int)
    for s in range(streams):
        widths[s] = _run_stream(name, world, s)
    return widths


def _run_stream(name: str, world: World, s: int) -> list[int]:
    trace, cell = world.trace, world.cell
    rule = make_rule(name, trace.landed.shape[2], prior=world.priors[s])
    landing = LandingModel(world.landing)
    sampled = cell.text.sampled
    own, parents, depths = (part[s].tolist() for part in (trace.own, trace.parents, trace.depths))
    raw = np.exp(_path_scores(trace.own[s], trace.parents[s]))
    widths: list[int] = []
    contexts = world.context.tolist()
    offered: list[np.ndarray] = []
    known = 0  # rounds that the rule has learned from
    for t, context in enumerate(contexts):
        node = own[t], parents[t], depths[t]
        offered.append(landing.chances(*node, sampled) if cell.calibrate else raw[t])
        widths.append(rule.choose(offered[t], context))
        if t - known >= rule.learn_every:  # as the engine does, while this round runs
            for seen in range(known, t):
                width = widths[seen]
                landed = trace.landed[s, seen, :width]
                rule.observe(
                    width=width,
                    context_length=contexts[seen],
                    round_ms=float(world.ms[s, seen, width]),
                    landed=landed,
                    chances=offered[seen],
                )
                if cell.calibrate:
                    landing.observe(own[seen], parents[seen], depths[seen], landed, sampled)
            known = t
    return widths


def _path_scores(own: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """Log path chances [T, cap] from own log chances: a parent comes before its children."""
    total = own.copy()
    for i in range(own.shape[-1]):
        has = parents[:, i] >= 0
        total[has, i] += total[has, parents[has, i]]
    return total


def oracle(world: World) -> np.ndarray:
    """Widths [S, T] of who knows true prices and chances: argmax of E − λ·c, λ by Dinkelbach."""
    chances = np.cumsum(world.trace.true, axis=-1)
    expected = 1.0 + np.concatenate([np.zeros((*chances.shape[:2], 1)), chances], axis=-1)
    event = world.cell.event_round if world.cell.event else 0
    widths = np.zeros(world.trace.landed.shape[:2], int)
    for part in (slice(0, event), slice(event, None)):
        e, c = expected[:, part], world.mean_ms[None, part]
        rate = 0.0
        for _ in range(50):
            w = np.argmax(e - rate * c, axis=-1)
            picked = np.take_along_axis(e, w[..., None], -1).sum()
            cost = np.take_along_axis(np.broadcast_to(c, e.shape), w[..., None], -1).sum()
            if cost == 0.0 or picked / cost <= rate * (1.0 + 1e-12):
                break
            rate = picked / cost
        widths[:, part] = w
    return widths


class Share(NamedTuple):
    """A rate against the best fixed width's, with its 95 % interval over streams."""

    ratio: float
    low: float
    high: float
    best: int  # the fixed width that is best over all streams


def totals(world: World, widths: np.ndarray, part: slice) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [S] and milliseconds [S] of the rounds in `part`."""
    index = widths[:, part, None]
    tokens = np.take_along_axis(world.trace.tokens[:, part], index, -1).sum(axis=(1, 2))
    return tokens, np.take_along_axis(world.ms[:, part], index, -1).sum(axis=(1, 2))


def against_best(world: World, widths: np.ndarray, part: slice) -> Share:
    """The rule's rate over the best fixed width's: ratios of sums, jackknife over streams."""
    fixed_tokens = world.trace.tokens[:, part].sum(axis=1)  # [S, cap+1]
    fixed_ms = world.ms[:, part].sum(axis=1)
    best = int(np.argmax(fixed_tokens.sum(axis=0) / fixed_ms.sum(axis=0)))
    tokens, ms = totals(world, widths, part)
    return jackknife(tokens, ms, fixed_tokens[:, best], fixed_ms[:, best], best)


def jackknife(
    tokens: np.ndarray, ms: np.ndarray, other_tokens: np.ndarray, other_ms: np.ndarray, best: int
) -> Share:
    """(Σtokens/Σms) ÷ (Σother_tokens/Σother_ms), its interval by leaving out one stream each."""
    sums = np.stack([tokens, ms, other_tokens, other_ms])  # [4, S]
    whole = sums.sum(axis=1, keepdims=True)

    def ratio(x: np.ndarray) -> np.ndarray:
        return (x[0] / x[1]) / (x[2] / x[3])

    n = sums.shape[1]
    left = ratio(whole - sums)
    centre = float(ratio(whole)[0])
    half = 1.96 * float(np.sqrt((n - 1) / n * np.sum((left - left.mean()) ** 2)))
    return Share(centre, centre - half, centre + half, best)
