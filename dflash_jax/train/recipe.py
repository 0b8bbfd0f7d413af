"""A recipe: an ml_collections config becomes frozen dataclasses here, once, at the entry points."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from dflash_jax.checkpoints import target as checkpoints
from dflash_jax.checkpoints.target import Target
from dflash_jax.errors import InputError
from dflash_jax.models.dflash2_config import FULL, SLIDING, DrafterConfig
from dflash_jax.models.targets import TargetConfig
from dflash_jax.train.generate import DataConfig
from dflash_jax.train.rollout import RolloutConfig
from dflash_jax.train.step import TrainConfig


@dataclasses.dataclass(frozen=True)
class DrafterRecipe:
    """The drafter's own sizes; what is the target's is read from the target."""

    num_layers: int = 3
    block_size: int = 8
    target_layer_ids: tuple[int, ...] = ()
    intermediate_size: int = 0  # 0: the target's
    num_heads: int = 0  # 0: the target's, and so for the key/value heads
    num_kv_heads: int = 0
    # Relative positions beyond the training length are never seen, so no layer may look further.
    sliding_window: int = 512  # 0: every layer sees the whole context
    conv_kernel_size: int = 2  # 0: no convolutions
    conv_group_size: int = 16
    selector_rank: int = 32  # 0: no selector
    selector_top_k: int = 16
    draft_vocab_size: int = 0  # 0: the head covers the whole vocabulary
    mask_token_id: int = -1  # must be given
    rope_theta: float = 10000.0
    max_position_embeddings: int = 0  # 0: the target's

    def drafter(self, target: TargetConfig, dtype: Any) -> DrafterConfig:
        """The drafter's config for a target."""
        kind = SLIDING if self.sliding_window else FULL
        return DrafterConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=self.intermediate_size or target.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads or target.num_heads,
            num_kv_heads=self.num_kv_heads or target.num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=self.rope_theta,
            max_position_embeddings=self.max_position_embeddings or target.max_position_embeddings,
            num_target_layers=target.num_layers,
            target_layer_ids=self.target_layer_ids,
            mask_token_id=self.mask_token_id,
            block_size=self.block_size,
            layer_types=(kind,) * self.num_layers,
            sliding_window=self.sliding_window or None,
            is_causal=False,
            conv_kernel_size=self.conv_kernel_size,
            conv_group_size=self.conv_group_size if self.conv_kernel_size else 0,
            selector_rank=self.selector_rank,
            selector_top_k=self.selector_top_k if self.selector_rank else 0,
            draft_vocab_size=self.draft_vocab_size,
            dtype=dtype,
        )


def build(cls: type, section: ConfigDict, name: str, **extra: Any) -> Any:
    """A dataclass of a config's section; InputError for a key that it does not have."""
    fields = {field.name for field in dataclasses.fields(cls)}
    values = {key: section[key] for key in section}
    if unknown := sorted(set(values) - fields):
        raise InputError(f"config.{name} has no field {', '.join(unknown)}")
    plain = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in values.items()}
    return cls(**(plain | extra))


def make(
    target: str,
    dtype: str,
    data: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    drafter: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
) -> ConfigDict:
    """A config with every field of every section, so that a flag can override each of them."""

    def section(cls: type, values: dict[str, Any] | None) -> dict[str, Any]:
        return dataclasses.asdict(cls()) | (values or {})

    return ConfigDict(
        {
            "target": target,
            "dtype": dtype,
            "data": section(DataConfig, data) | {"rollout": section(RolloutConfig, rollout)},
            "drafter": section(DrafterRecipe, drafter),
            "train": section(TrainConfig, train),
        }
    )


def require_recipe(config: ConfigDict) -> None:
    """Raises InputError for a config of another kind, such as decode.py's."""
    missing = [
        name for name in ("target", "dtype", "data", "drafter", "train") if name not in config
    ]
    if missing:
        raise InputError(f"--config: no recipe, as in configs/train: no {', '.join(missing)} in it")


def data_config(config: ConfigDict, extra_prompts: tuple[str, ...] = ()) -> DataConfig:
    require_recipe(config)
    rollout = build(RolloutConfig, config.data.rollout, "data.rollout")
    files = (*config.data.prompt_files, *extra_prompts)
    return build(DataConfig, config.data, "data", rollout=rollout, prompt_files=files)


def train_config(config: ConfigDict) -> TrainConfig:
    require_recipe(config)
    return build(TrainConfig, config.train, "train")


def drafter_config(config: ConfigDict, target: TargetConfig) -> DrafterConfig:
    recipe: DrafterRecipe = build(DrafterRecipe, config.drafter, "drafter")
    return recipe.drafter(target, np.dtype(target.dtype))


def load_target(config: ConfigDict) -> Target:
    require_recipe(config)
    return checkpoints.load_target(config.target, config.dtype)
