"""The pipeline through its scripts, for a second target: a tiny random Llama from a folder.

Every kind of bad input ends with one line, a status that is not 0, and the earlier work in place.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from dflash_jax.checkpoints.drafter import load_drafter
from dflash_jax.train import shards
from tests import tiny_llama

pytestmark = pytest.mark.slow

CONFIG = "--config=configs/train/tiny.py"
SHARDS = 2


def command(script: str, *flags: object) -> list[str]:
    return [sys.executable, f"scripts/{script}.py", CONFIG, *map(str, flags)]


def environment() -> dict[str, str]:
    root = str(pathlib.Path(__file__).parents[2])
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": root, "PYTHONUNBUFFERED": "1"}


def run(script: str, *flags: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(script, *flags), env=environment(), capture_output=True, text=True, check=False
    )


def succeed(script: str, *flags: object) -> str:
    result = run(script, *flags)
    assert result.returncode == 0, result.stderr
    return result.stdout


def fail(script: str, *flags: object) -> str:
    """The one line of a run that must fail."""
    result = run(script, *flags)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    # XLA may say something of its own; ours is one line.
    ours = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1, result.stderr
    assert result.stderr.strip().endswith(ours[0])
    return ours[0]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    """A folder with a random Llama, its tokenizer and its chat template."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_llama.hf_model("Llama", tie_word_embeddings=True)
    return f"--config.target={tiny_llama.write_directory(model, folder)}"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"slot": "n", "values": [str(n) for n in range(90)]}, {"prompt": "say {n}"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"--prompts={path}"


@pytest.fixture(scope="module")
def data(tmp_path_factory, target, prompts) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data")
    flags = [target, prompts, f"--config.data.shards={SHARDS}"]
    said = succeed("generate_data", *flags, f"--out={folder}")
    assert "tokens/s" in said
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, target, data) -> pathlib.Path:
    out = tmp_path_factory.mktemp("run")
    succeed("train_drafter", target, f"--data={data}", f"--out={out}", "--config.train.steps=40")
    return out


@pytest.fixture
def copy(tmp_path, data) -> pathlib.Path:
    """A copy of the data, to be damaged."""
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    return folder


def test_a_second_target_is_one_flag_away(tmp_path, target, trained):
    log = [json.loads(line) for line in (trained / "progress.jsonl").read_text().splitlines()]
    losses = [entry["train"]["loss"] for entry in log if entry["train"]]
    assert losses[-1] < losses[0]
    assert log[-1]["held_out"] is not None
    assert (trained / "progress.png").read_bytes().startswith(b"\x89PNG")
    drafter = load_drafter(trained / "drafter")
    assert (drafter.config.hidden_size, drafter.config.num_target_layers) == (64, 3)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"hello {n}"}) + "\n" for n in range(4)))
    flags = [target, f"--drafter={trained / 'drafter'}", f"--prompts={prompts}", "--length=96"]
    flags += ["--max_tokens=24", "--rows=4", "--anchors=8", "--seeds=1"]
    flags += [f"--replies={tmp_path / 'replies.npz'}"]
    succeed("eval_drafter", *flags, f"--out={tmp_path / 'first'}")
    found = json.loads((tmp_path / "first" / "eval.json").read_text())
    assert found["greedy"]["ways"]["tree"][0] == 1
    assert (trained / "drafter" / "calibration.json").exists()
    # The kept replies give the same figures; with other settings they are refused.
    succeed("eval_drafter", *flags, f"--out={tmp_path / 'second'}")
    assert json.loads((tmp_path / "second" / "eval.json").read_text()) == found
    line = fail("eval_drafter", *flags, f"--out={tmp_path / 'third'}", "--temperature=0.7")
    assert "replies of another target, prompt file or setting" in line


def test_finished_shards_are_kept_and_skipped(target, prompts, data):
    before = {path: path.stat().st_mtime_ns for path in data.iterdir()}
    flags = [target, f"--out={data}", f"--config.data.shards={SHARDS}"]
    assert "nothing to do" in succeed("generate_data", *flags, prompts)
    # What other settings would add could not be trained on together with these.
    for other, named in (([], "kinds"), ([prompts, "--config.data.rollout.length=32"], "length")):
        line = fail("generate_data", *flags, *other)
        assert f"shard-00000.npz: made with another {named}; choose another --out" in line
    assert {path: path.stat().st_mtime_ns for path in data.iterdir()} == before


@pytest.mark.parametrize("script", ["generate_data", "train_drafter", "eval_drafter"])
def test_without_the_extra_it_says_what_to_install(script):
    code = "import runpy, sys; sys.modules['optax'] = None; "
    code += f"runpy.run_path('scripts/{script}.py', run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stderr == "error: optax not installed: pip install -e '.[train]'\n"


def test_a_corrupt_shard(tmp_path, target, copy):
    path = shards.shard_path(copy, 1)
    path.write_bytes(path.read_bytes()[:-300])
    line = fail("train_drafter", target, f"--data={copy}", f"--out={tmp_path / 'out'}")
    assert f"{path}: corrupt" in line


def test_a_shard_of_another_tokenizer(tmp_path, target, copy):
    header, rows = shards.read_shard(shards.shard_path(copy, 1))
    shards.write_shard(copy, dataclasses.replace(header, tokenizer="another"), rows)
    line = fail("train_drafter", target, f"--data={copy}", f"--out={tmp_path / 'out'}")
    assert "shard-00001.npz: made with another tokenizer" in line


def test_a_checkpoint_of_another_shape(target, data, trained):
    before = sorted(path.name for path in (trained / "checkpoints").iterdir())
    flags = [target, f"--data={data}", f"--out={trained}", "--config.train.steps=50"]
    line = fail("train_drafter", *flags, "--config.drafter.intermediate_size=48")
    assert "made with another drafter (intermediate_size 64 there, 48 here)" in line
    assert sorted(path.name for path in (trained / "checkpoints").iterdir()) == before


def test_a_start_of_another_shape(tmp_path, target, data, trained):
    flags = [target, f"--data={data}", f"--out={tmp_path / 'out'}"]
    flags += [f"--config.train.start_from={trained / 'drafter'}"]
    line = fail("train_drafter", *flags, "--config.drafter.intermediate_size=48")
    assert "start_from" in line
    assert "mlp.down_proj.weight is (64, 64), the recipe's (64, 48)" in line


@pytest.mark.parametrize("script", ["generate_data", "train_drafter", "eval_drafter"])
def test_a_config_of_another_kind(tmp_path, data, script):
    flags = ["--config=configs/smollm2.py", f"--out={tmp_path / 'out'}"]
    flags += [f"--data={data}"] if script == "train_drafter" else []
    flags += [f"--drafter={tmp_path}"] if script == "eval_drafter" else []
    assert "--config: no recipe, as in configs/train: no" in fail(script, *flags)


@pytest.mark.parametrize("script", ["generate_data", "train_drafter"])
def test_more_devices_than_there_are(tmp_path, target, data, script):
    flags = [target, f"--out={tmp_path / 'out'}", "--devices=99"]
    flags += [f"--data={data}"] if script == "train_drafter" else []
    assert "--devices=99: JAX sees" in fail(script, *flags)
    assert "--devices=-1" in fail(script, *flags[:2], *flags[3:], "--devices=-1")


@pytest.mark.parametrize(
    ("script", "flag"),
    [
        ("generate_data", "--config.data.shards=0"),
        ("generate_data", "--time_limit_s=-1"),
        ("train_drafter", "--config.train.export_dtype=float7"),
        ("train_drafter", "--config.train.learning_rate=nan"),
        ("eval_drafter", "--rows=0"),
        ("eval_drafter", "--seeds=0"),
        ("eval_drafter", "--drafter="),
        ("generate_data", "--config.data.rollout.length=1000"),
    ],
)
def test_an_impossible_setting_is_refused_before_any_work(tmp_path, target, data, script, flag):
    flags = [target, f"--out={tmp_path / 'out'}"]
    flags += [f"--data={data}"] if script == "train_drafter" else []
    flags += [f"--drafter={tmp_path}"] if script == "eval_drafter" else []
    assert flag[2:].split("=")[0].split(".")[-1] in fail(script, *flags, flag)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", ["generate_data", "train_drafter"])
def test_an_out_that_is_a_file(tmp_path, target, data, script):
    out = tmp_path / "out"
    out.write_text("mine")
    flags = [f"--data={data}"] if script == "train_drafter" else ["--config.data.shards=1"]
    assert "out" in fail(script, target, f"--out={out}", *flags)
    assert out.read_text() == "mine"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_while_data_is_written(target, prompts, copy):
    before = shards.shard_path(copy, 0).read_bytes()
    (copy / "shard-00002.partial").symlink_to("/dev/full")
    line = fail("generate_data", target, prompts, f"--out={copy}", "--config.data.shards=3")
    assert "shard-00002.npz: the disk is full" in line
    assert shards.shard_path(copy, 0).read_bytes() == before
    assert sorted(path.name for path in copy.iterdir()) == ["shard-00000.npz", "shard-00001.npz"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_while_training(tmp_path, target, data, trained):
    out = tmp_path / "out"
    shutil.copytree(trained / "checkpoints", out / "checkpoints")
    (out / "progress.jsonl").symlink_to("/dev/full")
    flags = [target, f"--data={data}", f"--out={out}", "--config.train.steps=80"]
    assert "progress.jsonl: the disk is full" in fail("train_drafter", *flags)
    assert (out / "checkpoints" / "40").is_dir()


def test_sigterm_saves_and_the_same_command_goes_on(tmp_path, target, data):
    flags = [target, f"--data={data}", f"--out={tmp_path}", "--config.train.steps=1000000"]
    flags += ["--config.train.log_every=1"]
    with subprocess.Popen(
        command("train_drafter", *flags), env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3 "):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 0
    assert "drafter: " in rest
    (step,) = (int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert step >= 3
    limit = f"--config.train.steps={step + 2}"
    again = succeed("train_drafter", *flags[:-1], limit, "--config.train.log_every=1")
    assert f"from step {step}" in again
    assert f"step {step + 1} " in again
    assert np.isfinite(load_drafter(tmp_path / "drafter").params["norm"]["weight"]).all()
