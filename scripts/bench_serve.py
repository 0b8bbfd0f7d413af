r"""What serving costs over `scripts/decode.py`, and that it changes no token.

    python scripts/bench_serve.py --config=configs/smollm2.py --record=docs/receipts/serve

In one process, with one set of compiled programs, each prompt is decoded as `scripts/decode.py`
does it and through the server, in turns; the client is a process of its own. Then many clients at
once, the same replies from `scripts/decode.py` itself, and a start of the server from the cache.
The exit status is 1 when a token differed or a client was refused.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import multiprocessing
import os
import pathlib
import platform as host
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress
from absl import flags

from dflash_jax import entry, platform
from dflash_jax.bench import serve_client
from dflash_jax.bench.contexts import interval
from dflash_jax.bench.records import Text, decode
from dflash_jax.bench.server_process import ServerProcess
from dflash_jax.decode.sampling import Sampling
from dflash_jax.engine import LoneDriver, Request
from dflash_jax.engine.loading import ModelConfig, Models, load_models, prepare_models
from dflash_jax.engine.prompts import read_prompt_file, require_fit
from dflash_jax.engine.turns import Drivers
from dflash_jax.errors import InputError
from dflash_jax.pricing import make_rule
from dflash_jax.serve.logs import request_log
from dflash_jax.serve.server import Server, bind
from dflash_jax.serve.service import Options, ServedModel, Service

_CONFIG = entry.config_flag("configs/smollm2.py", "Models and context.")
_PROMPTS = flags.DEFINE_string("prompt_file", "configs/prompts/bench.jsonl", "JSON lines.")
_COUNT = flags.DEFINE_integer("count", 0, "Prompts to use; 0 is all.", lower_bound=0)
_RULES = flags.DEFINE_list("rules", ["fixed:7", "renewal"], "Each is measured; all widths compile.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Most new tokens a reply.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Pairs of each prompt.", lower_bound=1)
_CLIENTS = flags.DEFINE_integer("clients", 200, "At once.", lower_bound=1)
_CLIENT_TOKENS = flags.DEFINE_integer("client_tokens", 8, "Most new tokens of each.", lower_bound=1)
_RECORD = flags.DEFINE_string("record", None, "Writes RECORD.json and RECORD.md.")
_PLATFORM = flags.DEFINE_enum("platform", "auto", platform.PLATFORMS, "Where to run.")

_PROMPT_CACHE_MIB = 512


class Clocked:
    """A driver that notes when a stream's first token was there."""

    def __init__(self, driver: LoneDriver) -> None:
        self._driver = driver
        self.first = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def stream(self, request: Request) -> Any:
        stream = self._driver.stream(request)
        rounds = stream.rounds

        def clocked(*arguments: Any) -> Iterator[Any]:
            records = rounds(*arguments)
            first = next(records, None)
            if first is not None:
                self.first = time.perf_counter()
                yield first
                yield from records

        stream.rounds = clocked  # type: ignore[method-assign]
        return stream


@contextlib.contextmanager
def serving(models: Models, drivers: Drivers, context_limit: int) -> Iterator[str]:
    """A server of this process, as `python -m dflash_jax.serve` runs it; its address."""
    target = models.target
    model = ServedModel(
        target.name,
        target.tokenizer,
        target.stop_token_ids,
        target.config.vocab_size,
        context_limit,
        drivers,
    )
    options = Options(max_queue=max(256, _CLIENTS.value))
    service = Service(options.max_queue)
    server = Server(service, options)
    listener = bind("127.0.0.1", 0)
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        with contextlib.redirect_stdout(nowhere):
            stack.enter_context(request_log())
        service.start(lambda say: model, on_failure=lambda: None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started or service.status != "ok":
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            service.join(60)


class Pairs:
    """Replies decoded directly and through the server, in turns."""

    def __init__(self, url: str, driver: Clocked, stops: frozenset[int], pool: Any) -> None:
        self._url, self._driver, self._stops, self._pool = url, driver, stops, pool
        self.unequal: list[str] = []
        self.to_first_byte_ms: list[float] = []
        self.round_ms: list[float] = []

    def measure(self, prompts: list[list[int]], progress: Any) -> dict[str, Any]:
        """Every prompt, greedy and sampled, `repeats` times: rates, and their ratio."""
        rows: dict[str, list[tuple[float, float]]] = {"direct": [], "served": []}
        for repeat in range(_REPEATS.value):
            for number, prompt in enumerate(prompts):
                for temperature in (0.0, 1.0):
                    order = ["direct", "served"]
                    if (repeat + number) % 2:
                        order.reverse()
                    hashes = {}
                    for way in order:
                        row, hashes[way] = getattr(self, way)(prompt, temperature)
                        rows[way].append(row)
                    if hashes["direct"] != hashes["served"]:
                        self.unequal.append(f"prompt {number}, temperature {temperature:g}")
                    progress()
        direct, served = (np.array(rows[way]) for way in ("direct", "served"))
        # A reply of one token has no rate.
        some = (direct[:, 0] > 0) & (served[:, 0] > 0)
        direct, served = direct[some], served[some]
        ratio, low, high = interval(served, direct)
        return {
            "pairs": len(direct),
            "direct_tok_s": round(float(direct[:, 0].sum() / direct[:, 1].sum()), 2),
            "served_tok_s": round(float(served[:, 0].sum() / served[:, 1].sum()), 2),
            "ratio": round(ratio, 4),
            "interval": [round(low, 4), round(high, 4)],
        }

    def direct(self, prompt: list[int], temperature: float) -> tuple[tuple[float, float], str]:
        sampling = Sampling(temperature, seed=1)
        request = Request(tuple(prompt), sampling, _MAX_TOKENS.value, self._stops)
        stream, records, seconds = decode(self._driver, request)  # type: ignore[arg-type]
        self.round_ms += [record.round_ms for record in records[1:]]
        decoded = len(stream.tokens) - len(records[0].tokens)
        return (decoded, seconds), stream.token_sha256

    def served(self, prompt: list[int], temperature: float) -> tuple[tuple[float, float], str]:
        options = {"temperature": temperature, "seed": 1, "max_tokens": _MAX_TOKENS.value}
        seen = self._pool.submit(serve_client.stream, self._url, prompt, options).result()
        self.to_first_byte_ms.append((seen.first - self._driver.first) * 1e3)
        return (seen.tokens - 1, seen.last - seen.first), seen.token_sha256


def crowd(url: str, prompts: list[list[int]], pool: Any) -> dict[str, Any]:
    """Many clients at once: how many got what the first of their prompt got."""
    wanted = [prompts[number % len(prompts)] for number in range(_CLIENTS.value)]
    options = {"temperature": 0, "max_tokens": _CLIENT_TOKENS.value}
    alone = {
        tuple(prompt): pool.submit(serve_client.stream, url, prompt, options).result().token_sha256
        for prompt in prompts
    }
    begin = time.perf_counter()
    replies = pool.submit(serve_client.crowd, url, wanted, options).result()
    seconds = time.perf_counter() - begin
    failed = [reply for reply in replies if isinstance(reply, str)]
    right = sum(
        not isinstance(reply, str) and reply.token_sha256 == alone[tuple(prompt)]
        for prompt, reply in zip(wanted, replies, strict=True)
    )
    firsts = [one.first - one.sent for one in replies if not isinstance(one, str)]
    return {
        "clients": len(wanted),
        "right": right,
        "failed": sorted(set(failed)),
        "seconds": round(seconds, 2),
        "first_byte_s": [round(statistics.median(firsts), 2), round(max(firsts), 2)]
        if firsts
        else None,
    }


def command(*arguments: str) -> list[str]:
    """A command of this run's models."""
    shared = [one for one in sys.argv[1:] if one.startswith(("--config", "--platform"))]
    return [*arguments, *shared]


def decode_py() -> list[str]:
    """The greedy replies' hashes, as scripts/decode.py has them."""
    script = str(pathlib.Path(__file__).with_name("decode.py"))
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/replies.jsonl"
        flags_ = [f"--prompt_file={_PROMPTS.value}", f"--max_tokens={_MAX_TOKENS.value}"]
        arguments = command(sys.executable, script, *flags_, f"--json_out={out}", "--quiet")
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
        lines = pathlib.Path(out).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["token_sha256"] for line in lines][: _COUNT.value or None]


def starts() -> dict[str, float]:
    """Seconds until a second start is ready, and until it has ended after SIGTERM."""
    for _ in range(2):
        with ServerProcess(command()) as server:
            ready = server.wait_ready()
            status, stop = server.stop()
            assert status == 0, server.errors
    return {"ready_s": round(ready, 2), "stop_s": round(stop, 2)}


def run(found: platform.Platform) -> int:
    if not _RULES.value:
        raise InputError("--rules names no rule")
    for rule in _RULES.value:
        make_rule(rule)  # an unknown one is an error now, not after compiling
    data, text = (Text(_RECORD.value, "record", ending) for ending in (".json", ".md"))
    console = rich.console.Console(stderr=True)
    config = ModelConfig.from_config(_CONFIG.value)
    models = load_models(config, _PROMPT_CACHE_MIB)
    prompts = read_prompt_file(_PROMPTS.value, models.target.tokenizer)[: _COUNT.value or None]
    require_fit(prompts, config.context_limit, models.target.config.vocab_size)
    with found.warmup_lock():
        decoder = prepare_models(
            models, config.context_limit, prompt_cache_mib=_PROMPT_CACHE_MIB, say=console.print
        )
    driver = Clocked(LoneDriver(decoder, rule=_RULES.value[0], landing=models.landing()))
    drivers = Drivers(driver, LoneDriver(decoder, rule="fixed:0"))  # type: ignore[arg-type]
    spawn = multiprocessing.get_context("spawn")
    rates = {}
    with (
        concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool,
        serving(models, drivers, config.context_limit) as url,
        rich.progress.Progress(console=console, transient=True) as bar,
    ):
        pairs = Pairs(url, driver, models.target.stop_token_ids, pool)
        greedy = [pairs.served(prompt, 0.0)[1] for prompt in prompts]  # warms everything, too
        pairs.to_first_byte_ms.clear()
        total = 2 * len(prompts) * _REPEATS.value * len(_RULES.value)
        task = bar.add_task("pairs", total=total)
        for rule in _RULES.value:
            driver.switch(rule)
            rates[rule] = pairs.measure(prompts, lambda: bar.advance(task))
        many = crowd(url, prompts, pool)
    first_byte = sorted(pairs.to_first_byte_ms)
    del decoder, driver, drivers, models  # their memory is needed for other processes
    console.print("the same prompts by scripts/decode.py, then two starts of the server")
    equal = sum(a == b for a, b in zip(decode_py(), greedy, strict=True))
    record = {
        "jax": jax.__version__,
        "platform": found.name,
        "python": host.python_version(),
        "rates": rates,
        "unequal": pairs.unequal,
        "equal_to_decode_py": f"{equal} of {len(prompts)}",
        "first_token_to_first_byte_ms": {
            "median": round(statistics.median(first_byte), 2),
            "most": round(first_byte[-1], 2),
        },
        "round_ms": round(statistics.median(pairs.round_ms), 2),
        "crowd": many,
        "start": starts(),
    }
    console.print_json(json.dumps(record))
    data.write(json.dumps(record, indent=1) + "\n")
    text.write(record_text(record))
    good = not pairs.unequal and equal == len(prompts) and many["right"] == many["clients"]
    return 0 if good else 1


def record_text(record: dict[str, Any]) -> str:
    many, first = record["crowd"], record["first_token_to_first_byte_ms"]
    lines = [
        "# Serving over decoding",
        "",
        "```",
        " ".join(["python", *map(shlex.quote, sys.argv)]),
        "```",
        "",
        f"- jax {record['jax']} on {record['platform']}, Python {record['python']}; one stream at "
        "a time, a client process on the same machine",
        "- tokens differ between served and direct replies: "
        + ("never" if not record["unequal"] else "; ".join(record["unequal"])),
        f"- greedy replies equal to those of scripts/decode.py, another process: "
        f"{record['equal_to_decode_py']}",
        f"- first token to first byte: median {first['median']} ms, at most {first['most']} ms; a "
        f"round takes {record['round_ms']} ms",
        f"- {many['clients']} clients at once: {many['right']} had the right tokens, after "
        f"{many['seconds']} s; failures: {', '.join(many['failed']) or 'none'}",
        f"- a start from the cache is ready after {record['start']['ready_s']} s; it ended "
        f"{record['start']['stop_s']} s after SIGTERM",
        "",
        "| rule | pairs | direct tok/s | served tok/s | served / direct | 95 % |",
        "|---|---|---|---|---|---|",
    ]
    for rule, rate in record["rates"].items():
        low, high = rate["interval"]
        lines.append(
            f"| {rule} | {rate['pairs']} | {rate['direct_tok_s']} | {rate['served_tok_s']} | "
            f"{rate['ratio']:.3f} | {low:.3f} to {high:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    del argv
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line a request
    sys.exit(run(platform.initialize(_PLATFORM.value)))


if __name__ == "__main__":
    entry.run(main)
