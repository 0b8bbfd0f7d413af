"""The soak's clients: right replies pass, a wrong one is seen, whatever they do in between."""

from __future__ import annotations

import random
import threading
import time

import httpx
import pytest

from dflash_jax.bench import soak

TEXTS = ["hello", "world", "hello world", "wor"]


@pytest.fixture(scope="module")
def cases(server):
    made = soak.make_cases(TEXTS, 12, 12, random.Random(1))
    with httpx.Client(base_url=server.url, timeout=60) as client:
        return made, [soak.ask(client, case) for case in made]


def soaked(server, cases, known, seconds: float) -> list[soak.Client]:
    before = server.http.get("/rule").json()["rule"]
    stop = threading.Event()
    clients = [soak.Client(server.url, number, cases, known, stop) for number in range(4)]
    for client in clients:
        client.start()
    time.sleep(seconds)
    stop.set()
    for client in clients:
        client.join(60)
        assert not client.is_alive()
    server.http.put("/rule", json={"rule": before})
    assert server.idle(30)
    return clients


def test_cases_are_of_both_paths_and_have_all_their_choices(cases):
    assert {case.path for case in cases[0]} == {soak.CHAT, soak.COMPLETIONS}
    for case, reply in zip(*cases, strict=True):
        assert len(reply) == case.body.get("n", 1)


def test_mixed_traffic_gets_the_replies_of_requests_sent_alone(server, cases):
    clients = soaked(server, *cases, seconds=4)
    assert [line for client in clients for line in client.wrong] == []
    compared = sum(client.counts["whole"] + client.counts["streamed"] for client in clients)
    assert compared > len(clients)
    ids = [one for client in clients for one in client.ids]
    assert len(set(ids)) == len(ids)


def test_a_wrong_reply_is_seen(server, cases):
    made, known = cases
    wrong = [(("other", *reply[0][1:]), *reply[1:]) for reply in known]
    clients = soaked(server, made, wrong, seconds=1)
    lines = [line for client in clients for line in client.wrong]
    assert lines
    assert all("is not" in line for line in lines)


@pytest.mark.parametrize("number", range(len(soak.BAD)))
def test_bad_bodies_get_their_status(server, number):
    path, content, status = soak.BAD[number]
    reply = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert (reply.status_code, "error" in reply.json()) == (status, True)
