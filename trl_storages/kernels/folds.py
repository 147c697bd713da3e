"""Sums of discounted rewards over windows.

Letters: B batch, n rows of a window.
"""

from __future__ import annotations

from typing import Any

from trl_storages.kernels.compile import loop

__all__ = ["fold", "until_first"]


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


@loop
def until_first(ends: Any, lengths: Any, out: Any) -> None:
    """Shortens windows `[n, B]` to the first row within `lengths` `[B]` at which `ends` says so."""
    for b in range(len(out)):
        out[b] = lengths[b]
        for i in range(lengths[b]):
            if ends[i, b]:
                out[b] = i + 1
                break
