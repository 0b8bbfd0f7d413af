"""Log-probabilities of a reply's tokens, as OpenAI lays them out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dflash_jax.decode.rules import LogProbs
from dflash_jax.engine.grammars import GrammarVocabulary
from dflash_jax.serve.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)

# JSON has no infinity: what vLLM says of a token that the model rules out.
_LOWEST = -9999.0


class Known(NamedTuple):
    """What is known of one token of a reply."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens and theirs
    offset: int  # characters of the reply before it


def known(tokens: Sequence[int], offsets: Sequence[int], logprobs: LogProbs, top: int) -> Iterator[Known]:
    """Of the first tokens of a round, with the `top` likeliest at each place."""
    for row, (token, offset) in enumerate(zip(tokens, offsets, strict=True)):
        likeliest = zip(
            logprobs.top_ids[row, :top].tolist(), logprobs.top[row, :top].tolist(), strict=True
        )
        yield Known(token, float(logprobs.chosen[row]), list(likeliest), offset)


class Writer:
    """Token ids to texts and layouts."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._bytes = functools.cache(lambda token: vocabulary.tokens.decode_bytes([token]))

    def chat(self, tokens: Sequence[Known]) -> ChatLogprobs:
        """A chat's."""
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    **self._one(token.token, token.logprob),
                    top_logprobs=[TopLogprob(**self._one(*one)) for one in token.top],
                )
                for token in tokens
            ]
        )

    def completion(self, tokens: Sequence[Known]) -> CompletionLogprobs:
        """A completion's, in which the picked token is always among the likeliest."""
        return CompletionLogprobs(
            tokens=[self._text(token.token) for token in tokens],
            token_logprobs=[_finite(token.logprob) for token in tokens],
            top_logprobs=[
                {
                    self._text(one): _finite(logprob)
                    for one, logprob in [*token.top, (token.token, token.logprob)]
                }
                for token in tokens
            ],
            text_offset=[token.offset for token in tokens],
        )

    def _one(self, token: int, logprob: float) -> dict:
        return {
            "token": self._text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._bytes(token)),
        }

    def _text(self, token: int) -> str:
        """A token's text; of one that is a part of a character, its bytes in hexadecimal."""
        data = self._bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
