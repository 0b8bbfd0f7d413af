"""The drafter against the reference package, on tiny random weights, over growing contexts."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints.drafter import name_table
from dflash_jax.checkpoints.names import nest
from dflash_jax.models.dflash2 import DFlash2
from dflash_jax.models.dflash2_config import FULL, SLIDING, DrafterConfig, visible
from dflash_jax.models.layers import Rotary, attention, inverse_frequencies, rotary_table

torch = pytest.importorskip("torch")
dflash = pytest.importorskip("dflash.model")
transformers = pytest.importorskip("transformers")

BASE = DrafterConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position_embeddings=256,
    num_target_layers=9,
    target_layer_ids=(1, 4, 6),
    mask_token_id=95,
    block_size=8,
    layer_types=(SLIDING, FULL),
    sliding_window=64,
    is_causal=False,
    conv_kernel_size=2,
    conv_group_size=8,
    selector_rank=12,
    selector_top_k=5,
)
PLAIN = {"conv_kernel_size": 0, "conv_group_size": 0, "selector_rank": 0, "selector_top_k": 0}
ALL_FULL = {"layer_types": (FULL,) * 2, "sliding_window": None}
VARIANTS = {
    "long window": {},
    "short window": {"sliding_window": 6},
    "window below the block": {"sliding_window": 3},
    "window of one": {"sliding_window": 1},
    "all sliding": {"layer_types": (SLIDING,) * 2, "sliding_window": 9},
    "full": ALL_FULL,
    "causal": {"is_causal": True, "sliding_window": 6},
    "causal full": {"is_causal": True, **ALL_FULL},
    "causal where sliding": {"is_causal": None, "sliding_window": 6},
    "is_causal absent, full": {"is_causal": None, **ALL_FULL},
    "three taps": {"conv_kernel_size": 3, "conv_group_size": 4},
    "scaled head": {"output_multiplier": 0.5, "final_logit_softcapping": 3.0},
    "biased, other base": {"attention_bias": True, "rope_theta": 1e6},
    "DFlash": {**PLAIN, "sliding_window": 6},
    "DFlash causal": {**PLAIN, "is_causal": True, **ALL_FULL},
}
# Large enough for attention and convolutions to matter; at 0.25 the reference itself is 4e-5 from
# its float64 self, at this scale 2e-6.
WEIGHT_SCALE = 0.12
# Rows committed each round: the prompt, then what a verify accepts; one row more than once.
COMMITS = (11, 1, 4, 1, 1, 4, 4)


def reference_config(config: DrafterConfig) -> Any:
    """The same drafter as the reference's `Qwen3Config`."""
    names = ("block_size", "mask_token_id", "target_layer_ids", "input_embedding_scale")
    names += ("output_multiplier", "final_logit_softcapping")
    if config.has_selector:
        names += ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    sliding = SLIDING in config.layer_types
    extra = {} if config.is_causal is None else {"is_causal": config.is_causal}
    return transformers.Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        attention_bias=config.attention_bias,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        layer_types=list(config.layer_types),
        use_sliding_window=sliding,
        sliding_window=config.sliding_window if sliding else None,
        num_target_layers=config.num_target_layers,
        dflash_config={name: getattr(config, name) for name in names},
        **extra,
    )


class Pair(NamedTuple):
    """One drafter twice."""

    config: DrafterConfig
    params: dict[str, Any]
    reference: Any

    def apply(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return DFlash2(self.config).apply({"params": self.params}, *args, method=method, **kwargs)


def make_pair(config: DrafterConfig, seed: int = 0) -> Pair:
    kind = dflash.DFlash2DraftModel if config.has_selector else dflash.DFlashDraftModel
    torch.manual_seed(seed)
    model = kind(reference_config(config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if name.endswith("norm.weight") else 0.0
            scale = 1.0 if "codebook" in name else WEIGHT_SCALE
            parameter.copy_(around + scale * torch.randn_like(parameter))
    state = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    table = name_table(config, weight_suffix=True)
    assert state.keys() == {entry.name for entry in table}
    params = nest({entry.path: jnp.asarray(state[entry.name]) for entry in table})
    return Pair(config, params, model)


class Inputs(NamedTuple):
    """What the target gives, for all rounds."""

    taps: np.ndarray  # [S, taps * D]
    embeds: np.ndarray  # [rounds, T, D]
    anchors: np.ndarray  # [rounds] int
    head: np.ndarray  # [V, D]


def make_inputs(config: DrafterConfig, rows: int, seed: int = 1) -> Inputs:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    d = config.hidden_size
    return Inputs(
        taps=normal(sum(COMMITS), len(config.target_layer_ids) * d),
        embeds=normal(len(COMMITS), rows, d),
        anchors=rng.integers(0, config.vocab_size, len(COMMITS)),
        head=normal(config.vocab_size, d),
    )


def reference_hidden(pair: Pair, inputs: Inputs, cached: bool) -> list[np.ndarray]:
    """Hidden rows [T, D] of each round's block by the reference."""
    cache = transformers.DynamicCache(config=pair.reference.config)
    cache.activate_past_recording()
    hidden, start = [], 0
    rows = inputs.embeds.shape[1]
    for round_, commit in enumerate(COMMITS):
        first = start if cached else 0
        start += commit
        with torch.no_grad():
            out = pair.reference(
                target_hidden=torch.from_numpy(inputs.taps[None, first:start]),
                noise_embedding=torch.from_numpy(inputs.embeds[None, round_]),
                position_ids=torch.arange(first, start + rows)[None],
                past_key_values=cache if cached else None,
                use_cache=cached,
            )
        if cached:
            cache.crop(-(cache.get_seq_length() - start))
        hidden.append(out[0].numpy())
    return hidden


def our_hidden(pair: Pair, inputs: Inputs, capacity: int = 48) -> list[np.ndarray]:
    """The same with a padded cache of keys and values, as decoding keeps it."""
    c, start, hidden = pair.config, 0, []
    table = rotary_table(inverse_frequencies(c.head_dim, c.rope_theta), c.max_position_embeddings)
    # Garbage in unfilled slots: it must not be seen.
    garbage = jnp.full((1, capacity, c.num_kv_heads, c.head_dim), 1e4)
    cache = [(garbage, garbage)] * c.num_layers
    context = jax.jit(lambda taps, rotary: pair.apply(DFlash2.context, taps, rotary))
    block = jax.jit(lambda *args: _block(pair, table, *args))
    for round_, commit in enumerate(COMMITS):
        new = jnp.arange(start, start + commit)
        rows = context(jnp.asarray(inputs.taps[None, start : start + commit]), table.at(new))
        cache = [
            (keys.at[:, new].set(k), values.at[:, new].set(v))
            for (keys, values), (k, v) in zip(cache, rows, strict=True)
        ]
        start += commit
        embeds = jnp.asarray(inputs.embeds[None, round_])
        hidden.append(np.asarray(block(embeds, jnp.int32(start), cache)[0]))
    return hidden


def _block(pair: Pair, table: Rotary, embeds: jax.Array, start: jax.Array, cache: Any) -> jax.Array:
    """One block at `start`, over a cache of which the first `start` slots are filled."""
    positions, slots = start + jnp.arange(embeds.shape[-2]), jnp.arange(cache[0][0].shape[-3])

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        context = visible(pair.config, layer, positions, slots) & (slots < start)
        own = visible(pair.config, layer, positions, positions)
        k = jnp.concatenate([cache[layer][0], k], axis=-3)
        v = jnp.concatenate([cache[layer][1], v], axis=-3)
        return attention(q, k, v, jnp.concatenate([context, own], axis=-1))

    return pair.apply(DFlash2.block, embeds, table.at(positions), attend)


def reference_lattice(pair: Pair, hidden: np.ndarray, anchor: int, head: np.ndarray):
    """(path [P], candidates [P, K], scores [P, K, K]) from the reference's own parts, sorted."""
    selector = pair.reference.candidate_selector
    h, linear = torch.from_numpy(hidden[None, 1:].copy()), torch.nn.Linear(*head.shape[::-1], False)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(head))
        path, candidates, _ = pair.reference.propose(h, torch.tensor([anchor]), linear, 0.0)
        logits = pair.reference.compute_logits(h, linear)[0]
        candidates = candidates[0].sort(dim=-1).values
        unary = logits.gather(-1, candidates)
        order = torch.argsort(unary, dim=-1, descending=True, stable=True)
        candidates, unary = candidates.gather(-1, order), unary.gather(-1, order)
        before = torch.cat([torch.full_like(candidates[:1], anchor), candidates[:-1]])
        predecessor = (
            selector.predecessor_codebook(before) * selector.hidden_projection(h)[0][:, None]
        )
        edge = torch.einsum("par,pbr->pab", predecessor, selector.successor_codebook(candidates))
    return path[0].numpy(), candidates.numpy(), (unary[:, None] + edge).numpy()


def greedy_path(lattice: Any) -> list[int]:
    """The best successor of each chosen candidate, from the anchor on."""
    path, before = [], 0
    for candidates, unary, edge in zip(*lattice, strict=True):
        before = int(np.argmax(unary + edge[before]))
        path.append(int(candidates[before]))
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_equal_the_reference_over_growing_contexts(variant):
    pair = make_pair(dataclasses.replace(BASE, **VARIANTS[variant]))
    inputs = make_inputs(pair.config, rows=pair.config.block_size)
    ours = our_hidden(pair, inputs)
    for cached in (False, True):
        for mine, theirs in zip(ours, reference_hidden(pair, inputs, cached), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [2, 3, 5, 7])
def test_blocks_below_the_trained_size_equal_the_reference(rows):
    pair = make_pair(dataclasses.replace(BASE, sliding_window=6, conv_kernel_size=3))
    inputs = make_inputs(pair.config, rows=rows)
    theirs = reference_hidden(pair, inputs, cached=True)
    for mine, reference in zip(our_hidden(pair, inputs), theirs, strict=True):
        np.testing.assert_allclose(mine, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["long window", "causal", "scaled head", "three taps"])
def test_candidates_scores_and_path_equal_the_reference(variant):
    pair = make_pair(dataclasses.replace(BASE, **VARIANTS[variant]))
    inputs = make_inputs(pair.config, rows=pair.config.block_size)
    moved = 0
    for round_, hidden in enumerate(reference_hidden(pair, inputs, cached=True)):
        anchor = int(inputs.anchors[round_])
        path, candidates, scores = reference_lattice(pair, hidden, anchor, inputs.head)
        h = jnp.asarray(hidden[1:])
        logits = pair.apply(DFlash2.logits, h, jnp.asarray(inputs.head))
        lattice = pair.apply(DFlash2.lattice, h, logits, jnp.int32(anchor))
        lattice = jax.tree.map(np.asarray, lattice)
        np.testing.assert_array_equal(lattice.candidates, candidates)
        ours = lattice.unary[:, None] + lattice.edge
        np.testing.assert_allclose(ours, scores, atol=1e-5, rtol=1e-5)
        assert greedy_path(lattice) == path.tolist()
        moved += int((path != candidates[:, 0]).sum())
    assert moved > 5, "the selector must matter, or the test says nothing"


def test_plain_dflash_drafts_the_best_logits():
    pair = make_pair(dataclasses.replace(BASE, **VARIANTS["DFlash"]))
    inputs = make_inputs(pair.config, rows=pair.config.block_size)
    for hidden in reference_hidden(pair, inputs, cached=True):
        h = jnp.asarray(hidden[1:])
        logits = pair.apply(DFlash2.logits, h, jnp.asarray(inputs.head))
        lattice = pair.apply(DFlash2.lattice, h, logits, jnp.int32(0), top_k=3)
        assert lattice.candidates.shape == (7, 3)
        assert not np.any(lattice.edge)
        theirs = (hidden[1:] @ inputs.head.T).argmax(-1)
        assert greedy_path(jax.tree.map(np.asarray, lattice)) == theirs.tolist()


def test_one_call_without_a_cache_equals_the_rounds():
    pair = make_pair(dataclasses.replace(BASE, sliding_window=6))
    inputs = make_inputs(pair.config, rows=pair.config.block_size)
    hidden = reference_hidden(pair, inputs, cached=True)
    for round_ in (0, 4):
        start = sum(COMMITS[: round_ + 1])
        anchor = int(inputs.anchors[round_])
        path, candidates, _ = reference_lattice(pair, hidden[round_], anchor, inputs.head)
        arrays = (inputs.taps[:start], inputs.embeds[round_], np.int32(anchor), inputs.head)
        lattice = jax.jit(lambda *args: pair.apply(None, *args))(*map(jnp.asarray, arrays))
        np.testing.assert_array_equal(lattice.candidates, candidates)
        assert greedy_path(jax.tree.map(np.asarray, lattice)) == path.tolist()


# The faults below are those that the field reports: each must show, or the parity proves nothing.


def _differs(pair: Pair, changed: Pair, inputs: Inputs, changed_inputs: Inputs) -> float:
    ours, theirs = our_hidden(pair, inputs), our_hidden(changed, changed_inputs)
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "change",
    [{"sliding_window": 64}, {"rope_theta": 1e6}, {"is_causal": True}, {"is_causal": None}],
    ids=["window ignored", "another RoPE base", "causal", "is_causal dropped"],
)
def test_a_wrong_config_shows_in_the_hidden_states(change):
    pair = make_pair(dataclasses.replace(BASE, sliding_window=6))
    changed = pair._replace(config=dataclasses.replace(pair.config, **change))
    inputs = make_inputs(pair.config, rows=8)
    assert _differs(pair, changed, inputs, inputs) > 1e-2


def test_taps_in_another_order_show_in_the_hidden_states():
    pair = make_pair(BASE)
    inputs = make_inputs(BASE, rows=8)
    swapped = inputs._replace(taps=np.roll(inputs.taps, BASE.hidden_size, axis=-1))
    assert _differs(pair, pair, inputs, swapped) > 1e-2


def test_a_tap_is_the_output_of_its_block():
    """`target_layer_ids` l is the reference's hidden_states[l + 1]."""
    states = [torch.full((1, 2, 4), float(index)) for index in range(BASE.num_target_layers + 1)]
    taps = dflash.extract_context_feature(states, list(BASE.target_layer_ids))
    assert taps[0, 0, ::4].tolist() == [layer + 1 for layer in BASE.target_layer_ids]
