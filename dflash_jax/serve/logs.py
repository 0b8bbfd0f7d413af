"""One JSON line a request on standard output. Prompts and replies are never in it."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import queue
import sys
from collections.abc import Iterator
from typing import Any

_requests = logging.getLogger("dflash_jax.serve.requests")


def log_request(facts: dict[str, Any]) -> None:
    _requests.info(json.dumps(facts, default=str))


@contextlib.contextmanager
def request_log() -> Iterator[None]:
    """Writes the lines from a thread of its own: a reader that is slow stops nobody."""
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    writer = logging.handlers.QueueListener(lines, logging.StreamHandler(sys.stdout))
    handler = logging.handlers.QueueHandler(lines)
    _requests.addHandler(handler)
    _requests.setLevel(logging.INFO)
    _requests.propagate = False
    writer.start()
    try:
        yield
    finally:
        writer.stop()
        _requests.removeHandler(handler)
