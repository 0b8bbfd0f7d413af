"""What the target says to given prompts, and the drafter's lattice at every token of it.

One teacher-forced forward gives what a decode would have met at each anchor, whatever the width:
the target's tokens do not depend on the drafter.
"""

from __future__ import annotations

import contextlib
import pathlib
import zipfile
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax.checkpoints.target import Target
from dflash_jax.decode.noise import split_seed
from dflash_jax.decode.sampling import Sampling, picks
from dflash_jax.errors import InputError
from dflash_jax.models.dflash2 import DFlash2
from dflash_jax.train.blocks import block_hidden, cut_blocks
from dflash_jax.train.generate import chat_template, replicate
from dflash_jax.train.prompts import Prompt
from dflash_jax.train.rollout import ASSISTANT, Pick, Prompts, Rollout, RolloutConfig
from dflash_jax.train.step import Frozen, Models, drafter_table, read_target
from dflash_jax.tree.lattice import Lattice

CANDIDATES = 16  # a position, of a drafter without a selector


class Reply(NamedTuple):
    """One reply. The first round's anchor is its first token."""

    kind: str
    tokens: np.ndarray  # [S] int32: prompt, reply, padding
    start: int  # position of the first reply token
    end: int  # position of the last one
    seed: int  # of the keyed draws; 0 when greedy


def keyed_pick(sampling: Sampling, seeds: np.ndarray) -> Pick:
    """The serving path's own draw, one seed a row: seeds uint32 [B, 2]."""
    arrays = sampling.arrays()

    def pick(logits: jax.Array, position: jax.Array) -> jax.Array:
        def one(row: jax.Array, seed: jax.Array) -> jax.Array:
            return picks(row[None], position[None], arrays._replace(seed=seed))[0]

        return jax.vmap(one)(logits, jnp.asarray(seeds))

    return pick


def write_replies(
    target: Target,
    prompts: list[Prompt],
    sampling: Sampling,
    length: int,
    max_tokens: int,
    mesh: Mesh,
) -> list[Reply]:
    """The target's replies; prompts that leave no room in `length` tokens are left out.

    A reply ends with a stop token, with `max_tokens`, or where the buffer does. Row i draws with
    seed `sampling.seed + i`.

    Raises:
      InputError: no prompt is left.
    """
    encoded: list[tuple[str, np.ndarray]] = []
    for prompt in prompts:
        ids = (
            target.tokenizer.encode(prompt.text, add_special=True)
            if prompt.text
            else target.tokenizer.encode_chat(list(prompt.messages))
        )
        if 0 < len(ids) <= length - 16:
            encoded.append((prompt.kind, np.array(ids, np.int32)))
    if not encoded:
        raise InputError(f"no prompt leaves room for a reply in {length} tokens: raise --length")
    batch = -(-len(encoded) // mesh.size) * mesh.size
    seeds = np.stack([split_seed(sampling.seed + row) for row in range(batch)])
    tokens, lengths = np.zeros((batch, length), np.int32), np.ones(batch, np.int32)
    for row, (_, prefix) in enumerate(encoded):
        tokens[row, : len(prefix)], lengths[row] = prefix, len(prefix)
    config = RolloutConfig(batch=batch, length=length, segments=2, max_reply_tokens=max_tokens)
    rollout = Rollout(
        (target.config, replicate(target.params["params"], mesh)),
        config,
        chat_template(target.tokenizer),
        tuple(sorted(target.stop_token_ids)),
        mesh,
        keyed_pick(sampling, seeds),
    )
    starts = Prompts(
        tokens, lengths, np.full(batch, ASSISTANT, np.int32), np.zeros(batch, np.float32)
    )
    written, own = rollout.write(starts, jax.random.key(0))
    replies = []
    for row, (kind, prefix) in enumerate(encoded):
        start = len(prefix)
        others = np.flatnonzero(~own[row, start:])
        end = start + int(others[0]) - 1 if len(others) else length - 1
        if end > start:
            seed = 0 if sampling.greedy else sampling.seed + row
            replies.append(Reply(kind, written[row], start, end, seed))
    return replies


def keep_replies(path: pathlib.Path, made_with: str, replies: dict[str, list[Reply]]) -> None:
    """Writes the replies of each way of decoding for `read_replies`.

    Args:
      made_with: all that they depend on, as text.

    Raises:
      InputError: the file cannot be written; none is left half written.
    """
    arrays: dict[str, np.ndarray] = {"made_with": np.array(made_with)}
    for name, written in replies.items():
        for field, values in zip(Reply._fields, zip(*written, strict=True), strict=True):
            arrays[f"{name}.{field}"] = np.array(values)
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise InputError(f"{path}: cannot write ({error.strerror or error})") from error


def read_replies(path: pathlib.Path, made_with: str) -> dict[str, list[Reply]]:
    """Replies of `keep_replies`; InputError unless they were made with the same settings."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        found = str(arrays.pop("made_with"))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path}: no readable replies ({error}); give another file") from error
    if found != made_with:
        raise InputError(
            f"{path}: replies of another target, prompt file or setting; give another file"
        )
    replies: dict[str, list[Reply]] = {}
    for name in dict.fromkeys(key.split(".")[0] for key in arrays):
        kind, tokens, *numbers = (arrays[f"{name}.{field}"] for field in Reply._fields)
        replies[name] = [
            Reply(str(kind[row]), tokens[row], *(int(n[row]) for n in numbers))
            for row in range(len(kind))
        ]
    return replies


class LatticeReader:
    """Compiled lattices of a batch of replies, at all their anchors.

    Args:
      models: configs; of the training config only the attention matters.
      params: the drafter's, without the draft vocabulary.
      frozen: from `corpus_head`.
      rows: replies read together.
      anchors: blocks of one reply drafted together.
    """

    def __init__(self, models: Models, params: Any, frozen: Frozen, rows: int, anchors: int):
        self._models, self._params, self._frozen = models, params, frozen
        self._rows, self._anchors = rows, anchors
        self._read = jax.jit(lambda tokens: read_target(models, frozen, tokens)[1])
        self._draft = jax.jit(self._lattices)

    def _lattices(self, params: Any, taps: jax.Array, tokens: jax.Array, anchors: jax.Array) -> Any:
        config = self._models.drafter
        own = jnp.ones(tokens.shape, bool)
        blocks = cut_blocks(tokens, own, anchors, config.block_size - 1)
        table = drafter_table(config, tokens.shape[1])
        hidden = block_hidden(config, params, taps, self._frozen.embedding, blocks, table)
        model, variables = DFlash2(config), {"params": params}
        if config.draft_vocab_size:
            variables = {"params": params | {"draft_vocab": self._frozen.head.ids}}
        logits = model.apply({}, hidden, self._frozen.head.weight, method="logits")
        top_k = config.selector_top_k or CANDIDATES
        return model.apply(variables, hidden, logits, blocks.anchor_tokens, top_k, method="lattice")

    def read(self, replies: list[Reply]) -> list[Lattice]:
        """For each reply a lattice [end - start, D, ...]: anchors start..end - 1."""
        results: list[Lattice] = []
        for first in range(0, len(replies), self._rows):
            group = replies[first : first + self._rows]
            padded = group + [group[-1]] * (self._rows - len(group))
            tokens = jnp.asarray(np.stack([reply.tokens for reply in padded]))
            taps = self._read(tokens)
            count = max(reply.end - reply.start for reply in group)
            starts = np.array([reply.start for reply in padded])[:, None]
            parts = []
            for offset in range(0, count, self._anchors):
                anchors = starts + offset + np.arange(self._anchors)
                anchors = np.minimum(anchors, tokens.shape[1] - 1).astype(np.int32)
                lattice = self._draft(self._params, taps, tokens, jnp.asarray(anchors))
                parts.append(jax.device_get(lattice))
            whole = [np.concatenate(field, axis=1) for field in zip(*parts, strict=True)]
            for row, reply in enumerate(group):
                results.append(Lattice(*(f[row, : reply.end - reply.start] for f in whole)))
        return results
