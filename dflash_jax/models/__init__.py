"""Flax modules: targets (`llama`, `qwen3_5`), the drafter (`dflash2`), shared `layers`."""

from dflash_jax.models.dflash2 import DFlash2, DrafterConfig
from dflash_jax.models.llama import Llama, LlamaConfig

__all__ = ["DFlash2", "DrafterConfig", "Llama", "LlamaConfig"]
