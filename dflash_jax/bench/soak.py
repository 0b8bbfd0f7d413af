"""Mixed traffic for a soak: cases whose replies are known, clients well and badly behaved."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_TIMEOUT_S = 600.0
_RULES = ("renewal", "ratio", "tiers", "fixed:0", "band:10")
_GETS = ("/", "/health", "/metrics", "/rule", "/v1/models", "/openapi.json")

Reply = tuple[tuple[str, str, str], ...]  # (text, finish reason, token_sha256) of each choice


@dataclasses.dataclass(frozen=True)
class Case:
    """A request whose reply does not depend on when it is sent."""

    path: str
    body: dict[str, Any]


def make_cases(texts: list[str], count: int, most_tokens: int, rng: random.Random) -> list[Case]:
    """Chats that share beginnings, texts and token ids; greedy and sampled, with every option."""
    cases = []
    for number in range(count):
        body: dict[str, Any] = {"max_tokens": rng.randint(1, most_tokens)}
        body["temperature"] = rng.choice([0, 0, 0.7, 1])
        body["seed"] = rng.randrange(2**64)
        if rng.random() < 0.3:
            body.update(top_k=rng.choice([0, 20]), top_p=0.95, min_p=0.02)
        if rng.random() < 0.2:
            body["stop"] = rng.choice([["\n"], ["the", " a"], ["."]])
        if rng.random() < 0.2:
            body["n"] = rng.randint(2, 3)
        if number % 4 == 3:
            body["prompt"] = rng.choice([rng.choice(texts), [rng.randrange(200) for _ in range(9)]])
            cases.append(Case(COMPLETIONS, body))
            continue
        messages = [{"role": "system", "content": texts[number % 2]}]
        for turn in range(rng.randint(0, 3)):  # the same earlier turns for all
            messages += [
                {"role": "user", "content": texts[turn % len(texts)]},
                {"role": "assistant", "content": texts[-1 - turn % len(texts)]},
            ]
        messages.append({"role": "user", "content": rng.choice(texts)})
        cases.append(Case(CHAT, {**body, "messages": messages}))
    return cases


# Bodies that are refused, and the status that says so.
BAD: list[tuple[str, bytes, int]] = [
    (COMPLETIONS, b"", 400),
    (COMPLETIONS, b"{not json", 400),
    (COMPLETIONS, b"[1, 2]", 400),
    (COMPLETIONS, b"\xff\xfe\x00", 400),
    (COMPLETIONS, b'{"prompt": ""}', 400),
    (COMPLETIONS, b'{"prompt": "x", "nonsense": 1}', 400),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": -1}', 400),
    (COMPLETIONS, b'{"prompt": "x", "temperature": 1e999}', 400),
    (COMPLETIONS, b'{"prompt": [-1]}', 400),
    (COMPLETIONS, b'{"prompt": [99999999]}', 400),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', 400),
    (COMPLETIONS, json.dumps({"prompt": [1] * 200_000}).encode(), 400),
    (COMPLETIONS, b'{"prompt": "' + b"x" * 5_000_000 + b'"}', 413),
    (CHAT, b'{"messages": []}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": null}]}', 400),
    (CHAT, b'{"messages": "hello"}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "model": "other"}', 404),
    ("/nowhere", b"{}", 404),
]


def ask(client: httpx.Client, case: Case, request_id: str = "", **changes: Any) -> Reply:
    """The reply to a case, streamed or whole as `changes` say.

    Raises:
      ValueError: not what a served request gets.
    """
    body = {**case.body, **changes}
    headers = {"X-Request-Id": request_id} if request_id else {}
    reply = client.post(case.path, json=body, headers=headers)
    if reply.status_code != 200:
        raise ValueError(f"status {reply.status_code}: {reply.text[:300]}")
    if not body.get("stream"):
        choices = reply.json()["choices"]
        return tuple(
            (one["text"] if "text" in one else one["message"]["content"], *_end(one))
            for one in choices
        )
    *events, last = reply.text.strip().split("\n\n")
    if last != "data: [DONE]":
        raise ValueError(f"a stream's last event is {last[:300]}")
    texts: collections.defaultdict[int, str] = collections.defaultdict(str)
    ends = {}
    for event in events:
        for one in json.loads(event.removeprefix("data: "))["choices"]:
            text = one["text"] if "text" in one else one["delta"].get("content", "")
            texts[one["index"]] += text
            if one["finish_reason"]:
                ends[one["index"]] = _end(one)
    return tuple((texts[index], *ends[index]) for index in sorted(ends))


def _end(choice: dict[str, Any]) -> tuple[str, str]:
    return choice["finish_reason"], choice["token_sha256"]


class Client(threading.Thread):
    """One client: does this and that until told to stop, and compares what it gets.

    counts: requests by kind. ids: of those that got an answer; gone: of those that it left.
    wrong: a line for each answer that is not the right one.
    """

    def __init__(
        self, url: str, number: int, cases: list[Case], known: list[Reply], stop: threading.Event
    ) -> None:
        super().__init__(name=f"client {number}", daemon=True)
        self._url, self._number = url, number
        self._cases, self._known = cases, known
        self._stop_event = stop
        self._rng = random.Random(number)
        self._sent = 0
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S)
        self.counts: collections.Counter[str] = collections.Counter()
        self.ids: list[str] = []
        self.gone: list[str] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        kinds: dict[Callable[[], None], int] = {
            self.whole: 34,
            self.streamed: 32,
            self.leave_stream: 9,
            self.leave_whole: 6,
            self.half_a_body: 3,
            self.bad_body: 10,
            self.look: 4,
            self.switch: 2,
        }
        with self._http:
            while not self._stop_event.is_set():
                (kind,) = self._rng.choices(list(kinds), list(kinds.values()))
                self.counts[kind.__name__] += 1
                try:
                    kind()
                except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                    self.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    def _id(self) -> str:
        self._sent += 1
        return f"soak-{self._number}-{self._sent}"

    def _draw(self) -> tuple[Case, Reply]:
        number = self._rng.randrange(len(self._cases))
        return self._cases[number], self._known[number]

    def _compare(self, **changes: Any) -> None:
        case, known = self._draw()
        changes["draft"] = self._rng.random() < 0.8
        request_id = self._id()
        got = ask(self._http, case, request_id, **changes)
        self.ids.append(request_id)
        if got != known:
            self.wrong.append(f"{request_id} {case}: {got} is not {known}")

    def whole(self) -> None:
        self._compare()

    def streamed(self) -> None:
        options = {"include_usage": True, "include_rounds": self._rng.random() < 0.5}
        self._compare(stream=True, stream_options=options)

    def leave_stream(self) -> None:
        """Reads a few events, then closes the connection."""
        case, _ = self._draw()
        request_id = self._id()
        body = {**case.body, "stream": True, "max_tokens": 200}
        headers = {"X-Request-Id": request_id}
        with httpx.stream(
            "POST", self._url + case.path, json=body, headers=headers, timeout=_TIMEOUT_S
        ) as reply:
            events = reply.iter_lines()
            for _ in range(self._rng.randint(1, 8)):
                next(events, None)
        self.gone.append(request_id)

    def leave_whole(self) -> None:
        """Has no patience."""
        case, _ = self._draw()
        request_id = self._id()
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(
                self._url + case.path,
                json={**case.body, "max_tokens": 200},
                headers={"X-Request-Id": request_id},
                timeout=self._rng.uniform(0.01, 0.5),
            )
        self.gone.append(request_id)

    def half_a_body(self) -> None:
        """Promises more bytes than it sends."""
        address = urllib.parse.urlsplit(self._url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f'{head}Content-Length: 100\r\n\r\n{{"messages": [{{'.encode())
            time.sleep(self._rng.uniform(0, 0.1))

    def bad_body(self) -> None:
        path, content, status = self._rng.choice(BAD)
        request_id = self._id()
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        reply = self._http.post(path, content=content, headers=headers)
        self.ids.append(request_id)
        if reply.status_code != status or "error" not in reply.json():
            self.wrong.append(f"{content[:80]!r}: status {reply.status_code}, not {status}")

    def look(self) -> None:
        request_id = self._id()
        path = self._rng.choice(_GETS)
        reply = self._http.get(path, headers={"X-Request-Id": request_id})
        self.ids.append(request_id)
        if reply.status_code != 200:
            self.wrong.append(f"{path}: status {reply.status_code}")

    def switch(self) -> None:
        request_id = self._id()
        rule = self._rng.choice(_RULES)
        reply = self._http.put("/rule", json={"rule": rule}, headers={"X-Request-Id": request_id})
        self.ids.append(request_id)
        if reply.status_code != 200:
            self.wrong.append(f"rule {rule}: {reply.status_code} {reply.text[:200]}")
