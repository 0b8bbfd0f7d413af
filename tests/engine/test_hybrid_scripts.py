"""Hybrids through the scripts: decode.py on files, bench_target.py on made-up weights."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.bench import made_up
from dflash_jax.checkpoints import load_target
from dflash_jax.checkpoints.drafter import save_drafter
from dflash_jax.engine import memory
from dflash_jax.engine.loading import ModelConfig, load_models
from dflash_jax.errors import InputError
from dflash_jax.models.dflash2 import init_params
from dflash_jax.models.qwen3_5 import FULL, LINEAR
from tests import tiny_llama, tiny_qwen3_5
from tests.checkpoints.test_qwen3_5 import write_gguf
from tests.decode import tiny
from tests.engine.test_decode_script import check_replies, check_trace, decode, json_lines

ROOT = pathlib.Path(__file__).parents[2]
DRAFTER = dataclasses.replace(
    tiny.DRAFTER,
    vocab_size=tiny_qwen3_5.CONFIG.vocab_size,
    num_target_layers=tiny_qwen3_5.CONFIG.num_layers,
    target_layer_ids=(1, 3),
    mask_token_id=299,
    block_size=8,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    """target/ (a hybrid in the official layout, with a tokenizer), drafter/, other/, prompts."""
    pytest.importorskip("transformers", reason="it writes the checkpoint")
    folder = tmp_path_factory.mktemp("hybrid")
    tiny_llama.write_directory(tiny_qwen3_5.hf_model(), folder / "target")
    save_drafter(folder / "drafter", DRAFTER, init_params(DRAFTER, jax.random.key(0)))
    other = dataclasses.replace(DRAFTER, num_target_layers=5)
    save_drafter(folder / "other", other, init_params(other, jax.random.key(0)))
    lines = ['{"prompt": "hello world"}', '{"messages": [{"role": "user", "content": "hello"}]}']
    lines.append(f'{{"tokens": {list(range(40, 80))}}}')
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "cache").mkdir(mode=0o700)
    return folder


def test_load_target_reads_a_hybrid(files):
    loaded = load_target(files / "target")
    assert loaded.config == dataclasses.replace(tiny_qwen3_5.CONFIG)
    assert loaded.config.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
    assert loaded.tokenizer.vocab_size == 264
    assert loaded.stop_token_ids
    config, params = tiny_qwen3_5.convert(tiny_qwen3_5.hf_model())
    assert config == loaded.config
    assert jax.tree.structure(params) == jax.tree.structure(loaded.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "weights"), [("target", "float32"), ("target", "bfloat16"), ("gguf", "float32")]
)
def test_replies_and_traces(files, target, weights):
    if target == "gguf":
        write_gguf(files / "gguf", tokenizer=True)
    replies = {}
    for name, flags in {"auto": ("--width=auto", "--cap=3"), "plain": ("--width=0",)}.items():
        out, trace = files / f"{name}.jsonl", files / f"{name}_rounds.jsonl"
        done = decode(
            files,
            *flags,
            f"--config.target={files}/{target}",
            f"--config.weights={weights}",
            f"--prompt_file={files}/prompts.jsonl",
            "--max_tokens=12",
            "--temperature=1.0",
            "--seed=4",
            f"--json_out={out}",
            f"--trace_out={trace}",
        )
        assert done.returncode == 0, done.stderr
        replies[name] = json_lines(out)
        check_replies(replies[name])
        check_trace(replies[name], json_lines(trace))
    assert [r["token_sha256"] for r in replies["auto"]] == [
        r["token_sha256"] for r in replies["plain"]
    ]


# What does not fit is refused before tensors are read -------------------------------------


def config(files, **values) -> ModelConfig:
    wanted = {"target": f"{files}/target", "drafter": f"{files}/drafter", "context_limit": 100}
    return ModelConfig(**(wanted | values))


@pytest.fixture
def without_tensors(monkeypatch):
    def read(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("dflash_jax.checkpoints.safetensors_files.SafetensorsSource.read", read)


def test_a_drafter_for_another_target_is_refused(files, without_tensors):
    with pytest.raises(InputError, match="number of target layers is 5, but the target's is 4"):
        load_models(config(files, drafter=f"{files}/other"))


def test_weights_that_do_not_fit_are_refused(files, without_tensors, monkeypatch):
    target, drafter = tiny_qwen3_5.CONFIG, DRAFTER
    held = memory.weight_bytes(target, drafter, "int8") + memory.state_bytes(
        target, drafter, "int8", 100
    )
    for free, message in (
        (1.06 * held, r"need .* are free: --config\.weights=int8 \(0\.\d GB\) would fit"),
        (1000, "is the least"),
    ):
        monkeypatch.setattr(memory, "free_bytes", lambda free=free: int(free))
        with pytest.raises(InputError, match=message):
            load_models(config(files, weights="float32"))


def test_a_shorter_context_is_offered():
    target = dataclasses.replace(tiny_qwen3_5.CONFIG, max_position_embeddings=2**20)
    held = memory.weight_bytes(target, None, "int8") + memory.state_bytes(
        target, None, "int8", 2**18
    )
    with pytest.raises(InputError, match=r"--config\.context_limit=131072 \(.* would fit"):
        memory.require_fit(target, None, "int8", 2**18, held)
    memory.require_fit(target, None, "int8", 2**18, int(1.06 * held))
    memory.require_fit(target, None, "float32", 2**18, None)  # not known: not refused


def test_the_prompt_cache_is_counted():
    target = tiny_qwen3_5.CONFIG
    held = memory.weight_bytes(target, None, "int8") + memory.state_bytes(target, None, "int8", 100)
    free = int(1.06 * held) + 8 * 2**20
    memory.require_fit(target, None, "int8", 100, free, prompt_cache_mib=8)
    with pytest.raises(InputError, match=r"and 30 MiB for prompts need .*--prompt_cache_mib=8 "):
        memory.require_fit(target, None, "int8", 100, free, prompt_cache_mib=30)


def test_a_config_without_a_target_is_refused():
    with pytest.raises(InputError, match=r"give --config\.target="):
        ModelConfig(target="")


# bench_target.py --------------------------------------------------------------------------

TINY = {
    "context_limit": 512,
    "weights": "float32",
    "sizes.target.vocab_size": 320,
    "sizes.target.hidden_size": 64,
    "sizes.target.intermediate_size": 96,
    "sizes.target.num_layers": 4,
    "sizes.target.num_heads": 4,
    "sizes.target.num_kv_heads": 2,
    "sizes.target.head_dim": 32,
    "sizes.target.linear_num_key_heads": 2,
    "sizes.target.linear_num_value_heads": 6,
    "sizes.target.linear_key_head_dim": 16,
    "sizes.target.linear_value_head_dim": 16,
    "sizes.drafter.intermediate_size": 96,
    "sizes.drafter.num_layers": 1,
    "sizes.drafter.num_heads": 4,
    "sizes.drafter.num_kv_heads": 2,
    "sizes.drafter.head_dim": 16,
    "sizes.drafter.target_layer_ids": "(0,3)",
    "sizes.drafter.mask_token_id": 319,
    "sizes.drafter.selector_rank": 8,
    "sizes.drafter.selector_top_k": 4,
}


def bench(cache: pathlib.Path, *flags: str, sizes: dict | None = None):
    values = [f"--config.{name}={value}" for name, value in (sizes or {}).items()]
    command = [sys.executable, "scripts/bench_target.py", "--platform=cpu", *values, *flags]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_made_up_weights_have_no_common_direction():
    """A mean of 1/128 in bfloat16 once made a model of 5,120 columns always pick one token."""
    shape = (64, 5120)
    drawn = made_up._uniform(jax.random.key(0), shape, "bfloat16", 0.0, 1.0)
    assert drawn.dtype == jnp.bfloat16
    means = np.asarray(drawn, np.float64).mean(axis=1)
    error = 3**-0.5 / 5120**0.5  # of a row's mean
    assert abs(means.mean()) < 4 * error / 64**0.5
    assert len(np.unique(np.asarray(drawn, np.float32))) > 300  # all that bfloat16 can say


@pytest.mark.slow
def test_bench_target_on_a_tiny_run(tmp_path):
    flags = ["--contexts=5,40", "--widths=0,3", "--rounds=6", "--copy_mb=8"]
    done = bench(tmp_path, *flags, f"--record={tmp_path}/record", sizes=TINY)
    assert done.returncode == 0, done.stderr
    rows = [row for row in json_lines(tmp_path / "record.jsonl") if "width" in row]
    assert [(row["context"], row["width"]) for row in rows] == [(5, 0), (5, 3), (40, 0), (40, 3)]
    for row in rows:
        assert row["rounds"] == 6
        assert row["equal tokens"] >= 7
        assert row["distinct"] >= 4
        assert row["round ms"] > 0 < row["verify ms"]
        assert (row["draft ms"] > 0) == (row["width"] > 0)
        assert row["tokens a round"] > 1 or row["width"] == 0
    for context in (5, 40):
        assert len({row["token_sha256"] for row in rows if row["context"] == context}) == 1
    table = (tmp_path / "record.md").read_text()
    assert "| context | width |" in table
    assert "gave different tokens: 0" in table


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory_gb=45"], "--config.weights=int8 ("),
        (["--memory_gb=24"], "is the least"),
        (["--memory_gb=0"], "--memory_gb=0"),
        (["--memory_gb=nan"], "--memory_gb=nan"),
        (["--temperature=nan"], "--temperature=nan"),
        (["--landing=nan"], "--landing=nan"),
        (["--contexts="], "--contexts"),
        (["--contexts=40000"], "--contexts=40000"),
        (["--widths=16"], "--widths=16"),
        (["--config.sizes.target.num_heads=7"], "multiple"),
        (["--config.sizes.target.full_attention_interval=0"], "full_attention_interval must be"),
        (["--config.sizes.target.full_attention_interval=-4"], "full_attention_interval must be"),
        (["--config.sizes.target.full_attention_interval=65"], "full_attention_interval must be"),
        (["--config.sizes.target.num_layers=1000000000"], "num_layers must be from 1 to"),
        (["--config.sizes.drafter.num_layers=1000000000"], "layer_types must be 1000000000 times"),
        (["--config.sizes.drafter.num_layers=-1"], "num_layers is -1"),
        (["--config.sizes.drafter.block_size=100000000"], "block_size 100000000 exceeds"),
        (["--config.sizes.drafter.selector_top_k=100000"], "selector_top_k 100000 gives"),
        (["--config.sizes.target={}"], "config.sizes.target: 'num_layers' is missing"),
        (['--config.sizes={"target": 3, "drafter": 3}'], "config.sizes.target: "),
        (["--config.sizes={}"], "no `sizes` of `target` and `drafter`"),
        (["--config.weights=float7"], "weights='float7' are none of"),
        (["--config.context_limit=-5"], "context_limit=-5"),
        (["--config.context_limit=300000"], "this target takes 17 to 262144"),
        (["--rounds=10000"], "--rounds=10000: they may come to 160032 tokens"),
        (["--copy_mb=1000000", "--memory_gb=100"], "--copy_mb=1000000: twice that must fit 100.0"),
        (["--record=TMP/nope/record", "--memory_gb=100"], "/nope/record.jsonl: No such file"),
        ([f"--config={ROOT}/configs/smollm2.py"], "no `sizes`"),
    ],
)
def test_bench_target_refuses_before_it_builds(tmp_path, flags, message):
    done = bench(tmp_path, *(flag.replace("TMP", str(tmp_path)) for flag in flags))
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
