"""How replies are written: whole, and as chunks of a stream; of a completion and of a chat."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dflash_jax.serve.errors import ApiError
from dflash_jax.serve.logprobs import Known, of_chat, of_completion
from dflash_jax.serve.replies import Choice, Piece, Replies
from dflash_jax.serve.reply_parts import (
    Arguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    joined,
)
from dflash_jax.serve.responses import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FunctionCall,
    ToolCall,
)

_DONE = "data: [DONE]\n\n"


class Head:
    """What every chunk of a reply repeats."""

    def __init__(self, request_id: str, model: str) -> None:
        self.request_id = request_id
        self.created = int(time.time())
        self.model = model

    def fields(self, prefix: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.request_id}",
            "created": self.created,
            "model": self.model,
        }


@dataclasses.dataclass(frozen=True)
class Shape:
    """A completion's or a chat's way to write a reply's parts."""

    prefix: str
    chunk_object: str
    whole_type: type[Completion] | type[ChatCompletion]
    whole_choice: Callable[..., Any]
    opening: dict[str, Any] | None  # of a choice's first chunk
    part: Callable[[Part], dict[str, Any]]  # of a choice's chunk
    logprobs: Callable[[Sequence[Known]], ChatLogprobs | CompletionLogprobs]
    nothing: dict[str, Any]  # of a chunk without text, such as a choice's last

    def whole(self, head: Head, replies: Replies, parts: dict[int, list[Part]]) -> str:
        """The body of a reply that is not streamed."""
        choices = [
            self.whole_choice(
                choice,
                joined(parts[choice.index]),
                logprobs=None if choice.logprobs is None else self.logprobs(choice.logprobs),
                **_last_facts(choice),
            )
            for choice in replies.choices
        ]
        return self.whole_type(
            **head.fields(self.prefix),
            choices=choices,
            usage=replies.usage(),
            timings=replies.timings(),
        ).model_dump_json()

    def chunks(self, head: Head, replies: Replies, include_usage: bool) -> Chunks:
        return Chunks(self, head, replies, include_usage)


def _last_facts(choice: Choice) -> dict[str, Any]:
    return {
        "finish_reason": choice.finish_reason,
        "seed": choice.seed,
        "token_sha256": choice.token_sha256,
    }


class Chunks:
    """Pieces to server-sent events."""

    def __init__(self, shape: Shape, head: Head, replies: Replies, include_usage: bool) -> None:
        self._shape = shape
        self._replies = replies
        self._include_usage = include_usage
        self._fields = {"object": shape.chunk_object, **head.fields(shape.prefix)}
        if include_usage:
            self._fields["usage"] = None  # as OpenAI does, in all chunks but the last
        self._opened: set[int] = set()

    def of(self, piece: Piece) -> Iterator[str]:
        shape = self._shape
        if piece.index not in self._opened:
            self._opened.add(piece.index)
            if shape.opening is not None:
                yield self._chunk(piece.index, shape.opening)
        chunks = [shape.part(part) for part in piece.parts]
        if piece.logprobs:
            first = chunks[0] if chunks else shape.nothing
            chunks[:1] = [{**first, "logprobs": shape.logprobs(piece.logprobs).model_dump()}]
        if piece.round is not None:
            chunks.append({**shape.nothing, "round": piece.round.model_dump()})
        for chunk in chunks:
            yield self._chunk(piece.index, chunk)
        if piece.finish_reason is not None:
            choice = self._replies.choices[piece.index]
            yield self._chunk(piece.index, {**shape.nothing, **_last_facts(choice)})

    def end(self) -> Iterator[str]:
        """The usage, if it was asked for, and the end."""
        if self._include_usage:
            usage, timings = self._replies.usage(), self._replies.timings()
            fields = {"usage": usage.model_dump(), "timings": timings.model_dump()}
            yield _event({**self._fields, "choices": [], **fields})
        yield _DONE

    def error(self, error: ApiError) -> str:
        return _event(error.reply.model_dump())

    def _chunk(self, index: int, fields: dict[str, Any]) -> str:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **fields}
        return _event({**self._fields, "choices": [choice]})


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _text(parts: Sequence[Part], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _completion(choice: Choice, parts: Sequence[Part], **facts: Any) -> CompletionChoice:
    return CompletionChoice(index=choice.index, text=_text(parts, Content), **facts)


def _chat(choice: Choice, parts: Sequence[Part], **facts: Any) -> ChatChoice:
    content, reasoning = _text(parts, Content), _text(parts, Reasoning)
    calls: list[ToolCall] = []
    for part in parts:
        if isinstance(part, CallStart):
            calls.append(
                ToolCall(id=_call_id(), function=FunctionCall(name=part.name, arguments=""))
            )
        elif isinstance(part, Arguments):
            calls[part.index].function.arguments += part.text
    message = ChatMessage(
        content=content if content or not (reasoning or calls) else None,
        reasoning_content=reasoning or None,
        tool_calls=calls or None,
    )
    return ChatChoice(index=choice.index, message=message, **facts)


def _completion_part(part: Part) -> dict[str, Any]:
    assert isinstance(part, Content)  # a text is not taken apart
    return {"text": part.text}


def _chat_part(part: Part) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"delta": {"content": part.text}}
    if isinstance(part, Reasoning):
        return {"delta": {"reasoning_content": part.text}}
    call: dict[str, Any] = {"index": part.index}
    if isinstance(part, CallStart):
        call |= {"id": _call_id(), "type": "function"}
        call["function"] = {"name": part.name, "arguments": ""}
    else:
        call["function"] = {"arguments": part.text}
    return {"delta": {"tool_calls": [call]}}


COMPLETION = Shape(
    prefix="cmpl",
    chunk_object="text_completion",
    whole_type=Completion,
    whole_choice=_completion,
    opening=None,
    part=_completion_part,
    logprobs=of_completion,
    nothing={"text": ""},
)
CHAT = Shape(
    prefix="chatcmpl",
    chunk_object="chat.completion.chunk",
    whole_type=ChatCompletion,
    whole_choice=_chat,
    opening={"delta": {"role": "assistant", "content": ""}},
    part=_chat_part,
    logprobs=of_chat,
    nothing={"delta": {}},
)
