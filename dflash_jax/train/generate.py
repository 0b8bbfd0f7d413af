"""Makes shards: chooses prompts, has the target write, labels what came out."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from dflash_jax.checkpoints.target import Target
from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.errors import InputError
from dflash_jax.train.prompts import Prompt, PromptSet
from dflash_jax.train.rollout import ASSISTANT, USER, Prompts, Rollout, RolloutConfig, Template
from dflash_jax.train.shards import (
    Rows,
    ShardHeader,
    label_rows,
    read_header,
    shard_path,
    write_shard,
)

SELF = "self"  # kind of the rows whose user turns the target writes too
LONGEST_PERIOD = 48  # tokens; longer loops are rare


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to write. A shard is a pure function of this, its number and the target."""

    seed: int = 0
    shards: int = 20
    rollout: RolloutConfig = RolloutConfig()  # noqa: RUF009 (frozen)
    prompt_files: tuple[str, ...] = ()
    self_fraction: float = 0.4  # rows whose user turns the target writes too; all without files
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    temperature_weights: tuple[float, ...] = (0.6, 0.15, 0.25)
    held_out_fraction: float = 0.02
    # A reply that has repeated itself for so many tokens teaches nothing more.
    max_repeat_tokens: int = 48

    def __post_init__(self) -> None:
        for name in ("self_fraction", "held_out_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"data config: {name} must be in [0, 1]")
        if len(self.temperatures) != len(self.temperature_weights) or not self.temperatures:
            raise InputError("data config: temperatures and their weights differ in number")
        if not all(0 <= x < math.inf for x in (*self.temperatures, *self.temperature_weights)):
            raise InputError("data config: temperatures and their weights must be numbers from 0")
        if not sum(self.temperature_weights):
            raise InputError("data config: one of temperature_weights must be above 0")
        for name, least in (("seed", 0), ("shards", 1), ("max_repeat_tokens", 1)):
            if getattr(self, name) < least:
                raise InputError(f"data config: {name} must be at least {least}")


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """sha256 over the vocabulary: corpora and drafters of one tokenizer share it."""
    vocabulary = sorted(tokenizer.backend.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def chat_template(tokenizer: Tokenizer) -> Template:
    """What the template writes around turns, found by rendering a marked conversation.

    Raises:
      InputError: there is no template, or it changes what the turns say.
    """
    marks = ["<<first>>", "<<second>>", "<<third>>"]
    messages = [
        {"role": role, "content": mark}
        for role, mark in zip(("user", "assistant", "user"), marks, strict=True)
    ]
    whole = tokenizer.apply_chat_template(messages)
    if any(whole.count(mark) != 1 for mark in marks):
        raise InputError("the chat template does not keep the turns' text as it is")
    opening, rest = whole.split(marks[0])
    _, rest = rest.split(marks[1])
    between, after_user = rest.split(marks[2])
    encoded = (
        np.array(tokenizer.encode(text), np.int32) for text in (opening, after_user, between)
    )
    return Template(*encoded)


def find_repetitions(tokens: np.ndarray, limit: int) -> np.ndarray:
    """Positions inside a loop that has gone on for `limit` tokens: bool [n, S]."""
    looping = np.zeros(tokens.shape, bool)
    for period in range(1, LONGEST_PERIOD + 1):
        equal = tokens[:, period:] == tokens[:, :-period]
        if equal.shape[1] <= limit:
            break
        count = np.cumsum(equal, axis=1, dtype=np.int32)
        # limit + 1 equal tokens in a row end here.
        full = count[:, limit:] - np.pad(count, ((0, 0), (1, 0)))[:, : -limit - 1] == limit + 1
        looping[:, period + limit :] |= full
    return looping


class Generator:
    """Writes shards of one configuration.

    Args:
      target: loaded in the dtype that is to compute.
      config: what to write.
      prompts: from the config's prompt files; None when all rows are of kind `self`.
      mesh: devices that share each batch.
    """

    def __init__(self, target: Target, config: DataConfig, prompts: PromptSet | None, mesh: Mesh):
        self._tokenizer = target.tokenizer
        self._config = config
        self._prompts = prompts
        self._template = chat_template(target.tokenizer)
        self.kinds: tuple[str, ...] = (SELF, *(prompts.kinds if prompts else ()))
        self._header = {
            "tokenizer": tokenizer_fingerprint(target.tokenizer),
            "vocab_size": target.config.vocab_size,
            "length": config.rollout.length,
            "seed": config.seed,
            "kinds": self.kinds,
        }
        stop_ids = tuple(sorted(target.stop_token_ids))
        params = replicate(target.params["params"], mesh)
        self._rollout = Rollout(
            (target.config, params), config.rollout, self._template, stop_ids, mesh
        )

    def starts(self, shard: int) -> tuple[Prompts, np.ndarray]:
        """The forced starts of a shard's rows, and the rows' kinds."""
        config, size = self._config, self._config.rollout
        rng = np.random.default_rng([config.seed, shard])
        own_turns = rng.random(size.batch) < config.self_fraction
        weights = np.array(config.temperature_weights)
        temperature = rng.choice(config.temperatures, size.batch, p=weights / weights.sum())
        drawn: list[Prompt | None] = [None] * size.batch
        if self._prompts:
            drawn = list(self._prompts.draw(rng, size.batch))
        tokens = np.zeros((size.batch, size.length), np.int32)
        lengths, roles, kinds = (np.zeros(size.batch, np.int32) for _ in range(3))
        for row, prompt in enumerate(drawn):
            ids, role, kind = self._template.opening, USER, 0
            if prompt is not None and not own_turns[row]:
                encoded = self._encode(prompt)
                # A prompt that leaves little room for a reply is not used.
                if 0 < len(encoded) <= size.length // 2:
                    ids, role, kind = encoded, ASSISTANT, self.kinds.index(prompt.kind)
            tokens[row, : len(ids)] = ids
            lengths[row], roles[row], kinds[row] = len(ids), role, kind
        return Prompts(tokens, lengths, roles, temperature.astype(np.float32)), kinds

    def _encode(self, prompt: Prompt) -> np.ndarray:
        if prompt.text:
            return np.array(self._tokenizer.encode(prompt.text, add_special=True), np.int32)
        return np.array(self._tokenizer.encode_chat(list(prompt.messages)), np.int32)

    def header(self, shard: int) -> ShardHeader:
        """What the shard says of itself."""
        return ShardHeader(shard=shard, **self._header)  # type: ignore[arg-type]

    def write(self, shard: int) -> Callable[[], tuple[ShardHeader, Rows]]:
        """Runs a shard on the device; calling the result labels it on the host."""
        starts, kinds = self.starts(shard)
        key = jax.random.fold_in(jax.random.key(self._config.seed), shard)
        tokens, own = self._rollout.write(starts, key)
        header = self.header(shard)

        def label() -> tuple[ShardHeader, Rows]:
            useful = own & ~find_repetitions(tokens, self._config.max_repeat_tokens)
            fraction = self._config.held_out_fraction
            return header, label_rows(tokens, useful, starts.temperature, kinds, fraction)

        return label


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Puts arrays on every device of the mesh."""
    return jax.device_put(tree, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


class Progress(NamedTuple):
    """One finished shard."""

    shard: int
    rows: int
    own_tokens: int
    tokens: int  # read or written by the target
    seconds: float


def generate(
    generator: Generator, config: DataConfig, directory: str, time_limit_s: float = 0
) -> Iterator[Progress]:
    """Writes the missing shards; labels and stores one while the device writes the next.

    Args:
      directory: where shards go; those that are there are left alone.
      time_limit_s: no shard is begun after it; 0 is no limit.

    Raises:
      InputError: a shard that is there is corrupt or of other settings; the disk is full.
    """
    begin = time.monotonic()
    missing = []
    for shard in range(config.shards):
        path = shard_path(directory, shard)
        if not path.exists():
            missing.append(shard)
        elif (found := read_header(path)) != (wanted := generator.header(shard)):
            differences = ", ".join(
                name
                for name, value in dataclasses.asdict(wanted).items()
                if getattr(found, name) != value
            )
            raise InputError(f"{path}: made with another {differences}; choose another --out")

    def store(label: Callable[[], tuple[ShardHeader, Rows]]) -> tuple[int, int, int]:
        header, rows = label()
        write_shard(directory, header, rows)
        return header.shard, len(rows.tokens), int(rows.own.sum())

    per_shard = config.rollout.batch * config.rollout.length
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting: concurrent.futures.Future[tuple[int, int, int]] | None = None
        seconds = 0.0
        for shard in missing:
            if time_limit_s and time.monotonic() - begin > time_limit_s:
                break
            start = time.monotonic()
            label = generator.write(shard)
            if waiting:
                yield Progress(*waiting.result(), per_shard, seconds)
            waiting = pool.submit(store, label)
            seconds = time.monotonic() - start
        if waiting:
            yield Progress(*waiting.result(), per_shard, seconds)
