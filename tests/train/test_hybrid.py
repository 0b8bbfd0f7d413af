"""Training on a hybrid: its text, and its taps; the recipe asks nothing that a hybrid lacks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models.qwen3_5 import FULL, LINEAR
from dflash_jax.train import recipe
from dflash_jax.train.devices import data_mesh
from dflash_jax.train.rollout import ASSISTANT, Prompts, Rollout, RolloutConfig
from dflash_jax.train.step import Frozen, Models, read_target
from tests import tiny_qwen3_5
from tests.train import tiny
from tests.train.test_data import END, TEMPLATE

TARGET = dataclasses.replace(tiny_qwen3_5.CONFIG, vocab_size=64, layer_types=(LINEAR, FULL))


def test_own_tokens_of_greedy_rows_are_the_targets_argmax():
    params = tiny_qwen3_5.random_params(TARGET)["params"]
    config = RolloutConfig(batch=4, length=40, segments=2, max_reply_tokens=30)
    rollout = Rollout((TARGET, params), config, TEMPLATE, (END,), data_mesh(1))
    tokens = np.zeros((4, 40), np.int32)
    lengths = np.array([1, 4, 7, 4], np.int32)
    tokens[:, :7] = np.random.default_rng(0).integers(7, 60, (4, 7))
    prompts = Prompts(tokens, lengths, np.full(4, ASSISTANT), np.zeros(4, np.float32))
    written, own = rollout.write(prompts, jax.random.key(0))
    again, _ = rollout.write(prompts, jax.random.key(0))
    np.testing.assert_array_equal(written, again)  # states of the first batch are gone
    logits, _ = tiny_qwen3_5.forward(TARGET, {"params": params}, written)
    rows, places = np.nonzero(own)
    assert len(rows) > 40
    np.testing.assert_array_equal(written[rows, places], logits.argmax(-1)[rows, places - 1])


def test_training_reads_the_hybrids_taps():
    params = tiny_qwen3_5.random_params(TARGET)["params"]
    sizes = recipe.DrafterRecipe(target_layer_ids=(0, 1), mask_token_id=0, conv_group_size=8)
    drafter = sizes.drafter(TARGET, TARGET.dtype)
    assert (drafter.hidden_size, drafter.num_target_layers) == (TARGET.hidden_size, 2)
    tokens = tiny_qwen3_5.some_tokens(30, batch=2) % 64
    models = Models(TARGET, drafter, tiny.train_config())
    frozen = Frozen(params, None, None)
    hidden, taps = jax.jit(lambda t: read_target(models, frozen, t))(jnp.asarray(tokens))
    _, output = tiny_qwen3_5.forward(TARGET, {"params": params}, tokens, taps=(0, 1))
    np.testing.assert_allclose(hidden, output.hidden, rtol=0, atol=1e-5)
    np.testing.assert_allclose(taps, np.concatenate(output.taps, axis=-1), rtol=0, atol=1e-5)
