"""Programs kept whole on disk: loaded without compiling, never trusted when damaged or stale."""

from __future__ import annotations

import io
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from jax.experimental.compilation_cache import compilation_cache

from dflash_jax.decode import saved_executables
from dflash_jax.decode.executables import compile_all
from dflash_jax.decode.programs import Program
from dflash_jax.decode.saved_executables import kept_here_alone, load_or_compile
from dflash_jax.program_progress import program_progress

INPUTS = (jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


class Maker:
    """Compiles, and counts how often."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return jax.jit(lambda x, n: {"y": x * n}).lower(*INPUTS).compile()


def run(executable) -> list[float]:
    return np.asarray(executable(jnp.arange(3.0), jnp.int32(2))["y"]).tolist()


def load(maker: Maker, description: str = "a", inputs=INPUTS) -> str:
    with kept_here_alone():
        executable, warning = load_or_compile(description, inputs, maker)
    assert run(executable) == [0.0, 2.0, 4.0]
    return warning


def test_a_second_start_compiles_nothing(folder):
    maker = Maker()
    assert load(maker) == ""
    assert load(maker) == ""
    assert maker.count == 1


def test_another_description_source_or_shape_is_another_program(folder, monkeypatch):
    maker = Maker()
    load(maker)
    load(maker, description="b")
    assert maker.count == 2
    other = (jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int16))
    assert saved_executables._path("a", INPUTS) != saved_executables._path("a", other)
    monkeypatch.setattr(saved_executables, "_source_digest", lambda: "changed")
    load(maker)
    assert maker.count == 3


def test_xla_flags_are_part_of_the_key(folder, monkeypatch):
    before = saved_executables._path("a", INPUTS)
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    assert saved_executables._path("a", INPUTS) != before


@pytest.mark.parametrize("damage", [b"", b"\x80no pickle", "cut"])
def test_a_damaged_file_is_compiled_anew_aloud_and_mended(folder, damage):
    maker = Maker()
    load(maker)
    (file,) = (folder / "executables").iterdir()
    file.write_bytes(file.read_bytes()[:-200] if damage == "cut" else damage)
    assert "damaged" in load(maker)
    assert maker.count == 2
    assert load(maker) == ""
    assert maker.count == 2


def test_a_full_disk_costs_the_copy_alone(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    warning = load(Maker())
    assert "No space left on device" in warning
    assert list((folder / "executables").iterdir()) == []


def test_the_longest_unused_are_deleted_beyond_a_size(folder, monkeypatch):
    for age, name in enumerate("abc"):
        load(Maker(), name)
        os.utime(saved_executables._path(name, INPUTS), (1e9 - age, 1e9 - age))
    load(Maker(), "c")  # used again: now the youngest
    size = saved_executables._path("a", INPUTS).stat().st_size
    monkeypatch.setattr(saved_executables, "_MOST_BYTES", int(3.5 * size))
    load(Maker(), "d")
    kept = [name for name in "abcd" if saved_executables._path(name, INPUTS).exists()]
    assert kept == ["a", "c", "d"]


def test_without_a_folder_nothing_is_kept(folder):
    jax.config.update("jax_compilation_cache_dir", None)
    maker = Maker()
    load(maker)
    load(maker)
    assert maker.count == 2
    assert not (folder / "executables").exists()


def test_jaxs_own_cache_keeps_no_second_copy(folder):
    load(Maker())
    assert [path.name for path in folder.iterdir() if path.name.endswith("-cache")] == []


def test_a_start_says_whether_it_compiles_or_loads(folder):
    def start(*names: str) -> list[str]:
        console = rich.console.Console(file=io.StringIO(), width=200)
        with program_progress(console) as progress:
            compile_all([Program(name, None, double, INPUTS[:1], ()) for name in names], progress)
        return console.file.getvalue().splitlines()

    def double(x):
        return 2 * x

    compiling = "compiling 1 of {} programs: seconds to minutes each"
    assert start("a") == [compiling.format(1), "1 of 1 programs ready"]
    assert start("a") == ["loading 1 compiled programs: seconds"]
    ready = ["1 of 2 programs ready", "2 of 2 programs ready"]
    assert start("a", "b") == [compiling.format(2), *ready]
