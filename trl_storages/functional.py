"""Pure formulas on tensors: no storage, no state, any device.

Letters: B batch, T steps of an episode or a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trl_storages import validation

__all__ = [
    "even_order",
    "even_turns",
    "num_of_each",
    "relabelled_dtype",
    "return_dtype",
    "returns_to_go",
    "sequence_priority",
]

# torch does not promote these with other integers.
_WIDE_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})


def num_of_each(total: int, shares: Sequence[float]) -> list[int]:
    """Splits a number by fractions: rounds all counts down, then those with the largest remainders up.

    If remainders are equal, the first counts are rounded up.

    Args:
        total: the number.
        shares: fractions, at least 0, with sum 1.

    Returns:
        the counts, with sum `total`.

    >>> num_of_each(7, [0.5, 0.3, 0.2])
    [4, 2, 1]
    """
    # Rounded, because 0.3 * 10 must be 3, not 3 and a tiny remainder.
    quotas = [round(total * share, 9) for share in shares]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def even_turns(counts: Sequence[int]) -> list[int]:
    """Interleaves groups, so that every stretch contains about the same fraction of each group.

    Args:
        counts: the size of each group.

    Returns:
        the group at each of the `sum(counts)` positions.

    >>> even_turns([2, 4])
    [1, 0, 1, 1, 0, 1]
    """
    # Member m of c lies about (m + 1/2) / c of the way through.
    turns = sorted(
        ((m + 0.5) / count, group) for group, count in enumerate(counts) for m in range(count)
    )
    return [group for _, group in turns]


def even_order(counts: Sequence[int]) -> Tensor:
    """Returns the permutation that brings concatenated groups into the order of `even_turns`.

    Args:
        counts: the size of each group.

    Returns:
        `[sum(counts)]` int64, the index of the member at each position; each group keeps its order.

    >>> even_order([2, 4]).tolist()
    [2, 0, 3, 4, 1, 5]
    """
    return torch.tensor(even_turns(counts), device="cpu").argsort(stable=True).argsort()


def return_dtype(reward: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums of discounted rewards.

    Floating rewards keep their dtype. Sums of bool and of 8- or 16-bit integers have the default dtype,
    but at least float32; sums of larger integers are float64.

    Raises:
        TypeError: rewards are complex.

    >>> return_dtype(torch.bfloat16), return_dtype(torch.bool), return_dtype(torch.int64)
    (torch.bfloat16, torch.float32, torch.float64)
    """
    if reward.is_complex:
        raise TypeError(f"rewards must be real numbers, got {reward}.")
    if reward.is_floating_point:
        return reward
    exact = torch.float32 if reward.itemsize <= 2 else torch.float64
    return torch.promote_types(torch.get_default_dtype(), exact)


def relabelled_dtype(stored: torch.dtype, computed: torch.dtype) -> torch.dtype:
    """Returns the dtype of the rewards of a batch that contains stored and computed rewards.

    The stored dtype if it is floating, else a dtype that can hold both.

    Raises:
        TypeError: one of the dtypes is complex.

    >>> relabelled_dtype(torch.float32, torch.float64), relabelled_dtype(torch.int64, torch.float32)
    (torch.float32, torch.float64)
    >>> relabelled_dtype(torch.bool, torch.int64)
    torch.int64
    """
    if stored is computed or (stored.is_floating_point and not computed.is_complex):
        return stored
    if computed.is_floating_point or computed.is_complex or stored.is_complex:
        return torch.promote_types(return_dtype(stored), return_dtype(computed))
    if stored in _WIDE_UNSIGNED or computed in _WIDE_UNSIGNED:
        return torch.float64
    return torch.promote_types(stored, computed)


def returns_to_go(reward: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    """Sums the discounted rewards from each step of an episode to its end.

        R_t = Σ γ^i · r_{t+i},  i = 0 .. T - 1 - t

    Decision transformers are conditioned on returns to go, and Monte Carlo methods use them as targets.
    The sum ends with the last step: no value is bootstrapped.

    Args:
        reward: r, `[*B, T]` or `[*B, T, ...]`, such as `("next", "reward")` of `sample_episodes`.
        mask: bool `[*B, T]`, False on padding, which is ignored, such as `("collector", "mask")` of
            `sample_episodes`.
        discount: γ in [0, 1].

    Returns:
        R, of the shape of `reward`, 0 on padding; summed in float64 for rewards of any dtype.

    Raises:
        ValueError: `discount` is outside [0, 1], or `mask` does not have the leading shape of `reward`,
            or `mask` has the last dimension of size 1 of `reward`.

    Reference: Chen et al. 2021, Decision Transformer, arXiv:2106.01345.

    >>> reward = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 0.0]])
    >>> mask = torch.tensor([[True, True, True], [True, True, False]])
    >>> returns_to_go(reward, mask, discount=0.5)
    tensor([[3., 4., 4.],
            [2., 2., 0.]])
    """
    discount = validation.number("discount", discount, at_least=0, at_most=1)
    validation.tensor("reward", reward)
    shape = validation.tensor("mask", mask, dtype=torch.bool).shape
    # A mask [*B, T, 1] would mean B * T episodes of one step.
    is_too_deep = mask.ndim > 2 and shape == reward.shape and shape[-1] == 1
    if not mask.ndim or reward.shape[: mask.ndim] != shape or is_too_deep:
        raise ValueError(
            "mask must have the leading shape [*B, T] of reward without a last dimension of size 1 "
            f"(use squeeze(-1)): reward is {list(reward.shape)}, got {list(shape)}."
        )
    is_step = mask.view(*shape, *(1,) * (reward.ndim - mask.ndim))
    # `where`, not a product, because padding may be infinite.
    sums = torch.where(is_step, reward, 0).double()
    time_dim, num_steps, factor = mask.ndim - 1, 1, discount
    # Each pass extends the sums from `num_steps` steps to twice as many.
    while num_steps < shape[-1] and factor:
        shifted = sums.narrow(time_dim, num_steps, shape[-1] - num_steps)
        zeros = torch.zeros_like(sums.narrow(time_dim, 0, num_steps))
        sums = sums + factor * torch.cat([shifted, zeros], time_dim)
        num_steps, factor = 2 * num_steps, factor**2
    return torch.where(is_step, sums, 0).to(return_dtype(reward.dtype))


def sequence_priority(td_error: Tensor, eta: float = 0.9, mask: Tensor | None = None) -> Tensor:
    """Reduces the TD errors of a sequence to one priority, a mixture of the maximum and the mean.

        p = eta * max_t |delta_t| + (1 - eta) * mean_t |delta_t|

    In a long sequence the mean alone would hide a single large error. The priority exponent alpha is not
    applied here, because `PERSampler` applies it.

    Args:
        td_error: delta, `[..., T]`.
        eta: weight of the maximum, in [0, 1].
        mask: bool `[..., T]`, False on steps to ignore, such as padding and burn-in; None uses all steps.
            A sequence whose mask is False everywhere has priority 0.

    Returns:
        `[...]` priorities.

    Raises:
        ValueError: `eta` is outside [0, 1], or `mask` does not have the shape of `td_error`.

    Reference: Kapturowski et al. 2019, Recurrent Experience Replay in Distributed Reinforcement
    Learning (R2D2), section 2.3.

    >>> sequence_priority(torch.tensor([0.0, 0.0, 0.0, -1.0]))
    tensor(0.9250)
    """
    eta = validation.number("eta", eta, at_least=0, at_most=1)
    if not validation.tensor("td_error", td_error).ndim or not td_error.shape[-1]:
        raise ValueError(
            f"td_error must be [..., T] for T of 1 or more, got {list(td_error.shape)}."
        )
    error = td_error.abs()
    if mask is None:
        return eta * error.amax(-1) + (1 - eta) * error.mean(-1)
    if validation.tensor("mask", mask, dtype=torch.bool).shape != td_error.shape:
        raise ValueError(
            f"mask must have td_error's shape {list(td_error.shape)}, got {list(mask.shape)}."
        )
    # `where`, not a product, because masked errors may be NaN.
    error = torch.where(mask, error, 0.0)
    count = mask.sum(-1).clamp(min=1)
    return eta * error.amax(-1) + (1 - eta) * error.sum(-1) / count
