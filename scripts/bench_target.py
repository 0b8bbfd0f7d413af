r"""A target and drafter of real sizes, with made-up weights: equal hashes, round times, memory.

    python scripts/bench_target.py --config=configs/qwen3_8_27b.py --record=docs/receipts/target
    python scripts/bench_target.py --config.sizes.target.num_layers=8 --widths=0,15

Draws the weights of the config's `sizes` on the device, checks beforehand that they fit, and
decodes the same rounds at every width behind each context. Every finding is written as it is made.
The exit status is 1 when two widths gave different tokens.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import numpy as np
from absl import flags

from dflash_jax import entry, platform
from dflash_jax.bench import at_size, contexts, made_up
from dflash_jax.bench.records import Lines, Text
from dflash_jax.decode.sampling import Sampling
from dflash_jax.engine import LoneDriver, Request, prepare, token_sha256
from dflash_jax.engine import memory as device_memory
from dflash_jax.engine.loading import SIZES, ModelConfig
from dflash_jax.errors import InputError
from dflash_jax.tree.growth import CAP

_CONFIG = entry.config_flag("configs/qwen3_8_27b.py", "Sizes, context.")
_CONTEXTS = flags.DEFINE_list("contexts", ["34", "28946"], "Prompt lengths.")
_WIDTHS = flags.DEFINE_list("widths", ["0", "7", "15"], "Nodes verified a round; 0 comes first.")
_ROUNDS = flags.DEFINE_integer("rounds", 64, "At each context and width.", lower_bound=2)
_LANDING = flags.DEFINE_float("landing", 0.6, "Share of drafted positions that are right.", 0, 1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0)
_MEMORY_GB = flags.DEFINE_float("memory_gb", None, "The device's free memory, if not its own word.")
_COPY_MB = flags.DEFINE_integer("copy_mb", 1024, "Size of the copy that is timed.", lower_bound=1)
_RECORD = flags.DEFINE_string("record", None, "Writes RECORD.jsonl and RECORD.md.")
_PLATFORM = flags.DEFINE_enum("platform", "auto", platform.PLATFORMS, "Where to run.")

MIB = 2**20
# Times the rounds of a width: so far the reply is known to the drafter. At most MAX_ROWS.
PLAIN_ROUNDS = 4


def numbers(flag: flags.FlagHolder, least: int, most: int) -> list[int]:
    if not flag.value:
        raise InputError(f"--{flag.name}: give at least one number")
    for text in flag.value:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise InputError(f"--{flag.name}={text}: give numbers from {least} to {most}")
    return [int(text) for text in flag.value]


class Findings:
    """What was found, on disk as it is found."""

    def __init__(self, record: str | None) -> None:
        self._lines = Lines(record, "record", ".jsonl")
        self._table = Text(record, "record", ".md")
        self._notes: list[str] = []
        self._rows: list[list[str]] = []

    def note(self, text: str, **record: Any) -> None:
        print(text, flush=True)
        self._notes.append(text)
        self._lines.write(record)
        self._write()

    def row(self, record: dict[str, Any]) -> None:
        cells = [f"{x:.3g}" if isinstance(x, float) else str(x) for x in record.values()]
        print(" | ".join(f"{name} {cell}" for name, cell in zip(record, cells, strict=True)))
        sys.stdout.flush()
        if not self._rows:
            self._rows = [list(record), ["---"] * len(record)]
        self._rows.append(cells)
        self._lines.write(record)
        self._write()

    def _write(self) -> None:
        lines = ["# A target of real sizes, with made-up weights", ""]
        lines += ["```", " ".join(["python", *sys.argv]), "```", ""]
        lines += [f"- {note}" for note in self._notes]
        lines += ["", *("| " + " | ".join(row) + " |" for row in self._rows)]
        self._table.write("\n".join(lines) + "\n")


def memory_use() -> dict[str, float]:
    """GB in use on the device, now and at most; nothing on the CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    names = {"bytes_in_use": "in_use_gb", "peak_bytes_in_use": "peak_gb"}
    return {ours: round(stats[name] / 1e9, 2) for name, ours in names.items() if name in stats}


def run(found: platform.Platform) -> int:
    config = _CONFIG.value
    if SIZES not in config or not {"target", "drafter"} <= set(config[SIZES]):
        raise InputError(
            f"--config: it has no `{SIZES}` of `target` and `drafter`, which say what to make up"
        )
    memory_gb = _MEMORY_GB.value
    if memory_gb is not None and memory_gb <= 0:
        raise InputError(f"--memory_gb={memory_gb}: give the device's free gigabytes")
    model = ModelConfig.from_config({**config, "target": "made up"})
    weights, limit = model.weights_here(), model.context_limit
    int8 = weights == "int8"
    target = made_up.target_config(config.sizes.target, "float32" if int8 else weights)
    drafting = made_up.drafter_config(config.sizes.drafter, target)
    device_memory.require_context(target, limit)
    widths = sorted({0, *numbers(_WIDTHS, 0, CAP)})
    most = limit - at_size.room(0, _ROUNDS.value)
    if most < 1:
        raise InputError(
            f"--rounds={_ROUNDS.value}: they may come to {at_size.room(0, _ROUNDS.value)} tokens, "
            f"but --config.context_limit is {limit}: ask for fewer, or raise it"
        )
    sizes = numbers(_CONTEXTS, 1, most)
    free = device_memory.free_bytes() if memory_gb is None else int(memory_gb * 1e9)
    if free is not None and 2 * _COPY_MB.value * MIB > free:
        raise InputError(f"--copy_mb={_COPY_MB.value}: twice that must fit {free / 1e9:.1f} GB")
    device_memory.require_fit(target, drafting, weights, limit, free)
    findings = Findings(_RECORD.value)

    device = jax.devices()[0].device_kind
    bandwidth = at_size.copy_bandwidth(_COPY_MB.value * MIB)  # before the device is full
    begin = time.perf_counter()
    params = made_up.target_params(target, int8)
    drafter = made_up.drafter(drafting, int8)
    jax.block_until_ready((params, drafter.params))
    read = bytes_read(params, target.tie_word_embeddings)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((params, drafter.params)))
    findings.note(
        f"jax {jax.__version__} on {found.name} ({device}); {target.num_layers} layers, hidden "
        f"{target.hidden_size}, weights {weights}: {held / 1e9:.1f} GB, drawn in "
        f"{time.perf_counter() - begin:.0f} s; a forward of the target reads {read / 1e9:.1f} GB",
        **{"jax": jax.__version__, "device": device, "weights": weights},
        **{"layers": target.num_layers, "weights_gb": held / 1e9, "target_reads_gb": read / 1e9},
        **memory_use(),
    )
    read_ms = read / bandwidth * 1e3
    findings.note(
        f"a copy reaches {bandwidth / 1e9:.0f} GB/s, read and written: reading the target once "
        f"would take {read_ms:.2f} ms",
        copy_gb_s=bandwidth / 1e9,
        read_ms=read_ms,
    )
    begin = time.perf_counter()
    said: list[str] = []
    with found.warmup_lock():
        decoder = prepare(
            target,
            params,
            drafter,
            vocab_size=target.vocab_size,
            context_limit=limit,
            widths=widths,
            time_widths=False,
            say=said.append,
        )
    del params, drafter
    seconds = time.perf_counter() - begin
    rows = list(decoder.spec.policy.row_counts)
    findings.note(
        "; ".join([f"compiled and self-checked in {seconds:.0f} s, windows of {rows} rows", *said]),
        prepare_s=seconds,
        rows=rows,
        said=said,
        **memory_use(),
    )
    unequal = sum(at_context(decoder, size, widths, read_ms, findings) for size in sizes)
    findings.note(f"contexts whose widths gave different tokens: {unequal}", unequal=unequal)
    return 1 if unequal else 0


def bytes_read(params: Any, tied: bool) -> int:
    """Of the parameters, those that a forward reads whole: not the rows of an untied embedding."""
    read = dict(params)
    if not tied:
        read.pop("embed_tokens")
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))


def at_context(decoder, size: int, widths: list[int], read_ms: float, findings: Findings) -> bool:
    """All widths behind one prompt; whether their tokens differ."""
    rng = np.random.default_rng(size)
    prompt = tuple(rng.integers(0, decoder.spec.vocab_size, size).tolist())
    sampling = Sampling(_TEMPERATURE.value, 20, 0.95, seed=1)
    count = _ROUNDS.value
    request = Request(prompt, sampling, decoder.spec.context_limit)
    drivers = {width: LoneDriver(decoder, rule=f"fixed:{width}") for width in widths}
    prefilled = contexts.prefill(drivers[max(widths)], request)
    known: list[int] = []
    different = False
    for width, driver in drivers.items():
        landing = _LANDING.value
        stream = at_size.KnowingStream(
            driver, request, driver.new_rule(), prefilled, known, landing
        )
        done = at_size.rounds(stream, count if width else PLAIN_ROUNDS * count)
        known = known or done.tokens
        compared = min(len(known), len(done.tokens))
        equal = done.tokens[:compared] == known[:compared]
        different |= not equal
        timed = at_size.Rounds(done.tokens, done.records[:count])
        part = at_size.parts(decoder, prefilled, width, sampling)
        round_ms, host_ms = timed.median("round_ms"), timed.median("host_ms")
        draft_ms = part.draft_ms if width else 0.0
        emitted = sum(len(record.tokens) for record in timed.records)
        findings.row(
            {
                "context": size,
                "width": width,
                "rounds": len(timed.records),
                "tokens a round": round(emitted / len(timed.records), 3),
                "round ms": round(round_ms, 3),
                "verify ms": round(part.verify_ms, 3),
                "draft ms": round(draft_ms or 0.0, 3),
                "host ms": round(host_ms, 3),
                "verify ÷ read": round(part.verify_ms / read_ms, 3),
                "round ÷ read": round(round_ms / read_ms, 3),
                "prompt s": round(prefilled.first.round_ms / 1e3, 3),
                "equal tokens": compared if equal else "DIFFERENT",
                "distinct": len(set(known[:compared])),  # of them; few would prove little
                "token_sha256": token_sha256(done.tokens[: count + 1])[:16],  # as many as plain
                **memory_use(),
            }
        )
    return different


def main(argv: list[str]) -> None:
    del argv
    sys.exit(run(platform.initialize(_PLATFORM.value)))


if __name__ == "__main__":
    entry.run(main)
