"""Training that starts from the weights of a drafter, which may have fewer layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.checkpoints.drafter import Drafter, load_drafter, name_table
from dflash_jax.errors import InputError
from dflash_jax.models.dflash2 import init_params
from dflash_jax.train.step import DRAFT_VOCAB, Models

# What a sublayer adds to the stream passes through these: zeros make a new layer the identity.
_OUTPUTS = (("self_attn", "o_proj"), ("mlp", "down_proj"))


def warm_start(models: Models) -> dict[str, Any]:
    """Parameters (float32) from the folder `train.start_from`; layers that it lacks change nothing.

    Block size and draft vocabulary may differ: no trained tensor has their shape.

    Raises:
      InputError: no drafter there, or one whose tensors do not fit the recipe.
    """
    folder = models.train.start_from
    drafter = load_drafter(folder, models.target)
    _check_fit(models, drafter, folder)
    params = init_params(models.drafter, jax.random.key(models.train.seed))
    params |= drafter.params
    params.pop(DRAFT_VOCAB, None)
    for layer in range(drafter.config.num_layers, models.drafter.num_layers):
        scope = params[f"layers_{layer}"]
        for sublayer, name in _OUTPUTS:
            scope[sublayer][name]["weight"] = jnp.zeros_like(scope[sublayer][name]["weight"])
    return params


def _check_fit(models: Models, drafter: Drafter, folder: str) -> None:
    ours, theirs = models.drafter, drafter.config
    if theirs.num_layers > ours.num_layers:
        raise InputError(
            f"start_from {folder}: it has {theirs.num_layers} layers, the recipe {ours.num_layers}"
        )
    if theirs.target_layer_ids != ours.target_layer_ids:
        raise InputError(
            f"start_from {folder}: it reads the taps {list(theirs.target_layer_ids)},"
            f" the recipe {list(ours.target_layer_ids)}"
        )
    wanted = {entry.name: entry.shape for entry in name_table(ours)}
    found = {entry.name: entry.shape for entry in name_table(theirs)}
    new = tuple(f"layers.{layer}." for layer in range(theirs.num_layers, ours.num_layers))
    for name in sorted({*wanted, *found} - {DRAFT_VOCAB}):
        if wanted.get(name) != found.get(name) and not name.startswith(new or ("\n",)):
            raise InputError(
                f"start_from {folder}: its {name} is {found.get(name, 'missing')},"
                f" the recipe's {wanted.get(name, 'missing')}"
            )
