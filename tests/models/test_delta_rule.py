"""The gated delta rule: chunks and trees against steps, and bits that depend on a path alone."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.decode.rows import row_policy
from dflash_jax.models import delta_rule
from dflash_jax.models.delta_rule import BLOCK, RECENT, Layer, Recent
from dflash_jax.tree.growth import NO_PARENT, DraftTree
from dflash_jax.tree.masks import DEPTH, MAX_ROWS, PATH, window_array

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 6, 16, 8
POLICY = row_policy("cpu", jax.__version_info__)


class Tokens(NamedTuple):
    """What the layers before give for some tokens; float32."""

    q: np.ndarray  # [T, Hk, Dk]
    k: np.ndarray  # [T, Hk, Dk]
    v: np.ndarray  # [T, Hv, Dv]
    g: np.ndarray  # [T, Hv]
    beta: np.ndarray  # [T, Hv]

    def rows(self, index) -> Tokens:
        return Tokens(*(x[index] for x in self))


def some_tokens(count: int, seed: int = 0, forget: float = 1.0) -> Tokens:
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, count, KEY_HEADS, KEY_DIM))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(count, HEADS, VALUE_DIM))
    g = -forget * rng.exponential(size=(count, HEADS))
    beta = rng.uniform(size=(count, HEADS))
    return Tokens(*(x.astype(np.float32) for x in (q, k, v, g, beta)))


def stepped(tokens: Tokens, state: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The definition, in float64: outputs [T, Hv, Dv] and the state after the last token."""
    if state is None:
        state = np.zeros((HEADS, KEY_DIM, VALUE_DIM))
    outs = []
    for q, k, v, g, beta in zip(*(x.astype(np.float64) for x in tokens), strict=True):
        q, k = (np.repeat(x, HEADS // KEY_HEADS, axis=0) for x in (q, k))
        state = np.exp(g)[:, None, None] * state
        u = beta[:, None] * (v - np.einsum("hk,hkv->hv", k, state))
        state = state + np.einsum("hk,hv->hkv", k, u)
        outs.append(np.einsum("hk,hkv->hv", q, state))
    return np.stack(outs) if outs else np.zeros((0, HEADS, VALUE_DIM)), state


NOTHING = np.zeros((HEADS, KEY_DIM, VALUE_DIM), np.float32)
chunked = jax.jit(delta_rule.chunked)


def close(got, expected, tolerance=2e-6):
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def test_step_is_the_definition():
    tokens = some_tokens(40)
    outs, state = [], jnp.asarray(NOTHING)
    for row in zip(*tokens, strict=True):
        out, state = delta_rule.step(state, *row)
        outs.append(out)
    expected, last = stepped(tokens)
    close(np.stack(outs), expected)
    close(state, last)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
def test_chunks_equal_steps(count):
    tokens = some_tokens(count, forget=0.05)
    done = chunked(NOTHING, *tokens)
    expected, state = stepped(tokens)
    close(done.out, expected, 1e-5)
    close(done.state, state, 1e-5)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=4), st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_chunk_boundaries_do_not_matter(sizes, seed):
    tokens = some_tokens(sum(sizes), seed)
    expected, last = stepped(tokens)
    state, outs, begin = NOTHING, [], 0
    for size in sizes:
        rows = np.minimum(begin + np.arange(90), len(tokens.q) - 1)  # one shape to compile
        done = chunked(state, *tokens.rows(rows), jnp.int32(size))
        state, begin = done.state, begin + size
        outs.append(done.out[:size])
    close(np.concatenate(outs), expected)
    close(state, last)


@pytest.mark.parametrize("count", [0, 1, 64, 70, 100])
def test_padding_changes_nothing(count):
    """Bit for bit, whatever stands in the padded rows."""
    start = np.asarray(chunked(NOTHING, *some_tokens(30, 5)).state)
    results = []
    for seed in (1, 2):
        padding = some_tokens(100, seed).rows(slice(count, None))
        parts = zip(some_tokens(count, 7), padding, strict=True)
        rows = Tokens(*(np.concatenate(pair) for pair in parts))
        results.append(chunked(start, *rows, jnp.int32(count)))
    first, second = results
    assert np.array_equal(first.out[:count], second.out[:count])
    assert np.array_equal(first.u, second.u)
    assert np.array_equal(first.state, second.state)
    assert not np.any(first.u[count:])
    expected, state = stepped(some_tokens(count, 7), start)
    close(first.out[:count], expected)
    close(first.state, state)


def test_equal_keys_stay_stable():
    """A text that repeats itself: the system is full of ones, its powers are in the billions."""
    tokens = some_tokens(192, forget=0.0)
    keys = np.repeat(tokens.k[:1], 192, axis=0)
    tokens = tokens._replace(k=keys, q=keys, beta=np.full_like(tokens.beta, 0.999))
    expected, state = stepped(tokens)
    done = chunked(NOTHING, *tokens)
    close(done.out, expected, 1e-5)
    close(done.state, state, 1e-5)


def test_strong_forgetting_is_finite():
    tokens = some_tokens(130)
    tokens = tokens._replace(g=np.where(np.arange(130)[:, None] % 3 == 0, -200, tokens.g))
    done = chunked(NOTHING, *tokens)
    expected, _ = stepped(tokens)
    close(done.out, expected)


def test_chunks_have_finite_gradients():
    def loss(tokens):
        return jnp.sum(delta_rule.chunked(jnp.asarray(NOTHING), *tokens).out ** 2)

    for leaf in jax.jit(jax.grad(loss))(some_tokens(70, forget=100.0)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize("count", [0, 1, 16, 33, 100])
def test_advance_equals_steps(count):
    tokens = some_tokens(100)
    start = stepped(some_tokens(20, 3))[1].astype(np.float32)
    done = chunked(start, *tokens)
    state = delta_rule.advance(start, tokens.k, done.u, tokens.g, jnp.int32(count))
    close(state, stepped(tokens.rows(slice(0, count)), start)[1])
    if not count:
        assert np.array_equal(state, start)


# --- trees --------------------------------------------------------------------------------------


class Stream(NamedTuple):
    """One layer of a stream."""

    length: int
    blocks: jax.Array
    recent: Recent


def new_stream() -> Stream:
    recent = Recent(
        jnp.zeros((RECENT, KEY_HEADS, KEY_DIM)),
        jnp.zeros((RECENT, HEADS, VALUE_DIM)),
        jnp.zeros((RECENT, HEADS)),
    )
    return Stream(0, jnp.zeros((2, HEADS, KEY_DIM, VALUE_DIM)), recent)


@jax.jit
def verify(blocks, recent, length, window, tokens: Tokens):
    """As a round does it; compiled once for each row count."""
    paths = delta_rule.paths_of(length, window[:, DEPTH], window[:, PATH:])
    return delta_rule.tree(blocks, recent, paths, *tokens, tile=POLICY.query_tile)


commit = jax.jit(delta_rule.settle)


def run(stream: Stream, tree: DraftTree, tokens: Tokens, rows: int | None = None):
    """Outputs and u of a window whose row r is `tokens` row r, padded by the policy or to `rows`;
    and a function that commits a path of it."""
    width = len(tree.tokens)
    rows = rows or POLICY.rows(width)
    window = window_array(tree, width, rows)
    window_tokens = tokens.rows(np.where(np.arange(rows) <= width, np.arange(rows), 0))
    length = jnp.int32(stream.length)
    out, u = verify(stream.blocks, stream.recent, length, jnp.asarray(window), window_tokens)

    def settle(path: list[int]) -> Stream:
        padded = jnp.asarray(path + [0] * (MAX_ROWS - len(path)), jnp.int32)
        layer = Layer(stream.blocks, stream.recent)
        rows = Recent(window_tokens.k, u, window_tokens.g)
        (new,) = commit([layer], [rows], length, padded, jnp.int32(len(path)))
        return Stream(stream.length + len(path), *new)

    return np.asarray(out)[: width + 1], settle


def random_tree(rng: np.random.Generator, width: int) -> DraftTree:
    """Any tree whose parents come before their children."""
    parents = np.array([rng.integers(-1, node) for node in range(width)], np.int64)
    depths = np.zeros(width, np.int64)
    for node, parent in enumerate(parents):
        depths[node] = 1 + (depths[parent] if parent != NO_PARENT else 0)
    return DraftTree(np.zeros(width, np.int32), parents, depths, np.zeros(width))


def path_to(tree: DraftTree, row: int) -> list[int]:
    """Rows from the anchor's, 0, to `row`."""
    path = [row]
    while path[0]:
        parent = tree.parents[path[0] - 1]
        path.insert(0, 0 if parent == NO_PARENT else int(parent) + 1)
    return path


def plain(stream: Stream, tokens: Tokens) -> tuple[list[np.ndarray], list[Stream]]:
    """One token a round: each token's output, and the stream after it."""
    outs, streams = [], []
    nothing = random_tree(np.random.default_rng(0), 0)
    for row in range(len(tokens.q)):
        out, settle = run(stream, nothing, tokens.rows(slice(row, row + 1)))
        stream = settle([0])
        outs.append(out[0])
        streams.append(stream)
    return outs, streams


def assert_same_bits(left: Stream, right: Stream):
    assert left.length == right.length
    for a, b in zip(jax.tree.leaves(left[1:]), jax.tree.leaves(right[1:]), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@functools.cache
def plain_text() -> tuple[Tokens, list[np.ndarray], list[Stream]]:
    text = some_tokens(90, 11, forget=0.2)
    return text, *plain(new_stream(), text)


def test_plain_decoding_equals_steps():
    text, outs, streams = plain_text()
    expected, _ = stepped(text)
    close(np.stack(outs), expected)
    for stream in streams:
        newest = stream.length // BLOCK
        for block in (newest, newest - 1):
            state = stepped(text.rows(slice(0, max(block, 0) * BLOCK)))[1]
            close(stream.blocks[block % 2], state)


@pytest.mark.parametrize("width", range(16))
def test_a_node_equals_steps_along_its_path(width):
    """From first principles: siblings never see each other, whatever the tree and the context."""
    text, _, streams = plain_text()
    rng = np.random.default_rng(width)
    for length in (0, *rng.integers(1, 91, 4)):
        stream = streams[length - 1] if length else new_stream()
        before = stepped(text.rows(slice(0, length)))[1]
        tree, tokens = random_tree(rng, width), some_tokens(width + 1, 100 + width, forget=0.3)
        out, settle = run(stream, tree, tokens)
        for row in range(width + 1):
            path = path_to(tree, row)
            expected, state = stepped(tokens.rows(path), before)
            close(out[row], expected[-1])
        settled = settle(path)
        block = settled.length // BLOCK
        end = BLOCK * block - length  # rows of the path in the newest block state
        if end > 0:
            _, state = stepped(tokens.rows(path[:end]), before)
            close(settled.blocks[block % 2], state)


@given(st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_bits_do_not_depend_on_the_rounds(seed):
    """One text through any rounds: any trees, widths, numbers accepted; one state, one output."""
    text, outs, streams = plain_text()
    rng = np.random.default_rng(seed)
    start = int(rng.integers(0, 40))
    stream = streams[start - 1] if start else new_stream()
    while stream.length < 70:
        width = int(rng.integers(0, 16))
        tree = random_tree(rng, width)
        path = path_to(tree, int(rng.integers(0, width + 1)))
        # The text along the path, other tokens in the other rows.
        index = stream.length + np.arange(len(path))
        tokens = Tokens(*(x.copy() for x in some_tokens(width + 1, seed % 1000)))
        for part, true in zip(tokens, text, strict=True):
            part[path] = true[index]
        out, settle = run(stream, tree, tokens)
        for depth, row in enumerate(path):
            assert out[row].tobytes() == outs[stream.length + depth].tobytes()
        stream = settle(path[: int(rng.integers(1, len(path) + 1))])
        assert_same_bits(stream, streams[stream.length - 1])


def test_bits_do_not_depend_on_the_row_count():
    _, _, streams = plain_text()
    rng = np.random.default_rng(3)
    for length in (7, 15, 16, 31, 40):
        tree = random_tree(rng, POLICY.row_counts[0] - 1)
        tokens = some_tokens(POLICY.row_counts[0], length)
        results = [run(streams[length - 1], tree, tokens, rows)[0] for rows in POLICY.row_counts]
        for out in results:
            assert out.tobytes() == results[0].tobytes()


def test_a_first_token_does_not_see_zeros_as_tokens():
    """Before the first token there is nothing: neither decay nor what a slot happens to hold."""
    tokens = some_tokens(1)
    out, _ = run(new_stream(), random_tree(np.random.default_rng(0), 0), tokens)
    close(out, stepped(tokens)[0])
