"""What a reply consists of: content, reasoning and calls of functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Text of the thinking before it."""

    text: str


class CallStart(NamedTuple):
    """A call of a function begins; `index` counts the reply's calls from 0."""

    index: int
    name: str


class Arguments(NamedTuple):
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
        elif not part.text:
            continue
        elif last is not None and part[:-1] == last[:-1] and type(part) is type(last):
            merged[-1] = part._replace(text=last.text + part.text)
        else:
            merged.append(part)
    return merged
