"""Training from a drafter's weights: the same function at first, refused where it does not fit."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dflash_jax.checkpoints.drafter import save_drafter
from dflash_jax.errors import InputError
from dflash_jax.models.dflash2 import init_params
from tests.train import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A drafter of one layer, ten steps old, and its held-out loss."""
    config = tiny.drafter_config(num_layers=1, layer_types=("full_attention",))
    trainer = tiny.trainer(tmp_path_factory.mktemp("one"), config)
    list(trainer.run(until=10))
    return trainer.export(), trainer.evaluate()


def deeper(**overrides):
    kinds = ("full_attention",) * 3
    return tiny.drafter_config(num_layers=3, layer_types=kinds, **overrides)


def test_new_layers_change_nothing_at_first_and_then_learn(tmp_path, trained):
    folder, metrics = trained
    trainer = tiny.trainer(tmp_path, deeper(), start_from=str(folder))
    assert trainer.evaluate().loss == pytest.approx(metrics.loss, abs=1e-5)
    before = trainer.state.params["layers_2"]["mlp"]["down_proj"]["weight"]
    assert not np.any(before)
    list(trainer.run(until=12))
    assert np.any(trainer.state.params["layers_2"]["mlp"]["down_proj"]["weight"])


def test_resume_does_not_start_over_nor_need_the_folder(tmp_path, trained):
    folder, _ = trained
    list(tiny.trainer(tmp_path, deeper(), start_from=str(folder)).run(until=3))
    again = tiny.trainer(tmp_path, deeper(), start_from="/gone")
    assert again.step == 3


def test_a_draft_vocabulary_may_be_added(tmp_path, trained):
    trainer = tiny.trainer(tmp_path, deeper(draft_vocab_size=16), start_from=str(trained[0]))
    assert "draft_vocab" not in trainer.state.params


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"intermediate_size": 64}, r"its layers\.0\.mlp\.down_proj\.weight is \(32, 48\)"),
        ({"selector_rank": 0, "selector_top_k": 0}, "candidate_selector.*the recipe's missing"),
        ({"target_layer_ids": (1, 0)}, r"it reads the taps \[0, 1\], the recipe \[1, 0\]"),
    ],
)
def test_another_shape_is_one_line(tmp_path, trained, overrides, message):
    with pytest.raises(InputError, match=message) as error:
        tiny.trainer(tmp_path, deeper(**overrides), start_from=str(trained[0]))
    assert "\n" not in str(error.value)


def test_more_layers_than_the_recipe_are_refused(tmp_path):
    params = init_params(deeper(), jax.random.key(0))
    save_drafter(tmp_path / "three", deeper(), params)
    with pytest.raises(InputError, match="it has 3 layers, the recipe 2"):
        tiny.trainer(tmp_path / "run", start_from=str(tmp_path / "three"))


def test_no_such_folder(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        tiny.trainer(tmp_path, start_from=str(tmp_path / "nothing"))
