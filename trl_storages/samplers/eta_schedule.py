"""A schedule of ERE's `eta` that follows how fast the episode returns improve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.scheduler import ParameterScheduler

from trl_storages import validation
from trl_storages.validation import Setting

__all__ = ["ReturnImprovementEta"]


def _mean_slope(returns: Sequence[float]) -> float:
    """Returns the mean discrete gradient of at least two values at unit distance.

    The gradient takes central differences inside and one-sided ones at both ends (`numpy.gradient`). The
    sum telescopes: all but four values cancel.

        g = (3 (x_n - x_1) - (x_{n-1} - x_2)) / (2 n)

    >>> _mean_slope([0.0, 1.0, 4.0, 9.0])
    3.0
    """
    scale = 2 * len(returns)
    first, second, last_but_one, last = (returns[i] / scale for i in (0, 1, -2, -1))
    return 3 * (last - first) - (last_but_one - second)


class ReturnImprovementEta(ParameterScheduler):  # type: ignore[misc]
    """Schedules `eta` by the slope of the newest episode returns.

    `eta` is its initial value eta_0 while returns rise at their steepest, 1 (uniform draws) while they
    fall at their steepest, and linear in between. With g the mean slope of the newest `num_returns`
    returns, and s in [-1, 1] that relative to the steepest ones seen:

        hi ← g    where g > hi,   else decay · hi
        lo ← |g|  where g < -lo,  else decay · lo
        s = g / hi where g > 0,   g / lo where g < 0,   0 where g = 0
        eta = 1 + (eta_0 - 1) * (s + 1) / 2

    Until `num_returns` episodes have ended, s = 0 and hi, lo stay: the slope of a few noisy returns would
    set their scale for long. So eta is always finite and in [eta_0, 1].

    Args:
        obj: an `ERESampler`, a sampler that wraps one, or the replay buffer of either. Its `eta` is
            eta_0.
        num_returns: how many of the newest returns the slope is computed over, at least 2.
        decay: in (0, 1]; the recorded steepest slopes shrink by this factor with each episode, so that
            the scale adapts.

    Raises:
        ValueError: `num_returns` or `decay` is out of range, or the sampler has no `eta`.

    >>> from trl_storages import ERESampler
    >>> sampler = ERESampler(eta=0.5)
    >>> scheduler = ReturnImprovementEta(sampler, num_returns=2)
    >>> scheduler.step([0.0, 1.0])
    >>> sampler.eta, scheduler.improvement
    (0.5, 1.0)
    """

    initial_val: float

    num_returns: Any = Setting(validation.integer, at_least=2)
    decay: Any = Setting(validation.number, above=0, at_most=1)

    def __init__(
        self, obj: ReplayBuffer | Sampler, *, num_returns: int = 20, decay: float = 0.9999
    ) -> None:
        self.num_returns, self.decay = num_returns, decay
        super().__init__(obj, "eta", max_value=1.0)
        self.initial_val = float(self.initial_val)
        self._min_val = self.initial_val
        # As plain numbers, which `state_dict` returns.
        self._returns: tuple[float, ...] = ()
        self._rise, self._fall, self._improvement = -math.inf, 0.0, 0.0

    @property
    def improvement(self) -> float:
        """The newest slope relative to the steepest ones, s in [-1, 1]."""
        return self._improvement

    def step(self, episode_returns: float | Sequence[float] | Tensor = ()) -> None:
        """Adds the returns of the episodes that ended since the last step, and sets `eta`.

        One call with several returns is equivalent to one call for each.

        Args:
            episode_returns: a number, a sequence or a tensor of any shape, in the order in which the
                episodes ended; if empty, `eta` keeps the value set by the last returns.

        Raises:
            ValueError: a return is not finite; nothing is changed then.
        """
        given = validation.values("episode_returns", episode_returns, dtype=torch.float64)
        returns = given.flatten().tolist()
        wrong = [value for value in returns if not math.isfinite(value)]
        if wrong:
            raise ValueError(
                f"episode_returns must be finite, got {wrong[0]}; leave out episodes without a "
                "return."
            )
        for value in returns:
            self._advance(value)
        super().step()

    def _step(self) -> float:
        return 1.0 + (self.initial_val - 1.0) * (self.improvement + 1.0) / 2.0

    def _advance(self, episode_return: float) -> None:
        """Takes in the return of one more episode."""
        self._returns = (*self._returns, episode_return)[-self.num_returns :]
        self._improvement = 0.0
        if len(self._returns) == self.num_returns:
            slope = _mean_slope(self._returns)
            self._rise = slope if slope > self._rise else self.decay * self._rise
            self._fall = -slope if slope < -self._fall else self.decay * self._fall
            if slope:  # the steepest of its sign is above 0 then
                steepest = self._rise if slope > 0 else self._fall
                self._improvement = max(-1.0, min(1.0, slope / steepest))
