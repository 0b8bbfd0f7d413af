"""A server whose model says what a test wants: a scripted driver behind the real rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.engine import Request
from dflash_jax.engine.lone import LENGTH, STOP, RoundRecord
from dflash_jax.engine.turns import Drivers
from dflash_jax.serve.service import ServedModel
from dflash_jax.tree.growth import EMPTY
from tests.serve import templates, tiny_server

STOP_TOKENS = frozenset({256, 258})
CONTEXT_LIMIT = 4096
END = 258  # <|im_end|>


class Script:
    """A driver that replies with `texts` in turn, so many tokens a round.

    Its `requests` are those it was asked for.
    """

    decoder = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []
        self.tokens_per_round: Sequence[int] = (1,)
        self.requests: list[Request] = []

    def stream(self, request: Request):
        self.requests.append(request)
        tokens = [*self.tokenizer.encode(self.texts[(len(self.requests) - 1) % len(self.texts)])]
        return _Stream([*tokens, END], self.tokens_per_round, request.max_tokens)

    def says(self, *texts: str, tokens_per_round: Sequence[int] = (1,)) -> None:
        self.texts, self.tokens_per_round = list(texts), tokens_per_round
        self.requests.clear()

    @property
    def prompt(self) -> str:
        """The last request's."""
        return self.tokenizer.decode(self.requests[-1].prompt, skip_special=False)


class _Stream:
    def __init__(self, tokens: list[int], sizes: Sequence[int], most: int) -> None:
        self._tokens, self._sizes, self._most = tokens, sizes, most
        self.finish_reason: str | None = None

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_) -> None:
        pass

    def rounds(self, interrupted) -> Iterator[RoundRecord]:
        left, count = self._tokens[: self._most], 0
        while left and not interrupted():
            size = self._sizes[count % len(self._sizes)]
            part, left, count = left[:size], left[size:], count + 1
            if not left:
                self.finish_reason = STOP if part[-1] == END else LENGTH
            yield RoundRecord(
                tuple(part), 9, 0, EMPTY, np.zeros(0), np.zeros(0, bool), 1.0, 0.1, True
            )


@contextlib.contextmanager
def serving(template: str, **tokens) -> Iterator[tuple[tiny_server.Running, Script]]:
    """A server of a model with this chat template, and its script."""
    tokenizer = templates.tokenizer(template, **tokens)
    script = Script(tokenizer)
    model = ServedModel(
        "scripted", tokenizer, STOP_TOKENS, 320, CONTEXT_LIMIT, Drivers(script, script)
    )
    with tiny_server.running(load=lambda say: model) as server:
        while server.http.get("/health").status_code != 200:
            pass
        yield server, script
