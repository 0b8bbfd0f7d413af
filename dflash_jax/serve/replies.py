"""A request's replies: decoded in the worker's thread, heard on the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from dflash_jax.engine.lone import LENGTH, STOP, Request, RoundRecord, token_sha256
from dflash_jax.engine.turns import (
    Ending,
    Party,
    QueueClosedError,
    QueueFullError,
    Turn,
    Turns,
)
from dflash_jax.serve.errors import INVALID, OVERLOADED, SERVER, ApiError
from dflash_jax.serve.logprobs import Known, LogprobReader
from dflash_jax.serve.reply_parser import ReplyParser
from dflash_jax.serve.reply_parts import Part, joined
from dflash_jax.serve.responses import (
    CompletionDetails,
    PromptDetails,
    Round,
    RoundPiece,
    Timings,
    Usage,
)
from dflash_jax.serve.text import ReplyText

TOOL_CALLS = "tool_calls"


@dataclasses.dataclass(frozen=True)
class Piece:
    """More of one choice. The last piece of a choice has its finish reason."""

    index: int
    parts: Sequence[Part]
    logprobs: Sequence[Known] = ()
    finish_reason: str | None = None
    error: ApiError | None = None
    round: Round | None = None  # if asked for


class ClientGoneError(Exception):
    """Nobody listens any more."""


class Choice:
    """One reply: a listener of the worker, which it tells as little as it can.

    Its fields are the worker's until the last piece has been posted.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        text: ReplyText,
        parser: ReplyParser | None = None,
        rounds_too: bool = False,
        logprobs: LogprobReader | None = None,
    ) -> None:
        """
        Args:
          parser: reads what the text consists of; left out, it is content.
          rounds_too: every round is a piece that says how its tokens came.
          logprobs: for a request whose rules want them.
        """
        self.index = index
        self.request = request
        self.tokens: list[int] = []  # up to the one that completed a stop string
        self.finish_reason: str | None = None
        self.rounds = self.drafted = self.accepted = 0
        self.started = self.first = self.last = 0.0  # perf_counter; 0: not yet
        self.first_tokens = 0  # of the prompt's forward
        self.reasoning_tokens = 0
        self.cached_tokens = 0  # of the prompt, not read again
        self.ended = False
        self._text = text
        self._parser = parser or ReplyParser()
        self._rounds_too = rounds_too
        self._logprob_reader = logprobs
        self.logprobs: list[Known] | None = None if logprobs is None else []
        self.post: Callable[[Piece], None] = lambda piece: None

    @property
    def seed(self) -> int:
        return self.request.sampling.seed

    @property
    def token_sha256(self) -> str:
        return token_sha256(self.tokens)

    def on_start(self) -> None:
        self.started = time.perf_counter()

    def on_round(self, record: RoundRecord) -> bool:
        texts: list[str] = []
        parts: list[Part] = []
        offsets: list[int] = []
        for token in record.tokens:
            offsets.append(self._text.characters)
            texts.append(self._text.push(token))
            parts += self._parsed(texts[-1])
            if self._complete:
                break
        kept = len(texts)
        self.tokens += record.tokens[:kept]
        self.last = time.perf_counter()
        prompt_round = not self.first
        if prompt_round:
            self.first, self.first_tokens = self.last, kept
            self.cached_tokens = record.cached_tokens
        else:
            self.rounds += 1
            self.drafted += record.width
            self.accepted += min(kept, int(record.landed.sum()))
        told = _round(record, texts) if self._rounds_too else None
        logprobs = self._read_logprobs(record, offsets)
        # The first bytes of a stream go out with the first token.
        if parts or logprobs or prompt_round or told:
            self.post(Piece(self.index, joined(parts), logprobs, round=told))
        return not self._complete

    def _read_logprobs(self, record: RoundRecord, offsets: list[int]) -> list[Known]:
        """Those of the round's kept tokens, for whom they are wanted."""
        if self._logprob_reader is None or self.logprobs is None or record.logprobs is None:
            return []
        kept = record.tokens[: len(offsets)]
        found = self._logprob_reader.read(kept, offsets, record.logprobs)
        self.logprobs += found
        return found

    @property
    def _complete(self) -> bool:
        """Whether the reply ends here, whatever the driver would go on with."""
        return self._text.stopped or self._parser.done

    def _parsed(self, text: str) -> Sequence[Part]:
        """The parts of one token's text."""
        thought = self._parser.reasoning
        parts = self._parser.push(text)
        self.reasoning_tokens += thought or self._parser.reasoning
        return parts

    def on_end(self, ending: Ending, reason: str | None) -> None:
        cut = self._text.stopped or ending is not Ending.FINISHED or reason != STOP
        parts = joined([*self._parser.push(self._text.finish()), *self._parser.finish(cut)])
        error = None
        if ending is Ending.FINISHED:
            self.finish_reason = STOP if self._complete else reason
            if self.finish_reason == STOP and self._parser.calls and self._parser.whole:
                self.finish_reason = TOOL_CALLS
        elif ending is Ending.CLOSED:
            self.finish_reason = LENGTH  # cut short, as by a budget
            if not self.started:
                error = shutting_down()
        elif ending is Ending.REFUSED:
            error = ApiError(400, reason or "", code="invalid_value")
        elif ending is Ending.FAILED:
            error = ApiError(500, "decoding failed: see the server's log", SERVER)
        self.ended = True
        self.post(Piece(self.index, parts, (), self.finish_reason or STOP, error))


def _round(record: RoundRecord, texts: Sequence[str]) -> Round:
    landed = int(record.landed.sum())  # drafted tokens come before the target's own
    prices = record.why.get("prices_ms")
    if isinstance(prices, Mapping):
        prices = [prices.get(width) for width in range(max(prices, default=-1) + 1)]
    return Round(
        context_length=record.context_length,
        width=record.width,
        round_ms=round(record.round_ms, 3),
        pieces=[
            RoundPiece(token=token, text=text, drafted=number < landed)
            for number, (token, text) in enumerate(zip(record.tokens, texts, strict=False))
        ],
        prices_ms=prices and [ms and round(ms, 3) for ms in prices],
    )


class Replies:
    """The choices of one request, submitted together."""

    def __init__(self, turns: Turns, choices: Sequence[Choice], timeout_s: float) -> None:
        """Raises `ApiError` 429 when the queue has no room, 503 when it is closed."""
        self.choices = choices
        self.gone = False  # whether the client has left
        self._turns = turns
        self._timeout_s = timeout_s
        self._submitted = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        for choice in choices:
            choice.post = self._post

    def submit(self, draft: bool) -> None:
        """Queues the choices.

        Raises:
          ApiError: 400, there can never be room; 429, there is none now; 503, shutting down.
        """
        if len(self.choices) > self._turns.capacity:
            raise ApiError(
                400,
                f"{len(self.choices)} replies in one request: the queue takes "
                f"{self._turns.capacity}",
                INVALID,
                param="n",
            )
        turns = [Turn(choice.request, choice, draft) for choice in self.choices]
        try:
            self._party: Party = self._turns.submit(turns)
        except QueueFullError:
            raise ApiError(
                429,
                f"the queue is full ({self._turns.capacity} replies wait): try again later",
                OVERLOADED,
                code="queue_full",
                headers={"Retry-After": str(self._turns.retry_after_s())},
            ) from None
        except QueueClosedError:
            raise shutting_down() from None

    async def pieces(self) -> AsyncIterator[Piece]:
        """Every choice's pieces, until all have ended.

        Raises:
          ApiError: 504, the request took longer than it may; 503, shut down before anything was
            decoded; 500.
          ClientGoneError: `leave` was called.
        """
        deadline = self._submitted + self._timeout_s
        left = len(self.choices)
        while left:
            try:
                piece = await asyncio.wait_for(
                    self._pieces.get(), max(0.0, deadline - time.perf_counter())
                )
            except TimeoutError:
                self.cancel()
                raise ApiError(
                    504,
                    f"not done within this server's limit of {self._timeout_s:g} s a request",
                    SERVER,
                    code="timeout",
                ) from None
            if piece is None:
                raise ClientGoneError
            # When one choice was begun, those that never were are cut short too.
            if piece.error and (piece.error.status != 503 or not self._begun()):
                raise piece.error
            left -= piece.finish_reason is not None
            yield piece

    def _begun(self) -> bool:
        return any(choice.started for choice in self.choices)

    def cancel(self) -> None:
        """Ends what still waits or runs; any number of times."""
        self._turns.cancel(self._party)

    def leave(self) -> None:
        """The client is gone: `cancel`, and `pieces` ends."""
        self.gone = True
        self.cancel()
        self._pieces.put_nowait(None)

    def _post(self, piece: Piece) -> None:
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:  # the event loop is closed: nobody listens
            self.gone = True

    # What is known at the end ------------------------------------------------------------

    def usage(self) -> Usage:
        # A prompt counts once, however many replies it gets; as its first reply found it.
        firsts = {id(choice.request.prompt): choice for choice in reversed(self.choices)}
        prompt = sum(len(choice.request.prompt) for choice in firsts.values())
        cached = sum(choice.cached_tokens for choice in firsts.values())
        completion = sum(len(choice.tokens) for choice in self.choices)
        return Usage(
            prompt_tokens=prompt,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
            completion_tokens=completion,
            total_tokens=prompt + completion,
            drafted=sum(choice.drafted for choice in self.choices),
            accepted=sum(choice.accepted for choice in self.choices),
            rounds=sum(choice.rounds for choice in self.choices),
            completion_tokens_details=CompletionDetails(
                reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices)
            ),
        )

    def timings(self) -> Timings:
        begun = [choice for choice in self.choices if choice.first]
        prompt_s = sum(choice.first - choice.started for choice in begun)
        decode_s = sum(choice.last - choice.first for choice in begun)
        prompt = sum(len(choice.request.prompt) - choice.cached_tokens for choice in begun)
        decoded = sum(len(choice.tokens) - choice.first_tokens for choice in begun)
        rounds = sum(choice.rounds for choice in begun)
        drafted = sum(choice.drafted for choice in begun)
        started = min((choice.started for choice in begun), default=time.perf_counter())
        return Timings(
            queue_ms=round((started - self._submitted) * 1e3, 3),
            prompt_ms=round(prompt_s * 1e3, 3),
            prompt_tok_s=_rate(prompt, prompt_s),
            decode_ms=round(decode_s * 1e3, 3),
            decode_tok_s=_rate(decoded, decode_s),
            tokens_per_round=_rate(decoded, rounds),
            mean_width=_rate(drafted, rounds),
        )

    def first_token_s(self) -> float | None:
        """From the request to its first token."""
        firsts = [choice.first for choice in self.choices if choice.first]
        return min(firsts) - self._submitted if firsts else None


def _rate(count: int, per: float) -> float | None:
    return round(count / per, 3) if per else None


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "the server is shutting down",
        OVERLOADED,
        code="shutting_down",
        headers={"Retry-After": "30"},
    )
