"""The model behind the server, and the thread that loads and then serves it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.engine.grammars import GrammarVocabulary
from dflash_jax.engine.turns import Drivers, Turns
from dflash_jax.errors import InputError
from dflash_jax.serve.chat_format import ChatFormat
from dflash_jax.serve.responses import Status


@dataclasses.dataclass(frozen=True)
class Options:
    """How to serve.

    api_key: asked of every client when not empty. cors_origins: web pages that may call, none by
    default. max_queue: replies that may wait. max_prompt_tokens: 0 leaves the context's limit.

    Raises InputError for values that make no sense.
    """

    api_key: str = ""
    cors_origins: tuple[str, ...] = ()
    max_queue: int = 256
    max_body_bytes: int = 4 * 2**20
    max_prompt_tokens: int = 0
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name}={getattr(self, name)} must be at least 1")
        if self.max_prompt_tokens < 0:
            raise InputError(f"--max_prompt_tokens={self.max_prompt_tokens} must be at least 0")
        if not self.request_timeout_s > 0:
            raise InputError(f"--request_timeout_s={self.request_timeout_s} must be above 0")
        if not self.api_key.isascii() or self.api_key != self.api_key.strip():
            raise InputError("--api_key must be ASCII, without spaces around it")


@dataclasses.dataclass(frozen=True, eq=False)
class ServedModel:
    """What a request needs of the model."""

    name: str  # as clients call it
    tokenizer: Tokenizer
    stop_token_ids: frozenset[int]
    vocab_size: int  # ids a prompt may have, padding included
    context_limit: int
    drivers: Drivers
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    grammar_vocabulary: GrammarVocabulary = dataclasses.field(init=False)
    chat_format: ChatFormat = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        vocabulary = GrammarVocabulary(self.tokenizer, self.stop_token_ids)
        object.__setattr__(self, "grammar_vocabulary", vocabulary)
        object.__setattr__(self, "chat_format", ChatFormat(self.tokenizer))


Progress = Callable[[str], None]
Load = Callable[[Progress], ServedModel]


class Service:
    """Starting, then ready until closed.

    model: None until it is ready. failure: what the loading raised.
    """

    def __init__(self, max_queue: int) -> None:
        self.turns = Turns(max_queue)
        self.model: ServedModel | None = None
        self.failure: BaseException | None = None
        self.progress = "loading"
        self._thread: threading.Thread | None = None

    @property
    def status(self) -> Status:
        if self.turns.closed:
            return "stopping"
        return "starting" if self.model is None else "ok"

    def prompt_cache_bytes(self) -> int:
        cache = self.model.drivers.drafted.decoder.prompt_cache if self.model else None
        return cache.bytes if cache else 0

    def start(self, load: Load, on_failure: Callable[[], None]) -> None:
        """Loads and serves in a thread of its own; `on_failure` is called there."""

        def run() -> None:
            try:
                model = load(self._say)
            except BaseException as failure:  # noqa: BLE001 - raised again by the main thread
                self.failure = failure
                on_failure()
                return
            self.model = model
            self._say("ready")
            self.turns.serve(model.drivers)

        # A daemon: a compilation cannot be interrupted, and the process must not wait for it.
        self._thread = threading.Thread(target=run, name="worker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes no more requests and ends those that run within a round."""
        self.turns.close()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread; whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _say(self, line: str) -> None:
        self.progress = line
