"""Name tables of Llama and Qwen3 dense, for Hugging Face's safetensors and for GGUF.

The parameter paths mirror Hugging Face's names, but for `JOINED`; GGUF's are given beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from dflash_jax.checkpoints.names import Entry, Path
from dflash_jax.models.llama import LlamaConfig

# Inside a block: Hugging Face's name -> GGUF's. Biases follow their weights.
GGUF_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Linear maps of one input are one parameter, their rows one below the other in this order.
JOINED = {
    "self_attn.q_proj": "self_attn.qkv_proj",
    "self_attn.k_proj": "self_attn.qkv_proj",
    "self_attn.v_proj": "self_attn.qkv_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}
GGUF_ROOT_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
GGUF_HEAD = "output.weight"
# Llama 3's frequency factors, which the config takes as its rope scaling.
GGUF_ROPE_FACTORS = "rope_freqs.weight"


def block_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names within a block, and their shapes."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    linears = (
        ("self_attn.q_proj", queries, hidden, config.attention_bias),
        ("self_attn.k_proj", keys, hidden, config.attention_bias),
        ("self_attn.v_proj", keys, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, queries, config.attention_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for name, rows, columns, _ in linears:
        shapes[f"{name}.weight"] = (rows, columns)
    for name, rows, _, bias in linears:
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def root_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names outside the blocks, and their shapes."""
    matrix = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": matrix,
        "norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = matrix
    return shapes


def _blocks(config: LlamaConfig) -> Iterator[tuple[int, str, Path, tuple[int, ...]]]:
    """(layer, name within the block, parameter path, shape) of every block's tensors."""
    for layer in range(config.num_layers):
        for name, shape in block_shapes(config).items():
            module, kind = name.rsplit(".", 1)
            path = (f"layers_{layer}", *JOINED.get(module, module).split("."), kind)
            yield layer, name, path, shape


def hugging_face_table(config: LlamaConfig) -> list[Entry]:
    table = []
    for name, shape in root_shapes(config).items():
        prefix = "" if name == "lm_head.weight" else "model."
        table.append(Entry(prefix + name, tuple(name.split(".")), shape))
    for layer, name, path, shape in _blocks(config):
        table.append(Entry(f"model.layers.{layer}.{name}", path, shape))
    return table


def hugging_face_ignored(config: LlamaConfig) -> set[str]:
    """Tensors that old checkpoints carry and that follow from others."""
    ignored = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers)
    }
    if config.tie_word_embeddings:
        ignored.add("lm_head.weight")
    return ignored


def gguf_table(config: LlamaConfig) -> list[Entry]:
    table = []
    for name, shape in root_shapes(config).items():
        module, kind = name.split(".")
        table.append(Entry(f"{GGUF_ROOT_NAMES[module]}.{kind}", (module, kind), shape))
    for layer, name, path, shape in _blocks(config):
        module, kind = name.rsplit(".", 1)
        # llama.cpp pairs neighbouring rotary dimensions in Llama, halves in Qwen3.
        transform = None
        if not config.qk_norm and module == "self_attn.q_proj":
            transform = functools.partial(pair_halves, heads=config.num_heads)
        if not config.qk_norm and module == "self_attn.k_proj":
            transform = functools.partial(pair_halves, heads=config.num_kv_heads)
        table.append(
            Entry(f"blk.{layer}.{GGUF_BLOCK_NAMES[module]}.{kind}", path, shape, transform)
        )
    return table


def pair_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * H, ...] from pairs (0,1),(2,3).. to Hugging Face's (0,H/2),(1,H/2+1).."""
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)
