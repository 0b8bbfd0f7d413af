"""scripts/bench_decode.py: its record, and going on with it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import tiny_llama

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    pytest.importorskip("transformers", reason="it writes the checkpoint")
    folder = tmp_path_factory.mktemp("bench")
    tiny_llama.write_directory(tiny_llama.hf_model("Llama", tie_word_embeddings=True), folder)
    (folder / "prompts.jsonl").write_text('{"prompt": "hello"}\n{"tokens": [1, 2, 3]}\n')
    return folder


def bench(folder: pathlib.Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/bench_decode.py", "--platform=cpu", "--rules=fixed:0"]
    command += [f"--config.target={folder}", "--config.drafter=", "--config.context_limit=128"]
    command += [f"--prompt_file={folder / 'prompts.jsonl'}", "--config.weights=float32"]
    command += ["--max_tokens=8", "--seeds=1", f"--record={folder / 'record'}", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_a_stopped_run_is_gone_on_with(folder):
    record = folder / "record.jsonl"
    first = bench(folder)
    assert first.returncode == 0, first.stderr
    whole = record.read_text().splitlines()
    assert len(whole) == 1 + 2 * 2  # settings; prompts and samplings
    record.write_text("\n".join(whole[:3]) + "\n")
    second = bench(folder, "--resume")
    assert second.returncode == 0, second.stderr
    mended = record.read_text().splitlines()
    assert mended[:3] == whole[:3]
    hashes = [[json.loads(line)["token_sha256"] for line in run[1:]] for run in (whole, mended)]
    assert hashes[0] == hashes[1]
    assert (folder / "record.md").exists()

    # Of other settings, or cut in the middle of a line: refused, and left alone.
    other = bench(folder, "--resume", "--max_tokens=9")
    assert other.returncode == 2
    assert "record.jsonl was made with" in other.stderr.splitlines()[-1]
    record.write_text(record.read_text()[:-20])
    cut = record.read_text()
    broken = bench(folder, "--resume")
    assert broken.returncode == 2
    assert "is no whole record" in broken.stderr.splitlines()[-1]
    assert "Traceback" not in broken.stderr
    assert record.read_text() == cut


def test_resume_needs_a_record(folder):
    result = bench(folder, "--resume", "--record=")
    assert result.returncode == 2
    assert result.stderr.startswith("error: --resume needs --record")


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--rules=nonsense", "unknown rule 'nonsense'"),
        ("--rules=", "--rules"),
        ("--rules=renewal", "names no drafter"),
        ("--count=-1", "count"),
        ("--max_tokens=0", "max_tokens"),
    ],
)
def test_bad_input_is_refused_before_compiling(folder, flag, named):
    result = bench(folder, flag)
    assert result.returncode == 2
    assert "programs" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert named in result.stderr
