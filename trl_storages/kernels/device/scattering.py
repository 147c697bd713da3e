"""Scatters with repeated indices."""

from __future__ import annotations

import torch

__all__ = ["only_last"]


def only_last(index: torch.Tensor, spare: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps the last of equal indices, and replaces the others.

    On a GPU, the order of writes to the same index is undefined.

    Args:
        index: `[B]` int64.
        spare: the replacement.

    Returns:
        `[B]` indices in another order, and `[B]` the position of each in `index`.

    >>> only_last(torch.tensor([5, 3, 5]), spare=9)
    (tensor([3, 9, 5]), tensor([1, 0, 2]))
    """
    index, order = torch.sort(index, stable=True)
    goes_on = torch.zeros_like(index, dtype=torch.bool)
    torch.eq(index[1:], index[:-1], out=goes_on[:-1])
    return index.masked_fill(goes_on, spare), order
