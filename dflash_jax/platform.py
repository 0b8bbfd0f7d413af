"""Chooses and prepares the JAX backend: `initialize`, the first call of every entry point.

The one place that reads or sets environment variables and JAX's global configuration.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax import caches, compat, plugins
from dflash_jax.errors import InputError

PLATFORMS = ("auto", "cpu", "xpu", "cuda")
_AUTO_ORDER = ("xpu", "cuda")
_FROM_JAX_NAME = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "sycl": "xpu", "oneapi": "xpu"}

_M_ARENA_MAX = -8  # of glibc's malloc.h
_HEAPS = 2

_LOADER_GUARD = "DFLASH_JAX_LOADER_PATH_SET"  # set in the process that was started again
_DETERMINISTIC_FLAG = "xla_gpu_deterministic_ops"

# For `lowered.compile(compiler_options=…)`: the fallback when a self-check fails on a GPU.
DETERMINISTIC_OPTIONS: dict[str, Any] = {_DETERMINISTIC_FLAG: True}


@dataclass(frozen=True)
class Platform:
    """The backend in use."""

    name: str  # cpu, xpu or cuda
    backend: str  # JAX's own name: cpu, sycl, oneapi or cuda
    devices: tuple[Any, ...]  # jax.Device
    jax_version: str
    jaxlib_version: str
    plugin: str | None  # package and version
    cache_dir: Path | None  # compiled programs and autotuning results; None: not persisted
    deterministic: bool  # XLA may use deterministic kernels only
    notes: tuple[str, ...]  # what was said on stderr

    def warmup_lock(self) -> contextlib.AbstractContextManager[None]:
        """Returns a lock to hold while compiling, so that processes share their kernel choices."""
        return caches.exclusive(self.cache_dir if self.name != "cpu" else None)


class _UnusableError(InputError):
    """A platform that was asked for cannot be used; `auto` goes on to the next."""


def initialize(
    platform: str = "auto",
    *,
    cache_dir: str | Path | None = None,
    use_cache: bool = True,
    deterministic: bool = False,
    restart: bool = True,
) -> Platform:
    """Prepares JAX for a platform, before any JAX computation, and returns what it found.

    Args:
      platform: auto, cpu, xpu or cuda. `auto` takes the first usable of xpu, cuda, cpu, and says
        on stderr when it passes over a plugin that is installed.
      cache_dir: where compiled programs and autotuning results are kept, in a subdirectory keyed
        by versions and CPU model. None: `dflash_jax` in the user's cache directory.
      use_cache: False keeps nothing; a GPU then uses deterministic kernels.
      deterministic: a GPU uses deterministic kernels in any case (slower).
      restart: lets the process start itself again, once, when the loader's path lacks this
        environment's libraries: the loader reads LD_LIBRARY_PATH at a process's start only.

    Raises:
      InputError: one line with the reason and the remedy.
    """
    if platform not in PLATFORMS:
        raise InputError(f"unknown platform {platform!r}; choose one of {', '.join(PLATFORMS)}")
    _share_heaps()
    notes: list[str] = []
    if platform == "auto":
        platform = _auto_from_environment()
    xla_flags = os.environ.get("XLA_FLAGS")
    for name in _AUTO_ORDER if platform == "auto" else (platform,):
        plugin = plugins.find(name)
        if platform == "auto" and plugin is None:
            continue
        try:
            return _start(name, plugin, cache_dir, use_cache, deterministic, restart, notes)
        except _UnusableError as reason:
            if platform != "auto":
                raise
            _say(notes, f"platform auto: not using {name}: {reason}")
            # The GPU's flags are part of the key of the CPU's compiled programs.
            os.environ.pop("XLA_FLAGS", None)
            if xla_flags is not None:
                os.environ["XLA_FLAGS"] = xla_flags
    if notes:
        _say(notes, "platform auto: falling back to the CPU")
    return _start("cpu", None, cache_dir, use_cache, deterministic, restart, notes)


def _share_heaps() -> None:
    """Keeps glibc from giving each of XLA's threads a heap of its own, before there are any.

    What LLVM frees leaves holes in all of them: 1 GB of the 3.3 that compiling SmolLM2 took.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL("libc.so.6").mallopt(_M_ARENA_MAX, _HEAPS)


def _auto_from_environment() -> str:
    """JAX_PLATFORMS is the user's word on the platform too."""
    first = os.environ.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    if not first:
        return "auto"
    if first not in _FROM_JAX_NAME:
        raise InputError(f"JAX_PLATFORMS={first} is no platform of dflash_jax; unset it")
    return _FROM_JAX_NAME[first]


def _start(
    name: str,
    plugin: plugins.Plugin | None,
    cache_dir: str | Path | None,
    use_cache: bool,
    deterministic: bool,
    restart: bool,
    notes: list[str],
) -> Platform:
    versions = tuple(plugins.installed_version(package) or "?" for package in ("jax", "jaxlib"))
    if name != "cpu":
        plugin = _usable_plugin(name, plugin, versions, restart)
    backend = plugin.kind.backend if plugin else "cpu"
    already = compat.backends_are_initialized()
    if already:
        _check_running_backend(name)
    folder = _cache_folder(cache_dir, name, plugin, versions, notes) if use_cache else None
    # JAX keeps no compiled programs of the Intel platforms, and the XLA of plugin 0.7.0 knows no
    # autotuning directory, so that two processes agree only on deterministic kernels.
    deterministic = name == "xpu" or (name == "cuda" and (deterministic or folder is None))
    if deterministic:
        _add_xla_flag(_DETERMINISTIC_FLAG, "true")
    _configure_jax(backend, folder, already)
    return Platform(
        name=name,
        backend=backend,
        devices=_start_devices(name, plugin),
        jax_version=versions[0],
        jaxlib_version=versions[1],
        plugin=str(plugin) if plugin else None,
        cache_dir=folder,
        deterministic=deterministic,
        notes=tuple(notes),
    )


def _usable_plugin(
    name: str, plugin: plugins.Plugin | None, versions: tuple[str, ...], restart: bool
) -> plugins.Plugin:
    """Returns the plugin when it fits this jax and its shared object opens."""
    if plugin is None:
        raise _UnusableError(
            f"no plugin for platform {name} is installed; run: {plugins.install_command(name)}"
        )
    problem = plugins.version_problem(plugin, *versions)
    if problem:
        raise _UnusableError(problem)
    if plugin.library is None:
        raise _UnusableError(
            f"{plugin} is installed without its {plugin.kind.library}; "
            f"run: pip install --force-reinstall --no-deps {plugin.kind.distribution}"
        )
    missing = plugins.missing_libraries(plugin)
    if missing:
        raise _UnusableError(plugins.missing_message(plugin, missing))
    if name == "xpu":
        # The profiler's warning that it is off, on every start, is no news.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        _open_library(plugin, plugin.library, restart)
    return plugin


def _open_library(plugin: plugins.Plugin, library: Path, restart: bool) -> None:
    error = plugins.load_error(library)
    if error is None:
        return
    if not plugins.needs_loader_path(error):
        raise _UnusableError(plugins.load_message(plugin, error))
    if restart and _LOADER_GUARD not in os.environ and _can_restart():
        _restart_with_loader_path()
    folders = ":".join(map(str, plugins.library_folders()))
    raise _UnusableError(
        f"{plugin} cannot load: {error}; start Python with LD_LIBRARY_PATH={folders}"
    )


def _can_restart() -> bool:
    """A program that came through standard input cannot be read again."""
    interactive = hasattr(sys, "ps1") or sys.flags.interactive
    arguments = sys.orig_argv[1:]
    return bool(sys.executable) and bool(arguments) and "-" not in arguments[:1] and not interactive


def _restart_with_loader_path() -> None:
    """Replaces this process by itself with the environment's libraries on the loader's path."""
    folders = [*map(str, plugins.library_folders()), os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
    os.environ[_LOADER_GUARD] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _check_running_backend(name: str) -> None:
    import jax

    running = _FROM_JAX_NAME.get(jax.devices()[0].platform.lower(), jax.default_backend())
    if running != name:
        raise _UnusableError(
            f"JAX already runs on {running} in this process; choose platform {name} before that"
        )


def default_cache_dir() -> Path:
    """Returns `dflash_jax` in the user's cache directory."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "dflash_jax"


def _cache_folder(
    cache_dir: str | Path | None,
    name: str,
    plugin: plugins.Plugin | None,
    versions: tuple[str, ...],
    notes: list[str],
) -> Path | None:
    root = Path(cache_dir) if cache_dir else default_cache_dir()
    plugin_key = f"-{plugin.kind.distribution}-{plugin.version}" if plugin else ""
    key = f"{name}-jax-{versions[0]}-jaxlib-{versions[1]}{plugin_key}-{caches.host_cpu_id()}"
    try:
        caches.prepare(root)
        return caches.prepare(root / key)
    except (caches.CacheUnavailable, RuntimeError) as reason:
        # RuntimeError: `expanduser` found no home directory.
        _say(notes, f"warning: no compilation cache, every start compiles anew: {reason}")
        return None


def _add_xla_flag(flag: str, value: str) -> None:
    """Adds a flag to XLA_FLAGS unless the user has set it."""
    flags = os.environ.get("XLA_FLAGS", "")
    if f"--{flag}" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{flag}={value}".strip()


def _configure_jax(backend: str, folder: Path | None, already: bool) -> None:
    """Sets the platform and the persistent caches in JAX's configuration.

    With a cache directory JAX also passes XLA the per-fusion autotuning directory inside it, as
    a compile option: no entry in XLA_FLAGS, where a flag that some XLA lacks ends the process.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if not already:
        # The CPU stays at hand beside a GPU, for host-side references.
        jax.config.update("jax_platforms", "cpu" if backend == "cpu" else f"{backend},cpu")
    compat.allow_donation(backend)
    jax.config.update("jax_compilation_cache_dir", str(folder) if folder else None)
    jax.config.update("jax_enable_compilation_cache", folder is not None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if folder:
        caches.mend_on_warning(folder)
    if already:
        compilation_cache.reset_cache()  # JAX remembers that earlier programs had no directory


def _start_devices(name: str, plugin: plugins.Plugin | None) -> tuple[Any, ...]:
    import jax

    try:
        with compat.quiet_plugin_discovery():
            return tuple(jax.devices())
    except RuntimeError as error:
        message = str(error).splitlines()[0]
    if "No visible GPU devices" in message or "NO_DEVICE" in message:
        raise _UnusableError(f"No visible GPU devices ({plugin}); {_gpu_remedy(name)}")
    raise _UnusableError(f"platform {name} cannot start: {message}")


def _gpu_remedy(name: str) -> str:
    if name == "cuda":
        return "check nvidia-smi and CUDA_VISIBLE_DEVICES"
    nodes: Iterable[Path] = Path("/dev/dri").glob("renderD*")
    node = next(iter(nodes), None)
    if node is None:
        return "this machine shows no /dev/dri/renderD*: install Intel's GPU driver"
    if not os.access(node, os.R_OK | os.W_OK):
        return f"no right to open {node}: add this user to the group render"
    return (
        "install Intel's Level Zero GPU driver (libze-intel-gpu1 or intel-level-zero-gpu), and "
        "check ONEAPI_DEVICE_SELECTOR and ZE_AFFINITY_MASK"
    )


def _say(notes: list[str], line: str) -> None:
    notes.append(line)
    print(line, file=sys.stderr)
