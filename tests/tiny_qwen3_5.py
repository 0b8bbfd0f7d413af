"""Tiny random hybrids: as `transformers` models, as parameters, and decoding with their caches."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints import qwen3_5_config, qwen3_5_names
from dflash_jax.checkpoints.names import as_floats
from dflash_jax.decode import attention as attn
from dflash_jax.decode.attention import Cache
from dflash_jax.decode.recurrence import PromptRecur, States, WindowRecur, new_states
from dflash_jax.decode.rows import RowPolicy, row_policy
from dflash_jax.models import layers
from dflash_jax.models.qwen3_5 import FULL, LINEAR, Qwen35, Qwen35Config, WholeSequence
from dflash_jax.models.qwen3_5 import inverse_frequencies as frequencies
from dflash_jax.models.target_base import TargetOutput
from dflash_jax.tree.masks import DEPTH, PATH, TOKEN

ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "rope_parameters": ROPE,
}
CONFIG = Qwen35Config(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL),
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    partial_rotary_factor=0.25,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)


def weight(name: str, noise: Any) -> Any:
    """A value for the parameter `name`, with `noise` normal: every parameter matters, and states
    last some ten tokens. At twice this scale transformers is 3e-4 from itself, steps to chunks."""
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith("norm.weight"):
        return 0.2 * noise  # stored less one
    if name.endswith("A_log"):
        return noise - 2
    if name.endswith("dt_bias"):
        return noise
    return (0.5 if "conv1d" in name else 0.08) * noise


def hf_model(**overrides):
    import torch
    import transformers

    config = transformers.Qwen3_5TextConfig(**{**SIZES, **overrides})
    config._attn_implementation = "eager"
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight(name, torch.randn(parameter.shape, generator=generator)))
    return model


def hf_outputs(model, tokens: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """(logits, hidden_states) as float32 NumPy arrays."""
    import torch

    with torch.no_grad():
        ids = torch.from_numpy(tokens).long()
        out = model(ids, output_hidden_states=True, use_cache=False)
    return out.logits.numpy(), [hidden.numpy() for hidden in out.hidden_states]


class Tensors:
    """Named arrays as a `names.TensorSource`."""

    label = "tensors"

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors = tensors

    def shapes(self):
        return {name: value.shape for name, value in self.tensors.items()}

    def read(self, name):
        return self.tensors[name]


def state_dict(model) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in model.state_dict().items()}


def convert(model, dtype="float32") -> tuple[Qwen35Config, dict]:
    description = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config = qwen3_5_config.from_hugging_face(description, "config", np.dtype(dtype))
    return config, load(Tensors(state_dict(model)), config)


def load(source, config: Qwen35Config) -> dict:
    store = as_floats(config.dtype)
    return {"params": qwen3_5_names.load_hugging_face(source, config, store)}


def random_tensors(config: Qwen35Config, seed: int = 0) -> dict[str, np.ndarray]:
    """A checkpoint without transformers, in the official layout."""
    rng = np.random.default_rng(seed)
    return {
        entry.name: weight(entry.name, rng.normal(size=entry.shape)).astype(np.float32)
        for entry in qwen3_5_names.hugging_face_table(config)
    }


def random_params(config: Qwen35Config, seed: int = 0) -> dict:
    return load(Tensors(random_tensors(config, seed)), config)


def forward(
    config: Qwen35Config, params: dict, tokens: np.ndarray, taps: tuple[int, ...] = ()
) -> tuple[np.ndarray, TargetOutput]:
    """(logits, output) of our model over whole sequences, without a cache."""
    model, rows = Qwen35(config), tokens.shape[-1]
    table = layers.rotary_table(frequencies(config), config.max_position_embeddings)
    mask = jnp.tril(jnp.ones((rows, rows), bool))

    @jax.jit
    def run(params: dict, tokens: jax.Array):
        def attend(index: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return layers.attention(q, k, v, mask)

        rotary = table.at(jnp.arange(rows))
        out = model.apply(params, tokens, rotary, attend, WholeSequence(config), taps)
        return model.apply(params, out.hidden, method="logits"), out

    logits, out = run(params, jnp.asarray(tokens, jnp.int32))
    return np.asarray(logits), out


def some_tokens(count: int, batch: int | None = None, seed: int = 1) -> np.ndarray:
    shape = count if batch is None else (batch, count)
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.int32)


# --- decoding: what a stream's compiled functions do, for a hybrid -------------------------------


class Stream(NamedTuple):
    """A hybrid's state after `length` tokens."""

    cache: Cache  # of the attention layers
    states: States  # of the recurrent layers
    length: jax.Array  # [] int32


class Decoder:
    """Prefill and verification, jitted once for each shape."""

    def __init__(
        self,
        config: Qwen35Config,
        params: dict,
        chunk: int = 64,
        capacity: int = 768,
        backend: str = "cpu",
    ):
        self.config, self.params = config, params
        policy = row_policy(backend, jax.__version_info__)
        counts = policy.row_counts
        counts = (counts[0], counts[len(counts) // 2], counts[-1])  # each costs some seconds
        self.policy = RowPolicy(counts, policy.query_tile, policy.key_chunk, chunk)
        self.capacity = capacity
        self.prefill_chunk = jax.jit(functools.partial(prefill, self))
        self.verify = jax.jit(functools.partial(verify, self))

    def new_stream(self) -> Stream:
        c = self.config
        shape = (max(c.num_full_layers, 1), c.num_kv_heads, self.capacity, c.head_dim)
        cache = Cache(jnp.zeros(shape, c.dtype), jnp.zeros(shape, c.dtype))
        return Stream(cache, new_states(c), jnp.int32(0))

    def prefill(self, tokens: np.ndarray, stream: Stream | None = None):
        """(logits [T, V], the stream after the prompt)."""
        stream = stream or self.new_stream()
        chunk, logits = self.policy.prefill_chunk, []
        for begin in range(0, len(tokens), chunk):
            piece = tokens[begin : begin + chunk]
            padded = jnp.asarray(np.pad(piece, (0, chunk - len(piece))))
            part, stream = self.prefill_chunk(stream, padded, jnp.int32(len(piece)))
            logits.append(part[: len(piece)])
        return np.concatenate(logits), stream

    @property
    def rotary(self) -> layers.Rotary:
        return layers.rotary_table(frequencies(self.config), self.capacity)


class _KeysValues:
    def __init__(self):
        self.k, self.v = [], []

    def write(self, cache: Cache, rows, start) -> Cache:
        if not self.k:
            return cache

        def put(buffer, parts):
            stacked = jnp.stack(parts)[:, rows].transpose(0, 2, 1, 3).astype(buffer.dtype)
            return jax.lax.dynamic_update_slice(buffer, stacked, (0, 0, start, 0))

        return Cache(put(cache.k, self.k), put(cache.v, self.v))


def prefill(decoder: Decoder, stream: Stream, tokens: jax.Array, count: jax.Array):
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    causal = rows[:, None] >= rows[None, :]
    start = jnp.full_like(rows, stream.length)
    collected = _KeysValues()

    def attend(index: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        collected.k.append(k)
        collected.v.append(v)
        grouped = attn.grouped(q, k.shape[1])
        zeros, chunk = jnp.zeros_like(start), decoder.policy.key_chunk
        past = attn.cache_part(grouped, stream.cache, index, zeros, start, len(rows), chunk)
        return attn.finish(attn.merge(past, attn.shared_part(grouped, k, v, causal)), q.dtype)

    recur = PromptRecur(stream.states, stream.length, count)
    model, rotary = Qwen35(decoder.config), decoder.rotary.at(stream.length + rows)
    out = model.apply(decoder.params, tokens, rotary, attend, recur)
    logits = model.apply(decoder.params, out.hidden, method="logits")
    cache = collected.write(stream.cache, slice(None), stream.length)
    return logits, Stream(cache, recur.states(), stream.length + count)


class Verified(NamedTuple):
    logits: jax.Array  # [T, V]
    hidden: jax.Array  # [T, D] before the final norm: a tap


def verify(decoder: Decoder, stream: Stream, window: jax.Array, path: jax.Array, count: jax.Array):
    """A window's rows, and the stream with the first `count` rows of `path` committed."""
    depths, paths = window[:, DEPTH], window[:, PATH:]
    near = attn.near_keys(stream.length, depths, paths)
    collected = _KeysValues()

    def attend(index: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        collected.k.append(k)
        collected.v.append(v)
        return attn.window_attention(
            q, k, v, stream.cache, index, stream.length, depths, near, decoder.policy
        )

    tile = decoder.policy.query_tile
    recur = WindowRecur(stream.states, stream.length, depths, paths, tile)
    model, rotary = Qwen35(decoder.config), decoder.rotary.at(stream.length + depths)
    last = (decoder.config.num_layers - 1,)
    out = model.apply(decoder.params, window[:, TOKEN], rotary, attend, recur, last)
    logits = model.apply(decoder.params, out.hidden, method="logits")
    cache = collected.write(stream.cache, path, stream.length)
    new = Stream(cache, recur.settle(path, count), stream.length + count)
    return Verified(logits, out.taps[0]), new
