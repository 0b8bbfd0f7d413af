"""Entry points, whatever is at the other end of their output."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dflash_jax.bench.records import Lines, Text
from dflash_jax.errors import InputError, one_line_errors

_PRINTS = "from dflash_jax import entry; entry.run(lambda argv: print(*(['\\u2028é'] * {count})))"
_CONFIG = """
from absl import flags
from dflash_jax import entry

config = entry.config_flag("configs/qwen3_8_27b.py", "Help.")
flags.DEFINE_float("share", 0.0, "Help.", lower_bound=0)
entry.run(lambda argv: print(config.value.sizes.drafter.target_layer_ids))
"""


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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("count", [1, 100_000])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_standard_output_on_a_full_disk(count, unbuffered):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", _PRINTS.format(count=count)]
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    said = "error: standard output or a file: No space left on device: free some space\n"
    assert (done.returncode, done.stderr) == (2, said)


def with_config(*argv: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", _CONFIG, *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


QWEN = "--config=configs/qwen3_8_27b.py"
NO_FIELD = "configs/qwen3_8_27b.py has no such field"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config.sizes.target.nope=1"], f"--config.sizes.target.nope: {NO_FIELD}"),
        (["--config.context_limit.x", "1"], f"--config.context_limit.x: {NO_FIELD}"),
        (["--config.=1"], f"--config.: {NO_FIELD}"),
        (["--config.target.x=1"], f"--config.target.x: {NO_FIELD}"),
        ([QWEN, "--config.weights=int8", "--config.nope.x=1"], f"--config.nope.x: {NO_FIELD}"),
        (["--config", "configs/smollm2.py", "--config.sizes.x=1"], "configs/smollm2.py has no"),
        (["--config.context_limit=1.5"], "--config.context_limit=1.5"),
        (["--config=README.md", "--config.x=1"], "SyntaxError in it"),
        (["--config=nope.py", "--config.x=1"], "nope.py"),
        (["--config.sizes.target.num_heads=3", "--config.sizes={}"], "--config.sizes is provided"),
        (["--config.sizes.target.rope_theta=nan"], "rope_theta=nan: give a finite number"),
        (["--share=nan"], "--share=nan: give a finite number"),
        (["--share=inf"], "--share=inf: give a finite number"),
        (["--share=-1"], "--share=-1"),
        (["--config.sizes.drafter.target_layer_ids=(0,3)"] * 2, "is given more than once"),
    ],
)
def test_a_bad_config_flag_is_one_line(argv, message):
    status, out, err = with_config(*argv)
    (line,) = err.splitlines()
    assert (status, out) == (2, "")
    assert line.startswith("error: ")
    assert message in line


def test_a_value_of_several_lines_is_one_line(capsys):
    with pytest.raises(SystemExit), one_line_errors():
        raise InputError("target a\nb: no such folder")
    assert capsys.readouterr().err == "error: target a b: no such folder\n"


def test_a_tuple_flag_replaces():
    flag = "--config.sizes.drafter.target_layer_ids"
    for argv in ([f"{flag}=(0,3)"], [flag, "(0,3)"], [QWEN, f"{flag}=0,3"]):
        assert with_config(*argv) == (0, "(0, 3)\n", "")


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


def test_a_text_that_cannot_be_written_is_known_at_once(tmp_path):
    (tmp_path / "record.md").mkdir()
    with pytest.raises(InputError, match=r"--record=.*/record.md: Is a directory"):
        Text(str(tmp_path / "record"), "record", ".md")
    with pytest.raises(InputError, match=r"--record=.*/nope/record.md: No such file"):
        Text(str(tmp_path / "nope/record"), "record", ".md")
    link = tmp_path / "link.md"
    link.symlink_to(tmp_path / "later.md")
    Text(str(link), "record")
    assert link.is_symlink()
    old = tmp_path / "old.md"
    old.write_text("an earlier run\n")
    Text(str(old), "record")
    text = Text(str(tmp_path / "new"), "record", ".md")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["old.md"]
    assert old.read_text() == "an earlier run\n"
    text.write("x\n")
    assert (tmp_path / "new.md").read_text() == "x\n"
    Text(None, "record").write("x\n")


@pytest.mark.parametrize(
    "script",
    ["bench_contexts", "bench_decode", "bench_serve", "compare_llama_cpp", "compare_weights"],
)
def test_a_record_that_is_a_folder_is_found_before_the_work(script, tmp_path):
    for ending in ("", ".md"):
        (tmp_path / f"record{ending}").mkdir()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, f"scripts/{script}.py", f"--record={tmp_path}/record"]
    models = [] if script.startswith("compare") else ["--config.target=nowhere"]
    done = subprocess.run(
        [*command, *models], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: --record={tmp_path}/record"), done.stderr
    assert "Is a directory" in done.stderr
