"""Says whether decoding will work here.

    python -m dflash_jax.doctor [--platform=xpu] [--config=configs/smollm2.py] [--json]

Looks at versions, plugins, their shared libraries, devices, memory and cache directories, then
proves the row table and decodes a few rounds: of a tiny random model, or of a config's. Exit
status 0: decoding works. 1: it does not, and a line says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform as host_platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags

from dflash_jax import __version__, caches, entry, platform, plugins
from dflash_jax.errors import InputError

_PLATFORM = flags.DEFINE_enum("platform", "auto", platform.PLATFORMS, "The backend to examine.")
_CACHE_DIR = flags.DEFINE_string("cache_dir", None, "Where compiled programs are kept.")
_CONFIG = entry.config_flag(
    None, "Models to try, such as configs/smollm2.py; a tiny random one without."
)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of lines.")

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "scipy", "ml_dtypes", "safetensors", "gguf")

# Plain, the least drafted, a middle one, the most: each takes seconds to compile.
_TINY_WIDTHS = (0, 1, 7, 15)
_TINY_CONTEXT = 512

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


def examine(asked: str, cache_dir: str | None, config: Any = None) -> Iterator[Finding]:
    """Gives one finding after the other; stops at the first that makes the rest pointless."""
    # First of all, since it may start this process again.
    try:
        found: platform.Platform | InputError = platform.initialize(asked, cache_dir=cache_dir)
    except InputError as error:
        found = error
    installed = versions()
    yield from installed
    yield from plugin_states(asked)
    if isinstance(found, InputError):
        yield Finding("platform", FAILED, str(found))
        return
    yield from devices(found)
    yield cache_state(found)
    if all(finding.state != FAILED for finding in installed):
        yield from decode_checks(found, config)


def decode_checks(found: platform.Platform, config: Any) -> Iterator[Finding]:
    """The row table's self-check, and rounds of a smoke run, on a config's models or tiny ones."""
    # Imported here: the doctor must be able to say that one of their packages is missing.
    from dflash_jax.engine import smoke

    said: list[str] = []
    step = "self-check"
    start = time.perf_counter()
    try:
        with found.warmup_lock():
            model, decoder = _prepared(config, said.append)
        took = f"{time.perf_counter() - start:.1f} s with compilation"
        rows = list(decoder.spec.policy.row_counts)
        detail = f"{model}: widths {list(decoder.check.widths)} give the same bits"
        said.append(f"{detail}, in windows of {rows} rows; {took}")
        yield Finding(step, WARNING if len(said) > 1 else OK, "; ".join(said))
        step = "smoke run"
        run = smoke.smoke_run(decoder)
    except (InputError, RuntimeError, MemoryError) as error:  # RuntimeError: XLA's own
        yield Finding(step, FAILED, "; ".join([*said, _first_line(error)]))
        return
    detail = f"{run.rounds} drafted rounds, {run.tokens} tokens, equal to plain decoding's"
    if not run.rounds:
        detail = f"no drafter; {run.plain_tokens} tokens, decoded plainly"
    if run.differences:
        yield Finding(step, FAILED, "; ".join(run.differences))
    else:
        yield Finding(step, OK, detail)


def _prepared(config: Any, say: Callable[[str], None]) -> tuple[str, Any]:
    """(a name, a decoder)."""
    from dflash_jax.engine import loading, prepare, smoke
    from dflash_jax.tree.growth import CAP

    if config is None:
        tiny = smoke.tiny_models(context_limit=_TINY_CONTEXT)
        return "tiny random model", prepare(
            tiny.target,
            tiny.target_params,
            tiny.drafter,
            vocab_size=tiny.target.vocab_size,
            context_limit=_TINY_CONTEXT,
            widths=_TINY_WIDTHS,
            time_widths=False,
            say=say,
        )
    chosen = loading.ModelConfig.from_config(config)
    models = loading.load_models(chosen)
    widths = range(CAP + 1) if models.drafter else (0,)
    decoder = loading.prepare_models(
        models, chosen.context_limit, widths=widths, time_widths=False, say=say
    )
    return models.target.name, decoder


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def main(argv: Sequence[str]) -> None:
    """Prints the findings; exit status 1 when one of them has failed."""
    del argv
    findings = []
    for finding in examine(_PLATFORM.value, _CACHE_DIR.value, _CONFIG.value):
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
    entry.run(main)
