"""Measures a drafter: tokens a round at every width, recall, honesty of its landing chances.

  python scripts/eval_drafter.py --config=configs/train/smollm2.py --drafter=runs/smollm2/drafter \
      --out=runs/smollm2/eval

Several drafters (--drafter=a,b) are measured on the same replies, each into OUT/NAME of its folder.
The target replies to held-out prompts, greedy and sampled; every anchor of every reply is drafted
and the decodes are replayed on the host. --replies=FILE keeps the replies for a later call, which
then measures other drafters on the same ones. Writes OUT/eval.json and pictures, and the
calibration beside the drafter (calibration.json), where serving finds it.
"""

from __future__ import annotations

import contextlib
import json
import pathlib

import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from dflash_jax import entry, platform
from dflash_jax.checkpoints.drafter import load_drafter
from dflash_jax.checkpoints.target import Target
from dflash_jax.decode.sampling import Sampling
from dflash_jax.engine.loading import CALIBRATION_FILE
from dflash_jax.errors import InputError
from dflash_jax.train import recipe
from dflash_jax.train.devices import data_mesh
from dflash_jax.train.evaluate import Evaluation, evaluate
from dflash_jax.train.plots import plot_depth, plot_reliability, plot_widths
from dflash_jax.train.prompts import Prompt, read_prompts
from dflash_jax.train.replies import Reply, keep_replies, read_replies, write_replies
from dflash_jax.train.shards import write_problem
from dflash_jax.train.step import Models
from dflash_jax.tree.growth import CAP

_CONFIG = entry.config_flag(None, "the recipe")
_DRAFTERS = flags.DEFINE_list("drafter", None, "folders of drafters", required=True)
_OUT = flags.DEFINE_string("out", None, "folder of the results", required=True)
_PROMPTS = flags.DEFINE_list("prompts", ["configs/prompts/heldout.jsonl"], "prompt files")
_REPLIES = flags.DEFINE_string("replies", None, "file that keeps the replies for later calls")
_COUNT = flags.DEFINE_integer("count", 0, "prompts to use, evenly spread; 0 is all", lower_bound=0)
_LENGTH = flags.DEFINE_integer("length", 512, "tokens of prompt and reply together", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "longest reply", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 2, "sampled replies to each prompt", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "of the sampled replies")
_TOP_K = flags.DEFINE_integer("top_k", 20, "of the sampled replies")
_TOP_P = flags.DEFINE_float("top_p", 0.95, "of the sampled replies")
_ROWS = flags.DEFINE_integer("rows", 16, "replies read together", lower_bound=1)
_ANCHORS = flags.DEFINE_integer("anchors", 64, "blocks of a reply drafted together", lower_bound=1)
_PLATFORM = flags.DEFINE_enum("platform", "auto", platform.PLATFORMS, "where to run")
flags.mark_flag_as_required("config")


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    platform.initialize(_PLATFORM.value)
    run(Console(soft_wrap=True, width=140))


def run(console: Console) -> None:
    if not all(_DRAFTERS.value or [""]):
        raise InputError("--drafter: give a folder, or several with commas between them")
    mesh = data_mesh(1)
    target = recipe.load_target(_CONFIG.value)
    train = recipe.train_config(_CONFIG.value)
    folders = [pathlib.Path(folder) for folder in _DRAFTERS.value]
    drafters = [load_drafter(f, target.config, jnp.dtype(_CONFIG.value.dtype)) for f in folders]
    replies = get_replies(target, mesh)
    for name, written in replies.items():
        console.print(f"{name}: {len(written)} replies", highlight=False)
    for folder, drafter in zip(folders, drafters, strict=True):
        models = Models(target.config, drafter.config, train)
        results = {
            name: evaluate(
                target,
                models,
                drafter.params,
                replies[name],
                sampling,
                mesh,
                _ROWS.value,
                _ANCHORS.value,
            )
            for name, sampling in samplings().items()
        }
        for name, result in results.items():
            show(console, f"{folder} {name}", result)
        out = pathlib.Path(_OUT.value)
        write(out / "_".join(folder.parts[-2:]) if len(folders) > 1 else out, folder, results)


def get_replies(target: Target, mesh: Mesh) -> dict[str, list[Reply]]:
    """The target's replies, or those that an earlier call kept for the same settings."""
    prompts, sizes = choose_prompts(), (_LENGTH.value, _MAX_TOKENS.value)
    ways = samplings()
    made_with = repr((target.fingerprint, str(target.config.dtype), prompts, sizes, ways))
    made_with += f" {_SEEDS.value}"
    path = pathlib.Path(_REPLIES.value) if _REPLIES.value else None
    if path and path.exists():
        return read_replies(path, made_with)
    replies = {
        name: write_replies(
            target, prompts * (1 if way.greedy else _SEEDS.value), way, *sizes, mesh
        )
        for name, way in ways.items()
    }
    if path:
        keep_replies(path, made_with, replies)
    return replies


def samplings() -> dict[str, Sampling]:
    sampled = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value, seed=1)
    return {"greedy": Sampling(), "sampled": sampled}


def choose_prompts() -> list[Prompt]:
    prompts = list(read_prompts(*_PROMPTS.value).entries)
    if not _COUNT.value:
        return prompts
    chosen = np.linspace(0, len(prompts) - 1, min(_COUNT.value, len(prompts)))
    return [prompts[int(index)] for index in chosen]


def show(console: Console, name: str, result: Evaluation) -> None:
    widths = [w for w in (0, 1, 2, 3, 4, 5, 7, 9, 11, 13, 15) if w <= CAP]
    table = Table(title=f"{name}: tokens a round, {result.tokens:,} tokens in replies")
    table.add_column("width")
    for width in widths:
        table.add_column(str(width), justify="right")
    for label, rates in (result.ways | result.kinds).items():
        table.add_row(label, *(f"{rates[width]:.2f}" for width in widths))
    console.print(table)
    for count, shares in result.recall.items():
        console.print(f"  truth in the best {count}: " + " ".join(f"{s:.2f}" for s in shares))
    before, after = result.before.error, result.after.error
    console.print(f"  expected calibration error {before:.4f}, calibrated {after:.4f}")


def write(out: pathlib.Path, drafter: pathlib.Path, results: dict[str, Evaluation]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        plot_depth(out / "depth.png", {name: r.recall for name, r in results.items()})
        curves = {name: {"before": r.before, "calibrated": r.after} for name, r in results.items()}
        plot_reliability(out / "reliability.png", curves)
        plot_widths(
            out / "widths.png",
            {
                f"{name} {way}": rates
                for name, r in results.items()
                for way, rates in r.ways.items()
            },
        )
        everything = {name: result.to_json() for name, result in results.items()}
        (out / "eval.json").write_text(json.dumps(everything, indent=1) + "\n")
    except OSError as error:
        raise InputError(write_problem(out, error)) from error
    calibration = {name: result.calibration for name, result in results.items()}
    path = drafter / CALIBRATION_FILE
    partial = path.with_suffix(".partial")  # a full disk must not cost the earlier calibration
    try:
        partial.write_text(json.dumps(calibration, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise InputError(write_problem(path, error)) from error


if __name__ == "__main__":
    entry.run(main)
