"""n-step returns and window lengths: by hand, against plain loops, and what must not matter."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.functional.returns import n_step_return, window_length

pytestmark = pytest.mark.requirement("n-step")

finite = st.floats(-1e3, 1e3, width=32)
gammas = st.floats(0, 1)


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
    got = n_step_return(rewards, torch.tensor([3, 2, 1]), 0.5)
    assert got.tolist() == [3.0, 11.0, 5.0]


def test_lengths_by_hand():
    terminated = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1], [0, 1, 1]]).bool()
    got = window_length(torch.tensor([3, 3, 3, 2, 1]), terminated)
    assert got.tolist() == [3, 2, 1, 2, 1]
    assert got.dtype == torch.int64


def test_no_discount_and_nothing_but_the_first():
    rewards, length = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([3])
    assert n_step_return(rewards, length, 1.0).tolist() == [7.0]
    assert n_step_return(rewards, length, 0.0).tolist() == [1.0]


def test_any_leading_shape():
    rewards = torch.arange(24.0).view(2, 3, 4)
    length = torch.tensor([[1, 2, 3], [4, 1, 2]])
    got = n_step_return(rewards, length, 1.0)
    assert got.tolist() == [[0.0, 9.0, 27.0], [54.0, 16.0, 41.0]]
    terminated = rewards == 5
    assert window_length(torch.full((2, 3), 4), terminated).tolist() == [[4, 2, 4], [4, 4, 4]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_keeps_the_dtype(dtype):
    got = n_step_return(torch.ones(5, 3, dtype=dtype), torch.full((5,), 2), 0.9)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), torch.tensor(1.9).double(), rtol=2e-3)


@pytest.mark.parametrize("rest", [math.nan, math.inf, -math.inf])
def test_what_lies_past_the_window_does_not_matter(rest):
    rewards = torch.tensor([[1.0, 2.0, rest], [1.0, rest, rest]])
    assert n_step_return(rewards, torch.tensor([2, 1]), 0.5).tolist() == [2.0, 1.0]


@given(window=windows(), gamma=gammas)
def test_equals_a_plain_loop(window, gamma):
    rewards, terminated, available = window
    length, expected = 0, 0.0
    for reward, terminal in list(zip(rewards, terminated, strict=True))[:available]:
        expected += gamma**length * reward
        length += 1
        if terminal:
            break
    got_length = window_length(torch.tensor([available]), torch.tensor([terminated]))
    assert got_length.tolist() == [length]
    in_double = torch.tensor([rewards], dtype=torch.float64)
    assert math.isclose(n_step_return(in_double, got_length, gamma).item(), expected, abs_tol=1e-9)
    # In single precision as well, against the sum of the magnitudes.
    scale = sum(gamma**i * abs(reward) for i, reward in enumerate(rewards[:length]))
    in_single = n_step_return(in_double.float(), got_length, gamma).item()
    assert abs(in_single - expected) <= 1e-6 * scale + 1e-30


@given(window=windows(), gamma=gammas)
def test_a_longer_window_discounts_the_rest_once_more(window, gamma):
    """R_t of m rows is r_t plus gamma times R_{t+1} of m - 1 rows."""
    rewards = torch.tensor([window[0]], dtype=torch.float64)
    size = rewards.shape[1]
    whole = n_step_return(rewards, torch.tensor([size]), gamma)
    if size == 1:
        assert whole.item() == rewards.item()
        return
    rest = n_step_return(rewards[:, 1:], torch.tensor([size - 1]), gamma)
    assert torch.allclose(whole, rewards[:, 0] + gamma * rest, rtol=1e-12, atol=1e-9)
