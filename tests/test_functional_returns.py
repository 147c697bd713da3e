"""Returns to go, and dtypes of sums."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.functional import relabelled_dtype, return_dtype, returns_to_go

pytestmark = pytest.mark.requirement("n-step")

finite = st.floats(-1e3, 1e3, width=32)
gammas = st.floats(0, 1)


@pytest.mark.requirement("numerics")
def test_return_dtypes_hold_all_sums():
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
    with pytest.raises(ValueError, match=r"leading shape .* is \[2, 3\], got \[3, 2\]"):
        returns_to_go(torch.rand(2, 3), mask)


def test_a_mask_with_the_last_dimension_of_the_reward_raises():
    """Its episodes would seem to be of one step each, so that nothing would be summed."""
    reward, mask = torch.ones(2, 4, 1), torch.ones(2, 4, dtype=torch.bool)
    assert returns_to_go(reward, mask)[0, :, 0].tolist() == [4, 3, 2, 1]
    with pytest.raises(ValueError, match=r"without a last dimension .*squeeze\(-1\).*\[2, 4, 1\]"):
        returns_to_go(reward, mask.unsqueeze(-1))
    # Two episodes of one step.
    assert torch.equal(returns_to_go(reward[:, :1, 0], mask[:, :1]), torch.ones(2, 1))
