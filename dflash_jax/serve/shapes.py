"""How replies are written: whole, and as chunks of a stream; of a completion and of a chat."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from dflash_jax.serve.errors import ApiError
from dflash_jax.serve.replies import Choice, Piece, Replies
from dflash_jax.serve.responses import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
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
    """A completion's or a chat's way to write text."""

    prefix: str
    chunk_object: str
    whole_type: type[Completion] | type[ChatCompletion]
    whole_choice: Callable[..., Any]
    opening: dict[str, Any] | None  # of a choice's first chunk
    text: Callable[[str], dict[str, Any]]  # of a choice's chunk
    closing: dict[str, Any]  # of a choice's last chunk

    def whole(self, head: Head, replies: Replies, texts: dict[int, str]) -> str:
        """The body of a reply that is not streamed."""
        choices = [
            self.whole_choice(choice, texts[choice.index], **_last_facts(choice))
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
        if piece.text:
            yield self._chunk(piece.index, shape.text(piece.text))
        if piece.finish_reason is not None:
            choice = self._replies.choices[piece.index]
            yield self._chunk(piece.index, {**shape.closing, **_last_facts(choice)})

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


COMPLETION = Shape(
    prefix="cmpl",
    chunk_object="text_completion",
    whole_type=Completion,
    whole_choice=lambda choice, text, **facts: CompletionChoice(
        index=choice.index, text=text, **facts
    ),
    opening=None,
    text=lambda text: {"text": text},
    closing={"text": ""},
)
CHAT = Shape(
    prefix="chatcmpl",
    chunk_object="chat.completion.chunk",
    whole_type=ChatCompletion,
    whole_choice=lambda choice, text, **facts: ChatChoice(
        index=choice.index, message=ChatMessage(content=text), **facts
    ),
    opening={"delta": {"role": "assistant", "content": ""}},
    text=lambda text: {"delta": {"content": text}},
    closing={"delta": {}},
)
