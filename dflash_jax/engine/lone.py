"""The lone driver: one stream, decoded in rounds, each as wide as the rule says."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import pricing
from dflash_jax.decode.programs import HEAD_ROWS, Round
from dflash_jax.decode.rules import LogProbs
from dflash_jax.decode.sampling import GREEDY, Sampling
from dflash_jax.engine.decoder import Buffers, Decoder
from dflash_jax.engine.reply_rules import ReplyRules
from dflash_jax.engine.rules import NO_RULES, Rules
from dflash_jax.errors import InputError
from dflash_jax.tree.growth import CAP, EMPTY, DraftTree, grow
from dflash_jax.tree.lattice import Proposals
from dflash_jax.tree.masks import MAX_ROWS, window_array

STOP, LENGTH = "stop", "length"
PLAIN = "fixed:0"  # the rule that drafts nothing


@dataclasses.dataclass(frozen=True)
class Request:
    """One reply to decode.

    Raises InputError for an empty prompt, a token budget below 1, or a grammar without the
    checkpoint's stop tokens, one of which ends what matches it.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = GREEDY
    max_tokens: int = 128
    stop_token_ids: frozenset[int] = frozenset()
    rules: Rules = NO_RULES

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("the prompt is empty: give at least one token")
        if self.max_tokens < 1:
            raise InputError(f"max_tokens {self.max_tokens} must be at least 1")
        grammar = self.rules.grammar
        if grammar and not self.stop_token_ids.issuperset(grammar.vocabulary.stop_token_ids):
            raise InputError("a grammar's end is a stop token: do not ignore them")


class RoundRecord(NamedTuple):
    """What one round did; the first of a reply is its prompt's."""

    tokens: tuple[int, ...]  # emitted; cut at a stop, the budget or the context limit
    context_length: int  # committed tokens before the anchor
    width: int
    tree: DraftTree  # all nodes grown, of which the first `width` were verified
    chances: np.ndarray  # landing chance of every node
    landed: np.ndarray  # bool [width]
    round_ms: float  # the whole round, from proposals to proposals
    host_ms: float  # of it: grow, price, dispatch
    sample: bool  # whether round_ms says something about the width
    cached_tokens: int = 0  # of the prompt, that need not be read
    why: Mapping[str, Any] = {}  # the rule's `explain` of this round's width
    logprobs: LogProbs | None = None  # of `tokens`, NumPy; None unless the rules want them


class _Observation(NamedTuple):
    """A round that is still to be learned from."""

    tree: DraftTree
    width: int
    context: int
    round_ms: float
    landed: np.ndarray
    sample: bool
    chances: np.ndarray


class _Read(NamedTuple):
    """What the host has read of a round."""

    report: Any  # programs.Report, NumPy
    emitted: tuple[int, ...]
    logprobs: LogProbs | None


class Stream:
    """One reply. Iterate over `rounds`; `close` when done (a `with` statement does)."""

    def __init__(self, driver: LoneDriver, request: Request, rule: pricing.Rule | None) -> None:
        decoder = driver.decoder
        room = decoder.spec.context_limit - len(request.prompt)
        if room < 1:
            raise InputError(
                f"a prompt of {len(request.prompt)} tokens leaves no room in the context of "
                f"{decoder.spec.context_limit}: shorten it or raise the context limit"
            )
        if max(request.prompt) >= decoder.spec.target.vocab_size or min(request.prompt) < 0:
            raise InputError(
                f"the prompt has token ids outside 0..{decoder.spec.target.vocab_size - 1}"
            )
        self._driver = driver
        self._decoder = decoder
        self._request = request
        self._rule = rule
        self._budget = min(request.max_tokens, room)
        self._sampling = jax.tree.map(jnp.asarray, request.sampling.arrays())
        self._rules: ReplyRules | None = None
        if request.rules != NO_RULES:
            self._rules = ReplyRules(request, decoder.spec.target.vocab_size, decoder.neutral)
        self._state, self._drafter_cache = decoder.take_buffers()
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._closed = False
        self._interrupted: Callable[[], bool] = lambda: False
        self._proposals: Proposals | None = None
        self._to_learn: list[_Observation] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hands the buffers back, once; what the rule learned stays with the driver."""
        if self._closed:
            return
        self._closed = True
        self._decoder.buffers = Buffers(self._state, self._drafter_cache)
        if self._rule is not None:
            self._learn()
            self._driver.keep(self._rule)

    @property
    def proposals(self) -> Proposals | None:
        """What the next round's tree grows from."""
        return self._proposals

    @property
    def token_sha256(self) -> str:
        """Of the emitted ids as little-endian int32."""
        return token_sha256(self.tokens)

    def rounds(self, interrupted: Callable[[], bool] = lambda: False) -> Iterator[RoundRecord]:
        """Prefills, then decodes until a stop token, the budget or the context limit.

        Args:
          interrupted: asked before every chunk of the prompt and every round; once it holds, the
            iteration ends there, with `finish_reason` None.

        Raises:
          RuntimeError: the stream is closed, and another may hold its buffers.
        """
        self._check_open()
        self._interrupted = interrupted
        prompt = self._prefill()
        if prompt is None:
            return
        yield prompt
        sample = False  # the first round after a prompt is no sample
        while self.finish_reason is None and not interrupted():
            self._check_open()
            yield self._round(sample)
            sample = True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this stream is closed: open another")

    # Prompt ------------------------------------------------------------------------------

    def _prefill(self) -> RoundRecord | None:
        """The prompt's record; None when interrupted."""
        start = time.perf_counter()
        decoder, executables = self._decoder, self._decoder.executables
        chunk = decoder.spec.policy.prefill_chunk
        prompt = np.asarray(self._request.prompt, np.int32)
        self._state = self._state._replace(length=jnp.int32(0))
        reading = decoder.prompt_cache.read(prompt) if decoder.prompt_cache else None
        cached = 0
        if reading is not None:
            cached = reading.tokens
            self._state, self._drafter_cache = reading.load(self._state, self._drafter_cache)
        waiting: Any = ()  # reports of the last chunk but one, and of the last
        running: Any = ()
        for begin in range(cached, len(prompt), chunk):
            # One chunk is enqueued ahead of the one that runs: enough to keep the device busy,
            # and an interruption need not wait for the whole prompt.
            jax.block_until_ready(waiting)
            if self._interrupted():
                return None
            piece = prompt[begin : begin + chunk]
            tokens = jnp.asarray(np.pad(piece, (0, chunk - len(piece))))
            rules = decoder.neutral[HEAD_ROWS]
            if self._rules is not None and begin + chunk >= len(prompt):
                rules = self._rules.of_prompt()
            done: Round = executables.prefill(
                decoder.weights, self._state, tokens, jnp.int32(len(piece)), self._sampling, rules
            )
            self._state, waiting = done.state, running
            running = done.report
            # A plain stream's prompt may be a drafted one's next time.
            if self._rule is not None or (reading is not None and decoder.drafter is not None):
                assert executables.extend is not None
                self._drafter_cache = executables.extend(
                    decoder.drafter, self._drafter_cache, done.taps, jnp.int32(begin)
                )
            if reading is not None:
                reading.save(begin, self._state, self._drafter_cache)
        self._length = len(prompt)
        done = done._replace(taps=decoder.no_taps)  # the prompt's are in the context already
        read = self._read(done, self._dispatch_draft(done, jnp.int32(0)))
        prompt_ms = (time.perf_counter() - start) * 1e3
        nothing_landed = np.zeros(0, bool)
        return RoundRecord(
            read.emitted,
            0,
            0,
            EMPTY,
            np.zeros(0),
            nothing_landed,
            prompt_ms,
            0.0,
            False,
            cached,
            logprobs=read.logprobs,
        )

    # Rounds ------------------------------------------------------------------------------

    def _round(self, sample: bool) -> RoundRecord:
        start = time.perf_counter()
        decoder = self._decoder
        context = self._length
        tree, chances, width = self._choose(context)
        rows = decoder.spec.policy.rows(width)
        window = window_array(tree, width, rows)
        rules = decoder.neutral[rows]
        if self._rules is not None:
            rules = self._rules.of_window(tree, width, rows)
        done: Round = decoder.executables.verify[width](
            decoder.weights, self._state, window, self._sampling, rules
        )
        self._state = done.state
        proposals = self._dispatch_draft(done, done.report.emitted)
        host_ms = (time.perf_counter() - start) * 1e3
        # While the device works:
        why = self._rule.explain() if self._rule is not None else {}
        if self._rule is not None and len(self._to_learn) >= self._rule.learn_every:
            self._learn()
        read = self._read(done, proposals)
        round_ms = (time.perf_counter() - start) * 1e3
        self._length += int(read.report.emitted)
        landed = read.report.landed[:width]
        if len(tree.tokens):
            seen = _Observation(tree, width, context, round_ms, landed, sample, chances)
            self._to_learn.append(seen)
        return RoundRecord(
            read.emitted,
            context,
            width,
            tree,
            chances,
            landed,
            round_ms,
            host_ms,
            sample,
            why=why,
            logprobs=read.logprobs,
        )

    def _choose(self, context: int) -> tuple[DraftTree, np.ndarray, int]:
        """Grows the tree and picks the width."""
        rule, driver = self._rule, self._driver
        if rule is None or self._proposals is None:
            return EMPTY, np.zeros(0), 0
        permits = self._rules.permits if self._rules and self._rules.masked else None
        tree = grow(*self._proposals, driver.cap, permits)
        sampled = not self._request.sampling.greedy
        chances = driver.landing.chances(tree.own, tree.parents, tree.depths - 1, sampled)
        return tree, chances, self._decoder.compiled_width(rule.choose(chances, context))

    def _learn(self) -> None:
        """Teaches the rule and the landing model the rounds that they do not know yet."""
        sampled = not self._request.sampling.greedy
        assert self._rule is not None
        waiting, self._to_learn = self._to_learn, []
        for seen in waiting:
            self._rule.observe(
                width=seen.width,
                context_length=seen.context,
                round_ms=seen.round_ms,
                landed=seen.landed,
                sample=seen.sample,
                chances=seen.chances,
            )
            tree = seen.tree
            self._driver.landing.observe(
                tree.own, tree.parents, tree.depths - 1, seen.landed, sampled
            )

    def _dispatch_draft(self, done: Round, count: jax.Array) -> Any:
        """Enqueues the next block behind the verified window; its proposals, on the device."""
        decoder = self._decoder
        if self._rule is None or not self._drafter_reaches():
            return None
        assert decoder.executables.draft is not None
        self._drafter_cache, proposals = decoder.executables.draft(
            decoder.drafter,
            self._drafter_cache,
            done.taps,
            count,
            self._state.length,
            self._state.anchor,
            self._sampling,
        )
        return proposals

    def _read(self, done: Round, proposals: Any) -> _Read:
        """Waits for a round, emits its tokens, and keeps the next block's proposals."""
        if self._rules is None:
            report, self._proposals = jax.device_get((done.report, proposals))
            return _Read(report, self._emit(_tokens(report)), None)
        # The report first: the next masks are made while the drafter still runs.
        wanted = done.logprobs if self._rules.wants_logprobs else None
        report, logprobs = jax.device_get((done.report, wanted))
        emitted = self._emit(_tokens(report))
        self._proposals = jax.device_get(proposals)
        return _Read(report, emitted, jax.tree.map(lambda rows: rows[: len(emitted)], logprobs))

    def _drafter_reaches(self) -> bool:
        """Whether the next block's positions are the drafter's to know.

        A round commits at most MAX_ROWS tokens, and the block follows them; beyond that the stream
        goes on plainly.
        """
        drafter = self._decoder.spec.drafter
        assert drafter is not None
        last = self._length + MAX_ROWS + drafter.block_size
        return last <= drafter.max_position_embeddings

    def _emit(self, tokens: list[int]) -> tuple[int, ...]:
        """Cuts a round's tokens where plain decoding would have stopped."""
        emitted: list[int] = []
        for token in tokens:
            emitted.append(token)
            complete = self._rules is not None and self._rules.commit(token)
            if complete or token in self._request.stop_token_ids:
                self.finish_reason = STOP
            elif len(self.tokens) + len(emitted) >= self._budget:
                self.finish_reason = LENGTH
            if self.finish_reason:
                break
        self.tokens += emitted
        return tuple(emitted)


def _tokens(report: Any) -> list[int]:
    return report.tokens[: int(report.emitted)].tolist()


class LoneDriver:
    """Decodes one stream at a time, and keeps what its rounds have taught."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        rule: str = "renewal",
        cap: int = CAP,
        landing: pricing.LandingModel | None = None,
    ) -> None:
        """
        Args:
          rule: a name that `pricing.make_rule` knows; "fixed:0" is plain decoding and needs no
            drafter.
          cap: most nodes of a tree.
          landing: calibration found by the drafter's evaluation; None trusts the drafter.

        Raises:
          InputError: an unknown rule, or one that drafts without a drafter.
        """
        self.decoder = decoder
        self.cap = cap
        self.landing = landing or pricing.LandingModel()
        self._calibrations: dict[str, Any] = {}  # by rule
        self.switch(rule)

    @property
    def plain(self) -> bool:
        return self.rule == PLAIN

    @property
    def widths(self) -> tuple[int, ...]:
        """Those that a rule may choose."""
        return tuple(width for width in self.decoder.widths if width <= self.cap)

    @property
    def rules(self) -> tuple[str, ...]:
        """Those that `switch` takes."""
        return pricing.RULES if self.decoder.drafter is not None else (PLAIN,)

    @property
    def calibration(self) -> Any:
        """What the present rule keeps, by band; seeds the next stream."""
        return self._calibrations.get(self.rule)

    def switch(self, rule: str) -> None:
        """Another rule, from the next stream on; the others' calibrations wait for their return.

        Any thread may call it while streams run.

        Raises:
          InputError: an unknown rule, one that drafts without a drafter, or a fixed width that is
            not compiled.
        """
        self._make_rule(rule)  # an unknown name is an error now, not at the next stream
        if rule != PLAIN and self.decoder.drafter is None:
            raise InputError(f"rule {rule}: no drafter is loaded; give one, or --width=0")
        kind, _, width = rule.partition(":")
        if kind == "fixed" and int(width) not in self.decoder.widths:
            compiled = ", ".join(map(str, self.decoder.widths))
            raise InputError(f"rule {rule}: compiled are the widths {compiled}")
        self.rule = rule

    def keep(self, rule: pricing.Rule) -> None:
        """Keeps what a stream's rule has learned."""
        self._calibrations[rule.name] = rule.keep()

    def _make_rule(self, name: str) -> pricing.Rule:
        return pricing.make_rule(name, cap=self.cap, prior=self.decoder.prices or None)

    def stream(self, request: Request) -> Stream:
        """Opens a stream; the decoder's only one until it is closed.

        Raises:
          InputError: the prompt does not fit.
        """
        return Stream(self, request, self.new_rule())

    def new_rule(self) -> pricing.Rule | None:
        """A rule for the next stream, with what the last ones have taught; None when plain."""
        name = self.rule  # once: another thread may switch it
        if name == PLAIN:
            return None
        rule = self._make_rule(name)
        rule.seed(self._calibrations.get(name))
        return rule


def token_sha256(tokens: list[int]) -> str:
    """sha256 over token ids as little-endian int32, hex."""
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()
