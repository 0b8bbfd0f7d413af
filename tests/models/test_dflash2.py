"""The drafter's own promises, without the reference package (see test_dflash2_parity.py)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import InputError
from dflash_jax.models.dflash2 import DFlash2, convolve, init_params
from dflash_jax.models.dflash2_config import FULL, SLIDING, DrafterConfig, visible
from dflash_jax.models.layers import attention, inverse_frequencies, rotary_table

CONFIG = DrafterConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position_embeddings=64,
    num_target_layers=6,
    target_layer_ids=(1, 4),
    mask_token_id=63,
    block_size=4,
    layer_types=(SLIDING, FULL),
    sliding_window=5,
    is_causal=False,
    conv_kernel_size=2,
    conv_group_size=4,
    selector_rank=6,
    selector_top_k=3,
)


@functools.cache
def random_params(config: DrafterConfig) -> dict:
    """Noise around 1 for the norms and 0 for the rest, so that no part is the identity."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        if leaf.dtype == jnp.int32:  # draft_vocab
            return jnp.arange(*leaf.shape, dtype=jnp.int32)
        around = float("norm" in path[-2].key)
        return jnp.asarray(around + 0.2 * rng.standard_normal(leaf.shape, np.float32))

    return jax.tree_util.tree_map_with_path(draw, shapes)


def normal(*shape: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def apply(config: DrafterConfig, params: dict, method, *args, **kwargs):
    def call(params, args):
        return DFlash2(config).apply({"params": params}, *args, method=method, **kwargs)

    return jax.jit(call)(params, args)


def run_block(config: DrafterConfig, params: dict, embeds: jax.Array) -> jax.Array:
    """A block at position 0 without context."""
    positions = jnp.arange(embeds.shape[-2])
    rotary = rotary_table(inverse_frequencies(config.head_dim, config.rope_theta), len(positions))

    def attend(layer, q, k, v):
        return attention(q, k, v, visible(config, layer, positions, positions))

    def call(params, embeds):
        variables = {"params": params}
        return DFlash2(config).apply(variables, embeds, rotary, attend, method=DFlash2.block)

    return jax.jit(call)(params, embeds)


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),  # full: everything, whatever the window
        ({"is_causal": True}, [0, 1, 2, 3]),
    ],
)
def test_full_layers_see(change, row):
    config = dataclasses.replace(CONFIG, **change)
    mask = visible(config, 1, jnp.array([3]), jnp.arange(7))
    assert np.flatnonzero(mask[0]).tolist() == row


@pytest.mark.parametrize(
    ("is_causal", "row"),
    [(False, [2, 3, 4, 5, 6]), (True, [2, 3, 4]), (None, [2, 3, 4])],
)
def test_sliding_layers_see_less_than_a_window_away(is_causal, row):
    config = dataclasses.replace(CONFIG, sliding_window=3, is_causal=is_causal)
    mask = visible(config, 0, jnp.array([4]), jnp.arange(9))
    assert np.flatnonzero(mask[0]).tolist() == row


def test_block_row_i_sees_the_last_window_minus_one_minus_i_context_rows():
    config = dataclasses.replace(CONFIG, sliding_window=8, block_size=8)
    context, block = jnp.arange(100), 100 + jnp.arange(8)
    seen = visible(config, 0, block, context).sum(-1)
    assert seen.tolist() == [7 - i for i in range(8)]
    assert bool(visible(config, 0, block, block).all())


def test_a_full_layer_whose_is_causal_is_absent_is_not_causal():
    config = dataclasses.replace(CONFIG, is_causal=None)
    assert not config.causal(1)
    assert config.causal(0)


def test_convolution_is_the_sum_over_earlier_rows():
    x, base, dynamic = normal(2, 5, 8), normal(3, 8, seed=2), normal(2, 5, 3, 2, seed=3)
    got = convolve(x, base, dynamic)
    want = np.zeros(x.shape, np.float32)
    for t in range(5):
        for tap in range(3):
            if t - tap >= 0:
                kernel = base[tap] + np.repeat(dynamic[:, t, tap], 4, axis=-1)
                want[:, t] += kernel * x[:, t - tap]
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2])
def test_convolution_with_more_taps_than_rows(rows):
    x, base, dynamic = normal(4, 8), normal(3, 8, seed=2), normal(4, 3, 2, seed=3)
    short = convolve(x[:rows], base, dynamic[:rows])
    np.testing.assert_allclose(short, convolve(x, base, dynamic)[:rows], atol=1e-6)


def test_initial_convolutions_change_nothing():
    params = init_params(CONFIG, jax.random.key(0))
    plain = dataclasses.replace(CONFIG, conv_kernel_size=0, conv_group_size=0)
    embeds = normal(4, 16)
    np.testing.assert_array_equal(
        run_block(CONFIG, params, embeds), run_block(plain, params, embeds)
    )
    codebook = params["candidate_selector"]["predecessor_codebook"]
    assert 0.015 < float(codebook.std()) < 0.025


def test_the_block_depends_on_no_batch_neighbour():
    params, embeds = random_params(CONFIG), normal(3, 2, 4, 16)
    batched = run_block(CONFIG, params, embeds)
    assert batched.shape == (3, 2, 4, 16)
    alone = run_block(CONFIG, params, embeds[1, 0])
    np.testing.assert_allclose(batched[1, 0], alone, atol=1e-5)


def test_context_rows_are_independent_of_each_other():
    """One row at a time gives what a whole prompt gives: the context is linear maps and norms."""
    params, taps = random_params(CONFIG), normal(6, 32)
    table = rotary_table(inverse_frequencies(8, CONFIG.rope_theta), 6)
    whole = apply(CONFIG, params, DFlash2.context, taps, table)
    assert [part.shape for part in whole[0]] == [(6, 1, 8), (6, 1, 8)]
    for row in range(6):
        position = jnp.array([row])
        one = apply(CONFIG, params, DFlash2.context, taps[row : row + 1], table.at(position))
        for layer in range(2):
            for got, want in zip(one[layer], whole[layer], strict=True):
                np.testing.assert_allclose(got[0], want[row], atol=1e-5)


def test_one_context_row_is_not_the_context():
    params = random_params(CONFIG)
    taps, embeds, head = normal(6, 32), normal(4, 16, seed=2), normal(64, 16, seed=3)
    whole = apply(CONFIG, params, None, taps, embeds, jnp.int32(5), head)
    last = apply(CONFIG, params, None, taps[-1:], embeds, jnp.int32(5), head)
    assert float(jnp.abs(whole.unary - last.unary).max()) > 1e-3


def test_lattice_scores_are_the_products_of_the_codebooks():
    params = random_params(CONFIG)
    hidden, anchor = normal(2, 3, 16), jnp.array([7, 9], jnp.int32)
    logits = apply(CONFIG, params, DFlash2.logits, hidden, normal(64, 16, seed=3))
    lattice = apply(CONFIG, params, DFlash2.lattice, hidden, logits, anchor)
    assert lattice.candidates.shape == (2, 3, 3)
    assert lattice.candidates.dtype == jnp.int32
    assert lattice.edge.shape == (2, 3, 3, 3)
    assert lattice.edge.dtype == lattice.unary.dtype == jnp.float32
    selector = jax.tree.map(np.asarray, params["candidate_selector"])
    gate = np.asarray(hidden) @ selector["hidden_projection"]["weight"].T
    candidates = np.asarray(lattice.candidates)
    for b, d, before, after in np.ndindex(2, 3, 3, 3):
        token = anchor[b] if d == 0 else candidates[b, d - 1, before]
        want = np.sum(
            selector["predecessor_codebook"][token]
            * gate[b, d]
            * selector["successor_codebook"][candidates[b, d, after]]
        )
        np.testing.assert_allclose(lattice.edge[b, d, before, after], want, atol=1e-5)


def test_equal_logits_give_the_lower_id_first():
    logits = jnp.zeros((1, 64)).at[0, jnp.array([50, 20, 40])].set(2.0).at[0, 9].set(3.0)
    lattice = apply(CONFIG, random_params(CONFIG), DFlash2.lattice, normal(1, 16), logits,
                    jnp.int32(0))  # fmt: skip
    assert lattice.candidates[0].tolist() == [9, 20, 40]
    assert lattice.unary[0].tolist() == [3.0, 2.0, 2.0]


@pytest.mark.parametrize("batch", [(), (2,)])
def test_the_lattice_never_sorts_the_vocabulary(batch):
    config = dataclasses.replace(CONFIG, vocab_size=4096)

    def call(params, hidden, logits, anchor):
        variables = {"params": params}
        return DFlash2(config).apply(variables, hidden, logits, anchor, method=DFlash2.lattice)

    shapes = ((*batch, 3, 16), (*batch, 3, 4096))
    args = (*map(jnp.zeros, shapes), jnp.zeros(batch, jnp.int32))
    text = jax.jit(call).lower(random_params(config), *args).compile().as_text()
    assert " sort(" not in text
    assert "topk" in text.lower()


def test_scores_have_gradients():
    def loss(params, logits):
        variables = {"params": params}
        args = (normal(3, 16), logits, jnp.int32(0))
        lattice = DFlash2(CONFIG).apply(variables, *args, method=DFlash2.lattice)
        return jnp.sum(lattice.unary) + jnp.sum(lattice.edge)

    params = {"candidate_selector": random_params(CONFIG)["candidate_selector"]}
    gradients, to_logits = jax.jit(jax.grad(loss, (0, 1)))(params, normal(3, 64, seed=3))
    assert all(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(gradients))
    assert float(to_logits.sum()) == 9.0  # one for each candidate


def test_minus_zero_equals_zero():
    logits = jnp.full((1, 64), -1.0).at[0, 3].set(-0.0).at[0, 8].set(0.0)
    plain = dataclasses.replace(CONFIG, selector_rank=0, selector_top_k=0)
    lattice = apply(plain, random_params(plain), DFlash2.lattice, normal(1, 16), logits,
                    jnp.int32(0), top_k=2)  # fmt: skip
    assert lattice.candidates[0].tolist() == [3, 8]


def test_draft_vocabulary_gives_the_targets_ids():
    """The restricted head's lattice equals the whole head's with the other ids shut out."""
    ids = np.sort(np.random.default_rng(0).permutation(64)[:20]).astype(np.int32)
    config = dataclasses.replace(CONFIG, draft_vocab_size=20)
    params = random_params(config) | {"draft_vocab": jnp.asarray(ids)}
    hidden, head = normal(3, 16), normal(64, 16, seed=3)
    logits = apply(config, params, DFlash2.logits, hidden, head[ids])
    lattice = apply(config, params, DFlash2.lattice, hidden, logits, jnp.int32(2))
    whole = jnp.full((3, 64), -1e9).at[:, ids].set(logits)
    params.pop("draft_vocab")
    want = apply(CONFIG, params, DFlash2.lattice, hidden, whole, jnp.int32(2))
    for got, field in zip(lattice, want, strict=True):
        np.testing.assert_array_equal(got, field)


def test_softcap_and_multiplier():
    config = dataclasses.replace(CONFIG, output_multiplier=2.0, final_logit_softcapping=5.0)
    hidden, head = normal(3, 16), normal(64, 16, seed=3)
    logits = apply(config, {}, DFlash2.logits, hidden, head)
    want = np.tanh(np.asarray(hidden) @ np.asarray(head).T * 2 / 5) * 5
    np.testing.assert_allclose(logits, want, atol=1e-5)


def test_bfloat16_computes_logits_and_scores_in_float32():
    config = dataclasses.replace(CONFIG, dtype=jnp.bfloat16)
    params, embeds = random_params(config), normal(4, 16)
    hidden = run_block(config, params, embeds)
    assert hidden.dtype == jnp.bfloat16
    reference = run_block(CONFIG, params, embeds)
    np.testing.assert_allclose(hidden.astype(jnp.float32), reference, atol=0.15)
    logits = apply(config, params, DFlash2.logits, hidden, normal(64, 16, seed=3))
    lattice = apply(config, params, DFlash2.lattice, hidden, logits, jnp.zeros((), jnp.int32))
    assert {logits.dtype, lattice.unary.dtype, lattice.edge.dtype} == {jnp.dtype("float32")}


def test_lattice_needs_a_number_of_candidates():
    plain = dataclasses.replace(CONFIG, selector_rank=0, selector_top_k=0)
    with pytest.raises(ValueError, match="top_k"):
        apply(plain, {}, DFlash2.lattice, normal(1, 16), normal(1, 64), jnp.int32(0))


def test_config_is_hashable_and_normal():
    config = dataclasses.replace(CONFIG, target_layer_ids=[1, 4], dtype="float32")
    assert config == CONFIG
    assert hash(config) == hash(CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_heads": 2.0}, "num_heads is 2.0"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is no multiple of num_kv_heads 2"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"block_size": 1}, "block_size 1"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"target_layer_ids": (1, 6)}, r"target_layer_ids \[1, 6\] must be within 0..5"),
        ({"target_layer_ids": (-1,)}, "must be within"),
        ({"mask_token_id": 64}, "mask_token_id 64 exceeds the vocabulary of 64"),
        ({"mask_token_id": None}, "mask_token_id is None"),
        ({"layer_types": (FULL,)}, "layer_types must be 2 times"),
        ({"layer_types": (FULL, "linear_attention")}, "layer_types must be"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"is_causal": "no"}, "is_causal is 'no'"),
        ({"conv_group_size": 0}, "must both be given"),
        ({"conv_group_size": 5}, "conv_group_size 5 does not divide"),
        ({"selector_top_k": 0}, "must both be given"),
        ({"selector_top_k": 65}, "selector_top_k 65 exceeds"),
        ({"draft_vocab_size": 65}, "draft_vocab_size 65 exceeds"),
        ({"draft_vocab_size": 2}, "exceeds the 2 ids of the head"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ({"dtype": jnp.float16}, "dtype float16"),
    ],
)
def test_config_refuses(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **change)
