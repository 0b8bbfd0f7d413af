"""What a decoder takes of a device's memory, found before anything is loaded or built."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints.drafter import name_table
from dflash_jax.checkpoints.target import WEIGHTS, parameter_count
from dflash_jax.decode.programs import DecodeSpec, new_drafter_cache, new_target_state
from dflash_jax.decode.rows import row_policy
from dflash_jax.engine.prompt_cache import MIB
from dflash_jax.errors import InputError
from dflash_jax.models.dflash2_config import DrafterConfig
from dflash_jax.models.targets import TargetConfig
from dflash_jax.tree.masks import MAX_ROWS

GB = 1e9
_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # a parameter
_WORK = 1.05  # activations, logits, kernels' scratch space, beside weights and state
_STATE_COPIES = 4  # the self-check's, while no stream decodes


def free_bytes() -> int | None:
    """Of the first device, or of the host when that is the CPU; None when nothing tells."""
    stats = jax.devices()[0].memory_stats() or {}  # None on the CPU
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        return free * 1024
    return None


def weight_bytes(target: TargetConfig, drafter: DrafterConfig | None, weights: str) -> int:
    """Of both models, as `weights` keeps them; an int8 matrix's scales are left out."""
    count = parameter_count(target)
    if drafter is not None:
        count += sum(math.prod(entry.shape) for entry in name_table(drafter))
    return count * _BYTES[weights]


def state_bytes(
    target: TargetConfig, drafter: DrafterConfig | None, weights: str, context_limit: int
) -> int:
    """Of one stream: caches and recurrent states, with the self-check's copies."""
    dtype = np.dtype("float32") if weights == "int8" else jnp.dtype(weights)
    target = dataclasses.replace(target, dtype=dtype)
    drafter = dataclasses.replace(drafter, dtype=dtype) if drafter else None
    policy = row_policy(jax.default_backend(), jax.__version_info__)
    spec = DecodeSpec(target, drafter, context_limit, policy, target.vocab_size)
    state = jax.eval_shape(lambda: new_target_state(spec))
    total = _bytes(state) + _STATE_COPIES * _bytes(state.states)
    if drafter is not None:
        total += _bytes(jax.eval_shape(lambda: new_drafter_cache(spec)))
    return total


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def require_context(target: TargetConfig, context_limit: int) -> None:
    """Raises InputError for a context that no stream of this target has."""
    if not MAX_ROWS < context_limit <= target.max_position_embeddings:
        raise InputError(
            f"context_limit of {context_limit} tokens: this target takes {MAX_ROWS + 1} to "
            f"{target.max_position_embeddings}"
        )


def require_fit(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    weights: str,
    context_limit: int,
    free: int | None,
    prompt_cache_mib: int = 0,
) -> None:
    """Checks that models, one stream and the prompt cache fit.

    Args:
      weights: one of `target.WEIGHTS`.
      free: bytes; None: not known, and nothing is refused.

    Raises:
      InputError: they do not; says what would fit.
    """
    if free is None:
        return

    prompts = prompt_cache_mib * MIB

    def needed(kind: str, context: int, prompts: int = prompts) -> float:
        state = state_bytes(target, drafter, kind, context)
        return _WORK * (weight_bytes(target, drafter, kind) + state) + prompts

    total = needed(weights, context_limit)
    if total <= free:
        return
    options = []
    if prompts and needed(weights, context_limit, 0) <= free:
        most = int((free - needed(weights, context_limit, 0)) // MIB)
        options.append(f"--prompt_cache_mib={most}")
    options += [
        f"--config.weights={kind} ({needed(kind, context_limit) / GB:.1f} GB)"
        for kind in WEIGHTS
        if _BYTES[kind] < _BYTES[weights] and needed(kind, context_limit) <= free
    ]
    shorter = context_limit // 2
    while shorter > MAX_ROWS and needed(weights, shorter) > free:
        shorter //= 2
    if shorter > MAX_ROWS:
        options.append(f"--config.context_limit={shorter} ({needed(weights, shorter) / GB:.1f} GB)")
    least = min(needed(kind, MAX_ROWS + 1, 0) for kind in WEIGHTS)
    cache = f" and {prompt_cache_mib} MiB for prompts" if prompts else ""
    raise InputError(
        f"{weights} weights of {weight_bytes(target, drafter, weights) / GB:.1f} GB and a context "
        f"of {context_limit} tokens{cache} need {total / GB:.1f} GB, "
        f"but {free / GB:.1f} GB are free: "
        + (" or ".join(options) + " would fit" if options else f"{least / GB:.1f} GB is the least")
    )
