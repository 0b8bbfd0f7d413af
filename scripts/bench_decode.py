r"""Decodes the same prompts under several rules, side by side: equal hashes, and the rates.

    python scripts/bench_decode.py --rules=fixed:0,renewal --show_text
    python scripts/bench_decode.py --rules=all --seeds=1,2 --record=docs/receipts/decode_cpu

Rules take turns within each prompt, so that a machine whose speed drifts is fair to all. The exit
status is 1 when two rules gave different tokens. --resume goes on with the record of a run that was
stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import platform as host
import statistics
import sys
import time
from collections import Counter, defaultdict
from typing import Any

import jax
import rich.console
import rich.progress
import rich.table
from absl import flags

from dflash_jax import entry, platform
from dflash_jax.bench.records import Lines, Text, decode, reply_record
from dflash_jax.checkpoints import embedded_path
from dflash_jax.decode.executables import CompileCounter
from dflash_jax.decode.sampling import Sampling
from dflash_jax.engine import LoneDriver, Request
from dflash_jax.engine.loading import ModelConfig, Models, load_models, prepare_models
from dflash_jax.engine.prompts import read_prompt_file, require_fit
from dflash_jax.errors import InputError
from dflash_jax.pricing import make_rule
from dflash_jax.program_progress import program_progress
from dflash_jax.tree.growth import CAP

_CONFIG = entry.config_flag("configs/smollm2.py", "Models and context.")
_PROMPTS = flags.DEFINE_string("prompt_file", "configs/prompts/bench.jsonl", "JSON lines.")
_COUNT = flags.DEFINE_integer(
    "count", 0, "Prompts to use, from the first; 0 is all.", lower_bound=0
)
_RULES = flags.DEFINE_list("rules", ["fixed:0", "renewal"], "Rules, or `all` widths and renewal.")
_SEEDS = flags.DEFINE_list("seeds", [], "Also sampled at temperature 1.0, top-k 20, top-p 0.95.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Most new tokens a reply.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 1, "Times each reply is decoded.", lower_bound=1)
_RECORD = flags.DEFINE_string("record", None, "Writes RECORD.jsonl and RECORD.md.")
_RESUME = flags.DEFINE_bool("resume", False, "Keeps the replies that RECORD.jsonl has.")
_PEER = flags.DEFINE_bool("peer", False, "Also decodes with llama-cpp-python, greedy.")
_SHOW_TEXT = flags.DEFINE_bool("show_text", False, "Prints the replies.")
_PLATFORM = flags.DEFINE_enum("platform", "auto", platform.PLATFORMS, "Where to run.")

PLAIN = "fixed:0"

ReplyKey = tuple[int, str, str]  # prompt, sampling, rule


def rules() -> list[str]:
    names = _RULES.value
    if names == ["all"]:
        names = [f"fixed:{width}" for width in range(CAP + 1)] + ["renewal"]
    if not names:
        raise InputError("--rules names no rule")
    for name in names:
        make_rule(name)  # an unknown one is an error now, not after compiling
    return names


def samplings() -> dict[str, Sampling]:
    found = {"greedy": Sampling()}
    for seed in _SEEDS.value:
        if not seed.isdecimal():
            raise InputError(f"--seeds={','.join(_SEEDS.value)}: give whole numbers")
        found[f"seed {seed}"] = Sampling(1.0, 20, 0.95, seed=int(seed))
    return found


def settings(config: ModelConfig, prompts: list[list[int]]) -> dict[str, Any]:
    """What the replies of a record depend on; its first line."""
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    models = dataclasses.asdict(config)
    return {"jax": jax.__version__, "prompts": digest, "max_tokens": _MAX_TOKENS.value, **models}


def kept_replies(wanted: dict[str, Any]) -> dict[ReplyKey, list[dict[str, Any]]]:
    """The replies of an earlier run with the same settings; none without --resume or a record."""
    kept: dict[ReplyKey, list[dict[str, Any]]] = defaultdict(list)
    path = pathlib.Path(f"{_RECORD.value}.jsonl")
    if not _RESUME.value or not path.exists():
        return kept
    try:
        found, *replies = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        for reply in replies:
            kept[reply["prompt"], reply["sampling"], reply["rule"]].append(reply)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--resume: {path} is no whole record ({error}); mend or delete it"
        ) from error
    if found != wanted:
        raise InputError(f"--resume: {path} was made with {found}, not {wanted}; delete it")
    return kept


class Bench:
    """Decodes each (prompt, sampling) under every rule, and adds up."""

    def __init__(
        self,
        models: Models,
        drivers: dict[str, LoneDriver],
        lines: Lines,
        kept: dict[ReplyKey, list[dict[str, Any]]],
    ) -> None:
        self._models, self._drivers, self._lines, self._kept = models, drivers, lines, kept
        self._compiles = CompileCounter()
        self.totals: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.widths: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.unequal: list[str] = []

    def run(self, number: int, prompt: list[int], name: str, sampling: Sampling) -> list[str]:
        """All rules over one prompt; the distinct texts (one, if all is well)."""
        texts: dict[str, str] = {}
        for rule, driver in self._drivers.items():
            if earlier := self._kept.get((number, name, rule)):
                reply = earlier.pop(0)
                texts[reply["token_sha256"]] = "(of an earlier run)"
                self._add(name, rule, reply)
                continue
            request = Request(
                tuple(prompt), sampling, _MAX_TOKENS.value, self._models.target.stop_token_ids
            )
            stream, rounds, seconds = decode(driver, request)
            reply = reply_record(
                stream,
                prompt,
                rounds,
                self._models.target.tokenizer,
                seconds,
                self._compiles.count,
            )
            texts[reply["token_sha256"]] = reply.pop("text")
            reply["tokens"] = len(reply["tokens"])
            self._lines.write({"prompt": number, "sampling": name, "rule": rule, **reply})
            self._add(name, rule, reply)
        if len(texts) > 1:
            self.unequal.append(f"prompt {number}, {name}")
        return list(texts.values())

    def _add(self, name: str, rule: str, reply: dict[str, Any]) -> None:
        total = self.totals[name, rule]
        total["tokens"].append(reply["tokens"] - 1)
        total["rounds"].append(reply["rounds"])
        total["seconds"].append(reply["decode_s"])
        if reply["rounds"]:
            total["round_ms"].append(reply["round_ms"])
            total["host_ms"].append(reply["host_ms"])
        self.widths[name, rule].update(reply["widths"])

    @property
    def compiles(self) -> int:
        return self._compiles.count


def peer_rate(prompts: list[list[int]]) -> float:
    """llama.cpp's plain greedy tokens per second on the embedded file, after the first token."""
    from dflash_jax.bench.llama_cpp_parity import open_peer

    longest = max(map(len, prompts)) + _MAX_TOKENS.value
    peer = open_peer(embedded_path(), threads=2, context=longest, all_logits=False)
    tokens, seconds = 0, 0.0
    for prompt in prompts:
        peer.reset()
        generated = peer.generate(prompt, temp=0.0)
        next(generated)
        begin = time.perf_counter()
        for count, _ in enumerate(generated, 1):
            if count >= _MAX_TOKENS.value - 1:
                break
        seconds += time.perf_counter() - begin
        tokens += count
    return tokens / seconds


def table_rows(bench: Bench, names: list[str], wanted: list[str]) -> list[list[str]]:
    rows = []
    for name in names:
        plain = bench.totals.get((name, PLAIN))
        plain_rate = sum(plain["tokens"]) / sum(plain["seconds"]) if plain else None
        for rule in wanted:
            total = bench.totals[name, rule]
            rate = sum(total["tokens"]) / sum(total["seconds"])
            widths = bench.widths[name, rule]
            common = " ".join(f"{width}:{count}" for width, count in widths.most_common(6))
            rows.append(
                [
                    name,
                    rule,
                    f"{rate:.1f}",
                    f"{rate / plain_rate:.2f}" if plain_rate else "",
                    f"{sum(total['tokens']) / max(sum(total['rounds']), 1):.2f}",
                    f"{statistics.median(total['round_ms']):.1f}" if total["round_ms"] else "",
                    f"{statistics.median(total['host_ms']):.2f}" if total["host_ms"] else "",
                    common if rule != PLAIN else "",
                ]
            )
    return rows


HEADINGS = ["draws", "rule", "tok/s", "× plain", "tokens a round", "round ms", "host ms", "widths"]


def record_text(rows: list[list[str]], notes: list[str]) -> str:
    lines = [
        "# Decoding under several rules",
        "",
        "```",
        " ".join(["python", *sys.argv]),
        "```",
        "",
    ]
    lines += [f"- {note}" for note in notes]
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def peak_memory_gb() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def run(found: platform.Platform) -> int:
    console = rich.console.Console(stderr=True)
    config = ModelConfig.from_config(_CONFIG.value)
    wanted, draws = rules(), samplings()
    if _RESUME.value and not _RECORD.value:
        raise InputError("--resume needs --record: the record to go on with")
    text = Text(_RECORD.value, "record", ".md")
    begin = time.perf_counter()
    models = load_models(config)
    if models.drafter is None and set(wanted) != {PLAIN}:
        raise InputError("the config names no drafter: give one, or --rules=fixed:0")
    prompts = read_prompt_file(_PROMPTS.value, models.target.tokenizer)
    prompts = prompts[: _COUNT.value or None]
    require_fit(prompts, config.context_limit, models.target.config.vocab_size)
    made_with = settings(config, prompts)
    kept = kept_replies(made_with)
    lines = Lines(_RECORD.value, "record", ".jsonl", keep=bool(kept))
    with found.warmup_lock(), program_progress(console) as progress:
        decoder = prepare_models(
            models,
            config.context_limit,
            say=console.print,
            progress=progress,
        )
    ready_s = time.perf_counter() - begin
    drivers = {rule: LoneDriver(decoder, rule=rule, landing=models.landing()) for rule in wanted}
    bench = Bench(models, drivers, lines, kept)
    if not kept:
        lines.write(made_with)
    total = len(prompts) * len(draws) * _REPEATS.value
    with rich.progress.Progress(console=console, transient=True) as bar:
        task = bar.add_task("decoding", total=total)
        for _ in range(_REPEATS.value):
            for number, prompt in enumerate(prompts):
                for name, sampling in draws.items():
                    texts = bench.run(number, prompt, name, sampling)
                    if _SHOW_TEXT.value:
                        print("\n".join(texts), end="\n\n", flush=True)
                    bar.advance(task)
    lines.close()
    rows = table_rows(bench, list(draws), wanted)
    notes = [
        f"jax {jax.__version__} on {found.name}, Python {host.python_version()}, "
        f"{models.target.name}; ready after {ready_s:.1f} s",
        f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, "
        f"up to {_MAX_TOKENS.value} new ones, {_REPEATS.value} times",
        f"compilations after warm-up: {bench.compiles}; peak resident memory "
        f"{peak_memory_gb():.2f} GB",
        "token_sha256 equal under every rule: "
        + ("yes, all" if not bench.unequal else "NO: " + "; ".join(bench.unequal)),
    ]
    if _PEER.value:
        notes.append(f"llama-cpp-python, plain, 2 threads: {peer_rate(prompts):.1f} tok/s")
    show = rich.table.Table(*HEADINGS)
    for row in rows:
        show.add_row(*row)
    rich.console.Console().print(show, *notes, sep="\n")
    text.write(record_text(rows, notes))
    return 1 if bench.unequal else 0


def main(argv: list[str]) -> None:
    del argv
    sys.exit(run(platform.initialize(_PLATFORM.value)))


if __name__ == "__main__":
    entry.run(main)
