"""Reading a text that is still arriving."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
# Gives T in the end; until then it yields wherever it needs more text than there is.
Waiting = Generator[None, None, T]

_SPACE = re.compile(r"\s*")


class Scanner:
    """The text not yet read, and the ways to read it."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False  # no more will come
        self.cut = False  # though more was to come

    def feed(self, text: str) -> None:
        self.text += text

    def drop(self, count: int) -> None:
        """Has read so many characters."""
        self.text = self.text[count:]

    def pass_all(self, emit: Callable[[str], object]) -> Waiting[None]:
        """Hands on everything, as it comes."""
        while True:
            if self.text:
                emit(self.text)
                self.text = ""
            if self.ended:
                return
            yield

    def pass_until(self, marker: str, emit: Callable[[str], object]) -> Waiting[bool]:
        """Hands on what is before the marker, which is read too; whether it came.

        The beginning of a marker at the end of a text that was cut is not handed on.
        """
        while True:
            before, found, after = self.text.partition(marker)
            if found:
                self.text = after
                emit(before)
                return True
            whole = self.ended and not self.cut
            kept = 0 if whole else beginning_of(marker, self.text)
            passed = len(self.text) - kept
            if passed:
                emit(self.text[:passed])
                self.drop(passed)
            if self.ended:
                self.text = ""
                return False
            yield

    def skip(self, *markers: str) -> Waiting[str]:
        """Reads one of the markers with the space before it; "" when none is next."""
        while True:
            space = _SPACE.match(self.text)
            assert space is not None
            rest = self.text[space.end() :]
            for marker in markers:
                if rest.startswith(marker):
                    self.text = rest[len(marker) :]
                    return marker
            if self.ended or not any(marker.startswith(rest) for marker in markers):
                return ""
            yield


def beginning_of(marker: str, text: str) -> int:
    """How many characters at the end of `text` may become the marker."""
    for count in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-count:]):
            return count
    return 0
