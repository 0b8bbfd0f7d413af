"""Serves a target and its drafter over OpenAI's API. docs/serving.md says what it takes.

python -m dflash_jax.serve --config=configs/smollm2.py --port=8000
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from typing import TYPE_CHECKING

import rich.console
from absl import flags

from dflash_jax import entry, platform
from dflash_jax.engine import LoneDriver
from dflash_jax.engine.loading import ModelConfig, load_models, prepare_models
from dflash_jax.engine.turns import Drivers
from dflash_jax.errors import InputError
from dflash_jax.pricing import make_rule
from dflash_jax.program_progress import program_progress
from dflash_jax.tree.growth import CAP

if TYPE_CHECKING:  # the packages it needs may be missing, which `main` says in a line
    from dflash_jax.serve.service import Progress, ServedModel

_CONFIG = entry.config_flag("configs/smollm2.py", "Models and context.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Where to listen; 0.0.0.0 is everywhere.")
_PORT = flags.DEFINE_integer("port", 8000, "0 takes a free one.", lower_bound=0, upper_bound=65535)
_MODEL_NAME = flags.DEFINE_string("model_name", None, "As clients call it; the checkpoint's name.")
_RULE = flags.DEFINE_string("rule", None, "How widths are chosen: docs/pricing.md. [renewal]")
_CAP = flags.DEFINE_integer("cap", CAP, "Most nodes of a tree.", lower_bound=0, upper_bound=CAP)
_API_KEY = flags.DEFINE_string("api_key", "", "Asked of clients; put it into a --flagfile.")
_CORS_ORIGINS = flags.DEFINE_list("cors_origins", [], "Web pages' origins that may call.")
_MAX_QUEUE = flags.DEFINE_integer("max_queue", 256, "Replies that may wait.")
_MAX_BODY_BYTES = flags.DEFINE_integer("max_body_bytes", 4 * 2**20, "Of one request.")
_MAX_PROMPT_TOKENS = flags.DEFINE_integer("max_prompt_tokens", 0, "0: what the context holds.")
_PROMPT_CACHE_MIB = flags.DEFINE_integer(
    "prompt_cache_mib", 512, "Memory for what prompts have left; 0 is off.", lower_bound=0
)
_REQUEST_TIMEOUT_S = flags.DEFINE_float("request_timeout_s", 600.0, "Waiting included.")
_PLATFORM = flags.DEFINE_enum("platform", "auto", platform.PLATFORMS, "Where to run.")

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


def load_model(
    config: ModelConfig, rule: str, cap: int, found: platform.Platform, say: Progress
) -> ServedModel:
    """The `ServedModel` of the flags: loaded, compiled, checked and timed. Takes minutes.

    Raises InputError.
    """
    from dflash_jax.serve.service import ServedModel

    models = load_models(config, _PROMPT_CACHE_MIB.value)
    if models.drafter is None:
        rule = "fixed:0"
    fixed = rule.startswith("fixed:")
    widths = (int(rule.removeprefix("fixed:")),) if fixed else range(cap + 1)
    console = rich.console.Console(stderr=True)
    with found.warmup_lock(), program_progress(console) as show:

        def progress(done: int, total: int, anew: int) -> None:
            show(done, total, anew)
            say(f"{done} of {total} programs ready")

        decoder = prepare_models(
            models,
            config.context_limit,
            widths=widths,
            time_widths=not fixed,
            prompt_cache_mib=_PROMPT_CACHE_MIB.value,
            say=console.print,
            progress=progress,
        )
    target = models.target
    name = _MODEL_NAME.value or target.name
    console.print(f"{name}: ready; widths {decoder.check.widths} give plain decoding's bits")
    return ServedModel(
        name=name,
        tokenizer=target.tokenizer,
        stop_token_ids=target.stop_token_ids,
        vocab_size=target.config.vocab_size,
        context_limit=config.context_limit,
        drivers=Drivers(
            drafted=LoneDriver(decoder, rule=rule, cap=cap, landing=models.landing()),
            plain=LoneDriver(decoder, rule="fixed:0"),
        ),
    )


def main(argv: list[str]) -> None:
    del argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the server has its own handler
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not installed: pip install -e '.[serve]'")
    from dflash_jax.serve import server
    from dflash_jax.serve.service import Options

    rule, cap = _RULE.value or "renewal", _CAP.value
    make_rule(rule, cap=cap)  # an unknown one is an error now, not after compiling
    options = Options(
        api_key=_API_KEY.value,
        cors_origins=tuple(_CORS_ORIGINS.value),
        max_queue=_MAX_QUEUE.value,
        max_body_bytes=_MAX_BODY_BYTES.value,
        max_prompt_tokens=_MAX_PROMPT_TOKENS.value,
        request_timeout_s=_REQUEST_TIMEOUT_S.value,
    )
    config = ModelConfig.from_config(_CONFIG.value)
    if not config.drafter and _RULE.value not in (None, "fixed:0"):
        raise InputError(f"--rule={rule}: the config names no drafter: give one, or leave it out")
    with server.bind(_HOST.value, _PORT.value) as listener:
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        found = platform.initialize(_PLATFORM.value)
        print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)
        server.serve(lambda say: load_model(config, rule, cap, found, say), listener, options)


if __name__ == "__main__":
    entry.run(main)
