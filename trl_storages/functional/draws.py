"""How a batch is split among storages, or among kinds of goals, and how far ahead goals lie.

Letters: B batch, R relabelled transitions, k goals per transition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

__all__ = [
    "even_order",
    "even_turns",
    "geometric_steps",
    "kinds_by_chance",
    "kinds_of_batch",
    "num_of_each",
]

# Shares are rounded to multiples of 1 / _CHANCES.
_CHANCES = 2**24


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


def kinds_of_batch(
    size: int, num_goals: float, kinds: Sequence[int], shares: Sequence[float]
) -> list[int]:
    """Lists how the goal of each transition of a batch is drawn.

    floor(B k / (k + 1)) transitions are relabelled: k of any k + 1 neighbours. The kinds alternate among
    them, each as often as `num_of_each` returns.

    Args:
        size: B.
        num_goals: k, 0 or more; infinite relabels all.
        kinds: numbers above 0.
        shares: of the relabelled transitions, with sum 1.

    Returns:
        B of `kinds`, or 0 for a transition that keeps its goal.

    >>> kinds_of_batch(8, 3, [5, 9], [0.5, 0.5])
    [0, 5, 9, 5, 0, 9, 5, 9]
    """
    # For k >= B, only the first transition of the batch keeps its goal.
    period = int(min(num_goals, size)) + 1
    relabelled = [at for at in range(size) if at % period or num_goals == math.inf]
    counts = num_of_each(len(relabelled), shares)
    found = [0] * size
    for at, place in zip(relabelled, even_turns(counts), strict=True):
        found[at] = kinds[place]
    return found


def kinds_by_chance(
    noise: torch.Tensor, num_goals: float, kinds: Sequence[int], shares: Sequence[float]
) -> torch.Tensor:
    """Chooses at random how each goal is drawn, where counts can't be exact.

    Args:
        noise: `[B]` int64 random numbers of 63 bits; the lowest bits are used, nearly independent of
            what else is drawn from it.
        num_goals: k: a transition is relabelled with probability k / (k + 1).
        kinds: numbers above 0.
        shares: probabilities of the kinds, with sum 1.

    Returns:
        `[B]` uint8 of `kinds`, or 0 for a transition that keeps its goal.
    """
    is_relabelled = torch.ones_like(noise, dtype=torch.bool)
    # Beyond, a number does not fit into 64 bits, and makes no difference.
    if num_goals < 2**62:
        is_relabelled = noise % int(num_goals + 1) > 0
        noise = noise // int(num_goals + 1)
    chance, found = noise % _CHANCES, torch.full_like(noise, kinds[-1])
    # The lowest bound above `chance` determines the kind: it is applied last.
    for kind, bound in reversed([*zip(kinds[:-1], accumulate(shares[:-1]), strict=True)]):
        found = torch.where(chance < round(bound * _CHANCES), kind, found)
    return torch.where(is_relabelled, found, 0).to(torch.uint8)


def geometric_steps(noise: torch.Tensor, discount: float) -> torch.Tensor:
    """Draws how many steps ahead geometric goals lie.

        P(k) = (1 - γ) γ^k,  k = floor(log(1 - u) / log γ)

    Args:
        noise: `[B]` int64 random numbers of 63 bits.
        discount: γ in [0, 1]; 1 returns infinity.

    Returns:
        `[B]` float64, k before rounding down; may be infinite.

    Reference: Eysenbach et al. 2021, C-Learning, arXiv:2011.08909.
    """
    if discount in (0, 1):
        beyond = math.inf if discount else 0
        return torch.full_like(noise, beyond, dtype=torch.float64)
    return noise.double().mul_(-(2.0**-63)).log1p_().div_(math.log(discount))
