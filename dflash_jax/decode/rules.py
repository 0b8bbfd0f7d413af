"""What a request's rules do to its logits, on the device; and log-probabilities.

Every row is judged on its own root path, as plain decoding would judge it:

    anchor ─ a ─ c     the row of c counts the reply's tokens so far, a and c
           └ b         and picks among what the grammar allows behind a c
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decode.sampling import SamplingArrays, pick_branch, pickers, picks

TOP_LOGPROBS = 20  # most likely tokens that are reported, OpenAI's limit
WORD_BITS = np.uint32(32)  # token ids in a word of a mask, the lowest id in the lowest bit
EVERY_TOKEN = np.uint32(0xFFFFFFFF)  # a word of a mask that forbids nothing

# What `RuleArrays.wanted` says.
NOTHING, RULES, RULES_AND_LOGPROBS = 0, 1, 2


class Penalties(NamedTuple):
    """Of tokens that were there before."""

    repetition: Any  # [] float32; 1 is off
    frequency: Any  # [] float32
    presence: Any  # [] float32


class RuleArrays(NamedTuple):
    """A round's rules as arrays of fixed shape: a new request compiles nothing."""

    wanted: Any  # [] int32: NOTHING, RULES or RULES_AND_LOGPROBS
    allowed: Any  # [T, ceil(V / 32)] uint32: bit masks of the tokens that each row may pick
    counts: Any  # [V] int32: how often the reply has each token, the anchor included
    seen: Any  # [V] bool: tokens of the prompt
    bias: Any  # [V] float32, added to the logits
    penalties: Penalties


class LogProbs(NamedTuple):
    """Log-probabilities of the model's own logits; zeros unless they were wanted."""

    chosen: Any  # [T] float32, of each row's pick
    top_ids: Any  # [T, TOP_LOGPROBS] int32, the likeliest first; of equals the lower id
    top: Any  # [T, TOP_LOGPROBS] float32


def mask_words(vocab_size: int) -> int:
    """Words of a mask over so many tokens."""
    return -(-vocab_size // int(WORD_BITS))


def neutral(rows: int, vocab_size: int) -> RuleArrays:
    """The rules of a request without rules, NumPy."""
    return RuleArrays(
        wanted=np.int32(NOTHING),
        allowed=np.full((rows, mask_words(vocab_size)), EVERY_TOKEN),
        counts=np.zeros(vocab_size, np.int32),
        seen=np.zeros(vocab_size, bool),
        bias=np.zeros(vocab_size, np.float32),
        penalties=Penalties(np.float32(1), np.float32(0), np.float32(0)),
    )


def ruled(logits: jax.Array, paths: jax.Array, rules: RuleArrays) -> jax.Array:
    """The logits that a pick is made from.

    Args:
      logits: [T, V] float32, the model's own.
      paths: [T, n] int32: the tokens behind the anchor on each row's root path; -1 elsewhere.
      rules: of the request.

    Returns:
      [T, V] float32; -inf where a token is forbidden.
    """
    rows, vocab_size = logits.shape
    # A path's tokens are counted in a place beyond the vocabulary where there are none.
    places = jnp.where(paths < 0, vocab_size, paths)
    counts = jnp.zeros((rows, vocab_size + 1), jnp.int32)
    counts = counts.at[jnp.arange(rows)[:, None], places].add(1)[:, :vocab_size] + rules.counts
    repetition, frequency, presence = rules.penalties
    # Each product goes through a `where` before anything is added to it: a backend that fuses
    # multiplication and addition in one program but not in another would round them differently.
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(rules.seen | (counts > 0), scaled, logits)
    logits = logits - jnp.where(counts > 0, counts * frequency, 0)
    logits = logits - jnp.where(counts > 0, presence, 0)
    logits = logits + rules.bias
    bits = rules.allowed[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.uint32)
    allowed = (bits & 1).astype(bool).reshape(rows, -1)[:, :vocab_size]
    return jnp.where(allowed, logits, -jnp.inf)


def picks_under_rules(
    logits: jax.Array,
    positions: jax.Array,
    sampling: SamplingArrays,
    paths: jax.Array,
    rules: RuleArrays,
) -> tuple[jax.Array, LogProbs]:
    """Each row's pick [T] int32, with its log-probabilities.

    Args:
      logits: [T, V] float32, the model's own.
      positions: [T] int32, absolute positions of the tokens being picked.
      paths: [T, n] int32, as `ruled` takes them.
    """

    def freely(pick: Callable[[], jax.Array]) -> Callable[[], tuple[jax.Array, LogProbs]]:
        return lambda: (pick(), _no_logprobs(logits))

    def by_rules() -> tuple[jax.Array, LogProbs]:
        chosen = picks(ruled(logits, paths, rules), positions, sampling)
        logprobs = jax.lax.cond(
            rules.wanted == RULES_AND_LOGPROBS,
            lambda: _logprobs(logits, chosen),
            lambda: _no_logprobs(logits),
        )
        return chosen, logprobs

    free = [freely(pick) for pick in pickers(logits, positions, sampling)]
    # One conditional, whether there are rules or not: on a GPU each costs the host a wait.
    branch = jnp.where(rules.wanted == NOTHING, pick_branch(sampling), len(free))
    return jax.lax.switch(branch, [*free, by_rules])


def _logprobs(logits: jax.Array, chosen: jax.Array) -> LogProbs:
    top, ids = jax.lax.top_k(logits, min(TOP_LOGPROBS, logits.shape[-1]))
    # Row by row: the bits of a sum may depend on the count of rows.
    total = jax.lax.map(jax.nn.logsumexp, logits)[:, None]
    own = jnp.take_along_axis(logits, chosen[:, None], axis=1)
    return LogProbs((own - total)[:, 0], ids.astype(jnp.int32), top - total)


def _no_logprobs(logits: jax.Array) -> LogProbs:
    rows, top = logits.shape[0], min(TOP_LOGPROBS, logits.shape[-1])
    return LogProbs(
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((rows, top), jnp.int32),
        jnp.zeros((rows, top), jnp.float32),
    )


def mask_of(tokens: Iterable[int], words: int) -> np.ndarray:
    """A mask of these tokens alone: [words] uint32."""
    ids = np.fromiter(tokens, np.uint32)
    mask = np.zeros(words, np.uint32)
    np.bitwise_or.at(mask, ids // WORD_BITS, np.uint32(1) << ids % WORD_BITS)
    return mask


def in_mask(mask: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Which of some token ids a mask allows: bool, of the shape of `ids`."""
    ids = ids.astype(np.uint32)
    return (mask[ids // WORD_BITS] >> ids % WORD_BITS & 1).astype(bool)
