"""Entry points, whatever is at the other end of their output."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dflash_jax.bench.records import Lines
from dflash_jax.errors import InputError

_PRINTS = "from dflash_jax import entry; entry.run(lambda argv: print(*(['\\u2028é'] * {count})))"


def popen(count: int, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PRINTS.format(count=count)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


@pytest.mark.parametrize("count", [1, 100_000])  # less, and more, than a buffer
def test_a_reader_that_goes_early_is_no_error(count):
    with popen(count) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, "")


def test_a_terminal_without_the_character():
    with popen(1, PYTHONIOENCODING="ascii") as process:
        said, complaint = process.communicate()
    assert (process.returncode, said, complaint) == (0, "\\u2028\\xe9\n", "")


def test_lines_go_to_a_device_too():
    lines = Lines(os.devnull, "json_out")
    lines.write({"text": "hello"})
    lines.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_lines_on_a_full_disk():
    with pytest.raises(InputError, match="--json_out=/dev/full: No space left on device; earlier"):
        Lines("/dev/full", "json_out").write({"text": "hello"})


def test_lines_replace_a_file_at_the_first_line(tmp_path):
    path = tmp_path / "replies.jsonl"
    path.write_text("an earlier run\n")
    lines = Lines(str(path), "json_out")
    assert path.read_text() == "an earlier run\n"
    lines.write({"n": 1})
    lines.write({"n": 2})
    lines.close()
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1, 2]
