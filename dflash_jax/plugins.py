"""Which JAX device plugins this Python environment has, and what keeps one from loading.

Nothing here imports JAX or starts a device, so that a broken plugin is described before JAX
meets it. Only package metadata is read and shared objects are opened.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LEVEL_ZERO = "libze_loader.so.1"

# Shared libraries that the Intel plugins link: soname -> the package that has it.
# From `readelf -d` of pjrt_plugin_xpu.so 0.7.0 and of the libraries it links in turn.
OPENXLA_LIBRARIES = {
    LEVEL_ZERO: "Debian package libze1",
    "libsycl.so.8": "pip package intel-sycl-rt",
    "libur_loader.so.0": "pip package intel-cmplr-lib-ur",
    "libsvml.so": "pip package intel-cmplr-lib-rt",
    "libimf.so": "pip package intel-cmplr-lib-rt",
    "libirng.so": "pip package intel-cmplr-lib-rt",
    "libintlc.so.5": "pip package intel-cmplr-lib-rt",
    "libOpenCL.so.1": "pip package intel-opencl-rt",
    "libccl.so.1": "pip package oneccl",
    "libccl.so.2": "pip package oneccl",
    "libmkl_intel_ilp64.so.2": "pip package mkl",
    "libmkl_sequential.so.2": "pip package mkl",
    "libmkl_core.so.2": "pip package mkl",
    "libmkl_sycl_blas.so.5": "pip package onemkl-sycl-blas",
    "libmkl_sycl_lapack.so.5": "pip package onemkl-sycl-lapack",
    "libmkl_sycl_sparse.so.5": "pip package onemkl-sycl-sparse",
    "libmkl_sycl_dft.so.5": "pip package onemkl-sycl-dft",
    "libmkl_sycl_vm.so.5": "pip package onemkl-sycl-vm",
    "libmkl_sycl_rng.so.5": "pip package onemkl-sycl-rng",
    "libmkl_sycl_stats.so.5": "pip package onemkl-sycl-stats",
    "libmkl_sycl_data_fitting.so.5": "pip package onemkl-sycl-datafitting",
}
ONEAPI_LIBRARIES = {
    soname: package
    for soname, package in OPENXLA_LIBRARIES.items()
    if not re.search(r"ccl|_vm|_stats|_data_fitting", soname)
} | {
    "libze_tracing_layer.so.1": "Debian package libze1",
    "libumf.so.0": "pip package umf",
    "libhwloc.so.15": "pip package tcmlib",
    "libmpi.so.12": "pip package impi-rt",
    "libmkl_def.so.2": "pip package mkl",
    "libirc.so": "pip package intel-cmplr-lib-rt",
}
CUDA_LIBRARIES = {"libcuda.so.1": "NVIDIA driver"}


@dataclass(frozen=True)
class PluginKind:
    """A plugin that the project knows."""

    platform: str  # the value of --platform that selects it
    distribution: str  # its pip package
    module: str  # the module that JAX imports
    library: str  # its shared object, beside the module
    backend: str  # the name under which JAX registers it
    environment: str  # the folder of third_party/ with its constraints
    libraries: dict[str, str]  # soname -> package that has it
    jax_versions: dict[str, str]  # its version -> the jax it needs; if absent, the same version


KINDS = (
    PluginKind(
        platform="xpu",
        distribution="intel-extension-for-openxla",
        module="jax_plugins.intel_extension_for_openxla",
        library="pjrt_plugin_xpu.so",
        backend="sycl",
        environment="xpu",
        libraries=OPENXLA_LIBRARIES,
        # The table of its README. 0.7.0 calls jax._src functions of exactly these versions.
        jax_versions={"0.7.0": "0.5.0", "0.6.0": "0.4.38"},
    ),
    PluginKind(
        platform="xpu",
        distribution="jax-oneapi-plugin",
        module="jax_plugins.xla_oneapi",
        library="xla_oneapi_plugin.so",
        backend="oneapi",
        environment="oneapi",
        libraries=ONEAPI_LIBRARIES,
        jax_versions={},
    ),
    *(
        PluginKind(
            platform="cuda",
            distribution=f"jax-cuda{major}-plugin",
            module=f"jax_plugins.xla_cuda{major}",
            library="xla_cuda_plugin.so",
            backend="cuda",
            environment="cuda",
            libraries=CUDA_LIBRARIES,
            jax_versions={},
        )
        for major in (13, 12)
    ),
)


@dataclass(frozen=True)
class Plugin:
    """A plugin found in this environment."""

    kind: PluginKind
    version: str
    library: Path | None  # None: its package is there, its shared object is not

    def __str__(self) -> str:
        """Returns name and version, for messages."""
        return f"{self.kind.distribution} {self.version}"


def installed_version(distribution: str) -> str | None:
    """Returns the version of a pip package of this environment, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def find(platform: str) -> Plugin | None:
    """Returns the first installed plugin of a platform, or None. Does not load it."""
    for kind in KINDS:
        version = installed_version(kind.distribution)
        if kind.platform == platform and version is not None:
            return Plugin(kind, version, _library_path(kind))
    return None


def _library_path(kind: PluginKind) -> Path | None:
    # find_spec imports the parent package only, jax_plugins, which holds no code.
    try:
        spec = importlib.util.find_spec(kind.module)
    except ImportError:
        return None
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / kind.library
        if path.exists():
            return path
    return None


def install_command(environment: str) -> str:
    """Returns the command that installs an environment of third_party/."""
    return f"pip install -e '.[{environment}]' -c third_party/{environment}/constraints.txt"


def version_problem(plugin: Plugin, jax_version: str, jaxlib_version: str) -> str | None:
    """Says in one line that the plugin is not for this jax, or returns None."""
    needed = plugin.kind.jax_versions.get(plugin.version, plugin.version)
    if plugin.kind.jax_versions and plugin.version not in plugin.kind.jax_versions:
        known = ", ".join(plugin.kind.jax_versions)
        return (
            f"{plugin} is not a version that dflash_jax knows ({known}); "
            f"run: {install_command(plugin.kind.environment)}"
        )
    if jax_version == jaxlib_version == needed:
        return None
    return (
        f"{plugin} needs jax {needed} and jaxlib {needed}, found jax {jax_version} and jaxlib "
        f"{jaxlib_version}; in an environment of its own run: "
        f"{install_command(plugin.kind.environment)}"
    )


def library_folders() -> tuple[Path, ...]:
    """Returns the folders of this environment where pip puts shared libraries."""
    return (Path(sys.prefix) / "lib",)


def missing_libraries(plugin: Plugin) -> dict[str, str]:
    """Returns the linked libraries (soname -> package) that are nowhere to be found."""
    folders = library_folders()
    return {
        soname: package
        for soname, package in plugin.kind.libraries.items()
        if not any((folder / soname).exists() for folder in folders) and load_error(soname)
    }


def load_error(library: str | Path) -> str | None:
    """Opens a shared library and returns the loader's complaint, or None when it opened."""
    try:
        # Local, not RTLD_GLOBAL: MKL's 64-bit-integer BLAS would take the place of SciPy's.
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return None


def missing_message(plugin: Plugin, missing: dict[str, str]) -> str:
    """Says in one line which libraries a plugin lacks and which packages have them."""
    return (
        f"{plugin} cannot load: missing {', '.join(missing)}; "
        f"{_remedy(plugin, dict.fromkeys(missing.values()))}"
    )


def _remedy(plugin: Plugin, packages: Iterable[str]) -> str:
    steps = []
    debian = [p.removeprefix("Debian package ") for p in packages if p.startswith("Debian")]
    if debian:
        steps.append(f"apt-get install {' '.join(debian)}")
    pip = [p.removeprefix("pip package ") for p in packages if p.startswith("pip")]
    if pip:
        steps.append(f"{install_command(plugin.kind.environment)} (for {', '.join(pip)})")
    if "NVIDIA driver" in packages:
        return "install the NVIDIA driver"
    return f"run: {' and '.join(steps)}"


def load_message(plugin: Plugin, error: str) -> str:
    """Says in one line why the plugin's shared object does not open, and the remedy."""
    remedy = f"run: {install_command(plugin.kind.environment)}"
    if re.search(r"undefined symbol: ze[A-Z]", error):
        # oneAPI 2025.1 calls zeDeviceGetRootDevice, which Debian 12's libze1 1.8.12 lacks.
        remedy = f"the Level Zero loader {LEVEL_ZERO} (Debian package libze1) is too old for it"
    elif "undefined symbol" in error:
        remedy = f"the oneAPI packages are of other versions; {remedy}"
    return f"{plugin} cannot load: {error}; {remedy}"


def needs_loader_path(error: str) -> bool:
    """Says whether a loader's complaint is about a library that lies in this environment."""
    match = re.match(r"(\S+): cannot open shared object file", error)
    if match is None:
        return False
    return any((folder / match.group(1)).exists() for folder in library_folders())
