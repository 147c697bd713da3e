"""Which transitions of a batch are relabelled, how their goals are drawn, and how many steps ahead.

Letters: B batch, R relabelled transitions, k goals per transition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from trl_storages.functional.draws import even_turns, num_of_each

__all__ = ["geometric_steps", "kinds_by_chance", "kinds_of_batch"]

# Shares are rounded to multiples of 1 / _CHANCES.
_CHANCES = 2**24


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
        noise: `[B]` int64 of `random_noise`; its lowest bits are used, nearly independent of
            what else is drawn from it.
        num_goals: k: a transition is relabelled with probability k / (k + 1).
        kinds: numbers above 0.
        shares: probabilities of the kinds, with sum 1.

    Returns:
        `[B]` uint8 of `kinds`, or 0 for a transition that keeps its goal.
    """
    is_relabelled = torch.ones_like(noise, dtype=torch.bool)
    if num_goals < math.inf:
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
        noise: `[B]` int64 of `random_noise`.
        discount: γ in [0, 1]; 1 returns infinity.

    Returns:
        `[B]` float64, k before rounding down; may be infinite.

    Reference: Eysenbach et al. 2021, C-Learning, arXiv:2011.08909.
    """
    if discount in (0, 1):
        beyond = math.inf if discount else 0
        return torch.full_like(noise, beyond, dtype=torch.float64)
    return noise.double().mul_(-(2.0**-63)).log1p_().div_(math.log(discount))
