"""The tiny decoder behind a real server: uvicorn in a thread of the test's process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator

import httpx
import openai

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.checkpoints.chat import ChatTemplate
from dflash_jax.engine import LoneDriver, Request, token_sha256
from dflash_jax.engine.turns import Drivers
from dflash_jax.serve.server import Server, bind
from dflash_jax.serve.service import Options, ServedModel, Service
from tests import tiny_llama
from tests.decode import tiny

NAME = "tiny"
KEY = "secret"
WIDTHS = range(4)
STOP_TOKENS = frozenset({256, 258})
KNOWN = 264  # ids of the tokenizer; the model's others are padding


@functools.cache
def tokenizer() -> Tokenizer:
    template = ChatTemplate(tiny_llama.TEMPLATE, NAME)
    return Tokenizer(
        tiny_llama.byte_tokenizer(), KNOWN, None, 256, frozenset({256, 257, 258}), template
    )


@functools.cache
def drivers() -> Drivers:
    decoder = tiny.make_decoder(vocab_size=KNOWN, widths=WIDTHS, prompt_cache_mib=1)
    return Drivers(
        LoneDriver(decoder, rule="renewal", cap=max(WIDTHS)), LoneDriver(decoder, rule="fixed:0")
    )


@functools.cache
def lone_driver() -> LoneDriver:
    """Plain, with buffers of its own and no prompt cache."""
    decoder = drivers().plain.decoder
    buffers = tiny.new_buffers(decoder.spec)
    alone = dataclasses.replace(decoder, buffers=buffers, prompt_cache=None)
    return LoneDriver(alone, rule="fixed:0")


class Slow:
    """A driver whose every round takes longer, so that a test can come in between."""

    def __init__(self, driver: LoneDriver, seconds: float) -> None:
        self.driver, self.seconds = driver, seconds

    def __getattr__(self, name: str):
        return getattr(self.driver, name)

    def stream(self, request: Request):
        stream = self.driver.stream(request)
        rounds = stream.rounds

        def slow_rounds(interrupted):
            for record in rounds(interrupted):
                time.sleep(self.seconds)
                yield record

        stream.rounds = slow_rounds
        return stream


def model(seconds: float = 0) -> ServedModel:
    served = drivers()
    if seconds:
        served = Drivers(Slow(served.drafted, seconds), Slow(served.plain, seconds))
    return ServedModel(NAME, tokenizer(), STOP_TOKENS, tiny.VOCABULARY, tiny.CONTEXT_LIMIT, served)


class Running:
    """A server and clients of it."""

    def __init__(self, service: Service, server: Server, url: str) -> None:
        self.service, self.server, self.url = service, server, url
        self.http = httpx.Client(base_url=url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)

    def post(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def idle(self, seconds: float = 5) -> bool:
        """Waits until nothing runs or waits."""
        turns = self.service.turns
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not turns.running and not turns.waiting:
                return True
            time.sleep(0.01)
        return False


@contextlib.contextmanager
def running(load=None, slow: float = 0, **options) -> Iterator[Running]:
    """A server with these `Options`; `slow` adds seconds to every round."""
    settings = Options(**options)
    service = Service(settings.max_queue)
    server = Server(service, settings)
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    served = model(slow) if load is None else None  # compiled before the server starts
    service.start(load or (lambda say: served), on_failure=lambda: None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started or (load is None and service.status == "starting"):
            time.sleep(0.01)
        yield Running(service, server, url)
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
        assert service.join(10)


def alone(prompt, sampling, max_tokens: int, **request) -> tuple[str, str, str]:
    """(text, finish reason, token_sha256) as scripts/decode.py has them: plain decoding."""
    wanted = Request(tuple(prompt), sampling, max_tokens, STOP_TOKENS, **request)
    tokens, reason, _ = tiny.decode(lone_driver(), wanted)
    return tokenizer().decode(tokens), reason, token_sha256(tokens)
