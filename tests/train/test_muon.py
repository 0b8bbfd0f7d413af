"""Muon: orthogonal updates, whatever the shape, and which parameters get them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import InputError
from dflash_jax.train.muon import UPDATE_RMS, orthogonalize, scale_by_muon
from dflash_jax.train.step import TrainConfig, initial_state
from tests.train import tiny


def test_singular_values_become_about_one():
    matrices = jax.random.normal(jax.random.key(0), (3, 16, 40))
    values = np.linalg.svd(np.asarray(orthogonalize(matrices), np.float32), compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_matrices_of_one_shape_do_not_mix():
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = [(8, 12), (12, 8), (8, 12), (8, 8)]
    gradients = [jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]
    muon = scale_by_muon()
    together, _ = muon.update(gradients, muon.init(gradients))
    for gradient, update in zip(gradients, together, strict=True):
        (alone,), _ = muon.update([gradient], muon.init([gradient]))
        assert update.shape == gradient.shape
        np.testing.assert_allclose(update, alone, atol=2e-2)
        assert np.sqrt(np.mean(update**2)) == pytest.approx(UPDATE_RMS, rel=0.3)
        # The update points where the gradient does.
        assert float(jnp.sum(update * gradient)) > 0


def test_training_with_muon_learns_and_resumes_exactly(tmp_path):
    settings = {"optimizer": "muon", "learning_rate": 1e-2, "steps": 60}
    straight = tiny.trainer(tmp_path / "straight", **settings)
    start = straight.evaluate().loss
    list(straight.run(until=30))
    assert straight.evaluate().loss < start - 0.3
    list(tiny.trainer(tmp_path / "parts", **settings).run(until=11))
    second = tiny.trainer(tmp_path / "parts", **settings)
    list(second.run(until=30))
    jax.tree.map(np.testing.assert_array_equal, second.state, straight.state)


def test_codebooks_and_kernels_are_adams():
    models = tiny.trainer_models(optimizer="muon")
    muon = initial_state(models).opt[1].inner_states["muon"].inner_state.momentum
    shapes = {leaf.shape for leaf in jax.tree.leaves(muon)}
    assert (tiny.VOCABULARY, 8) not in shapes
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(muon)}
    assert any("fc" in name for name in names)
    assert not any("kernel_projection" in name or "norm" in name for name in names)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(InputError, match="optimizer 'sgd' is none of"):
        TrainConfig(optimizer="sgd")
