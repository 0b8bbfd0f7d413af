"""Qwen3.5 from GGUF (`qwen35`): its config, and the name table with what the converter undid.

The converter adds one to the centred norms, stores -exp(A_log), and puts value heads in another
order: with r value heads for each of K key heads, Hugging Face has them grouped (key head k serves
r·k, r·k + 1, ..), GGUF tiled (position i·K + k is value head r·k + i).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from dflash_jax.checkpoints import qwen3_5_names
from dflash_jax.checkpoints.gguf_file import GGUFFile
from dflash_jax.checkpoints.names import Entry
from dflash_jax.errors import InputError
from dflash_jax.models.qwen3_5 import Qwen35Config, layer_kinds

ARCHITECTURE = "qwen35"
HEAD = "output.weight"
# Inside a block: Hugging Face's name -> GGUF's.
BLOCK_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
ROOT_NAMES = {
    "embed_tokens": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": HEAD,
}


def config_of(file: GGUFFile, dtype: np.dtype) -> Qwen35Config:
    """Reads the metadata, and from the tensors what GGUF leaves to them."""
    arch = file.value("general.architecture", str)
    if arch != ARCHITECTURE:
        raise InputError(f"{file.label}: architecture {arch!r} is not {ARCHITECTURE}")

    def need(key: str, kind: type) -> int:
        return file.value(f"{arch}.{key}", kind)

    if file.value(f"{arch}.expert_count", int, 0):
        raise InputError(f"{file.label}: mixture-of-experts models are not supported")
    if file.value(f"{arch}.rope.scaling.type", str, "none") != "none":
        raise InputError(f"{file.label}: rope scaling is not supported")
    shapes = file.shapes()
    if "token_embd.weight" not in shapes:
        raise InputError(f"{file.label}: missing tensor token_embd.weight")
    # The last blocks may be those of multi-token prediction.
    count = need("block_count", int) - file.value(f"{arch}.nextn_predict_layers", int, 0)
    if not 0 < count <= len(shapes):
        raise InputError(f"{file.label}: {count} layers, but {len(shapes)} tensors")
    interval, heads = need("full_attention_interval", int), need("attention.head_count", int)
    value_heads, head_dim = need("ssm.time_step_rank", int), need("attention.key_length", int)
    if value_heads < 1 or head_dim < 1:
        raise InputError(f"{file.label}: {arch} has a size below 1")
    return Qwen35Config(
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=need("embedding_length", int),
        intermediate_size=need("feed_forward_length", int),
        layer_types=layer_kinds(count, interval),
        num_heads=heads,
        num_kv_heads=file.value(f"{arch}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        linear_num_key_heads=need("ssm.group_count", int),
        linear_num_value_heads=value_heads,
        linear_key_head_dim=need("ssm.state_size", int),
        linear_value_head_dim=need("ssm.inner_size", int) // value_heads,
        linear_conv_kernel_dim=need("ssm.conv_kernel", int),
        rms_norm_eps=need("attention.layer_norm_rms_epsilon", float),
        rope_theta=need("rope.freq_base", float),
        partial_rotary_factor=need("rope.dimension_count", int) / head_dim,
        max_position_embeddings=need("context_length", int),
        tie_word_embeddings=HEAD not in shapes,
        dtype=dtype,
    )


def table(config: Qwen35Config) -> list[Entry]:
    """Hugging Face's table under GGUF's names, shapes and values."""
    prefix = qwen3_5_names.PREFIXES[0]
    entries = []
    for entry in qwen3_5_names.hugging_face_table(config, prefix):
        name = entry.name.removeprefix(prefix)
        if not name.startswith("layers."):
            module = name.removesuffix(".weight")
            transform = _less_one if module == "norm" else None
            entries.append(Entry(ROOT_NAMES[module], entry.path, entry.shape, transform))
            continue
        _, layer, inner = name.split(".", 2)
        shape = entry.shape
        if inner == "linear_attn.conv1d.weight":
            shape = (shape[0], shape[2])
        entries.append(
            Entry(f"blk.{layer}.{BLOCK_NAMES[inner]}", entry.path, shape, _transform(config, inner))
        )
    return entries


def ignored(config: Qwen35Config, file: GGUFFile) -> set[str]:
    """Tensors of the blocks behind the model's: multi-token prediction."""
    blocks = tuple(f"blk.{layer}." for layer in range(config.num_layers))
    return {n for n in file.shapes() if n.startswith("blk.") and not n.startswith(blocks)}


def _transform(config: Qwen35Config, inner: str) -> Callable[[np.ndarray], np.ndarray] | None:
    keys, dim = 2 * config.linear_key_dim, config.linear_value_head_dim
    ungroup = functools.partial(
        grouped_heads, key_heads=config.linear_num_key_heads, heads=config.linear_num_value_heads
    )

    def value_rows(x: np.ndarray) -> np.ndarray:  # behind the queries' and keys' rows
        return np.concatenate([x[:keys], ungroup(x[keys:], dim=dim)])

    if inner.endswith("norm.weight") and inner != "linear_attn.norm.weight":
        return _less_one
    transforms: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "linear_attn.in_proj_qkv.weight": value_rows,
        "linear_attn.conv1d.weight": lambda x: value_rows(x)[:, None, :],
        "linear_attn.in_proj_z.weight": functools.partial(ungroup, dim=dim),
        "linear_attn.in_proj_b.weight": functools.partial(ungroup, dim=1),
        "linear_attn.in_proj_a.weight": functools.partial(ungroup, dim=1),
        "linear_attn.dt_bias": functools.partial(ungroup, dim=1),
        "linear_attn.A_log": lambda x: np.log(-ungroup(x, dim=1)),
        "linear_attn.out_proj.weight": lambda x: ungroup(x.T, dim=dim).T,
    }
    return transforms.get(inner)


def _less_one(x: np.ndarray) -> np.ndarray:
    return x - 1


def grouped_heads(x: np.ndarray, key_heads: int, heads: int, dim: int) -> np.ndarray:
    """Rows [heads * dim, ...] from GGUF's order of value heads to Hugging Face's."""
    split = x.reshape(heads // key_heads, key_heads, dim, *x.shape[1:])
    return split.swapaxes(0, 1).reshape(x.shape)
