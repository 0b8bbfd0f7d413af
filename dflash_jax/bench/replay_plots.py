"""Pictures of a replay: rate by place, and the widths chosen over time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np

if importlib.util.find_spec("matplotlib") is None:  # a line instead of a traceback
    sys.exit("error: matplotlib not installed: pip install -e '.[train]'")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dflash_jax.bench.replay_report import Record

COLOURS = {"renewal": "C0", "ratio": "C1", "band:5": "C2", "tiers": "C3", "oracle": "0.5"}
EXAMPLES = 4  # places whose widths are drawn


def draw(records: list[Record], path: Path) -> None:
    """Writes one PNG: shares of the best fixed width above, widths over time below."""
    places = list(dict.fromkeys(r["place"] for r in records))
    every = ("first", "steady", "recovered")
    parts = [p for p in every if any(p in r["rules"]["oracle"] for r in records)]
    examples = places[:: max(len(places) // EXAMPLES, 1)][:EXAMPLES]
    figure = Figure(figsize=(12.0, 4.2 * len(parts) + 3.2), layout="constrained")
    grid = figure.add_gridspec(len(parts) + 1, len(examples))
    for i, part in enumerate(parts):
        having = [r for r in records if part in r["rules"]["oracle"]]
        _shares(figure.add_subplot(grid[i, :]), having, part, legend=i == 0)
    for i, place in enumerate(examples):
        record = next(r for r in records if r["place"] == place)
        _widths(figure.add_subplot(grid[len(parts), i]), record, labelled=i == 0)
    figure.savefig(path, dpi=110)


def _shares(axes: Axes, records: list[Record], part: str, legend: bool) -> None:
    """A dot and its 95 % interval for each cell; all cells of a place side by side."""
    places = list(dict.fromkeys(r["place"] for r in records))
    rules = list(records[0]["rules"])
    axes.axhline(1.0, color="0.7", linewidth=1.0)
    for k, rule in enumerate(rules):
        x, y, error = [], [], []
        for i, place in enumerate(places):
            rows = [r for r in records if r["place"] == place]
            for j, record in enumerate(rows):
                ratio, low, high, _ = record["rules"][rule][part]
                x.append(i + (k - len(rules) / 2 + 0.15 + 0.7 * j / len(rows)) * 0.8 / len(rules))
                y.append(ratio)
                error.append((ratio - low, high - ratio))
        axes.errorbar(
            x,
            y,
            np.array(error).T,
            fmt=".",
            markersize=4,
            linewidth=0.8,
            color=COLOURS.get(rule),
            label=rule,
        )
    axes.set_xticks(range(len(places)), places, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel(f"{part}: rate ÷ best fixed width's")
    low = min(r["rules"][rule][part][0] for r in records for rule in rules if rule != "tiers")
    axes.set_ylim(max(low - 0.01, 0.85), None)  # `tiers`, blind to prices, may be far below
    if legend:
        axes.legend(ncols=len(rules), fontsize=8)


def _widths(axes: Axes, record: Record, labelled: bool) -> None:
    for rule in ("oracle", "ratio", "renewal"):
        if rule in record["rules"]:
            widths = record["rules"][rule]["example_widths"]
            axes.plot(widths, drawstyle="steps-post", linewidth=0.9, color=COLOURS[rule])
    axes.set_title(record["place"], fontsize=8)
    axes.set_xlabel("round")
    axes.set_ylim(-0.5, 15.5)
    if labelled:
        axes.set_ylabel("width (stream 0)")
