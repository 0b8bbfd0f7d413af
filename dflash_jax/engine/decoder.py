"""A target and its drafter made ready to decode: compiled, checked, priced."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import pricing
from dflash_jax.checkpoints.drafter import Drafter
from dflash_jax.decode import selfcheck
from dflash_jax.decode.attention import Cache
from dflash_jax.decode.chunk_copies import compile_copies
from dflash_jax.decode.executables import Executables, Progress, compile_programs
from dflash_jax.decode.programs import (
    DecodeSpec,
    DrafterWeights,
    TargetState,
    TargetWeights,
    build_programs,
    drafter_weights,
    neutral_rules,
    new_drafter_cache,
    new_target_state,
    target_weights,
)
from dflash_jax.decode.rows import RowPolicy, row_policy, safest
from dflash_jax.decode.rules import RuleArrays
from dflash_jax.decode.sampling import GREEDY, SamplingArrays
from dflash_jax.engine import memory
from dflash_jax.engine.prompt_cache import MIB, PromptCache
from dflash_jax.errors import InputError
from dflash_jax.models.targets import TargetConfig
from dflash_jax.platform import DETERMINISTIC_OPTIONS
from dflash_jax.tree.growth import CAP, NO_PARENT, DraftTree
from dflash_jax.tree.masks import MAX_ROWS, window_array

Say = Callable[[str], None]
_TIMINGS = 3  # rounds timed for each warm-up price


class Buffers(NamedTuple):
    """A stream's device memory, handed from one stream to the next."""

    state: TargetState
    drafter_cache: Cache | None


@dataclasses.dataclass
class Decoder:
    """What streams share. One stream at a time holds the buffers."""

    spec: DecodeSpec
    weights: TargetWeights
    drafter: DrafterWeights | None
    executables: Executables
    no_taps: jax.Array  # [MAX_ROWS, taps * D] zeros: a draft's input when nothing was committed
    neutral: Mapping[int, RuleArrays]  # by rows: the inputs of a request without rules
    buffers: Buffers | None
    check: selfcheck.SelfCheck
    prices: list[pricing.PriorRow]
    prompt_cache: PromptCache | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted(self.executables.verify))

    def compiled_width(self, width: int) -> int:
        """The widest compiled width up to `width`: a fixed rule compiles its own alone."""
        return max(w for w in self.executables.verify if w <= width)

    def take_buffers(self) -> Buffers:
        """The buffers, for one stream.

        Raises:
          RuntimeError: another stream holds them.
        """
        if self.buffers is None:
            raise RuntimeError("a stream is still open on this decoder: close it first")
        buffers, self.buffers = self.buffers, None
        return buffers


def prepare(
    target: TargetConfig,
    target_params: Any,
    drafter: Drafter | None,
    *,
    vocab_size: int,
    context_limit: int,
    widths: Iterable[int] = range(CAP + 1),
    policy: RowPolicy | None = None,
    time_widths: bool = True,
    top_k: int | None = None,
    prompt_cache_mib: int = 0,
    say: Say = lambda line: None,
    progress: Progress = lambda done, total, anew: None,
) -> Decoder:
    """Compiles, checks and prices.

    Args:
      vocab_size: ids the tokeniser knows; the target's rows beyond are never picked.
      context_limit: most tokens of prompt and reply together.
      widths: those that will be verified; 0, plain decoding, is always among them.
      policy: row table; None takes the backend's.
      time_widths: whether to time each width, for the pricing rules.
      top_k: candidates a position, for a drafter without a selector.
      prompt_cache_mib: most device memory for what prompts have left; 0 keeps nothing.
      say: gets a line about anything that a user should know.
      progress: of loading and compiling the programs.

    Raises:
      InputError: the context does not fit the model; bits depend on the width in every attempt:
        the row table, one row count, and on a GPU one row count with deterministic kernels.
    """
    memory.require_context(target, context_limit)
    backend = jax.default_backend()
    if policy is None:
        policy = row_policy(backend, jax.__version_info__)
    wanted = tuple(sorted({0, *widths}))
    problem = ""
    for attempt in _attempts(policy, backend):
        if problem:
            say(f"{problem}; trying {attempt.name} instead")
        spec = DecodeSpec(
            target,
            drafter.config if drafter else None,
            context_limit,
            attempt.policy,
            vocab_size,
            top_k,
        )
        decoder = _compiled(spec, target_params, drafter, wanted, progress, attempt.options, say)
        if decoder.check.passed:
            break
        problem = f"{attempt.name}: not exact here ({decoder.check.differences[0]})"
    if not decoder.check.passed:
        raise InputError(f"{problem}: this backend cannot decode exactly")
    if time_widths and drafter is not None and len(wanted) > 1:
        decoder.prices = _timed(decoder)
    if prompt_cache_mib:
        copies = compile_copies(decoder.spec, say)
        chunk = decoder.spec.policy.prefill_chunk
        decoder.prompt_cache = PromptCache(copies, chunk, prompt_cache_mib * MIB, say)
    return decoder


class _Attempt(NamedTuple):
    """A way to compile that the self-check has to prove."""

    name: str
    policy: RowPolicy
    options: Mapping[str, Any] | None  # XLA's


def _attempts(policy: RowPolicy, backend: str) -> list[_Attempt]:
    """The fastest first; the slow last resort of a GPU at the end."""
    one_count = safest(policy)
    attempts = [_Attempt(f"windows of {list(policy.row_counts)} rows", policy, None)]
    if one_count != policy:
        attempts.append(_Attempt(f"every window padded to {MAX_ROWS} rows", one_count, None))
    if backend != "cpu":
        slow = f"deterministic kernels (slower), every window padded to {MAX_ROWS} rows"
        attempts.append(_Attempt(slow, one_count, DETERMINISTIC_OPTIONS))
    return attempts


def _compiled(
    spec: DecodeSpec,
    target_params: Any,
    drafter: Drafter | None,
    widths: tuple[int, ...],
    progress: Progress,
    options: Mapping[str, Any] | None,
    say: Say,
) -> Decoder:
    params = drafter.params if drafter else None
    programs = build_programs(spec, target_params, params, max(widths))
    executables = compile_programs(programs, widths, progress, options, say)
    weights = target_weights(spec, target_params)
    neutral = neutral_rules(spec)
    check, state = selfcheck.check(spec, weights, new_target_state(spec), executables, neutral)
    return Decoder(
        spec,
        weights,
        drafter_weights(spec, params, target_params) if drafter else None,
        executables,
        jnp.zeros((MAX_ROWS, len(spec.tap_layers) * spec.target.hidden_size), spec.target.dtype),
        neutral,
        Buffers(state, new_drafter_cache(spec) if drafter else None),
        check,
        [],
    )


def _timed(decoder: Decoder) -> list[pricing.PriorRow]:
    """Times whole rounds of every width at a short and a long context."""
    spec = decoder.spec
    state, cache = decoder.take_buffers()
    sampling = jax.tree.map(jnp.asarray, GREEDY.arrays())
    longest = spec.context_limit - MAX_ROWS
    rows: list[pricing.PriorRow] = []
    # The self-check has run every verify already, but never the drafter: this round is not timed.
    state, cache, _ = _time_round(decoder, state, cache, 0, 0, sampling)
    # Widths that share a row count share the program, and so its price.
    programs = {spec.policy.rows(width): width for width in decoder.widths}
    for context in sorted({min(64, longest), min(2048, longest)}):
        times: dict[int, list[float]] = {padded: [] for padded in programs}
        for _ in range(_TIMINGS):  # in turn: a burst of other work slows no program alone
            for padded, width in programs.items():
                state, cache, ms = _time_round(decoder, state, cache, width, context, sampling)
                times[padded].append(ms)
        for width in decoder.widths:
            rows.append((width, context, float(np.median(times[spec.policy.rows(width)]))))
    decoder.buffers = Buffers(state, cache)
    return rows


def _time_round(
    decoder: Decoder,
    state: TargetState,
    cache: Any,
    width: int,
    context: int,
    sampling: SamplingArrays,
) -> tuple[TargetState, Any, float]:
    """One whole round at a made-up context of some length: (state, drafter's cache, ms).

    Cache and states are those of any text: a round's time does not depend on what is in them.
    """
    spec, executables = decoder.spec, decoder.executables
    assert executables.draft is not None
    # Tokens that no tokeniser knows: nothing lands.
    tree = DraftTree(
        np.full(width, spec.vocab_size, np.int32),
        np.full(width, NO_PARENT),
        np.ones(width, np.int32),
        np.zeros(width),
    )
    window = window_array(tree, width, spec.policy.rows(width))
    state = state._replace(length=jnp.int32(context), anchor=jnp.int32(0))
    start = time.perf_counter()
    rules = decoder.neutral[len(window)]
    done = executables.verify[width](decoder.weights, state, jnp.asarray(window), sampling, rules)
    count, length, anchor = done.report.emitted, done.state.length, done.state.anchor
    cache, proposals = executables.draft(
        decoder.drafter, cache, done.taps, count, length, anchor, sampling
    )
    jax.device_get((done.report, proposals))
    return done.state, cache, (time.perf_counter() - start) * 1e3
