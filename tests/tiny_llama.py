"""Tiny random targets: as `transformers` models, as Hugging Face directories, as GGUF files."""

from __future__ import annotations

import json
import pathlib

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from dflash_jax.models import layers
from dflash_jax.models.llama import Llama, LlamaConfig, inverse_frequencies
from dflash_jax.models.target_base import TargetOutput

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 258,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"))


def hf_model(kind: str = "Llama", **overrides) -> transformers.PreTrainedModel:
    """A random model whose every parameter matters: norms and biases are random too."""
    settings = {**SIZES, "rope_parameters": dict(ROPE), **overrides}
    config = getattr(transformers, f"{kind}Config")(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = name.endswith("norm.weight")
            parameter.copy_(1 + 0.2 * noise if norm else 0.12 * noise)
    return model


def hf_outputs(model: transformers.PreTrainedModel, tokens: np.ndarray):
    """(logits, hidden_states) as float32 NumPy arrays."""
    with torch.no_grad():
        out = model(torch.from_numpy(tokens).long(), output_hidden_states=True)
    return out.logits.numpy(), [hidden.numpy() for hidden in out.hidden_states]


def forward(
    config: LlamaConfig, params: dict, tokens: np.ndarray, taps: tuple[int, ...] = ()
) -> tuple[np.ndarray, TargetOutput]:
    """(logits, output) of our model over whole sequences with a causal mask."""
    model, rows = Llama(config), tokens.shape[-1]
    table = layers.rotary_table(inverse_frequencies(config), config.max_position_embeddings)
    mask = jnp.tril(jnp.ones((rows, rows), bool))

    @jax.jit
    def run(params: dict, tokens: jax.Array):
        out = model.apply(
            params,
            tokens,
            table.at(jnp.arange(rows)),
            lambda layer, q, k, v: layers.attention(q, k, v, mask),
            taps,
        )
        return model.apply(params, out.hidden, method="logits"), out

    logits, out = run(params, jnp.asarray(tokens, jnp.int32))
    return np.asarray(logits), out


def some_tokens(count: int = 24, batch: int = 2) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (batch, count)).astype(np.int32)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, five merges, three special tokens: 264 ids, so a model of 300 rows is padded."""
    pieces = [*tokens_in_order()]
    vocabulary = {token: index for index, token in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def tokens_in_order() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*alphabet, *SPECIAL_TOKENS, *(left + right for left, right in MERGES)]


def write_directory(
    model: transformers.PreTrainedModel, directory: pathlib.Path, max_shard_size: str = "1GB"
) -> pathlib.Path:
    """Everything of a Hugging Face checkpoint."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|endoftext|>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def write_gguf(
    model: transformers.PreTrainedModel,
    path: pathlib.Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_factors: np.ndarray | None = None,
    skip: tuple[str, ...] = (),
    **metadata: int | float | str,
) -> pathlib.Path:
    """What llama.cpp's converter would write; matrices in `kind`, the rest in F32."""
    config = model.config
    qwen = config.model_type == "qwen3"
    writer = gguf.GGUFWriter(path, str(metadata.pop("arch", "qwen3" if qwen else "llama")))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(key.replace("__", "."), value)
    add_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.QWEN3 if qwen else gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers
    )
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, tensor in state.items():
        value = tensor.numpy()
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name in skip:
            continue
        if not qwen and ".q_proj." in name:
            value = _interleave(value, config.num_attention_heads)
        if not qwen and ".k_proj." in name:
            value = _interleave(value, config.num_key_value_heads)
        if value.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name, gguf.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(value))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens = tokens_in_order()
    padding = [f"[PAD{index}]" for index in range(len(tokens), vocab_size)]
    types = [3 if token in SPECIAL_TOKENS else 1 for token in tokens] + [5] * len(padding)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + padding)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_chat_template(TEMPLATE)


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rotary rows, row by row rather than by reshaping."""
    head_dim = weight.shape[0] // heads
    order = [
        head * head_dim + half * (head_dim // 2) + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    return weight[order]
