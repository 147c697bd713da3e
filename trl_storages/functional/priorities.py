"""Priorities: draw weights, importance weights, and priorities of sequences.

Letters: B batch, T steps of a sequence.

The first two formulas use operators only, so they work on tensors and NumPy arrays alike.
"""

from typing import TypeVar

import numpy as np
import torch

from trl_storages import arguments
from trl_storages.signatures import answers_names

__all__ = ["draw_weight", "importance_weight", "sequence_priority"]

Array = TypeVar("Array", torch.Tensor, np.ndarray)


def draw_weight(priority: Array, *, alpha: float, eps: float) -> Array:
    """Turns priorities into weights that draws are proportional to.

        P(i) = w_i / sum_j w_j,   w = (p + eps)^alpha

    Args:
        priority: p, of any shape, at least 0; float64 where sums of millions must be exact.
        alpha: how much priorities count: 0 draws uniformly, 1 in proportion.
        eps: above 0; keeps transitions with zero error drawable.

    Returns:
        w, of the shape of `priority`.

    Reference: Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952, eq. 1.

    >>> draw_weight(torch.tensor([0.0, 3.0]), alpha=0.5, eps=1.0)
    tensor([1., 2.])
    """
    return (priority + eps) ** alpha


def importance_weight(ratio: Array, *, beta: float) -> Array:
    """Returns the loss weight of drawn transitions, which corrects for how often each is drawn.

        (N P(i))^-beta  =  (w_mean / w_i)^beta,   w = (p + eps)^alpha

    With beta = 1 the expectation of a loss weighted so is its mean over all rows, but weights of rare
    transitions may be large. So they are usually normalised:

        (N P(i))^-beta / max_j (N P(j))^-beta  =  (w_min / w_i)^beta

    Then the least likely of the transitions j has weight 1, and the others at most that.

    Args:
        ratio: w_min / w_i of the drawn transitions, of any shape, with w_min of the batch or of all that
            could have been drawn; or w_mean / w_i, for weights that are not normalised.
        beta: strength of the correction: 0 none, 1 full.

    Returns:
        weights above 0, of the shape of `ratio`.

    Reference: Schaul et al. 2016, arXiv:1511.05952, section 3.4.

    >>> importance_weight(torch.tensor([1.0, 0.25]), beta=0.5)
    tensor([1.0000, 0.5000])
    """
    return ratio**beta


@answers_names
def sequence_priority(
    td_error: torch.Tensor, eta: float = 0.9, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Mixes the errors of a sequence into one priority: mostly the largest, partly the mean.

        p = eta * max_t |delta_t| + (1 - eta) * mean_t |delta_t|

    The mean alone would wash out a single surprise in a long sequence. The exponent alpha belongs
    to the sampler, which applies it afterwards.

    Args:
        td_error: delta, `[..., T]`.
        eta: share of the maximum, in [0, 1].
        mask: bool `[..., T]`, False on steps to ignore, such as padding and burn-in; None uses all. A
            sequence with every step masked has priority 0.

    Returns:
        `[...]` priorities.

    Raises:
        ValueError: `eta` is outside [0, 1], or `mask` has another shape than `td_error`.

    Reference: Kapturowski et al. 2019, Recurrent Experience Replay in Distributed Reinforcement
    Learning (R2D2), section 2.3.

    >>> sequence_priority(torch.tensor([0.0, 0.0, 0.0, -1.0]))
    tensor(0.9250)
    """
    eta = arguments.number("eta", eta, at_least=0, at_most=1)
    if not arguments.tensor("td_error", td_error).ndim or not td_error.shape[-1]:
        raise ValueError(
            f"td_error must be [..., T] for T of 1 or more, got {list(td_error.shape)}."
        )
    error = td_error.abs()
    if mask is None:
        return eta * error.amax(-1) + (1 - eta) * error.mean(-1)
    if arguments.tensor("mask", mask, dtype=torch.bool).shape != td_error.shape:
        raise ValueError(
            f"mask must have td_error's shape {list(td_error.shape)}, got {list(mask.shape)}."
        )
    # where, not a product: masked errors may be NaN.
    error = torch.where(mask, error, 0.0)
    count = mask.sum(-1).clamp(min=1)
    return eta * error.amax(-1) + (1 - eta) * error.sum(-1) / count
