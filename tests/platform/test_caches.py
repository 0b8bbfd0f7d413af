"""The cache directory: private, writable, or refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from dflash_jax import caches
from dflash_jax.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A private directory that the test may spoil."""
    tmp_path.chmod(0o700)
    return tmp_path / "cache"


def test_makes_a_directory_that_only_the_user_can_open(folder: Path) -> None:
    assert caches.prepare(folder) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []  # the probe is gone


@pytest.mark.parametrize("mode", [0o777, 0o722, 0o720, 0o1777])
def test_refuses_a_directory_that_others_can_write(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(InputError, match=f"writable by others; run: chmod 700 {folder}$"):
        caches.prepare(folder)


def test_refuses_a_foreign_directory(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with pytest.raises(InputError, match="belongs to another user") as error:
        caches.prepare(folder, uid=os.geteuid() + 1)
    assert "\n" not in str(error.value)


def test_refuses_a_directory_below_one_that_everybody_can_write(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(InputError, match=r"lies in .*/cache, which everybody can write"):
        caches.prepare(folder / "inner")
    folder.chmod(0o1777)  # sticky, as /tmp is: nobody can replace what is another's
    assert caches.prepare(folder / "inner").is_dir()


def test_follows_a_link_and_judges_what_it_leads_to(folder: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    real.chmod(0o777)
    folder.symlink_to(real)
    with pytest.raises(InputError, match="writable by others"):
        caches.prepare(folder)


def test_a_file_in_its_place_or_a_full_disk_means_no_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("not a directory")
    with pytest.raises(caches.CacheUnavailable, match="File exists"):
        caches.prepare(folder)
    folder.unlink()
    monkeypatch.setattr(caches, "MIN_FREE_BYTES", 2**80)
    with pytest.raises(caches.CacheUnavailable, match="MiB free"):
        caches.prepare(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes read-only directories")
def test_a_read_only_directory_means_no_cache(folder: Path) -> None:
    folder.mkdir(mode=0o500)
    with pytest.raises(caches.CacheUnavailable, match="Permission denied"):
        caches.prepare(folder)


def test_a_read_only_mount_means_no_cache() -> None:
    with pytest.raises(caches.CacheUnavailable):
        caches.prepare(Path("/proc/dflash_jax"))


def test_cpu_id_depends_on_instruction_sets(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    ids = set()
    for flags in ("sse avx2", "sse avx2 avx512f"):
        cpuinfo.write_text(f"model name\t: X\ncpu MHz\t: 2{len(ids)}\nflags\t: {flags}\n\n")
        ids.add(caches.host_cpu_id(cpuinfo))
        cpuinfo.write_text(f"model name\t: X\ncpu MHz\t: 9\nflags\t: {flags}\n\nmodel name: Y\n")
        ids.add(caches.host_cpu_id(cpuinfo))
    assert len(ids) == 2
    assert caches.host_cpu_id(tmp_path / "none")  # another system than Linux


def test_size(folder: Path) -> None:
    assert caches.size_bytes(folder) == 0
    caches.prepare(folder)
    (folder / "a").write_bytes(b"12345")
    assert caches.size_bytes(folder) == 5


def test_lock_keeps_other_processes_out(folder: Path) -> None:
    caches.prepare(folder)
    code = (
        "import sys, pathlib; from dflash_jax import caches\n"
        "with caches.exclusive(pathlib.Path(sys.argv[1])): print('in')"
    )
    with caches.exclusive(folder):
        other = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
        )
        time.sleep(1.0)
        assert other.poll() is None
    assert other.communicate(timeout=60)[0] == "in\n"
    with caches.exclusive(None):
        pass


def test_a_damaged_entry_is_removed_and_other_warnings_pass(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    caches.prepare(folder)
    for name in ("jit_f-12ab-cache", "jit_f_2-12ab-cache"):
        (folder / name).touch()
    others: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: others.append(str(message)))
    caches.mend_on_warning(folder)
    entry = "persistent compilation cache entry for"
    for message in (
        f"Error reading {entry} 'jit_f': error: Error -3 while decompressing",
        f"Error writing {entry} 'jit_f': OSError: [Errno 28] No space left on device",
        f"Error writing {entry} 'jit_f_2': OSError: [Errno 28] No space left on device",
        "something else",
    ):
        warnings.showwarning(UserWarning(message), UserWarning, "compiler.py", 1)
    assert [path.name for path in folder.iterdir()] == ["jit_f_2-12ab-cache"]
    assert others == ["something else"]
    assert capsys.readouterr().err.splitlines() == [
        "warning: compiling jit_f anew: its cache entry was damaged",
        "warning: the compilation cache cannot be written: [Errno 28] No space left on device",
    ]
