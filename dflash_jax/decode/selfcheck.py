"""Proves at start-up, on the real shapes, that a row's bits do not depend on the width.

Plain decoding writes some tokens; then every program verifies the same tokens from the same
context, as its narrowest and as its widest width: greedy ones as a chain, sampled ones as a tree
with wrong siblings. Picks, their logits, the committed keys and values, the taps and the recurrent
states must be equal bit for bit. The prompt's length puts the rows' far keys (all but the nearest
sixteen) across the edge of a key chunk: some rows need one chunk, others two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decode.attention import NEAR
from dflash_jax.decode.executables import Executables
from dflash_jax.decode.programs import HEAD_ROWS, DecodeSpec, Round, TargetState, TargetWeights
from dflash_jax.decode.recurrence import States, copied
from dflash_jax.decode.rules import RuleArrays
from dflash_jax.decode.sampling import GREEDY, Sampling
from dflash_jax.tree.growth import EMPTY, NO_PARENT, DraftTree
from dflash_jax.tree.masks import MAX_ROWS, window_array

_EDGE = 5  # rows of plain decoding whose far keys end before the key chunk does
_SAMPLINGS = (GREEDY, Sampling(temperature=1.0, seed=7))


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """What the check found: one line for each width whose bits differ from plain decoding's."""

    widths: tuple[int, ...]
    differences: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.differences


class _Rows(NamedTuple):
    """What was committed, row by row; NumPy."""

    tokens: np.ndarray  # [n]
    logits: np.ndarray  # [n]
    taps: np.ndarray  # [n, ...]
    k: np.ndarray  # [L, K, n, H]
    v: np.ndarray  # [L, K, n, H]


def check(
    spec: DecodeSpec,
    weights: TargetWeights,
    state: TargetState,
    executables: Executables,
    neutral: Mapping[int, RuleArrays],
) -> tuple[SelfCheck, TargetState]:
    """Runs the check over every compiled program.

    Args:
      state: any state; its cache is overwritten and handed back.
      neutral: from `neutral_rules`.

    Returns:
      The finding, and a state to go on with.
    """
    widths = tuple(sorted(executables.verify))
    differences: list[str] = []
    state = _prompt(spec, weights, state, executables, neutral)
    start, anchor, before = int(state.length), int(state.anchor), copied(state.states)

    def rewound(state: TargetState) -> TargetState:
        """Behind the prompt again: the cache up to there is untouched, so its length is enough."""
        length, token = jnp.int32(start), jnp.int32(anchor)
        return state._replace(length=length, anchor=token, states=copied(before))

    for sampling in _SAMPLINGS:
        arrays = jax.tree.map(jnp.asarray, sampling.arrays())
        state = rewound(state)
        kind = "greedy" if sampling.greedy else "sampled"
        draft = _chain if sampling.greedy else _bushy
        # Tokens that a width commits when all goes well.
        counts = {1 + (width if sampling.greedy else width // 2) for width in _ends(executables)}
        steps: list[_Rows] = []
        states: dict[int, States] = {}  # by tokens since the prompt
        for _ in range(max(counts)):
            done = _verify(spec, weights, state, executables, neutral, EMPTY, 0, arrays)
            state = done.state
            steps.append(_committed(done, start + len(steps)))
            if len(steps) in counts:
                states[len(steps)] = copied(state.states)
        plain = _joined(steps)
        for width in _ends(executables):
            tree = draft(plain.tokens, width, spec.vocab_size)
            state = rewound(state)
            done = _verify(spec, weights, state, executables, neutral, tree, width, arrays)
            state = done.state
            got = _committed(done, start)
            different = _compare(plain, got)
            if _differ(states.get(len(got.tokens)), state.states):
                different.append("states")
            if different:
                what = f"{', '.join(different)} differ from plain decoding's"
                differences.append(f"width {width}, {kind}: {what}")
    return SelfCheck(widths, tuple(differences)), state


def _ends(executables: Executables) -> list[int]:
    """The narrowest and the widest of the widths that share a program: the others pad it less."""
    by_program: dict[int, list[int]] = {}
    for width, program in sorted(executables.verify.items()):
        by_program.setdefault(id(program), []).append(width)
    return sorted({end for widths in by_program.values() for end in (widths[0], widths[-1])})


def _prompt(spec, weights, state, executables, neutral) -> TargetState:
    """The state behind a made-up prompt."""
    arrays = jax.tree.map(jnp.asarray, GREEDY.arrays())
    chunk = spec.policy.prefill_chunk
    size = min(spec.policy.key_chunk + NEAR - 1, spec.context_limit - MAX_ROWS) - _EDGE
    prompt = np.random.default_rng(0).integers(0, spec.vocab_size, max(size, 1)).astype(np.int32)
    state = state._replace(length=jnp.int32(0))
    for begin in range(0, len(prompt), chunk):
        piece = prompt[begin : begin + chunk]
        tokens = jnp.asarray(np.pad(piece, (0, chunk - len(piece))))
        done = executables.prefill(
            weights, state, tokens, jnp.int32(len(piece)), arrays, neutral[HEAD_ROWS]
        )
        state = done.state
    return state


def _verify(spec, weights, state, executables, neutral, tree, width, arrays) -> Round:
    window = jnp.asarray(window_array(tree, width, spec.policy.rows(width)))
    return executables.verify[width](weights, state, window, arrays, neutral[len(window)])


def _chain(tokens: np.ndarray, width: int, vocab_size: int) -> DraftTree:
    """The plain tokens, one behind the other."""
    del vocab_size
    nodes = np.arange(width)
    return DraftTree(tokens[:width].astype(np.int32), nodes - 1, nodes + 1, np.zeros(width))


def _bushy(tokens: np.ndarray, width: int, vocab_size: int) -> DraftTree:
    """Wrong, right, wrong, right, …: the right node of a depth is the parent of the next depth."""
    nodes = np.arange(width)
    depths = nodes // 2 + 1
    right = tokens[depths - 1]
    parents = np.where(depths == 1, NO_PARENT, 2 * depths - 3)
    siblings = np.where(nodes % 2 == 0, (right + 1) % vocab_size, right).astype(np.int32)
    return DraftTree(siblings, parents, depths, np.zeros(width))


def _committed(done: Round, start: int) -> _Rows:
    count = int(done.report.emitted)
    k, v = (
        np.asarray(jax.lax.dynamic_slice_in_dim(x, start, MAX_ROWS, axis=2))[:, :, :count]
        for x in done.state.cache
    )
    return _Rows(
        np.asarray(done.report.tokens)[:count],
        np.asarray(done.report.logits)[:count],
        np.asarray(done.taps)[:count],
        k,
        v,
    )


def _joined(steps: list[_Rows]) -> _Rows:
    def join(*pieces: np.ndarray) -> np.ndarray:
        return np.concatenate(pieces, axis=2 if pieces[0].ndim == 4 else 0)

    return _Rows(*map(join, *steps))


def _compare(plain: _Rows, got: _Rows) -> list[str]:
    """The fields that differ."""
    count = len(got.tokens)
    different = []
    for name in _Rows._fields:
        a, b = getattr(plain, name), getattr(got, name)
        a = a[:, :, :count] if a.ndim == 4 else a[:count]
        if a.tobytes() != b.tobytes():
            different.append(name)
    return different


def _differ(plain: States | None, got: States) -> bool:
    """Whether any bit does; also when plain decoding's at that length were not kept."""
    if plain is None:
        return True
    pairs = zip(jax.tree.leaves(plain), jax.tree.leaves(got), strict=True)
    return any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)
