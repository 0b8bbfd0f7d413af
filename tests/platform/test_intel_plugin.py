"""The Intel plugin loads from what the constraints install, and asks for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_jax import plugins
from tests.platform.test_platform import run


@pytest.fixture(scope="module")
def plugin() -> plugins.Plugin:
    """The plugin of this environment, with all its libraries."""
    found = plugins.find("xpu")
    if found is None:
        pytest.skip("no Intel plugin in this environment (scripts/test.sh puts it into .venv-xpu)")
    missing = plugins.missing_libraries(found)
    if plugins.LEVEL_ZERO in missing:
        pytest.skip("the system package libze1 is not installed and could not be")
    assert missing == {}, plugins.missing_message(found, missing)
    if any(Path("/dev/dri").glob("renderD*")):
        pytest.skip("this machine has a GPU")
    return found


def test_loads_and_finds_no_gpu(plugin: plugins.Plugin, tmp_path: Path) -> None:
    # LD_LIBRARY_PATH is unset here: the process finds the libraries by itself.
    result = run("'xpu'", tmp_path)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(
        f"error: No visible GPU devices ({plugin}); this machine shows no /dev/dri/renderD*"
    )
    assert "Traceback" not in result.stderr


def test_auto_says_so_and_takes_the_cpu(plugin: plugins.Plugin, tmp_path: Path) -> None:
    result = run("'auto', use_cache=False", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("cpu cpu 1 None False None")
    assert "platform auto: not using xpu: No visible GPU devices" in result.stderr
    assert result.stderr.splitlines()[-1] == "platform auto: falling back to the CPU"


def test_without_a_restart_the_loader_s_path_is_the_remedy(
    plugin: plugins.Plugin, tmp_path: Path
) -> None:
    result = run("'xpu', restart=False", tmp_path)
    if "No visible GPU devices" in result.stderr:
        pytest.skip("this plugin finds its libraries without a loader path")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "start Python with LD_LIBRARY_PATH=" in line
