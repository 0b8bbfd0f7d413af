"""A tiny target whose text can be learned, and a drafter for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models import layers
from dflash_jax.models.dflash2_config import DrafterConfig
from dflash_jax.models.llama import Llama, LlamaConfig
from dflash_jax.train.devices import data_mesh
from dflash_jax.train.loop import Trainer, corpus_head
from dflash_jax.train.shards import Corpus, Rows, label_rows
from dflash_jax.train.step import Models, TrainConfig

VOCABULARY, LENGTH = 64, 48

TARGET = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)


def drafter_config(**overrides) -> DrafterConfig:
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "num_target_layers": 2,
        "target_layer_ids": (0, 1),
        "mask_token_id": 0,
        "block_size": 4,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 8,
        "is_causal": False,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 8,
        "selector_top_k": 4,
    }
    return DrafterConfig(**(values | overrides))


def target_params(seed: int = 0):
    table = layers.rotary_table(layers.inverse_frequencies(8, 10000.0), 4)
    mask = jnp.ones((4, 4), bool)
    return Llama(TARGET).init(
        jax.random.key(seed),
        jnp.zeros((1, 4), jnp.int32),
        table,
        lambda layer, q, k, v: layers.attention(q, k, v, mask),
        method="init_all",
    )["params"]


def counting_rows(count: int, seed: int = 0) -> Rows:
    """Rows that count up by 1, 2 or 3, modulo the vocabulary; own from position 5 on."""
    rng = np.random.default_rng(seed)
    starts, steps = rng.integers(0, VOCABULARY, (count, 1)), rng.integers(1, 4, (count, 1))
    tokens = (starts + steps * np.arange(LENGTH)) % VOCABULARY
    own = np.broadcast_to(np.arange(LENGTH) >= 5, tokens.shape)
    zeros = np.zeros(count)
    return label_rows(tokens.astype(np.int32), own.copy(), zeros, zeros, 0.2)


def corpus(count: int = 256) -> Corpus:
    rows = counting_rows(count)
    return Corpus(rows.take(~rows.held_out), rows.take(rows.held_out), ("self",), "tiny")


def train_config(**overrides) -> TrainConfig:
    values = {
        "steps": 400,
        "batch": 8,
        "anchors": 8,
        "head_chunks": 2,
        "learning_rate": 3e-3,
        "log_every": 1,
        "eval_every": 1000,
        "eval_rows": 16,
        "label_weight": 1.0,  # the random target's own distribution says nothing
        "export_dtype": "float32",
    }
    return TrainConfig(**(values | overrides))


def trainer_models(drafter=None, **overrides) -> Models:
    return Models(TARGET, drafter or drafter_config(), train_config(**overrides))


def trainer(directory, drafter=None, devices: int = 1, **overrides) -> Trainer:
    models = trainer_models(drafter, **overrides)
    drafter = models.drafter
    mesh = data_mesh(devices)
    vocabulary = None
    if drafter.draft_vocab_size:
        vocabulary = np.arange(drafter.draft_vocab_size, dtype=np.int32)
    frozen = corpus_head(target_params(), vocabulary, mesh)
    return Trainer(models, frozen, corpus(), vocabulary, mesh, directory)
