"""Many clients at once: turns, limits, disconnects, and a slot that stays clean."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import random
import threading
import time

import httpx
import openai
import pytest

from dflash_jax.decode.executables import CompileCounter
from dflash_jax.decode.sampling import Sampling
from dflash_jax.engine import Request, grammars
from dflash_jax.errors import InputError
from tests.decode import tiny
from tests.serve import tiny_server

PROMPT = "hello wo"
SLOW_S = 0.05  # a round of a slow server


def encode(text: str) -> list[int]:
    return tiny_server.tokenizer().encode(text)


@pytest.fixture(scope="module")
def slow():
    with tiny_server.running(slow=SLOW_S, max_queue=3) as running:
        yield running


def start_stream(server, **body):
    """An open streamed reply of which the first bytes have come."""
    settings = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "stream": True, **body}
    client = httpx.Client(base_url=server.url, timeout=30)
    reply = client.send(client.build_request("POST", "/v1/completions", json=settings), stream=True)
    assert reply.status_code == 200
    events = reply.iter_lines()
    assert next(events).startswith("data: ")
    return client, reply, events


def check_clean(server) -> None:
    """The next reply is what it is alone."""
    assert server.idle()
    got = server.post("/v1/completions", prompt=PROMPT, max_tokens=6, temperature=0).json()
    wanted = tiny_server.alone(encode(PROMPT), Sampling(), 6)
    choice = got["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_sha256"]) == wanted


# Disconnects -------------------------------------------------------------------------------


def test_a_streaming_client_that_leaves_stops_within_a_round(slow):
    client, _, _ = start_stream(slow)
    assert slow.service.turns.running == 1
    client.close()
    begin = time.monotonic()
    assert slow.idle()
    assert time.monotonic() - begin < 10 * SLOW_S  # of 300 rounds
    check_clean(slow)


def test_a_client_that_leaves_while_it_waits_for_the_whole_reply(slow):
    body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow.url}/v1/completions", json=body, timeout=4 * SLOW_S)
    begin = time.monotonic()
    assert slow.idle()
    assert time.monotonic() - begin < 10 * SLOW_S
    check_clean(slow)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue(slow, stream):
    client, _, events = start_stream(slow)
    body = {"prompt": PROMPT, "n": 3, "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow.url}/v1/completions", json=body, timeout=4 * SLOW_S)
    end = time.monotonic() + 2
    while slow.service.turns.waiting and time.monotonic() < end:
        time.sleep(0.01)
    assert (slow.service.turns.waiting, slow.service.turns.running) == (0, 1)
    assert next(line for line in events if line)  # the one that runs goes on
    client.close()
    check_clean(slow)


def test_several_choices_end_with_their_client(slow):
    client, _, _ = start_stream(slow, n=3)
    assert slow.service.turns.waiting == 2
    client.close()
    check_clean(slow)


def test_a_prompt_can_be_interrupted_between_its_chunks():
    drivers = tiny_server.drivers()
    prompt = tuple(token % 256 for token in tiny.prompt_of(10 * tiny.CHUNK))
    asked = []

    def interrupted() -> bool:
        asked.append(True)
        return len(asked) > 4

    for driver in drivers:
        asked.clear()
        with driver.stream(Request(prompt, max_tokens=4)) as stream:
            assert list(stream.rounds(interrupted)) == []
            assert (stream.finish_reason, stream.tokens, len(asked)) == (None, [], 5)
        text, _, _ = tiny_server.alone(encode(PROMPT), Sampling(), 6)
        tokens, _, _ = tiny.decode(driver, Request(tuple(encode(PROMPT)), max_tokens=6))
        assert tiny_server.tokenizer().decode(tokens) == text


def test_a_stream_that_fails_is_a_500_and_the_next_is_clean(server, monkeypatch):
    driver = tiny_server.drivers().drafted
    verify = driver.decoder.executables.verify

    def broken(*_):
        raise RuntimeError("the device is gone")

    for width in verify:
        monkeypatch.setitem(verify, width, broken)
    reply = server.post("/v1/completions", prompt=PROMPT)
    assert reply.status_code == 500
    body = {"prompt": PROMPT, "stream": True}
    lines = httpx.post(f"{server.url}/v1/completions", json=body).text.split("\n\n")
    assert "decoding failed" in json.loads(lines[-2][6:])["error"]["message"]
    with pytest.raises(openai.APIError, match="decoding failed"):
        list(server.openai.completions.create(model="tiny", prompt=PROMPT, stream=True))
    monkeypatch.undo()
    check_clean(server)


def test_a_grammar_beyond_its_limits_is_refused_in_mid_reply_and_the_next_is_clean(
    server, monkeypatch
):
    few = functools.partial(grammars.LLParserLimits, max_items_in_row=10)
    monkeypatch.setattr(grammars, "LLParserLimits", few)
    ambiguous = {"grammar": 'start: a\na: a a | "x" | "y"'}
    body = {"prompt": PROMPT, "structured_outputs": ambiguous, "min_tokens": 12}
    for draft in (True, False):
        reply = server.post("/v1/completions", **body, draft=draft)
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
        assert "too complex" in error["message"]
        assert "non-verbose" not in error["message"]
        lines = server.post("/v1/completions", **body, draft=draft, stream=True).text.split("\n\n")
        assert json.loads(lines[0][6:])["choices"]  # it had begun
        assert json.loads(lines[-2][6:])["error"] == error
    monkeypatch.undo()
    check_clean(server)


# Limits ------------------------------------------------------------------------------------


def test_a_full_queue_is_429_with_retry_after(slow):
    client, _, _ = start_stream(slow)
    others = [
        threading.Thread(target=slow.post, args=["/v1/completions"], kwargs=body)
        for body in [{"prompt": PROMPT, "max_tokens": 1}] * 3
    ]
    for other in others:
        other.start()
    end = time.monotonic() + 2
    while slow.service.turns.waiting < 3 and time.monotonic() < end:
        time.sleep(0.01)
    for stream in (True, False):
        reply = slow.post("/v1/completions", prompt=PROMPT, stream=stream)
        assert reply.status_code == 429
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert reply.json()["error"]["code"] == "queue_full"
    with pytest.raises(openai.RateLimitError):
        slow.openai.completions.create(model="tiny", prompt=PROMPT)
    client.close()
    for other in others:
        other.join(10)
    check_clean(slow)


def test_requests_time_out():
    with tiny_server.running(slow=SLOW_S, request_timeout_s=0.5) as server:
        body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0}
        reply = server.post("/v1/completions", **body)
        assert reply.status_code == 504
        assert "0.5 s" in reply.json()["error"]["message"]
        text = server.post("/v1/completions", **body, stream=True).text
        last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "timeout"
        check_clean(server)


def test_bodies_and_prompts_have_limits():
    with tiny_server.running(max_body_bytes=1000, max_prompt_tokens=20) as server:
        for kind in ("length", "chunked"):
            body = json.dumps({"prompt": "x" * 2000}).encode()
            content = body if kind == "length" else iter([body[:500], body[500:]])
            headers = {"Content-Type": "application/json"}
            reply = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
            assert reply.status_code == 413
            assert "limit: 1000 bytes" in reply.json()["error"]["message"]
            assert "x-request-id" in reply.headers
        reply = server.post("/v1/completions", prompt=[1] * 21)
        assert reply.status_code == 400
        assert "21 tokens" in reply.json()["error"]["message"]
        assert "at most 20" in reply.json()["error"]["message"]
        assert server.post("/v1/completions", prompt=[1] * 20, max_tokens=1).status_code == 200


def test_the_api_key():
    with tiny_server.running(api_key=tiny_server.KEY) as server:
        assert server.http.get("/health").status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer no"},
            {"Authorization": tiny_server.KEY},
            {"Authorization": "Bearer sécret".encode("latin-1")},
        ):
            for path in ("/v1/models", "/metrics", "/nowhere"):
                reply = server.http.get(path, headers=headers)
                assert reply.status_code == 401
                assert reply.json()["error"]["code"] == "invalid_api_key"
                assert "x-request-id" in reply.headers
        assert [model.id for model in server.openai.models.list()] == ["tiny"]
        wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()


# Start and stop ----------------------------------------------------------------------------


def test_not_ready_while_loading():
    go = threading.Event()

    def load(say):
        say("1 of 9 programs ready")
        assert go.wait(10)
        return tiny_server.model()

    with tiny_server.running(load=load) as server:
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        assert health.json()["progress"] == "1 of 9 programs ready"
        reply = server.post("/v1/completions", prompt="x")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        assert "1 of 9 programs ready" in reply.json()["error"]["message"]
        assert server.http.get("/metrics").status_code == 200
        go.set()
        end = time.monotonic() + 5
        while server.http.get("/health").status_code != 200 and time.monotonic() < end:
            time.sleep(0.01)
        check_clean(server)


def test_a_failure_to_load_is_kept_for_the_caller():
    def load(say):
        raise InputError("no such model")

    with tiny_server.running(load=load) as server:
        end = time.monotonic() + 5
        while server.service.failure is None and time.monotonic() < end:
            time.sleep(0.01)
        assert str(server.service.failure) == "no such model"


def test_stopping_ends_streams_properly():
    results = {}
    with tiny_server.running(slow=SLOW_S) as server:
        _, _, events = start_stream(server, stream_options={"include_usage": True})
        body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0}
        waiting = threading.Thread(
            target=lambda: results.update(waiting=server.post("/v1/completions", **body))
        )
        waiting.start()
        end = time.monotonic() + 2
        while not server.service.turns.waiting and time.monotonic() < end:
            time.sleep(0.01)
        begin = time.monotonic()
        server.server.should_exit = True
        lines = [line for line in events if line]
        waiting.join(5)
        assert time.monotonic() - begin < 2
    assert lines[-1] == "data: [DONE]"
    usage = json.loads(lines[-2][6:])
    last = json.loads(lines[-3][6:])["choices"][0]
    assert last["finish_reason"] == "length"
    count = usage["usage"]["completion_tokens"]
    assert 1 <= count < 300
    assert last["token_sha256"] == tiny_server.alone(encode(PROMPT), Sampling(), count)[2]
    assert results["waiting"].status_code == 503
    assert results["waiting"].json()["error"]["code"] == "shutting_down"


def test_stopping_gives_whole_replies_what_there_is():
    results = {}
    with tiny_server.running(slow=SLOW_S) as server:
        body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "n": 2}
        asking = threading.Thread(
            target=lambda: results.update(reply=server.post("/v1/completions", **body))
        )
        asking.start()
        while not server.service.turns.running:
            time.sleep(0.01)
        time.sleep(4 * SLOW_S)
        server.server.should_exit = True
        asking.join(5)
    choices = results["reply"].json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    assert choices[0]["text"] or results["reply"].json()["usage"]["completion_tokens"]
    assert choices[1]["text"] == ""


# Load --------------------------------------------------------------------------------------


def test_fifty_clients_at_once_each_get_their_own_reply(server):
    """Whole, streamed, plain, with stop strings; bad bodies and disconnects in between."""
    kinds = random.Random(0)
    jobs = []
    for number in range(100):
        seed, size = kinds.randrange(2**64), kinds.randrange(1, 90)
        prompt = [token % 256 for token in tiny.prompt_of(size, seed % 1000)]
        jobs.append(
            (number, prompt, seed, kinds.choice(["whole", "stream", "plain", "bad", "gone"]))
        )
    counter = CompileCounter()

    def ask(job):
        number, prompt, seed, kind = job
        body = {"prompt": prompt, "seed": seed, "max_tokens": 10 + number % 7}
        if kind == "bad":
            assert server.post("/v1/completions", **body, tools=[{}]).status_code == 400
            return None
        if kind == "gone":
            settings = {**body, "max_tokens": 300, "stream": True}
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=settings, timeout=60
            ) as reply:
                next(reply.iter_lines())
            return None
        if kind == "stream":
            text, last = "", None
            for chunk in server.openai.completions.create(model="tiny", stream=True, **body):
                text += chunk.choices[0].text
                last = chunk.choices[0]
            return text, last.finish_reason, last.token_sha256
        reply = server.post("/v1/completions", **body, draft=kind != "plain")
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        return choice["text"], choice["finish_reason"], choice["token_sha256"]

    with concurrent.futures.ThreadPoolExecutor(50) as clients:
        replies = list(clients.map(ask, jobs))
    assert server.idle()
    for (number, prompt, seed, kind), reply in zip(jobs, replies, strict=True):
        if reply is not None:
            wanted = tiny_server.alone(prompt, Sampling(1.0, seed=seed), 10 + number % 7)
            assert reply == wanted, kind
    assert counter.count == 0
