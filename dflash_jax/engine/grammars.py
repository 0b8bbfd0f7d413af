"""Grammars that a reply must match, by llguidance (extra `serve`).

A grammar is a text in llguidance's own form: Lark with its extensions, or what `of_json_schema` and
`of_regex` give.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.errors import InputError

# Between a JSON text's tokens: enough to indent it, and an end to what a small model may repeat.
_WHITESPACE = r"[ \t\r\n]{1,24}"


def of_json_schema(schema: Mapping[str, Any]) -> str:
    """A JSON Schema's grammar; InputError for one nested too deeply."""
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_pattern": _WHITESPACE}
        )
    except (ValueError, RecursionError) as error:
        raise InputError(f"JSON schema: {error}") from error


def of_regex(pattern: str) -> str:
    """The grammar of a regular expression in Rust's syntax, matched as a whole."""
    return LLMatcher.grammar_from_regex(pattern)


def of_choices(texts: Sequence[str]) -> str:
    """The grammar of one of some texts."""
    return f"start: {' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}"


def of_grammar(text: str) -> str:
    """The grammar that a client wrote: Lark in llguidance's form, or llama.cpp's GBNF.

    Raises InputError for GBNF that is malformed.
    """
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise InputError(f"grammar: {error}") from error


class GrammarVocabulary:
    """A checkpoint's tokens as llguidance wants them. Takes a quarter second: made once."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Iterable[int]) -> None:
        """`stop_token_ids`: the checkpoint's own, which may follow a complete reply alone."""
        self.stop_token_ids = tuple(sorted(stop_token_ids))
        # llguidance wants an end token: a control token, where the checkpoint names none.
        self.end_ids = self.stop_token_ids or (min(tokenizer.special_ids, default=0),)
        self.tokens = LLTokenizer(
            tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=list(self.end_ids)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """A grammar, compiled.

    Raises InputError for one that is malformed or that no text matches but, at most, the empty one.
    """

    text: str
    vocabulary: GrammarVocabulary
    _start: LLMatcher = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Else the messages hold pages of the parser's state.
        limits = LLParserLimits(verbose_errors=False)
        start = LLMatcher(self.vocabulary.tokens, self.text, log_level=0, limits=limits)
        problem = start.get_error().strip()
        if not problem and not _any_token(start, self.vocabulary):
            # A reply has a token at least, so it cannot be the empty text without a stop token.
            empty = start.is_accepting()
            problem = "no text but the empty one matches it" if empty else "no text matches it"
        if problem:
            raise InputError(f"grammar: {' '.join(problem.split())}")
        object.__setattr__(self, "_start", start)

    def matcher(self) -> LLMatcher:
        """A matcher of its own, before the first token."""
        return self._start.deep_copy()


def _any_token(matcher: LLMatcher, vocabulary: GrammarVocabulary) -> bool:
    """Whether a token may come next that is no end."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    return not matcher.is_error() and bool(
        set(allowed.tolist()) - set(vocabulary.tokens.eos_tokens)
    )
