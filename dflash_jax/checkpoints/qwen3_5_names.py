"""Name table of Qwen3.5 for Hugging Face's safetensors. Parameter paths mirror its names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from dflash_jax.checkpoints.names import Entry, Path, TensorSource, check_names, nest
from dflash_jax.models.qwen3_5 import FULL, Qwen35Config

# The text part beside vision, and alone; the head stands at the root in both.
PREFIXES = ("model.language_model.", "model.")
HEAD = "lm_head.weight"
# Multi-token prediction and vision: there, and not wanted.
IGNORED_PREFIXES = ("mtp.", "model.visual.")
# Small, and exponentiated or multiplied into a float32 state: never rounded to the model's dtype.
_FLOAT32 = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight")


def block_shapes(config: Qwen35Config, layer: int) -> dict[str, tuple[int, ...]]:
    """Names within a block, and their shapes."""
    c, d = config, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (c.intermediate_size, d),
        "mlp.up_proj.weight": (c.intermediate_size, d),
        "mlp.down_proj.weight": (d, c.intermediate_size),
    }
    if c.layer_types[layer] == FULL:
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        for name, rows, columns in (
            ("q_proj", 2 * queries, d),  # of each head: query, gate
            ("k_proj", keys, d),
            ("v_proj", keys, d),
            ("o_proj", d, queries),
        ):
            shapes[f"self_attn.{name}.weight"] = (rows, columns)
            if c.attention_bias:
                shapes[f"self_attn.{name}.bias"] = (rows,)
        shapes["self_attn.q_norm.weight"] = (c.head_dim,)
        shapes["self_attn.k_norm.weight"] = (c.head_dim,)
        return shapes
    heads, values = c.linear_num_value_heads, c.linear_value_dim
    return shapes | {
        "linear_attn.in_proj_qkv.weight": (c.conv_dim, d),
        "linear_attn.in_proj_z.weight": (values, d),
        "linear_attn.in_proj_a.weight": (heads, d),
        "linear_attn.in_proj_b.weight": (heads, d),
        "linear_attn.conv1d.weight": (c.conv_dim, 1, c.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (c.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (d, values),
    }


def hugging_face_table(config: Qwen35Config, prefix: str = PREFIXES[0]) -> list[Entry]:
    matrix = (config.vocab_size, config.hidden_size)
    table = [
        Entry(f"{prefix}embed_tokens.weight", ("embed_tokens", "weight"), matrix),
        Entry(f"{prefix}norm.weight", ("norm", "weight"), (config.hidden_size,)),
    ]
    if not config.tie_word_embeddings:
        table.append(Entry(HEAD, ("lm_head", "weight"), matrix))
    for layer in range(config.num_layers):
        for name, shape in block_shapes(config, layer).items():
            path = (f"layers_{layer}", *name.split("."))
            table.append(Entry(f"{prefix}layers.{layer}.{name}", path, shape))
    return table


def hugging_face_prefix(names: Iterable[str]) -> str:
    """Which of PREFIXES a checkpoint uses; the official one when it has no embedding at all."""
    present = set(names)
    return next((p for p in PREFIXES if f"{p}embed_tokens.weight" in present), PREFIXES[0])


def hugging_face_ignored(config: Qwen35Config, names: Iterable[str]) -> set[str]:
    """Those of `names` that a checkpoint may hold beside the table's."""
    ignored = {name for name in names if name.startswith(IGNORED_PREFIXES)}
    if config.tie_word_embeddings:
        ignored.add(HEAD)
    return ignored


def parameter_dtype(path: Path, dtype: Any) -> Any:
    """The dtype that a parameter is kept in, in a model that computes in `dtype`."""
    return np.dtype("float32") if ".".join(path[1:]) in _FLOAT32 else dtype


def load_hugging_face(source: TensorSource, config: Qwen35Config) -> dict[str, Any]:
    """Parameters for `Qwen35(config)`; each is read and converted before the next.

    Raises:
      InputError: a tensor is missing, unclaimed, or of another shape.
    """
    names = source.shapes()
    table = hugging_face_table(config, hugging_face_prefix(names))
    check_names(source, table, hugging_face_ignored(config, names))
    flat = {}
    for entry in table:
        dtype = parameter_dtype(entry.path, config.dtype)
        # The copy frees the parameter from the mapped file and from the reader's dtype.
        flat[entry.path] = jax.device_put(np.array(source.read(entry.name), dtype, order="C"))
    return nest(flat)
