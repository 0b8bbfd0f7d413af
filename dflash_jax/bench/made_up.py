"""Made-up models of given sizes, their weights drawn on the device: a benchmark without files."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.checkpoints.drafter import Drafter
from dflash_jax.errors import InputError
from dflash_jax.models import targets
from dflash_jax.models.dflash2 import init_params
from dflash_jax.models.dflash2_config import DrafterConfig, repeated
from dflash_jax.models.layers import INT8_PEAK, Int8Matrix
from dflash_jax.models.qwen3_5 import Qwen35Config, layer_kinds
from dflash_jax.models.targets import TargetConfig

_FLOAT32 = ("A_log", "dt_bias")  # whatever the model's dtype; and the recurrence's norm
_HEAD_SPREAD = 3.0  # of the logits: picks are decided, and not all the same


def target_config(sizes: Mapping[str, Any], dtype: str) -> Qwen35Config:
    """From a config's `sizes.target`: `Qwen35Config`'s fields, but layers by their interval."""
    with _refused("config.sizes.target"):
        values = dict(sizes)
        kinds = layer_kinds(values.pop("num_layers"), values.pop("full_attention_interval"))
        return Qwen35Config(**values, layer_types=kinds, dtype=jnp.dtype(dtype))


def drafter_config(sizes: Mapping[str, Any], target: TargetConfig) -> DrafterConfig:
    """From a config's `sizes.drafter`; what it shares with the target is the target's."""
    with _refused("config.sizes.drafter"):
        values = dict(sizes)
        kind = values.pop("layer_type")
        return DrafterConfig(
            **values,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_target_layers=target.num_layers,
            layer_types=repeated(kind, values["num_layers"]),
            dtype=target.dtype,
        )


@contextlib.contextmanager
def _refused(section: str) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise InputError(f"{section}: {error} is missing") from error
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"{section}: {error}") from error


def target_params(config: TargetConfig, int8: bool = False, seed: int = 0) -> Any:
    """Parameters for `targets.module(config)`."""
    centred = isinstance(config, Qwen35Config)
    return _drawn(targets.parameter_shapes(config), config.dtype, int8, seed, centred)


def drafter(config: DrafterConfig, int8: bool = False, seed: int = 1) -> Drafter:
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    return Drafter(config, _drawn(shapes, config.dtype, int8, seed, False), "made up")


def _drawn(shapes: Any, dtype: Any, int8: bool, seed: int, centred: bool) -> Any:
    """Each array by itself; `centred`: norms are stored less one."""

    def draw(path: Any, leaf: Any) -> Any:
        names = [part.key for part in path]
        name = "/".join(names)
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
        exact = names[-1] in _FLOAT32 or names[-3:-1] == ["linear_attn", "norm"]
        centre, width = _range(names, leaf.shape)
        if leaf.ndim == 1 and names[-1] == "weight" and (exact or not centred):
            centre = 1.0
        if int8 and names[-1] == "weight" and leaf.ndim == 2:
            scale = jnp.full(leaf.shape[0], width / INT8_PEAK, jnp.float32)
            return Int8Matrix(_integers(key, leaf.shape), scale)
        return _uniform(key, leaf.shape, "float32" if exact else str(dtype), centre, width)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def _range(names: list[str], shape: tuple[int, ...]) -> tuple[float, float]:
    """(centre, half width) of a parameter's values: rows keep their size through every layer."""
    name = names[-1]
    if name == "base_kernel":  # near the identity, whose first tap is 1: half of it
        return 0.25, 0.25
    if name in _FLOAT32:
        return (-2.0, 1.0) if name == "A_log" else (0.0, 1.0)
    if len(shape) == 1:  # norms
        return 0.0, 0.2
    spread = _HEAD_SPREAD if names[0] in ("lm_head", "embed_tokens") else 1.0
    if names[-2:-1] == ["kernel_projection"]:
        spread = 0.1
    return 0.0, spread * (3 / shape[-1]) ** 0.5


@functools.partial(jax.jit, static_argnums=(1, 2))
def _uniform(
    key: jax.Array, shape: tuple[int, ...], dtype: str, centre: float, width: float
) -> jax.Array:
    # In float32: bfloat16's own draws are 1/128 low in the mean, which in a matrix of thousands of
    # columns is a direction that outgrows all others, and every pick is then the same token.
    unit = jax.random.uniform(key, shape, jnp.float32, -1, 1)
    return (centre + width * unit).astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def _integers(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.randint(key, shape, -INT8_PEAK, INT8_PEAK + 1, jnp.int8)
