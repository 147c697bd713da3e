"""Emphasising recent experience (ERE): draws from a window that narrows onto the newest rows.

How much can follow how fast the agent improves.

Letters: B batch, N rows, K updates of a phase.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.scheduler import ParameterScheduler

from trl_storages import validation
from trl_storages.index import EpisodeIndex
from trl_storages.samplers.base import Drawn, ReplaySampler, WrappingSampler, layers_of
from trl_storages.samplers.hindsight import HERSampler
from trl_storages.serialization import Adopt, State, entries_of
from trl_storages.settings import Setting
from trl_storages.storage import StorageView

__all__ = ["ERESampler", "ReturnImprovementEta"]

Reference = Literal["stored", "capacity"]

# The paper's unit: in a phase of so many updates, each one narrows the window by the factor eta.
_SHORTEST_PHASE = 1000


@dataclass
class _Phase:
    """The updates made in a phase, and how many there are to be; 0 before the first phase."""

    update: int = 0
    num_updates: int = 0
    #: How many steps were written by the last draw, -1 before it, and the epoch of the index, if known.
    written: int = -1
    epoch: int | None = None


class ERESampler(WrappingSampler):
    """Emphasises recent experience: a window that narrows onto the newest rows.

        c_k = max(N * eta^(k * 1000 / K), c_min)

    The k-th draw of a phase of K (k = 1 .. K, as in the paper) takes the newest w steps of each lane, w
    the least number with which they are c_k rows: uniformly, or by priority with
    `base=PERSampler(...)`. With at most `c_min` rows stored, it draws from all.

    **Phases.** The paper makes K updates after an episode of K steps. Each `sample` is one update.
    `begin_phase(num_updates)` starts a phase: call it after collecting an episode or a batch. Without
    it, the first write after the current phase has used up its updates starts the next one, so that a
    loop that writes a step before each update still cycles through the windows. Until then, updates
    beyond the K-th keep the last window. A phase started by a write has `updates_per_phase` updates;
    None takes the number made in the previous phase, and at least 1000.

    Args:
        eta: recency strength in (0, 1]; 1 draws from everything. The smallest window of a phase is
            the share eta^1000 of the rows: 0.996 leaves 2 %.
        c_min: the smallest window, in rows.
        updates_per_phase: K of phases started by a write.
        base: draws within the window; None draws uniformly.
        reference: N is the number of rows "stored" now or the "capacity" (as in the paper).

    All of these except `base` are attributes that may be set at any time, for instance by TorchRL's
    schedulers; a new value applies from the next draw on (`updates_per_phase` from the next phase on).

    Raises:
        ValueError: `eta` outside (0, 1], `c_min` or `updates_per_phase` below 1, or an unknown
            `reference`.
        TypeError: `base` is no sampler that draws rows.

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
        if any(isinstance(layer, HERSampler | ERESampler) for layer in base.layers):
            raise TypeError(f"base must draw rows of any age, got {base}: pass this sampler to it.")

    @property
    def update(self) -> int:
        """The updates made in this phase: k of the last draw, 0 at the beginning of a phase."""
        return self._phase.update

    @property
    def num_updates(self) -> int:
        """K, the updates of this phase; 0 before the first phase."""
        return self._phase.num_updates

    def begin_phase(self, num_updates: int) -> None:
        """Begins a phase: the next draw is its first, with the widest window.

        Args:
            num_updates: K, the draws until the window is at its narrowest.

        Raises:
            ValueError: `num_updates` is below 1.
        """
        num_updates = validation.integer("num_updates", num_updates, at_least=1)
        self._phase.update, self._phase.num_updates = 0, num_updates

    def window(self, episodes: EpisodeIndex) -> int:
        """Returns c_k, how many of the newest rows the current update draws from."""
        phase, stored = self._phase, len(episodes)
        # The first update of a phase sees nearly everything, the last one the share η^1000; the factor
        # makes η mean the same for any length of the phase.
        share = min(phase.update / max(phase.num_updates, 1), 1)
        rows = episodes.capacity if self.reference == "capacity" else stored
        return min(max(int(rows * self.eta ** (1000 * share)), self.c_min), stored)

    def draw(self, view: StorageView, noise: np.ndarray, window: int | None) -> Drawn:
        """Draws the batch of the next update, as its base does in the window."""
        index, phase = view.episodes, self._phase
        epoch, written = index.generation, int(index.cursors.sum())
        if phase.epoch not in (None, epoch):
            self._phase = phase = _Phase()
        # What was written since a phase was over begins the next one.
        if phase.written < written and phase.update >= phase.num_updates:
            self.begin_phase(self.updates_per_phase or max(_SHORTEST_PHASE, phase.update))
        phase.epoch, phase.written = epoch, written
        phase.update += 1
        return self._base.draw(view, noise, index.window_of(self.window(index)))

    def _empty(self) -> None:
        super()._empty()
        self._phase = _Phase()

    def state(self) -> State:
        """Returns where the phase is, and how many steps were written by the last draw, -1 before it."""
        phase = self._phase
        return {"update": phase.update, "num_updates": phase.num_updates, "written": phase.written}

    def parsed(self, state: Any) -> Adopt:
        """Returns a function that adopts a state."""
        names = ("update", "num_updates", "written")
        update, num_updates, written = entries_of("ERESampler", state, names)
        phase = _Phase(
            validation.integer("update", update),
            validation.integer("num_updates", num_updates),
            validation.integer("written", written, at_least=-1),
        )

        def adopt() -> None:
            self._phase = phase

        return adopt

    def __repr__(self) -> str:
        return f"{type(self).__name__}(eta={self.eta}, c_min={self.c_min}, base={self._base})"


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
        # Samplers that wrap an ERESampler, such as HERSampler, hold it as their base.
        sampler = obj.sampler if isinstance(obj, ReplayBuffer) else obj
        sampler = next((it for it in layers_of(sampler) if hasattr(it, "eta")), sampler)
        super().__init__(sampler, "eta", max_value=1.0)
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
