"""One tiny decoder for the whole session, a recomputing reference, and drafts that land."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints.drafter import Drafter
from dflash_jax.decode.noise import gumbel
from dflash_jax.decode.programs import (
    HEAD_ROWS,
    DecodeSpec,
    TargetState,
    new_drafter_cache,
    new_target_state,
)
from dflash_jax.decode.rows import RowPolicy, row_policy
from dflash_jax.decode.sampling import GREEDY, Sampling
from dflash_jax.engine import Decoder, LoneDriver, Request, prepare
from dflash_jax.engine.decoder import Buffers
from dflash_jax.models import layers
from dflash_jax.models.dflash2 import init_params
from dflash_jax.models.dflash2_config import FULL, SLIDING, DrafterConfig
from dflash_jax.models.llama import Llama, LlamaConfig, inverse_frequencies
from dflash_jax.tree.growth import NO_PARENT, DraftTree, own_log_chances
from dflash_jax.tree.lattice import Lattice, Proposals
from dflash_jax.tree.masks import window_array

VOCABULARY = 320
KNOWN = 310  # ids from here on are padding
CONTEXT_LIMIT = 400
CHUNK = 32  # keys of a cache chunk and tokens of a prompt chunk: contexts of the tests cross many
WIDTHS = tuple(range(16))

TARGET = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
DRAFTER = DrafterConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    num_target_layers=2,
    target_layer_ids=(0, 1),
    mask_token_id=VOCABULARY - 1,
    block_size=16,
    layer_types=(SLIDING, FULL),
    sliding_window=24,
    is_causal=False,
    conv_kernel_size=2,
    conv_group_size=8,
    selector_rank=8,
    selector_top_k=6,
)


@functools.cache
def target_params() -> dict:
    """Random weights; the head (the embedding) is large enough for decided picks."""
    table = layers.rotary_table(inverse_frequencies(TARGET), 4)
    mask = jnp.ones((4, 4), bool)

    def init():
        return Llama(TARGET).init(
            jax.random.key(0),
            jnp.zeros((1, 4), jnp.int32),
            table,
            lambda layer, q, k, v: layers.attention(q, k, v, mask),
            method="init_all",
        )["params"]

    rng = np.random.default_rng(0)

    def draw(path, leaf):
        noise = rng.standard_normal(leaf.shape, np.float32)
        norm = "norm" in jax.tree_util.keystr(path)
        return jnp.asarray(1 + 0.2 * noise if norm else 0.2 * noise)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(init))


@functools.cache
def drafter() -> Drafter:
    return Drafter(DRAFTER, init_params(DRAFTER, jax.random.key(1)), "tiny")


def policy() -> RowPolicy:
    """The backend's row counts, with tiles small enough for short contexts to cross them."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:3])
    table = row_policy(jax.default_backend(), version)
    return dataclasses.replace(table, query_tile=4, key_chunk=CHUNK, prefill_chunk=CHUNK)


def make_decoder(**overrides) -> Decoder:
    settings = {
        "vocab_size": KNOWN,
        "context_limit": CONTEXT_LIMIT,
        "policy": policy(),
        "time_widths": False,
    }
    draft = overrides.pop("drafter", drafter())
    return prepare(TARGET, target_params(), draft, **(settings | overrides))


@functools.cache
def decoder() -> Decoder:
    """The session's decoder: all widths, about 40 CPU seconds to compile."""
    return make_decoder()


def prompt_of(size: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng((seed, size)).integers(0, KNOWN, size).tolist())


def decode(driver: LoneDriver, request: Request):
    """(tokens, finish_reason, records) of one reply."""
    with driver.stream(request) as stream:
        records = list(stream.rounds())
    return stream.tokens, stream.finish_reason, records


def plain(size: int, sampling: Sampling = GREEDY, max_tokens: int = 40, **request):
    """Plain decoding's tokens and finish reason."""
    driver = LoneDriver(decoder(), rule="fixed:0")
    wanted = Request(prompt_of(size), sampling, max_tokens, **request)
    return decode(driver, wanted)[:2]


# The reference: the whole sequence anew for each token ------------------------------------


@functools.cache
def _full_forward():
    rows = CONTEXT_LIMIT + 48
    table = layers.rotary_table(inverse_frequencies(TARGET), rows)
    mask = jnp.tril(jnp.ones((rows, rows), bool))

    @jax.jit
    def run(params, tokens):
        out = Llama(TARGET).apply(
            {"params": params},
            tokens,
            table.at(jnp.arange(rows)),
            lambda layer, q, k, v: layers.attention(q, k, v, mask),
        )
        return Llama(TARGET).apply({"params": params}, out.hidden, method="logits")

    return lambda tokens: np.asarray(
        run(target_params(), jnp.asarray(np.pad(tokens, (0, rows - len(tokens))), jnp.int32))
    )[: len(tokens)]


def reference_logits(tokens) -> np.ndarray:
    """[len(tokens), KNOWN] float32, by plain attention over the whole sequence."""
    return _full_forward()(np.asarray(tokens, np.int32))[:, :KNOWN]


def reference_scores(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Filtered log-weights [n] in float64: temperature, top-k, top-p, min-p, one by one."""
    scores = logits.astype(np.float64)
    scores = (scores - scores.max()) / sampling.temperature
    if sampling.top_k > 0:
        kth = np.sort(scores)[::-1][min(sampling.top_k, len(scores)) - 1]
        scores = np.where(scores >= kth, scores, -np.inf)
    if sampling.top_p < 1:
        weights = np.exp(scores)
        falling = np.sort(weights)[::-1]
        needed = int(np.argmax(np.cumsum(falling) >= sampling.top_p * falling.sum()))
        scores = np.where(weights >= falling[needed], scores, -np.inf)
    if sampling.min_p > 0:
        scores = np.where(scores >= np.log(sampling.min_p), scores, -np.inf)
    return scores


def reference_pick(logits: np.ndarray, position: int, sampling: Sampling) -> int:
    if sampling.greedy:
        return int(np.flatnonzero(logits == logits.max())[0])
    seed = sampling.arrays().seed
    noise = gumbel(seed, position, np.arange(len(logits))).astype(np.float64)
    return int(np.argmax(reference_scores(logits, sampling) + noise))


def reference_tokens(prompt, sampling: Sampling, count: int) -> list[int]:
    """The reply, each token from a forward of everything before it."""
    sequence = list(prompt)
    for _ in range(count):
        logits = reference_logits(sequence)[-1]
        sequence.append(reference_pick(logits, len(sequence), sampling))
    return sequence[len(prompt) :]


# Drafts that land -------------------------------------------------------------------------


def tree_around(rng: np.random.Generator, right: list[int], width: int) -> DraftTree:
    """A random tree of `width` nodes, many of which continue as `right` does."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    on_path = {NO_PARENT: 0}  # node -> how many of `right` its path spells
    used: dict[int, set[int]] = {}
    deepest = NO_PARENT
    while len(tokens) < width:
        parent = deepest if rng.random() < 0.7 else int(rng.integers(-1, len(tokens)))
        siblings = used.setdefault(parent, set())
        wanted = right[on_path[parent]] if parent in on_path else -1
        landing = wanted >= 0 and wanted not in siblings and rng.random() < 0.7
        token = wanted if landing else int(rng.integers(0, KNOWN))
        if token in siblings:
            continue
        siblings.add(token)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        depths.append(1 if parent == NO_PARENT else depths[parent] + 1)
        if token == wanted:
            on_path[node] = on_path[parent] + 1
            deepest = node
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.zeros(width),
    )


def proposals_around(rng: np.random.Generator, right: list[int]) -> Proposals:
    """Proposals at 15 positions that hold `right` at random ranks, often the first."""
    depth, count = DRAFTER.block_size - 1, DRAFTER.selector_top_k
    candidates = np.stack([rng.permutation(KNOWN)[:count] for _ in range(depth)]).astype(np.int32)
    unary = rng.normal(0, 2, (depth, count)).astype(np.float32)
    for position, token in enumerate(right[:depth]):
        if token not in candidates[position]:
            candidates[position, rng.integers(count)] = token
        unary[position, candidates[position] == token] += rng.choice([0.0, 12.0], p=[0.15, 0.85])
    edge = rng.normal(0, 1, (depth, count, count)).astype(np.float32)
    return Proposals(candidates, own_log_chances(Lattice(candidates, unary, edge)))


def knowing_decoder(prompt, replies: list[int], seed: int = 0, base=None) -> Decoder:
    """A decoder with a drafter that mostly knows the reply, and buffers of its own.

    `base`: None is the session's.
    """
    base = base or decoder()
    rng = np.random.default_rng(seed)

    def draft(weights, cache, taps, count, length, *rest):
        cache, _ = base.executables.draft(weights, cache, taps, count, length, *rest)
        begin = int(length) - len(prompt) + 1
        return cache, proposals_around(rng, replies[begin:])

    executables = base.executables._replace(draft=draft)
    return dataclasses.replace(base, executables=executables, buffers=new_buffers(base.spec))


def new_buffers(spec: DecodeSpec | None = None) -> Buffers:
    """Buffers that no stream has used."""
    spec = spec or decoder().spec
    return Buffers(new_target_state(spec), new_drafter_cache(spec))


# Rounds without the driver ----------------------------------------------------------------


def copied(tree):
    """A copy whose buffers may be donated."""
    return jax.tree.map(jnp.copy, tree)


def prefilled(prompt, sampling: Sampling = GREEDY) -> TargetState:
    """A state of its own with the prompt in its cache."""
    base = decoder()
    state = new_target_state(base.spec)
    arrays = jax.tree.map(jnp.asarray, sampling.arrays())
    for begin in range(0, len(prompt), CHUNK):
        piece = np.asarray(prompt[begin : begin + CHUNK], np.int32)
        tokens = jnp.asarray(np.pad(piece, (0, CHUNK - len(piece))))
        state = base.executables.prefill(
            base.weights, state, tokens, jnp.int32(len(piece)), arrays, base.neutral[HEAD_ROWS]
        ).state
    return state


def verify(state: TargetState, tree: DraftTree, width: int, sampling: Sampling = GREEDY):
    """One round; donates the state."""
    base = decoder()
    window = jnp.asarray(window_array(tree, width, base.spec.policy.rows(width)))
    arrays = jax.tree.map(jnp.asarray, sampling.arrays())
    return base.executables.verify[width](
        base.weights, state, window, arrays, base.neutral[len(window)]
    )


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
