"""A directory for compiled programs and autotuning results that only the user can write.

A cache entry is machine code: whoever can write the directory can run code as the user.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from dflash_jax.errors import InputError

MIN_FREE_BYTES = 64 * 2**20  # a set of round executables of a small model takes about 20 MiB
_LOCK = "warmup.lock"
_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '([\w.-]+)'")
_UNWRITABLE = "Error writing persistent compilation cache entry"


class CacheUnavailable(Exception):  # noqa: N818 (it is no error: work goes on without a cache)
    """The directory cannot be written (read-only, full); the message says why."""


def host_cpu_id(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns a short hash of the CPU's model and instruction sets.

    XLA compiles for the CPU it runs on; code from another one may crash with SIGILL.
    """
    text = platform.machine() + platform.processor()
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().split("\n\n", 1)[0].splitlines():
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                text += line
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def prepare(folder: Path, uid: int | None = None) -> Path:
    """Makes a private directory and returns it.

    Raises:
      InputError: it is not the user's, or others can write it or replace it.
      CacheUnavailable: it cannot be made or written.
    """
    uid = os.geteuid() if uid is None else uid
    folder = Path(os.path.abspath(folder.expanduser()))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        _check_private(folder, uid)
        _check_writable(folder)
    except OSError as error:
        raise CacheUnavailable(f"{folder}: {error.strerror or error}") from error
    return folder


def _check_private(folder: Path, uid: int) -> None:
    status = folder.stat()
    if status.st_uid != uid:
        raise InputError(
            f"cache directory {folder} belongs to another user (uid {status.st_uid}); "
            "give --cache_dir one of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(f"cache directory {folder} is writable by others; run: chmod 700 {folder}")
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise InputError(
                f"cache directory {folder} lies in {parent}, which everybody can write; "
                "give --cache_dir one elsewhere"
            )


def _check_writable(folder: Path) -> None:
    probe = folder / f".probe-{os.getpid()}"
    try:
        probe.write_bytes(b"\0" * 65536)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free < MIN_FREE_BYTES:
        raise CacheUnavailable(f"{folder}: only {free >> 20} MiB free")


def size_bytes(folder: Path) -> int:
    """Returns the size of all files below a folder; 0 if it is not there."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


@contextlib.contextmanager
def exclusive(folder: Path | None) -> Iterator[None]:
    """Holds the folder's lock: one process at a time tunes and compiles.

    Two processes that start on an empty cache together would each measure and choose their own
    kernels; the second must wait and read what the first has chosen. No folder: no lock.
    """
    if folder is None:
        yield
        return
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def mend_on_warning(folder: Path) -> None:
    """Lets an unreadable cache entry be written anew, and shortens JAX's warnings about the cache.

    JAX compiles anew when an entry does not read (a process was killed while writing it, say),
    but never replaces it: every later start would compile again. Its warning is the only sign.
    """
    show_other = warnings.showwarning
    told: list[str] = []

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        unreadable = _UNREADABLE.match(str(message))
        if unreadable:
            for entry in folder.glob(f"{unreadable.group(1)}-*-cache"):
                entry.unlink(missing_ok=True)
            text = f"warning: compiling {unreadable.group(1)} anew: its cache entry was damaged"
            print(text, file=sys.stderr)
        elif str(message).startswith(_UNWRITABLE):
            if not told:
                reason = str(message).rsplit(": ", 1)[-1]
                print(
                    f"warning: the compilation cache cannot be written: {reason}", file=sys.stderr
                )
            told.append(str(message))
        else:
            show_other(message, category, filename, lineno, file, line)

    warnings.showwarning = show
