"""How a batch is shared out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["even_order", "largest_remainder"]

# So that a third of 3 is 1.
_DIGITS = 6


def largest_remainder(total: int, shares: Sequence[float]) -> list[int]:
    """Counts how many of a total each share gets: what it is due, less than one more or less.

    Each gets the whole number below its due; what is left goes, one by one, to those that are due most of
    another one, the first of equals first.

    Args:
        total: at least 0.
        shares: at least 0, which add up to 1.

    Returns:
        counts, which add up to `total`.

    >>> largest_remainder(10, (0.25, 0.5, 0.25))
    [3, 5, 2]
    """
    due = [round(total * share, _DIGITS) for share in shares]
    counts = [math.floor(each) for each in due]
    first = sorted(range(len(due)), key=lambda i: counts[i] - due[i])
    for i in first[: total - sum(counts)]:
        counts[i] += 1
    return counts


def even_order(counts: Sequence[int]) -> torch.Tensor:
    """Spreads groups evenly, so that every part of the whole has about as much of each.

    Args:
        counts: how many there are of each group, which lie one group after another.

    Returns:
        `[sum(counts)]` int64, which of them stands at each place.

    >>> even_order([2, 4]).tolist()
    [2, 0, 3, 4, 1, 5]
    """
    places = [(torch.arange(count, dtype=torch.float64) + 0.5) / count for count in counts if count]
    return torch.cat(places).argsort(stable=True)
