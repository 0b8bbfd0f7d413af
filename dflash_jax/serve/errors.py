"""Errors as OpenAI's API gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.requests import Request

INVALID = "invalid_request_error"
SERVER = "server_error"
OVERLOADED = "overloaded_error"
_OF_ANOTHER_TYPE = ("string_type", "int_type", "list_type", "model_type", "literal_error")

_ALTERNATIVES = ("str", "int", "float", "bool")  # and classes, whose names are capitalised


class ErrorBody(pydantic.BaseModel):
    """What went wrong, and where."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(pydantic.BaseModel):
    """The body of every reply that is not 2xx."""

    error: ErrorBody


class ApiError(Exception):
    """Ends a request with a status and a reason."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = sendable(message)
        param = None if param is None else sendable(param)
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.reply = ErrorReply(error=ErrorBody(message=message, type=kind, param=param, code=code))

    def response(self) -> JSONResponse:
        return JSONResponse(self.reply.model_dump(), self.status, self.headers)


def sendable(text: str) -> str:
    """Text that can be sent: a client's words may hold half characters."""
    return text.encode("utf-8", "backslashreplace").decode()


def on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    request.state.facts["error"] = error.reply.error.message
    return error.response()


def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """404, 405 and the like, which the framework raises."""
    status = getattr(error, "status_code", 500)
    message = str(getattr(error, "detail", error))
    headers = getattr(error, "headers", None)
    if status == 404:
        message = f"no such path: {request.url.path}"
    elif status == 405:
        message = f"{request.method} is not allowed on {request.url.path}"
    return on_api_error(request, ApiError(status, message, headers=headers))


def on_invalid(request: Request, error: Exception) -> JSONResponse:
    """A body that is no JSON, or has a value that the API does not take: 400."""
    assert isinstance(error, RequestValidationError)
    return on_api_error(request, _invalid(max(error.errors(), key=_says)))


def _says(found: Mapping[str, Any]) -> tuple[bool, int, int]:
    """How much an error says, of the several that the alternatives of a type each give.

    One of another type was hardly meant; then the deepest, and the furthest into a list.
    """
    where = found["loc"]
    index = max((part for part in where if isinstance(part, int)), default=-1)
    return found["type"] not in _OF_ANOTHER_TYPE, len(where), index


def _invalid(found: Mapping[str, Any]) -> ApiError:
    kind, where = found["type"], list(found["loc"][1:])
    if kind == "json_invalid":
        return ApiError(400, f"the body is no JSON: {found['ctx']['error']}", code="invalid_json")
    if kind in ("unsupported_parameter", "unknown_parameter"):
        # The name is the client's own, and not taken apart.
        param = ".".join(filter(None, (_dotted(where), found["ctx"]["name"])))
        return ApiError(400, found["msg"], param=param, code=kind)
    if not where:
        message = (
            f"the body must be a JSON object with content type application/json: {found['msg']}"
        )
        return ApiError(400, message, code="invalid_body")
    param = _dotted(where)
    return ApiError(400, f"{param}: {found['msg']}", param=param, code="invalid_value")


def _dotted(location: Sequence[Any]) -> str:
    """messages[0].content; without the names that pydantic gives to alternatives."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and not part[0].isupper() and part not in _ALTERNATIVES:
            name += f".{part}" if name else part
    return name
