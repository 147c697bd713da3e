"""Which dtype holds rewards that were computed, so that none is truncated or wraps around."""

import torch

__all__ = ["relabelled_dtype", "return_dtype"]

# torch mixes them with no other integers.
_WIDE_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})


def return_dtype(reward: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums of discounted rewards.

    That of the rewards where they are floating; the default dtype, float32 or more, where they are
    bool or integers of 8 or 16 bits; float64 for larger integers.

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
    """Returns the dtype of a batch's rewards, of which some were stored and some computed.

    That of the stored ones where they are floating, else one that holds both.

    Raises:
        TypeError: one of them is complex.

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
