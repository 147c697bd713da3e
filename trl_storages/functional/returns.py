"""Returns over a window of rewards, and how far the window reaches.

Letters: B batch (any leading shape), n rows of a window.
"""

import torch
from torch import Tensor

__all__ = ["n_step_return", "window_length"]


def window_length(available: Tensor, terminated: Tensor) -> Tensor:
    """Counts the rows of each window up to the first terminal one.

        m = min(available, 1 + first i with terminated_i)

    Args:
        available: `[B]` int64, rows of the episode in the window, from 1 to n.
        terminated: `[B, n]` bool, the state after the row is terminal. Rows past `available` don't
            matter.

    Returns:
        `[B]` int64 m, from 1 to n.

    >>> terminated = torch.tensor([[False, True, True], [False, False, True]])
    >>> window_length(torch.tensor([3, 2]), terminated).tolist()
    [2, 2]
    """
    # Where no row has been terminal so far, the next one belongs to the window too.
    num_before = (terminated.cumsum(-1) == 0).sum(-1)
    return torch.minimum(num_before + 1, available)


def n_step_return(rewards: Tensor, length: Tensor, gamma: float) -> Tensor:
    """Sums the discounted rewards of each window.

        R = Σ γ^i · r_i,  i = 0 .. m - 1

    Args:
        rewards: `[B, n]`; those past the window's length don't matter, be they infinite or NaN.
        length: `[B]` int64 m, from 1 to n.
        gamma: γ in [0, 1].

    Returns:
        `[B]` of the dtype of `rewards`, if that is a floating one.

    Reference: Sutton & Barto 2018, Reinforcement Learning, eq. 7.1, without the bootstrap term.

    >>> n_step_return(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([2]), 0.5)
    tensor([2.])
    """
    step = torch.arange(rewards.shape[-1], dtype=rewards.dtype, device=rewards.device)
    inside = step < length.unsqueeze(-1)
    return torch.where(inside, rewards * gamma**step, 0).sum(-1)
