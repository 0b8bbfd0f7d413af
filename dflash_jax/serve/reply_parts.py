"""What a reply consists of: content, reasoning and calls of functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Text of the thinking before it."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallStart:
    """A call of a function begins; `index` counts the reply's calls from 0."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True)
class Arguments:
    """More of the JSON text of the arguments of the call that began last."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | Arguments


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same with neighbours of one kind in one, and without empty ones."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, CallStart):
            merged.append(part)
        elif part.text and type(part) is type(last) and not isinstance(last, CallStart):
            merged[-1] = dataclasses.replace(last, text=last.text + part.text)
        elif part.text:
            merged.append(part)
    return merged
