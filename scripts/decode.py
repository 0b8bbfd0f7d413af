r"""Decodes prompts with a target and its drafter, one stream at a time.

    python scripts/decode.py --config=configs/smollm2.py --prompt="Why is the sky blue?"
    python scripts/decode.py --config=configs/smollm2.py --prompt_file=prompts.jsonl \
        --width=7 --temperature=1.0 --seed=1 --json_out=replies.jsonl --trace_out=rounds.jsonl
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import rich.console
from absl import flags

from dflash_jax import entry, platform
from dflash_jax.bench.records import Lines, decode, reply_record, round_record
from dflash_jax.checkpoints import Target, Tokenizer
from dflash_jax.decode.executables import CompileCounter
from dflash_jax.decode.sampling import Sampling
from dflash_jax.engine import LoneDriver, Request, RoundRecord
from dflash_jax.engine.loading import ModelConfig, load_models, prepare_models
from dflash_jax.engine.prompts import encode_prompt, read_prompt_file, require_fit
from dflash_jax.errors import InputError
from dflash_jax.pricing import make_rule
from dflash_jax.program_progress import program_progress
from dflash_jax.tree.growth import CAP

_CONFIG = entry.config_flag("configs/smollm2.py", "Models and context.")
_PROMPT = flags.DEFINE_string("prompt", None, "One prompt.")
_PROMPT_FILE = flags.DEFINE_string(
    "prompt_file", None, "JSON lines, each with `prompt`, `messages` or `tokens`."
)
_CHAT = flags.DEFINE_bool("chat", True, "Send a `prompt` as a chat's user turn, not as raw text.")
_WIDTH = flags.DEFINE_string("width", "auto", "Nodes verified a round: auto, or 0 (plain) to 15.")
_RULE = flags.DEFINE_string("rule", "renewal", "How --width=auto chooses; docs/pricing.md.")
_CAP = flags.DEFINE_integer("cap", CAP, "Most nodes of a tree.", lower_bound=0, upper_bound=CAP)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "0 is off.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "1 is off.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "0 is off.")
_SEED = flags.DEFINE_integer("seed", 0, "Keys the draws.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Most new tokens a reply.")
_JSON_OUT = flags.DEFINE_string("json_out", None, "Writes one object a prompt.")
_TRACE_OUT = flags.DEFINE_string("trace_out", None, "Writes one object a round.")
_PLATFORM = flags.DEFINE_enum("platform", "auto", platform.PLATFORMS, "Where to run.")
_QUIET = flags.DEFINE_bool("quiet", False, "Print no replies, only a table's line each.")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags that say how to decode, checked."""

    rule: str
    cap: int
    widths: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    chat: bool

    @classmethod
    def from_flags(cls) -> Options:
        width, cap = _WIDTH.value, _CAP.value
        if width == "auto":
            rule = _RULE.value
        elif _RULE.present:
            raise InputError(f"--rule is for --width=auto, not {width}: leave one of them out")
        elif width.isdecimal() and int(width) <= cap:
            rule = f"fixed:{int(width)}"
        else:
            raise InputError(f"--width={width}: give auto, or a number from 0 to --cap={cap}")
        if (_PROMPT.value is None) == (_PROMPT_FILE.value is None):
            raise InputError("give --prompt or --prompt_file, one of the two")
        if _JSON_OUT.value and _JSON_OUT.value == _TRACE_OUT.value:
            raise InputError(f"--json_out and --trace_out are both {_JSON_OUT.value}: give two")
        make_rule(rule, cap=cap)  # an unknown one is an error now, not after compiling
        fixed = rule.startswith("fixed:")
        widths = (0, int(rule.removeprefix("fixed:"))) if fixed else tuple(range(cap + 1))
        sampling = Sampling(
            _TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _MIN_P.value, _SEED.value
        )
        return cls(rule, cap, widths, sampling, _MAX_TOKENS.value, _CHAT.value)


def read_prompts(tokenizer: Tokenizer, chat: bool) -> list[list[int]]:
    """The prompts of the flags, as token ids."""
    if _PROMPT.value is not None:
        return [encode_prompt({"prompt": _PROMPT.value}, tokenizer, chat, "--prompt")]
    return read_prompt_file(_PROMPT_FILE.value, tokenizer, chat)


def decode_all(
    driver: LoneDriver, target: Target, requests: list[Request]
) -> Iterator[tuple[dict[str, Any], list[RoundRecord]]]:
    """Decodes the requests in turn; (summary, rounds) of each."""
    counter = CompileCounter()
    for request in requests:
        stream, rounds, seconds = decode(driver, request)
        prompt = list(request.prompt)
        reply = reply_record(stream, prompt, rounds, target.tokenizer, seconds, counter.count)
        yield reply, rounds


def run(options: Options, found: platform.Platform) -> None:
    console = rich.console.Console(stderr=True)
    say = console.print
    json_out = Lines(_JSON_OUT.value, "json_out")
    trace_out = Lines(_TRACE_OUT.value, "trace_out")
    begin = time.perf_counter()
    config = ModelConfig.from_config(_CONFIG.value)
    # Plain decoding loads the drafter too: it then runs the same programs, taps included.
    models = load_models(config)
    prompts = read_prompts(models.target.tokenizer, options.chat)
    require_fit(prompts, config.context_limit, models.target.config.vocab_size)
    stops = models.target.stop_token_ids
    requests = [
        Request(tuple(prompt), options.sampling, options.max_tokens, stops) for prompt in prompts
    ]
    if models.drafter is None and options.rule != "fixed:0":
        raise InputError("the config names no drafter: give one, or --width=0")
    with found.warmup_lock(), program_progress(console) as progress:
        decoder = prepare_models(
            models,
            config.context_limit,
            widths=options.widths,
            time_widths=not options.rule.startswith("fixed"),
            say=say,
            progress=progress,
        )
    driver = LoneDriver(
        decoder,
        rule=options.rule,
        cap=options.cap,
        landing=models.landing(),
    )
    say(
        f"{models.target.name}: ready in {time.perf_counter() - begin:.1f} s; widths "
        f"{decoder.check.widths} give plain decoding's bits"
    )
    for number, (reply, records) in enumerate(decode_all(driver, models.target, requests)):
        json_out.write(reply)
        for record in records[1:]:
            trace_out.write({"reply": number} | round_record(record))
        if not _QUIET.value:
            print(reply["text"])
        rate = reply["decode_tok_s"] or 0.0
        per_round = reply["tokens_per_round"] or 0.0
        print(
            f"[{reply['prompt_tokens']} + {len(reply['tokens'])} tokens, {rate:.1f} tok/s, "
            f"{per_round:.2f} tokens a round, widths {reply['widths']}, "
            f"token_sha256 {reply['token_sha256']}]",
            flush=True,
        )
    json_out.close()
    trace_out.close()


def main(argv: list[str]) -> None:
    del argv
    options = Options.from_flags()
    run(options, platform.initialize(_PLATFORM.value))


if __name__ == "__main__":
    entry.run(main)
