"""Rounds of made-up models at one context: how long they take, and the parts of that.

Random models do not agree, so a share of the drafted positions is given the target's own tokens,
known from plain decoding: else no path of a window would ever be committed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import pricing
from dflash_jax.bench.contexts import Prefilled, RewoundStream
from dflash_jax.engine import Decoder, LoneDriver, Request, RoundRecord
from dflash_jax.engine.decoder import Buffers
from dflash_jax.tree.growth import EMPTY, DraftTree
from dflash_jax.tree.lattice import Proposals
from dflash_jax.tree.masks import MAX_ROWS, window_array

_CERTAIN = 30.0  # the log-chance that a known token's siblings lose
_TIMINGS = 10  # of each part,
_UNTIMED = 3  # after some whose buffers still find their places
_COPIES = 8  # between two looks at the clock, which takes as long as a small copy


class KnowingStream(RewoundStream):
    """A stream whose proposals hold the reply's tokens at a share of its positions.

    Args:
      known: the reply, as far as it is known.
      landing: the share, 0 to 1.
    """

    def __init__(
        self,
        driver: LoneDriver,
        request: Request,
        rule: pricing.Rule | None,
        prefilled: Prefilled,
        known: list[int],
        landing: float,
    ) -> None:
        super().__init__(driver, request, rule, prefilled)
        self._known, self._landing = known, landing
        self._rng = np.random.default_rng(0)

    def _choose(self, context: int) -> tuple[DraftTree, np.ndarray, int]:
        if self._proposals is not None:
            begin = context - len(self._request.prompt) + 1
            depth = len(self._proposals.candidates)
            right = np.array(self._known[begin : begin + depth], np.int32)
            told = np.flatnonzero(self._rng.random(len(right)) < self._landing)
            self._proposals = _with_tokens(self._proposals, told, right[told])
        return super()._choose(context)


def _with_tokens(proposals: Proposals, positions: np.ndarray, tokens: np.ndarray) -> Proposals:
    """A certain candidate at some positions, in place of the last one."""
    candidates, chances = (np.array(part) for part in proposals)
    for position, token in zip(positions, tokens, strict=True):
        (places,) = np.nonzero(candidates[position] == token)
        place = places[0] if len(places) else -1
        candidates[position, place] = token
        chances[position] -= _CERTAIN
        chances[position, :, place] = 0
    return Proposals(candidates, chances)


class Rounds(NamedTuple):
    """Some rounds at one width."""

    tokens: list[int]  # the first is the prompt's
    records: list[RoundRecord]  # without the prompt's

    def median(self, field: str) -> float:
        """Of a time; the first round after the prompt is left out where there are others."""
        times = [getattr(record, field) for record in self.records]
        return statistics.median(times[1:] or times)


def rounds(stream: KnowingStream, count: int) -> Rounds:
    """At most `count` rounds of a stream, which is then closed."""
    records: list[RoundRecord] = []
    with stream:
        for record in stream.rounds():
            records.append(record)
            if len(records) > count:
                break
    return Rounds(stream.tokens, records[1:])


class Parts(NamedTuple):
    """Medians, each enqueued and waited for by itself."""

    verify_ms: float
    draft_ms: float | None  # None without a drafter


def parts(decoder: Decoder, prefilled: Prefilled, width: int, sampling: Any) -> Parts:
    """Times verify and draft behind a prompt that the decoder's buffers hold."""
    spec, executables = decoder.spec, decoder.executables
    state, cache = decoder.take_buffers()
    tree = EMPTY
    if width:  # tokens that no tokeniser knows: nothing lands
        unknown, ones = np.full(width, spec.vocab_size, np.int32), np.ones(width, np.int32)
        tree = DraftTree(unknown, np.full(width, -1), ones, np.zeros(width))
    window = jnp.asarray(window_array(tree, width, spec.policy.rows(width)))
    arrays = jax.tree.map(jnp.asarray, sampling.arrays())
    verify_ms, draft_ms = [], []
    state = state._replace(length=jnp.int32(prefilled.length), anchor=jnp.int32(prefilled.anchor))
    for _ in range(_UNTIMED + _TIMINGS):
        # The states go on from one timing to the next, a token each, and what else came out is
        # dropped, as in rounds: else buffers lie elsewhere, and a GPU records its launches anew.
        jax.block_until_ready(state)
        begin = time.perf_counter()
        done = executables.verify[width](
            decoder.weights, state, window, arrays, decoder.neutral[len(window)]
        )
        jax.block_until_ready(done)
        verified = time.perf_counter()
        state = done.state
        if executables.draft is not None:
            cache, proposals = executables.draft(
                decoder.drafter,
                cache,
                done.taps,
                done.report.emitted,
                state.length,
                state.anchor,
                arrays,
            )
            jax.block_until_ready((cache, proposals))
            draft_ms.append((time.perf_counter() - verified) * 1e3)
            del proposals
        del done
        verify_ms.append((verified - begin) * 1e3)
    decoder.buffers = Buffers(state, cache)
    drafting = statistics.median(draft_ms[_UNTIMED:]) if draft_ms else None
    return Parts(statistics.median(verify_ms[_UNTIMED:]), drafting)


def copy_bandwidth(size: int) -> float:
    """Bytes a second, read and written, of copying `size` bytes on the device: the best of ten."""
    data = jnp.zeros(size // 4, jnp.uint32)
    copy = jax.jit(lambda x: x + 1)  # a plain copy might be done by sharing
    times = []
    for _ in range(1 + 10):
        begin = time.perf_counter()
        for _ in range(_COPIES):
            data = copy(data)
        jax.block_until_ready(data)
        times.append(time.perf_counter() - begin)
    return 2 * size * _COPIES / min(times[1:])


def room(context: int, rounds_: int) -> int:
    """Tokens of context that `rounds_` rounds may come to, the window behind them included."""
    return context + (rounds_ + 2) * MAX_ROWS
