"""How much each priority weighs in the draws.

Letters: n priorities.
"""

from __future__ import annotations

import torch

from trl_storages.functional.priorities import draw_weight

__all__ = ["leaf_weights"]

# torch raises numbers to a power in vectors of at most so many, and differently, in the last bit, where
# some are left over; and it shares more than `_SERIAL` of them among threads.
_VECTOR = 16
_SERIAL = 32_768


def leaf_weights(priorities: torch.Tensor, *, alpha: float, eps: float) -> torch.Tensor:
    """Returns `(p + eps)^alpha`, the same for the same priority wherever it stands.

    So a table has the same weights, bit for bit, whether they came one by one or all at once.

    Args:
        priorities: `[n]` float32.
        alpha: exponent of the draws.
        eps: added to priorities.

    Returns:
        `[n]` float64.
    """
    size, weights = priorities.numel(), priorities.double()
    if left_over := -size % _VECTOR:
        weights = torch.cat([weights, weights.new_ones(left_over)])
    if size > _SERIAL:
        parts = [draw_weight(part, alpha=alpha, eps=eps) for part in weights.split(_SERIAL)]  # type: ignore[no-untyped-call]
        return torch.cat(parts)[:size]
    weights = draw_weight(weights, alpha=alpha, eps=eps)
    return weights[:size] if left_over else weights
