"""n-step returns and window lengths: by hand, against plain loops, and what must not matter."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.functional import relabelled_dtype, return_dtype, returns_to_go
from trl_storages.kernels.draws import fold
from trl_storages.transforms.n_step import discounts, window_length

pytestmark = pytest.mark.requirement("n-step")

finite = st.floats(-1e3, 1e3, width=32)
gammas = st.floats(0, 1)


def folded(rewards, length, gamma):
    """The returns of windows [n, B], as `NStep` folds them."""
    out = torch.empty(len(length), 1, dtype=torch.float64)
    weights = discounts(len(rewards), gamma)
    fold(rewards.double().unsqueeze(-1).numpy(), length.numpy(), weights.numpy(), out.numpy())
    return out.squeeze(-1).to(return_dtype(rewards.dtype))


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


def loop_to_go(rewards, discount):
    total, sums = 0.0, []
    for reward in reversed(rewards):
        total = reward + discount * total
        sums.append(total)
    return sums[::-1]


@pytest.mark.requirement("episodes")
@given(
    episodes=st.lists(st.lists(finite, min_size=1, max_size=19), min_size=1, max_size=4),
    discount=gammas,
    last=st.sampled_from([(), (1,), (2, 1)]),
)
def test_returns_to_go_equal_a_loop(episodes, discount, last):
    longest = max(map(len, episodes))
    # What is padding may be anything.
    reward = torch.full((len(episodes), longest, *last), math.inf)
    expected = torch.zeros_like(reward)
    mask = torch.zeros(len(episodes), longest, dtype=torch.bool)
    for i, rewards in enumerate(episodes):
        spread = torch.tensor(rewards).view(-1, *(1,) * len(last))
        reward[i, : len(rewards)], mask[i, : len(rewards)] = spread, True
        sums = torch.tensor(loop_to_go(rewards, discount)).view(-1, *(1,) * len(last))
        expected[i, : len(rewards)] = sums
    got = returns_to_go(reward, mask, discount)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(returns_to_go(reward[0], mask[0], discount), got[0])


@pytest.mark.requirement("numerics")
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16])
def test_returns_to_go_of_every_dtype(dtype):
    reward, mask = torch.ones(300, dtype=dtype), torch.ones(300, dtype=torch.bool)
    got = returns_to_go(reward, mask)
    assert got.dtype is return_dtype(dtype)
    assert torch.equal(got, torch.arange(300, 0, -1).to(got.dtype))


@pytest.mark.requirement("numerics")
def test_returns_to_go_with_infinite_rewards():
    reward, mask = torch.tensor([1.0, -math.inf, 2.0]), torch.ones(3, dtype=torch.bool)
    assert returns_to_go(reward, mask, 0.0).tolist() == reward.tolist()
    assert returns_to_go(reward, mask, 0.5).tolist() == [-math.inf, -math.inf, 2.0]


def test_returns_to_go_never_wait_for_the_gpu(gpu):
    reward = torch.rand(3, 40, 1, device=gpu)
    mask = torch.ones(3, 40, dtype=torch.bool, device=gpu)
    assert returns_to_go(reward, mask, 0.9).device == gpu


def test_a_mask_of_another_shape_raises():
    mask = torch.ones(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"leading shape of reward, .* of \[2, 3\], got \[3, 2\]"):
        returns_to_go(torch.rand(2, 3), mask)


def test_a_mask_with_the_last_dimension_of_the_reward_raises():
    """Its episodes would seem to be of one step each, so that nothing would be summed."""
    reward, mask = torch.ones(2, 4, 1), torch.ones(2, 4, dtype=torch.bool)
    assert returns_to_go(reward, mask)[0, :, 0].tolist() == [4, 3, 2, 1]
    with pytest.raises(
        ValueError, match=r"without the last dimension .*\[2, 4, 1\].*squeeze\(-1\)"
    ):
        returns_to_go(reward, mask.unsqueeze(-1))
    # Two episodes of one step.
    assert torch.equal(returns_to_go(reward[:, :1, 0], mask[:, :1]), torch.ones(2, 1))
