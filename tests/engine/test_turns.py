"""The queue of streams: who comes next, who gets in, and how each one ends."""

from __future__ import annotations

import threading

import pytest

from dflash_jax.engine.lone import Request
from dflash_jax.engine.turns import (
    Drivers,
    Ending,
    QueueClosedError,
    QueueFullError,
    Turn,
    Turns,
)


class Ear:
    """A listener that writes down what it hears, and can be waited for."""

    def __init__(self, heard: list | None = None, name: str = "", rounds: int = 10**6) -> None:
        self.heard = [] if heard is None else heard
        self.name = name
        self.left = rounds
        self.started, self.ended = threading.Event(), threading.Event()
        self.ending = None

    def on_start(self) -> None:
        self.heard.append(self.name)
        self.started.set()

    def on_round(self, record) -> bool:
        self.left -= 1
        return self.left > 0

    def on_end(self, ending, finish_reason) -> None:
        assert self.ending is None  # once
        self.ending = (ending, finish_reason)
        self.ended.set()


class FakeStream:
    def __init__(self, driver, request) -> None:
        self.driver, self.request, self.finish_reason = driver, request, None

    def __enter__(self):
        self.driver.open += 1
        assert self.driver.open == 1
        return self

    def __exit__(self, *_) -> None:
        self.driver.open -= 1

    def rounds(self, interrupted):
        for _ in range(self.request.max_tokens):
            if interrupted():
                return
            if self.driver.gate is not None:
                self.driver.gate.wait(0.01)
            yield "record"
        self.finish_reason = "length"


class FakeDriver:
    """Rounds of no tokens; each waits for `gate`, or a hundredth of a second."""

    def __init__(self, gate=None) -> None:
        self.gate, self.open = gate, 0

    def stream(self, request):
        return FakeStream(self, request)


@pytest.fixture
def served():
    """Makes queues with a worker, and stops them."""
    made = []

    def make(capacity: int, driver=None, plain=None) -> Turns:
        turns = Turns(capacity)
        drivers = Drivers(driver or FakeDriver(), plain or FakeDriver())
        thread = threading.Thread(target=turns.serve, args=[drivers])
        thread.start()
        made.append((turns, thread))
        return turns

    yield make
    for turns, thread in made:
        turns.close()
        thread.join(5)
        assert not thread.is_alive()


def turn(ear: Ear, rounds: int = 3, draft: bool = True) -> Turn:
    return Turn(Request((1,), max_tokens=rounds), ear, draft)


def ended(*ears: Ear) -> list:
    for ear in ears:
        assert ear.ended.wait(5)
    return [ear.ending for ear in ears]


def busy(turns: Turns, rounds: int = 10**6):
    """A party whose stream runs for long."""
    ear = Ear()
    party = turns.submit([turn(ear, rounds)])
    assert ear.started.wait(5)
    return party, ear


def test_parties_take_turns(served):
    turns = served(16, FakeDriver(threading.Event()))
    party, _ = busy(turns)
    heard: list[str] = []
    ears = [Ear(heard, name) for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
    turns.submit([turn(ear) for ear in ears[:3]])
    turns.submit([turn(ears[3])])
    turns.submit([turn(ear) for ear in ears[4:]])
    turns.cancel(party)
    assert ended(*ears) == [(Ending.FINISHED, "length")] * 6
    assert heard == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_plain_turns_take_the_plain_driver(served):
    plain = FakeDriver()
    opened = []
    plain.stream = lambda request: opened.append(request) or FakeStream(plain, request)
    turns = served(4, plain=plain)
    ears = [Ear(), Ear()]
    turns.submit([turn(ears[0]), turn(ears[1], draft=False)])
    ended(*ears)
    assert len(opened) == 1


def test_a_full_queue_refuses_all_or_none(served):
    turns = served(2, FakeDriver(threading.Event()))
    party, first = busy(turns)
    waiting = Ear()
    turns.submit([turn(waiting)])
    with pytest.raises(QueueFullError):
        turns.submit([turn(Ear()), turn(Ear())])
    assert turns.waiting == 1
    assert 1 <= turns.retry_after_s() <= 60
    turns.submit([turn(Ear())])
    with pytest.raises(QueueFullError):
        turns.submit([turn(Ear())])
    turns.cancel(party)
    assert ended(first, waiting) == [(Ending.CANCELLED, None), (Ending.FINISHED, "length")]


def test_cancelled_parties_leave_the_queue_at_once(served):
    turns = served(2, FakeDriver(threading.Event()))
    party, _ = busy(turns)
    ears = [Ear(), Ear()]
    waiting = turns.submit([turn(ear) for ear in ears])
    turns.cancel(waiting)
    assert ended(*ears) == [(Ending.CANCELLED, None)] * 2
    assert not any(ear.started.is_set() for ear in ears)
    assert turns.waiting == 0
    turns.cancel(waiting)  # again: nothing
    turns.cancel(party)


def test_closing_ends_everything(served):
    turns = served(4, FakeDriver(threading.Event()))
    _, running = busy(turns)
    waiting = Ear()
    turns.submit([turn(waiting)])
    turns.close()
    assert ended(running, waiting) == [(Ending.CLOSED, None)] * 2
    assert not waiting.started.is_set()
    with pytest.raises(QueueClosedError):
        turns.submit([turn(Ear())])


def test_the_listener_ends_a_stream(served):
    turns = served(4)
    ear = Ear(rounds=2)
    turns.submit([turn(ear, 10)])
    assert ended(ear) == [(Ending.FINISHED, "stop")]


def test_the_worker_outlives_a_stream_that_fails(served, monkeypatch, caplog):
    monkeypatch.setattr("dflash_jax.engine.turns._renew_buffers", lambda decoder: None)
    driver = FakeDriver()
    driver.decoder = None
    turns = served(4, driver)
    bad, good = Ear(), Ear()
    bad.on_round = lambda record: 1 / 0
    turns.submit([turn(bad), turn(good)])
    assert ended(bad, good) == [(Ending.FAILED, None), (Ending.FINISHED, "length")]
    assert "ZeroDivisionError" in caplog.text
