"""Says whether decoding will work here: `python -m dflash_jax.doctor [--platform=xpu] [--json]`.

Looks at versions, plugins, their shared libraries, devices, memory and cache directories, then
proves the row table and decodes one round on a tiny random model. Exit status 0: decoding works.
1: it does not, and a line says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform as host_platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags

from dflash_jax import __version__, caches, platform, plugins
from dflash_jax.errors import InputError, one_line_errors

_PLATFORM = flags.DEFINE_enum("platform", "auto", platform.PLATFORMS, "The backend to examine.")
_CACHE_DIR = flags.DEFINE_string("cache_dir", None, "Where compiled programs are kept.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of lines.")

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "scipy", "ml_dtypes", "safetensors", "gguf")

OK, WARNING, FAILED = "ok", "warning", "FAILED"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: str  # OK, WARNING (decoding works all the same) or FAILED
    detail: str


def versions() -> list[Finding]:
    """What is installed."""
    packages = {name: plugins.installed_version(name) or "missing" for name in _PACKAGES}
    state = FAILED if "missing" in packages.values() else OK
    detail = ", ".join(f"{name} {version}" for name, version in packages.items())
    python = f"python {host_platform.python_version()}, {host_platform.platform()}"
    return [
        Finding("dflash_jax", OK, f"{__version__}, {python}"),
        Finding("packages", state, detail),
    ]


def plugin_states(asked: str) -> list[Finding]:
    """Each plugin's state; a broken one fails only when its platform was asked for."""
    found = []
    for name in ("xpu", "cuda"):
        plugin = plugins.find(name)
        bad = FAILED if asked == name else WARNING
        if plugin is None:
            if asked == name:
                found.append(Finding(f"plugin {name}", FAILED, "not installed"))
            continue
        jax, jaxlib = (plugins.installed_version(p) or "?" for p in ("jax", "jaxlib"))
        problem = plugins.version_problem(plugin, jax, jaxlib)
        missing = plugins.missing_libraries(plugin)
        if problem is None and missing:
            problem = plugins.missing_message(plugin, missing)
        if problem is None and plugin.library is None:
            problem = f"{plugin} lacks its {plugin.kind.library}"
        detail = problem or f"{plugin}, all {len(plugin.kind.libraries)} shared libraries found"
        found.append(Finding(f"plugin {name}", bad if problem else OK, detail))
    return found


def devices(found: platform.Platform) -> list[Finding]:
    """The devices and their memory, and the host's."""
    findings = [Finding("platform", WARNING if found.notes else OK, _describe(found))]
    for device in found.devices:
        findings.append(
            Finding(f"device {device.id}", OK, f"{device.device_kind}{_memory(device)}")
        )
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        findings.append(Finding("host memory", OK, f"{free / 2**20:.1f} GiB available"))
    return findings


def _describe(found: platform.Platform) -> str:
    text = f"{found.name} (JAX's {found.backend})"
    if found.deterministic:
        text += ", deterministic kernels"
    return "; ".join([text, *found.notes])


def _memory(device: Any) -> str:
    stats = device.memory_stats() or {}  # None on the CPU
    if "bytes_limit" not in stats:
        return ""
    used = stats.get("bytes_in_use", 0)
    return f", {(stats['bytes_limit'] - used) / 2**30:.1f} GiB of memory free for JAX"


def cache_state(found: platform.Platform) -> Finding:
    """Where compiled programs are kept, how much, and how much space is left."""
    folder = found.cache_dir
    if folder is None:
        return Finding("cache", WARNING, "none: every start compiles anew")
    size = caches.size_bytes(folder) / 2**20
    free = shutil.disk_usage(folder).free / 2**30
    writable = os.access(folder, os.W_OK)
    detail = f"{folder}: {size:.1f} MiB kept, {free:.1f} GiB free"
    return Finding("cache", OK if writable else WARNING, detail)


def examine(asked: str, cache_dir: str | None) -> Iterator[Finding]:
    """Gives one finding after the other; stops at the first that makes the rest pointless."""
    # First of all, since it may start this process again.
    try:
        found: platform.Platform | InputError = platform.initialize(asked, cache_dir=cache_dir)
    except InputError as error:
        found = error
    yield from versions()
    yield from plugin_states(asked)
    if isinstance(found, InputError):
        yield Finding("platform", FAILED, str(found))
        return
    yield from devices(found)
    yield cache_state(found)
    yield from decode_checks(found)


def decode_checks(found: platform.Platform) -> Iterator[Finding]:
    """The row table's self-check and one drafted round on a tiny random model."""
    del found
    yield Finding("self-check", WARNING, "not part of this version yet")


def main(argv: Sequence[str]) -> None:
    """Prints the findings; exit status 1 when one of them has failed."""
    with one_line_errors():
        if len(argv) > 1:
            raise InputError(f"unexpected argument {argv[1]!r}; see --help")
    findings = []
    for finding in examine(_PLATFORM.value, _CACHE_DIR.value):
        findings.append(finding)
        if not _JSON.value:
            print(f"{finding.state:8}{finding.name:14}{finding.detail}", flush=True)
    works = all(finding.state != FAILED for finding in findings)
    if _JSON.value:
        report = {"works": works, "findings": [dataclasses.asdict(f) for f in findings]}
        print(json.dumps(report, indent=2))
    else:
        print("decoding works here" if works else "decoding does not work here")
    sys.exit(0 if works else 1)


if __name__ == "__main__":
    app.run(main)
