"""Adapts the emphasis on recent experience to how fast the agent improves."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrl.data.replay_buffers import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.scheduler import ParameterScheduler

from trl_storages import arguments
from trl_storages.arguments import Checked
from trl_storages.samplers.base import layers_of

__all__ = ["ReturnImprovementEta", "ReturnTrend", "advance_trend", "mean_slope"]


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
    # Above 0 after a slope of this sign; after one of 0, both may be 0.
    steepest = rise if slope > 0 else fall
    improvement = max(-1.0, min(1.0, slope / steepest)) if slope else 0.0
    return ReturnTrend(returns, rise, fall, improvement)


class ReturnImprovementEta(ParameterScheduler):  # type: ignore[misc]
    """Schedules `eta` by the slope of the newest episode returns.

    `eta` is its initial value eta_0 while returns rise at their steepest, 1 (uniform draws) while they
    fall at their steepest, and linear in between. With s in [-1, 1] the slope relative to the steepest
    ones seen (`advance_trend`):

        eta = 1 + (eta_0 - 1) * (s + 1) / 2

    Until `num_returns` episodes have ended, and while returns are flat, s = 0. So eta is always finite
    and in [eta_0, 1].

    Args:
        obj: an `ERESampler`, a sampler that wraps one, or the replay buffer of either. Its `eta` is
            eta_0.
        num_returns: how many of the newest returns the slope is computed over, at least 2.
        decay: in (0, 1]; the recorded steepest slopes shrink by this factor with each episode, so that
            the scale adapts.

    Raises:
        ValueError: `num_returns` or `decay` is out of range, or the sampler has no `eta`.

    >>> from trl_storages.samplers.emphasis import ERESampler
    >>> sampler = ERESampler(eta=0.5)
    >>> scheduler = ReturnImprovementEta(sampler, num_returns=2)
    >>> scheduler.step([0.0, 1.0])
    >>> sampler.eta
    0.5
    """

    initial_val: float

    num_returns: Any = Checked(arguments.integer, at_least=2)
    decay: Any = Checked(arguments.number, above=0, at_most=1)

    def __init__(
        self, obj: ReplayBuffer | Sampler, *, num_returns: int = 20, decay: float = 0.9999
    ) -> None:
        self.num_returns, self.decay = num_returns, decay
        kinds = (ReplayBuffer, Sampler)
        arguments.instance("obj", obj, kinds, what="an ERESampler, or a replay buffer with one")
        # Samplers that wrap an ERESampler, such as HERSampler, hold it as their base.
        sampler = obj.sampler if isinstance(obj, ReplayBuffer) else obj
        sampler = next((it for it in layers_of(sampler) if hasattr(it, "eta")), sampler)
        super().__init__(sampler, "eta", max_value=1.0)
        self.initial_val = float(self.initial_val)
        self._min_val = self.initial_val
        # As plain numbers, which `state_dict` returns.
        self._trend = ReturnTrend()._asdict()

    @property
    def improvement(self) -> float:
        """The newest slope relative to the steepest ones, s in [-1, 1]."""
        return float(self._trend["improvement"])

    def step(self, episode_returns: float | Sequence[float] | Tensor = ()) -> None:
        """Adds the returns of the episodes that ended since the last step, and sets `eta`.

        One call with several returns is equivalent to one call for each.

        Args:
            episode_returns: a number, a sequence or a tensor of any shape, in the order in which the
                episodes ended; if empty, `eta` keeps the value set by the last returns.

        Raises:
            ValueError: a return is not finite; nothing is changed then.
        """
        given = arguments.values("episode_returns", episode_returns, dtype=torch.float64)
        returns = given.flatten().tolist()
        wrong = [value for value in returns if not math.isfinite(value)]
        if wrong:
            raise ValueError(
                f"episode_returns must be finite, got {wrong[0]}; leave out episodes without a "
                "return."
            )
        trend = ReturnTrend(**self._trend)
        for value in returns:
            trend = advance_trend(trend, value, num_returns=self.num_returns, decay=self.decay)
        self._trend = trend._asdict()
        super().step()

    def _step(self) -> float:
        return 1.0 + (self.initial_val - 1.0) * (self.improvement + 1.0) / 2.0
