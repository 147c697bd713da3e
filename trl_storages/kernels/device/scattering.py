"""Writes to indices of which some occur twice."""

from __future__ import annotations

import torch

__all__ = ["only_last"]


def only_last(index: torch.Tensor, spare: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps of an index that occurs twice the last one, and replaces the others.

    To write to an index twice has no defined order on a GPU.

    Args:
        index: `[B]` int64.
        spare: what the others become.

    Returns:
        `[B]` indices in another order, and `[B]` which of `index` each was.

    >>> only_last(torch.tensor([5, 3, 5]), spare=9)
    (tensor([3, 9, 5]), tensor([1, 0, 2]))
    """
    index, order = torch.sort(index, stable=True)
    goes_on = torch.zeros_like(index, dtype=torch.bool)
    torch.eq(index[1:], index[:-1], out=goes_on[:-1])
    return index.masked_fill(goes_on, spare), order
