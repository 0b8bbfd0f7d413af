"""Checkpoints on disk to configs, parameters and tokenizers."""

from dflash_jax.checkpoints.target import EMBEDDED, Target, embedded_path, load_target
from dflash_jax.checkpoints.tokenizer import StreamDecoder, Tokenizer

__all__ = ["EMBEDDED", "StreamDecoder", "Target", "Tokenizer", "embedded_path", "load_target"]
