"""Shards: files of token sequences that the target wrote, and the corpus made of them.

A shard is one `.npz` file (zip, so every array has a checksum):

    header       JSON text: format, tokenizer, vocab_size, length, seed, shard, kinds
    tokens       [n, S] uint16 or uint32
    own          [n, S/8] uint8, bits: 1 where the target itself chose the token in a reply
    temperature  [n] float16: of the target's replies in the row; 0 is greedy
    kind         [n] uint8: index into the header's `kinds`
    key          [n] uint64: hash of the prompt and the start of the first reply
    held_out     [n] bool: decided by the hash of the prompt alone
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
import pathlib
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dflash_jax.errors import InputError

FORMAT = 1
PATTERN = "shard-*.npz"
# A reply that opens with the same prompt and the same 64 tokens is the same reply for training.
KEY_REPLY_TOKENS = 64


class Rows(NamedTuple):
    """Sequences, with what is known of each."""

    tokens: np.ndarray  # [n, S] uint16 or uint32
    own: np.ndarray  # [n, S] bool
    temperature: np.ndarray  # [n] float16
    kind: np.ndarray  # [n] uint8
    key: np.ndarray  # [n] uint64
    held_out: np.ndarray  # [n] bool

    def take(self, index: np.ndarray) -> Rows:
        return Rows(*(field[index] for field in self))


@dataclasses.dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself."""

    tokenizer: str  # fingerprint
    vocab_size: int
    length: int
    seed: int
    shard: int
    kinds: tuple[str, ...]
    format: int = FORMAT


def shard_path(directory: str | os.PathLike[str], shard: int) -> pathlib.Path:
    return pathlib.Path(directory) / f"shard-{shard:05d}.npz"


def hash_tokens(tokens: np.ndarray, salt: int = 0) -> int:
    """A 64-bit hash of token ids, the same everywhere."""
    data = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
    digest = hashlib.blake2b(data, digest_size=8, salt=salt.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def label_rows(
    tokens: np.ndarray,
    own: np.ndarray,
    temperature: np.ndarray,
    kind: np.ndarray,
    held_out_fraction: float,
) -> Rows:
    """Hashes rows, decides which are held out, and drops duplicates and rows without a reply.

    A row's prompt is everything before the first token that the target chose, so every reply to
    one prompt lies on one side of the split.
    """
    starts = np.argmax(own, axis=1)
    threshold = int(held_out_fraction * 2**64)
    kept, keys, held_out = [], [], []
    seen: set[int] = set()
    for row, start in enumerate(starts):
        if not own[row, start]:
            continue
        key = hash_tokens(tokens[row, : start + KEY_REPLY_TOKENS])
        if key in seen:
            continue
        seen.add(key)
        kept.append(row)
        keys.append(key)
        held_out.append(hash_tokens(tokens[row, :start], salt=1) < threshold)
    index = np.array(kept, np.int64)
    small = tokens.astype(np.uint16 if tokens.max(initial=0) < 2**16 else np.uint32)
    return Rows(
        small[index],
        own[index].astype(bool),
        temperature[index].astype(np.float16),
        kind[index].astype(np.uint8),
        np.array(keys, np.uint64),
        np.array(held_out, bool),
    )


def write_shard(directory: str | os.PathLike[str], header: ShardHeader, rows: Rows) -> pathlib.Path:
    """Writes a shard under its final name only when it is complete.

    Raises:
      InputError: the disk is full, or the directory cannot be written; no partial file stays.
    """
    path = shard_path(directory, header.shard)
    partial = path.with_suffix(".partial")
    arrays = rows._asdict() | {
        "own": np.packbits(rows.own, axis=1),
        "header": np.array(json.dumps(dataclasses.asdict(header))),
    }
    # In memory first: a zip file of older NumPy that fails to write complains again when it goes.
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(packed.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise InputError(write_problem(path, error)) from error
    return path


def write_problem(path: os.PathLike[str] | str, error: OSError) -> str:
    """One line for a failed write; what was written earlier stays."""
    if error.errno == errno.ENOSPC:
        return f"{path}: the disk is full; free some space and run again, finished work is kept"
    return f"{path}: cannot write ({error.strerror or error})"


def read_shard(path: str | os.PathLike[str]) -> tuple[ShardHeader, Rows]:
    """Reads one shard and checks that it is whole.

    Raises:
      InputError: the file is missing, truncated, corrupt, or not a shard.
    """
    with _named_if_corrupt(path):
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = _parse_header(arrays.pop("header"))
        arrays["own"] = np.unpackbits(arrays["own"], axis=1, count=header.length).astype(bool)
        rows = Rows(**arrays)
    _check_rows(path, header, rows)
    return header, rows


def read_header(path: str | os.PathLike[str]) -> ShardHeader:
    """Reads what a shard says of itself alone. InputError as `read_shard`."""
    with _named_if_corrupt(path), np.load(path, allow_pickle=False) as file:
        return _parse_header(file["header"])


@contextlib.contextmanager
def _named_if_corrupt(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (
        OSError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        TypeError,
        ValueError,
    ) as e:
        raise InputError(
            f"{path}: corrupt or no shard ({e}); delete it and run scripts/generate_data.py again"
        ) from e


def _parse_header(text: np.ndarray) -> ShardHeader:
    fields: dict[str, Any] = json.loads(str(text))
    return ShardHeader(**(fields | {"kinds": tuple(fields["kinds"])}))


def _check_rows(path: str | os.PathLike[str], header: ShardHeader, rows: Rows) -> None:
    if header.format != FORMAT:
        raise InputError(f"{path}: shard format {header.format}, this code reads {FORMAT}")
    count = len(rows.tokens)
    shaped = rows.tokens.shape == rows.own.shape == (count, header.length)
    if not shaped or any(len(field) != count for field in rows):
        raise InputError(f"{path}: corrupt shard: its arrays do not fit each other")
    if count and int(rows.tokens.max()) >= header.vocab_size:
        raise InputError(f"{path}: corrupt shard: ids beyond its vocabulary {header.vocab_size}")


class Corpus(NamedTuple):
    """All rows of a directory, without duplicates, split."""

    train: Rows
    held_out: Rows
    kinds: tuple[str, ...]
    fingerprint: str  # of the data: changes when any shard does


def read_corpus(
    directory: str | os.PathLike[str], tokenizer: str, vocab_size: int, max_shards: int = 0
) -> Corpus:
    """Reads the shards of a directory in order.

    Args:
      directory: as written by scripts/generate_data.py.
      tokenizer: fingerprint that every shard must carry.
      vocab_size: of the target.
      max_shards: read only the first so many; 0 is all.

    Raises:
      InputError: no shard, a corrupt one, or one of another tokenizer or length.
    """
    paths = sorted(pathlib.Path(directory).glob(PATTERN))
    paths = paths[: max_shards or None]
    if not paths:
        raise InputError(f"{directory}: no {PATTERN}; make them with scripts/generate_data.py")
    parts: list[Rows] = []
    digest = hashlib.sha256()
    first: ShardHeader | None = None
    for path in paths:
        header, rows = read_shard(path)
        if header.tokenizer != tokenizer or header.vocab_size != vocab_size:
            raise InputError(f"{path}: made with another tokenizer than the target's")
        first = first or header
        if (header.length, header.kinds) != (first.length, first.kinds):
            raise InputError(f"{path}: length or kinds differ from {paths[0].name}'s")
        digest.update(rows.key.tobytes())
        parts.append(rows)
    assert first is not None
    rows = Rows(*(np.concatenate(field) for field in zip(*parts, strict=True)))
    # np.unique gives the first occurrence, and sorting brings the shards' order back.
    rows = rows.take(np.sort(np.unique(rows.key, return_index=True)[1]))
    return Corpus(
        rows.take(~rows.held_out), rows.take(rows.held_out), first.kinds, digest.hexdigest()
    )
