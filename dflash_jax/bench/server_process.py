"""A server of this package as a process of its own, watched from outside."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any, NamedTuple

import httpx

from dflash_jax.errors import InputError

_LISTENING = "listening on "
_LAST_LINES = 5


class Usage(NamedTuple):
    """What a process holds; Linux."""

    memory_mib: float  # resident
    handles: int  # open files and sockets
    threads: int


class ServerProcess:
    """`python -m dflash_jax.serve` on a free port; a `with` statement ends it.

    logged: how often each X-Request-Id is in its log. errors: lines of its standard error.
    """

    def __init__(self, flags: list[str]) -> None:
        self.begin = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dflash_jax.serve", *flags, "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        self.logged: collections.Counter[str] = collections.Counter()
        self._listening = threading.Event()
        self._readers = [
            threading.Thread(target=read, args=[pipe], daemon=True)
            for read, pipe in (
                (self._read_errors, self._process.stderr),
                (self._read_log, self._process.stdout),
            )
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _read_errors(self, pipe: IO[str]) -> None:
        for line in pipe:
            self.errors.append(line.rstrip())
            if line.startswith(_LISTENING):
                self._listening.set()
        self._listening.set()

    def _read_log(self, pipe: IO[str]) -> None:
        for line in pipe:
            facts: dict[str, Any] = json.loads(line)
            self.logged[facts["request_id"]] += 1

    @property
    def url(self) -> str:
        """Once it listens; InputError when it ended before."""
        self._listening.wait()
        for line in self.errors:
            if line.startswith(_LISTENING):
                return line.removeprefix(_LISTENING)
        raise self._ended()

    def wait_ready(self) -> float:
        """Seconds from its start until it is ready.

        Raises:
          InputError: it ended before.
        """
        while True:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return time.perf_counter() - self.begin
            except httpx.TransportError:
                pass
            if self._process.poll() is not None:
                raise self._ended()
            time.sleep(0.05)

    def _ended(self) -> InputError:
        last = " | ".join(self.errors[-_LAST_LINES:])
        return InputError(f"the server ended before it was ready: {last}")

    def usage(self) -> Usage:
        """What it holds now."""
        process = pathlib.Path("/proc") / str(self._process.pid)
        lines = dict(
            line.split(":", 1) for line in (process / "status").read_text().splitlines() if line
        )
        return Usage(
            int(lines["VmRSS"].split()[0]) / 1024,
            len(os.listdir(process / "fd")),
            int(lines["Threads"]),
        )

    def stop(self) -> tuple[int, float]:
        """SIGTERM; (exit status, seconds until it had ended)."""
        begin = time.perf_counter()
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait()
        seconds = time.perf_counter() - begin
        for reader in self._readers:
            reader.join()
        return status, seconds
