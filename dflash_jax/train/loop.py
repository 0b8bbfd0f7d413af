"""The training loop: batches in a fixed order, exact resume, progress, a clean end.

What a run needs to go on is in its Orbax checkpoint: the state (whose step keys every random draw),
the position in the data, the time spent, and fingerprints of the data and the config.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.checkpoints.drafter import save_drafter
from dflash_jax.errors import InputError
from dflash_jax.train.devices import DATA, check_batch
from dflash_jax.train.generate import replicate
from dflash_jax.train.losses import make_head
from dflash_jax.train.shards import Corpus, Rows, write_problem
from dflash_jax.train.step import (
    DRAFT_VOCAB,
    Batch,
    Frozen,
    Metrics,
    Models,
    TrainState,
    compiled_steps,
    initial_state,
    learning_rate,
)
from dflash_jax.train.warm_start import warm_start

STATE, META = "state", "meta"
# Steps that may be enqueued ahead of the device, so that clocks and limits stay true.
AHEAD = 2


class Batches:
    """Sequences of a corpus in a random order that depends on the seed and the epoch alone."""

    def __init__(self, rows: Rows, batch: int, seed: int):
        if len(rows.tokens) < batch:
            raise InputError(
                f"the corpus has {len(rows.tokens)} training sequences, a batch {batch}"
            )
        self._rows, self._batch, self._seed = rows, batch, seed
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def at(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 and own bool [B, S] of a step."""
        per_epoch = len(self._rows.tokens) // self._batch
        epoch, place = divmod(step, per_epoch)
        if self._order[0] != epoch:
            rng = np.random.default_rng([self._seed, epoch])
            self._order = (epoch, rng.permutation(len(self._rows.tokens)))
        index = self._order[1][place * self._batch : (place + 1) * self._batch]
        return self._rows.tokens[index].astype(np.int32), self._rows.own[index]


def frequent_ids(rows: Rows, size: int, always: frozenset[int]) -> np.ndarray:
    """The `size` ids that the target says most often in its replies, rising; int32.

    Args:
      rows: of the training split.
      size: of the draft vocabulary.
      always: ids that are taken whatever their count (stop tokens).
    """
    counts = np.bincount(rows.tokens[rows.own].astype(np.int64)).astype(np.float64)
    counts = np.pad(counts, (0, max(0, max(always, default=0) + 1 - len(counts))))
    counts[list(always)] = np.inf
    chosen = np.argsort(-counts, kind="stable")[:size]
    if len(chosen) < size:  # a small corpus; the lowest unseen ids fill up
        unseen = np.arange(len(counts), size + len(counts))
        chosen = np.concatenate([chosen, unseen[: size - len(chosen)]])
    return np.sort(chosen).astype(np.int32)


def corpus_head(target_params: Any, draft_vocab: np.ndarray | None, mesh: Mesh) -> Frozen:
    """The arrays that training only reads, on every device."""
    params = replicate(target_params, mesh)
    embedding = params["embed_tokens"]["weight"]
    weight = params.get("lm_head", params["embed_tokens"])["weight"]
    ids = None if draft_vocab is None else jnp.asarray(draft_vocab)
    return Frozen(params, embedding, replicate(make_head(weight, ids), mesh))


@dataclasses.dataclass(frozen=True)
class Report:
    """One line of progress."""

    step: int
    elapsed_s: float
    rate: float
    train: Metrics | None = None
    held_out: Metrics | None = None
    saved: bool = False


class Trainer:
    """Owns the state of one run.

    Args:
      models: configs.
      frozen: from `corpus_head`.
      corpus: training and held-out rows.
      draft_vocab: int32 ids, or None.
      mesh: devices that share each batch.
      directory: of the checkpoints; one that has some is resumed.

    Raises:
      InputError: the batch does not divide over the devices; there are no held-out rows; a
        checkpoint, or the drafter to start from, does not fit.
    """

    def __init__(
        self,
        models: Models,
        frozen: Frozen,
        corpus: Corpus,
        draft_vocab: np.ndarray | None,
        mesh: Mesh,
        directory: str | os.PathLike[str],
    ):
        check_batch(models.train.batch, mesh, "train.batch")
        if not len(corpus.held_out.tokens):
            raise InputError(
                "the corpus has no held-out rows: write more shards, or raise "
                "data.held_out_fraction and write them anew in another folder"
            )
        self.models, self._frozen, self._mesh = models, frozen, mesh
        self.draft_vocab = draft_vocab
        self._corpus = corpus
        self._batches = Batches(corpus.train, models.train.batch, models.train.seed)
        self._train_step, self._eval_step = compiled_steps(models)
        self._sharding = NamedSharding(mesh, PartitionSpec(DATA))
        self._stop = threading.Event()
        self.elapsed_s = 0.0
        self.directory = pathlib.Path(directory)
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        try:
            self._manager = ocp.CheckpointManager(
                self.directory.resolve() / "checkpoints", options=options
            )
        except OSError as error:
            raise InputError(write_problem(self.directory, error)) from error
        fresh = self._manager.latest_step() is None
        start = warm_start(models) if models.train.start_from and fresh else None
        self.state: TrainState = replicate(initial_state(models, start), mesh)
        self._resume()

    @property
    def step(self) -> int:
        return int(self.state.step)

    def stop(self) -> None:
        """Ends the loop after the present step; safe in a signal handler."""
        self._stop.set()

    def run(self, time_limit_s: float = 0, until: int = 0) -> Iterator[Report]:
        """Trains to the end of the schedule, a time limit, or `stop`; then saves.

        Args:
          time_limit_s: training time after which the run is complete, earlier calls included; the
            learning rate then follows whichever of steps and time is further on. 0 is no limit.
          until: leave off at this step, in the middle of the schedule; 0 goes to its end.
        """
        train = self.models.train
        begin = time.monotonic() - self.elapsed_s
        saved = time.monotonic()
        step, last = self.step, until or train.steps
        pending: collections.deque[Metrics] = collections.deque()
        while step < last and not self._stop.is_set():
            elapsed = time.monotonic() - begin
            progress = max(step / train.steps, elapsed / time_limit_s if time_limit_s else 0)
            if progress >= 1:
                break
            rate = learning_rate(train, progress)
            batch = self._place(self._batches.at(step))
            self.state, metrics = self._train_step(
                self.state, self._frozen, batch, jnp.float32(rate)
            )
            step += 1
            pending.append(metrics)
            if len(pending) > AHEAD:
                jax.block_until_ready(pending.popleft())
            self.elapsed_s = time.monotonic() - begin
            if step % train.eval_every == 0:
                yield Report(step, self.elapsed_s, rate, held_out=self.evaluate())
            if step % train.log_every == 0:
                yield Report(step, self.elapsed_s, rate, train=jax.device_get(metrics))
            if time.monotonic() - saved > train.checkpoint_every_s:
                self.save()
                saved = time.monotonic()
                yield Report(step, self.elapsed_s, rate, saved=True)
        jax.block_until_ready(self.state)
        self.elapsed_s = time.monotonic() - begin
        self.save()

    def evaluate(self) -> Metrics:
        """Mean metrics over the first held-out rows."""
        rows, batch = self._corpus.held_out, self.models.train.batch
        count = min(self.models.train.eval_rows, len(rows.tokens))
        # Whole batches, so that the shapes are those of training; a short last one repeats rows.
        starts = range(0, count, batch)
        results = []
        for start in starts:
            index = np.arange(start, start + batch) % count
            placed = self._place((rows.tokens[index].astype(np.int32), rows.own[index]))
            results.append(self._eval_step(self.state.params, self._frozen, placed))
        fields = zip(*map(jax.device_get, results), strict=True)
        return Metrics(*(np.mean(field, axis=0) for field in fields))

    def save(self) -> None:
        """Writes a checkpoint. InputError when the disk is full; earlier ones stay."""
        step = self.step
        if step in self._manager.all_steps():
            return
        meta = self._meta() | {"elapsed_s": self.elapsed_s}
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{STATE: ocp.args.StandardSave(self.state), META: ocp.args.JsonSave(meta)}
                ),
            )
            self._manager.wait_until_finished()
        except OSError as error:
            raise InputError(write_problem(self.directory, error)) from error

    def export(self) -> pathlib.Path:
        """Writes the drafter in the Hugging Face layout; gives its folder."""
        folder = self.directory / "drafter"
        params = jax.device_get(self.state.params)
        if self.draft_vocab is not None:
            params = params | {DRAFT_VOCAB: self.draft_vocab}
        try:
            save_drafter(folder, self.models.drafter, params, self.models.train.export_dtype)
        except OSError as error:
            raise InputError(write_problem(folder, error)) from error
        return folder

    def _place(self, arrays: tuple[np.ndarray, np.ndarray]) -> Batch:
        return Batch(*(jax.device_put(array, self._sharding) for array in arrays))

    def _meta(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        drafter = dataclasses.asdict(self.models.drafter) | {
            "dtype": str(self.models.drafter.dtype)
        }
        train = self.models.train
        return {
            "drafter": json.loads(json.dumps(drafter)),
            "corpus": self._corpus.fingerprint,
            "batch": train.batch,
            "anchors": train.anchors,
            "optimizer": train.optimizer,
            "seed": train.seed,
        }

    def _resume(self) -> None:
        step = self._manager.latest_step()
        if step is None:
            return
        where = self.directory / "checkpoints" / str(step)
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(**{META: ocp.args.JsonRestore()})
            )
            found = dict(restored[META])
            elapsed = float(found.pop("elapsed_s", 0.0))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(_unreadable(where, error)) from error
        for name, value in self._meta().items():
            if found.get(name) != value:
                raise InputError(
                    f"{where}: made with another {name} ({_difference(found.get(name), value)});"
                    " choose another --out, or that setting"
                )
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state
        )
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(**{STATE: ocp.args.StandardRestore(shapes)})
            )
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(_unreadable(where, error)) from error
        # Orbax's arrays may be memory of NumPy's, which a step must not be given to reuse: with
        # jax 0.5 a train step from the compilation cache then writes over what is not its own.
        self.state = jax.tree.map(jnp.copy, restored[STATE])
        self.elapsed_s = elapsed


def _unreadable(where: pathlib.Path, error: Exception) -> str:
    return (
        f"{where}: not a readable checkpoint ({_first_line(error)}); delete that folder to go on"
        " from the one before it, or from the start"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _difference(found: Any, wanted: Any) -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = [k for k in sorted({*found, *wanted}) if found.get(k) != wanted.get(k)]
        return ", ".join(f"{k} {found.get(k)} there, {wanted.get(k)} here" for k in names)
    return f"{found} there, {wanted} here"


def stop_on_signal(stop: Callable[[], None]) -> None:
    """SIGTERM and the first Ctrl-C end the loop cleanly."""

    def handler(number: int, frame: Any) -> None:
        del number, frame
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)
