"""Clients of a server, for a process that does not share the server's interpreter lock."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from typing import Any, NamedTuple

import httpx

_TIMEOUT_S = 600.0
_PATH = "/v1/completions"


class Seen(NamedTuple):
    """A streamed reply as its client had it. Times are `time.perf_counter`'s, which on Linux all
    processes share."""

    sent: float
    first: float  # the first bytes of its events
    last: float
    tokens: int
    token_sha256: str


@functools.cache
def _client() -> httpx.Client:
    return httpx.Client(timeout=_TIMEOUT_S)


def _body(prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }


def _seen(sent: float, first: float, last: float, content: bytes) -> Seen:
    *events, done = content.decode().strip().split("\n\n")
    assert done == "data: [DONE]", done
    end, usage = (json.loads(event.removeprefix("data: ")) for event in events[-2:])
    tokens = usage["usage"]["completion_tokens"]
    return Seen(sent, first, last, tokens, end["choices"][0]["token_sha256"])


def stream(url: str, prompt: list[int], options: dict[str, Any]) -> Seen:
    """One streamed completion of token ids; raises httpx.HTTPStatusError when refused."""
    sent, content, first, last = time.perf_counter(), b"", 0.0, 0.0
    with _client().stream("POST", url + _PATH, json=_body(prompt, options)) as reply:
        reply.raise_for_status()
        for piece in reply.iter_raw():
            last = time.perf_counter()
            first = first or last
            content += piece
    return _seen(sent, first, last, content)


def crowd(url: str, prompts: list[list[int]], options: dict[str, Any]) -> list[Seen | str]:
    """As many clients at once as there are prompts; a line instead of what one failed to get."""

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> Seen | str:
        sent, content, first, last = time.perf_counter(), b"", 0.0, 0.0
        try:
            async with client.stream("POST", url + _PATH, json=_body(prompt, options)) as reply:
                if reply.status_code != 200:
                    return f"status {reply.status_code}"
                async for piece in reply.aiter_raw():
                    last = time.perf_counter()
                    first = first or last
                    content += piece
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return _seen(sent, first, last, content)

    async def all_of_them() -> list[Seen | str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    return asyncio.run(all_of_them())
