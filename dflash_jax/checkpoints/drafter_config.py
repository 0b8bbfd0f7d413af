"""A drafter's `config.json` to a `DrafterConfig` and back.

Publishers put the drafter's own keys into `dflash_config` or at the root: the nested one is looked
at first, then the root. What neither has is an error that names it, never a guess.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from dflash_jax.checkpoints.json_values import read_json, refused_kinds
from dflash_jax.errors import InputError
from dflash_jax.models.dflash2_config import FULL, SLIDING, DrafterConfig, repeated

CONFIG = "config.json"
NESTED = "dflash_config"
DFLASH, DFLASH2 = "DFlashDraftModel", "DFlash2DraftModel"
# What DFlash2 adds; named alike in config.json and in DrafterConfig.
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# DrafterConfig's name: config.json's.
_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "num_target_layers": "num_target_layers",
    "target_layer_ids": "target_layer_ids",
    "mask_token_id": "mask_token_id",
    "block_size": "block_size",
}
_OPTIONAL = {
    "is_causal": None,
    "attention_bias": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "draft_vocab_size": 0,  # our own extension
}


class _Keys:
    """Values of a config.json, by name, from either nesting."""

    def __init__(self, path: Path) -> None:
        self.path = path
        root = read_json(path)
        nested = root.get(NESTED) or {}
        if not isinstance(nested, dict):
            raise InputError(f"{path}: {NESTED} is not an object")
        self.scopes = (nested, root)

    def optional(self, name: str, default: Any = None) -> Any:
        """The value, or `default` when it is absent or null at both nestings."""
        for scope in self.scopes:
            if scope.get(name) is not None:
                return scope[name]
        return default

    def required(self, name: str) -> Any:
        value = self.optional(name)
        if value is None:
            raise InputError(f"{self.path}: {name} is missing, in {NESTED} and at the root")
        return value


def read_config(path: Path, dtype: Any = jnp.float32) -> DrafterConfig:
    """Reads a drafter's config.json; InputError where it is incomplete or contradicts itself."""
    with refused_kinds(path):
        return _read(path, dtype)


def _read(path: Path, dtype: Any) -> DrafterConfig:
    keys = _Keys(path)
    values = {ours: keys.required(theirs) for ours, theirs in _REQUIRED.items()}
    values |= {name: keys.optional(name, default) for name, default in _OPTIONAL.items()}
    values |= _dflash2_values(keys)
    values["rope_theta"] = _rope_theta(keys)
    values["layer_types"], values["sliding_window"] = _layers(keys, values["num_layers"])
    if (act := keys.optional("hidden_act", "silu")) != "silu":
        raise InputError(f"{path}: hidden_act {act!r} is not known to this drafter, only 'silu'")
    for name in ("target_layer_ids", "layer_types"):
        if not isinstance(values[name], list):
            raise InputError(f"{path}: {name} is not a list")
        values[name] = tuple(values[name])
    return DrafterConfig(**values, dtype=dtype)


def _dflash2_values(keys: _Keys) -> dict[str, Any]:
    """DFlash2 must give its own keys (0 for a part that it lacks); DFlash must not."""
    architectures = keys.required("architectures")
    if architectures == [DFLASH2]:
        return {name: keys.required(name) for name in _DFLASH2}
    if architectures != [DFLASH]:
        raise InputError(
            f"{keys.path}: architectures is {architectures}, must be [{DFLASH2!r}] or [{DFLASH!r}]"
        )
    if given := [name for name in _DFLASH2 if keys.optional(name)]:
        raise InputError(f"{keys.path}: {DFLASH} does not have {', '.join(given)}: {DFLASH2}?")
    return {}


def _rope_theta(keys: _Keys) -> float:
    """The RoPE base: in `rope_parameters` or beside it, nested or not; only plain full RoPE."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = keys.optional(name, {})
        if not isinstance(rope, dict):
            raise InputError(f"{keys.path}: {name} is not an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1) != 1:
            raise InputError(f"{keys.path}: {name} {rope} is not supported, only plain full RoPE")
    for scope in keys.scopes:
        for rope in (scope.get("rope_parameters") or {}, scope):
            if rope.get("rope_theta") is not None:
                return rope["rope_theta"]
    raise InputError(f"{keys.path}: rope_theta is missing, in rope_parameters and outside it")


def _layers(keys: _Keys, num_layers: Any) -> tuple[Any, Any]:
    """Layer types and window. `use_sliding_window: false` must not contradict the types."""
    window, use = keys.optional("sliding_window"), keys.optional("use_sliding_window")
    types = keys.optional("layer_types")
    if types is None:
        if window is not None and use is not False:
            raise InputError(f"{keys.path}: sliding_window is given, but layer_types is missing")
        types = list(repeated(FULL, num_layers))
    if use is False and isinstance(types, list) and SLIDING in types:
        raise InputError(f"{keys.path}: layer_types has {SLIDING}, but use_sliding_window is false")
    return types, window


def config_json(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a drafter whose tensors are stored as `dtype`; the reference reads it."""
    is_dflash2 = config.has_convolutions or config.has_selector
    sliding = SLIDING in config.layer_types
    nested: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
    }
    if config.final_logit_softcapping is not None:
        nested["final_logit_softcapping"] = config.final_logit_softcapping
    if is_dflash2:
        nested |= {name: getattr(config, name) for name in _DFLASH2}
    if config.draft_vocab_size:
        nested["draft_vocab_size"] = config.draft_vocab_size
    in_nested = ("block_size", "mask_token_id", "target_layer_ids")
    root = {
        theirs: getattr(config, ours)
        for ours, theirs in _REQUIRED.items()
        if theirs not in in_nested
    }
    if config.is_causal is not None:
        root["is_causal"] = config.is_causal
    return {
        "architectures": [DFLASH2 if is_dflash2 else DFLASH],
        "model_type": "qwen3",
        **root,
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        "layer_types": list(config.layer_types),
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "sliding_window": config.sliding_window if sliding else None,
        "tie_word_embeddings": False,
        "use_sliding_window": sliding,
        "dtype": dtype,
        NESTED: nested,
    }
