"""Flax modules: targets (`llama`), the drafter (`dflash2`), and what they share (`layers`)."""

from dflash_jax.models.dflash2 import DFlash2, DrafterConfig
from dflash_jax.models.llama import Llama, LlamaConfig

__all__ = ["DFlash2", "DrafterConfig", "Llama", "LlamaConfig"]
