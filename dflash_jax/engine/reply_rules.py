"""A request's rules along one reply, on the host: what may follow each node of a tree.

    reply …  anchor ─ a ─ c      masks of (), (a,), (a, c), (b,): paths of tokens behind the anchor
                    └ b

A path's mask depends on the reply and the path alone, so that a tree is masked as plain decoding
would mask each of its rows.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np

from dflash_jax.decode import rules as device
from dflash_jax.decode.programs import HEAD_ROWS
from dflash_jax.decode.rules import RuleArrays
from dflash_jax.engine.rules import Rules, Thinking
from dflash_jax.errors import InputError
from dflash_jax.tree.growth import EMPTY, NO_PARENT, DraftTree

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from dflash_jax.engine.lone import Request

Path = tuple[int, ...]  # tokens behind the anchor


class Part(enum.Enum):
    """Of a reply whose model thinks."""

    BEGINNING = enum.auto()  # before its first token, which may begin the thinking
    THINKING = enum.auto()
    CLOSING = enum.auto()  # the budget is spent
    ANSWER = enum.auto()


class Place(NamedTuple):
    """Where a reply is: behind some tokens of a part."""

    part: Part
    tokens: int = 0


class ReplyRules:
    """Masks, counts and biases of one reply.

    Before the prompt's pick: `of_prompt`. Each round: `permits` while the tree grows, `of_window`
    for it, then `commit` for each emitted token.

    A grammar that becomes too complex for llguidance's limits raises InputError.
    """

    def __init__(
        self, request: Request, vocab_size: int, neutral: Mapping[int, RuleArrays]
    ) -> None:
        """
        Args:
          vocab_size: rows of the target's head.
          neutral: the decoder's.

        Raises:
          InputError: a bias of a token beyond the vocabulary.
        """
        rules = request.rules
        self._rules = rules
        self._stops = request.stop_token_ids
        self._neutral = neutral
        self._every = np.full(device.mask_words(vocab_size), device.EVERY_TOKEN)
        self._no_stop = self._every & ~self._only(self._stops)
        self._committed = 0
        self._place = _start(rules.thinking)
        self._masks: dict[Path, np.ndarray | None] = {}  # of this round
        self._matcher: LLMatcher | None = None
        self._answer: list[int] = []  # of the committed tokens, what the grammar has matched
        if rules.grammar is not None:
            self._matcher = self._new_matcher()
            self._no_end = ~self._only(rules.grammar.vocabulary.end_ids)
        self._counts = np.zeros(vocab_size, np.int32) if _penalised(rules) else None
        self._constant = self._constant_arrays(request.prompt, vocab_size)

    @property
    def masked(self) -> bool:
        """Whether any token may still be forbidden."""
        thinking = self._rules.thinking
        budget = thinking is not None and thinking.budget is not None
        return (
            self._matcher is not None
            or self._committed < self._rules.min_tokens
            or (budget and self._place.part is not Part.ANSWER)
        )

    @property
    def wants_logprobs(self) -> bool:
        return self._rules.logprobs

    def of_prompt(self) -> RuleArrays:
        """For the pick behind the prompt."""
        return self.of_window(EMPTY, 0, HEAD_ROWS)

    def of_window(self, tree: DraftTree, width: int, rows: int) -> RuleArrays:
        """For a window of the tree's first `width` nodes, padded to `rows` rows."""
        arrays = self._constant._replace(allowed=self._neutral[rows].allowed)
        if self._counts is not None:
            # A copy: the device may still read it when the next tokens are counted.
            arrays = arrays._replace(counts=self._counts.copy())
        if self.masked:
            arrays = arrays._replace(allowed=self._allowed(tree, width, rows))
        return arrays

    def permits(self, path: Path, ids: np.ndarray) -> np.ndarray:
        """Which of some token ids [K] may follow a path: bool [K]."""
        mask = self._drafted_mask(path)
        return np.zeros(len(ids), bool) if mask is None else device.in_mask(mask, ids)

    def commit(self, token: int) -> bool:
        """Takes the reply's next token; whether nothing may follow it."""
        self._committed += 1
        if self._counts is not None:
            self._counts[token] += 1
        self._place, answers = _after(self._rules.thinking, self._place, token)
        stop = token in self._stops
        if self._matcher is not None and answers and not stop:
            self._answer.append(token)
            self._matcher.consume_token(token)
            self._check_matcher()
        self._masks = {path[1:]: mask for path, mask in self._masks.items() if path[:1] == (token,)}
        return stop or (self.masked and self._mask(()) is None)

    def _constant_arrays(self, prompt: tuple[int, ...], vocab_size: int) -> RuleArrays:
        """What no token of the reply changes."""
        rules = self._rules
        arrays = self._neutral[HEAD_ROWS]._replace(
            wanted=jnp.int32(device.RULES_AND_LOGPROBS if rules.logprobs else device.RULES),
            penalties=device.Penalties(
                jnp.float32(rules.repetition_penalty),
                jnp.float32(rules.frequency_penalty),
                jnp.float32(rules.presence_penalty),
            ),
        )
        if rules.repetition_penalty != 1:
            seen = np.zeros(vocab_size, bool)
            seen[list(prompt)] = True
            arrays = arrays._replace(seen=jnp.asarray(seen))
        if rules.logit_bias:
            bias = np.zeros(vocab_size, np.float32)
            for token, value in rules.logit_bias:
                if token >= vocab_size:
                    raise InputError(f"logit_bias: token id {token} is outside 0..{vocab_size - 1}")
                bias[token] = value
            arrays = arrays._replace(bias=jnp.asarray(bias))
        return arrays

    def _allowed(self, tree: DraftTree, width: int, rows: int) -> np.ndarray:
        """Masks [rows, ceil(V / 32)] of the anchor's row and the nodes'."""
        paths: dict[int, Path] = {NO_PARENT: ()}
        for node in range(width):
            paths[node] = (*paths[int(tree.parents[node])], int(tree.tokens[node]))
        allowed = np.tile(self._every, (rows, 1))
        for node, path in paths.items():
            mask = self._drafted_mask(path)
            if mask is not None:  # else the reply has ended, and the row is not read
                allowed[node + 1] = mask
        if rows > width + 1:  # padding: copies of the anchor's row
            allowed[width + 1 :] = allowed[0]
        return allowed

    def _mask(self, path: Path) -> np.ndarray | None:
        """What may follow a path: [ceil(V / 32)] uint32; None where the reply has ended."""
        if path not in self._masks:
            self._masks[path] = self._new_mask(path)
        return self._masks[path]

    def _drafted_mask(self, path: Path) -> np.ndarray | None:
        """`_mask`; None too where the grammar's limits end it on a path that is only drafted.

        Plain decoding might never come there. If the path lands, `commit` meets the limits again.
        """
        try:
            return self._mask(path)
        except InputError:
            if not path:
                raise
            return None

    def _new_mask(self, path: Path) -> np.ndarray | None:
        if path and path[-1] in self._stops:
            return None
        thinking, place = self._rules.thinking, self._place
        answer: list[int] = []  # of the path, what the grammar has to match
        for token in path:
            place, answers = _after(thinking, place, token)
            if answers:
                answer.append(token)
        mask = self._part_mask(place, answer)
        if mask is not None and self._committed + len(path) < self._rules.min_tokens:
            kept = mask & self._no_stop
            mask = kept if kept.any() else mask
        return mask

    def _part_mask(self, place: Place, answer: list[int]) -> np.ndarray | None:
        """The mask of a place in the reply, before `min_tokens`."""
        thinking = self._rules.thinking
        if thinking is not None and (forced := _forced(thinking, place)) is not None:
            return self._only([forced])
        if self._matcher is None:
            return self._every
        if place.part is Part.THINKING:
            return self._no_stop  # a reply without its answer is not complete
        mask = self._grammar_mask(answer)
        if mask is not None and place.part is Part.BEGINNING:
            assert thinking is not None
            assert thinking.begin is not None
            mask = mask | self._only([thinking.begin])
        return mask

    def _grammar_mask(self, answer: list[int]) -> np.ndarray | None:
        """The grammar's mask behind some more tokens; None where it is complete for good."""
        matcher = self._matcher
        assert matcher is not None
        matcher.consume_tokens(answer)
        words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        self._check_matcher()
        matcher.rollback(len(answer))
        mask = np.zeros_like(self._every)
        count = min(
            len(words), len(mask)
        )  # llguidance has a word beyond a vocabulary of whole words
        mask[:count] = words[:count]
        if not (mask & self._no_end).any():
            return None
        # An end that is no stop token stands for none at all.
        return mask & (self._no_end | self._only(self._stops))

    def _new_matcher(self) -> LLMatcher:
        """A matcher behind the committed tokens."""
        grammar = self._rules.grammar
        assert grammar is not None
        matcher = grammar.matcher()
        matcher.consume_tokens(self._answer)
        return matcher

    def _check_matcher(self) -> None:
        assert self._matcher is not None
        if self._matcher.is_error():
            problem = self._matcher.get_error().replace("<non-verbose/>", "")
            # What has failed once fails for ever, and this may have been a drafted path.
            self._matcher = self._new_matcher()
            raise InputError(
                "the grammar became too complex for llguidance's limits in the reply: "
                f"{' '.join(problem.split())[:200]}"
            )

    def _only(self, tokens: Iterable[int]) -> np.ndarray:
        return device.mask_of(tokens, len(self._every))


def _penalised(rules: Rules) -> bool:
    return bool(rules.presence_penalty or rules.frequency_penalty or rules.repetition_penalty != 1)


def _start(thinking: Thinking | None) -> Place:
    if thinking is None:
        return Place(Part.ANSWER)
    return Place(Part.THINKING if thinking.begin is None else Part.BEGINNING)


def _forced(thinking: Thinking, place: Place) -> int | None:
    """The one token that may come next, where the budget is spent."""
    if place.part is Part.CLOSING:
        return thinking.closing[place.tokens]
    if place.part is Part.THINKING and place.tokens == thinking.budget:
        return thinking.closing[0]
    return None


def _after(thinking: Thinking | None, place: Place, token: int) -> tuple[Place, bool]:
    """Where the reply is after a token, and whether the token is the answer's."""
    part, tokens = place
    if thinking is None or part is Part.ANSWER:
        return Place(Part.ANSWER), True
    if part is Part.BEGINNING:
        begins = token == thinking.begin
        return Place(Part.THINKING if begins else Part.ANSWER), not begins
    if _forced(thinking, place) is not None:
        done = tokens + 1 if part is Part.CLOSING else 1
        closed = done == len(thinking.closing)
        return (Place(Part.ANSWER) if closed else Place(Part.CLOSING, done)), False
    if token == thinking.end:
        return Place(Part.ANSWER), False
    return Place(Part.THINKING, tokens + 1), False
