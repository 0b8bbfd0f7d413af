"""What a replay's records say: the bars, met or not, and a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Record = dict[str, Any]
DEEP_TOKENS = 28_946  # from here on the thread's surfaces must gain `DEEP_GAIN`
DEEP_GAIN = 1.03
FIRST_LEAST = 0.99
STEADY_LEAST = 0.998
RECOVERED_LEAST = 0.99


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One bar: in how many cells it is met, and where not."""

    bar: str
    cells: int
    unmet: tuple[str, ...]
    worst: float


def never_below(numbers: Sequence[float]) -> bool:
    """Not below 1.000: 1.000 inside or below the interval, and the mean at least 0.998."""
    return numbers[2] >= 1.0 and numbers[0] >= STEADY_LEAST


def verdicts(records: Iterable[Record], rule: str = "renewal") -> list[Verdict]:
    """The bars of the design for one rule, over all cells that each applies to."""
    records = list(records)
    plain = [r for r in records if not r["event"]]
    deep = [
        r for r in plain if r["place"].startswith("thread@") and r["context_length"] >= DEEP_TOKENS
    ]
    events = [r for r in records if r["event"]]
    paired = [r for r in records if "over_ratio" in r["rules"][rule]]

    def bar(
        text: str, cells: list[Record], number: Callable[[Record], Any], ok: Callable[[Any], bool]
    ) -> Verdict:
        values = [(r["cell"], number(r)) for r in cells]
        unmet = tuple(f"{name}: {_share(v)}" for name, v in values if not ok(v))
        return Verdict(text, len(values), unmet, min((v[0] for _, v in values), default=1.0))

    def part(name: str) -> Callable[[Record], Any]:
        return lambda r: r["rules"][rule][name]

    def over(name: str) -> Callable[[Record], Any]:
        return lambda r: r["rules"][rule]["over_ratio"][name]

    found = [
        bar("first 64 rounds ≥ 0.99", plain, part("first"), lambda v: v[0] >= FIRST_LEAST),
        bar("steady not below 1.000", plain, part("steady"), never_below),
        bar("steady ≥ 1.03 from 28,946", deep, part("steady"), lambda v: v[0] >= DEEP_GAIN),
        bar(
            "first 64 rounds, not below ratio",
            [r for r in paired if not r["event"]],
            over("first"),
            never_below,
        ),
        bar(
            "steady, not below ratio",
            [r for r in paired if not r["event"]],
            over("steady"),
            never_below,
        ),
        bar(
            "from 50 rounds after an event > 0.99",
            events,
            part("recovered"),
            lambda v: v[0] > RECOVERED_LEAST,
        ),
    ]
    return [verdict for verdict in found if verdict.cells]


def _share(numbers: Sequence[float]) -> str:
    return f"{numbers[0]:.4f} [{numbers[1]:.4f}, {numbers[2]:.4f}]"


def kept_gain(records: Iterable[Record], part: str, rule: str = "renewal") -> float:
    """How much of the oracle's gain over the best fixed width the rule has, over all cells."""
    pairs = [
        (r["rules"][rule][part][0] - 1.0, r["rules"]["oracle"][part][0] - 1.0)
        for r in records
        if part in r["rules"][rule]
    ]
    total = sum(gain for _, gain in pairs)
    return sum(gain for gain, _ in pairs) / total if total > 0.0 else float("nan")


def markdown(records: list[Record], command: str, title: str) -> str:
    """The receipt: the command, the bars, and a table with the range over the cells of a place."""
    lines = [f"# {title}", "", f"`{command}`", ""]
    lines += [
        "Rates are shares of the fixed width that is best over all streams of the cell (tokens ÷",
        "milliseconds, ratios of sums, paired). A range is over the cells of a place: timing",
        "noise, drift, outliers. Intervals (95 %, jackknife over streams) are in the JSON lines.",
        "",
        "| bar (renewal) | cells | met | worst |",
        "|---|---|---|---|",
    ]
    found = verdicts(records)
    for v in found:
        lines.append(f"| {v.bar} | {v.cells} | {v.cells - len(v.unmet)} | {v.worst:.4f} |")
    for v in found:
        if v.unmet:
            lines += ["", f"Not met, {v.bar}:", "", *(f"- {name}" for name in v.unmet)]
    parts = [
        p
        for p in ("first", "steady", "recovered")
        if any(p in r["rules"]["oracle"] for r in records)
    ]
    kept = {p: kept_gain(records, p) for p in parts}
    gains = ", ".join(
        f"{g:.0%} ({p})" if g == g else f"none to have ({p})" for p, g in kept.items()
    )
    lines += ["", f"Of the oracle's gain over the best fixed width, renewal has: {gains}.", ""]
    for part in parts:
        lines += _table([r for r in records if part in r["rules"]["oracle"]], part)
    streams = sorted({(r["streams"], r["rounds"]) for r in records})
    lines.append(
        "Streams × rounds: " + ", ".join(f"{s} × {t}" for s, t in streams) + ". "
        f"{len(records)} cells, {sum(r['seconds'] for r in records):.0f} s on one core."
    )
    return "\n".join(lines) + "\n"


def _table(records: list[Record], part: str) -> list[str]:
    rules = list(records[0]["rules"])
    lines = [f"## {part}", "", f"| place | best width | {' | '.join(rules)} |"]
    lines.append("|---|---|" + "---|" * len(rules))
    for place in dict.fromkeys(r["place"] for r in records):
        rows = [r for r in records if r["place"] == place]
        best = sorted({r["rules"]["oracle"][part][3] for r in rows})
        cells = [_range([r["rules"][rule][part][0] for r in rows]) for rule in rules]
        widths = f"{best[0]}" if len(best) == 1 else f"{best[0]} to {best[-1]}"
        lines.append(f"| {place} | {widths} | {' | '.join(cells)} |")
    return [*lines, ""]


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"
