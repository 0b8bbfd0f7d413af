"""The API through OpenAI's client and plain HTTP, at a real server with the tiny model."""

from __future__ import annotations

import json
import time

import openai
import pytest

from dflash_jax.decode.sampling import Sampling
from dflash_jax.serve.requests import CompletionRequest, Generation
from tests.decode import tiny
from tests.serve import tiny_server

MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = "hello wo"
SAMPLED = {"temperature": 1.0, "seed": 5, "extra_body": {"top_k": 50, "min_p": 0.01}, "top_p": 0.9}
SAMPLING = Sampling(1.0, 50, 0.9, 0.01, 5)


def encode(text: str = PROMPT) -> list[int]:
    return tiny_server.tokenizer().encode(text)


def encode_chat() -> list[int]:
    return tiny_server.tokenizer().encode_chat(MESSAGES)


def streamed(chunks) -> tuple[dict[int, str], dict[int, dict], list]:
    """(texts, last choices, usage chunks) by index."""
    texts: dict[int, str] = {}
    last: dict[int, dict] = {}
    usages = []
    for chunk in chunks:
        if not chunk.choices:
            usages.append(chunk)
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason:
                assert choice.index not in last
                last[choice.index] = choice
    return texts, last, usages


# Exactness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_completions_are_plain_decodings(server, stream, draft):
    for settings, sampling in (({"temperature": 0}, Sampling()), (SAMPLED, SAMPLING)):
        text, reason, sha = tiny_server.alone(encode(), sampling, 24)
        extra = {**settings.get("extra_body", {}), "draft": draft}
        asked = {**settings, "extra_body": extra, "max_tokens": 24}
        reply = server.openai.completions.create(
            model="tiny", prompt=PROMPT, stream=stream, **asked
        )
        if stream:
            texts, last, usages = streamed(reply)
            got = (texts[0], last[0].finish_reason, last[0].token_sha256)
            assert not usages
        else:
            choice = reply.choices[0]
            got = (choice.text, choice.finish_reason, choice.token_sha256)
        assert got == (text, reason, sha)


def test_chats_are_plain_decodings(server):
    text, reason, sha = tiny_server.alone(encode_chat(), SAMPLING, 24)
    asked = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 24, **SAMPLED}
    whole = server.openai.chat.completions.create(**asked).choices[0]
    assert (whole.message.content, whole.finish_reason, whole.token_sha256) == (text, reason, sha)
    assert whole.message.role == "assistant"
    chunks = list(server.openai.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts, last, _ = streamed(chunks)
    assert (texts[0], last[0].finish_reason, last[0].token_sha256) == (text, reason, sha)
    assert last[0].seed == 5


def test_text_and_its_tokens_are_one_prompt(server):
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    create = server.openai.completions.create
    assert (
        create(prompt=PROMPT, **asked).choices[0].token_sha256
        == create(prompt=encode(), **asked).choices[0].token_sha256
        == tiny_server.alone(encode(), Sampling(), 8)[2]
    )


def test_padding_ids_may_be_in_a_prompt(server):
    prompt = [tiny.VOCABULARY - 1, 3]
    got = server.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=4).json()
    assert got["choices"][0]["token_sha256"] == tiny_server.alone(prompt, Sampling(), 4)[2]


def test_several_prompts_and_choices(server):
    prompts = [PROMPT, "other"]
    reply = server.openai.completions.create(
        model="tiny", prompt=prompts, n=3, seed=7, max_tokens=9, temperature=1
    )
    assert [choice.index for choice in reply.choices] == list(range(6))
    for choice in reply.choices:
        prompt, seed = prompts[choice.index // 3], 7 + choice.index % 3
        assert choice.seed == seed
        wanted = tiny_server.alone(encode(prompt), Sampling(1.0, seed=seed), 9)
        assert (choice.text, choice.finish_reason, choice.token_sha256) == wanted
    assert reply.usage.prompt_tokens == sum(len(encode(prompt)) for prompt in prompts)
    assert reply.usage.completion_tokens <= 6 * 9
    assert len({choice.token_sha256 for choice in reply.choices}) == 6


def test_several_choices_stream(server):
    asked = {"model": "tiny", "messages": MESSAGES, "n": 3, "seed": 2**64 - 1, "max_tokens": 6}
    texts, last, _ = streamed(server.openai.chat.completions.create(**asked, stream=True))
    whole = server.openai.chat.completions.create(**asked)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert [last[index].seed for index in range(3)] == [2**64 - 1, 0, 1]


def test_without_a_seed_replies_differ_and_can_be_had_again(server):
    asked = {"prompt": PROMPT, "max_tokens": 12, "n": 2}
    choices = [
        choice
        for _ in range(3)
        for choice in server.post("/v1/completions", **asked).json()["choices"]
    ]
    assert len({choice["token_sha256"] for choice in choices}) == 6
    again = server.post(
        "/v1/completions", prompt=PROMPT, max_tokens=12, seed=choices[3]["seed"]
    ).json()
    assert again["choices"][0]["token_sha256"] == choices[3]["token_sha256"]


def test_a_tiny_temperature_is_greedy_and_left_out_it_is_1(server):
    greedy = tiny_server.alone(encode(), Sampling(), 8)[2]
    sampled = tiny_server.alone(encode(), Sampling(1.0, 3, seed=4), 8)[2]
    asked = {"prompt": PROMPT, "max_tokens": 8, "seed": 4}
    for settings, wanted in (({"temperature": 1e-6}, greedy), ({"top_k": 3}, sampled)):
        got = server.post("/v1/completions", **asked, **settings).json()
        assert got["choices"][0]["token_sha256"] == wanted
    off = server.post("/v1/completions", **asked, top_k=-1, top_p=1, min_p=0, stop=[]).json()
    wanted = tiny_server.alone(encode(), Sampling(1.0, seed=4), 8)[2]
    assert off["choices"][0]["token_sha256"] == wanted


# Ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings(server, stream, draft):
    text = tiny_server.alone(encode(), Sampling(1.0, seed=1), 60)[0]
    assert len(text) > 12
    stop = text[6:9]
    asked = {
        "model": "tiny",
        "prompt": PROMPT,
        "seed": 1,
        "max_tokens": 60,
        "stop": ["never in it", stop],
        "extra_body": {"draft": draft},
    }
    if stream:
        texts, last, _ = streamed(server.openai.completions.create(**asked, stream=True))
        assert (texts[0], last[0].finish_reason) == (text[: text.index(stop)], "stop")
    else:
        reply = server.openai.completions.create(**asked)
        choice = reply.choices[0]
        assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
        assert reply.usage.completion_tokens < 60


def test_the_context_limits_a_reply(server):
    prompt = list(range(40, 40 + tiny.CONTEXT_LIMIT // 4)) * 3
    asked = {"messages": MESSAGES, "temperature": 0, "stop": None}
    got = server.post("/v1/chat/completions", **asked).json()  # no budget: what the context holds
    used = got["usage"]["total_tokens"]
    assert used <= tiny.CONTEXT_LIMIT
    assert (got["choices"][0]["finish_reason"] == "length") == (used == tiny.CONTEXT_LIMIT)
    prompt = [token % 256 for token in prompt]
    got = server.post("/v1/completions", prompt=prompt, max_tokens=1000, temperature=0).json()
    assert got["usage"]["total_tokens"] <= tiny.CONTEXT_LIMIT


def test_completions_have_16_tokens_unless_told(server):
    got = server.post("/v1/completions", prompt=PROMPT, temperature=0).json()
    assert got["usage"]["completion_tokens"] <= 16


# Facts -------------------------------------------------------------------------------------


def test_usage_and_timings(server):
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    reply = server.openai.completions.create(**asked)
    usage, timings = reply.usage, reply.timings
    assert usage.prompt_tokens == len(encode())
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.rounds >= 1
    assert usage.completion_tokens - 1 <= usage.rounds + usage.accepted
    assert 0 <= usage.accepted <= usage.drafted
    assert timings["prompt_tok_s"] > 0
    assert timings["decode_tok_s"] > 0
    decoded = usage.completion_tokens - 1
    assert timings["tokens_per_round"] == pytest.approx(decoded / usage.rounds, abs=1e-3)
    assert timings["mean_width"] == pytest.approx(usage.drafted / usage.rounds, abs=1e-3)
    plain = server.openai.completions.create(**asked, extra_body={"draft": False})
    assert (plain.usage.drafted, plain.usage.rounds) == (0, usage.completion_tokens - 1)


def metric(server, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def test_cached_tokens(server):
    prompt = [7, *tiny.prompt_of(2 * tiny.CHUNK, seed=9)]
    prompt = [token % 256 for token in prompt]
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0}
    create = server.openai.completions.create
    before = metric(server, "dflash_cached_tokens_total")
    first, second = create(**asked, n=2), create(**asked)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 2 * tiny.CHUNK
    assert second.usage.prompt_tokens == first.usage.prompt_tokens == len(prompt)
    hashes = [choice.token_sha256 for choice in (*first.choices, *second.choices)]
    assert set(hashes) == {tiny_server.alone(prompt, Sampling(), 5)[2]}
    *_, last = create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == 2 * tiny.CHUNK
    deadline = time.monotonic() + 30  # a stream is counted after it has been sent
    while (now := metric(server, "dflash_cached_tokens_total")) < before + 4 * tiny.CHUNK:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert now == before + 4 * tiny.CHUNK
    assert metric(server, "dflash_prompt_cache_bytes") > 0


def test_the_usage_chunk_comes_when_asked_for(server):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    create = server.openai.chat.completions.create
    chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens <= 5
    assert chunks[-1].timings["decode_tok_s"] > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.total_tokens == create(**asked).usage.total_tokens
    for unasked in (None, {"include_usage": False}):
        chunks = list(create(**asked, stream=True, stream_options=unasked))
        assert all(chunk.choices for chunk in chunks)


def test_streams_are_server_sent_events(server):
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line[6:])["object"] == "text_completion" for line in lines[:-1])


def test_request_ids(server):
    given = server.http.get("/v1/models", headers={"X-Request-Id": "mine-7"})
    assert given.headers["x-request-id"] == "mine-7"
    made = [server.http.get("/v1/models").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    odd = server.http.get("/nowhere", headers={"X-Request-Id": "a b\x7f" + "c" * 500})
    assert len(odd.headers["x-request-id"]) == 32
    reply = server.post("/v1/completions", prompt=PROMPT, max_tokens=1)
    assert reply.json()["id"] == f"cmpl-{reply.headers['x-request-id']}"


def test_models(server):
    assert [model.id for model in server.openai.models.list()] == ["tiny"]
    assert server.openai.models.retrieve("tiny").max_model_len == tiny.CONTEXT_LIMIT
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        server.openai.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        server.openai.completions.create(model="other", prompt="x")


def test_health_and_metrics(server):
    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    server.post("/v1/completions", prompt=PROMPT, max_tokens=2)
    text = server.http.get("/metrics").text
    assert 'dflash_requests_total{path="/v1/completions",status="200"}' in text
    for name in ("dflash_waiting", "dflash_drafted_total", "dflash_first_token_seconds_count"):
        assert f"\n{name} " in text


def test_tokenize_and_detokenize(server):
    got = server.post("/tokenize", prompt=PROMPT + "日").json()
    assert got["tokens"] == encode(PROMPT + "日")
    assert got["count"] == len(got["tokens"])
    assert server.post("/detokenize", tokens=got["tokens"]).json() == {"prompt": PROMPT + "日"}
    assert server.post("/tokenize", messages=MESSAGES).json()["tokens"] == encode_chat()
    assert server.post("/tokenize", prompt="").json()["tokens"] == []
    assert "<|im_start|>" in server.post("/detokenize", tokens=encode_chat()).json()["prompt"]


def test_contents_in_parts_and_developers(server):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    chats = (
        [{"role": "user", "content": "hello"}],
        [{"role": "user", "content": parts}],
        # What the client's own objects hold beside.
        [{"role": "user", "content": "hello", "name": None, "tool_calls": None, "refusal": None}],
    )
    tokens = [server.post("/tokenize", messages=chat).json()["tokens"] for chat in chats]
    assert tokens[0] == tokens[1] == tokens[2]
    system, developer = (
        server.post("/tokenize", messages=[{"role": role, "content": "x"}]).json()["tokens"]
        for role in ("system", "developer")
    )
    assert system == developer


# Refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(("/v1/completions", name) for name in CompletionRequest.not_here),
        *(("/v1/chat/completions", name) for name in Generation.not_here),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server, path, name):
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
    value = {"best_of": 2}.get(name, "something")
    reply = server.post(path, **prompt, max_tokens=1, **{name: value})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert name in error["message"]
    for neutral in (None, *CompletionRequest.not_here[name]):
        assert server.post(path, **prompt, max_tokens=1, **{name: neutral}).status_code == 200


CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
# (path, body, what the message must say, param)
REFUSED = {
    "unknown name": (COMPLETE, {"prompt": "x", "tempreature": 1}, "unknown", "tempreature"),
    "no prompt": (COMPLETE, {}, "prompt", "prompt"),
    "empty prompt": (COMPLETE, {"prompt": ""}, "prompt", "prompt"),
    "no prompts": (COMPLETE, {"prompt": []}, "prompt", "prompt"),
    "no ids": (COMPLETE, {"prompt": [[1], []]}, "prompt", "prompt[1]"),
    "id of text": (COMPLETE, {"prompt": [1, "2"]}, "prompt[1]", "prompt[1]"),
    "id beyond": (COMPLETE, {"prompt": [1, 999]}, "999 is outside 0..319", "prompt"),
    "id negative": (COMPLETE, {"prompt": [-1]}, "prompt[0]", "prompt[0]"),
    "id huge": (COMPLETE, {"prompt": [2**70]}, "outside", "prompt"),
    "too long": (COMPLETE, {"prompt": [1] * 400}, "at most 399", "prompt"),
    "surrogate": (COMPLETE, {"prompt": "a\ud83d"}, "unicode", "prompt"),
    "surrogate in a stop": (COMPLETE, {"prompt": "a", "stop": "\ud83d"}, "unicode", "stop"),
    "surrogate in a name": (COMPLETE, {"prompt": "a", "\ud83d": 1}, "unknown", "\\ud83d"),
    "no messages": (CHAT, {"messages": []}, "messages", "messages"),
    "message of text": (CHAT, {"messages": ["x"]}, "messages[0]", "messages[0]"),
    "message without role": (CHAT, {"messages": [{"content": "x"}]}, "role", "messages[0].role"),
    "unknown role": (
        CHAT,
        {"messages": [{"role": "bot", "content": "x"}]},
        "role",
        "messages[0].role",
    ),
    "image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "image_url is not supported",
        "messages[0].content[0].image_url",
    ),
    "surrogate in a message": (
        CHAT,
        {"messages": [{"role": "user", "content": "\udc00"}]},
        "surrogate",
        None,
    ),
    "temperature": (COMPLETE, {"prompt": "x", "temperature": -1}, "temperature", "temperature"),
    "temperature text": (COMPLETE, {"prompt": "x", "temperature": "1"}, "number", "temperature"),
    "top_p 0": (COMPLETE, {"prompt": "x", "top_p": 0}, "top_p", "top_p"),
    "top_k": (COMPLETE, {"prompt": "x", "top_k": -2}, "top_k", "top_k"),
    "top_k fraction": (COMPLETE, {"prompt": "x", "top_k": 1.5}, "integer", "top_k"),
    "min_p": (COMPLETE, {"prompt": "x", "min_p": 1.5}, "min_p", "min_p"),
    "seed": (COMPLETE, {"prompt": "x", "seed": 2**64}, "seed", "seed"),
    "n 0": (COMPLETE, {"prompt": "x", "n": 0}, "n", "n"),
    "n true": (COMPLETE, {"prompt": "x", "n": True}, "integer", "n"),
    "n huge": (COMPLETE, {"prompt": "x", "n": 129}, "128", "n"),
    "more than the queue": (COMPLETE, {"prompt": ["x"] * 3, "n": 128}, "the queue takes", "n"),
    "max_tokens 0": (COMPLETE, {"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens"),
    "empty stop": (COMPLETE, {"prompt": "x", "stop": ""}, "stop", "stop"),
    "many stops": (COMPLETE, {"prompt": "x", "stop": ["a"] * 17}, "16", "stop"),
    "two budgets": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2},
        "differ",
        None,
    ),
    "options without stream": (
        COMPLETE,
        {"prompt": "x", "stream_options": {"include_usage": True}},
        "stream: true",
        None,
    ),
    "unknown option": (
        COMPLETE,
        {"prompt": "x", "stream": True, "stream_options": {"usage": 1}},
        "unknown",
        "stream_options.usage",
    ),
    "completion tokens of a completion": (
        COMPLETE,
        {"prompt": "x", "max_completion_tokens": 1},
        "unknown",
        "max_completion_tokens",
    ),
    "tokenize nothing": ("/tokenize", {}, "one of the two", None),
    "tokenize both": ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "one of the two", None),
    "detokenize beyond": ("/detokenize", {"tokens": [320]}, "outside 0..319", "tokens"),
    "detokenize huge": ("/detokenize", {"tokens": [2**80]}, "outside 0..319", "tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_requests_are_400_with_the_reason(server, name):
    path, body, says, param = REFUSED[name]
    reply = server.http.post(
        path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert says in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert server.service.turns.waiting == 0


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[]", "application/json"),
        (b"1", "application/json"),
        (b"null", "application/json"),
        (b'{"prompt": "x", "temperature": NaN}', "application/json"),
        (b'{"prompt": "x", "temperature": 1e999}', "application/json"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"prompt": ' * 5000, "application/json"),
        (b'{"prompt": "x"}', "text/plain"),  # what a web page may send without asking
        (b'{"prompt": "x"}', ""),
        (b'{"prompt": [' + b"1.5," * 100_000 + b"1]}", "application/json"),
        (
            json.dumps({"prompt": "x", **{f"x{k}": 1 for k in range(50_000)}}).encode(),
            "application/json",
        ),
    ],
)
def test_bodies_that_are_none(server, content, kind):
    headers = {"Content-Type": kind} if kind else {}
    reply = server.http.post("/v1/completions", content=content, headers=headers)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert len(reply.text) < 1000
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200


def test_unknown_paths_and_methods(server):
    assert server.http.get("/v1/nothing").json()["error"]["message"] == "no such path: /v1/nothing"
    reply = server.http.get("/v1/completions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert "not allowed" in reply.json()["error"]["message"]
    assert server.http.get("/docs").status_code == 404


def test_cors_is_off_unless_told(server):
    asked = {
        "Origin": "http://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    reply = server.http.options("/v1/completions", headers=asked)
    assert reply.status_code == 405
    assert "access-control-allow-origin" not in reply.headers
    with tiny_server.running(cors_origins=("http://page.example",)) as open_server:
        reply = open_server.http.options("/v1/completions", headers=asked)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "http://page.example"
        other = {**asked, "Origin": "http://other.example"}
        reply = open_server.http.options("/v1/completions", headers=other)
        assert "access-control-allow-origin" not in reply.headers
