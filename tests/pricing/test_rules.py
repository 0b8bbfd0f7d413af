"""Every rule's contract: names, limits, records, monotone choices, clocks, cost of a call."""

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.errors import InputError
from dflash_jax.pricing import LEARN_ROUNDS, Rule, make_rule
from dflash_jax.pricing.renewal import PROBES, SETTLED, best_width

NAMES = ("renewal", "ratio", "band:5", "tiers", "fixed:3", "fixed:0")


def linear_prior(base=34.0, node=0.4, contexts=(64, 8192), cap=15):
    return [(w, c, base + c * 1e-3 + node * w) for c in contexts for w in range(cap + 1)]


def play(rule: Rule, rounds: int, price, seed=0, context=1100, noise=0.03, record=None) -> Rule:
    """Rounds of random falling chances, priced by `price(width)` ms with noise."""
    rng = np.random.default_rng(seed)
    for t in range(rounds):
        chances = np.cumprod(rng.uniform(0.6, 1.0, rule.cap))
        width = rule.choose(chances, context + 5 * t)
        depth = int((rng.random(rule.cap) < 0.85).cumprod().sum())
        landed = np.arange(width) < depth
        ms = price(width) * float(np.exp(noise * rng.standard_normal()))
        rule.observe(width=width, context_length=context + 5 * t, round_ms=ms, landed=landed)
        if record is not None:
            record.append(width)
    return rule


@pytest.mark.parametrize(
    "name",
    ["band:x", "band:", "band", "band:101", "fixed:99", "fixed:-1", "fixed:1.5", "fixed", "x"],
)
def test_unknown_names_are_refused_with_the_valid_ones(name):
    with pytest.raises(InputError, match=r"fixed:|band:0 to band:100") as caught:
        make_rule(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cap": -1},
        {"least": 16},
        {"least": -1},
        {"tile": 0},
        {"clock": "wall"},
        {"prior": [(1, 2)]},
        {"prior": [(1, 64, 0.0)]},
        {"prior": [(1, 64, float("nan"))]},
        {"prior": [(-1, 64, 3.0)]},
        {"prior": [(1, -64, 3.0)]},
        {"prior": [(float("inf"), 64, 3.0)]},
        {"prior": [(1, 64, 1e300)]},
        {"prior": ["abc"]},
    ],
)
def test_bad_arguments_are_one_line(wrong):
    with pytest.raises(InputError) as caught:
        make_rule("renewal", **wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["renewal", "ratio", "band:5", "tiers"])
@pytest.mark.parametrize("cap", [0, 1])
def test_below_two_nodes_the_width_is_fixed_and_nothing_is_learned(name, cap):
    rule = make_rule(name, cap=cap)
    rule.choose(np.ones(cap), 9)
    rule.observe(width=cap, context_length=9, round_ms=5.0, landed=np.ones(cap, bool))
    assert rule.choose(np.full(cap, 0.01), 9) == cap
    assert rule.keep()["bands"] == {}


chance_lists = st.lists(st.floats(0.0, 1.0), min_size=0, max_size=15).map(np.cumprod)
times = st.floats(1e-3, 1e5)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    least=st.integers(0, 4),
    with_prior=st.booleans(),
    rounds=st.lists(st.tuples(chance_lists, times, st.integers(0, 200_000)), max_size=30),
)
def test_any_chances_and_times_give_a_width_in_range(name, least, with_prior, rounds):
    rule = make_rule(name, least=least, prior=linear_prior() if with_prior else None)
    for chances, ms, context in rounds:
        width = rule.choose(chances, context)
        assert isinstance(width, int)
        assert min(least, len(chances)) <= width <= len(chances)
        rule.observe(width=width, context_length=context, round_ms=ms, landed=np.ones(width, bool))
    text = json.dumps(rule.explain()) + json.dumps(rule.keep())
    assert "NaN" not in text
    assert "Infinity" not in text


@settings(max_examples=100, deadline=None)
@given(
    tokens=chance_lists,
    steps=st.lists(st.floats(0.0, 50.0), min_size=16, max_size=16),
    rate=st.floats(1e-4, 10.0),
    slope=st.floats(0.0, 50.0),
)
def test_a_higher_price_slope_never_widens_the_tree(tokens, steps, rate, slope):
    expected = 1.0 + np.concatenate([[0.0], np.cumsum(tokens)])
    prices = 30.0 + np.cumsum(steps)[: len(expected)]
    steeper = prices + slope * np.arange(len(expected))
    assert best_width(expected, steeper, rate) <= best_width(expected, prices, rate)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 5),
    low=st.lists(st.floats(0.0, 1.0), min_size=15, max_size=15),
    high=st.lists(st.floats(0.0, 1.0), min_size=15, max_size=15),
)
def test_higher_chances_never_narrow_the_tree(seed, low, high):
    """The whole rule, with all that it has learned: a deep copy has the same λ and prices."""
    rule = trained(seed)
    chances = np.cumprod(low)
    higher = np.maximum(chances, np.cumprod(high))
    narrow = copy.deepcopy(rule).choose(chances, 1500)
    assert copy.deepcopy(rule).choose(higher, 1500) >= narrow


def trained(seed, known={}):  # noqa: B006 - a cache of rules, each only ever copied
    if seed not in known:
        rule = make_rule("renewal", prior=linear_prior(node=3.0))
        known[seed] = play(rule, 100, lambda w: 34.0 + 3.0 * w, seed)
    return known[seed]


def test_a_chance_that_is_not_a_number_does_not_choose():
    rule = trained(0)
    width = copy.deepcopy(rule).choose(np.full(15, np.nan), 1500)
    assert 0 <= width <= 15
    rule = copy.deepcopy(rule)
    rule.choose(np.full(15, np.nan), 1500)
    rule.observe(width=width, context_length=1500, round_ms=40.0, landed=np.zeros(width, bool))
    good = np.cumprod(np.full(15, 0.9))
    assert rule.choose(good, 1500) == copy.deepcopy(trained(0)).choose(good, 1500)


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_no_sample(ms):
    rule, other = copy.deepcopy(trained(1)), copy.deepcopy(trained(1))
    landed = np.zeros(5, bool)
    rule.observe(width=5, context_length=1500, round_ms=ms, landed=landed)
    other.observe(width=5, context_length=1500, round_ms=1.0, landed=landed, sample=False)
    assert rule.keep() == other.keep()


@pytest.mark.parametrize("name", ["renewal", "ratio"])
def test_rounds_that_are_no_samples_leave_the_prices(name):
    """A compile round or a throttled first round is never blamed on a width."""
    rule = play(make_rule(name, prior=linear_prior()), 60, lambda w: 34.0 + 0.4 * w)
    rule.choose(np.full(15, 0.5), 1395)
    before = rule.explain()["prices_ms"]
    rule.observe(width=7, context_length=1400, round_ms=9e4, landed=np.zeros(7, bool), sample=False)
    rule.choose(np.full(15, 0.5), 1395)
    assert rule.explain()["prices_ms"] == pytest.approx(before)


@pytest.mark.parametrize("name", ["renewal", "ratio"])
def test_the_two_clocks_never_share_a_record(name):
    lone = play(make_rule(name, clock="lone"), 30, lambda w: 30.0 + w)
    shared = make_rule(name, clock="shared")
    with pytest.raises(InputError, match="clock"):
        shared.seed(lone.keep())
    shared.seed(play(make_rule(name, clock="shared"), 30, lambda w: 30.0 + w).keep())


def test_a_record_of_another_cap_or_rule_is_refused():
    record = play(make_rule("renewal"), 30, lambda w: 30.0 + w).keep()
    with pytest.raises(InputError, match="cap"):
        make_rule("renewal", cap=7).seed(record)
    with pytest.raises(InputError, match="ratio"):
        make_rule("ratio").seed(record)
    with pytest.raises(InputError):
        make_rule("renewal").seed({"clock": "lone", "cap": 15, "rule": "renewal"})


@pytest.mark.parametrize("name", ["renewal", "ratio"])
def test_a_record_survives_json_and_seeds_the_next_stream(name):
    steep = 12.0
    kept = play(make_rule(name), 150, lambda w: 30.0 + steep * w).keep()
    record = json.loads(json.dumps(kept))
    assert record == kept
    fresh, seeded = make_rule(name), make_rule(name)
    seeded.seed(record)
    seeded.seed(None)  # nothing kept under this clock yet: a no-op
    widths = [[], []]
    play(fresh, 12, lambda w: 30.0 + steep * w, seed=9, record=widths[0])
    play(seeded, 12, lambda w: 30.0 + steep * w, seed=9, record=widths[1])
    # The fresh rule has to find out that nodes are dear; the seeded one knows.
    assert max(widths[1]) <= 6 < max(widths[0])


def test_bands_are_kept_across_contexts():
    rule = make_rule("renewal", prior=linear_prior())
    play(rule, 40, lambda w: 40.0 + w, context=300)
    play(rule, 40, lambda w: 90.0 + 9.0 * w, context=30_000)
    bands = rule.keep()["bands"]
    contexts = [band["context_length"] for band in bands.values()]
    assert min(contexts) < 600
    assert max(contexts) > 29_000
    again = make_rule("renewal", prior=linear_prior())
    again.seed(rule.keep())
    again.choose(np.full(15, 0.5), 30_000)
    deep = np.array(again.explain()["prices_ms"])
    again.choose(np.full(15, 0.5), 300)
    short = np.array(again.explain()["prices_ms"])
    assert deep[5] - deep[1] == pytest.approx(36.0, rel=0.3)
    assert short[5] - short[1] < 12.0


def test_a_round_learned_late_counts_with_its_own_chances():
    """The engine observes a round after it has priced the next one."""
    first, second = np.array([0.9, 0.8, 0.1]), np.array([0.2, 0.1, 0.05])
    landed = np.array([True, False, False])
    prompt, late = (make_rule("renewal", prior=linear_prior()) for _ in range(2))
    seen = {"width": 3, "context_length": 500, "round_ms": 36.0, "landed": landed}
    prompt.choose(first, 500)
    prompt.observe(**seen)
    late.choose(first, 500)
    late.choose(second, 503)
    late.observe(**seen, chances=first)
    prompt.choose(second, 503)
    for rule in (prompt, late):
        rule.observe(**seen | {"context_length": 503}, chances=second)
    np.testing.assert_array_equal(prompt.trust.bias, late.trust.bias)
    np.testing.assert_array_equal(prompt.cost.m, late.cost.m)
    assert prompt.choose(second, 503) == late.choose(second, 503)


def test_equal_rounds_do_not_make_the_width_flip():
    """FAULTS: the width flips between two values several times a second."""
    rule = make_rule("renewal", prior=linear_prior(node=3.0))
    rng = np.random.default_rng(0)
    chances = 0.8 ** np.arange(1, 16)
    widths = []
    for t in range(300):
        width = rule.choose(chances, 1000 + 5 * t)
        landed = np.arange(width) < int((rng.random(15) < 0.8).cumprod().sum())
        ms = (35.0 + 3.0 * width) * (1.0 + 0.05 * rng.standard_normal())
        rule.observe(width=width, context_length=1000 + 5 * t, round_ms=ms, landed=landed)
        widths.append(width)
    flips = np.count_nonzero(np.diff(widths[50:]))
    assert flips <= 12  # a drift of the belief now and then, not a flicker


def test_rows_that_got_cheap_are_found_and_probes_are_few():
    """A row falls from 7 ms to 1 ms: narrow rounds alone cannot tell that from a faster card."""
    found = []
    for seed in range(8):
        rule = make_rule("renewal", prior=linear_prior(49.5, 7.0))
        before, after = [], []
        play(rule, 60, lambda w: 49.5 + 7.0 * w, seed, noise=0.1, record=before)
        jumps = rule.cost.jumps
        play(rule, 90, lambda w: 50.0 + 1.0 * w, seed + 100, noise=0.1, record=after)
        found.append(np.mean(after[50:]))
        assert np.mean(before[20:]) < 6.5
        assert found[-1] > 6.5
        assert rule.cost.jumps > jumps
        assert 0 <= rule._probes <= PROBES
    assert np.mean(found) > 10.0


def test_what_it_explains_is_what_it_chose():
    rule = make_rule("renewal", prior=linear_prior(49.5, 7.0))
    rng = np.random.default_rng(3)
    probes = 0
    for t in range(120):
        slope = 7.0 if t < 60 else 1.0  # a jump, so that there are probes
        width = rule.choose(np.cumprod(rng.uniform(0.5, 1.0, 15)), 500 + t)
        why = rule.explain()
        gains = np.array(why["expected_tokens"]) - why["tokens_per_ms"] * np.array(
            why["believed_ms"]
        )
        assert why["width"] == width
        assert why["probe"] == (gains[width] < gains.max() - 1e-9)
        probes += why["probe"]
        ms = (49.5 + slope * width) * rng.normal(1.0, 0.03)
        landed = np.arange(width) < rng.integers(0, 6)
        rule.observe(width=width, context_length=500 + t, round_ms=ms, landed=landed)
    assert probes


def test_prices_that_are_known_are_not_probed():
    """Every width is the best by what is believed; a warm-up leaves nothing to explore."""
    rule = make_rule("renewal", prior=linear_prior(node=3.0))
    rng = np.random.default_rng(0)
    for t in range(100):
        width = rule.choose(np.cumprod(rng.uniform(0.6, 1.0, 15)), 1000)
        why = rule.explain()
        prices = rule._believed(why["prices_ms"])
        assert width == best_width(why["expected_tokens"], prices, why["tokens_per_ms"])
        ms = (35.0 + 3.0 * width) * (1.0 + 0.03 * rng.standard_normal())
        rule.observe(width=width, context_length=1000, round_ms=ms, landed=np.arange(width) < t % 5)


@pytest.mark.parametrize("jump", [1.0, 1.6])
def test_widths_of_one_program_cost_the_same_and_the_widest_is_taken(jump):
    """Whatever is learned in between, also after a jump and from another stream's record."""
    counts = (2, 4, 8, 12, 16)  # rows of each program
    ends = [next(count for count in counts if count > width) - 1 for width in range(16)]
    ms = {end: 20.0 + 1.1 * end for end in ends}
    prior = [
        (w, context, ms[ends[w]] * scale)
        for context, scale in ((64, 1), (2048, 2))
        for w in range(16)
    ]
    rng = np.random.default_rng(0)
    record = None
    for _ in range(3):
        rule = make_rule("renewal", prior=prior)
        rule.seed(record)
        for number in range(150):
            size = int(rng.integers(1, 16))
            chances = np.sort(rng.random(size) ** 2)[::-1]
            width = rule.choose(chances, 300)
            assert width in (*ends, size)
            price = ms[ends[width]] * (jump if number > 70 else 1.0)
            landed = rng.random(width) < chances[:width]
            rule.observe(
                width=width,
                context_length=300,
                round_ms=price * rng.lognormal(0, 0.05),
                landed=landed,
            )
        prices = rule.explain()["prices_ms"]
        assert all(prices[w] == prices[ends[w]] for w in range(16))
        record = rule.keep()


def test_choosing_and_learning_stay_few_steps():
    """Some 15 and 40 us on a quiet machine; counted, since a timing fails on a busy one."""
    rule = copy.deepcopy(trained(2))
    chances = np.cumprod(np.full(15, 0.85))
    landed = np.arange(9) < 3

    def steps(function) -> int:
        """Python's own instructions; those of C are few where no NumPy is called."""
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(None)
        return count

    assert steps(lambda: rule.choose(chances, 1500)) <= 2500
    seen = {"width": 9, "context_length": 1500, "round_ms": 61.0, "landed": landed}
    assert steps(lambda: rule.observe(**seen)) <= 8000


def test_where_all_widths_run_one_program_the_whole_tree_is_taken_and_nothing_is_learned():
    """As on a GPU that pads every window: what learning costs would be lost to the fixed width."""
    prior = [(w, context, 5.0 + 1e-3 * context) for context in (64, 2048) for w in range(16)]
    rule = make_rule("renewal", prior=prior)
    for size in (15, 6, 0):
        assert rule.choose(np.full(size, 0.01), 300) == size
    rule.choose(np.full(15, 0.01), 300)
    rule.observe(width=15, context_length=300, round_ms=50.0, landed=np.zeros(15, bool))
    assert rule.choose(np.full(15, 0.01), 300) == 15
    assert rule.keep() == make_rule("renewal").keep()
    # One width timed otherwise, and there is something to choose.
    assert (
        make_rule("renewal", prior=[*prior[:-1], (15, 2048, 9.0)]).choose(np.zeros(15), 300) == 14
    )


def test_rounds_wait_to_be_learned_only_while_prices_are_settled():
    assert make_rule("renewal").learn_every == 1  # no warm-up: all is to be learned
    rule = make_rule("renewal", prior=linear_prior())
    play(rule, 30, lambda w: 34.0 + 0.4 * w)
    assert rule.learn_every == LEARN_ROUNDS
    play(rule, 15, lambda w: 60.0 + 0.4 * w)  # the card slows down
    assert rule.cost.jumps == 1
    assert rule.learn_every == 1
    play(rule, SETTLED, lambda w: 60.0 + 0.4 * w)
    assert rule.learn_every == LEARN_ROUNDS


@pytest.mark.parametrize(
    ("first", "factor"), [((200, 500), 3.0), ((200, 500), 10.0), ((100, 900), 0.2)]
)
def test_a_card_that_got_fast_again_is_believed(first, factor):
    """A slow phase ends: the narrow widths' old prices must not hold up the others'."""
    chances = 0.6 ** np.arange(1, 16)
    expected = np.concatenate([[1.0], 1.0 + chances.cumsum()])
    price = 5.0 + 2.0 * np.arange(16)
    best = (expected / price).max()
    for seed in range(2):
        rng = np.random.default_rng(seed)
        rule = make_rule("renewal", prior=linear_prior(5.0, 2.0))
        tokens = ms = 0.0
        for t in range(900):
            width = rule.choose(chances, 200)
            landed = np.logical_and.accumulate(rng.random(width) < 0.6)
            true = price[width] * (factor if first[0] <= t < first[1] else 1.0)
            clock = true * np.exp(0.03 * rng.standard_normal())
            rule.observe(width=width, context_length=200, round_ms=clock, landed=landed)
            if t >= 700:
                tokens, ms = tokens + expected[width], ms + true
        scale = factor if first[1] == 900 else 1.0
        assert tokens / ms * scale > 0.95 * best


def test_a_width_that_must_be_reached_is_the_widest_of_its_program():
    prior = [(w, c, 5.0 if w == 0 else 9.0 if w <= 7 else 14.0) for w in range(16) for c in (9, 99)]
    rule = make_rule("renewal", prior=prior, least=1)
    assert rule.choose(np.full(15, 0.05), 9) == 7
    assert rule.explain()["width"] == 7


def test_programs_are_found_in_any_order_of_the_timings():
    rows = [(w, c, (5.0 if w == 0 else 6.0) + c) for c in (100, 3000) for w in range(16)]
    mixed = [row for row in rows if row[0] % 2] + [row for row in reversed(rows) if not row[0] % 2]
    for prior in (rows, mixed, [*rows, rows[3]]):
        assert make_rule("renewal", prior=prior).cost.programs == [0, 15]


@pytest.mark.parametrize("name", ["ratio", "tiers"])
def test_the_published_rules_learn_each_round(name):
    assert make_rule(name).learn_every == 1


def test_the_threads_rule_asks_for_each_probe_once_and_has_its_trials():
    """Rounds are observed one late, as in the engine."""
    rule = make_rule("ratio")
    chances = np.cumprod(np.full(15, 0.9))
    widths, trials = [], 0
    for t in range(200):
        widths.append(rule.choose(chances, 200))
        trials += rule._round % 8 == 7
        if t:
            seen = widths[-2]
            rule.observe(
                width=seen, context_length=200, round_ms=5.0 + seen, landed=np.ones(seen, bool)
            )
    assert widths[:5] == [1, 5, 9, 13, 15]
    assert trials > 20


def test_pricing_and_replay_import_no_jax():
    code = (
        "import sys, dflash_jax.pricing, dflash_jax.bench.replay_grid; print('jax' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
