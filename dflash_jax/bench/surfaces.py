"""Price surfaces for replay: the true milliseconds of a round at (width, context_length).

A surface takes a context array of any shape and gives [..., cap+1] ms.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Protocol

import numpy as np

from dflash_jax.errors import InputError


class Surface(Protocol):
    """True prices. `cap` is the widest width."""

    @property
    def cap(self) -> int: ...

    def prices(self, context_length: np.ndarray) -> np.ndarray:
        """context_length [...] tokens to [..., cap+1] ms."""


# Fits to the published rates of the reference thread's card: a + b·w ms at five contexts.
THREAD_CONTEXTS = (34, 7_588, 28_946, 58_543, 121_022)
THREAD_BASE_MS = (34.1, 60.0, 49.5, 66.0, 93.0)
THREAD_NODE_MS = (0.4, 3.0, 7.0, 11.0, 21.0)


@dataclasses.dataclass(frozen=True)
class Linear:
    """a(L) + b(L)·w, with a and b linear in L between knots, held before and after them."""

    contexts: tuple[int, ...] = THREAD_CONTEXTS
    base_ms: tuple[float, ...] = THREAD_BASE_MS
    node_ms: tuple[float, ...] = THREAD_NODE_MS
    cap: int = 15

    def prices(self, context_length: np.ndarray) -> np.ndarray:
        base = np.interp(context_length, self.contexts, self.base_ms)
        node = np.interp(context_length, self.contexts, self.node_ms)
        return base[..., None] + node[..., None] * np.arange(self.cap + 1)


@dataclasses.dataclass(frozen=True)
class Stepped:
    """Tiles of rows: each tile that is begun costs `tile_ms` plus its reading of the context."""

    base_ms: float = 24.0
    tile_ms: float = 4.0
    token_ms: float = 2.5e-4  # a token of context, a tile
    tile: int = 4
    cap: int = 15

    def prices(self, context_length: np.ndarray) -> np.ndarray:
        tiles = np.arange(self.cap + 1) // self.tile + 1  # width w has w + 1 rows
        per_tile = self.tile_ms + self.token_ms * np.asarray(context_length, float)[..., None]
        return self.base_ms + per_tile * tiles


@dataclasses.dataclass(frozen=True)
class Measured:
    """Timings at some rows and contexts, bilinear between them, held outside.

    contexts: increasing. widths: increasing, the first 0. ms: [contexts][widths].
    """

    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]
    cap: int = 15

    def prices(self, context_length: np.ndarray) -> np.ndarray:
        context = np.asarray(context_length, float)
        table = np.stack([np.interp(np.arange(self.cap + 1), self.widths, row) for row in self.ms])
        knots = np.asarray(self.contexts, float)
        columns = [np.interp(context, knots, table[:, w]) for w in range(self.cap + 1)]
        return np.stack(columns, axis=-1)


FLAT = Linear(contexts=(0, 131_072), base_ms=(16.0, 32.0), node_ms=(0.0, 0.0))
"""A GPU that reads weights and context once, whatever the rows."""

CPU_F32 = Measured(
    contexts=(0, 8_192),
    widths=(0, 1, 7, 15),
    ms=((31.0, 42.0, 55.0, 80.0), (40.0, 52.0, 70.0, 105.0)),
)
"""SmolLM2-135M in f32 on two CPU cores (jax 0.10.2): 1, 2, 8 and 16 rows timed with a near-empty
cache; what 8,192 tokens add is assumed, not timed."""

CPU_INT8 = Measured(
    contexts=(0, 8_192),
    widths=(0, 1, 7, 15),
    ms=((9.5, 10.0, 17.0, 31.0), (13.0, 14.0, 24.0, 44.0)),
)
"""The same machine's int8 matmuls: 2 and 8 rows timed (10 and 17 ms); 1 row, 16 rows and what
8,192 tokens add are assumed, not timed."""


def load_measured(path: str | Path, cap: int = 15) -> Measured:
    """A surface from JSON lines with `width`, `context_length` and `ms` (or `round_ms`).

    Several timings of one cell count as their median. Raises `InputError` if the file has no
    such lines or a context lacks a width that another has.
    """
    cells: dict[tuple[int, int], list[float]] = {}
    try:
        for line in Path(path).read_text().splitlines():
            if line.strip():
                row = json.loads(line)
                ms = float(row["ms"] if "ms" in row else row["round_ms"])
                cells.setdefault((int(row["context_length"]), int(row["width"])), []).append(ms)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"surface {path}: {error!r}; give JSON lines with width, context_length and ms"
        ) from error
    contexts = tuple(sorted({context for context, _ in cells}))
    widths = tuple(sorted({width for _, width in cells}))
    if len(widths) < 2 or any((c, w) not in cells for c in contexts for w in widths):
        raise InputError(
            f"surface {path}: time the same widths, at least two, at each of its contexts"
        )
    table = tuple(tuple(float(np.median(cells[c, w])) for w in widths) for c in contexts)
    return Measured(contexts=contexts, widths=widths, ms=table, cap=cap)


SURFACES: dict[str, Surface] = {
    "thread": Linear(),
    "flat": FLAT,
    "stepped": Stepped(),
    "cpu-f32": CPU_F32,
    "cpu-int8": CPU_INT8,
}


def find_surface(name: str) -> Surface:
    """A surface by name; `linear:A:B` (A + B·w ms) or `stepped:A:B` (A + B a tile of 4 rows) at
    every context; or measured ones from a `.jsonl` file. Raises `InputError` otherwise."""
    if name in SURFACES:
        return SURFACES[name]
    if name.endswith(".jsonl"):
        return load_measured(name)
    kind, *numbers = name.split(":")
    try:
        base, step = map(float, numbers)
    except ValueError:
        base = step = -1.0
    if kind not in ("linear", "stepped") or base <= 0.0 or step < 0.0:
        raise InputError(
            f"surface {name!r}: give one of {', '.join(SURFACES)}, linear:A:B, stepped:A:B "
            "or a .jsonl file"
        )
    if kind == "stepped":
        return Stepped(base_ms=base, tile_ms=step, token_ms=0.0)
    return Linear(contexts=(0,), base_ms=(base,), node_ms=(step,))
