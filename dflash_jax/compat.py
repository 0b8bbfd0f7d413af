"""What differs between the jax versions that the project runs on (0.5.0 to the newest)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

# JAX has no public name for this; the private one is the same from 0.5.0 to 0.11.
_LOGGERS = (
    "jax._src.xla_bridge",
    "jax_plugins.intel_extension_for_openxla",
    "jax_plugins.xla_oneapi",
)


def backends_are_initialized() -> bool:
    """Says whether JAX has started its devices in this process already."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def allow_donation(backend: str) -> None:
    """Lets JAX donate buffers on a plugin's platform, so that a cache is updated in place.

    JAX marks donated inputs only for the platforms of a list of its own, which lacks the Intel
    ones; elsewhere it warns and copies. Their runtime is the one of CUDA, which knows the mark.
    """
    from jax._src.interpreters import mlir

    platforms = getattr(mlir, "_platforms_with_donation", None)
    if platforms is not None and backend not in platforms:
        platforms.append(backend)


@contextlib.contextmanager
def quiet_plugin_discovery() -> Iterator[None]:
    """Keeps JAX from logging, with a traceback, that a plugin nobody asked for did not load."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
