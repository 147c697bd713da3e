"""The random numbers of a batch, and how a batch is split among storages or kinds of goals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["even_order", "even_turns", "num_of_each", "random_noise"]


def random_noise(
    size: int | tuple[int, ...],
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Draws integers uniformly from 0 to 2^63 - 1.

    A number x is turned into one below n by floor(x n / 2^63), or by the remainder: exact up to a bias of
    n / 2^63. A float32 draw times n would miss most integers above 2^24.

    Args:
        size: shape of the result; an int is a length.
        generator: source of randomness, on `device`; None is torch's default one.
        device: of the result.

    Returns:
        int64 tensor of shape `size`.
    """
    size = (size,) if isinstance(size, int) else size
    return torch.empty(size, dtype=torch.int64, device=device).random_(generator=generator)


def num_of_each(total: int, shares: Sequence[float]) -> list[int]:
    """Splits a number by shares: rounds all parts down, then the largest remainders up.

    Of equal remainders the first are rounded up.

    Args:
        total: the number.
        shares: at least 0, with sum 1.

    >>> num_of_each(7, [0.5, 0.3, 0.2])
    [4, 2, 1]
    """
    # Rounded: 0.3 * 10 must be 3, not 3 and a tiny remainder.
    parts = [round(total * share, 9) for share in shares]
    counts = [math.floor(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda at: counts[at] - parts[at])
    for at in by_remainder[: total - sum(counts)]:
        counts[at] += 1
    return counts


def even_turns(counts: Sequence[int]) -> list[int]:
    """Interleaves groups, so that every stretch has about the same share of each.

    Args:
        counts: the size of each group.

    Returns:
        the group at each of the `sum(counts)` places.

    >>> even_turns([2, 4])
    [1, 0, 1, 1, 0, 1]
    """
    # Member m of c lies about (m + 1/2) / c of the way through.
    turns = sorted(
        ((m + 0.5) / count, group) for group, count in enumerate(counts) for m in range(count)
    )
    return [group for _, group in turns]


def even_order(counts: Sequence[int]) -> torch.Tensor:
    """Returns the permutation that brings concatenated groups into the order of `even_turns`.

    Args:
        counts: the size of each group.

    Returns:
        `[sum(counts)]` int64, the index of the member at each place; each group keeps its order.

    >>> even_order([2, 4]).tolist()
    [2, 0, 3, 4, 1, 5]
    """
    return torch.tensor(even_turns(counts)).argsort(stable=True).argsort()
