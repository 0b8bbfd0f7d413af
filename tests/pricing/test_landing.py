"""Landing calibration, and the fallback for chances that are wrong."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.errors import InputError
from dflash_jax.pricing import LandingModel
from dflash_jax.pricing.trust import Trust

# anchor ─ 0 ─ 2 ─ 4        pop order 0, 1, 2, 3, 4; node 1 is node 0's sibling
#        └ 1   └ 3
PARENTS = [-1, -1, 0, 2, 2]
DEPTHS = [0, 0, 1, 2, 2]
OWN = np.log([0.7, 0.2, 0.6, 0.5, 0.3])


def chain(own, length):
    return np.log(np.full(length, own)), np.arange(length) - 1, np.arange(length)


def test_a_chance_is_own_times_the_parents():
    chances = LandingModel().chances(OWN, PARENTS, DEPTHS)
    assert chances == pytest.approx([0.7, 0.2, 0.42, 0.21, 0.126], rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    own=st.lists(st.floats(-50.0, 0.0), min_size=5, max_size=5),
    landed=st.lists(st.booleans(), min_size=0, max_size=5),
    rounds=st.integers(0, 30),
)
def test_chances_are_in_range_and_fall_along_paths(own, landed, rounds):
    model = LandingModel()
    for _ in range(rounds):
        model.observe(own, PARENTS, DEPTHS, landed)
    chances = model.chances(own, PARENTS, DEPTHS)
    assert np.all((chances >= 0.0) & (chances <= 1.0))
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            assert chances[node] <= chances[parent]
    better = model.chances(np.array(own) / 2.0, PARENTS, DEPTHS)
    assert np.all(better >= chances - 1e-12)


def test_only_children_of_landed_nodes_are_judged():
    """Node 0 was rejected: nothing is known of 2, 3 and 4, whatever their chances were."""
    one, other = LandingModel(), LandingModel()
    one.observe(OWN, PARENTS, DEPTHS, [False, True, False, False, False])
    strange = OWN.copy()
    strange[2:] = -7.0
    other.observe(strange, PARENTS, DEPTHS, [False, True, False, False, False])
    assert one.to_record() == other.to_record()


def test_only_the_verified_prefix_counts():
    one, other = LandingModel(), LandingModel()
    one.observe(OWN, PARENTS, DEPTHS, [True, False])
    other.observe(OWN[:2], PARENTS[:2], DEPTHS[:2], [True, False])
    assert one.to_record() == other.to_record()
    untouched = LandingModel()
    untouched.observe(OWN, PARENTS, DEPTHS, [])
    assert untouched.to_record() == LandingModel().to_record()


def test_a_round_that_lands_to_its_end_is_censored():
    """FAULTS: averaging "at least 3" as 3 biases acceptance low.

    True own chance 0.9 everywhere, chains of 3 verified: the calibrated chance must go to 0.9,
    where a mean of landed counts, read as geometric, would give 2.44 / 3.44 = 0.71.
    """
    rng = np.random.default_rng(0)
    model = LandingModel()
    node = chain(0.8, 3)
    for _ in range(600):
        landed = (rng.random(3) < 0.9).cumprod().astype(bool)
        model.observe(*node, landed)
    assert model.chances(*node)[0] == pytest.approx(0.9, abs=0.02)


def test_an_over_confident_drafter_is_calibrated_by_depth():
    rng = np.random.default_rng(1)
    model = LandingModel()
    length = 6
    truth = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    node = np.log(truth**0.4), np.arange(length) - 1, np.arange(length)
    for _ in range(800):
        model.observe(*node, (rng.random(length) < truth).cumprod().astype(bool))
    chances = model.chances(*node)
    assert chances == pytest.approx(np.cumprod(truth), abs=0.05)


def test_greedy_and_sampled_are_calibrated_apart():
    model = LandingModel()
    node = chain(0.8, 4)
    for _ in range(100):
        model.observe(*node, [False, False, False, False], sampled=True)
    assert model.chances(*node, sampled=False)[0] == pytest.approx(0.8)
    assert model.chances(*node, sampled=True)[0] < 0.4


def test_first_and_later_children_are_calibrated_apart():
    model = LandingModel()
    for _ in range(200):  # the sibling lands far more often than it was said to
        model.observe(OWN[:2], PARENTS[:2], DEPTHS[:2], [False, True])
    chances = model.chances(OWN, PARENTS, DEPTHS)
    assert chances[0] < 0.3
    assert chances[1] > 0.6


def test_a_record_is_json_and_a_prior():
    model = LandingModel()
    for _ in range(50):
        model.observe(OWN, PARENTS, DEPTHS, [True, False, True])
    record = json.loads(json.dumps(model.to_record()))
    again = LandingModel.from_record(record)
    assert np.array_equal(again.chances(OWN, PARENTS, DEPTHS), model.chances(OWN, PARENTS, DEPTHS))
    with pytest.raises(InputError, match="LandingModel record"):
        LandingModel(prior={"greedy": 3})


def test_trust_leaves_good_chances_alone():
    rng = np.random.default_rng(2)
    trust = Trust(15)
    error = []
    for _ in range(400):
        chances = np.cumprod(rng.uniform(0.5, 1.0, 15))
        error.append(np.abs(np.array(trust.apply(chances)) - chances).max())
        landed = np.zeros(15, bool)  # a chain: the path lands down to some depth
        landed[: int(np.count_nonzero(rng.random() < chances))] = True
        trust.observe(chances, landed)
    assert np.mean(error) < 0.01


def test_chances_that_say_nothing_become_the_mean():
    """Every round is the same, the drafter says otherwise: the width must not follow it."""
    rng = np.random.default_rng(3)
    trust = Trust(15)
    truth = 0.8 ** np.arange(1, 16)
    for _ in range(500):
        chances = np.cumprod(rng.uniform(0.5, 1.0, 15))
        trust.observe(chances, np.arange(15) < int(np.count_nonzero(rng.random() < truth)))
    high, low = (np.array(trust.apply([chance] * 15)) for chance in (0.9, 0.2))
    assert (high - low)[:8].max() < 0.4  # 0.7 as given
    mean = trust.apply(np.cumprod(np.full(15, 0.75)))
    assert mean[:10] == pytest.approx(truth[:10], abs=0.1)
