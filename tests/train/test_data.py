"""Rollouts, shards, prompts."""

from __future__ import annotations

import errno
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import InputError
from dflash_jax.models import layers
from dflash_jax.models.llama import Llama
from dflash_jax.models.llama import inverse_frequencies as target_frequencies
from dflash_jax.train import shards
from dflash_jax.train.devices import data_mesh
from dflash_jax.train.generate import find_repetitions
from dflash_jax.train.prompts import read_prompts
from dflash_jax.train.rollout import ASSISTANT, USER, Prompts, Rollout, RolloutConfig, Template
from dflash_jax.train.shards import ShardHeader, read_corpus, read_shard, write_shard
from tests.train import tiny

END, BEGIN_REPLY, BEGIN_USER = 1, 2, 3
TEMPLATE = Template(np.array([5]), np.array([END, BEGIN_REPLY]), np.array([END, 6, BEGIN_USER]))
HEADER = ShardHeader("tok", tiny.VOCABULARY, tiny.LENGTH, 0, 0, ("self",))


@pytest.fixture(scope="module")
def written():
    """A batch of two greedy rows and six at temperature 1, over three segments."""
    config = RolloutConfig(
        batch=8, length=40, segments=3, min_p=0.2, max_user_tokens=5, max_reply_tokens=9
    )
    params = tiny.target_params(1)
    rollout = Rollout((tiny.TARGET, params), config, TEMPLATE, (END,), data_mesh(1))
    tokens = np.zeros((8, 40), np.int32)
    tokens[:, :4] = np.random.default_rng(0).integers(7, 60, (8, 4))
    lengths = np.array([4, 4, 4, 4, 3, 3, 1, 1], np.int32)
    roles = np.array([ASSISTANT] * 4 + [USER] * 4, np.int32)
    temperature = np.array([0, 0] + [1] * 6, np.float32)
    prompts = Prompts(tokens, lengths, roles, temperature)
    first = rollout.write(prompts, jax.random.key(3))
    second = rollout.write(prompts, jax.random.key(3))
    return params, prompts, first, second


def test_a_rollout_is_a_function_of_its_key(written):
    _, _, first, second = written
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_prompts_are_kept_and_own_starts_after_them(written):
    _, prompts, (tokens, own), _ = written
    for row, length in enumerate(prompts.lengths):
        np.testing.assert_array_equal(tokens[row, :length], prompts.tokens[row, :length])
        assert not own[row, :length].any()
        assert own[row, length] == (prompts.roles[row] == ASSISTANT)


def test_own_tokens_of_greedy_rows_are_the_targets_argmax(written):
    params, _, (tokens, own), _ = written
    length = tokens.shape[1]
    table = layers.rotary_table(target_frequencies(tiny.TARGET), length)
    mask = jnp.tril(jnp.ones((length, length), bool))
    model = Llama(tiny.TARGET)
    logits = model.apply(
        {"params": params},
        jnp.asarray(tokens[:2]),
        table,
        lambda layer, q, k, v: layers.attention(q, k, v, mask),
        method="init_all",
    )
    best = np.asarray(logits).argmax(-1)
    rows, places = np.nonzero(own[:2])
    assert len(rows) > 10
    np.testing.assert_array_equal(tokens[rows, places], best[rows, places - 1])


def test_turns_alternate_and_are_cut(written):
    _, _, (tokens, own), _ = written
    for row in range(8):
        text, mine = tokens[row].tolist(), own[row]
        # Every reply is at most 9 tokens, its end included.
        runs = np.diff(np.flatnonzero(np.diff(np.pad(mine.astype(int), 1))))[::2]
        assert runs.max(initial=0) <= 10
        for place in np.flatnonzero(mine[:-1] & ~mine[1:]):
            after = text[place + 1 : place + 4]
            wanted = [6, BEGIN_USER] if text[place] == END else [END, 6, BEGIN_USER]
            assert after[: len(wanted)] == wanted[: len(after)]


def test_repetitions_are_found_after_the_limit():
    rng = np.random.default_rng(0)
    row = np.concatenate([rng.integers(0, 1000, 20), np.tile([1, 2, 3], 20)])
    found = find_repetitions(row[None].astype(np.int32), 16)[0]
    assert not found[: 20 + 3 + 16].any()
    assert found[20 + 3 + 16 :].all()
    assert not find_repetitions(rng.integers(0, 1000, (2, 100)), 16).any()


def write_two(directory):
    for shard in (0, 1):
        header = ShardHeader("tok", tiny.VOCABULARY, tiny.LENGTH, 0, shard, ("self",))
        write_shard(directory, header, tiny.counting_rows(40, seed=shard))


def test_shards_come_back_and_duplicates_go(tmp_path):
    write_two(tmp_path)
    rows = tiny.counting_rows(40, seed=0)
    _, back = read_shard(shards.shard_path(tmp_path, 0))
    for field, other in zip(rows, back, strict=True):
        np.testing.assert_array_equal(field, other)
    corpus = read_corpus(tmp_path, "tok", tiny.VOCABULARY)
    keys = np.concatenate([corpus.train.key, corpus.held_out.key])
    assert len(set(keys.tolist())) == len(keys)
    assert corpus.held_out.held_out.all()
    assert not corpus.train.held_out.any()
    assert len(corpus.held_out.tokens) > 0


def test_one_prompt_lies_on_one_side():
    tokens = np.random.default_rng(0).integers(0, 60, (200, 20)).astype(np.int32)
    tokens[:, :5] = tokens[np.arange(200) // 10 * 10, :5]  # ten replies to each prompt
    own = np.broadcast_to(np.arange(20) >= 5, tokens.shape)
    rows = shards.label_rows(tokens, own, np.zeros(200), np.zeros(200), 0.5)
    sides = rows.held_out.reshape(20, 10)
    assert (sides.all(axis=1) | ~sides.any(axis=1)).all()
    assert 0 < rows.held_out.mean() < 1


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text"])
def test_a_corrupt_shard_is_one_line_that_names_it(tmp_path, damage):
    write_two(tmp_path)
    path = shards.shard_path(tmp_path, 1)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 3] ^= 0xFF
    path.write_bytes({"truncate": data[:-200], "flip": data, "empty": b"", "text": b"x"}[damage])
    with pytest.raises(InputError, match=r"shard-00001\.npz: corrupt") as error:
        read_corpus(tmp_path, "tok", tiny.VOCABULARY)
    assert "\n" not in str(error.value)


def test_a_foreign_tokenizer_is_refused(tmp_path):
    write_two(tmp_path)
    with pytest.raises(InputError, match="another tokenizer"):
        read_corpus(tmp_path, "other", tiny.VOCABULARY)


def test_no_shards(tmp_path):
    with pytest.raises(InputError, match="generate_data"):
        read_corpus(tmp_path, "tok", tiny.VOCABULARY)


def test_a_full_disk_leaves_no_partial_shard(tmp_path, monkeypatch):
    write_shard(tmp_path, HEADER, tiny.counting_rows(40))

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards.os, "fsync", full)
    other = ShardHeader("tok", tiny.VOCABULARY, tiny.LENGTH, 0, 1, ("self",))
    with pytest.raises(InputError, match="the disk is full"):
        write_shard(tmp_path, other, tiny.counting_rows(40))
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.npz"]


def test_prompt_files(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"slot": "x", "values": ["a", "b"]},
        {"kind": "code", "prompt": "{x} and {x} in f'{y}'"},
        {"kind": "text", "text": "Once"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    prompts = read_prompts(path)
    assert prompts.kinds == ("chat", "code", "text")
    drawn = prompts.draw(np.random.default_rng(0), 50)
    texts = {p.messages[0]["content"] for p in drawn if p.kind == "code"}
    assert texts <= {f"{a} and {b} in f'{{y}}'" for a in "ab" for b in "ab"}
    assert len(texts) > 2


def test_a_prompt_may_hold_any_end_of_line(tmp_path):
    """JSON leaves U+2028 and U+0085 in texts as they are."""
    path = tmp_path / "prompts.jsonl"
    text = "one\u2028two\x85three"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False), encoding="utf-8")
    assert read_prompts(path).entries[0].messages[0]["content"] == text


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"prompt": 3}',
        '{"messages": []}',
        "[]",
        '{"text": ""}',
        '{"prompt": "\\ud800"}',
        '{"messages": [{"role": "user", "content": "u"}, {"content": "no role"}]}',
        '{"prompt": ' + "1" * 5000 + "}",
        "[" * 100_000,
    ],
    ids=lambda line: line[:60],
)
def test_bad_prompt_lines_are_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text(line)
    with pytest.raises(InputError, match=r"p\.jsonl:1"):
        read_prompts(path)


def test_the_projects_prompts_are_disjoint():
    train = read_prompts("configs/prompts/train.jsonl")
    held_out = read_prompts("configs/prompts/heldout.jsonl")
    assert train.combinations() > 50_000
    known = {m["content"] for entry in train.entries for m in entry.messages}
    assert not known & {m["content"] for entry in held_out.entries for m in entry.messages}
