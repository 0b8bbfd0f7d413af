"""Grammars that a reply must match, by llguidance (extra `serve`).

A grammar is a text in llguidance's own form: Lark with its extensions, or the JSON that
`LLMatcher.grammar_from_json_schema`, `grammar_from_regex` and the like give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import llguidance
import numpy as np

from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.errors import InputError


class GrammarVocabulary:
    """A checkpoint's tokens as llguidance wants them. Takes a quarter second: made once."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Iterable[int]) -> None:
        """`stop_token_ids`: the checkpoint's own, which may follow a complete reply alone."""
        self.stop_token_ids = tuple(sorted(stop_token_ids))
        # llguidance wants an end token: a control token, where the checkpoint names none.
        self.end_ids = self.stop_token_ids or (min(tokenizer.special_ids, default=0),)
        self.tokens = llguidance.LLTokenizer(
            tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=list(self.end_ids)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """A grammar, compiled.

    Raises InputError for one that is malformed or that no text matches.
    """

    text: str
    vocabulary: GrammarVocabulary
    _start: llguidance.LLMatcher = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Else the messages hold pages of the parser's state.
        limits = llguidance.LLParserLimits(verbose_errors=False)
        start = llguidance.LLMatcher(self.vocabulary.tokens, self.text, log_level=0, limits=limits)
        problem = start.get_error().strip()
        if not problem and not start.is_accepting() and not _any_token(start, self.vocabulary):
            problem = "no text matches it"
        if problem:
            raise InputError(f"grammar: {' '.join(problem.split())}")
        object.__setattr__(self, "_start", start)

    def matcher(self) -> llguidance.LLMatcher:
        """A matcher of its own, before the first token."""
        return self._start.deep_copy()


def _any_token(matcher: llguidance.LLMatcher, vocabulary: GrammarVocabulary) -> bool:
    """Whether a token may come next that is no end."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    return not matcher.is_error() and bool(
        set(allowed.tolist()) - set(vocabulary.tokens.eos_tokens)
    )
