"""`LlamaConfig` from Hugging Face's config.json and from GGUF metadata.

A value that the model needs is required, not guessed; a feature that it lacks is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.checkpoints import llama_names
from dflash_jax.checkpoints.gguf_file import GGUFFile
from dflash_jax.checkpoints.json_values import typed
from dflash_jax.errors import InputError
from dflash_jax.models.llama import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LlamaConfig,
    RopeScaling,
)

# Hugging Face's class name -> model_type, and whether queries and keys are normed.
ARCHITECTURES = {"LlamaForCausalLM": ("llama", False), "Qwen3ForCausalLM": ("qwen3", True)}
GGUF_ARCHITECTURES = {"llama": False, "qwen3": True}
LLAMA_ROPE_THETA = 10000.0  # a constant of Llama's before config.json had the name, as in Llama 2's


def from_hugging_face(config: Mapping[str, Any], label: str, dtype: np.dtype) -> LlamaConfig:
    """Reads config.json, already parsed; `label` names it in messages."""
    architectures = typed(config, "architectures", list, label, [])
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        raise InputError(
            f"{label}: architectures {architectures} is none of {sorted(ARCHITECTURES)}, "
            "nor Qwen3.5's"
        )
    model_type, qk_norm = ARCHITECTURES[architectures[0]]
    if (config.get("model_type") or model_type) != model_type:
        raise InputError(
            f"{label}: model_type {config['model_type']!r} is not covered, only {model_type!r} "
            f"for {architectures[0]}"
        )
    _refuse_unknown_features(config, label)

    def need(name: str, kind: type = int) -> Any:
        return typed(config, name, kind, label)

    # Llama documents these two as following from others; Qwen3 gives them their own defaults.
    num_heads = need("num_attention_heads")
    if qk_norm:
        num_kv_heads, head_dim = need("num_key_value_heads"), need("head_dim")
    else:
        num_kv_heads = typed(config, "num_key_value_heads", int, label, num_heads)
        even = need("hidden_size") // max(num_heads, 1)
        head_dim = typed(config, "head_dim", int, label, even)
    rope = rope_parameters(config, label)
    if rope.get("rope_theta") is None and not qk_norm:
        rope["rope_theta"] = LLAMA_ROPE_THETA
    if rope.get("rope_theta") is None:
        raise InputError(f"{label}: rope_theta is missing, at the root and in rope_parameters")
    return LlamaConfig(
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=need("rms_norm_eps", float),
        rope_theta=float(typed(rope, "rope_theta", float, label)),
        max_position_embeddings=need("max_position_embeddings"),
        tie_word_embeddings=typed(config, "tie_word_embeddings", bool, label, False),
        attention_bias=typed(config, "attention_bias", bool, label, False),
        mlp_bias=typed(config, "mlp_bias", bool, label, False),
        rope_scaling=_rope_scaling(rope, label),
        qk_norm=qk_norm,
        dtype=dtype,
    )


def _refuse_unknown_features(config: Mapping[str, Any], label: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise InputError(f"{label}: hidden_act {config['hidden_act']!r} is not supported")
    if config.get("quantization_config") is not None:
        raise InputError(f"{label}: quantised checkpoints (quantization_config) are not supported")
    if config.get("use_sliding_window"):
        raise InputError(f"{label}: use_sliding_window is not supported")
    kinds = typed(config, "layer_types", list, label, [])
    if any(kind != "full_attention" for kind in kinds):
        raise InputError(f"{label}: layer_types other than full_attention are not supported")


def rope_parameters(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """`rope_parameters` (new), or root `rope_theta` and `rope_scaling` (old), as one mapping."""
    old = typed(config, "rope_scaling", dict, label, {})
    new = typed(config, "rope_parameters", dict, label, {})
    if old and new:
        kinds = rope_kind(old) != rope_kind(new)
        if kinds or any(old[name] != new[name] for name in old.keys() & new.keys()):
            raise InputError(f"{label}: rope_scaling and rope_parameters differ: keep one of them")
    rope = dict(new or old)
    for name in ("rope_theta", "partial_rotary_factor"):
        if rope.get(name) is None and config.get(name) is not None:
            rope[name] = config[name]
    return rope


def rope_kind(rope: Mapping[str, Any]) -> Any:
    """By its new name or its old one."""
    return rope.get("rope_type", rope.get("type", "default"))


def _rope_scaling(rope: Mapping[str, Any], label: str) -> RopeScaling | None:
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"{label}: partial_rotary_factor is not supported")
    kind = rope_kind(rope)
    fields: dict[str, tuple[str, ...]] = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }
    if kind not in fields:
        raise InputError(f"{label}: rope scaling {kind!r} is none of {sorted(fields)}")
    values = []
    for name in fields[kind]:
        if rope.get(name) is None:
            raise InputError(f"{label}: rope scaling {kind!r} needs {name}")
        values.append(typed(rope, name, float, label))
        if not 0 < values[-1] < math.inf:
            raise InputError(f"{label}: rope scaling {kind!r}: {name} must be positive")
    if kind == "llama3":
        return Llama3Scaling(*values)
    if kind == "linear":
        return LinearScaling(*values)
    return None


def from_gguf(file: GGUFFile, dtype: np.dtype) -> LlamaConfig:
    """Reads the metadata of a GGUF file, and from its tensors what GGUF leaves to them."""
    arch = file.value("general.architecture", str)
    if arch not in GGUF_ARCHITECTURES:
        raise InputError(
            f"{file.label}: architecture {arch!r} is none of {sorted(GGUF_ARCHITECTURES)}, "
            "nor qwen35"
        )
    for feature in ("attention.sliding_window", "expert_count"):
        if file.value(f"{arch}.{feature}", int, 0):
            raise InputError(f"{file.label}: {arch}.{feature} is not supported")
    shapes = file.shapes()
    hidden_size = file.value(f"{arch}.embedding_length", int)
    num_heads = file.value(f"{arch}.attention.head_count", int)
    head_dim = file.value(f"{arch}.attention.key_length", int, hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.value(f"{arch}.{key}", int, head_dim) != head_dim:
            raise InputError(f"{file.label}: {arch}.{key} must equal the head size {head_dim}")
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise InputError(f"{file.label}: missing tensor token_embd.weight")
    return LlamaConfig(
        vocab_size=file.value(f"{arch}.vocab_size", int, embedding[0]),
        hidden_size=hidden_size,
        intermediate_size=file.value(f"{arch}.feed_forward_length", int),
        num_layers=file.value(f"{arch}.block_count", int),
        num_heads=num_heads,
        num_kv_heads=file.value(f"{arch}.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        rms_norm_eps=file.value(f"{arch}.attention.layer_norm_rms_epsilon", float),
        rope_theta=file.value(f"{arch}.rope.freq_base", float),
        max_position_embeddings=file.value(f"{arch}.context_length", int),
        tie_word_embeddings=llama_names.GGUF_HEAD not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        rope_scaling=_gguf_rope_scaling(file, arch),
        qk_norm=GGUF_ARCHITECTURES[arch],
        dtype=dtype,
    )


def _gguf_rope_scaling(file: GGUFFile, arch: str) -> RopeScaling | None:
    kind = file.value(f"{arch}.rope.scaling.type", str, "none")
    if kind not in ("none", "linear"):
        raise InputError(f"{file.label}: {arch}.rope.scaling.type {kind!r} is not supported")
    if llama_names.GGUF_ROPE_FACTORS in file.shapes():
        if kind != "none":
            raise InputError(f"{file.label}: both {kind} rope scaling and rope_freqs.weight")
        factors = file.read(llama_names.GGUF_ROPE_FACTORS)
        return FactorScaling(tuple(float(factor) for factor in factors))
    if kind == "linear":
        return LinearScaling(file.value(f"{arch}.rope.scaling.factor", float))
    return None
