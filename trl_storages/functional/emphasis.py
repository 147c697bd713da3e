"""Emphasised recent experience: the size of the narrowing window, and how strongly it narrows.

Two formulas: how many of the newest rows the k-th update of a phase draws from, and how strongly (`eta`)
the window narrows as training goes on.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = [
    "ReturnTrend",
    "advance_trend",
    "improvement_eta",
    "mean_slope",
    "window_size",
]

Count = TypeVar("Count", int, Tensor)


def window_size(
    num_rows: Count,
    *,
    eta: float,
    update: int,
    num_updates: int,
    c_min: int,
    reference_rows: int | None = None,
) -> Count:
    """Counts the newest rows that one update draws from.

        c_k = max(N · η^(k · 1000 / K), c_min),  k = 1 .. K

    rounded down, and at most what is stored. The first update of a phase sees nearly everything, the last
    one the share η^1000; the factor 1000 makes η mean the same for any length K of the phase. With at
    most `c_min` rows stored, all of them are in the window.

    Args:
        num_rows: the rows stored now, as an int or int64 of any shape. What depends on a tensor stays on
            its device, so that a captured CUDA graph follows the storage as it grows.
        eta: η in (0, 1]; 1 draws from everything.
        update: k, counted from 1 as in the paper.
        num_updates: K, the updates of the phase.
        c_min: the window never gets smaller than this, unless fewer rows are stored.
        reference_rows: N; None takes the rows stored now (the paper takes the capacity).

    Returns:
        of the type and shape of `num_rows`, an int or int64; in [1, num_rows] unless nothing is stored.

    Reference: Wang & Ross 2019, arXiv:1906.04009.

    >>> window_size(torch.tensor(1000), eta=0.996, update=5, num_updates=10, c_min=50)
    tensor(134)
    """
    share = eta ** (update * 1000 / num_updates)
    if isinstance(num_rows, int):
        window = int((num_rows if reference_rows is None else reference_rows) * share)
        return min(max(window, c_min), num_rows)
    # float64: float32 can't count rows beyond 2^24.
    if reference_rows is None:
        window = num_rows.double().mul_(share).long().clamp_(min=c_min)
        return torch.minimum(window, num_rows)
    return num_rows.clamp(max=max(int(reference_rows * share), c_min))


class ReturnTrend(NamedTuple):
    """The state of the adaptive rule between episodes.

    Attributes:
        returns: the newest episode returns, oldest first.
        steepest_rise: the largest mean slope so far, shrinking slowly; -inf before the first.
        steepest_fall: the size of the most negative mean slope so far, shrinking slowly.
        improvement: s in [-1, 1], the newest slope relative to the two above.
    """

    returns: tuple[float, ...] = ()
    steepest_rise: float = float("-inf")
    steepest_fall: float = 0.0
    improvement: float = 0.0


def mean_slope(returns: Sequence[float]) -> float:
    """Returns the mean discrete gradient of at least two values at unit distance.

    The gradient takes central differences inside and one-sided ones at both ends (`numpy.gradient`). The
    sum telescopes: all but four values cancel.

        g = (3 (x_n - x_1) - (x_{n-1} - x_2)) / (2 n)

    >>> mean_slope([0.0, 1.0, 4.0, 9.0])
    3.0
    """
    scale = 2 * len(returns)
    # Dividing first, and clamping, keep the slope finite for returns at the edge of float64.
    first, second, last_but_one, last = (returns[i] / scale for i in (0, 1, -2, -1))
    slope = 3 * (last - first) - (last_but_one - second)
    return max(-sys.float_info.max, min(sys.float_info.max, slope))


def advance_trend(
    trend: ReturnTrend, episode_return: float, *, num_returns: int = 20, decay: float = 0.9999
) -> ReturnTrend:
    """Updates the trend with the return of one more episode.

    With g the mean slope of the newest `num_returns` returns:

        hi ← g    where g > hi,   else decay · hi
        lo ← |g|  where g < -lo,  else decay · lo
        s = g / hi where g > 0,   g / lo where g < 0,   0 where g = 0

    clamped to [-1, 1]. Until `num_returns` episodes have ended, s = 0 and hi, lo stay: the slope of a few
    noisy returns would set their scale for long.

    Args:
        trend: the state before; it is not changed.
        episode_return: finite.
        num_returns: how many returns the slope spans, at least 2.
        decay: in (0, 1], how slowly the steepest slopes are forgotten.

    Returns:
        the state after.

    >>> trend = ReturnTrend()
    >>> for value in (0.0, 1.0, 3.0, 2.0):
    ...     trend = advance_trend(trend, value, num_returns=2)
    >>> trend.steepest_rise, trend.improvement
    (1.9998, -1.0)
    """
    returns = (*trend.returns, episode_return)[-num_returns:]
    if len(returns) < num_returns:
        return trend._replace(returns=returns, improvement=0.0)
    slope = mean_slope(returns)
    rise, fall = trend.steepest_rise, trend.steepest_fall
    rise = slope if slope > rise else decay * rise
    fall = -slope if slope < -fall else decay * fall
    # `rise` is positive after a positive slope, and `fall` after a negative one, so neither division is
    # by zero. After a slope of 0, both may be 0.
    if slope > 0:
        improvement = min(slope / rise, 1.0)
    elif slope < 0:
        improvement = max(slope / fall, -1.0)
    else:
        improvement = 0.0
    return ReturnTrend(returns, rise, fall, improvement)


def improvement_eta(improvement: float, initial: float) -> float:
    """Turns an improvement into η: the faster returns rise, the more recent the draws.

        η = 1 + (η_0 - 1) · (s + 1) / 2

    the straight line from 1 (uniform) at s = -1 to η_0 at s = +1.

    Args:
        improvement: s in [-1, 1].
        initial: η_0 in (0, 1].

    >>> improvement_eta(1.0, 0.5), improvement_eta(0.0, 0.5), improvement_eta(-1.0, 0.5)
    (0.5, 0.75, 1.0)
    """
    return 1.0 + (initial - 1.0) * (improvement + 1.0) / 2.0
