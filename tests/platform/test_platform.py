"""`initialize`: the chosen backend, its caches, and one line for each failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax import platform, plugins
from dflash_jax.errors import InputError

REPORT = """
from dflash_jax import errors, platform
with errors.one_line_errors():
    p = platform.initialize({arguments})
    print(p.name, p.backend, len(p.devices), p.plugin, p.deterministic, p.cache_dir)
    import jax, jax.numpy as jnp
    print(jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.zeros((8, 8))))
"""


def run(
    arguments: str, tmp_path: Path, before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `initialize(arguments)` and one jitted function in a process of its own."""
    clean = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "LD_LIBRARY_PATH")}
    tmp_path.chmod(0o700)
    return subprocess.run(
        [sys.executable, "-c", before + REPORT.format(arguments=arguments)],
        env=clean | {"XDG_CACHE_HOME": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_cpu_keeps_compiled_programs_under_a_key_of_versions(tmp_path: Path) -> None:
    first = run("'cpu'", tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""  # even with an Intel plugin in the environment
    line, value = first.stdout.splitlines()
    assert line.startswith("cpu cpu 1 None False ")
    assert value == "0.0"
    (folder,) = (tmp_path / "dflash_jax").iterdir()
    assert str(folder) in line
    assert f"cpu-jax-{plugins.installed_version('jax')}-jaxlib" in folder.name
    assert folder.stat().st_mode & 0o777 == 0o700
    entries = sorted(folder.glob("*-cache"))
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:100])  # a process was killed while writing
    second = run("'cpu'", tmp_path)
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert len(second.stderr.splitlines()) == len(entries)
    assert all("its cache entry was damaged" in text for text in second.stderr.splitlines())
    third = run("'cpu'", tmp_path)
    assert (third.returncode, third.stderr) == (0, "")


def test_an_unwritable_cache_is_one_warning(tmp_path: Path) -> None:
    result = run("'cpu', cache_dir='/proc/dflash_jax'", tmp_path)
    assert result.returncode == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: no compilation cache, every start compiles anew: /proc")
    assert result.stdout.splitlines()[0].endswith("None")


def test_a_shared_cache_directory_is_refused_in_one_line(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    result = run(f"'cpu', cache_dir={str(shared)!r}", tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: cache directory")
    assert "chmod 700" in line


def test_the_user_s_jax_platforms_decides_auto(tmp_path: Path) -> None:
    result = run("'auto', use_cache=False", tmp_path, JAX_PLATFORMS="cpu")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("cpu cpu 1 None False None")
    result = run("'auto'", tmp_path, JAX_PLATFORMS="neuron")
    assert result.returncode == 2
    assert result.stderr == "error: JAX_PLATFORMS=neuron is no platform of dflash_jax; unset it\n"


def test_after_jax_has_started_only_the_same_platform_is_taken(tmp_path: Path) -> None:
    before = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()\n"
    result = run("'cpu'", tmp_path, before)
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "dflash_jax").glob("*/*-cache"))


@pytest.mark.skipif(plugins.find("cuda") is not None, reason="a CUDA plugin is installed")
def test_cuda_without_its_plugin() -> None:
    with pytest.raises(InputError, match=r"no plugin for platform cuda .* pip install -e"):
        platform.initialize("cuda")


def test_unknown_platform() -> None:
    with pytest.raises(InputError, match="unknown platform 'gpu'; choose one of auto, cpu"):
        platform.initialize("gpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> plugins.Plugin:
    """A plugin of the right version whose shared object is a text file."""
    library = tmp_path / "pjrt_plugin_xpu.so"
    library.write_text("no shared object")
    kind = next(kind for kind in plugins.KINDS if kind.backend == "oneapi")
    plugin = plugins.Plugin(kind, str(plugins.installed_version("jax")), library)
    monkeypatch.setattr(plugins, "find", lambda name: plugin if name == "xpu" else None)
    monkeypatch.setattr(plugins, "missing_libraries", lambda plugin: {})
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return plugin


def test_a_plugin_that_does_not_open(fake: plugins.Plugin) -> None:
    with pytest.raises(InputError, match=r"cannot load: .*; run: pip install -e") as error:
        platform.initialize("xpu")
    assert "\n" not in str(error.value)


def test_a_plugin_without_its_shared_object(
    fake: plugins.Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = plugins.Plugin(fake.kind, fake.version, None)
    monkeypatch.setattr(plugins, "find", lambda name: bare)
    with pytest.raises(InputError, match=r"installed without its xla_oneapi_plugin.so; run: pip"):
        platform.initialize("xpu")


def test_auto_says_aloud_that_it_passes_over_a_broken_plugin(
    fake: plugins.Plugin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "_configure_jax", lambda *_: None)
    monkeypatch.setattr(platform.compat, "backends_are_initialized", lambda: False)
    found = platform.initialize("auto", use_cache=False)
    lines = capsys.readouterr().err.splitlines()
    assert found.name == "cpu"
    assert len(lines) == 2
    assert lines[0].startswith("platform auto: not using xpu: jax-oneapi-plugin")
    assert lines[1] == "platform auto: falling back to the CPU"
    assert found.notes == tuple(lines)


@pytest.mark.parametrize("flags", [None, "--xla_a=1"])
def test_auto_takes_the_gpu_s_flags_back(
    fake: plugins.Plugin, monkeypatch: pytest.MonkeyPatch, flags: str | None
) -> None:
    def start(name: str, plugin: plugins.Plugin | None) -> tuple[str, ...]:
        if plugin is None:
            return ("cpu:0",)
        assert "xla_gpu_deterministic_ops=true" in os.environ["XLA_FLAGS"]
        raise platform._UnusableError("No visible GPU devices")

    monkeypatch.setattr(platform, "_usable_plugin", lambda *_: fake)
    monkeypatch.setattr(platform, "_configure_jax", lambda *_: None)
    monkeypatch.setattr(platform, "_start_devices", start)
    monkeypatch.setattr(platform.compat, "backends_are_initialized", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", flags or "")  # so that it is undone
    if flags is None:
        del os.environ["XLA_FLAGS"]
    assert platform.initialize("auto", use_cache=False).name == "cpu"
    assert os.environ.get("XLA_FLAGS") == flags


def test_restarts_once_with_the_loader_s_path(
    fake: plugins.Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def execv(path: str, arguments: list[str]) -> None:
        started.append(arguments)
        raise InterruptedError  # the real one does not return

    missing = "libccl.so.1: cannot open shared object file: No such file or directory"
    monkeypatch.setattr(plugins, "load_error", lambda library: missing)
    monkeypatch.setattr(plugins, "needs_loader_path", lambda error: True)
    monkeypatch.setattr(plugins, "library_folders", lambda: (Path("/env/lib"),))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "some.module", "--flag"])
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")  # so that the setting is undone
    monkeypatch.setenv("DFLASH_JAX_LOADER_PATH_SET", "")  # likewise
    del os.environ["DFLASH_JAX_LOADER_PATH_SET"]
    with pytest.raises(InterruptedError):
        platform.initialize("xpu")
    assert started == [[sys.executable, "-m", "some.module", "--flag"]]
    assert os.environ["LD_LIBRARY_PATH"] == "/env/lib:/mine"
    # The process that was started finds the mark, and does not start itself again.
    with pytest.raises(InputError, match=r"start Python with LD_LIBRARY_PATH=/env/lib$"):
        platform.initialize("xpu")
    assert len(started) == 1
    del os.environ["DFLASH_JAX_LOADER_PATH_SET"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-"])  # the program came through stdin
    with pytest.raises(InputError, match="start Python with LD_LIBRARY_PATH"):
        platform.initialize("xpu")


def test_flags_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    platform._add_xla_flag("xla_gpu_deterministic_ops", "true")
    platform._add_xla_flag("xla_gpu_deterministic_ops", "true")
    assert os.environ["XLA_FLAGS"] == "--xla_a=1 --xla_gpu_deterministic_ops=true"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    platform._add_xla_flag("xla_gpu_deterministic_ops", "true")
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_deterministic_ops=false"
