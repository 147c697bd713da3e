"""Returns: discounts, the lengths of n-step windows, dtypes of sums, and returns-to-go.

Letters: B batch, n rows of a window, T steps of an episode. Windows are `[n, B]`: values of a sample
broadcast over its window, and row i of all windows is contiguous.
"""

import torch
from torch import Tensor

from trl_storages import arguments

__all__ = ["discounts", "relabelled_dtype", "return_dtype", "returns_to_go", "window_length"]

# torch promotes these with no other integers.
_WIDE_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})


def return_dtype(reward: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums of discounted rewards.

    The dtype of floating rewards itself; the default dtype, but at least float32, for bool and integers
    of 8 or 16 bits; float64 for larger integers.

    Raises:
        TypeError: rewards are complex.

    >>> return_dtype(torch.bfloat16), return_dtype(torch.bool), return_dtype(torch.int64)
    (torch.bfloat16, torch.float32, torch.float64)
    """
    if reward.is_complex:
        raise TypeError(f"rewards must be real numbers, got {reward}.")
    if reward.is_floating_point:
        return reward
    exact = torch.float32 if reward.itemsize <= 2 else torch.float64
    return torch.promote_types(torch.get_default_dtype(), exact)


def relabelled_dtype(stored: torch.dtype, computed: torch.dtype) -> torch.dtype:
    """Returns the dtype of a batch's rewards if some are stored and some computed.

    The stored dtype if it is floating, else one that holds both.

    Raises:
        TypeError: one of them is complex.

    >>> relabelled_dtype(torch.float32, torch.float64), relabelled_dtype(torch.int64, torch.float32)
    (torch.float32, torch.float64)
    >>> relabelled_dtype(torch.bool, torch.int64)
    torch.int64
    """
    if stored is computed or (stored.is_floating_point and not computed.is_complex):
        return stored
    if computed.is_floating_point or computed.is_complex or stored.is_complex:
        return torch.promote_types(return_dtype(stored), return_dtype(computed))
    if stored in _WIDE_UNSIGNED or computed in _WIDE_UNSIGNED:
        return torch.float64
    return torch.promote_types(stored, computed)


def window_length(available: Tensor, terminated: Tensor) -> Tensor:
    """Counts the rows of each window up to the first terminal one.

        m = min(available, 1 + first i with terminated_i)

    Args:
        available: `[B]` int64, rows of the episode in the window, from 1 to n.
        terminated: `[n, B]` bool, the state after the row is terminal. Rows past `available` are
            ignored.

    Returns:
        `[B]` int64 m, from 1 to n.

    >>> terminated = torch.tensor([[False, False], [True, False], [True, True]])
    >>> window_length(torch.tensor([3, 2]), terminated).tolist()
    [2, 2]
    """
    # The rows before the first terminal one; that row is in the window too.
    num_before = (terminated.cumsum(0) == 0).sum(0)
    return torch.minimum(num_before + 1, available)


def discounts(num_rows: int, gamma: float, *, device: torch.device | str = "cpu") -> Tensor:
    """Tabulates the weight of each reward of a window.

        R = Σ γ^i · r_i,  i = 0 .. m - 1

    Args:
        num_rows: n, the longest window.
        gamma: γ in [0, 1].
        device: of the table.

    Returns:
        `[n]` float64 γ^i, whatever the dtype of the rewards; γ^0 is 1 for γ = 0 too.

    Reference: Sutton & Barto 2018, Reinforcement Learning, eq. 7.1, without the bootstrap term.

    >>> discounts(3, 0.5)
    tensor([1.0000, 0.5000, 0.2500], dtype=torch.float64)
    """
    return torch.pow(gamma, torch.arange(num_rows, dtype=torch.float64, device=device))


def returns_to_go(reward: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    """Sums the discounted rewards from each step of an episode to its end.

        R_t = Σ γ^i · r_{t+i},  i = 0 .. T - 1 - t

    Decision transformers are conditioned on it; it is the target of Monte Carlo methods. Nothing is
    bootstrapped after the last step.

    Args:
        reward: r, `[*B, T]` or `[*B, T, ...]`, such as `("next", "reward")` of `sample_episodes`.
        mask: bool `[*B, T]`, False on padding, which is ignored; `("collector", "mask")` there.
        discount: γ in [0, 1].

    Returns:
        R, of the shape of `reward`, 0 on padding; summed in float64, whatever the dtype of the rewards.

    Raises:
        ValueError: `discount` is outside [0, 1], or `mask` does not have the leading shape of `reward`,
            or also has its last dimension of size 1.

    Reference: Chen et al. 2021, Decision Transformer, arXiv:2106.01345.

    >>> reward = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 0.0]])
    >>> mask = torch.tensor([[True, True, True], [True, True, False]])
    >>> returns_to_go(reward, mask, discount=0.5)
    tensor([[3., 4., 4.],
            [2., 2., 0.]])
    """
    discount = arguments.number("discount", discount, at_least=0, at_most=1)
    arguments.tensor("reward", reward)
    shape = arguments.tensor("mask", mask, dtype=torch.bool).shape
    if not mask.ndim or reward.shape[: mask.ndim] != shape:
        raise ValueError(
            f"mask must have the leading shape of reward, [*B, T] of {list(reward.shape)}, got "
            f"{list(shape)}."
        )
    if mask.ndim > 2 and shape == reward.shape and shape[-1] == 1:
        # It would pass for many episodes of one step.
        raise ValueError(
            f"mask must be [*B, T], without the last dimension of reward, {list(reward.shape)}, got "
            f"{list(shape)}: pass mask.squeeze(-1)."
        )
    counts = mask.view(*shape, *(1,) * (reward.ndim - mask.ndim))
    # where, not a product: padding may be infinite.
    total = torch.where(counts, reward, 0).double()
    time, reach, factor = mask.ndim - 1, 1, discount
    # Doubling: from sums over `reach` steps to sums over twice as many.
    while reach < shape[-1] and factor:
        onward = total.narrow(time, reach, shape[-1] - reach)
        ahead = torch.cat([onward, torch.zeros_like(total.narrow(time, 0, reach))], time)
        total = total + factor * ahead
        reach, factor = 2 * reach, factor**2
    return torch.where(counts, total, 0).to(return_dtype(reward.dtype))
