"""Records of replies and rounds, as JSON lines."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import time
from collections import Counter
from typing import Any, TextIO

from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.engine import LoneDriver, Request, RoundRecord, Stream
from dflash_jax.errors import InputError


def decode(driver: LoneDriver, request: Request) -> tuple[Stream, list[RoundRecord], float]:
    """A whole reply: finished stream, rounds, seconds from the first token to the last."""
    with driver.stream(request) as stream:
        rounds = stream.rounds()
        records = [next(rounds)]
        begin = time.perf_counter()
        records += rounds
        seconds = time.perf_counter() - begin
    return stream, records, seconds


def round_record(record: RoundRecord) -> dict[str, Any]:
    """A round for --trace_out; `scripts/replay.py` reads it.

    Nodes are in pop order: `parents` -1 below the anchor, `depths` from 1 there, `own` log chances
    among siblings, `chances` of landing; `landed` of the first `width`. `why` is the rule's
    `explain`: of `renewal`, the width is argmax of expected_tokens - tokens_per_ms * believed_ms
    among the widest of each program, unless it was a `probe`.
    """
    tree = record.tree
    return {
        "context_length": record.context_length,
        "width": record.width,
        "parents": tree.parents.tolist(),
        "depths": tree.depths.tolist(),
        "tokens": tree.tokens.tolist(),
        "own": [round(float(x), 6) for x in tree.own],
        "chances": [round(float(x), 6) for x in record.chances],
        "landed": record.landed.tolist(),
        "emitted": list(record.tokens),
        "round_ms": round(record.round_ms, 4),
        "host_ms": round(record.host_ms, 4),
        "sample": record.sample,
        "why": dict(record.why),
    }


def reply_record(
    stream: Stream,
    prompt: list[int],
    records: list[RoundRecord],
    tokenizer: Tokenizer,
    decode_s: float,
    compiles: int,
) -> dict[str, Any]:
    """A reply for --json_out."""
    first, rounds = records[0], records[1:]
    seconds = decode_s
    decoded = len(stream.tokens) - len(first.tokens)
    widths = Counter(record.width for record in rounds)
    return {
        "prompt_tokens": len(prompt),
        "tokens": stream.tokens,
        "text": tokenizer.decode(stream.tokens),
        "finish_reason": stream.finish_reason,
        "token_sha256": stream.token_sha256,
        "rounds": len(rounds),
        "tokens_per_round": round(decoded / len(rounds), 4) if rounds else None,
        "widths": {str(width): widths[width] for width in sorted(widths)},
        "ttft_s": round(first.round_ms / 1e3, 4),
        "decode_s": round(seconds, 4),
        "decode_tok_s": round(decoded / seconds, 3) if rounds else None,
        "round_ms": _median([record.round_ms for record in rounds]),
        "host_ms": _median([record.host_ms for record in rounds]),
        "compiles_after_warmup": compiles,
    }


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def _opened(path: str, flag: str) -> TextIO:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--{flag}={path}: {error.strerror}") from error


class Text:
    """A file that is written whole, or nothing; see `Lines`.

    That it can be written is known before the work that it will tell of.
    """

    def __init__(self, base: str | None, flag: str, ending: str = "") -> None:
        self._path, self._flag = f"{base}{ending}" if base else "", flag
        if self._path:
            new = not os.path.exists(self._path)
            _opened(self._path, flag).close()
            if new:
                os.unlink(os.path.realpath(self._path))

    def write(self, text: str) -> None:
        if not self._path:
            return
        try:
            pathlib.Path(self._path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"--{self._flag}={self._path}: {error.strerror}") from error


class Lines:
    """A JSON-lines file, or nothing; every line is on disk before the next is made.

    An existing file is replaced by the first line, not before: a run that fails earlier loses
    nothing. With `keep` it is gone on with.

    Args:
      base: the flag's value; empty or None: nothing is written.
      ending: what the file's name has after it.
    """

    def __init__(self, base: str | None, flag: str, ending: str = "", keep: bool = False) -> None:
        self._path, self._flag = f"{base}{ending}", flag
        self._begun = keep
        self._file = _opened(self._path, flag) if base else None

    def write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            if not self._begun and os.path.isfile(self._path):  # no device, no pipe
                self._file.truncate(0)
            self._begun = True
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise InputError(
                f"--{self._flag}={self._path}: {error.strerror}; earlier lines are kept"
            ) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
