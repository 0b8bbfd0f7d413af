"""What clients may send. What is not here is refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError

from dflash_jax.serve.errors import sendable

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_SEED = 2**64 - 1
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for /v1/completions

# Known names that are not supported -> the values that ask for nothing, which are taken.
# None, the same as not given, is among them for each.
_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "regex": (),
    "grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_grammar": (),
    "functions": ([],),
    "function_call": ("none",),
    "chat_template": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
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
}


class Body(pydantic.BaseModel):
    """Takes exactly the fields that are declared, of exactly their types."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    not_here: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {}
        for name, value in data.items():
            if name in cls.model_fields:
                known[name] = value
            elif name not in cls.not_here:
                raise PydanticCustomError(
                    "unknown_parameter", "unknown parameter: {name}", {"name": sendable(name[:100])}
                )
            elif not _asks_nothing(value, cls.not_here[name]):
                raise PydanticCustomError(
                    "unsupported_parameter", "{name} is not supported here", {"name": name}
                )
        return known


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """By type too: `false` is no 0."""
    return value is None or any(type(value) is type(one) and value == one for one in neutral)


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


class Generation(Body):
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

    @property
    def token_budget(self) -> int | None:
        """Most new tokens; None: what the context holds."""
        return self.max_tokens


class CompletionRequest(Generation):
    """Of /v1/completions."""

    not_here: ClassVar[dict[str, tuple[Any, ...]]] = {**_NOT_HERE, **_OF_CHATS}
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    ) = Field(description="A text, token ids, or a list of either.")

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
