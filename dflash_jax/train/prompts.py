"""Prompts for training data: written ones, and templates whose slots are filled in.

A JSON-lines file has one object a line:

    {"slot": "topic", "values": ["tides", "yeast"]}           what {topic} may stand for
    {"kind": "chat", "prompt": "Explain {topic} simply."}     a prompt, with or without slots
    {"kind": "chat", "messages": [{"role": "user", ...}]}     a conversation, taken as it is
    {"kind": "text", "text": "Once upon a time"}              goes on without the chat template
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from typing import Any

import numpy as np

from dflash_jax.errors import InputError

SLOT = re.compile(r"\{(\w+)\}")
Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One conversation to be continued; `text` instead of messages is continued as it is."""

    kind: str
    messages: tuple[Message, ...] = ()
    text: str = ""


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """Entries of prompt files, and the values of their slots."""

    entries: tuple[Prompt, ...]
    slots: dict[str, tuple[str, ...]]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({entry.kind for entry in self.entries}))

    def combinations(self) -> int:
        """Different prompts that the set can give."""
        return sum(self._variants(entry) for entry in self.entries)

    def _variants(self, entry: Prompt) -> int:
        count = 1
        for slot in _slots(entry):
            count *= len(self.slots[slot])
        return count

    def draw(self, rng: np.random.Generator, count: int) -> list[Prompt]:
        """Random prompts: kinds equally often, and within a kind those with more variants oftener.

        An entry's weight is the square root of its variants, so that templates do not drown the
        prompts that were written one by one.
        """
        by_kind = [[e for e in self.entries if e.kind == kind] for kind in self.kinds]
        weights = [np.sqrt([self._variants(entry) for entry in group]) for group in by_kind]
        drawn = []
        for kind in rng.integers(len(by_kind), size=count):
            group, weight = by_kind[kind], weights[kind]
            entry = group[rng.choice(len(group), p=weight / weight.sum())]
            drawn.append(self._fill(entry, rng))
        return drawn

    def _fill(self, entry: Prompt, rng: np.random.Generator) -> Prompt:
        """Every occurrence of a slot gets a value of its own."""

        def fill(text: str) -> str:
            return SLOT.sub(lambda match: str(rng.choice(self.slots[match[1]])), text)

        messages = tuple(m | {"content": fill(m["content"])} for m in entry.messages)
        return Prompt(entry.kind, messages, fill(entry.text))


def _slots(entry: Prompt) -> set[str]:
    texts = [entry.text, *(message["content"] for message in entry.messages)]
    return {name for text in texts for name in SLOT.findall(text)}


def read_prompts(*paths: str | os.PathLike[str]) -> PromptSet:
    """Reads prompt files.

    A brace expression that names no slot of the files is plain text: code has many.

    Raises:
      InputError: a file cannot be read, or a line is not one of the forms above.
    """
    entries: list[Prompt] = []
    slots: dict[str, tuple[str, ...]] = {}
    for path in paths:
        try:
            # Not `splitlines`: JSON texts may hold U+2028 and other ends of lines as they are.
            lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot read prompts ({error})") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                entry = _parse(f"{path}:{number}", line)
                if isinstance(entry, Prompt):
                    entries.append(entry)
                else:
                    slots |= entry
    if not entries:
        raise InputError(f"{', '.join(map(str, paths))}: no prompts")
    # Only braces that name a slot are slots; the others must survive `_fill` untouched.
    known = {name: slots.get(name, ("{" + name + "}",)) for e in entries for name in _slots(e)}
    return PromptSet(tuple(entries), known)


def _parse(where: str, line: str) -> Prompt | dict[str, tuple[str, ...]]:
    try:
        fields: Any = json.loads(line)
        json.dumps(fields, ensure_ascii=False).encode()  # a lone surrogate is no text
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error})") from error
    match fields:
        case {"slot": str(name), "values": [str(), *_] as values}:
            return {name: tuple(map(str, values))}
        case {"prompt": str(text)}:
            messages: tuple[Message, ...] = ({"role": "user", "content": text},)
        case {"text": str(text)} if text:
            return Prompt(str(fields.get("kind", "text")), text=text)
        case {"messages": [{"role": str(), "content": str()}, *_] as given}:
            for message in given:
                match message:
                    case {"role": str(), "content": str()}:
                        pass
                    case _:
                        raise InputError(f"{where}: a message needs a role and a content")
            messages = tuple({"role": m["role"], "content": m["content"]} for m in given)
        case _:
            raise InputError(f"{where}: needs prompt, messages, text, or slot with values")
    return Prompt(str(fields.get("kind", "chat")), messages)
