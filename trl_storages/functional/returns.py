"""What the rewards of a window count, and how far the window reaches.

Letters: B batch, n rows of a window. Windows are `[n, B]`: what is known of a sample spreads over its
window by broadcasting, and each row of all windows is contiguous.
"""

import torch
from torch import Tensor

__all__ = ["discounts", "window_length"]


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


def discounts(num_rows: int, gamma: float, *, device: torch.device | str = "cpu") -> Tensor:
    """Tabulates what each reward of a window counts.

        R = Σ γ^i · r_i,  i = 0 .. m - 1

    Args:
        num_rows: n, the longest window.
        gamma: γ in [0, 1].
        device: where the table lives.

    Returns:
        `[n]` float64 γ^i, whatever the dtype of the rewards; γ^0 is 1 for γ = 0 too.

    Reference: Sutton & Barto 2018, Reinforcement Learning, eq. 7.1, without the bootstrap term.

    >>> discounts(3, 0.5)
    tensor([1.0000, 0.5000, 0.2500], dtype=torch.float64)
    """
    return torch.pow(gamma, torch.arange(num_rows, dtype=torch.float64, device=device))
