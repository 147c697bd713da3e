"""Sums of discounted rewards over windows.

Letters: B batch, n rows of a window.
"""

from __future__ import annotations

from typing import Any

from trl_storages.kernels.compile import loop

__all__ = ["fold"]


@loop
def fold(rewards: Any, lengths: Any, weights: Any, out: Any) -> None:
    """Sums the first `lengths` `[B]` of `rewards` `[n, B, m]` by `weights` `[n]`, in float64.

    out_bj = Σ weights[i] · rewards[i, b, j]   over i < lengths[b]
    """
    for b in range(out.shape[0]):
        for j in range(out.shape[1]):
            total = 0.0
            for i in range(lengths[b]):
                total += weights[i] * rewards[i, b, j]
            out[b, j] = total
