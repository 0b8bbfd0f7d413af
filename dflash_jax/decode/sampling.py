"""The target's own pick from each row's logits: greedy, or a keyed Gumbel-max draw."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decode.noise import gumbel, gumbel_rows, split_seed
from dflash_jax.errors import InputError

# Below this temperature a draw is greedy: the noise could only break exact ties.
GREEDY_TEMPERATURE = 1e-5
TOP_K_OFF = 0
# Up to this top-k, a draw looks at the highest logits alone.
FEW = 64
# Draws are uniform long before; an infinite temperature would make NaNs of filtered tokens' -inf,
# and one near float32's largest flushes all scores to 0, so that the filters keep everything.
_HOTTEST = 1e30
_LARGEST_TOP_K = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request, checked.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 mean off. Filters act in this
    order: temperature, top-k, top-p, min-p. Tokens that tie with the last one kept are kept.
    """

    temperature: float = 0.0
    top_k: int = TOP_K_OFF
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature {self.temperature} must be a number of at least 0")
        if self.top_k < -1:
            raise InputError(f"top_k {self.top_k} must be at least 1, or 0 or -1 for off")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p} must be above 0 and at most 1 (1 is off)")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p {self.min_p} must be between 0 (off) and 1")
        if not 0 <= self.seed < 2**64:
            raise InputError(f"seed {self.seed} must be between 0 and 2^64 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def arrays(self) -> SamplingArrays:
        """What the compiled functions take, NumPy."""
        return SamplingArrays(
            temperature=np.float32(0 if self.greedy else min(self.temperature, _HOTTEST)),
            top_k=np.int32(min(max(self.top_k, TOP_K_OFF), _LARGEST_TOP_K)),
            top_p=np.float32(self.top_p),
            log_min_p=np.float32(math.log(self.min_p) if self.min_p else -math.inf),
            seed=split_seed(self.seed),
        )


GREEDY = Sampling()


class SamplingArrays(NamedTuple):
    """`Sampling` as arrays of fixed shape: a new request compiles nothing."""

    temperature: Any  # [] float32, 0 when greedy
    top_k: Any  # [] int32, 0 when off
    top_p: Any  # [] float32
    log_min_p: Any  # [] float32, -inf when off
    seed: Any  # [2] uint32


def picks(logits: jax.Array, positions: jax.Array, sampling: SamplingArrays) -> jax.Array:
    """Each row's pick.

    Args:
      logits: [T, V] float32.
      positions: [T] int32, absolute positions of the tokens being picked.
      sampling: the request's parameters.

    Returns:
      [T] int32; the lowest id among equals.
    """
    return jax.lax.switch(pick_branch(sampling), pickers(logits, positions, sampling))


def pick_branch(sampling: SamplingArrays) -> jax.Array:
    """Which of the `pickers` is the request's: [] int32."""
    few = (sampling.top_k > 0) & (sampling.top_k <= FEW)
    return jnp.where(sampling.temperature > 0, jnp.where(few, 1, 2), 0)


def pickers(
    logits: jax.Array, positions: jax.Array, sampling: SamplingArrays
) -> list[Callable[[], jax.Array]]:
    """The ways to pick that `pick_branch` chooses from."""
    return [
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
        lambda: _pick_among_few(logits, positions, sampling),
        lambda: _pick_among_all(logits, positions, sampling),
    ]


def _pick_among_few(logits: jax.Array, positions: jax.Array, sampling: SamplingArrays) -> jax.Array:
    """Draws when top-k leaves at most FEW tokens: no pass over the vocabulary but one."""
    values, ids = jax.lax.top_k(logits, min(FEW, logits.shape[-1]))
    noise = gumbel(sampling.seed, positions[:, None], ids, xp=jnp)
    scores = filtered(values, sampling) + noise
    best = scores == scores.max(axis=-1, keepdims=True)
    return jnp.where(best, ids, logits.shape[-1]).min(axis=-1).astype(jnp.int32)


def _pick_among_all(logits: jax.Array, positions: jax.Array, sampling: SamplingArrays) -> jax.Array:
    noise = gumbel_rows(sampling.seed, positions, logits.shape[-1])
    return jnp.argmax(filtered(logits, sampling) + noise, axis=-1).astype(jnp.int32)


def filtered(logits: jax.Array, sampling: SamplingArrays) -> jax.Array:
    """Logits [T, n] less their maximum, over the temperature; -inf where filtered out."""
    # The maximum goes first, so that no temperature overflows.
    scores = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
    scores = jax.lax.cond(
        sampling.top_k > 0, lambda s: _keep_top_k(s, sampling.top_k), lambda s: s, scores
    )
    scores = jax.lax.cond(
        sampling.top_p < 1, lambda s: _keep_top_p(s, sampling.top_p), lambda s: s, scores
    )
    return jnp.where(scores >= sampling.log_min_p, scores, -jnp.inf)


def _keep_top_k(scores: jax.Array, top_k: jax.Array) -> jax.Array:
    def enough(kept: jax.Array) -> jax.Array:
        return kept.sum(axis=-1) >= top_k

    return _keep_highest(scores, enough)


def _keep_top_p(scores: jax.Array, top_p: jax.Array) -> jax.Array:
    # In whole numbers: the bits of a sum of floats depend on how a program orders it, and programs
    # of other row counts order it otherwise. Two words of so many bits that no sum overflows.
    bits = min(15, 31 - scores.shape[-1].bit_length())
    weights = (jnp.exp(scores) * 2.0 ** (2 * bits)).astype(jnp.int32)
    high, low = weights >> bits, weights & (2**bits - 1)

    def sum_of(kept: Any) -> jax.Array:
        highs, lows = (jnp.where(kept, part, 0).sum(axis=-1) for part in (high, low))
        return highs.astype(jnp.float32) * 2.0**bits + lows.astype(jnp.float32)

    goal = top_p * sum_of(True)
    return _keep_highest(scores, lambda kept: sum_of(kept) >= goal)


def _keep_highest(scores: jax.Array, enough) -> jax.Array:
    """Keeps the fewest highest scores that are enough, by bisection over the scores' bits.

    No sort: 32 passes over the row cost less than sorting a vocabulary on every backend.

    Args:
      scores: [T, V], all at most 0.
      enough: kept bool [T, V] -> bool [T], never false when true for a subset.
    """
    # For values at most 0 the bits of -score, as an integer, grow with distance from the top.
    distance = jax.lax.bitcast_convert_type(-scores, jnp.int32)

    def halve(_, bounds):
        low, high = bounds  # enough(distance <= high) holds; enough(distance < low) does not
        middle = low + (high - low) // 2
        good = enough(distance <= middle[:, None])
        return jnp.where(good, low, middle + 1), jnp.where(good, middle, high)

    rows = scores.shape[0]
    infinity = jax.lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.int32)
    bounds = (jnp.zeros(rows, jnp.int32), jnp.full(rows, infinity, jnp.int32))
    _, limit = jax.lax.fori_loop(0, 32, halve, bounds)
    return jnp.where(distance <= limit[:, None], scores, -jnp.inf)
