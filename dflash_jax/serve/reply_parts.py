"""What a reply consists of: content, reasoning and calls of functions."""

from __future__ import annotations

import dataclasses
import itertools
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
    texts = (part for part in parts if isinstance(part, CallStart) or part.text)
    for _, run in itertools.groupby(texts, type):
        first, *rest = run
        if isinstance(first, CallStart):
            merged += [first, *rest]
        else:
            more = (part.text for part in rest if not isinstance(part, CallStart))
            merged.append(dataclasses.replace(first, text="".join([first.text, *more])))
    return merged
