"""Text of replies: stop strings cut exactly, whatever the pieces; characters whole."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies

from dflash_jax.serve.text import ReplyText, StopStrings
from tests.serve import tiny_server

letters = strategies.text("ab\n", max_size=12)
stops = strategies.lists(strategies.text("ab\n", min_size=1, max_size=4), max_size=3)


def cut(text: str, stops: list[str]) -> str:
    """Character by character: the reply ends once any stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@hypothesis.given(strategies.lists(letters, max_size=8), stops)
def test_stop_strings_cut_wherever_the_pieces_end(pieces, stops):
    cutter = StopStrings(stops)
    passed, seen = "", ""
    for piece in pieces:
        passed += cutter.push(piece)
        seen += piece
        # Nothing that could still be cut has been passed on.
        assert cut(seen, stops).startswith(passed)
    whole = "".join(pieces)
    assert passed + cutter.finish() == cut(whole, stops)
    assert (cutter.found is not None) == (cut(whole, stops) != whole)


@pytest.mark.parametrize(
    ("pieces", "stops", "passed"),
    [
        (["abc"], ["c"], ["ab"]),
        (["a", "b", "c", "d"], ["bc"], ["a", "", "", ""]),
        (["a", "b", "d"], ["bc"], ["a", "", "bd"]),
        (["aab"], ["ab"], ["a"]),
        (["ab", "abc"], ["abc", "b"], ["a", ""]),
        (["x<", "|end|", ">y"], ["<|end|>"], ["x", "", ""]),
    ],
)
def test_what_may_become_a_stop_string_waits(pieces, stops, passed):
    cutter = StopStrings(stops)
    assert [cutter.push(piece) for piece in pieces] == passed


def reply(tokens: list[int], stops: list[str] = ()) -> tuple[str, int]:
    """(text, tokens up to the stop)."""
    text = ReplyText(tiny_server.tokenizer(), stops)
    passed = ""
    for count, token in enumerate(tokens, 1):
        piece = text.push(token)
        assert "\ufffd" not in piece
        passed += piece
        if text.stopped:
            return passed + text.finish(), count
    return passed + text.finish(), len(tokens)


def test_a_stop_string_across_tokens_and_characters():
    tokens = tiny_server.tokenizer().encode("so 日本 hello world")
    assert reply(tokens, ["本 he"])[0] == "so 日"
    assert reply(tokens, ["lo w"])[0] == "so 日本 hel"
    assert reply(tokens, ["nothing"]) == ("so 日本 hello world", len(tokens))


def test_characters_wait_for_their_last_byte():
    tokens = tiny_server.tokenizer().encode("a👩b")
    text = ReplyText(tiny_server.tokenizer())
    assert [text.push(token) for token in tokens] == ["a", "", "", "", "👩", "b"]


def test_a_character_cut_by_the_budget_is_the_tokenizers_own_text():
    tokens = tiny_server.tokenizer().encode("a👩")[:-1]
    text = ReplyText(tiny_server.tokenizer())
    passed = "".join(text.push(token) for token in tokens)
    assert passed == "a"
    assert passed + text.finish() == tiny_server.tokenizer().decode(tokens)


@hypothesis.given(strategies.lists(strategies.integers(0, 263), max_size=40))
def test_any_tokens_give_the_tokenizers_text(tokens):
    text = ReplyText(tiny_server.tokenizer())
    passed = "".join(text.push(token) for token in tokens)
    assert passed + text.finish() == tiny_server.tokenizer().decode(tokens)
