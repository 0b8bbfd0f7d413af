"""Starting and stopping: the socket, the event loop, signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from typing import Any, NoReturn

import uvicorn

from dflash_jax.errors import InputError
from dflash_jax.serve.app import make_app
from dflash_jax.serve.logs import request_log
from dflash_jax.serve.service import Load, Options, Service

# A running stream ends within a round; this is for clients that do not read.
_GRACE_S = 3
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow; port 0 takes a free one.

    Raises:
      InputError: the port is taken, or no such address is here.
    """
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = address[0]
        listener = socket.socket(family, kind, protocol)
        # Else a restart has to wait for the last connections of the process before.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


class Server(uvicorn.Server):
    """uvicorn's, which ends the streams before it waits for the connections."""

    def __init__(self, service: Service, options: Options) -> None:
        config = uvicorn.Config(
            make_app(service, options),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
            backlog=_BACKLOG,
        )
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.close()
        await super().shutdown(sockets)


def serve(load: Load, listener: socket.socket, options: Options) -> NoReturn:
    """Serves until SIGTERM or SIGINT, then ends the process with status 0.

    Raises:
      InputError: what `load` found wrong.
    """
    service = Service(options.max_queue)
    server = Server(service, options)

    def stop_serving() -> None:
        server.should_exit = True

    # uvicorn handles signals while it runs, then raises them again: they have been obeyed.
    before = {one: signal.signal(one, _nothing) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        with request_log():
            service.start(load, on_failure=stop_serving)
            server.run(sockets=[listener])
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if service.failure is not None:
        raise service.failure
    if service.model is not None:
        service.join(_GRACE_S)
    # Not by returning: a compilation cannot be interrupted, and an interpreter with a model in it
    # takes seconds to take itself apart.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk, a reader that has gone
            stream.flush()
    os._exit(0)


def _nothing(*_: Any) -> None:
    pass
