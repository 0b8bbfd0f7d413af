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
