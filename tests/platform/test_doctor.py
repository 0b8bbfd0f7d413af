"""The doctor's report and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax import plugins


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


def test_json_on_the_cpu(cache: str) -> None:
    result = doctor("--platform=cpu", "--json", cache)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["works"] is True
    names = [finding["name"] for finding in report["findings"]]
    for name in ("dflash_jax", "packages", "platform", "device 0", "cache", "self-check"):
        assert name in names
    assert {finding["state"] for finding in report["findings"]} <= {"ok", "warning"}


def test_lines_are_printed_once_and_the_verdict_last(cache: str) -> None:
    result = doctor(cache)
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
    assert result.stderr == "error: unexpected argument 'extra'; see --help\n"
    tmp_path.chmod(0o777)
    result = doctor("--platform=cpu", cache)
    assert result.returncode == 1
    assert "FAILED  platform      cache directory" in result.stdout
    tmp_path.chmod(0o700)
