"""Returns over a window of rewards, and how far the window reaches.

Letters: B batch, n rows of a window. Windows are `[n, B]`: what is known of a sample spreads over its
window by broadcasting, and each row of all windows is contiguous.
"""

import torch
from torch import Tensor

__all__ = ["n_step_return", "n_step_weights", "window_length"]


def window_length(available: Tensor, terminated: Tensor) -> Tensor:
    """Counts the rows of each window up to the first terminal one.

        m = min(available, 1 + first i with terminated_i)

    Args:
        available: `[B]` int64, rows of the episode in the window, from 1 to n.
        terminated: `[n, B]` bool, the state after the row is terminal. Rows past `available` don't
            matter.

    Returns:
        `[B]` int64 m, from 1 to n.

    >>> terminated = torch.tensor([[False, False], [True, False], [True, True]])
    >>> window_length(torch.tensor([3, 2]), terminated).tolist()
    [2, 2]
    """
    # Where no row has been terminal so far, the next one belongs to the window too.
    num_before = (terminated.cumsum(0) == 0).sum(0)
    return torch.minimum(num_before + 1, available)


def n_step_weights(
    num_rows: int,
    gamma: float,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Tabulates what each reward of a window counts, for windows of any length.

        w_im = γ^i where i < m, else 0

    Args:
        num_rows: n, the longest window.
        gamma: γ in [0, 1].
        dtype: a floating one.
        device: where the table lives.

    Returns:
        `[n, n + 1]`; column m is for windows of m rows.

    >>> n_step_weights(3, 0.5)[:, 2]
    tensor([1.0000, 0.5000, 0.0000])
    """
    step = torch.arange(num_rows, device=device).unsqueeze(1)
    length = torch.arange(num_rows + 1, device=device)
    return torch.where(step < length, gamma ** step.to(dtype), 0)


def n_step_return(rewards: Tensor, length: Tensor, weights: Tensor) -> Tensor:
    """Sums the discounted rewards of each window.

        R = Σ γ^i · r_i,  i = 0 .. m - 1

    Args:
        rewards: `[n, B]` finite; those past the window's length don't count.
        length: `[B]` int64 m, from 1 to n.
        weights: `[n, n + 1]` of `n_step_weights`.

    Returns:
        `[B]` returns.

    Reference: Sutton & Barto 2018, Reinforcement Learning, eq. 7.1, without the bootstrap term.

    >>> rewards = torch.tensor([[1.0], [2.0], [4.0]])
    >>> n_step_return(rewards, torch.tensor([2]), n_step_weights(3, 0.5))
    tensor([2.])
    """
    # A look-up is one operation where powers and masks would be four.
    return (rewards * weights.index_select(1, length)).sum(0)
