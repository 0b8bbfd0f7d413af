"""The page's files and paths: what it is served as, rounds in chunks, the switch of the rule."""

from __future__ import annotations

import json
import re
import threading

import httpx
import openai
import pytest

from dflash_jax.decode.sampling import Sampling
from tests.serve import tiny_server

PROMPT = "hello world"


def encode(text: str = PROMPT) -> list[int]:
    return tiny_server.tokenizer().encode(text)


def test_the_page_needs_nothing_else(server):
    reply = server.http.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "set-cookie" not in reply.headers
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'")
    assert "unsafe" not in policy
    # No address but its own server's paths, no markup made from text.
    assert not re.search(r"https?:|//[a-z]", reply.text.replace("// ", ""))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", reply.text)
    assert not re.search(r"cookie|localStorage|sessionStorage", reply.text)


def test_the_page_comes_without_a_key_and_while_loading():
    go = threading.Event()

    def load(say):
        assert go.wait(10)
        return tiny_server.model()

    with tiny_server.running(load=load, api_key=tiny_server.KEY) as server:
        assert server.http.get("/").status_code == 200
        headers = {"Authorization": f"Bearer {tiny_server.KEY}"}
        assert server.http.get("/rule").status_code == 401
        assert server.http.get("/rule", headers=headers).status_code == 503
        go.set()


# Rounds in chunks --------------------------------------------------------------------------


def stream(server, draft=True, **body):
    """(choices of the chunks, usage)."""
    options = {"include_usage": True, "include_rounds": True}
    settings = {"stream": True, "stream_options": options, "draft": draft}
    reply = server.post("/v1/completions", **settings, **body)
    assert reply.status_code == 200, reply.text
    events = [json.loads(line[6:]) for line in reply.text.strip().split("\n\n")[:-1]]
    return [event["choices"][0] for event in events[:-1]], events[-1]["usage"]


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("temperature", [0, 1])
def test_rounds_say_how_each_token_came(server, temperature, draft):
    prompt = encode() * 5
    body = {"prompt": prompt, "max_tokens": 60, "temperature": temperature, "seed": 5}
    choices, usage = stream(server, draft=draft, **body)
    last = choices[-1]
    rounds = [choice["round"] for choice in choices if "round" in choice]
    pieces = [piece for one in rounds for piece in one["pieces"]]
    text = "".join(choice["text"] for choice in choices)
    wanted = tiny_server.alone(prompt, Sampling(temperature, seed=5), 60)
    assert (text, last["finish_reason"], last["token_sha256"]) == wanted
    before = ""
    for choice in choices:  # a round comes behind its text, a character that stays incomplete last
        before += choice["text"]
        if "round" in choice:
            assert before == "".join(piece["text"] for piece in choice["round"]["pieces"])
            before = ""
    assert len(rounds) == usage["rounds"] + 1
    assert len(pieces) == usage["completion_tokens"]
    assert sum(piece["drafted"] for piece in pieces) == usage["accepted"]
    assert sum(one["width"] for one in rounds) == usage["drafted"]
    assert rounds[0]["context_length"] == 0
    assert [piece["drafted"] for piece in rounds[0]["pieces"]] == [False]
    lengths = [len(one["pieces"]) for one in rounds]
    for number, one in enumerate(rounds[1:], 1):
        assert one["context_length"] == len(prompt) + sum(lengths[1:number])
        assert one["round_ms"] > 0
        # Those drafted come first; a round that was not cut ends with the target's own.
        flags = [piece["drafted"] for piece in one["pieces"]]
        assert flags == sorted(flags, reverse=True)
        if number < len(rounds) - 1:
            assert not flags[-1]
        if draft:
            assert len(one["prices_ms"]) == max(tiny_server.WIDTHS) + 1
            assert all(price > 0 for price in one["prices_ms"])
        else:
            assert (one["width"], one["prices_ms"]) == (0, None)


def test_rounds_come_when_asked_for_alone(server):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9}
    create = server.openai.chat.completions.create
    for options, count in ((None, 0), ({"include_rounds": True}, 1)):
        chunks = list(create(**asked, stream=True, extra_body={"stream_options": options}))
        rounds = [chunk for chunk in chunks if hasattr(chunk.choices[0], "round")]
        assert bool(rounds) == bool(count)
        assert all(chunk.choices for chunk in chunks)
    with pytest.raises(openai.BadRequestError, match="stream_options needs stream: true"):
        create(**asked, extra_body={"stream_options": {"include_rounds": True}})


def test_rounds_end_at_a_stop_string(server):
    body = {"prompt": encode() * 5, "max_tokens": 60, "temperature": 0}
    text = tiny_server.alone(body["prompt"], Sampling(), 60)[0]
    stop = text[10:12]
    choices, usage = stream(server, **body, stop=stop)
    assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
    rounds = [choice["round"] for choice in choices if "round" in choice]
    pieces = [piece for one in rounds for piece in one["pieces"]]
    assert len(pieces) == usage["completion_tokens"]


# The switch --------------------------------------------------------------------------------


@pytest.fixture
def rule(server):
    """The rule of the session's server, put back afterwards."""
    before = server.http.get("/rule").json()["rule"]
    yield before
    assert server.http.put("/rule", json={"rule": before}).status_code == 200


def test_the_rule_can_be_switched(server, rule):
    state = server.http.get("/rule").json()
    assert state["rule"] == rule == "renewal"
    assert state["widths"] == list(tiny_server.WIDTHS)
    body = {"prompt": encode() * 5, "max_tokens": 40, "temperature": 1, "seed": 3}
    wanted = tiny_server.alone(body["prompt"], Sampling(1.0, seed=3), 40)[2]
    for name in ("fixed:3", "ratio", "band:10", "tiers", "fixed:0", "renewal"):
        reply = server.http.put("/rule", json={"rule": name})
        assert (reply.status_code, reply.json()["rule"]) == (200, name)
        choices, _ = stream(server, **body)
        assert choices[-1]["token_sha256"] == wanted
        if name.startswith("fixed"):
            rounds = [choice["round"] for choice in choices if "round" in choice]
            widths = {one["width"] for one in rounds[1:]}
            assert widths == {int(name[6:])}
    assert server.http.get("/rule").json() == state


@pytest.mark.parametrize("name", ["", "best", "fixed:7", "fixed:x", "band:101", "x" * 99, 3, None])
def test_a_rule_that_cannot_be_is_refused(server, rule, name):
    reply = server.http.put("/rule", json={"rule": name})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "rule"
    assert server.http.get("/rule").json()["rule"] == rule


def test_a_switch_does_not_break_running_streams():
    with tiny_server.running(slow=0.03) as server:
        before = server.http.get("/rule").json()["rule"]
        prompt = encode() * 5
        settings = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "stream": True}
        wanted = tiny_server.alone(prompt, Sampling(), 60)[2]
        names = iter(["fixed:2", "ratio", "fixed:0", "renewal"] * 100)
        switched, last = 0, {}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=settings, timeout=60
        ) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line[6:])["choices"][0]
                    reply_of_switch = server.http.put("/rule", json={"rule": next(names)})
                    switched += reply_of_switch.status_code == 200
        assert switched > 5
        assert last["token_sha256"] == wanted
        assert server.http.put("/rule", json={"rule": before}).status_code == 200
