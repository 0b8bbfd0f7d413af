"""Streams: what is compiled and shared (`decoder`), and the lone driver (`lone`)."""

from dflash_jax.engine.decoder import Decoder, prepare
from dflash_jax.engine.lone import LoneDriver, Request, RoundRecord, Stream, token_sha256
from dflash_jax.engine.rules import Rules, Thinking

__all__ = [
    "Decoder",
    "LoneDriver",
    "Request",
    "RoundRecord",
    "Rules",
    "Stream",
    "Thinking",
    "prepare",
    "token_sha256",
]
