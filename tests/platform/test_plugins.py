"""Each way in which a plugin fails has its own line with the remedy."""

from __future__ import annotations

import configparser
import dataclasses
import re
from pathlib import Path

import pytest

from dflash_jax import plugins

ROOT = Path(__file__).parents[2]
OPENXLA, ONEAPI = (kind for kind in plugins.KINDS if kind.platform == "xpu")
CUDA = next(kind for kind in plugins.KINDS if kind.platform == "cuda")


def plugin_of(kind: plugins.PluginKind, version: str = "0.7.0") -> plugins.Plugin:
    """A plugin whose shared object is never opened."""
    return plugins.Plugin(kind, version, Path("plugin.so"))


@pytest.mark.parametrize(
    ("kind", "version", "jax", "jaxlib", "problem"),
    [
        (OPENXLA, "0.7.0", "0.5.0", "0.5.0", None),
        (OPENXLA, "0.7.0", "0.10.2", "0.10.2", "needs jax 0.5.0 and jaxlib 0.5.0, found jax 0.10"),
        (OPENXLA, "0.7.0", "0.5.0", "0.5.1", "found jax 0.5.0 and jaxlib 0.5.1"),
        (OPENXLA, "0.5.0", "0.4.30", "0.4.30", "not a version that dflash_jax knows"),
        (ONEAPI, "0.11.2", "0.11.2", "0.11.2", None),
        (ONEAPI, "0.11.2", "0.12.0", "0.12.0", "third_party/oneapi/constraints.txt"),
        (CUDA, "0.11.2", "0.11.1", "0.11.2", "third_party/cuda/constraints.txt"),
    ],
)
def test_versions(
    kind: plugins.PluginKind, version: str, jax: str, jaxlib: str, problem: str | None
) -> None:
    found = plugins.version_problem(plugin_of(kind, version), jax, jaxlib)
    assert (found is None) == (problem is None)
    if problem:
        assert problem in str(found)
        assert "run: pip install" in str(found)
        assert "\n" not in str(found)


def test_missing_libraries_are_named_with_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for soname in OPENXLA.libraries:
        (tmp_path / soname).touch()
    monkeypatch.setattr(plugins, "library_folders", lambda: (tmp_path,))
    plugin = plugin_of(OPENXLA)
    assert plugins.missing_libraries(plugin) == {}
    monkeypatch.setattr(plugins, "load_error", lambda name: f"{name}: cannot open")
    for soname in (plugins.LEVEL_ZERO, "libccl.so.1"):
        (tmp_path / soname).unlink()
    missing = plugins.missing_libraries(plugin)
    assert missing == {
        plugins.LEVEL_ZERO: "Debian package libze1",
        "libccl.so.1": "pip package oneccl",
    }
    assert plugins.missing_message(plugin, missing) == (
        "intel-extension-for-openxla 0.7.0 cannot load: missing libze_loader.so.1, libccl.so.1; "
        "run: apt-get install libze1 and pip install -e '.[xpu]' -c "
        "third_party/xpu/constraints.txt (for oneccl)"
    )
    del missing["libccl.so.1"]
    assert plugins.missing_message(plugin, missing).endswith("; run: apt-get install libze1")


def test_missing_driver() -> None:
    message = plugins.missing_message(plugin_of(CUDA), CUDA.libraries)
    assert message.endswith("missing libcuda.so.1; install the NVIDIA driver")


def test_load_errors_of_the_loader(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no shared object")
    assert "broken.so" in str(plugins.load_error(broken))
    assert "cannot open shared object file" in str(plugins.load_error("libnone.so.1"))
    assert plugins.load_error("libc.so.6") is None


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("/x/a.so: undefined symbol: zeDeviceGetRootDevice", "libze1) is too old"),
        ("/x/a.so: undefined symbol: _ZN4sycl3_V17handler", "packages are of other versions; run"),
        ("/x/a.so: invalid ELF header", "run: pip install -e '.[xpu]'"),
    ],
)
def test_load_messages(error: str, remedy: str) -> None:
    assert remedy in plugins.load_message(plugin_of(OPENXLA), error)


def test_loader_path_helps_only_for_libraries_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "library_folders", lambda: (tmp_path,))
    (tmp_path / "libccl.so.1").touch()
    suffix = ": cannot open shared object file: No such file or directory"
    assert plugins.needs_loader_path("libccl.so.1" + suffix)
    assert not plugins.needs_loader_path("libother.so" + suffix)
    assert not plugins.needs_loader_path("libccl.so.1: undefined symbol: x")


def test_find_reads_package_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    kind = dataclasses.replace(OPENXLA, distribution="fake-plugin", module="fake_jax_plugin.it")
    monkeypatch.setattr(plugins, "KINDS", (kind,))
    assert plugins.find("xpu") is None
    info = tmp_path / "fake_plugin-0.7.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-plugin\nVersion: 0.7.0\n")
    found = plugins.find("xpu")
    assert found is not None
    assert (str(found), found.library) == ("fake-plugin 0.7.0", None)
    folder = tmp_path / "fake_jax_plugin" / "it"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    (folder / kind.library).touch()
    found = plugins.find("xpu")
    assert found is not None
    assert found.library == folder / kind.library
    assert plugins.find("cuda") is None


@pytest.mark.parametrize("environment", ["cpu", "xpu", "oneapi", "cuda"])
def test_constraints_pin_all_that_an_extra_names(environment: str) -> None:
    text = (ROOT / "third_party" / environment / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in lines)
    pinned = {line.split("==")[0].lower(): line.split("==")[1] for line in lines}
    assert len(pinned) == len(lines)
    assert pinned["jax"] == pinned["jaxlib"]
    if environment == "cpu":
        return
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    for requirement in setup["options.extras_require"][environment].split("\n"):
        match = re.fullmatch(r"([\w.-]+)(\[[\w-]+\])? *(==|<)([\w.]+)(\.\*)?", requirement)
        if requirement:
            assert match, requirement
            pin = pinned[match[1].lower()]
            assert pin.startswith(match[4]) or match[3] == "<"


def test_the_xpu_extra_names_every_package_with_a_library_of_the_plugin() -> None:
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    extra = setup["options.extras_require"]["xpu"]
    constraints = (ROOT / "third_party/xpu/constraints.txt").read_text()
    for package in OPENXLA.libraries.values():
        name = package.removeprefix("pip package ")
        if package.startswith("pip"):
            assert re.search(rf"^{name}==", constraints, re.M)
            # dpcpp-cpp-rt brings the compilers' run-time libraries
            assert name.startswith("intel-") or re.search(rf"^{name} ", extra, re.M)
