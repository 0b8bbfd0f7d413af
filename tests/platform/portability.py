"""What the XLA of the Intel plugin 0.7.0 can read, and a check of lowered functions against it.

Facts, each read off the plugin's shared object (test_portability.py repeats it where the plugin
is installed):
- Its StableHLO has the versioned names of plugin_0_7_0_vhlo.txt, the same as jaxlib 0.5.0's.
- It speaks PJRT 0.54 and reports no StableHLO version, so that jax 0.5.0 sends it the version of
  twelve weeks before its own (`GetDefaultStablehloVersion` in XLA): 1.7.5.
- It registers one custom call of its own (`xla_python_gpu_callback`). The calls below are no
  kernels: jax 0.5.0 writes these MHLO ops as calls of that name, and XLA reads them back as ops.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jax import export
from jaxlib.mlir.dialects import stablehlo

from dflash_jax import compat

PLATFORMS = ("sycl", "cuda", "cpu")
STABLEHLO_VERSION = "1.7.5"
CUSTOM_CALLS = frozenset({"mhlo.topk", "mhlo.erf"})
NAMES = frozenset(
    line
    for line in (Path(__file__).parent / "plugin_0_7_0_vhlo.txt").read_text().splitlines()
    if not line.startswith("#")
)

_CUSTOM_CALL = re.compile(r'custom_call @"?([\w.$]+)')
# MLIR bytecode ends each name with a zero byte; the dialect's name is kept apart.
_NAME = re.compile(rb"(?<![\w.])([a-z][a-z_0-9]*_v\d+)\0")


def lower(
    function: Callable[..., Any],
    inputs: Iterable[Any],
    platform: str,
    donated: tuple[int, ...] = (),
) -> str:
    """Lowers a function for a platform, with no device of it, and returns StableHLO text.

    Raises UserWarning when JAX does not use a donated buffer there.
    """
    compat.allow_donation(platform)  # as `platform.initialize` does
    jitted = jax.jit(function, donate_argnums=donated)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Some donated buffers were not usable")
        return export.export(jitted, platforms=[platform])(*inputs).mlir_module()


def module_problems(
    module: str, version: str = STABLEHLO_VERSION, names: frozenset[str] = NAMES
) -> list[str]:
    """Returns what the plugin's XLA would not understand in a module, one line each."""
    found = [
        f"custom call {target}"
        for target in sorted(set(_CUSTOM_CALL.findall(module)) - CUSTOM_CALLS)
    ]
    try:
        artifact = stablehlo.serialize_portable_artifact_str(module, version)
    except ValueError as error:
        return [*found, f"not in StableHLO {version}: {error}"]
    used = {match.decode() for match in _NAME.findall(artifact)}
    if "func_v1" not in used:  # a guard: the format has changed, and nothing would be found
        return [*found, "no versioned names found in the artifact"]
    return found + [f"op {name}" for name in sorted(used - names)]


def problems(
    function: Callable[..., Any], inputs: Iterable[Any], donated: tuple[int, ...] = ()
) -> list[str]:
    """Lowers a function for every platform and returns all that is not portable."""
    found = []
    for platform in PLATFORMS:
        try:
            module = lower(function, inputs, platform, donated)
        except (NotImplementedError, ValueError, UserWarning) as error:
            found.append(f"{platform}: does not lower: {str(error).splitlines()[0]}")
            continue
        found += [f"{platform}: {problem}" for problem in module_problems(module)]
    return found
