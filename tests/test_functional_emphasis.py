"""Window sizes and eta rules against hand-computed values, naive oracles and their properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.samplers.emphasis import window_size as size
from trl_storages.samplers.return_improvement import ReturnTrend, advance_trend, mean_slope

finite = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.requirement("ere-window")
def test_windows_of_a_phase_by_hand():
    # 0.5^(1/500) to the power of k * 1000 / 4 is 2^(-k/2): sqrt(1/2), 1/2, sqrt(1/8), 1/4.
    eta = 0.5 ** (1 / 500)
    got = [size(1001, eta=eta, update=k, num_updates=4, c_min=1) for k in (1, 2, 3, 4)]
    assert got == [707, 500, 353, 250]


@pytest.mark.requirement("ere-window")
def test_the_papers_eta_leaves_two_percent():
    # 0.996^1000 = exp(-4.0080214) = 0.0181693, whatever the length of the phase.
    for num_updates in (1, 10, 1000):
        got = size(1_000_000, eta=0.996, update=num_updates, num_updates=num_updates, c_min=5000)
        assert got == 18169


@pytest.mark.requirement("ere-window")
def test_eta_one_draws_from_everything():
    assert size(123_456_789, eta=1.0, update=7, num_updates=9, c_min=1) == 123_456_789


@pytest.mark.requirement("ere-window")
def test_window_keeps_c_min_and_never_exceeds_what_is_stored():
    assert size(10_000, eta=0.9, update=10, num_updates=10, c_min=5000) == 5000
    assert size(4_999, eta=0.9, update=10, num_updates=10, c_min=5000) == 4_999
    assert size(0, eta=0.9, update=1, num_updates=1, c_min=5) == 0


@pytest.mark.requirement("ere-window")
def test_capacity_as_the_reference():
    # A quarter of the capacity, while fewer or more rows than that are stored.
    kwargs = {"eta": 0.25 ** (1 / 1000), "update": 3, "num_updates": 3, "c_min": 10}
    assert size(200, reference_rows=1001, **kwargs) == 200
    assert size(900, reference_rows=1001, **kwargs) == 250
    assert size(900, reference_rows=8, **kwargs) == 10


@pytest.mark.requirement("ere-window")
def test_rows_beyond_float32_are_counted():
    rows = 2**24 + 1
    assert size(rows, eta=1.0, update=1, num_updates=1, c_min=1) == rows


@pytest.mark.requirement("ere-window")
@given(
    num_rows=st.integers(1, 10**9),
    eta=st.floats(0, 1, exclude_min=True),
    num_updates=st.integers(1, 3000),
    c_min=st.integers(1, 10**6),
    data=st.data(),
)
def test_window_equals_the_formula_and_only_narrows(num_rows, eta, num_updates, c_min, data):
    k = data.draw(st.integers(1, num_updates))
    kwargs = {"eta": eta, "num_updates": num_updates, "c_min": c_min}
    window = size(num_rows, update=k, **kwargs)
    formula = math.floor(max(num_rows * eta ** (k * 1000 / num_updates), c_min))
    assert window == min(formula, num_rows)
    assert 1 <= window <= num_rows
    if k < num_updates:
        assert size(num_rows, update=k + 1, **kwargs) <= window


@pytest.mark.requirement("ere-eta")
@given(st.lists(st.integers(-100, 100), min_size=2, max_size=30))
def test_mean_slope_equals_numpy(returns):
    assert mean_slope(returns) == pytest.approx(np.gradient(returns).mean(), abs=1e-9)


@pytest.mark.requirement("ere-eta")
def test_mean_slope_by_hand():
    # Gradient of 1, 2, 6, 4: (1, 2.5, 1, -2), mean 0.625.
    assert mean_slope([1.0, 2.0, 6.0, 4.0]) == 0.625


@pytest.mark.requirement("ere-eta")
def test_trend_by_hand():
    # Two returns: the slope is their difference. Each line: the return, then hi, lo, s after it.
    inf = float("inf")
    trace = [
        (0.0, -inf, 0.0, 0.0),  # no slope yet
        (-2.0, -2.0, 2.0, -1.0),  # slope -2 is above -inf, and the steepest fall
        (2.0, 4.0, 1.0, 1.0),  # slope 4; the fall shrinks by half
        (3.0, 2.0, 0.5, 0.5),  # slope 1; the rise shrinks by half to 2
        (3.0, 1.0, 0.25, 0.0),  # slope 0, both shrink
        (2.875, 0.5, 0.125, -1.0),  # slope -0.125, just as steep as the shrunken fall
        (2.875, 0.25, 0.0625, 0.0),
        (2.84375, 0.125, 0.03125, -1.0),
    ]
    trend = ReturnTrend()
    for step, (value, *expected) in enumerate(trace):
        trend = advance_trend(trend, value, num_returns=2, decay=0.5)
        assert list(trend[1:]) == expected, f"step {step}"
        assert trend.returns[-1] == value
        assert len(trend.returns) <= 2


@pytest.mark.requirement("ere-eta")
def test_a_slope_above_the_shrunken_rise_is_cut_to_one():
    # The slope equals the rise, which therefore shrinks below it: s would be 1 / 0.9999.
    trend = ReturnTrend()
    for value in (0.0, 1.0, 2.0):
        trend = advance_trend(trend, value, num_returns=2)
    assert trend.steepest_rise == 0.9999
    assert trend.improvement == 1.0


@pytest.mark.requirement("ere-eta")
def test_flat_returns_give_no_improvement():
    trend = ReturnTrend()
    for _ in range(50):
        trend = advance_trend(trend, 7.25)
        assert trend.improvement == 0.0
    assert trend.steepest_fall == 0.0


@pytest.mark.requirement("ere-eta")
@given(st.lists(finite, max_size=12), st.integers(2, 5))
def test_improvement_is_always_within_its_bounds(returns, num_returns):
    trend = ReturnTrend()
    for value in returns:
        trend = advance_trend(trend, value, num_returns=num_returns)
        assert -1.0 <= trend.improvement <= 1.0
