"""Blocks are isolated, and the training forward is the serving forward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models.dflash2 import DFlash2, init_params
from dflash_jax.train.blocks import block_hidden, choose_anchors, cut_blocks
from dflash_jax.train.losses import make_head
from dflash_jax.train.step import Frozen, Models, drafter_table, read_target
from tests.train import tiny

CONFIG = tiny.drafter_config()
DRAFTED = CONFIG.block_size - 1


@pytest.fixture(scope="module")
def frozen():
    params = tiny.target_params()
    embedding = params["embed_tokens"]["weight"]
    return Frozen(params, embedding, make_head(embedding, None))


@pytest.fixture(scope="module")
def params():
    """Random everywhere, so that convolutions and norms matter."""
    start = init_params(CONFIG, jax.random.key(1))
    leaves, tree = jax.tree.flatten(start)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


@pytest.fixture(scope="module")
def draft(frozen, params):
    """tokens [1, S], anchors [1, A] -> hidden [A, P, D]."""
    models = Models(tiny.TARGET, CONFIG, tiny.train_config())

    @jax.jit
    def run(tokens, anchors):
        own = jnp.ones(tokens.shape, bool)
        _, taps = read_target(models, frozen, tokens)
        blocks = cut_blocks(tokens, own, anchors, DRAFTED)
        table = drafter_table(CONFIG, tokens.shape[1])
        return block_hidden(CONFIG, params, taps, frozen.embedding, blocks, table)[0]

    return lambda tokens, anchors: np.asarray(
        run(jnp.asarray(tokens)[None], jnp.asarray(anchors)[None])
    )


def some_tokens():
    return np.random.default_rng(0).integers(0, tiny.VOCABULARY, tiny.LENGTH).astype(np.int32)


@pytest.mark.parametrize("anchor", [1, 7, 20, tiny.LENGTH - 1])
def test_a_block_sees_no_token_after_its_anchor(draft, anchor):
    tokens, anchors = some_tokens(), [1, 7, 20, tiny.LENGTH - 1]
    place = anchors.index(anchor)
    changed = tokens.copy()
    changed[anchor + 1 :] = (changed[anchor + 1 :] + 1) % tiny.VOCABULARY
    before, after = draft(tokens, anchors)[place], draft(changed, anchors)[place]
    np.testing.assert_array_equal(before, after)


def test_a_block_sees_its_anchor_only_as_a_row_of_its_own(draft):
    # The anchor's embedding counts; the target's hidden states at it must not, so the block
    # equals one whose context ends before the anchor. Blocks at later positions do see it.
    tokens = some_tokens()
    changed = tokens.copy()
    changed[20] = (changed[20] + 1) % tiny.VOCABULARY
    before, after = draft(tokens, [7, 20, 24]), draft(changed, [7, 20, 24])
    np.testing.assert_array_equal(before[0], after[0])
    assert np.abs(before[1] - after[1]).max() > 1e-3
    assert np.abs(before[2] - after[2]).max() > 1e-4


def test_blocks_do_not_see_each_other(draft):
    tokens = some_tokens()
    together = draft(tokens, [5, 6, 7, 30])
    for other in ([5, 20, 21, 22], [5, 5, 5, 5], [5, 8, 9, 47]):
        np.testing.assert_allclose(draft(tokens, other)[0], together[0], atol=1e-6)


@pytest.mark.parametrize("anchor", [1, 3, 20, tiny.LENGTH - 1])
def test_training_forward_equals_serving_forward(draft, frozen, params, anchor):
    tokens = some_tokens()
    models = Models(tiny.TARGET, CONFIG, tiny.train_config())
    model, head = DFlash2(CONFIG), frozen.head.weight

    @jax.jit
    def serve(known, ids):
        # The target has read the tokens before the anchor; nothing else exists.
        _, taps = read_target(models, frozen, known[None])
        return model.apply({"params": params}, taps[0], frozen.embedding[ids], ids[0], head)

    @jax.jit
    def lattice_of(hidden, anchor_token):
        logits = model.apply({}, hidden, head, method="logits")
        return model.apply({"params": params}, hidden, logits, anchor_token, method="lattice")

    ids = jnp.array([tokens[anchor]] + [CONFIG.mask_token_id] * DRAFTED)
    lattice = serve(jnp.asarray(tokens[:anchor]), ids)
    ours = lattice_of(draft(tokens, [anchor, 2, 9, 30])[0], ids[0])
    np.testing.assert_array_equal(ours.candidates, lattice.candidates)
    np.testing.assert_allclose(ours.unary, lattice.unary, atol=2e-5)
    np.testing.assert_allclose(ours.edge, lattice.edge, atol=2e-5)


def test_labels_end_where_the_target_stops_to_speak():
    tokens = jnp.arange(10)[None]
    own = jnp.array([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1]], bool)
    blocks = cut_blocks(tokens, own, jnp.array([[2, 3, 6, 5, 0]]), 3)
    assert blocks.labels[0, 0].tolist() == [3, 4, 5]
    assert blocks.valid[0].astype(int).tolist() == [
        [1, 1, 0],  # 5 is not the target's own
        [1, 0, 0],
        [1, 1, 1],
        [0, 0, 0],  # the anchor itself is not
        [0, 0, 0],
    ]


def test_anchors_are_possible_ones_while_there_are_enough():
    own = jnp.zeros((2, 32), bool).at[0, 8:20].set(True).at[1, 0:3].set(True)
    anchors = np.asarray(choose_anchors(own, 8, jax.random.key(0)))
    assert len(set(anchors[0])) == 8
    assert set(anchors[0]) <= set(range(8, 19))
    assert 1 in anchors[1]
    assert len(set(anchors[1])) == 8
