r"""The width rule against every fixed width, at contexts from short to long, on the real model.

    python scripts/bench_contexts.py --record=docs/receipts/contexts_cpu

At each context length the rules take turns in random order over the same prompts. `first` is a
rule that has seen nothing but the warm-up's timings; `later` keeps what its earlier replies at
this context have taught. The fixed widths are the widest of each compiled row count, and 0.
"""

from __future__ import annotations

import json
import pathlib
import platform as host
import random
import sys
import time
from collections import Counter

import jax
import numpy as np
import rich.console
import rich.progress
from absl import flags

from dflash_jax import entry, platform
from dflash_jax.bench import contexts
from dflash_jax.bench.records import Lines, Text
from dflash_jax.decode.sampling import Sampling
from dflash_jax.engine import LoneDriver, Request, Stream, token_sha256
from dflash_jax.engine.loading import ModelConfig, load_models, prepare_models
from dflash_jax.errors import InputError

_CONFIG = entry.config_flag("configs/smollm2.py", "Models and context.")
_TEXTS = flags.DEFINE_string("texts", "configs/prompts/heldout.jsonl", "Lines with `prompt`.")
_CONTEXTS = flags.DEFINE_list(
    "contexts", ["34", "250", "1000", "2000", "4000", "7500"], "Prompt lengths."
)
_PROMPTS = flags.DEFINE_integer("prompts", 4, "Prompts of each length.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 2, "Times each reply is decoded.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "New tokens a reply.", lower_bound=2)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0)
_RULE = flags.DEFINE_string("rule", "renewal", "The rule under test.")
_RECORD = flags.DEFINE_string("record", None, "Writes RECORD.jsonl and RECORD.md.")
_PLATFORM = flags.DEFINE_enum("platform", "auto", platform.PLATFORMS, "Where to run.")

FIRST, LATER = "first", "later"


def run(found: platform.Platform) -> int:
    console = rich.console.Console(stderr=True)
    config = ModelConfig.from_config(_CONFIG.value)
    sizes = context_sizes(config.context_limit)
    lines, text = Lines(_RECORD.value, "record", ".jsonl"), Text(_RECORD.value, "record", ".md")
    models = load_models(config)
    texts = read_texts(_TEXTS.value)
    with found.warmup_lock():
        decoder = prepare_models(models, config.context_limit, say=console.print)
    widest = {decoder.spec.policy.rows(width): width for width in decoder.widths}
    fixed = [f"fixed:{width}" for width in sorted({0, *widest.values()})]

    def driver(rule: str) -> LoneDriver:
        return LoneDriver(decoder, rule=rule, landing=models.landing())

    table, unequal = [], 0
    progress = rich.progress.Progress(console=console, transient=True)
    with progress:
        task = progress.add_task("replies", total=len(sizes) * _PROMPTS.value * _REPEATS.value)
        for size in sizes:
            drivers = {rule: driver(rule) for rule in fixed} | {LATER: driver(_RULE.value)}
            warm_up = True  # the first reply of `later` is a first one: not counted
            seen: dict[str, list[tuple[float, float]]] = {}
            widths: dict[str, Counter[int]] = {}
            for number in range(_PROMPTS.value):
                prompt = contexts.prompt_of_length(models.target.tokenizer, texts, size, number)
                sampling = Sampling(_TEMPERATURE.value, 20, 0.95, seed=number)
                request = Request(tuple(prompt), sampling, _MAX_TOKENS.value)
                prefilled = contexts.prefill(drivers[LATER], request)
                if warm_up:
                    play(contexts.rewound(drivers[LATER], request, prefilled))
                    warm_up = False
                for repeat in range(_REPEATS.value):
                    turns = [*drivers, FIRST]
                    random.Random(f"{size} {number} {repeat}").shuffle(turns)
                    hashes = set()
                    for name in turns:
                        who = driver(_RULE.value) if name == FIRST else drivers[name]
                        stream, seconds, used = play(contexts.rewound(who, request, prefilled))
                        hashes.add(token_sha256(stream.tokens))
                        tokens = len(stream.tokens) - 1
                        seen.setdefault(name, []).append((tokens, seconds))
                        widths.setdefault(name, Counter()).update(used)
                        lines.write(
                            {
                                "context": size,
                                "prompt": number,
                                "repeat": repeat,
                                "rule": name,
                                "tokens": tokens,
                                "seconds": round(seconds, 4),
                                "rounds": sum(used.values()),
                                "widths": {str(w): used[w] for w in sorted(used)},
                                "token_sha256": stream.token_sha256,
                            }
                        )
                    unequal += len(hashes) > 1
                    progress.advance(task)
            table.append(row(size, seen, widths, fixed))
            console.print(" | ".join(table[-1]))
    lines.close()
    notes = [
        f"jax {jax.__version__} on {found.name}, Python {host.python_version()}, "
        f"{models.target.name}",
        f"{_PROMPTS.value} prompts a context, {_REPEATS.value} times, {_MAX_TOKENS.value} tokens, "
        f"temperature {_TEMPERATURE.value:g}; rules in random order within each prompt",
        f"replies whose tokens differ between rules: {unequal}",
    ]
    print("\n".join(notes))
    text.write(record_text(table, notes))
    return 1 if unequal else 0


def read_texts(path: str) -> list[str]:
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["prompt"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--texts={path}: give JSON lines with `prompt` ({error!r})") from error


def context_sizes(limit: int) -> list[int]:
    room = limit - _MAX_TOKENS.value
    for text in _CONTEXTS.value:
        if not text.isdecimal() or not contexts.TAIL < int(text) <= room:
            raise InputError(
                f"--contexts={text}: give numbers from {contexts.TAIL + 1} to {room} "
                f"(the config's context_limit {limit} less --max_tokens)"
            )
    return [int(text) for text in _CONTEXTS.value]


def play(stream: Stream) -> tuple[Stream, float, Counter[int]]:
    """The whole reply: (the stream, seconds after its first token, rounds by width)."""
    with stream:
        rounds = stream.rounds()
        next(rounds)
        begin = time.perf_counter()
        used = Counter(record.width for record in rounds)
        return stream, time.perf_counter() - begin, used


HEADINGS = [
    "context",
    "plain tok/s",
    "best fixed width",
    "its tok/s",
    "first ÷ best",
    "later ÷ best",
    "tokens a round",
    "widths chosen later",
]


def row(size, seen, widths, fixed) -> list[str]:
    rates = {name: sum(t for t, _ in rows) / sum(s for _, s in rows) for name, rows in seen.items()}
    best = max(fixed, key=rates.__getitem__)
    shares = []
    for name in (FIRST, LATER):
        ratio, low, high = contexts.interval(np.array(seen[name]), np.array(seen[best]))
        shares.append(f"{ratio:.3f} [{low:.3f}, {high:.3f}]")
    tokens = sum(t for t, _ in seen[LATER])
    return [
        str(size),
        f"{rates['fixed:0']:.1f}",
        best.removeprefix("fixed:"),
        f"{rates[best]:.1f}",
        *shares,
        f"{tokens / sum(widths[LATER].values()):.2f}",
        " ".join(f"{w}:{n}" for w, n in widths[LATER].most_common(5)),
    ]


def record_text(table: list[list[str]], notes: list[str]) -> str:
    lines = ["# The rule against every fixed width, by context", ""]
    lines += ["```", " ".join(["python", *sys.argv]), "```", ""]
    lines += [f"- {note}" for note in notes]
    lines += [
        "- ratios of rates (tokens ÷ seconds over all replies of a context), paired by reply, with "
        "95 % bootstrap intervals; `first` knows the warm-up's timings alone",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += ["| " + " | ".join(cells) + " |" for cells in table]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    del argv
    sys.exit(run(platform.initialize(_PLATFORM.value)))


if __name__ == "__main__":
    entry.run(main)
