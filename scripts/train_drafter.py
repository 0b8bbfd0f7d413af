"""Trains a DFlash2 drafter on text that its target wrote.

  python scripts/train_drafter.py --config=configs/train/smollm2.py --data=data/smollm2 \
      --out=runs/smollm2

The same command goes on where an interrupted run stopped, exactly. --time_limit_s ends training
after so long, with the learning rate decayed by then. SIGTERM saves and exits with status 0. At the
end the drafter is written to OUT/drafter in the Hugging Face layout.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
from absl import flags, logging
from rich.console import Console

from dflash_jax import entry, platform
from dflash_jax.errors import InputError
from dflash_jax.train import recipe
from dflash_jax.train.devices import data_mesh
from dflash_jax.train.generate import tokenizer_fingerprint
from dflash_jax.train.loop import Report, Trainer, corpus_head, frequent_ids, stop_on_signal
from dflash_jax.train.plots import plot_progress
from dflash_jax.train.shards import read_corpus, write_problem
from dflash_jax.train.step import Metrics, Models, count_parameters

_CONFIG = entry.config_flag(None, "the recipe")
_DATA = flags.DEFINE_string("data", None, "folder of shards", required=True)
_OUT = flags.DEFINE_string("out", None, "folder of checkpoints and the drafter", required=True)
_DEVICES = flags.DEFINE_integer("devices", 0, "devices to use; 0 is all", lower_bound=0)
_TIME_LIMIT_S = flags.DEFINE_float("time_limit_s", 0, "training time; 0 is no limit", lower_bound=0)
_PLATFORM = flags.DEFINE_enum("platform", "auto", platform.PLATFORMS, "where to run")
flags.mark_flag_as_required("config")


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # Orbax tells every file it writes
    platform.initialize(_PLATFORM.value)
    run(Console(soft_wrap=True))


def run(console: Console) -> None:
    mesh = data_mesh(_DEVICES.value)
    train = recipe.train_config(_CONFIG.value)
    target = recipe.load_target(_CONFIG.value)
    models = Models(target.config, recipe.drafter_config(_CONFIG.value, target.config), train)
    fingerprint = tokenizer_fingerprint(target.tokenizer)
    corpus = read_corpus(_DATA.value, fingerprint, target.config.vocab_size, train.max_shards)
    size = models.drafter.draft_vocab_size
    vocabulary = frequent_ids(corpus.train, size, target.stop_token_ids) if size else None
    frozen = corpus_head(target.params["params"], vocabulary, mesh)
    trainer = Trainer(models, frozen, corpus, vocabulary, mesh, _OUT.value)
    stop_on_signal(trainer.stop)
    console.print(
        f"{count_parameters(models.drafter) / 1e6:.1f} M parameters, {mesh.size} device(s),"
        f" {len(corpus.train.tokens):,} sequences with {int(corpus.train.own.sum()):,} own tokens,"
        f" {len(corpus.held_out.tokens):,} held out, from step {trainer.step}"
    )
    for report in trainer.run(_TIME_LIMIT_S.value):
        tell(console, report)
    tell(console, Report(trainer.step, trainer.elapsed_s, 0, held_out=trainer.evaluate()))
    console.print(f"drafter: {trainer.export()}")
    plot_log()


def log_path() -> pathlib.Path:
    return pathlib.Path(_OUT.value) / "progress.jsonl"


def plot_log() -> None:
    picture = log_path().with_suffix(".png")
    try:
        plot_progress(picture, {"this run": log_path()})
    except OSError as error:
        raise InputError(write_problem(picture, error)) from error


def tell(console: Console, report: Report) -> None:
    """Prints a report and adds it to OUT/progress.jsonl."""
    console.print(line(report), highlight=False)
    log = log_path()
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record(report)) + "\n")
    except OSError as error:
        raise InputError(write_problem(log, error)) from error


def line(report: Report) -> str:
    head = f"step {report.step} {report.elapsed_s:.0f} s"
    if report.saved:
        return f"{head} checkpoint saved"
    metrics = report.held_out or report.train
    assert metrics is not None
    where = "HELD OUT" if report.held_out else f"rate {report.rate:.1e}"
    hits = " ".join(f"{hit:.2f}" for hit in metrics.hits)
    return (
        f"{head} {where} loss {metrics.loss:.3f} selector {metrics.selector_loss:.3f}"
        f" hits {hits} recall {np.mean(metrics.recall):.3f} chain {metrics.chain:.2f}"
        f" norm {metrics.gradient_norm:.2f}"
    )


def record(report: Report) -> dict[str, object]:
    def plain(metrics: Metrics | None) -> object:
        if metrics is None:
            return None
        return {name: np.asarray(v).tolist() for name, v in metrics._asdict().items()}

    return {
        "step": report.step,
        "elapsed_s": report.elapsed_s,
        "rate": report.rate,
        "saved": report.saved,
        "train": plain(report.train),
        "held_out": plain(report.held_out),
    }


if __name__ == "__main__":
    entry.run(main)
