"""Streams: what is compiled and shared (`decoder`), and the lone driver (`lone`)."""

from dflash_jax.engine.decoder import Decoder, prepare
from dflash_jax.engine.lone import LoneDriver, Request, RoundRecord, Stream, token_sha256

__all__ = [
    "Decoder",
    "LoneDriver",
    "Request",
    "RoundRecord",
    "Stream",
    "prepare",
    "token_sha256",
]
