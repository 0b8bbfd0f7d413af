r"""Serves mixed traffic for a while: nothing lost or leaked, every reply as when sent alone.

    python scripts/soak.py --minutes=20 --record=docs/receipts/soak
    python scripts/soak.py --minutes=1 --serve="--config=configs/smollm2.py --config.target=FOLDER"

It starts a server of its own, notes every case's reply while nobody else asks, then lets clients
loose: whole and streamed requests, with and without drafting, clients that leave, bad bodies,
switched rules. The exit status is 1 when anything was wrong. Linux.
"""

from __future__ import annotations

import collections
import json
import logging
import pathlib
import random
import shlex
import statistics
import sys
import threading
import time
from typing import Any

import httpx
import rich.console
import rich.progress
from absl import flags

from dflash_jax import entry
from dflash_jax.bench import soak
from dflash_jax.bench.records import Text
from dflash_jax.bench.server_process import ServerProcess, Usage
from dflash_jax.errors import InputError

_MINUTES = flags.DEFINE_float("minutes", 20.0, "Of traffic.", lower_bound=0.1)
_CLIENTS = flags.DEFINE_integer("clients", 8, "At once.", lower_bound=1)
_CASES = flags.DEFINE_integer("cases", 40, "Different requests.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 40, "Most new tokens of a case.", lower_bound=1)
_PROMPTS = flags.DEFINE_string("prompt_file", "configs/prompts/bench.jsonl", "With `prompt`s.")
_PROMPT_CHARACTERS = flags.DEFINE_integer(
    "prompt_characters", 400, "Of a text; the rest is cut.", 1
)
_SERVE = flags.DEFINE_string(
    "serve", "--config=configs/smollm2.py --prompt_cache_mib=128", "The server's flags."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the cases.")
_RECORD = flags.DEFINE_string("record", None, "Writes RECORD.json and RECORD.md.")

_SETTLING = 0.25  # of the samples of memory, before caches and pools are full
_POOL_THREADS = 4  # that pools may start late
_GROWTH_SHARE, _GROWTH_MIB = 0.02, 16.0  # what memory may differ by and be called flat


def texts() -> list[str]:
    try:
        lines = pathlib.Path(_PROMPTS.value).read_text(encoding="utf-8").splitlines()
        found = [json.loads(line)["prompt"][: _PROMPT_CHARACTERS.value] for line in lines if line]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--prompt_file={_PROMPTS.value}: {error}") from error
    if len(found) < 2:
        raise InputError(f"--prompt_file={_PROMPTS.value}: give two prompts or more")
    return found


def alone(url: str, cases: list[soak.Case]) -> list[soak.Reply]:
    """Each case's reply, one at a time."""
    with httpx.Client(base_url=url, timeout=600) as client:
        return [soak.ask(client, case) for case in cases]


def idle(url: str) -> bool:
    """Whether the server soon has nothing to do."""
    for _ in range(100):
        health = httpx.get(f"{url}/health").json()
        if health["waiting"] == health["running"] == 0:
            return True
        time.sleep(0.1)
    return False


def traffic(
    server: ServerProcess, cases: list[soak.Case], known: list[soak.Reply]
) -> tuple[list[soak.Client], list[Usage]]:
    """Lets the clients loose; (clients, what the server held each second)."""
    stop = threading.Event()
    clients = [
        soak.Client(server.url, number, cases, known, stop) for number in range(_CLIENTS.value)
    ]
    samples = []
    for client in clients:
        client.start()
    seconds = 60 * _MINUTES.value
    begin = time.monotonic()
    with rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task("soaking", total=seconds)
        while (passed := time.monotonic() - begin) < seconds:
            bar.update(task, completed=passed)
            samples.append(server.usage())
            time.sleep(1)
    stop.set()
    for client in clients:
        client.join()
    return clients, samples


def growth_mib(samples: list[Usage]) -> tuple[float, float]:
    """(memory early on, by how much it differs at the end), medians over a quarter each."""
    settled = [sample.memory_mib for sample in samples[int(_SETTLING * len(samples)) :]]
    quarter = max(1, len(settled) // 4)
    early, late = statistics.median(settled[:quarter]), statistics.median(settled[-quarter:])
    return early, late - early


def run() -> int:
    data, text = (Text(_RECORD.value, "record", ending) for ending in (".json", ".md"))
    console = rich.console.Console(stderr=True)
    cases = soak.make_cases(texts(), _CASES.value, _MAX_TOKENS.value, random.Random(_SEED.value))
    wrong: list[str] = []

    def check(right: bool, what: str) -> None:
        if not right:
            wrong.append(what)

    with ServerProcess(shlex.split(_SERVE.value)) as server:
        console.print("starting the server: minutes the first time")
        ready_s = server.wait_ready()
        console.print(f"ready after {ready_s:.1f} s; asking each case alone")
        known = alone(server.url, cases)
        before = server.usage()
        clients, samples = traffic(server, cases, known)
        check(idle(server.url), "the server has something to do when nobody asks")
        check(alone(server.url, cases) == known, "a reply changed after the traffic")
        time.sleep(2)  # closed connections are taken down
        after = server.usage()
        status, stop_s = server.stop()
    counts = sum((client.counts for client in clients), collections.Counter[str]())
    answered = [one for client in clients for one in client.ids]
    left = [one for client in clients for one in client.gone]
    wrong += [line for client in clients for line in client.wrong]
    lost = [one for one in answered if server.logged[one] != 1]
    lost += [one for one in left if server.logged[one] > 1]
    check(not lost, f"requests that the log has not once: {lost[:5]}")
    early, growth = growth_mib(samples)
    flat = abs(growth) <= max(_GROWTH_SHARE * early, _GROWTH_MIB) or growth < 0
    check(flat, f"memory grew by {growth:.0f} MiB from {early:.0f}")
    check(after.handles <= before.handles, f"handles: {before.handles}, then {after.handles}")
    check(
        after.threads <= before.threads + _POOL_THREADS,
        f"threads: {before.threads}, then {after.threads}",
    )
    check(status == 0, f"exit status {status}")
    tracebacks = [line for line in server.errors if "Traceback" in line]
    check(not tracebacks, "a traceback in the server's standard error")
    record = {
        "minutes": _MINUTES.value,
        "clients": _CLIENTS.value,
        "server": _SERVE.value,
        "ready_s": round(ready_s, 1),
        "requests": sum(counts.values()),
        "by_kind": dict(sorted(counts.items())),
        "replies_compared": counts["whole"] + counts["streamed"],
        "memory_mib": {
            "early": round(early, 1),
            "growth": round(growth, 1),
            "most": round(max(sample.memory_mib for sample in samples), 1),
        },
        "handles": {
            "before": before.handles,
            "most": max(sample.handles for sample in samples),
            "after": after.handles,
        },
        "threads": {"before": before.threads, "after": after.threads},
        "stop_s": round(stop_s, 2),
        "wrong": wrong,
    }
    console.print_json(json.dumps(record))
    data.write(json.dumps(record, indent=1) + "\n")
    text.write(record_text(record))
    return 1 if wrong else 0


def record_text(record: dict[str, Any]) -> str:
    memory, handles, threads = (record[name] for name in ("memory_mib", "handles", "threads"))
    kinds = ", ".join(f"{name} {count}" for name, count in record["by_kind"].items())
    lines = [
        "# A soak of the server",
        "",
        "```",
        " ".join(["python", *map(shlex.quote, sys.argv)]),
        "```",
        "",
        f"- {record['minutes']:g} minutes, {record['clients']} clients, {record['requests']} "
        f"requests: {kinds}",
        f"- replies compared with the same request sent alone: {record['replies_compared']}, "
        f"{len(record['wrong'])} wrong things of any kind",
        "- every answered request once in the log, after the traffic every case again as at first",
        f"- memory {memory['early']} MiB after the first quarter, {memory['growth']:+} MiB at the "
        f"end, at most {memory['most']} MiB",
        f"- handles {handles['before']} before, at most {handles['most']}, {handles['after']} "
        f"after; threads {threads['before']} and {threads['after']}",
        f"- ended {record['stop_s']} s after SIGTERM, with status 0"
        if not any("exit status" in line for line in record["wrong"])
        else "- ended with a wrong exit status",
    ]
    lines += [f"- WRONG: {line[:300]}" for line in record["wrong"][:20]]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    del argv
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line a request
    sys.exit(run())


if __name__ == "__main__":
    entry.run(main)
