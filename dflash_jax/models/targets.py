"""The target that a config describes: its module, its rotary frequencies, its layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models import layers, llama, qwen3_5
from dflash_jax.models.layers import Attend, Rotary
from dflash_jax.models.llama import Llama, LlamaConfig
from dflash_jax.models.qwen3_5 import Qwen35, Qwen35Config, Recur, WholeSequence
from dflash_jax.models.target_base import TargetOutput

TargetConfig = LlamaConfig | Qwen35Config


def module(config: TargetConfig) -> Llama | Qwen35:
    """Both have the methods `embed`, `head`, `logits`; `forward` calls either."""
    return Llama(config) if isinstance(config, LlamaConfig) else Qwen35(config)


def rotary_frequencies(config: TargetConfig) -> np.ndarray:
    """Float32, of the dimensions that turn; for `layers.rotary_table`."""
    if isinstance(config, LlamaConfig):
        return llama.inverse_frequencies(config)
    return qwen3_5.inverse_frequencies(config)


def attention_layers(config: TargetConfig) -> int:
    """Layers with keys and values to keep."""
    return config.num_layers if isinstance(config, LlamaConfig) else config.num_full_layers


def recurrent_layers(config: TargetConfig) -> int:
    """Layers with a state to keep."""
    return 0 if isinstance(config, LlamaConfig) else config.num_linear_layers


def parameter_shapes(config: TargetConfig) -> Any:
    """Every parameter's shape, as the module initialises them: float32."""
    table = layers.rotary_table(rotary_frequencies(config), 1)
    recur = () if isinstance(config, LlamaConfig) else (WholeSequence(config),)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return layers.attention(q, k, v, jnp.ones((1, 1), bool))

    def init() -> Any:
        tokens = jnp.zeros(1, jnp.int32)
        key = jax.random.key(0)
        return module(config).init(key, tokens, table, attend, *recur, method="init_all")

    return jax.eval_shape(init)["params"]


def whole_sequence(config: TargetConfig) -> Recur | None:
    """For `forward` over whole sequences, without a cache: training, parity."""
    return None if isinstance(config, LlamaConfig) else WholeSequence(config)


def forward(
    config: TargetConfig,
    params: Any,
    tokens: jax.Array,
    rotary: Rotary,
    attend: Attend,
    recur: Recur | None,
    tap_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Runs the model; see `Llama` and `Qwen35`.

    Args:
      recur: the caller's recurrences; None for a model without any.
    """
    recurrences = () if isinstance(config, LlamaConfig) else (recur,)
    variables = {"params": params}
    output: Any = module(config).apply(variables, tokens, rotary, attend, *recurrences, tap_layers)
    return output
