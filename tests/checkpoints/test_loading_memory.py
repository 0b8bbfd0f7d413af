"""Loading streams: a sharded checkpoint takes little more host memory than what stays."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="it writes the checkpoint")
import torch

from tests import tiny_llama

ROOT = pathlib.Path(__file__).parents[2]
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
LOAD = """
import ctypes, gc, json, pathlib, sys
from dflash_jax import platform
platform.initialize("cpu")
import jax
from dflash_jax.checkpoints import load_target

def mib(field):
    (line,) = [x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if field in x]
    return int(line.split()[1]) / 1024

target = load_target(sys.argv[1], sys.argv[2])
jax.block_until_ready(target.params)
peak = mib("VmHWM")
gc.collect()
ctypes.CDLL("libc.so.6").malloc_trim(0)
held = sum(x.nbytes for x in jax.tree.leaves(target.params)) / 2**20
print(json.dumps({"peak": peak, "stays": mib("VmRSS"), "held": held}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_gigabytes_in_shards_peak_at_little_above_what_stays(tmp_path):
    with torch.device("cpu"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = tiny_llama.hf_model(**SIZES)
        finally:
            torch.set_default_dtype(torch.float32)
    folder = tiny_llama.write_directory(model.to(torch.bfloat16), tmp_path / "big", "250MB")
    del model
    shards = sorted(path.stat().st_size / 2**20 for path in folder.glob("*.safetensors"))
    assert sum(shards) > 1900
    assert len(shards) >= 8
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOAD, str(folder), "bfloat16"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found, "largest shard", shards[-1])
    assert found["held"] > 1900
    assert found["peak"] - found["stays"] < 1.3 * shards[-1]
