"""The server keeps to its own OpenAPI document, whatever it is sent."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
import schemathesis
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from dflash_jax.engine import Request
from dflash_jax.engine.turns import Drivers
from tests.serve import tiny_server

# Of all the checks, those that hold without knowing the tokenizer: a valid body may name another
# model or have a prompt that is too long.
CHECKS = (
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
    openapi_checks.unsupported_method,
)

# Paths -> fields with which a body is whole.
NEEDED = {
    "/v1/completions": ["prompt"],
    "/v1/chat/completions": ["messages"],
    "/tokenize": ["prompt"],
}


class Short:
    """A driver that gives three tokens at most."""

    def __init__(self, driver) -> None:
        self._driver = driver

    def __getattr__(self, name: str):
        return getattr(self._driver, name)

    def stream(self, request: Request):
        short = dataclasses.replace(request, max_tokens=min(request.max_tokens, 3))
        return self._driver.stream(short)


@pytest.fixture(scope="module")
def document():
    model = tiny_server.model()
    model = dataclasses.replace(model, drivers=Drivers(*map(Short, model.drivers)))
    with tiny_server.running(load=lambda say: model) as server:
        while server.http.get("/health").status_code != 200:
            pass
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        assert server.idle(30)


def statuses(operation, mode) -> set[int]:
    """What the server answers to some requests, each of which keeps to the document."""
    seen = set()
    needed = NEEDED.get(operation.path)

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=40,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode), hypothesis.strategies.booleans())
    def check(case, small):
        # With every field at random, some two always contradict each other.
        if mode is schemathesis.GenerationMode.POSITIVE and needed and small:
            case.body = {name: case.body[name] for name in needed if name in case.body}
        seen.add(case.call_and_validate(checks=CHECKS).status_code)

    check()
    return seen


@pytest.mark.slow
def test_requests_that_keep_to_the_document(document):
    for operation in document.get_all_operations():
        seen = statuses(operation.ok(), schemathesis.GenerationMode.POSITIVE)
        # Names of models and of rules cannot be guessed from the document.
        assert 200 in seen or "{" in operation.ok().path or operation.ok().path == "/rule"


@pytest.mark.slow
def test_requests_that_do_not(document):
    for operation in document.get_all_operations():
        if operation.ok().body:
            seen = statuses(operation.ok(), schemathesis.GenerationMode.NEGATIVE)
            assert seen <= {400, 404}
