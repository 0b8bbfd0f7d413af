"""`Qwen35Config` from Hugging Face's config.json.

A value that the model needs is required, not guessed; a feature that it lacks is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.checkpoints.json_values import typed
from dflash_jax.checkpoints.llama_config import rope_kind, rope_parameters
from dflash_jax.errors import InputError
from dflash_jax.models.qwen3_5 import Qwen35Config, layer_kinds

# With vision (the text part under `text_config`), and the text part alone.
ARCHITECTURES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
# Qwen35Config's name: config.json's.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "max_position_embeddings": "max_position_embeddings",
}
# What this family may say, and the only values that the model covers.
_COVERED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mlp_only_layers": ([],),
    "use_sliding_window": (False,),
}


def is_family(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of this family, covered or not."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).startswith("Qwen3_5") for name in names)


def from_hugging_face(config: Mapping[str, Any], label: str, dtype: np.dtype) -> Qwen35Config:
    """Reads config.json, already parsed; `label` names it in messages."""
    architectures = config.get("architectures") or []
    text = typed(config, "text_config", dict, label, {}) or config
    if any("Moe" in str(name) for name in architectures) or text.get("num_experts"):
        raise InputError(f"{label}: mixture-of-experts models are not supported")
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        raise InputError(
            f"{label}: architectures {architectures} is none of {sorted(ARCHITECTURES)}"
        )
    for where, part in (("", config), (" of text_config", text)):
        if (part.get("model_type") or MODEL_TYPES[0]) not in MODEL_TYPES:
            raise InputError(
                f"{label}: model_type {part['model_type']!r}{where} is not covered, only "
                + " and ".join(MODEL_TYPES)
            )
    for name, covered in _COVERED.items():
        if text.get(name) is not None and text[name] not in covered:
            raise InputError(f"{label}: {name} {text[name]!r} is not supported")

    def need(name: str, kind: type = int) -> Any:
        return typed(text, name, kind, label)

    theta, partial = _rope(text, label)
    # Publishers repeat the flag at the root; transformers obeys that one.
    tied = text if config.get("tie_word_embeddings") is None else config
    return Qwen35Config(
        **{ours: need(theirs) for ours, theirs in _SIZES.items()},
        layer_types=_layer_types(text, need("num_hidden_layers"), label),
        rms_norm_eps=need("rms_norm_eps", float),
        rope_theta=theta,
        partial_rotary_factor=partial,
        tie_word_embeddings=typed(tied, "tie_word_embeddings", bool, label, False),
        attention_bias=typed(text, "attention_bias", bool, label, False),
        dtype=dtype,
    )


def _layer_types(text: Mapping[str, Any], count: int, label: str) -> tuple[str, ...]:
    """`layer_types`, or what `full_attention_interval` says: every n-th layer is attention."""
    kinds = typed(text, "layer_types", list, label, None)
    if kinds is None:
        interval = typed(text, "full_attention_interval", int, label, None)
        if interval is None:
            raise InputError(f"{label}: layer_types is missing, and so is full_attention_interval")
        return layer_kinds(count, interval)
    if len(kinds) != count:
        raise InputError(f"{label}: {len(kinds)} layer_types for num_hidden_layers {count}")
    return tuple(kinds)


def _rope(text: Mapping[str, Any], label: str) -> tuple[float, float]:
    """(base, share of a head's dimensions), from `rope_parameters` or the root."""
    rope = rope_parameters(text, label)
    for name in ("rope_theta", "partial_rotary_factor"):
        if rope.get(name) is None:
            raise InputError(f"{label}: {name} is missing, at the root and in rope_parameters")
    # Sections of the rotary dimensions turn by image coordinates; in text all are the position.
    kind = rope_kind(rope)
    if kind not in ("default", "mrope"):
        raise InputError(f"{label}: rope scaling {kind!r} is not supported")
    theta, partial = (
        typed(rope, name, float, label) for name in ("rope_theta", "partial_rotary_factor")
    )
    return float(theta), float(partial)
