"""Streams in turn: a bounded queue of requests, and the one thread that owns the drivers."""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dflash_jax.decode.programs import new_drafter_cache, new_target_state
from dflash_jax.engine.decoder import Buffers, Decoder
from dflash_jax.engine.lone import STOP, LoneDriver, Request, RoundRecord
from dflash_jax.errors import InputError

_log = logging.getLogger(__name__)
_LONGEST_RETRY_S = 60
_MEAN_OVER = 8  # streams over which the mean time of one is taken


class QueueFullError(Exception):
    """The queue has no room for these streams now."""


class QueueClosedError(Exception):
    """No streams are taken any more."""


class Ending(enum.Enum):
    """Why a stream ended."""

    FINISHED = "finished"  # by the driver's stop, or its listener's
    CANCELLED = "cancelled"  # by whoever had asked for it
    CLOSED = "closed"  # the queue closed before or while it ran
    REFUSED = "refused"  # what the request asks for cannot be done after all
    FAILED = "failed"  # an error of ours; it is in the log


class Listener(Protocol):
    """Hears one stream. Called in the worker's thread: must return at once and raise nothing."""

    def on_start(self) -> None:
        """Its turn has come."""

    def on_round(self, record: RoundRecord) -> bool:
        """A round's tokens; returns whether to go on."""

    def on_end(self, ending: Ending, reason: str | None) -> None:
        """The last call, also of a stream that never started.

        The reason is the driver's finish reason when FINISHED, and says why when REFUSED.
        """


class Drivers(NamedTuple):
    """Two drivers of one decoder."""

    drafted: LoneDriver
    plain: LoneDriver


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """One stream to decode."""

    request: Request
    listener: Listener
    draft: bool = True


class Party:
    """The streams that one client asked for together."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.waiting = collections.deque(turns)
        self.cancelled = False


class Turns:
    """The queue. Any thread may call its methods, none of which waits for a stream.

    One stream is decoded at a time, to its end. Parties take turns, in the order in which they
    came: each has one of its streams decoded, then goes to the back, so that a client that asks for
    many replies does not keep the others waiting for all of them.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: streams that may wait, beside the one that runs."""
        self.capacity = capacity
        self._changed = threading.Condition()
        self._parties: collections.deque[Party] = collections.deque()
        self._closed = False
        self._running = 0
        self._mean_s = 1.0  # of a stream

    @property
    def waiting(self) -> int:
        """Streams that wait."""
        with self._changed:
            return self._count()

    @property
    def running(self) -> int:
        """Streams being decoded: 0 or 1."""
        return self._running

    @property
    def closed(self) -> bool:
        return self._closed

    def submit(self, turns: Sequence[Turn]) -> Party:
        """Queues streams, all or none.

        Raises:
          QueueFullError, QueueClosedError
        """
        party = Party(turns)
        with self._changed:
            if self._closed:
                raise QueueClosedError
            # A stream that finds the worker idle does not wait.
            free = self.capacity - self._count() + (not self._running)
            if len(turns) > free:
                raise QueueFullError
            self._parties.append(party)
            self._changed.notify()
        return party

    def cancel(self, party: Party) -> None:
        """Ends a party's streams: those that wait now, one that runs within a round."""
        with self._changed:
            party.cancelled = True
            dropped = list(party.waiting)
            party.waiting.clear()
            if party in self._parties:
                self._parties.remove(party)
        for turn in dropped:
            turn.listener.on_end(Ending.CANCELLED, None)

    def close(self) -> None:
        """Takes no more; ends the streams that wait, and the one that runs within a round."""
        with self._changed:
            self._closed = True
            dropped = [turn for party in self._parties for turn in party.waiting]
            self._parties.clear()
            self._changed.notify()
        for turn in dropped:
            turn.listener.on_end(Ending.CLOSED, None)

    def retry_after_s(self) -> int:
        """Whole seconds after which a refused client may find room."""
        return min(_LONGEST_RETRY_S, max(1, math.ceil(self._mean_s * self.waiting / 2)))

    def serve(self, drivers: Drivers) -> None:
        """The worker: decodes streams until `close`."""
        while (taken := self._take()) is not None:
            party, turn = taken
            begin = time.perf_counter()
            ending, reason = self._decode(party, turn, drivers)
            with self._changed:
                self._running = 0
                seconds = time.perf_counter() - begin
                self._mean_s += (seconds - self._mean_s) / _MEAN_OVER
            turn.listener.on_end(ending, reason)

    def _count(self) -> int:
        return sum(len(party.waiting) for party in self._parties)

    def _take(self) -> tuple[Party, Turn] | None:
        """The next stream, once there is one; None when closed."""
        with self._changed:
            while not self._parties and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            party = self._parties.popleft()
            turn = party.waiting.popleft()
            if party.waiting:
                self._parties.append(party)
            self._running = 1
            return party, turn

    def _decode(self, party: Party, turn: Turn, drivers: Drivers) -> tuple[Ending, str | None]:
        driver = drivers.drafted if turn.draft else drivers.plain

        def interrupted() -> bool:
            return party.cancelled or self._closed

        try:
            turn.listener.on_start()
            with driver.stream(turn.request) as stream:
                for record in stream.rounds(interrupted):
                    if not turn.listener.on_round(record):
                        return Ending.FINISHED, STOP
        except InputError as error:  # between two rounds: the buffers are as good as ever
            return Ending.REFUSED, str(error)
        except Exception:  # noqa: BLE001 - the worker outlives whatever one stream runs into
            _log.exception("a stream failed")
            _renew_buffers(driver.decoder)
            return Ending.FAILED, None
        if stream.finish_reason is not None:
            return Ending.FINISHED, stream.finish_reason
        return Ending.CANCELLED if party.cancelled else Ending.CLOSED, None


def _renew_buffers(decoder: Decoder) -> None:
    """Buffers of which nobody knows what a failed call has left are not handed on."""
    decoder.buffers = None  # their memory is needed for the new ones
    if decoder.prompt_cache is not None:
        decoder.prompt_cache.clear()
    spec = decoder.spec
    cache = new_drafter_cache(spec) if decoder.drafter is not None else None
    decoder.buffers = Buffers(new_target_state(spec), cache)
