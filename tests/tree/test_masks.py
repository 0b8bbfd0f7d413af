"""Window arrays against paths followed node by node."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.tree.growth import CAP, EMPTY, NO_PARENT, DraftTree
from dflash_jax.tree.masks import DEPTH, MAX_ROWS, PATH, TOKEN, WINDOW_COLUMNS, window_array


def random_tree(seed: int, width: int) -> DraftTree:
    rng = np.random.default_rng(seed)
    parents = np.array([rng.integers(-1, node) for node in range(width)], np.int32)
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == NO_PARENT else depths[parent] + 1)
    tokens = rng.integers(0, 50_000, width).astype(np.int32)
    return DraftTree(tokens, parents, np.array(depths, np.int32), np.zeros(width))


def root_path(tree: DraftTree, row: int) -> list[int]:
    """Rows from the anchor to `row`, by following parents upwards."""
    path = [row]
    while path[0]:
        path.insert(0, int(tree.parents[path[0] - 1]) + 1)
    return path


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    grown=st.integers(0, CAP),
    cut=st.floats(0, 1),
    padding=st.integers(0, 4),
)
def test_every_row_knows_its_token_depth_and_path(seed, grown, cut, padding):
    tree = random_tree(seed, grown)
    width = round(cut * grown)
    rows = min(width + 1 + padding, MAX_ROWS)
    window = window_array(tree, width, rows)
    assert (window.shape, window.dtype) == ((rows, WINDOW_COLUMNS), np.int32)
    for row in range(1, width + 1):
        path = root_path(tree, row)
        assert window[row, TOKEN] == tree.tokens[row - 1]
        assert window[row, DEPTH] == len(path) - 1
        assert window[row, PATH : PATH + len(path)].tolist() == path
        assert not window[row, PATH + len(path) :].any()


@pytest.mark.parametrize(("width", "rows"), [(0, 2), (3, 4), (3, 16)])
def test_padding_rows_are_copies_of_the_anchors(width, rows):
    window = window_array(random_tree(0, CAP), width, rows)
    assert not window[0].any()
    assert not window[width + 1 :].any()


def test_the_picture_in_the_module():
    tree = DraftTree(
        np.array([5, 6, 7], np.int32),
        np.array([NO_PARENT, NO_PARENT, 0], np.int32),
        np.array([1, 1, 2], np.int32),
        np.zeros(3),
    )
    window = window_array(tree, 3, 4)
    assert window[:, TOKEN].tolist() == [0, 5, 6, 7]
    assert window[:, DEPTH].tolist() == [0, 1, 1, 2]
    assert window[:, PATH : PATH + 3].tolist() == [[0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 1, 3]]


def test_plain_decoding_has_a_window_of_the_anchor_alone():
    assert not window_array(EMPTY, 0, 2).any()
