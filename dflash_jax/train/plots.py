"""Pictures of training and of an evaluation."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from dflash_jax.train.calibrate import Reliability

matplotlib.use("Agg")


def plot_progress(path: pathlib.Path, logs: dict[str, pathlib.Path]) -> None:
    """Loss and chain by step of some runs: where held out and training part, data is the limit.

    Args:
      logs: name -> a run's progress.jsonl.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2)
    for number, (name, log) in enumerate(logs.items()):
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        for kind, style in (("train", ":"), ("held_out", "-")):
            seen = [(record["step"], record[kind]) for record in records if record[kind]]
            steps = [step for step, _ in seen]
            label = f"{name}, {kind.replace('_', ' ')}"
            for axis, figure_of in zip(axes, ("loss", "chain"), strict=True):
                values = [metrics[figure_of] for _, metrics in seen]
                mark = "o" if kind == "held_out" else None
                axis.plot(steps, values, style, color=f"C{number}", marker=mark, label=label)
    axes[0].set(xlabel="step", ylabel="loss, nats")
    axes[1].set(xlabel="step", ylabel="tokens a round of the chain")
    axes[1].legend()
    figure.savefig(path, dpi=120)


def plot_depth(path: pathlib.Path, recalls: dict[str, dict[int, list[float]]]) -> None:
    """Share of true tokens among the best candidates, by depth; one panel a way of decoding."""
    figure = Figure(figsize=(5 * len(recalls), 4), layout="constrained")
    axes = figure.subplots(1, len(recalls), squeeze=False, sharey=True)[0]
    for axis, (name, by_count) in zip(axes, recalls.items(), strict=True):
        for count, shares in by_count.items():
            label = "best candidate" if count == 1 else f"best {count}"
            axis.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
        axis.set(title=name, xlabel="drafted position", ylim=(0, 1))
        axis.legend()
    axes[0].set_ylabel("true token found")
    figure.savefig(path, dpi=120)


def plot_reliability(path: pathlib.Path, panels: dict[str, dict[str, Reliability]]) -> None:
    """Landing chance against share landed, before and after calibration."""
    figure = Figure(figsize=(5 * len(panels), 4.5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (name, curves) in zip(axes, panels.items(), strict=True):
        axis.plot([0, 1], [0, 1], color="grey", linewidth=1)
        for label, curve in curves.items():
            axis.plot(
                curve.chance, curve.landed, marker="o", label=f"{label}: error {curve.error:.3f}"
            )
        axis.set(title=name, xlabel="landing chance", xlim=(0, 1), ylim=(0, 1))
        axis.legend()
    axes[0].set_ylabel("share landed")
    figure.savefig(path, dpi=120)


def plot_widths(path: pathlib.Path, series: dict[str, Any]) -> None:
    """Tokens a round against the width."""
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axis = figure.subplots()
    for label, rates in series.items():
        axis.plot(range(len(rates)), rates, marker=".", label=label)
    axis.set(xlabel="width (drafted nodes)", ylabel="tokens a round")
    axis.legend()
    figure.savefig(path, dpi=120)
