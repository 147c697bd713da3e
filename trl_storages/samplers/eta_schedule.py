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
from trl_storages.settings import Setting

__all__ = ["ReturnImprovementEta"]


def _mean_slope(returns: Sequence[float]) -> float:
    """Returns the mean discrete gradient of at least two values at unit distance.

    The gradient has central differences inside and one-sided differences at both ends (`numpy.gradient`).
    The sum telescopes: all values except four cancel.

        g = (3 (x_n - x_1) - (x_{n-1} - x_2)) / (2 n)

    >>> _mean_slope([0.0, 1.0, 4.0, 9.0])
    3.0
    """
    scale = 2 * len(returns)
    first, second, second_last, last = (returns[i] / scale for i in (0, 1, -2, -1))
    return 3 * (last - first) - (second_last - second)


class ReturnImprovementEta(ParameterScheduler):  # type: ignore[misc]
    """Schedules `eta` by the slope of the newest episode returns.

    `eta` is the initial value eta_0 while returns rise at their steepest, 1 (uniform sampling) while
    returns fall at their steepest, and linear in between. With g the mean slope of the newest
    `num_returns` returns, and s in [-1, 1] the slope relative to the steepest slopes so far:

        hi ← g    where g > hi,   else decay · hi
        lo ← |g|  where g < -lo,  else decay · lo
        s = g / hi where g > 0,   g / lo where g < 0,   0 where g = 0
        eta = 1 + (eta_0 - 1) * (s + 1) / 2

    Until `num_returns` episodes have ended, s = 0 and hi and lo do not change, because the slope of a few
    noisy returns would fix the scale for long. Eta is always finite and in [eta_0, 1].

    Args:
        obj: an `ERESampler`, a sampler that wraps an `ERESampler`, or the replay buffer of either. The
            current `eta` is eta_0.
        num_returns: number of newest returns from which the slope is computed, at least 2.
        decay: in (0, 1]; hi and lo shrink by this factor with each episode, so that the scale adapts.

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
        # Plain numbers, because TorchRL's `state_dict` returns all attributes.
        self._returns: tuple[float, ...] = ()
        self._rise, self._fall, self._improvement = -math.inf, 0.0, 0.0

    @property
    def improvement(self) -> float:
        """s, the newest slope relative to the steepest slopes, in [-1, 1]."""
        return self._improvement

    def step(self, episode_returns: float | Sequence[float] | Tensor = ()) -> None:
        """Adds the returns of the episodes that ended since the last step, and sets `eta`.

        One call with several returns is equivalent to one call per return.

        Args:
            episode_returns: a number, a sequence or a tensor of any shape, in the order in which the
                episodes ended; if empty, `eta` does not change.

        Raises:
            ValueError: a return is not finite. Nothing is changed.
        """
        values = validation.values("episode_returns", episode_returns, dtype=torch.float64)
        returns = values.flatten().tolist()
        non_finite = [value for value in returns if not math.isfinite(value)]
        if non_finite:
            raise ValueError(
                f"episode_returns must be finite, got {non_finite[0]}: leave out episodes without a "
                "return."
            )
        for value in returns:
            self._add_return(value)
        super().step()

    def _step(self) -> float:
        return 1.0 + (self.initial_val - 1.0) * (self.improvement + 1.0) / 2.0

    def _add_return(self, episode_return: float) -> None:
        """Updates the slopes with the return of one episode."""
        self._returns = (*self._returns, episode_return)[-self.num_returns :]
        self._improvement = 0.0
        if len(self._returns) == self.num_returns:
            slope = _mean_slope(self._returns)
            self._rise = slope if slope > self._rise else self.decay * self._rise
            self._fall = -slope if slope < -self._fall else self.decay * self._fall
            if slope:  # therefore the steepest slope of this sign is above 0
                steepest = self._rise if slope > 0 else self._fall
                self._improvement = max(-1.0, min(1.0, slope / steepest))
