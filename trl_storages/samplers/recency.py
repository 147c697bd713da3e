"""Emphasizing recent experience (ERE): samples from a recency window that narrows during a phase.

`ReturnImprovementEta` schedules the recency strength by how fast the episode returns improve.

Letters: B batch, N transitions, K updates of a phase.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torchrl.data.replay_buffers import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.scheduler import ParameterScheduler

from trl_storages import validation
from trl_storages.index import EpisodeIndex
from trl_storages.samplers.base import Drawn, ReplaySampler, WrappingSampler
from trl_storages.samplers.hindsight import HERSampler
from trl_storages.serialization import Adopt, State, required_items
from trl_storages.settings import Setting
from trl_storages.storage import StorageView

__all__ = ["ERESampler", "ReturnImprovementEta"]

Reference = Literal["stored", "capacity"]

# Smallest K of a phase that a write starts: with this K each update narrows the window by the factor eta.
_MIN_UPDATES = 1000
_STATE = "update", "num_updates", "written"


@dataclass
class _Phase:
    """The position in a phase, and the writes at the last draw.

    Attributes:
        update: k, the number of updates made.
        num_updates: K; 0 before the first phase.
        num_written: number of steps written before the last draw; -1 before the first draw.
        reset_count: reset count of the index at the last draw; None before the first draw.
    """

    update: int = 0
    num_updates: int = 0
    num_written: int = -1
    reset_count: int | None = None


class ERESampler(WrappingSampler):
    """Emphasizing recent experience (ERE): samples from the newest transitions, a recency window.

        c_k = max(N * eta^(k * 1000 / K), c_min)

    Update k of a phase of K updates (k = 1 .. K, as in the paper) samples from the newest w steps of each
    lane, where w is the smallest number with which the window contains c_k transitions. The base samples
    within the window: uniformly, or by priority with `base=PERSampler(...)`. If at most `c_min`
    transitions are stored, the window contains all of them.

    **Phases.** The paper makes K updates after an episode of K steps. Each `sample` is one update.
    `begin_phase(num_updates)` starts a phase: call it after collecting an episode or a batch. Without
    such a call, the first write after the K-th update starts the next phase, so that a loop that writes
    a step before each update still cycles through the windows. Until that write, updates after the K-th
    keep the last window. A phase that a write starts has `updates_per_phase` updates; None takes the
    number of updates of the previous phase, and at least 1000.

    Args:
        eta: recency strength in (0, 1]; 1 samples from all transitions. The smallest window of a phase
            contains the fraction eta^1000 of the transitions: 0.996 leaves 2 %.
        c_min: smallest recency window, in transitions.
        updates_per_phase: K of phases that a write starts.
        base: samples within the recency window; None samples uniformly.
        reference: whether N is the number of transitions "stored" or the "capacity" (as in the paper).

    All arguments except `base` are attributes that may be set at any time, for instance by TorchRL's
    schedulers. A new value applies from the next batch on (`updates_per_phase` from the next phase on).

    Raises:
        ValueError: `eta` is outside (0, 1], `c_min` or `updates_per_phase` is below 1, or `reference` is
            unknown.
        TypeError: `base` is not a sampler of this library, or is a `HERSampler` or an `ERESampler`.

    Reference: Wang & Ross 2019, Boosting Soft Actor-Critic: Emphasizing Recent Experience without
    Forgetting the Past, arXiv:1906.04009.

    >>> sampler = ERESampler(eta=0.99, c_min=100)
    >>> sampler.begin_phase(500)
    >>> sampler.update, sampler.num_updates
    (0, 500)
    """

    eta: Any = Setting(validation.number, above=0, at_most=1)
    c_min: Any = Setting(validation.integer, at_least=1)
    updates_per_phase: Any = Setting(partial(validation.optional, validation.integer), at_least=1)
    reference: Any = Setting(validation.choice, get_args(Reference))

    def __init__(
        self,
        eta: float = 0.996,
        c_min: int = 5000,
        *,
        updates_per_phase: int | None = None,
        base: Sampler | None = None,
        reference: Reference = "stored",
    ) -> None:
        super().__init__(base)
        self.eta, self.c_min = eta, c_min
        self.updates_per_phase, self.reference = updates_per_phase, reference
        self._phase = _Phase()

    def _check_base(self, base: ReplaySampler) -> None:
        if any(isinstance(layer, HERSampler | ERESampler) for layer in base.components()):
            raise TypeError(f"ERESampler cannot wrap {base}: use HERSampler(base=ERESampler(...)).")

    @property
    def update(self) -> int:
        """k, the number of updates made in this phase; 0 at the beginning of a phase."""
        return self._phase.update

    @property
    def num_updates(self) -> int:
        """K, the number of updates of this phase; 0 before the first phase."""
        return self._phase.num_updates

    def begin_phase(self, num_updates: int) -> None:
        """Begins a phase: the next update is update 1 and has the widest recency window.

        Args:
            num_updates: K, the number of updates until the recency window is narrowest.

        Raises:
            ValueError: `num_updates` is below 1.
        """
        num_updates = validation.integer("num_updates", num_updates, at_least=1)
        self._phase.update, self._phase.num_updates = 0, num_updates

    def window(self, episodes: EpisodeIndex) -> int:
        """Returns c_k, the number of transitions in the recency window of the current update."""
        phase, num_stored = self._phase, len(episodes)
        # The exponent of the last update is 1000 for each K, so that eta has the same effect in phases of
        # any length.
        progress = min(phase.update / max(phase.num_updates, 1), 1)
        num_counted = episodes.capacity if self.reference == "capacity" else num_stored
        return min(max(int(num_counted * self.eta ** (1000 * progress)), self.c_min), num_stored)

    def draw(self, view: StorageView, noise: np.ndarray, window: int | None) -> Drawn:
        """Draws the batch of the next update: the base draws within the recency window of that update."""
        index, phase = view.episodes, self._phase
        reset_count, num_written = index.reset_count, int(index.cursors.sum())
        if phase.reset_count not in (None, reset_count):
            self._phase = phase = _Phase()
        # A write after the last update of a phase begins the next phase.
        if phase.num_written < num_written and phase.update >= phase.num_updates:
            self.begin_phase(self.updates_per_phase or max(_MIN_UPDATES, phase.update))
        phase.reset_count, phase.num_written = reset_count, num_written
        phase.update += 1
        return self._base.draw(view, noise, index.window_of(self.window(index)))

    def _empty(self) -> None:
        super()._empty()
        self._phase = _Phase()

    def state(self) -> State:
        """Returns k and K of the phase, and the number of steps written before the last draw, or -1."""
        phase = self._phase
        numbers = phase.update, phase.num_updates, phase.num_written
        return dict(zip(_STATE, numbers, strict=True))

    def prepare_load(self, state: Any) -> Adopt:
        """Checks a state, and returns a function that adopts the state."""
        update, num_updates, num_written = required_items("ERESampler", state, _STATE)
        phase = _Phase(
            validation.integer("update", update),
            validation.integer("num_updates", num_updates),
            validation.integer("written", num_written, at_least=-1),
        )

        def adopt() -> None:
            self._phase = phase

        return adopt

    def __repr__(self) -> str:
        return f"{type(self).__name__}(eta={self.eta}, c_min={self.c_min}, base={self._base})"


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

    def step(self, episode_returns: float | Sequence[float] | torch.Tensor = ()) -> None:
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
