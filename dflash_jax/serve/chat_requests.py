"""What clients may send of chats: messages, functions to call, how to think."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from dflash_jax.decode.rules import TOP_LOGPROBS
from dflash_jax.serve.body import Body
from dflash_jax.serve.requests import Generation

MAX_TOOLS = 128  # OpenAI's own limit

Name = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# Messages ----------------------------------------------------------------------------------


class TextPart(Body):
    """A piece of a message's text."""

    not_here: ClassVar[dict[str, tuple[Any, ...]]] = {
        "image_url": (),
        "input_audio": (),
        "file": (),
    }
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What an earlier reply called."""

    name: str = Field(min_length=1)
    arguments: str = Field(description="A JSON object, as text.")

    @pydantic.field_validator("arguments")
    @classmethod
    def _an_object(cls, text: str) -> str:
        try:
            whole = isinstance(json.loads(text or "{}"), dict)
        except (ValueError, RecursionError):
            whole = False
        if not whole:
            raise ValueError(
                'must be the text of a JSON object, such as "{}": a call whose arguments broke off '
                "cannot be part of a chat"
            )
        return text


class ToolCall(Body):
    """A call in an earlier reply."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    index: int | None = Field(None, description="Its number in a stream; not used.")
    function: CalledFunction


class Message(Body):
    """A turn of a chat."""

    not_here: ClassVar[dict[str, tuple[Any, ...]]] = {
        "function_call": (),
        "refusal": (),
        "annotations": ([],),
        "audio": (),
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = Field(None, description="For templates that write it.")
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = Field(None, description="Which call a `tool` message answers.")
    reasoning_content: str | None = Field(None, description="For templates that write it.")

    @pydantic.model_validator(mode="after")
    def _of_its_role(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("content: only an assistant's message may be without")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id: a tool's message has one, and no other")
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise ValueError(f"{name}: only an assistant's message has them")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


# Tools -------------------------------------------------------------------------------------


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: bool | None = Field(None, description="Calls of it must match the schema.")

    @pydantic.field_validator("parameters")
    @classmethod
    def _of_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema and schema.get("type", "object") != "object":
            raise ValueError('arguments are an object: the schema needs "type": "object"')
        if schema and not isinstance(schema.get("properties", {}), dict):
            raise ValueError('"properties" must be an object of JSON schemas')
        return schema


class Tool(Body):
    """A tool, which is a function."""

    not_here: ClassVar[dict[str, tuple[Any, ...]]] = {"custom": ()}
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function of a choice."""

    name: str


class NamedTool(Body):
    """The choice of one function."""

    not_here: ClassVar[dict[str, tuple[Any, ...]]] = {"custom": (), "allowed_tools": ()}
    type: Literal["function"]
    function: NamedFunction


def _distinct(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two functions have the name {twice[0]!r}")
    return tools


Tools = Annotated[
    list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), pydantic.AfterValidator(_distinct)
]


# Requests ----------------------------------------------------------------------------------


class ChatRequest(Generation):
    """Of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, description="Most new tokens.")
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="auto, the default, where there are tools."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: one call at most; true, the default, sets no limit."
    )
    reasoning_effort: Effort | None = None
    thinking_budget: int | None = Field(
        None, ge=0, description="Most tokens of reasoning before it is ended."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking."
    )
    logprobs: bool | None = Field(None, description="Of each token of the reply.")
    top_logprobs: int | None = Field(
        None, ge=0, le=TOP_LOGPROBS, description="And of so many likeliest tokens in its place."
    )

    @pydantic.field_validator("tool_choice")
    @classmethod
    def _of_the_tools(cls, choice: Any, info: pydantic.ValidationInfo) -> Any:
        if choice in (None, "none", "auto") or "tools" not in info.data:
            return choice
        tools = info.data["tools"] or []
        if not tools:
            raise ValueError("there are no tools to choose from")
        if isinstance(choice, NamedTool):
            names = [tool.function.name for tool in tools]
            if choice.function.name not in names:
                raise ValueError(f"{choice.function.name!r} is none of the tools: {names}")
        return choice

    @pydantic.field_validator("parallel_tool_calls")
    @classmethod
    def _with_tools(cls, parallel: bool | None, info: pydantic.ValidationInfo) -> bool | None:
        if parallel is not None and not info.data.get("tools", True):
            raise ValueError("there are no tools to call")
        return parallel

    @pydantic.model_validator(mode="after")
    def _one_budget(self) -> ChatRequest:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self

    @pydantic.model_validator(mode="after")
    def _one_format(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.grammar_field is not None and self.offered:
            raise ValueError(
                f'{self.grammar_field} leaves no place for calls: give tool_choice "none", or none'
                " of the tools"
            )
        return self

    @property
    def token_budget(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprobs_of(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered(self) -> list[Tool]:
        """The tools that the reply may call."""
        return [] if self.tool_choice == "none" else self.tools or []


class TokenizeRequest(Body):
    """Of /tokenize: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _one_kind(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of the two")
        if self.prompt is not None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs need messages")
        return self
