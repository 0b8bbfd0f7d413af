"""What clients may send. What is not here is refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import Field

from dflash_jax.serve.body import Body
from dflash_jax.serve.rule_requests import RuleFields

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_SEED = 2**64 - 1
MAX_COMPLETION_LOGPROBS = 5  # OpenAI's own limit for /v1/completions
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for /v1/completions

# Known names that are not supported -> the values that ask for nothing, which are taken.
# None, the same as not given, is among them for each.
_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "regex": (),
    "grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_grammar": (),
    "guided_choice": (),
    "functions": ([],),
    "function_call": ("none",),
    "chat_template": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "skip_special_tokens": (True,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "prompt_cache_key": (),
    "safety_identifier": (),
}
_OF_CHATS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "reasoning_effort": (),
    "thinking_budget": (),
    "chat_template_kwargs": ({},),
    "top_logprobs": (0,),
}


class StreamOptions(Body):
    """Of a streamed reply."""

    not_here: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}
    include_usage: bool | None = Field(None, description="End with a chunk that has the usage.")
    include_rounds: bool | None = Field(
        None, description="Each round's tokens, width and prices, as `round` in a chunk's choice."
    )


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]


class Generation(RuleFields):
    """What completions and chats have in common."""

    not_here = _NOT_HERE
    model: str | None = Field(None, description="As /v1/models names it; left out: that one.")
    max_tokens: int | None = Field(None, ge=1, description="Most new tokens.")
    temperature: float | None = Field(None, ge=0, description="0 is greedy; left out: 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="1, the default, is off.")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 or -1, the default: off.")
    min_p: float | None = Field(None, ge=0, le=1, description="0, the default, is off.")
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description="Choice k draws with seed + k; left out: at random."
    )
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Replies to each prompt.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = Field(
        None, description="The reply ends before any of these."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    draft: bool | None = Field(None, description="false decodes plainly: the same tokens.")
    user: str | None = Field(None, max_length=256, description="Written to the server's log.")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def include_rounds(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_rounds)

    @pydantic.model_validator(mode="after")
    def _options_of_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @pydantic.model_validator(mode="after")
    def _least_and_most(self) -> Generation:
        budget = self.token_budget
        if budget is not None and (self.min_tokens or 0) > budget:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens, {budget}")
        return self

    @property
    def token_budget(self) -> int | None:
        """Most new tokens; None: what the context holds."""
        return self.max_tokens

    @property
    def logprobs_of(self) -> int | None:
        """Of how many likeliest tokens at each place; None: of none, the picked one neither."""
        return None


class CompletionRequest(Generation):
    """Of /v1/completions."""

    not_here: ClassVar[dict[str, tuple[Any, ...]]] = {**_NOT_HERE, **_OF_CHATS}
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    ) = Field(description="A text, token ids, or a list of either.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_COMPLETION_LOGPROBS, description="Of so many likeliest tokens."
    )

    @property
    def logprobs_of(self) -> int | None:
        return self.logprobs

    @property
    def token_budget(self) -> int:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if one else prompt


class RuleRequest(Body):
    """Of PUT /rule."""

    rule: Annotated[str, Field(min_length=1, max_length=40)]


class DetokenizeRequest(Body):
    """Of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
