"""Raw priorities of rows, and their weights (p + eps)^alpha.

A raw priority is finite and above 0; whatever else a column holds says that none was set.

Letters: B batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import CURSOR, LANES, PRIORITIES, STEPS, TAIL
from trl_storages.kernels.compile import inlined, loop

__all__ = ["are_priorities", "largest_of", "report", "weigh"]

_INFINITY = np.inf
# What 0 is stored as.
_LEAST = float(np.finfo(np.float32).tiny)


@inlined
def _weight(raw: float, alpha: float, eps: float) -> float:
    return (np.float64(raw) + eps) ** alpha


@loop
def are_priorities(values: Any) -> bool:
    """Returns whether all values `[B]` are finite and at least 0."""
    fit = True
    for i in range(len(values)):
        fit &= 0 <= values[i] < _INFINITY
    return fit


@loop
def largest_of(column: Any, slots: Any) -> float:
    """Returns the largest raw priority of some rows, 0 if none was set."""
    largest = 0.0
    for i in range(len(slots)):
        raw = column[slots[i]]
        if 0 < raw < _INFINITY:
            largest = max(largest, np.float64(raw))
    return largest


@loop
def weigh(
    column: Any, slots: Any, otherwise: float, alpha: float, eps: float, sets: bool, weights: Any
) -> None:
    """Returns the `weights` `[B]` of rows; that of one without a raw priority is of `otherwise`.

    `sets` says whether this becomes its raw priority.
    """
    for i in range(len(slots)):
        raw = column[slots[i]]
        if 0 < raw < _INFINITY:
            weights[i] = _weight(raw, alpha, eps)
        else:
            weights[i] = _weight(otherwise, alpha, eps)
            if sets:
                column[slots[i]] = otherwise


@loop
def report(
    index: Any,
    slots: Any,
    steps: Any,
    priorities: Any,
    alpha: float,
    eps: float,
    kept: Any,
    weights: Any,
) -> Any:
    """Sets raw priorities of those rows that are still what they were.

    Args:
        index: as in `kernels`.
        slots: `[B]`; -1 is skipped. Of equal ones the last counts.
        steps: `[B]` which steps of their lanes the rows were.
        priorities: `[B]`, finite and at least 0.
        alpha: of the weights.
        eps: likewise.
        kept: the result, `[B]`: the slots that were set, in order.
        weights: the result, `[B]`: their weights.

    Returns:
        how many were set, -1 if there is no such slot, where nothing is done; and the largest of them.
    """
    lanes, T, column = index[LANES], index[STEPS], index[PRIORITIES]
    E, count, largest = len(lanes), 0, 0.0
    for i in range(len(slots)):
        if not -1 <= slots[i] < E * T:
            return -1, largest
    for i in range(len(slots)):
        slot = slots[i]
        e = slot // T if E > 1 else 0
        if slot >= 0 and lanes[e, TAIL] <= steps[i] < lanes[e, CURSOR]:
            column[slot] = raw = max(np.float64(priorities[i]), _LEAST)
            largest = max(largest, raw)
            kept[count], weights[count] = slot, _weight(raw, alpha, eps)
            count += 1
    return count, largest
