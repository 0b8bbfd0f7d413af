"""Log-probabilities of a reply's tokens, as OpenAI lays them out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from dflash_jax.decode.rules import LogProbs
from dflash_jax.engine.grammars import GrammarVocabulary
from dflash_jax.serve.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

# JSON has no infinity: what vLLM says of a token that the model rules out.
_LOWEST = -9999.0


class Known(NamedTuple):
    """What is known of one token of a reply."""

    picked: TopLogprob
    top: list[TopLogprob]  # the likeliest in its place
    offset: int  # characters of the reply before it


class LogprobReader:
    """Reads what a round reports."""

    def __init__(self, vocabulary: GrammarVocabulary, top: int) -> None:
        """`top`: how many likeliest tokens at each place."""
        self._top = top
        self._bytes = functools.cache(lambda token: vocabulary.tokens.decode_bytes([token]))

    def read(self, tokens: Sequence[int], offsets: Sequence[int], found: LogProbs) -> list[Known]:
        """Of the first tokens of a round; `offsets` are theirs."""
        return [
            Known(
                self._one(token, found.chosen[row]),
                [
                    self._one(int(found.top_ids[row, place]), found.top[row, place])
                    for place in range(self._top)
                ],
                offset,
            )
            for row, (token, offset) in enumerate(zip(tokens, offsets, strict=True))
        ]

    def _one(self, token: int, logprob: float) -> TopLogprob:
        data = self._bytes(token)
        return TopLogprob(token=_text(data), logprob=max(float(logprob), _LOWEST), bytes=list(data))


def _text(data: bytes) -> str:
    """A token's text; of one that is a part of a character, its bytes in hexadecimal."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def of_chat(tokens: Sequence[Known]) -> ChatLogprobs:
    """A chat's layout."""
    content = [
        TokenLogprob(**token.picked.model_dump(), top_logprobs=token.top) for token in tokens
    ]
    return ChatLogprobs(content=content)


def of_completion(tokens: Sequence[Known]) -> CompletionLogprobs:
    """A completion's layout, in which the picked token is always among the likeliest."""
    return CompletionLogprobs(
        tokens=[token.picked.token for token in tokens],
        token_logprobs=[token.picked.logprob for token in tokens],
        top_logprobs=[
            {one.token: one.logprob for one in (*token.top, token.picked)} for token in tokens
        ],
        text_offset=[token.offset for token in tokens],
    )
