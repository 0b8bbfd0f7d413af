"""What clients get. Serialised with the fields that were set: an unset one is left out."""

from __future__ import annotations

from typing import Literal

import pydantic

FinishReason = Literal["stop", "length", "tool_calls"]
Status = Literal["starting", "ok", "stopping"]


class CompletionDetails(pydantic.BaseModel):
    """Of the replies' tokens."""

    reasoning_tokens: int  # the tags around the reasoning included


class PromptDetails(pydantic.BaseModel):
    """Of the prompts' tokens."""

    cached_tokens: int  # known from earlier prompts: not read again


class Usage(pydantic.BaseModel):
    """Tokens of a request, all its choices together."""

    prompt_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens: int
    total_tokens: int
    drafted: int  # nodes verified
    accepted: int  # of them, those that became tokens of the reply
    rounds: int  # verifications; the prompt's forward is none
    completion_tokens_details: CompletionDetails


class Timings(pydantic.BaseModel):
    """Where a request's time went, all its choices together."""

    queue_ms: float  # until its first choice's turn came
    prompt_ms: float
    prompt_tok_s: float | None  # of the tokens that were read
    decode_ms: float
    decode_tok_s: float | None
    tokens_per_round: float | None
    mean_width: float | None


class TopLogprob(pydantic.BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(pydantic.BaseModel):
    content: list[TokenLogprob]  # of every token, reasoning and calls included
    refusal: None = None


class CompletionLogprobs(pydantic.BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]  # characters before the token


class _Choice(pydantic.BaseModel):
    index: int
    finish_reason: FinishReason | None
    seed: int  # with it, the same request gives the same reply
    token_sha256: str  # over all the reply's ids as little-endian int32


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None


class FunctionCall(pydantic.BaseModel):
    name: str
    arguments: str  # JSON


class ToolCall(pydantic.BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(pydantic.BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None  # None: reasoning or calls alone
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None


class ChatChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class _Reply(pydantic.BaseModel):
    id: str
    created: int  # seconds since 1970
    model: str


class Completion(_Reply):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings


class ChatCompletion(_Reply):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class RoundPiece(pydantic.BaseModel):
    """A token of a reply, and the text that it released: none while a character is incomplete."""

    token: int
    text: str
    drafted: bool  # a node that landed; else the target's own pick


class Round(pydantic.BaseModel):
    """What one round gave."""

    context_length: int  # committed tokens before the anchor; 0: the prompt's forward
    width: int  # nodes verified
    round_ms: float
    pieces: list[RoundPiece]
    prices_ms: list[float | None] | None  # of width 0, 1, …, if the rule knows any


class Price(pydantic.BaseModel):
    """A round's time as the start measured it."""

    width: int
    context_length: int
    ms: float


class RuleState(pydantic.BaseModel):
    """How widths are chosen."""

    rule: str
    rules: list[str]  # that may be given; P is a percentage, K one of the widths
    widths: list[int]  # that are compiled
    prices: list[Price]


class ModelCard(pydantic.BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dflash_jax"
    max_model_len: int  # tokens of prompt and reply together


class ModelList(pydantic.BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(pydantic.BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class PromptText(pydantic.BaseModel):
    prompt: str


class Health(pydantic.BaseModel):
    status: Status
    progress: str  # of the start
    waiting: int
    running: int
