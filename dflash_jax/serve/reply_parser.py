"""A reply's text to its parts, wherever its pieces end.

    <think>reasoning</think> content <tool_call>a call</tool_call> <tool_call>another</tool_call>

The parser is a generator that reads from a buffer and waits where the next character would decide.
What it gives depends on the text alone, not on where the pieces end.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Sequence

from dflash_jax.serve.call_reader import OPEN, CallReader, Functions, Syntax
from dflash_jax.serve.reply_parts import Content, Part, Reasoning, joined
from dflash_jax.serve.scanner import Scanner, Waiting

THINK, END_THINK = "<think>", "</think>"


class Start(enum.Enum):
    """Where a reply stands, when it begins, towards reasoning."""

    NEVER = "the template does not think"
    POSSIBLE = "the reply may begin with <think>"
    OPEN = "the prompt ended with <think>"
    ENDED = "the prompt ended with </think>"  # a reply that thinks all the same is told apart


class ReplyParser:
    """Parses one reply. `push` its text, then `finish`.

    Attributes:
      reasoning: whether the text so far ends in reasoning.
      calls: how many calls have begun.
      whole: whether each of them is complete.
      done: one call was wanted and is complete: the reply may end.
    """

    def __init__(
        self,
        start: Start = Start.NEVER,
        syntax: Syntax | None = None,
        functions: Functions | None = None,
        one_call: bool = False,
    ) -> None:
        """`syntax` None: no functions, so that everything beside reasoning is content."""
        self.reasoning = False
        self.done = False
        self._scanner = Scanner()
        self._parts: list[Part] = []
        self._one_call = one_call
        self._reader = None
        if syntax is not None:
            self._reader = CallReader(syntax, functions or {}, self._scanner, self._parts.append)
        self._waits = self._reply(start)
        self._advance()

    @property
    def calls(self) -> int:
        return self._reader.begun if self._reader else 0

    @property
    def whole(self) -> bool:
        return self._reader is None or self._reader.begun == self._reader.complete

    def push(self, text: str) -> Sequence[Part]:
        """What can be told from the text so far, beyond what was given before."""
        self._scanner.feed(text)
        return self._advance()

    def finish(self, cut: bool = False) -> Sequence[Part]:
        """The rest, at the end of the reply.

        Of a reply that was `cut`, by a budget or a stop string, what may have been the beginning of
        a tag or of a call is left out: it is no content.
        """
        self._scanner.ended = True
        self._scanner.cut = cut
        return self._advance()

    def _advance(self) -> Sequence[Part]:
        next(self._waits, None)
        parts = joined(self._parts)
        self._parts.clear()
        return parts

    def _reply(self, start: Start) -> Waiting[None]:
        thought = False
        if start is not Start.NEVER:
            thought = yield from self._reason(start)
        if self._reader is None and not thought:
            yield from self._scanner.pass_all(self._add_content)
            return
        content = Trimmed(self._add_content, at_start=thought)
        if self._reader is None:
            yield from self._scanner.pass_all(content.push)
        else:
            yield from self._call(self._reader, content)
        content.flush()

    def _call(self, reader: CallReader, content: Trimmed) -> Waiting[None]:
        """Calls, with content around them."""
        while (yield from self._scanner.pass_until(OPEN, content.push)):
            undecided = not self._scanner.ended
            if not (yield from reader.read()):
                if undecided and self._scanner.cut:
                    self._scanner.text = ""
                    content.restart()
                    return
                content.push(OPEN)  # no call after all, and nothing is lost
                continue
            content.restart()
            if self._one_call:
                self.done = True
                return

    def _add_content(self, text: str) -> None:
        self._parts.append(Content(text))

    def _reason(self, start: Start) -> Generator[None, None, bool]:
        """Passes on the reasoning, if the reply has any; whether it had."""
        self.reasoning = start is Start.OPEN
        opened = yield from self._scanner.skip(THINK)
        if not opened and start is not Start.OPEN:
            return False
        self.reasoning = True
        text = Trimmed(lambda text: self._parts.append(Reasoning(text)), at_start=True)
        yield from self._scanner.pass_until(END_THINK, text.push)
        self.reasoning = False
        return True


class Trimmed:
    """Passes text on, less the blank lines before it and the space after it."""

    def __init__(self, emit: Callable[[str], None], at_start: bool) -> None:
        """`at_start`: blank lines at the beginning are not passed on."""
        self._emit = emit
        self._at_start = at_start
        self._held = ""

    def push(self, text: str) -> None:
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if kept and self._at_start:
            indent = len(kept) - len(kept.lstrip())
            kept = kept[kept.rfind("\n", 0, indent) + 1 :]
            self._at_start = False
        if kept:
            self._emit(kept)

    def flush(self) -> None:
        """At the end of the text: the space belongs to it."""
        if not self._at_start:
            self._emit(self._held)
        self._held = ""

    def restart(self) -> None:
        """Something else came: the space before and after it belongs to neither."""
        self._held = ""
        self._at_start = True
