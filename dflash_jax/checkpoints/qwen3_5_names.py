"""Name table of Qwen3.5 for Hugging Face's safetensors.

The parameter paths mirror its names, but for the joined ones.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from dflash_jax.checkpoints.names import (
    Entry,
    Path,
    Store,
    TensorSource,
    as_floats,
    load_parameters,
)
from dflash_jax.models.qwen3_5 import FULL, Qwen35Config

# The text part beside vision, and alone; the head stands at the root in both.
PREFIXES = ("model.language_model.", "model.")
HEAD = "lm_head.weight"
# As MLX converts it: the head inside, norms with their one added, another order of conv1d's axes.
MLX = "language_model."
# Multi-token prediction and vision: there, and not wanted.
IGNORED_PREFIXES = ("mtp.", "model.visual.", "vision_tower.", f"{MLX}mtp.")
# Linear maps of one input are one parameter, their rows one below the other in this order.
JOINED = {
    "self_attn.q_proj": "self_attn.qkv_proj",
    "self_attn.k_proj": "self_attn.qkv_proj",
    "self_attn.v_proj": "self_attn.qkv_proj",
    "linear_attn.in_proj_qkv": "linear_attn.in_proj",
    "linear_attn.in_proj_z": "linear_attn.in_proj",
    "linear_attn.in_proj_b": "linear_attn.in_proj",
    "linear_attn.in_proj_a": "linear_attn.in_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}
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
        linears = {
            "q_proj": (2 * queries, d),  # of each head: query, gate
            "k_proj": (keys, d),
            "v_proj": (keys, d),
            "o_proj": (d, queries),
        }
        shapes |= {f"self_attn.{name}.weight": shape for name, shape in linears.items()}
        if c.attention_bias:
            shapes |= {f"self_attn.{name}.bias": shape[:1] for name, shape in linears.items()}
        shapes["self_attn.q_norm.weight"] = (c.head_dim,)
        shapes["self_attn.k_norm.weight"] = (c.head_dim,)
        return shapes
    heads, values = c.linear_num_value_heads, c.linear_value_dim
    return shapes | {
        "linear_attn.in_proj_qkv.weight": (c.conv_dim, d),
        "linear_attn.in_proj_z.weight": (values, d),
        "linear_attn.in_proj_b.weight": (heads, d),
        "linear_attn.in_proj_a.weight": (heads, d),
        "linear_attn.conv1d.weight": (c.conv_dim, 1, c.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (c.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (d, values),
    }


def _parameter(name: str) -> str:
    """A block's tensor to its parameter."""
    module, _, kind = name.rpartition(".")
    return f"{JOINED.get(module, module)}.{kind}"


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
            path = (f"layers_{layer}", *_parameter(name).split("."))
            table.append(Entry(f"{prefix}layers.{layer}.{name}", path, shape))
    return table


def mlx_table(config: Qwen35Config) -> list[Entry]:
    entries = []
    for entry in hugging_face_table(config, "model."):
        shape, transform = entry.shape, None
        if entry.name.endswith("conv1d.weight"):
            shape, transform = (shape[0], shape[2], shape[1]), _last_axis_to_middle
        elif entry.name.endswith("norm.weight") and "linear_attn" not in entry.name:
            transform = _less_one
        entries.append(Entry(MLX + entry.name, entry.path, shape, transform))
    return entries


def _last_axis_to_middle(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, 1, 2)


def _less_one(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) - 1


def table_of(config: Qwen35Config, names: Collection[str]) -> list[Entry]:
    """The table of the layout that a checkpoint's names are in; the official one in doubt."""
    for prefix in PREFIXES:
        if f"{prefix}embed_tokens.weight" in names:
            return hugging_face_table(config, prefix)
    mlx = any(name.startswith(MLX) for name in names)
    return mlx_table(config) if mlx else hugging_face_table(config)


def ignored_of(config: Qwen35Config, names: Collection[str]) -> set[str]:
    """Those of `names` that a checkpoint may hold beside the table's."""
    ignored = {name for name in names if name.startswith(IGNORED_PREFIXES)}
    if config.tie_word_embeddings:
        ignored |= {HEAD, MLX + HEAD}
    return ignored


def keeping_float32(store: Store) -> Store:
    """`store`, but for the parameters that stay float32 whatever the model's dtype."""
    exact = as_floats(np.float32)

    def chosen(path: Path, tensor: np.ndarray) -> Any:
        return (exact if ".".join(path[1:]) in _FLOAT32 else store)(path, tensor)

    return chosen


def load_hugging_face(source: TensorSource, config: Qwen35Config, store: Store) -> dict[str, Any]:
    """Parameters for `Qwen35(config)`: see `names.load_parameters`."""
    names = source.shapes()
    table, ignored = table_of(config, names), ignored_of(config, names)
    return load_parameters(source, table, keeping_float32(store), ignored)
