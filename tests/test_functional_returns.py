"""n-step returns and window lengths: by hand, against plain loops, and what must not matter."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.functional.returns import discounts, window_length
from trl_storages.functional.rewards import relabelled_dtype, return_dtype
from trl_storages.kernels import backend

pytestmark = pytest.mark.requirement("n-step")

finite = st.floats(-1e3, 1e3, width=32)
gammas = st.floats(0, 1)


def folded(rewards, length, gamma):
    """The returns of windows [n, B], as `NStep` folds them."""
    sums = backend("cpu").fold(rewards.double(), length, discounts(len(rewards), gamma))
    return sums.to(return_dtype(rewards.dtype))


@st.composite
def windows(draw):
    """Rewards, terminal flags and available rows of one window."""
    size = draw(st.integers(1, 8))
    rewards = draw(st.lists(finite, min_size=size, max_size=size))
    terminated = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return rewards, terminated, draw(st.integers(1, size))


def test_returns_by_hand():
    # 1 + 0.5 * 2 + 0.25 * 4 = 3 and 8 + 0.5 * 6 = 11; the last window takes its first row only.
    rewards = torch.tensor([[1.0, 2.0, 4.0], [8.0, 6.0, 1.0], [5.0, 9.0, 9.0]])
    got = folded(rewards.T, torch.tensor([3, 2, 1]), 0.5)
    assert got.tolist() == [3.0, 11.0, 5.0]


def test_lengths_by_hand():
    terminated = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1], [0, 1, 1]]).bool()
    got = window_length(torch.tensor([3, 3, 3, 2, 1]), terminated.T)
    assert got.tolist() == [3, 2, 1, 2, 1]
    assert got.dtype == torch.int64


def test_discounts_by_hand():
    assert discounts(3, 0.5).tolist() == [1, 0.5, 0.25]
    assert discounts(3, 0.0).tolist() == [1, 0, 0]
    assert discounts(3, 0.5).dtype is torch.float64


@pytest.mark.requirement("numerics")
def test_dtypes_hold_what_they_must():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert return_dtype(dtype) is dtype
        assert relabelled_dtype(dtype, torch.int64) is dtype
    for dtype in (torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16):
        assert return_dtype(dtype) is torch.float32
        assert relabelled_dtype(dtype, torch.bfloat16) is torch.float32
        assert relabelled_dtype(dtype, dtype) is dtype
    for dtype in (torch.int32, torch.uint32, torch.int64, torch.uint64):
        assert return_dtype(dtype) is torch.float64
        assert relabelled_dtype(dtype, torch.float32) is torch.float64
    assert relabelled_dtype(torch.uint8, torch.int8) is torch.int16
    assert relabelled_dtype(torch.uint16, torch.int64) is torch.float64
    for stored, computed in ((torch.int8, torch.complex64), (torch.complex64, torch.int8)):
        with pytest.raises(TypeError, match="real numbers"):
            relabelled_dtype(stored, computed)


def test_no_discount_and_nothing_but_the_first():
    rewards, length = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([3])
    assert folded(rewards, length, 1.0).tolist() == [7.0]
    assert folded(rewards, length, 0.0).tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_keeps_the_dtype(dtype):
    got = folded(torch.ones(3, 5, dtype=dtype), torch.full((5,), 2), 0.9)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), torch.tensor(1.9).double(), rtol=2e-3)


@given(window=windows(), gamma=gammas)
def test_equals_a_plain_loop(window, gamma):
    rewards, terminated, available = window
    length, expected = 0, 0.0
    for reward, terminal in list(zip(rewards, terminated, strict=True))[:available]:
        expected += gamma**length * reward
        length += 1
        if terminal:
            break
    got_length = window_length(torch.tensor([available]), torch.tensor([terminated]).T)
    assert got_length.tolist() == [length]
    in_double = torch.tensor([rewards], dtype=torch.float64).T
    assert math.isclose(folded(in_double, got_length, gamma).item(), expected, abs_tol=1e-9)
    # In single precision as well, against the sum of the magnitudes.
    scale = sum(gamma**i * abs(reward) for i, reward in enumerate(rewards[:length]))
    in_single = folded(in_double.float(), got_length, gamma).item()
    assert abs(in_single - expected) <= 1e-6 * scale + 1e-30


@given(window=windows(), gamma=gammas)
def test_a_longer_window_discounts_the_rest_once_more(window, gamma):
    """R_t of m rows is r_t plus gamma times R_{t+1} of m - 1 rows."""
    rewards = torch.tensor([window[0]], dtype=torch.float64).T
    size = len(rewards)
    whole = folded(rewards, torch.tensor([size]), gamma)
    if size == 1:
        assert whole.item() == rewards.item()
        return
    rest = folded(rewards[1:], torch.tensor([size - 1]), gamma)
    assert torch.allclose(whole, rewards[0] + gamma * rest, rtol=1e-12, atol=1e-9)
