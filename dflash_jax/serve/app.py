"""The application: its paths, and how a request becomes streams and a reply."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import anyio.to_thread
import fastapi
import prometheus_client
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from dflash_jax import __version__
from dflash_jax.decode.sampling import Sampling
from dflash_jax.engine import Request as EngineRequest
from dflash_jax.engine.grammars import Grammar
from dflash_jax.errors import InputError
from dflash_jax.serve import chats, errors, page, responses, shapes
from dflash_jax.serve.chat_requests import ChatRequest, TokenizeRequest
from dflash_jax.serve.errors import OVERLOADED, ApiError, ErrorReply
from dflash_jax.serve.logprobs import LogprobReader
from dflash_jax.serve.metrics import Metrics
from dflash_jax.serve.middleware import ApiKey, BodyLimit, Facts
from dflash_jax.serve.replies import Choice, ClientGoneError, Piece, Replies, shutting_down
from dflash_jax.serve.reply_parts import Part
from dflash_jax.serve.requests import (
    MAX_SEED,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    RuleRequest,
)
from dflash_jax.serve.service import Options, ServedModel, Service
from dflash_jax.serve.text import ReplyText

T = TypeVar("T")

# A seed for a request without one: a number that JSON readers of every language keep whole.
_RANDOM_SEED_BITS = 53
_CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody but the log sees it
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "Refused; the message says why."},
    "5XX": {"model": ErrorReply, "description": "Not possible now."},
}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAM_TOO: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}},
    **_ERRORS,
}
router = fastapi.APIRouter(responses=_ERRORS)


def make_app(service: Service, options: Options) -> fastapi.FastAPI:
    """The ASGI application around a service."""
    app = fastapi.FastAPI(
        title="dflash_jax",
        version=__version__,
        docs_url=None,  # these pages would load code from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    app.state.options = options
    app.state.metrics = Metrics(service)
    # One thread for tokenising: a huge prompt delays other prompts, never the event loop.
    app.state.text_work = anyio.CapacityLimiter(1)
    app.include_router(router)
    app.include_router(page.router)
    app.add_exception_handler(ApiError, errors.on_api_error)
    app.add_exception_handler(RequestValidationError, errors.on_invalid)
    app.add_exception_handler(HTTPException, errors.on_http_error)
    # The last added is the outermost.
    app.add_middleware(BodyLimit, limit=options.max_body_bytes)
    if options.api_key:
        app.add_middleware(ApiKey, key=options.api_key)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(Facts, metrics=app.state.metrics)
    return app


def ready_model(request: Request) -> ServedModel:
    """The model, once it is ready: ApiError 503 before, and when shutting down."""
    service: Service = request.app.state.service
    if service.turns.closed:
        raise shutting_down()
    if service.model is None:
        raise ApiError(
            503,
            f"the model is not ready yet: {service.progress}",
            OVERLOADED,
            code="starting",
            headers={"Retry-After": "5"},
        )
    return service.model


# State and models --------------------------------------------------------------------------


@router.get("/health", responses={503: {"model": responses.Health}})
async def health(request: Request, response: Response) -> responses.Health:
    """200 when ready; 503 while the model is loaded, compiled and checked, and when stopping."""
    service: Service = request.app.state.service
    if service.status != "ok":
        response.status_code = 503
    return responses.Health(
        status=service.status,
        progress=service.progress,
        waiting=service.turns.waiting,
        running=service.turns.running,
    )


@router.get("/metrics", response_class=fastapi.responses.PlainTextResponse)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    text = prometheus_client.generate_latest(request.app.state.metrics.registry)
    return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


def _card(model: ServedModel) -> responses.ModelCard:
    return responses.ModelCard(
        id=model.name, created=model.created, max_model_len=model.context_limit
    )


@router.get("/v1/models")
async def models(request: Request) -> responses.ModelList:
    return responses.ModelList(data=[_card(ready_model(request))])


@router.get("/v1/models/{name:path}")
async def model_of_name(name: str, request: Request) -> responses.ModelCard:
    return _card(_named(request, name))


def _named(request: Request, name: str | None) -> ServedModel:
    """The model that a request names; ApiError 404 for another."""
    model = ready_model(request)
    if name is not None and name != model.name:
        raise ApiError(
            404,
            f"no model {name[:200]!r} here: this server has {model.name!r}",
            param="model",
            code="model_not_found",
        )
    return model


@router.get("/rule")
async def rule(request: Request) -> responses.RuleState:
    """How many nodes are verified, and what the start measured."""
    return _rule_state(ready_model(request))


@router.put("/rule")
async def switch_rule(body: RuleRequest, request: Request) -> responses.RuleState:
    """Another rule, from the next reply on: of all clients, whose tokens stay the same."""
    model = ready_model(request)
    try:
        model.drivers.drafted.switch(body.rule)
    except InputError as error:
        raise ApiError(400, str(error), param="rule", code="invalid_value") from error
    request.state.facts["rule"] = body.rule
    return _rule_state(model)


def _rule_state(model: ServedModel) -> responses.RuleState:
    driver = model.drivers.drafted
    prices = [
        responses.Price(width=width, context_length=context, ms=ms)
        for width, context, ms in driver.decoder.prices
    ]
    return responses.RuleState(
        rule=driver.rule, rules=list(driver.rules), widths=list(driver.widths), prices=prices
    )


# Text and tokens ---------------------------------------------------------------------------


async def _text_work(request: Request, work: Callable[[], T]) -> T:
    """Runs work on text off the event loop; an InputError is the client's: ApiError 400."""
    try:
        return await anyio.to_thread.run_sync(work, limiter=request.app.state.text_work)
    except InputError as error:
        raise ApiError(400, str(error), code="invalid_value") from error


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> responses.Tokens:
    """Token ids, as the other paths would have them for the same prompt or messages."""
    model = _named(request, body.model)

    def work() -> list[int]:
        if body.messages is None:
            return model.tokenizer.encode(body.prompt or "")
        variables = body.chat_template_kwargs or {}
        chats.check_variables(variables, model.chat_format)
        text = model.chat_format.render(body.messages, body.tools or [], variables)
        return model.tokenizer.encode(text)

    tokens = await _text_work(request, work)
    return responses.Tokens(tokens=tokens, count=len(tokens), max_model_len=model.context_limit)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> responses.PromptText:
    """The text of token ids, special tokens included."""
    model = _named(request, body.model)
    _require_ids(body.tokens, model, "tokens")
    work = functools.partial(model.tokenizer.decode, body.tokens, skip_special=False)
    return responses.PromptText(prompt=await _text_work(request, work))


def _require_ids(tokens: Sequence[int], model: ServedModel, param: str) -> None:
    if tokens and max(tokens) >= model.vocab_size:
        raise ApiError(
            400,
            f"{param}: token id {max(tokens)} is outside 0..{model.vocab_size - 1}",
            param=param,
            code="invalid_value",
        )


# Replies -----------------------------------------------------------------------------------


@router.post("/v1/completions", response_model=responses.Completion, responses=_STREAM_TOO)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continues a text or token ids."""
    model = _named(request, body.model)

    def encode() -> list[list[int]]:
        return [
            model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompts
        ]

    prompts = await _text_work(request, encode)
    grammar = await _text_work(request, lambda: body.grammar(model.grammar_vocabulary))
    return await _reply(body, prompts, "prompt", model, request, shapes.COMPLETION, grammar)


@router.post("/v1/chat/completions", response_model=responses.ChatCompletion, responses=_STREAM_TOO)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answers messages, through the checkpoint's own template."""
    model = _named(request, body.model)
    work = functools.partial(chats.prepare, body, model.chat_format, model.grammar_vocabulary)
    chat = await _text_work(request, work)
    return await _reply(
        body, [chat.prompt], "messages", model, request, shapes.CHAT, chat.grammar, chat
    )


async def _reply(
    body: Generation,
    prompts: list[list[int]],
    param: str,
    model: ServedModel,
    request: Request,
    shape: shapes.Shape,
    grammar: Grammar | None,
    chat: chats.Chat | None = None,
) -> Response:
    """Decodes the replies to all prompts, streamed or whole."""
    options: Options = request.app.state.options
    for prompt in prompts:
        _require_fit(prompt, model, options, param)
    service: Service = request.app.state.service
    choices = _choices(body, prompts, model, grammar, chat)
    replies = Replies(service.turns, choices, options.request_timeout_s)
    head = shapes.Head(request.state.request_id, model.name)
    replies.submit(draft=body.draft is not False)
    facts = {"user": body.user, "stream": bool(body.stream), "draft": body.draft is not False}
    request.state.facts.update((name, value) for name, value in facts.items() if value is not None)
    note = functools.partial(_note, request, replies)
    pieces = replies.pieces()
    try:
        # Nothing is sent before the first token: until then a refusal can have its status.
        async with _leaving_with(request, replies):
            first = await anext(pieces)
            if not body.stream:
                parts: dict[int, list[Part]] = {choice.index: [] for choice in choices}
                parts[first.index] += first.parts
                async for piece in pieces:
                    parts[piece.index] += piece.parts
                note()
                return Response(shape.whole(head, replies, parts), media_type="application/json")
    except ClientGoneError:
        note()
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    except BaseException:
        replies.cancel()
        note()
        raise
    events = _events(first, pieces, shape.chunks(head, replies, body.include_usage), request)
    return EventStream(events, replies, note)


def _require_fit(prompt: list[int], model: ServedModel, options: Options, param: str) -> None:
    """ApiError 400 for a prompt that cannot be decoded."""
    if not prompt:
        raise ApiError(400, f"{param}: the prompt has no tokens", param=param, code="invalid_value")
    limit = min(options.max_prompt_tokens or model.context_limit, model.context_limit - 1)
    if len(prompt) > limit:
        raise ApiError(
            400,
            f"{param}: a prompt of {len(prompt)} tokens; this server takes at most {limit}, of a "
            f"context of {model.context_limit} that prompt and reply share",
            param=param,
            code="context_length_exceeded",
        )
    _require_ids(prompt, model, param)


def _choices(
    body: Generation,
    prompts: list[list[int]],
    model: ServedModel,
    grammar: Grammar | None,
    chat: chats.Chat | None,
) -> list[Choice]:
    """n choices for every prompt; choice k of each draws with seed + k."""
    _require_ids(body.stop_token_ids or (), model, "stop_token_ids")
    _require_ids([int(token) for token in body.logit_bias or ()], model, "logit_bias")
    stops, top = body.stop_ids(model.stop_token_ids), body.logprobs_of
    rules = body.rules(grammar, chat.thinking if chat else None, top is not None)
    count = body.n or 1
    seed = secrets.randbits(_RANDOM_SEED_BITS) if body.seed is None else body.seed
    choices: list[Choice] = []
    for prompt in map(tuple, prompts):
        for k in range(count):
            sampling = Sampling(
                1.0 if body.temperature is None else body.temperature,
                body.top_k or 0,
                1.0 if body.top_p is None else body.top_p,
                body.min_p or 0.0,
                (seed + k) % (MAX_SEED + 1),
            )
            budget = body.token_budget or model.context_limit
            wanted = EngineRequest(prompt, sampling, budget, stops, rules)
            shown = () if chat is None else chats.TAGS
            text = ReplyText(model.tokenizer, body.stops, shown, rules.min_tokens)
            parser = None if chat is None else chat.parser()
            reader = None if top is None else LogprobReader(model.grammar_vocabulary, top)
            rounds_too = body.include_rounds
            choices.append(Choice(len(choices), wanted, text, parser, rounds_too, reader))
    return choices


@contextlib.asynccontextmanager
async def _leaving_with(request: Request, replies: Replies) -> AsyncIterator[None]:
    """Cancels the replies when the client disconnects meanwhile."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        replies.leave()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


async def _events(
    first: Piece, pieces: AsyncIterator[Piece], chunks: shapes.Chunks, request: Request
) -> AsyncIterator[str]:
    """Server-sent events; an error after the first is an event too."""
    try:
        for event in chunks.of(first):
            yield event
        async for piece in pieces:
            for event in chunks.of(piece):
                yield event
        for event in chunks.end():
            yield event
    except ApiError as error:
        request.state.facts["error"] = str(error)
        yield chunks.error(error)


class EventStream(StreamingResponse):
    """A stream that cancels its replies when it ends before them, for whatever reason."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[str], replies: Replies, note: Callable[[], None]
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._replies = replies
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not all(choice.ended for choice in self._replies.choices):
                self._replies.gone = True
                self._replies.cancel()
            self._note()


def _note(request: Request, replies: Replies) -> None:
    """A finished request's facts, to the log and the metrics."""
    request.app.state.metrics.on_replies(replies)
    first = replies.first_token_s()
    request.state.facts.update(
        replies.usage().model_dump(),
        **replies.timings().model_dump(),
        first_token_ms=None if first is None else round(first * 1e3, 3),
        finish_reasons=[choice.finish_reason for choice in replies.choices],
        disconnected=replies.gone,
    )
