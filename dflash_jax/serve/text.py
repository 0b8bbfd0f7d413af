"""The text of a growing reply: whole characters, cut before a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dflash_jax.checkpoints import Tokenizer


class StopStrings:
    """Passes text on, less what may still become a stop string.

    The text is cut before the stop string that is complete first (of several that end at one
    character, the longest), wherever the pieces' borders are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What can no longer be part of a stop string; nothing once one is found."""
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops]
        ends = [end for end in ends if end[0] + end[1] >= 0]
        if ends:
            end, minus_length, self.found = min(ends)
            self._held = ""
            return text[: end + minus_length]
        kept = len(text) - self._tail(text)
        self._held = text[kept:]
        return text[:kept]

    def finish(self) -> str:
        """What was held back, at the end of the reply."""
        held, self._held = self._held, ""
        return held

    def _tail(self, text: str) -> int:
        """Characters at the end of `text` that begin a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class ReplyText:
    """Tokens to text: incomplete characters and possible stop strings wait."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        shown: Collection[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """
        Args:
          shown: tokens that are text even where the checkpoint says they are special.
          min_tokens: stop strings in the text of these first tokens are none.
        """
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream()
        self._stops = StopStrings(stops)
        self._before_stops = min_tokens  # tokens
        self.characters = 0  # of the tokens so far
        ids = {tokenizer.token_id(token): token for token in shown}
        self._shown = {token_id: ids[token_id] for token_id in ids.keys() & tokenizer.special_ids}

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; the reply ends with the token that completed it."""
        return self._stops.found is not None

    def push(self, token: int) -> str:
        if token in self._shown:
            text = self._decoder.finish() + self._shown[token]
            self._decoder = self._tokenizer.stream()
        else:
            text = self._decoder.push(token)
        self.characters += len(text)
        if self._before_stops:
            self._before_stops -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """What still waited, at the end of the reply."""
        if self.stopped:
            return ""
        return self._stops.push(self._decoder.finish()) + self._stops.finish()
