"""A choice counts and cuts as plain decoding would, however many tokens a round gives."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_jax.engine.lone import Request, RoundRecord, token_sha256
from dflash_jax.engine.turns import Ending
from dflash_jax.serve.replies import Choice
from dflash_jax.serve.text import ReplyText
from dflash_jax.tree.growth import EMPTY
from tests.serve import tiny_server


def record(tokens: list[int], width: int = 0, landed: int = 0) -> RoundRecord:
    flags = np.arange(width) < landed
    return RoundRecord(tuple(tokens), 9, width, EMPTY, np.zeros(0), flags, 1.0, 0.1, True)


def listen(records: list[RoundRecord], stops: list[str] = ()) -> tuple[Choice, list]:
    choice = Choice(0, Request((1, 2, 3)), ReplyText(tiny_server.tokenizer(), stops))
    pieces = []
    choice.post = pieces.append
    choice.on_start()
    for one in records:
        if not choice.on_round(one):
            break
    choice.on_end(Ending.FINISHED, "length")
    return choice, pieces


def text_of(piece) -> str:
    return "".join(part.text for part in piece.parts)


def ids(text: str) -> list[int]:
    return tiny_server.tokenizer().encode(text)


def test_rounds_and_drafts_are_counted():
    records = [record(ids("a")), record(ids("bcd"), width=5, landed=2), record(ids("e"), width=3)]
    choice, pieces = listen(records)
    assert (choice.rounds, choice.drafted, choice.accepted) == (2, 8, 2)
    assert choice.tokens == ids("abcde")
    assert [text_of(piece) for piece in pieces] == ["a", "bcd", "e", ""]
    assert [piece.finish_reason for piece in pieces] == [None, None, None, "length"]
    assert choice.token_sha256 == token_sha256(ids("abcde"))


@pytest.mark.parametrize("rounds", [["x", "abcd"], ["x", "ab", "cd"], ["x", "a", "b", "c", "d"]])
def test_a_stop_string_in_a_round_cuts_what_follows(rounds):
    records = [record(ids(text), width=4, landed=len(text) - 1) for text in rounds]
    choice, pieces = listen(records, stops=["bc"])
    assert "".join(text_of(piece) for piece in pieces) == "xa"
    assert choice.tokens == ids("xabc")  # up to the token that completed it, on every path
    assert choice.finish_reason == "stop"


def test_accepted_counts_kept_tokens_alone():
    choice, _ = listen([record(ids("x")), record(ids("abcd"), width=4, landed=3)], stops=["b"])
    assert (choice.accepted, choice.tokens) == (2, ids("xab"))


def test_the_stop_string_wins_over_the_budget():
    choice, _ = listen([record(ids("ab"))], stops=["b"])
    assert choice.finish_reason == "stop"


def test_half_a_character_waits_until_the_reply_ends():
    choice, pieces = listen([record([token]) for token in ids("👩")[:3]])
    assert [text_of(piece) for piece in pieces] == ["", "�"]
    assert len(choice.tokens) == 3
