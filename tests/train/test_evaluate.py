"""Replayed decodes, calibration and shards' neighbours, on the host."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_jax.pricing import LandingModel
from dflash_jax.train import calibrate
from dflash_jax.train.replies import Reply
from dflash_jax.train.walks import Judged, chain, judge, judge_reply, recall, tokens_a_round, walk
from dflash_jax.tree.growth import CAP, DraftTree, grow
from dflash_jax.tree.lattice import Lattice

DEPTH, COUNT, VOCABULARY = 4, 5, 12


def random_lattices(anchors: int, seed: int = 0) -> Lattice:
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.tile(np.arange(VOCABULARY), (anchors, DEPTH, 1)), axis=-1)
    unary = -np.sort(-rng.normal(size=(anchors, DEPTH, COUNT)), axis=-1)
    edge = rng.normal(size=(anchors, DEPTH, COUNT, COUNT))
    edge[:, 0] = edge[:, 0, :1]
    return Lattice(order[..., :COUNT].astype(np.int32), unary, edge)


def a_reply(length: int = 60, seed: int = 7) -> Reply:
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, length).astype(np.int32)
    return Reply("chat", tokens, 10, length - 1, seed)


def plain_decode(lattices, reply, width, selector):
    """Round by round, as a driver does: the reference of `walk`."""
    position, rounds = reply.start, 0
    while position < reply.end:
        tree = judge_reply(lattices, reply, 0.0, selector, True)[position - reply.start].tree
        accepted, row = 0, -1
        for _ in range(width):
            nexts = [
                n
                for n in range(min(width, len(tree.tokens)))
                if tree.parents[n] == row
                and position + accepted + 1 <= reply.end
                and tree.tokens[n] == reply.tokens[position + accepted + 1]
            ]
            if not nexts:
                break
            row, accepted = nexts[0], accepted + 1
        position += accepted + 1
        rounds += 1
    return rounds


@pytest.mark.parametrize("selector", [True, False])
def test_walk_equals_a_plain_decode(selector):
    reply = a_reply(30)
    lattices = random_lattices(reply.end - reply.start)
    judged = judge_reply(lattices, reply, 0.0, selector, True)
    for width in (0, 1, 3, 8, CAP):
        assert walk(judged, width).rounds == plain_decode(lattices, reply, width, selector)


def test_width_zero_is_one_token_a_round_and_more_width_is_never_worse():
    reply = a_reply()
    lattices = random_lattices(reply.end - reply.start)
    judged = judge_reply(lattices, reply, 1.0, True, True)
    rates = tokens_a_round([judged])
    assert rates[0] == 1
    landed = np.array([j.landed.cumsum() for j in judged])
    assert (np.diff(landed, axis=1) >= 0).all()


def test_a_chain_is_the_best_child_at_each_depth():
    candidates = np.array([[3, 4], [5, 6]], np.int32)
    scores = np.log(np.array([[[0.9, 0.1], [0.9, 0.1]], [[0.2, 0.8], [0.7, 0.3]]]))
    tree = chain(candidates, scores)
    assert tree.tokens.tolist() == [3, 6]
    assert tree.parents.tolist() == [-1, 0]
    np.testing.assert_allclose(np.exp(tree.own), [0.9, 0.8])
    assert grow(candidates, scores, cap=2).tokens.tolist() == [3, 6]


def test_nodes_land_with_their_ancestors_and_not_past_the_reply():
    tree = DraftTree(
        np.array([1, 2, 2, 3], np.int32),
        np.array([-1, -1, 0, 2], np.int32),
        np.array([1, 1, 2, 3], np.int32),
        np.ones(4),
    )
    assert judge(tree, np.array([1, 2, 3])).tolist() == [True, False, True, True]
    assert judge(tree, np.array([1, 2])).tolist() == [True, False, True, False]
    assert judge(tree, np.array([2, 2, 3])).tolist() == [False, True, False, False]


def test_recall_counts_the_truth_by_depth():
    lattice = Lattice(
        np.array([[[1, 2], [3, 4]], [[9, 3], [4, 9]]], np.int32), np.zeros((2, 2, 2)), None
    )
    reply = Reply("chat", np.array([0, 1, 3], np.int32), 0, 2, 0)
    found = recall([lattice], [reply])
    assert found[1] == [0.5, 1.0]
    assert found[2] == [1.0, 1.0]


def overconfident(count: int = 3000, seed: int = 0) -> list[Judged]:
    """Trees of two chained nodes and a sibling whose chances claim more than they hold."""
    rng = np.random.default_rng(seed)
    judged = []
    for _ in range(count):
        own = rng.uniform(0.3, 0.99, 3)
        tree = DraftTree(
            np.arange(3, dtype=np.int32),
            np.array([-1, 0, -1], np.int32),
            np.array([1, 2, 1], np.int32),
            np.log(own),
        )
        hit = rng.random(3) < own**2
        hit[1] &= hit[0]
        hit[2] &= not hit[0]
        judged.append(Judged(tree, hit))
    return judged


def test_calibration_makes_chances_honest_on_unseen_nodes():
    record = calibrate.fit(overconfident(seed=0))
    fresh = overconfident(seed=1)
    before = calibrate.reliability(*calibrate.chances(None, fresh))
    after = calibrate.reliability(*calibrate.chances(record, fresh))
    assert before.error > 0.1
    assert after.error < 0.03


def test_the_record_is_a_prior_of_the_landing_model():
    record = calibrate.fit(overconfident(300))
    model = LandingModel({"greedy": record, "sampled": record})
    assert model.to_record()["greedy"] == record


def test_reliability_of_honest_chances_is_small():
    rng = np.random.default_rng(0)
    chance = rng.random(20_000)
    assert calibrate.reliability(chance, rng.random(20_000) < chance).error < 0.02
    assert calibrate.reliability(chance, np.zeros(20_000, bool)).error == pytest.approx(
        0.5, abs=0.01
    )
