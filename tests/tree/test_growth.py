"""The draft tree against a naive best-first search and an exhaustive one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.decode.noise import gumbel, split_seed
from dflash_jax.tree.growth import CAP, CHILDREN, EMPTY, NO_PARENT, grow, own_log_chances
from dflash_jax.tree.lattice import Lattice

SETTINGS = settings(max_examples=80, deadline=None)
lattice_seeds = st.integers(0, 2**32 - 1)


def random_lattice(seed: int, depth: int, count: int) -> Lattice:
    rng = np.random.default_rng(seed)
    candidates = np.stack([rng.permutation(1000)[:count] for _ in range(depth)])
    return Lattice(
        candidates.astype(np.int32),
        rng.normal(0, 2, (depth, count)).astype(np.float32),
        rng.normal(0, 2, (depth, count, count)).astype(np.float32),
    )


def random_scores(seed: int, depth: int, count: int, temperature: float, noisy: bool):
    """(candidates, log-chances), from a lattice as the driver makes them."""
    lattice = random_lattice(seed, depth, count)
    noise = None
    if noisy:
        positions = 17 + np.arange(depth)[:, None]
        noise = gumbel(split_seed(seed), positions, lattice.candidates)
    return lattice.candidates, own_log_chances(lattice, temperature, noise)


def naive_tree(candidates: np.ndarray, scores: np.ndarray, cap: int) -> list[tuple]:
    """(token, parent, depth) of each pop: a list searched anew each time, first proposed first."""
    proposed: list[tuple[float, int, int, int]] = []  # path score, parent, position, candidate
    popped: list[tuple] = []

    def propose(parent: int, position: int, before: int, path_score: float) -> None:
        if position == len(candidates):
            return
        siblings = list(range(candidates.shape[1]))
        siblings.sort(key=lambda c: (-scores[position, before, c], c))
        for c in siblings[:CHILDREN]:
            proposed.append((path_score + float(scores[position, before, c]), parent, position, c))

    propose(NO_PARENT, 0, 0, 0.0)
    while proposed and len(popped) < cap:
        best = max(entry[0] for entry in proposed)
        first = next(i for i, entry in enumerate(proposed) if entry[0] == best)
        score, parent, position, c = proposed.pop(first)
        popped.append((int(candidates[position, c]), parent, position + 1))
        propose(len(popped) - 1, position + 1, c, score)
    return popped


def nodes_of(tree) -> list[tuple]:
    return list(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), strict=True))


shapes = {
    "seed": lattice_seeds,
    "depth": st.integers(1, 7),
    "count": st.integers(1, 8),
    "temperature": st.sampled_from([0.3, 1.0, 1.7]),
    "noisy": st.booleans(),
}


@SETTINGS
@given(**shapes)
def test_the_tree_of_w_nodes_is_the_first_w_pops(seed, depth, count, temperature, noisy):
    candidates, scores = random_scores(seed, depth, count, temperature, noisy)
    whole = grow(candidates, scores, CAP)
    for width in range(len(whole.tokens) + 1):
        tree = grow(candidates, scores, width)
        for got, wanted in zip(tree, whole, strict=True):
            assert got.tolist() == wanted[:width].tolist()


@SETTINGS
@given(**shapes)
def test_parents_pop_before_children_and_have_at_most_four(seed, depth, count, temperature, noisy):
    candidates, scores = random_scores(seed, depth, count, temperature, noisy)
    tree = grow(candidates, scores)
    possible = sum(min(CHILDREN, count) ** d for d in range(1, depth + 1))
    assert len(tree.tokens) == min(CAP, possible)
    assert (tree.parents < np.arange(len(tree.parents))).all()
    depths = [1 if p == NO_PARENT else tree.depths[p] + 1 for p in tree.parents]
    assert tree.depths.tolist() == depths
    assert np.bincount(tree.parents + 1).max() <= CHILDREN
    children = set(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(children) == len(tree.tokens)  # siblings differ
    assert all(tree.tokens[i] in candidates[tree.depths[i] - 1] for i in range(len(tree.tokens)))


@SETTINGS
@given(**shapes)
def test_grows_as_a_naive_best_first_search(seed, depth, count, temperature, noisy):
    candidates, scores = random_scores(seed, depth, count, temperature, noisy)
    assert nodes_of(grow(candidates, scores)) == naive_tree(candidates, scores, CAP)


@SETTINGS
@given(seed=lattice_seeds, depth=st.integers(1, 6), count=st.integers(1, 7))
def test_ties_go_to_the_node_proposed_earlier(seed, depth, count):
    rng = np.random.default_rng(seed)
    candidates = np.tile(np.arange(count, dtype=np.int32), (depth, 1))
    # Few values, exactly representable, so that most paths tie with another.
    scores = -rng.integers(0, 3, (depth, count, count)).astype(np.float32)
    assert nodes_of(grow(candidates, scores)) == naive_tree(candidates, scores, CAP)


def test_equal_siblings_come_in_the_order_of_their_candidates():
    candidates = np.array([[9, 3, 7, 5, 1]], np.int32)
    tree = grow(candidates, np.full((1, 5, 5), -1.0, np.float32))
    assert tree.tokens.tolist() == [9, 3, 7, 5]


def test_a_tie_between_a_child_and_an_earlier_proposed_sibling_goes_to_the_sibling():
    candidates = np.array([[10, 11], [20, 21]], np.int32)
    scores = np.array([[[-1, -2]] * 2, [[-1, -3]] * 2], np.float32)
    # 10 pops first and proposes 20 with -2; 11, proposed before it, also has -2.
    assert grow(candidates, scores, 3).tokens.tolist() == [10, 11, 20]


@SETTINGS
@given(seed=lattice_seeds, temperature=st.sampled_from([0.3, 1.0, 1.7]), noisy=st.booleans())
@pytest.mark.parametrize(("depth", "count"), [(3, 2), (2, 3), (1, 6)])
def test_no_other_tree_of_the_same_size_is_likelier(depth, count, seed, temperature, noisy):
    """Exhaustive: every set of nodes that holds its parents and has at most 4 children a node."""
    candidates, scores = random_scores(seed, depth, count, temperature, noisy)
    paths = [
        path
        for length in range(1, depth + 1)
        for path in itertools.product(range(count), repeat=length)
    ]

    def chance(path: tuple[int, ...]) -> float:
        before = (0, *path)
        return float(np.exp(sum(float(scores[d, before[d], c]) for d, c in enumerate(path))))

    chances = {path: chance(path) for path in paths}
    for width in range(1, 5):
        tree = grow(candidates, scores, width)
        grown: list[tuple[int, ...]] = []
        for token, parent, d in nodes_of(tree):
            c = int(np.flatnonzero(candidates[d - 1] == token)[0])
            grown.append((*(grown[parent] if parent != NO_PARENT else ()), c))
        best = max(
            sum(chances[path] for path in chosen)
            for chosen in itertools.combinations(paths, len(grown))
            if is_tree(chosen)
        )
        np.testing.assert_allclose(sum(chances[path] for path in grown), best, rtol=1e-6)


def is_tree(chosen: tuple[tuple[int, ...], ...]) -> bool:
    held = set(chosen)
    fathers = [path[:-1] for path in chosen]
    whole = all(father == () or father in held for father in fathers)
    return whole and max(map(fathers.count, fathers)) <= CHILDREN


@SETTINGS
@given(**shapes)
def test_own_chances_are_a_softmax_over_siblings(seed, depth, count, temperature, noisy):
    lattice = random_lattice(seed, depth, count)
    positions = 5 + np.arange(depth)[:, None]
    noise = gumbel(split_seed(seed), positions, lattice.candidates) if noisy else None
    got = own_log_chances(lattice, temperature, noise)
    assert got.shape == (depth, count, count)
    for d, a, b in itertools.product(range(depth), range(count), range(count)):
        scores = (lattice.unary[d].astype(float) + lattice.edge[d, a]) / temperature
        if noise is not None:
            scores += noise[d]
        wanted = scores[b] - np.log(np.exp(scores).sum())
        np.testing.assert_allclose(got[d, a, b], wanted, atol=1e-4)


def test_own_chances_of_a_node_are_kept_beside_it():
    candidates, scores = random_scores(3, 4, 5, 1.0, False)
    tree = grow(candidates, scores)
    for token, parent, depth, own in zip(*tree, strict=True):
        c = int(np.flatnonzero(candidates[depth - 1] == token)[0])
        before = 0
        if parent != NO_PARENT:
            before = int(np.flatnonzero(candidates[depth - 2] == tree.tokens[parent])[0])
        assert own == scores[depth - 1, before, c]


def test_noise_turns_the_tree_towards_what_the_target_will_draw():
    """A lattice equal to the target's own scores: the sampled child is the first of the tree."""
    rng = np.random.default_rng(0)
    unary = rng.normal(0, 1, (1, 8)).astype(np.float32)
    ids = np.arange(8, dtype=np.int32)[None]
    lattice = Lattice(ids, unary, np.zeros((1, 8, 8), np.float32))
    firsts = set()
    for seed in range(200):
        noise = gumbel(split_seed(seed), np.array([[12]]), ids)
        tree = grow(ids, own_log_chances(lattice, 0.8, noise))
        drawn = int(np.argmax(unary[0] / np.float32(0.8) + noise[0]))
        assert tree.tokens[0] == drawn
        firsts.add(drawn)
    assert len(firsts) > 4  # a greedy tree would always start alike


@pytest.mark.parametrize("cap", [0, 1, 15])
def test_no_positions_or_no_cap_give_no_nodes(cap):
    empty = grow(np.zeros((0, 4), np.int32), np.zeros((0, 4, 4), np.float32), cap)
    candidates, scores = random_scores(1, 3, 4, 1.0, False)
    none = grow(candidates, scores, 0)
    for tree in (empty, none):
        for got, wanted in zip(tree, EMPTY, strict=True):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
