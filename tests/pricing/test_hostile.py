"""What must not break a rule: impossible rounds, wild numbers, records that are none of ours."""

import copy
import json
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.errors import InputError
from dflash_jax.pricing import LandingModel, make_rule

NAMES = ("renewal", "ratio", "band:5", "tiers", "fixed:3")
LEARNING = ("renewal", "ratio")


def taught(name="renewal", rounds=40, context=500, price=lambda w: 34.0 + 2.0 * w):
    rule = make_rule(name, prior=[(w, 64, price(w)) for w in range(16)])
    rng = np.random.default_rng(0)
    for t in range(rounds):
        chances = np.cumprod(rng.uniform(0.6, 1.0, 15))
        width = rule.choose(chances, context + t)
        landed = np.arange(width) < rng.integers(0, 5)
        rule.observe(width=width, context_length=context + t, round_ms=price(width), landed=landed)
    return rule


# Rounds ----------------------------------------------------------------------------------

anything = st.floats(allow_nan=True, allow_infinity=True)
possible_ms = st.floats(1e-6, 1e9)
rounds = st.tuples(
    st.lists(anything, max_size=20),  # chances: any floats, more than the cap at times
    st.integers(0, 10**9),  # contexts rise and fall
    st.one_of(anything, possible_ms),
    st.integers(0, 15),  # the width run is not always the one chosen
    st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    least=st.integers(0, 4),
    prior=st.none()
    | st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10**6), possible_ms), max_size=20),
    played=st.lists(rounds, max_size=25),
)
def test_any_floats_give_widths_in_range_finite_beliefs_and_a_record_that_seeds(
    name, least, prior, played
):
    rule = make_rule(name, least=least, prior=prior)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an overflow or a NaN on the way is a fault too
        for chances, context, ms, other, hit in played:
            width = rule.choose(np.array(chances), context)
            most = min(len(chances), 15)
            assert min(least, most) <= width <= most
            width = min(other, most)
            landed = np.full(width, hit)
            rule.observe(width=width, context_length=context, round_ms=ms, landed=landed)
        text = json.dumps(rule.keep(), allow_nan=False)
        json.dumps(rule.explain(), allow_nan=False)
        again = make_rule(name, least=least, prior=prior)
        again.seed(json.loads(text))
        assert min(least, 3) <= again.choose(np.array([0.9, 0.8, 0.7]), 300) <= 3


def test_chances_outside_of_0_to_1_count_as_the_nearest():
    """NaN counts as 0: a drafter gone wrong offers nothing."""
    wild = np.array([np.inf, 7.0, 1.0, 0.9, np.nan, -3.0, -np.inf])
    tame = np.array([1.0, 1.0, 1.0, 0.9, 0.0, 0.0, 0.0])
    one, other = taught(), taught()
    assert one.choose(wild, 600) == other.choose(tame, 600)
    landed = np.array([True, True, False, False, False])
    seen = {"width": 5, "context_length": 600, "round_ms": 44.0, "landed": landed}
    one.observe(**seen)
    other.observe(**seen)
    np.testing.assert_array_equal(one.trust.bias, other.trust.bias)
    assert one.keep() == other.keep()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 6, "landed": np.zeros(6, bool)},  # wider than what was offered
        {"width": 16, "landed": np.zeros(16, bool), "chances": np.zeros(16)},  # than the cap
        {"width": -1, "landed": np.zeros(0, bool)},
        {"width": 3, "landed": np.zeros(2, bool)},
        {"width": 1, "landed": np.zeros(2, bool)},
        {"context_length": -1},
        {"context_length": float("nan")},
    ],
)
def test_a_round_that_was_never_priced_is_one_line_and_teaches_nothing(name, wrong):
    rule = taught(name)
    rule.choose(np.full(5, 0.5), 600)
    before = copy.deepcopy(rule).keep()
    round_ = {"width": 3, "context_length": 600, "round_ms": 40.0, "landed": np.zeros(3, bool)}
    with pytest.raises(InputError, match="observe: width=") as caught:
        rule.observe(**round_ | wrong)
    assert "\n" not in str(caught.value)
    assert rule.keep() == before


@pytest.mark.parametrize("context", [-1, float("nan"), float("inf"), 10**400])
def test_a_context_that_cannot_be_is_one_line_and_changes_nothing(context):
    rule = taught()
    before = copy.deepcopy(rule).keep()
    with pytest.raises(InputError, match="context_length"):
        rule.choose(np.full(5, 0.5), context)
    seen = {"width": 1, "round_ms": 3.0, "landed": [True], "chances": [0.5]}
    with pytest.raises(InputError, match="context_length"):
        rule.observe(context_length=context, **seen)
    assert rule.keep() == before
    with pytest.raises(InputError, match="context_length"):
        make_rule(prior=[(1, context if context == context else -1, 3.0)])


def test_numbers_of_any_kind_become_pythons_own():
    """NumPy's scalars in lists, contexts and times: what is kept is JSON, and floats of 64 bits."""
    rule = make_rule()
    for _ in range(5):
        rule.choose([np.float32(0.5)] * 4, np.int64(300))
        rule.observe(
            width=3, context_length=np.int64(300), round_ms=np.float32(40.5), landed=[1, 0, np.nan]
        )
        json.dumps([rule.keep(), rule.explain()], allow_nan=False)
    assert {type(number) for number in (*rule.cost.m, *rule.cost.cov[0], rule._tokens)} == {float}


def test_what_is_handed_out_is_a_copy():
    rule, landing = taught(), LandingModel()
    rule.choose(np.full(5, 0.5), 600)
    rule.explain()["expected_tokens"][0] = 99.0
    assert rule.explain()["expected_tokens"][0] == 1.0
    kept = landing.to_record()
    before = copy.deepcopy(kept)
    landing.observe(np.log([0.7]), [-1], [0], [True])
    assert kept == before


@pytest.mark.parametrize(
    "prior",
    [
        [(0, 100, 0.01)] * 2 + [(w, 100, 1e4) for w in (5, 10, 15)],
        [
            (w, c, ms * (1 + 0.01 * w))
            for c, ms in ((10**6, 1e-6), (10**6 + 1, 1e5))
            for w in (0, 15)
        ],
    ],
)
def test_wild_timings_still_give_prices_above_zero(prior):
    rule = make_rule(prior=prior)
    for context in (100, 10**6):
        assert 0 <= rule.choose(np.full(15, 0.5), context) <= 15
        prices = rule.explain()["prices_ms"]
        assert min(prices) > 0.0
        assert prices == sorted(prices)


def test_thousands_of_rounds_at_one_width_leave_the_others_priced():
    rule = taught()
    for _ in range(20_000):
        rule.observe(
            width=4,
            context_length=600,
            round_ms=42.0,
            landed=np.zeros(4, bool),
            chances=np.full(4, 0.1),
        )
    cov = np.array(rule.cost.cov)
    assert np.linalg.eigvalsh(cov).min() > -1e-9 * np.abs(cov).max()
    prices = rule.cost.prices(600)
    assert prices == pytest.approx(34.0 + 2.0 * np.arange(16), rel=0.2)
    # And they are learned as soon as they are run.
    for _ in range(30):
        rule.observe(
            width=12,
            context_length=600,
            round_ms=90.0,
            landed=np.zeros(12, bool),
            chances=np.full(12, 0.1),
        )
    assert rule.cost.prices(600)[12] == pytest.approx(90.0, rel=0.03)


def test_a_slope_that_leads_beyond_any_price_still_keeps_a_record_that_seeds():
    """Found by hypothesis in CI: timings of 1 ms and 1e9 ms a token apart."""
    rule = make_rule("renewal", prior=[(0, 0, 1.0), (0, 1, 1e9)])
    width = rule.choose(np.full(5, 0.5), 10**7)
    rule.observe(width=width, context_length=10**7, round_ms=1e9, landed=np.zeros(width, bool))
    make_rule("renewal").seed(json.loads(json.dumps(rule.keep())))


def test_a_context_that_falls_takes_its_own_band():
    """A shorter request follows a longer one under the same rule."""
    rule = taught(context=60_000, price=lambda w: 60.0 + 9.0 * w)
    rule.choose(np.full(15, 0.5), 300)
    rule.observe(width=4, context_length=300, round_ms=96.0, landed=np.zeros(4, bool))
    assert len(rule.keep()["bands"]) == 2
    assert np.all(rule.cost.prices(300) <= rule.cost.prices(60_000))


# Records ---------------------------------------------------------------------------------

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def leaves(record, path=()):
    """Paths of every value inside nested dicts and lists, and of these themselves."""
    if path:
        yield path
    if isinstance(record, dict):
        for key, value in record.items():
            yield from leaves(value, (*path, key))
    elif isinstance(record, list):
        for index, value in enumerate(record):
            yield from leaves(value, (*path, index))


def replaced(record, path, value):
    record = copy.deepcopy(record)
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return record


def attack(record, data):
    """The record with one of its values, large or small, replaced by junk."""
    top = sorted({path[:depth] for path in leaves(record) for depth in (1, 2, 3, 4, 5, 6)}, key=str)
    return replaced(record, data.draw(st.sampled_from(top)), data.draw(junk))


def refused(function, record):
    """Whether it raises an `InputError`, of one line."""
    try:
        function(record)
    except InputError as error:
        return "\n" not in str(error)
    return False


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(LEARNING), data=st.data())
def test_a_corrupt_record_is_refused_whole_or_harmless(name, data):
    corrupt = attack(taught(name).keep(), data)
    rule = make_rule(name)
    if refused(rule.seed, corrupt):
        assert rule.keep() == make_rule(name).keep()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for context in (10, 600, 50_000):
            width = rule.choose(np.cumprod(np.full(15, 0.9)), context)
            landed = np.ones(width, bool)
            rule.observe(width=width, context_length=context, round_ms=40.0, landed=landed)
        json.dumps(rule.keep(), allow_nan=False)


@pytest.mark.parametrize(
    "change",
    [
        {"prices_ms": [1.0] * 15},
        {"prices_ms": [0.0] * 16},
        {"prices_ms": [float("nan")] * 16},
        {"cov": [[0.1] * 15] * 15},
        {"cov": (-np.eye(16)).tolist()},
        {"cov": np.triu(np.ones((16, 16))).tolist()},
        {"noise": 0.0},
        {"widths": [0.0] * 16},
        {"tokens": -1.0},
        {"context_length": 40_000},  # not of this band
        {"context_length": 10**400},
        {"prices_ms": [1e-320] * 16},
        {"tokens": 1e300},
        {"tokens": 1e-9},
    ],
)
def test_a_band_that_no_rule_kept_is_refused(change):
    record = taught().keep()
    band = next(iter(record["bands"].values()))
    band.update(change)
    with pytest.raises(InputError, match="drop the record"):
        make_rule("renewal").seed(record)


@pytest.mark.parametrize("record", [[], "record", 3, {"bands": {}}])
def test_what_is_no_record_is_refused(record):
    with pytest.raises(InputError, match=r"drop the record|drop this one"):
        make_rule("renewal").seed(record)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_corrupt_landing_record_is_refused_or_harmless(data):
    model = LandingModel()
    node = np.log([0.7, 0.2, 0.6]), [-1, -1, 0], [0, 0, 1]
    model.observe(*node, [True, False, True])
    corrupt = attack(json.loads(json.dumps(model.to_record())), data)
    if not refused(LandingModel, corrupt):
        model = LandingModel(corrupt)
    model.observe(*node, [True, False])
    chances = model.chances(*node)
    assert np.all((chances >= 0.0) & (chances <= 1.0))
    assert chances[2] <= chances[0]


def test_a_score_that_is_no_number_offers_nothing():
    chances = LandingModel().chances([float("nan"), -np.inf, np.inf], [-1, -1, -1], [0, 0, 0])
    assert chances[:2] == pytest.approx([0.0, 0.0], abs=1e-3)
    assert chances[2] == pytest.approx(1.0, abs=1e-3)
