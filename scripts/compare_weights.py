"""What each way of holding the weights costs in accuracy, beside llama.cpp's own; and its speed.

    python scripts/compare_weights.py --record=docs/receipts/weights

Chats are continued by llama.cpp at temperature 1, and every position of them is fed to each model.
The reference is the checkpoint dequantised to float32 (llama.cpp's float32 copy of it has the same
logits to 1e-4, scripts/compare_llama_cpp.py). Then int8 and float32 decode the same prompts in
turn, plainly and at width 7. Needs llama-cpp-python; twenty minutes on two cores.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import rich.console
from absl import flags

from dflash_jax import entry, platform
from dflash_jax.bench import llama_cpp_parity as parity
from dflash_jax.bench.records import Lines, Text, decode
from dflash_jax.checkpoints import Target, embedded_path, load_target
from dflash_jax.engine import LoneDriver, Request
from dflash_jax.engine.loading import INT8, ModelConfig, load_models, prepare_models
from dflash_jax.errors import InputError

_TARGET = flags.DEFINE_string("target", "embedded", "A .gguf file, or 'embedded'.")
_TEXTS = flags.DEFINE_string("texts", "configs/prompts/heldout.jsonl", "Lines with `prompt`.")
_COUNT = flags.DEFINE_integer("count", 20, "Chats.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", parity.ROWS, "Tokens of each.", 32, parity.ROWS)
_THREADS = flags.DEFINE_integer("threads", 2, "Threads of llama.cpp.", 1)
_RATE_PROMPTS = flags.DEFINE_integer("rate_prompts", 8, "Prompts decoded; 0: no speed.", 0)
_RECORD = flags.DEFINE_string("record", None, "Writes RECORD.jsonl and RECORD.md.")

_RATE_WIDTHS = (0, 7)
_RATE_CONTEXT = 64
_RATE_TOKENS = 128

Logits = Callable[[Sequence[int]], np.ndarray]


def main(argv: list[str]) -> None:
    del argv
    platform.initialize("cpu")
    path = embedded_path() if _TARGET.value == "embedded" else pathlib.Path(_TARGET.value)
    lines, text = Lines(_RECORD.value, "record", ".jsonl"), Text(_RECORD.value, "record", ".md")
    reference_target = load_target(path)
    reference = parity.OurLogits(reference_target)
    sequences = chats(reference_target, path)
    table = []
    for name, logits in models(path):
        result = parity.compare_logits(logits, reference, sequences)
        summary = {
            "weights": name,
            "positions": result.positions,
            "mean_kl": result.mean_kl,
            "agreement": result.agreement,
            "mean_abs_difference": result.mean_abs_difference,
        }
        lines.write(summary)
        row = [name, f"{result.mean_kl:.5f}", f"{100 * result.agreement:.1f} %"]
        rich.console.Console(stderr=True).print(" | ".join(row))
        table.append(row)
    ratios = []
    for width, found in speed_ratios(sequences).items():
        lines.write({"int8_over_float32": found, "width": width})
        low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        ratios.append([str(width), f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
        rich.console.Console(stderr=True).print(" | ".join(ratios[-1]))
    lines.close()
    text.write(record_text(table, ratios, sum(map(len, sequences)), reference_target.name))


def chats(target: Target, path: pathlib.Path) -> list[list[int]]:
    try:
        texts = pathlib.Path(_TEXTS.value).read_text(encoding="utf-8").splitlines()
        wanted = [json.loads(line)["prompt"] for line in texts]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--texts={_TEXTS.value}: give JSON lines with `prompt`") from error
    every = max(1, len(wanted) // _COUNT.value)
    encode = target.tokenizer.encode_chat
    prompts = [encode([{"role": "user", "content": text}]) for text in wanted[::every]]
    peer = parity.open_peer(path, _THREADS.value)
    return parity.sampled_sequences(peer, prompts[: _COUNT.value], _LENGTH.value)


def models(path: pathlib.Path) -> Iterator[tuple[str, Logits]]:
    """One at a time: each is as large as the model."""

    def peer_of(file: pathlib.Path) -> Logits:
        peer = parity.open_peer(file, _THREADS.value)
        return lambda tokens: parity.peer_logits(peer, tokens)

    for weights in ("int8", "bfloat16"):
        yield f"ours, {weights}", parity.OurLogits(load_target(path, weights))
    yield "llama.cpp, as stored", peer_of(path)
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "q8_0.gguf"
        parity.converted_copy(path, copy, "MOSTLY_Q8_0")
        yield "llama.cpp, converted to Q8_0", peer_of(copy)


def speed_ratios(sequences: list[list[int]]) -> dict[int, list[float]]:
    """int8's tokens a second over float32's, by width: one ratio for each prompt."""
    if not _RATE_PROMPTS.value:
        return {}
    prompts = [tuple(tokens[:_RATE_CONTEXT]) for tokens in sequences[: _RATE_PROMPTS.value]]
    drivers: dict[tuple[str, int], LoneDriver] = {}
    for weights in (INT8, "float32"):
        models = load_models(ModelConfig(target=_TARGET.value, weights=weights))
        decoder = prepare_models(
            models, 2 * _RATE_CONTEXT + _RATE_TOKENS, widths=_RATE_WIDTHS, time_widths=False
        )
        for width in _RATE_WIDTHS:
            drivers[weights, width] = LoneDriver(decoder, rule=f"fixed:{width}")
    ratios: dict[int, list[float]] = {width: [] for width in _RATE_WIDTHS}
    for prompt in prompts:
        request = Request(prompt, max_tokens=_RATE_TOKENS)
        for width, found in ratios.items():
            rates = {}
            for weights in (INT8, "float32"):
                stream, _, seconds = decode(drivers[weights, width], request)
                rates[weights] = (len(stream.tokens) - 1) / seconds
            found.append(rates[INT8] / rates["float32"])
    return ratios


def record_text(table: list[list[str]], ratios: list[list[str]], positions: int, name: str) -> str:
    lines = ["# What the weights cost in accuracy", ""]
    lines += ["```", " ".join(["python", *sys.argv]), "```", ""]
    lines += [
        f"{name}, {positions} positions, jax {jax.__version__}. KL (nats) of each from the "
        "checkpoint dequantised to float32, and how often the top token is the same.",
        "",
        "| | mean KL | top-1 |",
        "|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in table),
    ]
    if ratios:
        lines += [
            "",
            f"int8's tokens a second over float32's, {_RATE_TOKENS} tokens after each of "
            f"{_RATE_PROMPTS.value} prompts of {_RATE_CONTEXT}, in turn: the median and the middle "
            "half.",
            "",
            "| width | ratio | |",
            "|---|---|---|",
            *("| " + " | ".join(row) + " |" for row in ratios),
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    entry.run(main)
