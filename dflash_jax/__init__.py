"""Lossless speculative decoding with DFlash2 draft trees in JAX."""

__version__ = "0.1.0"
