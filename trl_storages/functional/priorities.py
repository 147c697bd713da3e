"""The priority of a sequence.

Letters: T steps of a sequence.
"""

import torch

from trl_storages import arguments

__all__ = ["sequence_priority"]


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
