"""Compares the target's logits with llama.cpp's, and writes a record.

  python scripts/compare_llama_cpp.py --record=docs/receipts/llama_cpp_parity.jsonl

Ten chat prompts are continued by llama.cpp at temperature 1 and then fed to both, every position.
Two comparisons: the file as it is, where llama.cpp rounds activations to 8 bits, and a float32
copy of it (540 MB, in a temporary directory), where it does not. The record has one line for each
comparison, and one for each position where the top tokens differ, with both margins.
Needs llama-cpp-python; about a minute on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import platform
import sys
import tempfile
from typing import Any

import jax
from absl import flags

from dflash_jax import entry
from dflash_jax.bench import llama_cpp_parity as parity
from dflash_jax.bench.records import Text
from dflash_jax.checkpoints import Target, embedded_path, load_target

_TARGET = flags.DEFINE_string("target", "embedded", "A .gguf file, or 'embedded'.")
_RECORD = flags.DEFINE_string("record", None, "JSON-lines file to write.")
_LENGTH = flags.DEFINE_integer("length", 160, "Tokens of each sequence.", 32, parity.ROWS)
_THREADS = flags.DEFINE_integer("threads", 2, "Threads of llama.cpp.", 1)

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in simple words why the sky is blue.",
    "Translate into German: The weather is nice today and we go for a walk.",
    "A farmer has 17 sheep and buys 8 more, then sells 5. How many are left? Show your steps.",
    "Give me a recipe for pancakes with exact quantities.",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "List three advantages and three drawbacks of electric cars.",
    "Write a short poem about the sea in autumn.",
    'Return a JSON object with the fields "name", "age" and "hobbies" for a made-up person.',
)


def main(argv: list[str]) -> None:
    del argv
    run()


def run() -> None:
    record = Text(_RECORD.value, "record")
    path = embedded_path() if _TARGET.value == "embedded" else pathlib.Path(_TARGET.value)
    target = load_target(path)
    peer = parity.open_peer(path, _THREADS.value)
    prompts = [
        target.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS
    ]
    sequences = parity.sampled_sequences(peer, prompts, _LENGTH.value)
    lines = describe("as stored", target, parity.compare(target, peer, sequences))
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "float32.gguf"
        parity.converted_copy(path, copy)
        peer = parity.open_peer(copy, _THREADS.value)
        lines += describe("dequantised", target, parity.compare(target, peer, sequences))
    for line in lines:
        print(json.dumps(line))
    record.write("".join(json.dumps(line) + "\n" for line in lines))


def describe(weights: str, target: Target, result: parity.Parity) -> list[dict[str, Any]]:
    """A summary line, then a line for each disagreement, most certain first."""
    import llama_cpp

    fields = dataclasses.asdict(result)
    disagreements = fields.pop("disagreements")
    summary = {
        "record": "llama_cpp_parity",
        "peer_weights": weights,
        "target": target.name,
        "fingerprint": target.fingerprint,
        "sequences": len(PROMPTS),
        **fields,
        "disagreements": len(disagreements),
        "largest_margin": max((min(_margins(d)) for d in disagreements), default=0.0),
        "jax": jax.__version__,
        "llama_cpp_python": llama_cpp.__version__,
        "machine": platform.machine(),
        "command": " ".join(["python", "scripts/compare_llama_cpp.py", *sys.argv[1:]]),
    }
    decode = target.tokenizer.decode
    rows = [
        {
            "peer_weights": weights,
            **row,
            "our_token": decode([row["ours"]], skip_special=False),
            "their_token": decode([row["theirs"]], skip_special=False),
        }
        for row in sorted(disagreements, key=lambda row: -min(_margins(row)))
    ]
    return [summary, *rows]


def _margins(row: dict[str, Any]) -> tuple[float, float]:
    return row["our_margin"], row["their_margin"]


if __name__ == "__main__":
    entry.run(main)
