"""The cost model: sharing, robustness, drift, jumps, and the filter against its textbook form."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.pricing import cost as cost_module
from dflash_jax.pricing.cost import CostModel

WIDTHS = np.arange(16)


def rows(price, contexts=(64, 8192), noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (int(w), c, float(price(w, c) * np.exp(noise * rng.standard_normal())))
        for c in contexts
        for w in WIDTHS
    ]


def straight(w, c):
    return 34.0 + 4e-3 * c + (0.4 + 4e-4 * c) * w


def stepped(w, c):
    return 24.0 + (4.0 + 2.5e-4 * c) * (w // 4 + 1)


@settings(max_examples=60, deadline=None)
@given(
    known=st.booleans(),
    seen=st.lists(
        st.tuples(st.integers(0, 15), st.integers(0, 200_000), st.floats(1e-3, 1e6)), max_size=40
    ),
    low=st.integers(0, 200_000),
    more=st.integers(0, 200_000),
)
def test_prices_are_positive_and_never_fall_in_width_or_context(known, seen, low, more):
    model = CostModel(15, 4, rows(straight) if known else [])
    for width, context, ms in seen:
        model.observe(width, context, ms)
    short, long = model.prices(low), model.prices(low + more)
    assert np.all(np.isfinite(short))
    assert np.all(short > 0.0)
    assert np.all(np.diff(short) >= 0.0)
    assert np.all(long >= short * (1.0 - 1e-9))


@pytest.mark.parametrize("price", [straight, stepped])
def test_warm_up_prices_hold_between_and_beyond_its_contexts(price):
    model = CostModel(15, 4, rows(price))
    for context in (64, 3000, 8192, 20_000):
        assert model.prices(context) == pytest.approx(price(WIDTHS, context), rel=0.02)


def test_noisy_warm_up_is_smoothed_and_its_steps_are_found():
    """One timing of each width, 5 % off: the curve is nearer the truth than the timings."""
    for price, limit in ((straight, 0.5), (stepped, 0.9)):
        ours, raw = [], []
        for seed in range(20):
            noisy = rows(price, contexts=(64, 8192, 65_536), noise=0.05, seed=seed)
            truth = price(WIDTHS, 8192)
            ours.append(np.log(CostModel(15, 4, noisy).prices(8192) / truth))
            raw.append(np.log([r[2] for r in noisy if r[1] == 8192] / truth))
        assert np.std(ours) < limit * np.std(raw)


def test_missing_widths_are_filled_in():
    some = [row for row in rows(straight) if row[0] in (1, 5, 9, 13, 15)]
    assert CostModel(15, 4, some).prices(64) == pytest.approx(straight(WIDTHS, 64), rel=0.03)


def test_one_width_teaches_the_others():
    """A card 30 % slower than at warm-up: rounds at one width alone move every price."""
    model = CostModel(15, 4, rows(straight))
    for _ in range(20):
        model.observe(6, 64, 1.3 * straight(6, 64))
    assert model.prices(64) == pytest.approx(1.3 * straight(WIDTHS, 64), rel=0.05)
    # And what was learned here holds at another context of the surface.
    assert model.prices(4000) == pytest.approx(1.3 * straight(WIDTHS, 4000), rel=0.06)


def test_the_slope_is_learned_from_the_widths_that_vary():
    rng = np.random.default_rng(0)
    model = CostModel(15, 4, rows(lambda w, c: 50.0 + 5.0 * w))
    for _ in range(150):
        w = int(rng.integers(2, 7))
        model.observe(w, 64, (50.0 + 7.0 * w) * (1.0 + 0.03 * rng.standard_normal()))
    prices = model.prices(64)
    assert (prices[6] - prices[2]) / 4 == pytest.approx(7.0, rel=0.1)
    assert prices[15] == pytest.approx(155.0, rel=0.1)  # never run


def test_a_spike_moves_prices_by_little_and_a_changed_card_at_once():
    model = CostModel(15, 4, rows(straight))
    rng = np.random.default_rng(1)

    def run(rounds, factor):
        for _ in range(rounds):
            w = int(rng.integers(8, 16))
            noise = 1.0 + 0.03 * rng.standard_normal()
            model.observe(w, 64, factor * straight(w, 64) * noise)

    run(50, 1.0)
    before = model.prices(64)
    model.observe(12, 64, 10.0 * straight(12, 64))
    assert model.prices(64) == pytest.approx(before, rel=0.01)
    assert model.jumps == 0
    run(12, 1.5)
    assert model.jumps == 1
    assert model.prices(64)[8:] == pytest.approx(1.5 * straight(WIDTHS, 64)[8:], rel=0.05)


def test_a_slow_start_is_not_blamed_on_the_widths_it_ran():
    """The first rounds are 10 % slow and narrow, the later ones wide: the slope stays."""
    model = CostModel(15, 4, rows(straight))
    for t in range(8):
        model.observe(3, 64, straight(3, 64) * (1.1 - 0.1 * t / 8))
    for _ in range(20):
        model.observe(14, 64, straight(14, 64))
    prices = model.prices(64)
    assert prices[14] / prices[3] == pytest.approx(straight(14, 64) / straight(3, 64), rel=0.03)


def test_drift_is_followed():
    model = CostModel(15, 4, rows(straight))
    rng = np.random.default_rng(2)
    for t in range(300):
        w = int(rng.integers(6, 16))
        heat = 1.0 + 0.2 * t / 300
        model.observe(w, 64, heat * straight(w, 64) * (1.0 + 0.03 * rng.standard_normal()))
    assert model.prices(64)[6:] == pytest.approx(1.2 * straight(WIDTHS, 64)[6:], rel=0.04)
    assert model.jumps == 0


def test_noise_is_learned():
    for std in (0.02, 0.1):
        model = CostModel(15, 4, rows(straight))
        rng = np.random.default_rng(3)
        for _ in range(400):
            w = int(rng.integers(6, 16))
            model.observe(w, 64, straight(w, 64) * (1.0 + std * rng.standard_normal()))
        assert model.noise == pytest.approx(std, rel=0.35)


def test_doubt_shrinks_where_timed():
    model = CostModel(15, 4, rows(straight, noise=0.05))
    model.prices(64)
    before = model.doubt(8)
    for _ in range(60):
        for w in (6, 8, 10):
            model.observe(w, 64, straight(w, 64))
    after = model.doubt(8)
    assert after[8] == pytest.approx(0.0, abs=1e-9)
    assert after[10] < 0.5 * before[10]
    assert after[15] < before[15]


def padded(w, c):
    """Windows padded to 1, 4, 8, 12 or 16 rows."""
    return straight(0 if w == 0 else 4 * (w // 4) + 3, c)


@pytest.mark.parametrize(("price", "programs"), [(straight, 16), (padded, 5)])
def test_one_update_is_the_textbook_kalman_filter(price, programs):
    """`observe` against predict and correct written with matrices, an ordinary residual."""
    model = CostModel(15, 4, rows(price, noise=0.0))
    model.prices(64)
    model._rounds = cost_module.START_ROUNDS  # past the slow start
    width, ms = 9, 1.02 * price(9, 64)
    program = model.program_of[width]
    h = np.eye(programs)[program] * model.reference(64)[program]  # ms = h · m
    m, cov = np.array(model.m), np.array(model.cov) + model._drift
    r = (model.noise * h @ m) ** 2
    gain = cov @ h / (h @ cov @ h + r)
    expected_m = m + gain * (ms - h @ m)
    expected_cov = (np.eye(programs) - np.outer(gain, h)) @ cov
    model.observe(width, 64, ms)
    # `observe` takes the noise before its own update of the noise; so does this reference,
    # to within that update (5 %).
    assert model.m == pytest.approx(expected_m, rel=1e-3)
    largest = float(np.abs(expected_cov).max())
    assert np.array(model.cov) == pytest.approx(expected_cov, abs=2e-3 * largest)


def test_widths_of_one_program_share_a_price_and_a_record_of_it():
    model = CostModel(15, 4, rows(padded))
    assert model.programs == [0, 3, 7, 11, 15]
    for _ in range(30):
        model.observe(9, 64, 1.3 * padded(9, 64))
        model.observe(5, 64, 1.3 * padded(5, 64))
    prices = model.prices(64)
    assert prices == pytest.approx(1.3 * np.array([padded(w, 64) for w in WIDTHS]), rel=0.05)
    knot = model.knot()
    assert knot.curve == pytest.approx(prices)
    assert knot.cov[8, 5] == knot.cov[11, 7]
    again = CostModel(15, 4, rows(padded))
    again.add_knots([type(knot).from_record(knot.to_record(), 15)])
    assert again.prices(64) == pytest.approx(prices)
