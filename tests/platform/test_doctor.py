"""The doctor's report and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_jax import doctor as doctor_module
from dflash_jax import platform, plugins
from dflash_jax.decode.selfcheck import SelfCheck
from dflash_jax.engine import smoke
from dflash_jax.errors import InputError
from tests import tiny_llama


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the doctor in a process of its own."""
    clean = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "LD_LIBRARY_PATH")}
    return subprocess.run(
        [sys.executable, "-m", "dflash_jax.doctor", *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def cache(tmp_path: Path) -> str:
    """A private cache directory."""
    tmp_path.chmod(0o700)
    return f"--cache_dir={tmp_path}"


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A private cache directory that keeps what one test has compiled for the next."""
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o700)
    return f"--cache_dir={folder}"


def test_json_on_the_cpu(shared_cache: str) -> None:
    result = doctor("--platform=cpu", "--json", shared_cache)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["works"] is True
    names = [finding["name"] for finding in report["findings"]]
    for name in (
        "dflash_jax",
        "packages",
        "platform",
        "device 0",
        "cache",
        "self-check",
        "smoke run",
    ):
        assert name in names
    assert {finding["state"] for finding in report["findings"]} <= {"ok", "warning"}
    details = {finding["name"]: finding["detail"] for finding in report["findings"]}
    assert "tiny random model: widths [0, 1, 7, 15] give the same bits" in details["self-check"]
    assert details["smoke run"].endswith("equal to plain decoding's")


def test_lines_are_printed_once_and_the_verdict_last(shared_cache: str) -> None:
    result = doctor(shared_cache)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum("packages" in line for line in lines) == 1
    assert lines[-1] == "decoding works here"


@pytest.mark.skipif(plugins.find("cuda") is not None, reason="a CUDA plugin is installed")
def test_a_platform_that_is_not_there_fails(cache: str) -> None:
    result = doctor("--platform=cuda", cache)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert "FAILED  plugin cuda   not installed" in lines
    assert any(line.startswith("FAILED  platform      no plugin for platform") for line in lines)
    assert lines[-1] == "decoding does not work here"


def test_bad_input_gets_one_line(cache: str, tmp_path: Path) -> None:
    result = doctor("extra", cache)
    assert result.returncode == 2
    assert result.stderr == "error: unexpected argument 'extra': flags start with --\n"
    tmp_path.chmod(0o777)
    result = doctor("--platform=cpu", cache)
    assert result.returncode == 1
    assert "FAILED  platform      cache directory" in result.stdout
    tmp_path.chmod(0o700)


PLATFORM = platform.Platform("cpu", "cpu", (), "0", "0", None, None, False, ())


def checks(
    monkeypatch: pytest.MonkeyPatch,
    prepared: Any = None,
    differences: tuple[str, ...] = (),
    said: tuple[str, ...] = (),
) -> list[tuple[str, str, str]]:
    """The findings about decoding when preparing and running go as given."""

    def prepare(config: Any, say: Any) -> tuple[str, Any]:
        for line in said:
            say(line)
        if prepared is not None:
            raise prepared
        spec = SimpleNamespace(policy=SimpleNamespace(row_counts=(16,)))
        return "a model", SimpleNamespace(spec=spec, check=SelfCheck((0, 15), ()))

    monkeypatch.setattr(doctor_module, "_prepared", prepare)
    monkeypatch.setattr(smoke, "smoke_run", lambda decoder: smoke.SmokeRun(9, 3, 4, differences))
    found = doctor_module.decode_checks(PLATFORM, None)
    return [(finding.name, finding.state, finding.detail) for finding in found]


def test_a_backend_that_cannot_decode_exactly_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks(monkeypatch, InputError("not exact here"), said=("trying another",))
    assert found == [("self-check", "FAILED", "trying another; not exact here")]


def test_a_compiler_that_breaks_fails_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks(monkeypatch, RuntimeError("INTERNAL: no such kernel\n  at frame 1"))
    assert found == [("self-check", "FAILED", "INTERNAL: no such kernel")]


def test_a_fallback_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (check, run) = checks(monkeypatch, said=("table not exact; trying 16 rows",))
    assert check[:2] == ("self-check", "warning")
    assert check[2].startswith("table not exact; trying 16 rows; a model: widths [0, 15]")
    assert run == ("smoke run", "ok", "3 drafted rounds, 4 tokens, equal to plain decoding's")


def test_drafted_tokens_that_differ_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, run) = checks(monkeypatch, differences=("width 15, greedy: [1] is not [2]",))
    assert run == ("smoke run", "FAILED", "width 15, greedy: [1] is not [2]")


def test_a_config_that_cannot_be_loaded_fails(cache: str, tmp_path: Path) -> None:
    config = "--config=configs/smollm2.py"
    result = doctor("--platform=cpu", config, f"--config.target={tmp_path}/none.gguf", cache)
    assert result.returncode == 1
    assert "FAILED  self-check    " in result.stdout
    assert "none.gguf" in result.stdout


def test_a_config_without_a_drafter(cache: str, tmp_path: Path) -> None:
    target = tiny_llama.write_directory(tiny_llama.hf_model(), tmp_path / "target")
    models = ("--config=configs/smollm2.py", f"--config.target={target}", "--config.drafter=")
    result = doctor("--platform=cpu", *models, "--config.context_limit=128", cache)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok      self-check    target: widths [0] give the same bits" in result.stdout
    assert "ok      smoke run     no drafter; 16 tokens, decoded plainly" in result.stdout
