"""Rules side by side at one context length: the prompt is read once, every rule goes on from it.

Going back is a matter of the length: what a reply has written lies behind the prompt, in the
target's cache and in the drafter's. Recurrent states go back to a copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dflash_jax import pricing
from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.decode.recurrence import States, copied
from dflash_jax.engine import LoneDriver, Request, RoundRecord, Stream
from dflash_jax.errors import InputError

TAIL = 24  # last tokens of a prompt that are kept when it is cut: the template's opening of a reply


class Prefilled(NamedTuple):
    """Where a stream stands after its prompt."""

    first: RoundRecord
    length: int
    anchor: int
    lattice: Any
    states: States


class RewoundStream(Stream):
    """A stream over a prompt that the decoder's buffers hold already."""

    def __init__(
        self,
        driver: LoneDriver,
        request: Request,
        rule: pricing.Rule | None,
        prefilled: Prefilled,
    ) -> None:
        super().__init__(driver, request, rule)
        self._prefilled = prefilled

    def _prefill(self) -> RoundRecord:
        first, length, anchor, proposals, states = self._prefilled
        self._state = self._state._replace(
            length=jnp.int32(length), anchor=jnp.int32(anchor), states=copied(states)
        )
        self._length, self._proposals = length, proposals
        self._emit(list(first.tokens))
        return first


def prefill(driver: LoneDriver, request: Request) -> Prefilled:
    """Reads the prompt; `driver` drafts, so that the drafter's context is read too."""
    with driver.stream(request) as stream:
        first = next(stream.rounds())
    assert driver.decoder.buffers is not None  # the stream is closed
    states = copied(driver.decoder.buffers.state.states)
    return Prefilled(first, len(request.prompt), int(first.tokens[0]), stream.proposals, states)


def rewound(driver: LoneDriver, request: Request, prefilled: Prefilled) -> Stream:
    """A stream from where `prefill` stood; no other prompt may have been read since."""
    return RewoundStream(driver, request, driver.new_rule(), prefilled)


def prompt_of_length(tokenizer: Tokenizer, texts: list[str], size: int, start: int) -> list[int]:
    """A chat of `size` tokens: notes from `texts` (from number `start` on, around and around).

    Raises:
      InputError: shorter than the chat template alone.
    """
    question = texts[start % len(texts)]
    notes: list[str] = []
    ids: list[int] = []
    while len(ids) < size:
        content = "\n".join([*notes, question])
        ids = tokenizer.encode_chat([{"role": "user", "content": content}])
        more = max(1, (size - len(ids)) // 20)  # a text has some 20 tokens
        at = start + 1 + len(notes)
        notes += [texts[index % len(texts)] for index in range(at, at + more)]
    if size <= TAIL:
        raise InputError(f"a context of {size} tokens: give more than {TAIL}")
    return ids[: size - TAIL] + ids[-TAIL:]


def interval(auto: np.ndarray, best: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """(ratio of rates, and its 95 % interval), paired by reply; bootstrap of 2,000 draws.

    auto, best: [n, 2]: tokens and seconds of each reply under the two rules.
    """

    def ratio(rows: np.ndarray) -> np.ndarray:
        a, b = auto[rows].sum(axis=-2), best[rows].sum(axis=-2)
        return (a[..., 0] / a[..., 1]) / (b[..., 0] / b[..., 1])

    count = len(auto)
    draws = np.random.default_rng(seed).integers(0, count, (2000, count))
    low, high = np.quantile(ratio(draws), [0.025, 0.975])
    return float(ratio(np.arange(count))), float(low), float(high)
