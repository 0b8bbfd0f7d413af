"""The compiled functions of a lone stream: prefill, verify for each width, extend, draft.

One round is verify, then draft, enqueued without waiting:

    host    grow, price ─► verify(w) ─► draft ─► read report and lattice ─► grow, price …
    device                 [target over the window, picks, accept, commit] [taps → context, block]

All shapes are fixed. Every function takes (parameters, state, inputs) and gives the new state; the
caches are donated. A function is described by a `Program`, which gives its own example inputs, so
that compiling, warming up and exporting know nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decode import attention as attn
from dflash_jax.decode.attention import Cache
from dflash_jax.decode.noise import gumbel
from dflash_jax.decode.packed import Packed, pack
from dflash_jax.decode.recurrence import PromptRecur, States, WindowRecur, new_states
from dflash_jax.decode.rows import RowPolicy
from dflash_jax.decode.rules import LogProbs, RuleArrays, neutral, picks_under_rules
from dflash_jax.decode.sampling import Sampling, SamplingArrays
from dflash_jax.models import dflash2, targets
from dflash_jax.models.dflash2 import DFlash2, DrafterConfig
from dflash_jax.models.layers import (
    Attend,
    Rotary,
    Weight,
    inverse_frequencies,
    rotary_table,
    rows_of,
)
from dflash_jax.models.qwen3_5 import Recur
from dflash_jax.models.target_base import TargetOutput
from dflash_jax.models.targets import TargetConfig
from dflash_jax.tree.growth import own_log_chances
from dflash_jax.tree.lattice import Lattice, Proposals
from dflash_jax.tree.masks import DEPTH, MAX_ROWS, PATH, TOKEN, WINDOW_COLUMNS

Params = Any
NO_TOKEN = -1  # fills a report after its last token
HEAD_ROWS = 2  # rows of the head in prefill: one would take another matmul kernel on the CPU


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """All that the compiled functions depend on, besides the weights."""

    target: TargetConfig
    drafter: DrafterConfig | None
    context_limit: int  # most tokens of prompt and reply together
    policy: RowPolicy
    vocab_size: int  # ids from here on are padding that no tokeniser knows: never picked
    top_k: int | None = None  # candidates a position, for a drafter without a selector

    @property
    def capacity(self) -> int:
        """Rows of the caches: a window or a prompt chunk fits behind the last token."""
        step = int(np.lcm(self.policy.key_chunk, self.policy.prefill_chunk))
        return -(-(self.context_limit + MAX_ROWS) // step) * step

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.drafter.target_layer_ids if self.drafter else ()


class TargetState(NamedTuple):
    """The target's side of a stream.

    A cache goes back with `length` alone; `states` do not, and need a copy from then. At length 0
    they are taken for empty, whatever is in them.
    """

    cache: Cache  # of the attention layers
    length: jax.Array  # [] int32, tokens in cache and states; the anchor's position
    anchor: jax.Array  # [] int32, the last committed token, not yet in the cache
    states: States  # of the recurrent layers


class TargetWeights(NamedTuple):
    """What the target's functions read."""

    params: Packed
    rotary: Rotary  # table of all positions


class DrafterWeights(NamedTuple):
    """What the drafter's functions read; embedding and head are the target's."""

    params: Packed
    rotary: Rotary
    embedding: Weight  # [V, D]
    head: Weight  # [V or Vd, D]


class Report(NamedTuple):
    """What the host reads of a verified window."""

    tokens: jax.Array  # [MAX_ROWS] int32: accepted drafted tokens, the bonus token, NO_TOKEN
    emitted: jax.Array  # [] int32: tokens in it
    landed: jax.Array  # [T - 1] bool: nodes accepted
    logits: jax.Array  # [MAX_ROWS] float32: the target's logit of each token in it


class Round(NamedTuple):
    """What verification gives: the new state, the taps of the committed rows, the report."""

    state: TargetState
    taps: jax.Array  # [MAX_ROWS, taps * D]; the first `emitted` rows are committed
    report: Report
    logprobs: LogProbs  # of the tokens in the report, when the rules want them


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function to compile, with the shapes of its inputs."""

    name: str
    spec: DecodeSpec  # with the name it says all that the function depends on
    function: Callable[..., Any]
    inputs: tuple[Any, ...]  # pytrees of jax.ShapeDtypeStruct
    donated: tuple[int, ...]  # positions of the inputs whose buffers become outputs

    def jit(self) -> Any:
        return jax.jit(self.function, donate_argnums=self.donated)

    def compile(self, options: Mapping[str, Any] | None = None) -> Any:
        """The executable; called with arrays of exactly `inputs`' shapes.

        Args:
          options: XLA's, by name; such as `platform.DETERMINISTIC_OPTIONS`.
        """
        lowered = self.jit().lower(*self.inputs)
        return lowered.compile(compiler_options=dict(options) if options else None)


def target_weights(spec: DecodeSpec, params: Params) -> TargetWeights:
    """Adds the rotary table to the target's parameters."""
    table = rotary_table(targets.rotary_frequencies(spec.target), spec.capacity)
    return TargetWeights(pack(params), table)


def drafter_weights(spec: DecodeSpec, params: Params, target_params: Params) -> DrafterWeights:
    """Adds the rotary table and the target's embedding and head to the drafter's parameters."""
    drafter = spec.drafter
    assert drafter is not None
    frequencies = inverse_frequencies(drafter.head_dim, drafter.rope_theta)
    embedding = target_params["embed_tokens"]["weight"]
    head: Any = targets.module(spec.target).apply({"params": target_params}, method="head")
    if drafter.draft_vocab_size:
        head = jax.tree.map(lambda rows: rows[params["draft_vocab"]], head)
    table = rotary_table(frequencies, spec.capacity + drafter.block_size)
    return DrafterWeights(pack(params), table, embedding, head)


def neutral_rules(spec: DecodeSpec) -> dict[int, RuleArrays]:
    """What requests without rules give to prefill and verify, by rows; on the device."""
    vocab_size = spec.target.vocab_size
    shared = jax.tree.map(jnp.asarray, neutral(1, vocab_size))
    counts = (HEAD_ROWS, *spec.policy.row_counts)
    return {
        rows: shared._replace(allowed=jnp.asarray(neutral(rows, vocab_size).allowed))
        for rows in counts
    }


def new_cache(layers: int, kv_heads: int, head_dim: int, capacity: int, dtype: Any) -> Cache:
    """An empty cache. Zeros, since rows that nobody wrote are multiplied by weights of 0."""
    shape = (layers, kv_heads, capacity, head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def new_target_state(spec: DecodeSpec) -> TargetState:
    c = spec.target
    layers = targets.attention_layers(c)
    cache = new_cache(layers, c.num_kv_heads, c.head_dim, spec.capacity, c.dtype)
    return TargetState(cache, jnp.int32(0), jnp.int32(0), new_states(c))


def new_drafter_cache(spec: DecodeSpec) -> Cache:
    c = spec.drafter
    assert c is not None
    return new_cache(c.num_layers, c.num_kv_heads, c.head_dim, spec.capacity, c.dtype)


def _write(cache: Cache, k: jax.Array, v: jax.Array, start: jax.Array) -> Cache:
    """Writes k, v [L, T, K, H] at positions start.. of the cache."""

    def put(buffer: jax.Array, rows: jax.Array) -> jax.Array:
        rows = rows.transpose(0, 2, 1, 3).astype(buffer.dtype)
        return jax.lax.dynamic_update_slice(buffer, rows, (0, 0, start, 0))

    return Cache(put(cache.k, k), put(cache.v, v))


class _KeysValues:
    """Collects each layer's keys and values while a model runs."""

    def __init__(self) -> None:
        self.k: list[jax.Array] = []
        self.v: list[jax.Array] = []

    def add(self, k: jax.Array, v: jax.Array) -> None:
        self.k.append(k)
        self.v.append(v)

    def written(self, cache: Cache, start: jax.Array, rows: jax.Array | None = None) -> Cache:
        """The cache with all rows, or some [n] int32, at positions start.."""
        if not self.k:  # no layer has attention
            return cache
        k, v = jnp.stack(self.k), jnp.stack(self.v)
        if rows is not None:
            k, v = k[:, rows], v[:, rows]
        return _write(cache, k, v, start)


def _pick(
    spec: DecodeSpec,
    weights: TargetWeights,
    hidden: jax.Array,
    positions: jax.Array,
    sampling: SamplingArrays,
    paths: jax.Array,
    rules: RuleArrays,
) -> tuple[jax.Array, jax.Array, LogProbs]:
    """Picks [T] int32 for `positions` [T], their logits [T], and their log-probabilities.

    `paths` [T, n] int32: the tokens behind the anchor on each row's root path; -1 elsewhere.
    """
    variables = {"params": weights.params.unpack()}
    logits: Any = targets.module(spec.target).apply(variables, hidden, method="logits")
    padding = jnp.arange(spec.target.vocab_size) >= spec.vocab_size
    logits = jnp.where(padding, -jnp.inf, logits)
    chosen, logprobs = picks_under_rules(logits, positions, sampling, paths, rules)
    return chosen, jnp.take_along_axis(logits, chosen[:, None], axis=1)[:, 0], logprobs


def prefill(
    spec: DecodeSpec,
    weights: TargetWeights,
    state: TargetState,
    tokens: jax.Array,
    count: jax.Array,
    sampling: SamplingArrays,
    rules: RuleArrays,
) -> Round:
    """One chunk of a prompt, at positions that are a multiple of the chunk's size.

    Args:
      tokens: [P] int32, of which the first `count` are the prompt's.
      count: [] int32, 1..P.
      sampling, rules: for the pick of the token after the chunk: the reply's first, if the chunk
        is the last. The rules' masks are of HEAD_ROWS equal rows.

    Returns:
      The state with the chunk in its cache and that pick as its anchor; the chunk's taps
      [P, taps * D]; a report of the pick.
    """
    chunk = tokens.shape[0]
    rows = jnp.arange(chunk, dtype=jnp.int32)
    causal = rows[:, None] >= rows[None, :]
    start = jnp.full(chunk, state.length)
    collected = _KeysValues()

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        collected.add(k, v)
        q_grouped = attn.grouped(q, k.shape[1])
        nothing = jnp.zeros_like(start)
        key_chunk = spec.policy.key_chunk
        past = attn.cache_part(q_grouped, state.cache, layer, nothing, start, chunk, key_chunk)
        return attn.finish(attn.merge(past, attn.shared_part(q_grouped, k, v, causal)), q.dtype)

    rotary = weights.rotary.at(state.length + rows)
    recur = PromptRecur(state.states, state.length, count) if state.states else None
    output = _forward(spec, weights, tokens, rotary, attend, recur)
    last = jnp.full(HEAD_ROWS, count - 1)
    length = state.length + count
    positions = jnp.full(HEAD_ROWS, length)
    nothing = jnp.full((HEAD_ROWS, 1), NO_TOKEN)  # behind the prompt
    chosen, logits, logprobs = _pick(
        spec, weights, output.hidden[last], positions, sampling, nothing, rules
    )
    # Writing waits for the pick, and so for the last layer's reading: else XLA copies the cache.
    place = jnp.where(chosen[0] < 0, 0, state.length)
    cache = collected.written(state.cache, place)
    first_only = jnp.arange(MAX_ROWS) == 0
    report = Report(
        jnp.where(first_only, chosen[0], NO_TOKEN),
        jnp.int32(1),
        jnp.zeros(0, bool),
        jnp.where(first_only, logits[0], 0),
    )
    new = TargetState(cache, length, chosen[0], recur.states() if recur else ())
    first = jax.tree.map(lambda row: jnp.repeat(row[:1], MAX_ROWS, axis=0), logprobs)
    return Round(new, _side_by_side(output.taps), report, first)


def _forward(
    spec: DecodeSpec,
    weights: TargetWeights,
    tokens: jax.Array,
    rotary: Rotary,
    attend: Attend,
    recur: Recur | None,
) -> TargetOutput:
    params = weights.params.unpack()
    return targets.forward(spec.target, params, tokens, rotary, attend, recur, spec.tap_layers)


def _drafter(config: DrafterConfig, weights: DrafterWeights, *inputs: Any, method: str) -> Any:
    return DFlash2(config).apply({"params": weights.params.unpack()}, *inputs, method=method)


def _side_by_side(taps: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.concatenate(taps, axis=-1) if taps else jnp.zeros((0, 0), jnp.float32)


def verify(
    spec: DecodeSpec,
    weights: TargetWeights,
    state: TargetState,
    window: jax.Array,
    sampling: SamplingArrays,
    rules: RuleArrays,
) -> Round:
    """One window: picks, accept walk, commit.

    Args:
      window: [T, WINDOW_COLUMNS] int32 from `tree.masks.window_array`.
      sampling, rules: of the request.
    """
    depths, paths = window[:, DEPTH], window[:, PATH:]
    # Depth 0 is the anchor, and the padding rows, its copies.
    tokens = jnp.where(depths == 0, state.anchor, window[:, TOKEN])
    positions = state.length + depths
    rotary = weights.rotary.at(positions)
    # The barrier keeps these small arrays from being computed anew inside every layer's kernels.
    near, rotary = jax.lax.optimization_barrier(
        (attn.near_keys(state.length, depths, paths), rotary)
    )
    collected = _KeysValues()

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        collected.add(k, v)
        return attn.window_attention(
            q, k, v, state.cache, layer, state.length, depths, near, spec.policy
        )

    tile = spec.policy.query_tile
    recur = None
    if state.states:
        recur = WindowRecur(state.states, state.length, depths, paths, tile)
    output = _forward(spec, weights, tokens, rotary, attend, recur)
    drafted = jnp.where(_behind_anchor(depths), tokens[paths], NO_TOKEN)
    chosen, logits, logprobs = _pick(
        spec, weights, output.hidden, positions + 1, sampling, drafted, rules
    )

    landed = accepted(tokens, chosen, depths, paths)
    last = jnp.argmax(jnp.where(landed, depths, 0))  # deepest accepted row; 0, the anchor, if none
    count = depths[last] + 1
    path = paths[last]  # [MAX_ROWS] rows to commit; 0 beyond the last
    cache = collected.written(state.cache, state.length, path)
    emitted = jnp.arange(MAX_ROWS) < count
    report = Report(
        jnp.where(emitted, chosen[path], NO_TOKEN),
        count,
        landed[1:],
        jnp.where(emitted, logits[path], 0),
    )
    taps = _side_by_side(tuple(tap[path] for tap in output.taps))
    states = recur.settle(path, count) if recur else ()
    new = TargetState(cache, state.length + count, chosen[last], states)
    return Round(new, taps, report, jax.tree.map(lambda rows: rows[path], logprobs))


def _behind_anchor(depths: jax.Array) -> jax.Array:
    """Which entries of each row's path are drafted rows: [T, MAX_ROWS] bool."""
    entries = jnp.arange(MAX_ROWS)[None, :]
    return (entries > 0) & (entries <= depths[:, None])


def accepted(
    tokens: jax.Array, chosen: jax.Array, depths: jax.Array, paths: jax.Array
) -> jax.Array:
    """Which rows landed: each token on the way is the target's pick from the row before it.

    Args:
      tokens, chosen, depths: [T] int32.
      paths: [T, MAX_ROWS] int32.

    Returns:
      [T] bool; False for the anchor and for padding rows.
    """
    before = jnp.take_along_axis(paths, jnp.maximum(depths - 1, 0)[:, None], axis=1)[:, 0]
    matched = tokens == chosen[before]
    on_path = _behind_anchor(depths)  # the anchor is committed already
    return jnp.where(on_path, matched[paths], True).all(axis=1) & (depths > 0)


def extend(
    spec: DecodeSpec, weights: DrafterWeights, cache: Cache, taps: jax.Array, start: jax.Array
) -> Cache:
    """Adds a prompt chunk's taps [P, taps * D] to the drafter's context at positions start.."""
    drafter = spec.drafter
    assert drafter is not None
    rotary = weights.rotary.at(start + jnp.arange(taps.shape[0], dtype=jnp.int32))
    layers = _drafter(drafter, weights, taps, rotary, method="context")
    k, v = (jnp.stack(part) for part in zip(*layers, strict=True))
    return _write(cache, k, v, start)


def draft(
    spec: DecodeSpec,
    weights: DrafterWeights,
    cache: Cache,
    taps: jax.Array,
    count: jax.Array,
    length: jax.Array,
    anchor: jax.Array,
    sampling: SamplingArrays,
) -> tuple[Cache, Proposals]:
    """Reads the taps of the rows just committed, then drafts a block behind them.

    Args:
      taps: [MAX_ROWS, taps * D], of which the first `count` are committed.
      count: [] int32, 0..MAX_ROWS.
      length: [] int32, committed tokens, those rows included; the anchor's position.
      anchor: [] int32.
      sampling: of the request.

    Returns:
      The drafter's context, and what a tree of block_size - 1 positions grows from.
    """
    c = spec.drafter
    assert c is not None
    cache = extend(spec, weights, cache, taps, length - count)
    positions = length + jnp.arange(c.block_size, dtype=jnp.int32)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q_grouped = attn.grouped(q, k.shape[1])
        window = c.window(layer)
        first = jnp.maximum(positions - window + 1, 0) if window else jnp.zeros_like(positions)
        end = jnp.full_like(positions, length)
        past = attn.cache_part(
            q_grouped, cache, layer, first, end, c.block_size, spec.policy.key_chunk
        )
        mask = dflash2.visible(c, layer, positions, positions)
        return attn.finish(attn.merge(past, attn.shared_part(q_grouped, k, v, mask)), q.dtype)

    block = jnp.full(c.block_size, c.mask_token_id, jnp.int32).at[0].set(anchor)
    embeds = rows_of(weights.embedding, block, c.dtype) * c.input_embedding_scale
    rotary = weights.rotary.at(positions)
    hidden = _drafter(c, weights, embeds, rotary, attend, method="block")
    # The head takes the anchor's row too: a block's whole row count is the faster kernel's.
    logits = _drafter(c, weights, hidden, weights.head, method="logits")
    lattice = _drafter(c, weights, hidden[1:], logits[1:], anchor, spec.top_k, method="lattice")
    return cache, _proposals(lattice, positions[1:], sampling)


def _proposals(lattice: Lattice, positions: jax.Array, sampling: SamplingArrays) -> Proposals:
    """Scores candidates at `positions` [D] as the target will draw them."""
    sampled = sampling.temperature > 0
    noise = gumbel(sampling.seed, positions[:, None], lattice.candidates, xp=jnp)
    temperature = jnp.where(sampled, sampling.temperature, 1)
    scores = own_log_chances(lattice, temperature, jnp.where(sampled, noise, 0), xp=jnp)
    return Proposals(lattice.candidates, scores)


def shapes(tree: Any) -> Any:
    """The shapes and dtypes of a pytree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


class Programs(NamedTuple):
    """Every function of a spec; those of the drafter are None without one."""

    prefill: Program
    verify: tuple[Program, ...]  # by width; widths padded to one row count share a program
    extend: Program | None
    draft: Program | None

    def all(self) -> tuple[Program, ...]:
        drafting = tuple(p for p in (self.extend, self.draft) if p is not None)
        return (self.prefill, *drafting, *dict.fromkeys(self.verify))


def build_programs(
    spec: DecodeSpec, target_params: Params, drafter_params: Params | None, cap: int
) -> Programs:
    """Describes the functions for widths 0..cap.

    Args:
      target_params, drafter_params: arrays or their shapes.
    """
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    weights = jax.eval_shape(lambda p: target_weights(spec, p), shapes(target_params))
    state = jax.eval_shape(lambda: new_target_state(spec))
    sampling = shapes(Sampling().arrays())
    chunk = spec.policy.prefill_chunk

    def describe(
        name: str, function: Callable[..., Any], inputs: tuple[Any, ...], donated: int
    ) -> Program:
        def bound(*inputs: Any) -> Any:
            return function(spec, *inputs)

        bound.__name__ = name  # for profilers and XLA's messages
        return Program(name, spec, bound, inputs, (donated,))

    def rules(rows: int) -> RuleArrays:
        return shapes(neutral(rows, spec.target.vocab_size))

    tokens = jax.ShapeDtypeStruct((chunk,), jnp.int32)
    prefill_inputs = (weights, state, tokens, scalar, sampling, rules(HEAD_ROWS))
    by_rows = {}
    for rows in sorted({spec.policy.rows(width) for width in range(cap + 1)}):
        window = jax.ShapeDtypeStruct((rows, WINDOW_COLUMNS), jnp.int32)
        verify_inputs = (weights, state, window, sampling, rules(rows))
        by_rows[rows] = describe(f"verify_{rows}_rows", verify, verify_inputs, 1)
    verifiers = tuple(by_rows[spec.policy.rows(width)] for width in range(cap + 1))
    extender = drafting = None
    if spec.drafter is not None:
        drafter = jax.eval_shape(
            lambda p, t: drafter_weights(spec, p, t), shapes(drafter_params), shapes(target_params)
        )
        cache = jax.eval_shape(lambda: new_drafter_cache(spec))
        size = len(spec.tap_layers) * spec.target.hidden_size
        taps = jax.ShapeDtypeStruct((chunk, size), spec.target.dtype)
        extender = describe("extend", extend, (drafter, cache, taps, scalar), 1)
        taps = jax.ShapeDtypeStruct((MAX_ROWS, size), spec.target.dtype)
        draft_inputs = (drafter, cache, taps, scalar, scalar, scalar, sampling)
        drafting = describe("draft", draft, draft_inputs, 1)
    first = describe("prefill", prefill, prefill_inputs, 1)
    return Programs(first, verifiers, extender, drafting)
