"""What happens to every request: its id, its log line, its metrics, the key, the body's limit."""

from __future__ import annotations

import datetime
import logging
import re
import secrets
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_jax.serve import page
from dflash_jax.serve.errors import SERVER, ApiError
from dflash_jax.serve.logs import log_request
from dflash_jax.serve.metrics import Metrics

_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
UNKNOWN_PATH = "other"
_OPEN = ("/health", page.PATH)  # without a key


class Facts:
    """Gives a request its id, catches what nobody caught, and writes its log line.

    `request.state.facts` is that line: whoever learns something about the request adds it.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        facts: dict[str, Any] = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "request_id": request_id,
            "method": scope["method"],
            "path": scope["path"],
        }
        scope.setdefault("state", {}).update(facts=facts, request_id=request_id)
        status = 0  # none sent yet

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - the last to see it: a 500, and the log
            _log.exception("request %s failed", request_id)
            facts["error"] = f"{type(error).__name__}: {error}"
            if not status:
                failure = ApiError(500, "internal error: see the server's log", SERVER)
                await failure.response()(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - begin
            route = scope.get("route")
            self._metrics.on_request(getattr(route, "path", UNKNOWN_PATH), status, seconds)
            log_request({**facts, "status": status, "ms": round(seconds * 1e3, 3)})


class ApiKey:
    """Refuses requests without the key. /health and the page need none."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN and not self._right(scope):
            refusal = ApiError(
                401,
                "a wrong API key, or none: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            scope["state"]["facts"]["error"] = str(refusal)
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _right(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        same = secrets.compare_digest(given.strip().encode("latin-1"), self._key)
        return same and scheme.lower() == "bearer"


class BodyLimit:
    """Refuses larger bodies with 413, whether or not they say their length.

    Starlette's own middleware does the same, in a form that is not OpenAI's.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = self._limit
        length = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        too_large = length.isdecimal() and int(length[:20]) > self._limit

        async def receive_within_limit() -> Message:
            nonlocal left
            message = {} if too_large else await receive()
            left -= len(message.get("body", b""))
            if too_large or left < 0:
                # The framework hands it on to the handler of such errors.
                raise HTTPException(
                    413, f"the body is above this server's limit: {self._limit} bytes"
                )
            return message

        await self._app(scope, receive_within_limit, send)
