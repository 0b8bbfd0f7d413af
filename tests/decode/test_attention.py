"""Tree attention against plain attention with an explicit mask, and against itself, bit for bit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decode import attention as attn
from dflash_jax.decode.attention import NEAR, Cache
from dflash_jax.models import layers
from dflash_jax.tree.masks import DEPTH, MAX_ROWS, PATH, window_array
from tests.decode import tiny
from tests.tree.test_masks import random_tree, root_path

HEADS, KV_HEADS, HEAD_DIM, CAPACITY, CHUNK = 4, 2, 16, 192, 32
LAYER = 1
POLICY = dataclasses.replace(tiny.policy(), key_chunk=CHUNK)
# Around: no context, the near keys' reach, a chunk, a chunk and the near keys' reach, many chunks.
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 46, 47, 48, 49, 79, 80, 81, 150)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def inputs(seed: int):
    """A cache of two layers, and q, k, v of a whole window."""
    rng = np.random.default_rng(seed)
    shape = (2, KV_HEADS, CAPACITY, HEAD_DIM)
    cache = Cache(normal(rng, *shape), normal(rng, *shape))
    q = 2 * normal(rng, MAX_ROWS, HEADS, HEAD_DIM)
    k, v = (normal(rng, MAX_ROWS, KV_HEADS, HEAD_DIM) for _ in range(2))
    return cache, q, k, v


@jax.jit
def windowed(q, k, v, cache, length, window):
    depths, paths = window[:, DEPTH], window[:, PATH:]
    near = attn.near_keys(length, depths, paths)
    return attn.window_attention(q, k, v, cache, LAYER, length, depths, near, POLICY)


@jax.jit
def plain(q, k, v, cache, mask):
    """Over all of the cache and the window, as the mask says."""
    keys = jnp.concatenate([cache.k[LAYER].transpose(1, 0, 2), k])
    values = jnp.concatenate([cache.v[LAYER].transpose(1, 0, 2), v])
    return layers.attention(q, keys, values, mask)


def explicit_mask(tree, length: int) -> np.ndarray:
    """[rows, CAPACITY + rows]: the committed context, and the row's own root path."""
    mask = np.zeros((MAX_ROWS, CAPACITY + MAX_ROWS), bool)
    mask[:, :length] = True
    for row in range(MAX_ROWS):
        path = root_path(tree, row)
        mask[row, [CAPACITY + ancestor for ancestor in path]] = True
    return mask


def chain():
    tree = random_tree(0, 15)
    nodes = np.arange(15, dtype=np.int32)
    return tree._replace(parents=nodes - 1, depths=nodes + 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_sees_the_context_and_its_own_ancestors(length):
    for seed in range(4):
        tree = random_tree(seed, 15) if seed else chain()
        cache, q, k, v = inputs(seed)
        got = windowed(q, k, v, cache, jnp.int32(length), window_array(tree, 15, MAX_ROWS))
        wanted = plain(q, k, v, cache, explicit_mask(tree, length))
        np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_node_in_a_window_and_one_fed_after_its_ancestors_have_the_same_bits(length):
    tree = random_tree(length, 15) if length % 2 else chain()
    cache, q, k, v = inputs(length)
    whole = np.asarray(
        windowed(q, k, v, cache, jnp.int32(length), window_array(tree, 15, MAX_ROWS))
    )
    rows = POLICY.rows(0)
    for row in range(MAX_ROWS):
        path = root_path(tree, row)
        fed = Cache(cache.k.copy(), cache.v.copy())
        for depth, ancestor in enumerate(path[:-1]):
            fed.k[LAYER, :, length + depth] = k[ancestor]
            fed.v[LAYER, :, length + depth] = v[ancestor]
        alone = window_array(tree, 0, rows)
        lone = [np.repeat(x[row : row + 1], rows, axis=0) for x in (q, k, v)]
        serial = windowed(*lone, fed, jnp.int32(length + len(path) - 1), alone)
        assert tiny.same_bits(serial[0], whole[row]), f"row {row} at depth {len(path) - 1}"


@pytest.mark.parametrize("rows", [count for count in POLICY.row_counts if count < MAX_ROWS])
def test_fewer_rows_give_the_same_bits(rows):
    tree, (cache, q, k, v) = random_tree(rows, 15), inputs(rows)
    whole = windowed(q, k, v, cache, jnp.int32(77), window_array(tree, 15, MAX_ROWS))
    window = window_array(tree, rows - 1, rows)
    part = windowed(q[:rows], k[:rows], v[:rows], cache, jnp.int32(77), window)
    assert tiny.same_bits(part, whole[:rows])


@pytest.mark.parametrize("length", LENGTHS)
def test_neither_garbage_behind_the_context_nor_another_layer_changes_a_bit(length):
    tree = random_tree(length, 15)
    cache, q, k, v = inputs(length)
    window = window_array(tree, 15, MAX_ROWS)
    clean = windowed(q, k, v, cache, jnp.int32(length), window)
    dirty = Cache(cache.k.copy(), cache.v.copy())
    for buffer in dirty:
        buffer[:, :, length:] = 3e38 * np.sign(buffer[:, :, length:])
        buffer[1 - LAYER] = np.nan
    assert tiny.same_bits(windowed(q, k, v, dirty, jnp.int32(length), window), clean)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_that_no_row_reaches_are_not_read(length):
    """The cost follows the context: a NaN in a chunk that is read would spread, times a weight of
    0 too."""
    tree, (cache, q, k, v) = chain(), inputs(length)
    window = window_array(tree, 15, MAX_ROWS)
    clean = windowed(q, k, v, cache, jnp.int32(length), window)
    far_end = length + 15 - (NEAR - 1)  # of the deepest row: the far keys end before `length`
    chunks_end = -(-far_end // CHUNK) * CHUNK
    near_end = max(length, NEAR)  # the slice that holds the near keys
    dirty = Cache(cache.k.copy(), cache.v.copy())
    for buffer in dirty:
        buffer[:, :, max(chunks_end, near_end) :] = np.nan
    assert tiny.same_bits(windowed(q, k, v, dirty, jnp.int32(length), window), clean)
    # And the chunks that are read do spread it: the check above can fail.
    if length > NEAR:
        dirty.v[LAYER, :, 0] = np.nan
        assert not np.isfinite(windowed(q, k, v, dirty, jnp.int32(length), window)).all()


def test_merging_parts_equals_one_softmax_over_all_keys():
    rng = np.random.default_rng(0)
    q = jnp.asarray(normal(rng, 3, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM))
    k, v = (jnp.asarray(normal(rng, 20, KV_HEADS, HEAD_DIM)) for _ in range(2))
    mask = jnp.asarray(rng.random((3, 20)) < 0.6).at[:, 0].set(True)
    a = attn.shared_part(q, k[:7], v[:7], mask[:, :7])
    b = attn.shared_part(q, k[7:], v[7:], mask[:, 7:])
    got = attn.finish(attn.merge(a, b), jnp.float32)
    wanted = layers.attention(q.reshape(3, HEADS, HEAD_DIM), k, v, mask)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_part_of_no_keys_changes_no_bit():
    rng = np.random.default_rng(1)
    q = jnp.asarray(normal(rng, 3, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM))
    k, v = (jnp.asarray(normal(rng, 9, KV_HEADS, HEAD_DIM)) for _ in range(2))
    some = attn.shared_part(q, k, v, jnp.ones((3, 9), bool))
    none = attn.shared_part(q, k, v, jnp.zeros((3, 9), bool))
    for merged in (attn.merge(some, none), attn.merge(none, some)):
        assert all(tiny.same_bits(x, y) for x, y in zip(merged, some, strict=True))
