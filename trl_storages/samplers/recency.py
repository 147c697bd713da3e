"""Emphasising recent experience (ERE): draws from a window that narrows onto the newest rows.

How much can follow how fast the agent improves.

Letters: B batch, N rows, K updates of a phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import validation
from trl_storages.index import EpisodeIndex
from trl_storages.samplers.base import Drawn, ReplaySampler
from trl_storages.samplers.hindsight import HERSampler
from trl_storages.samplers.wrapping import WrappingSampler
from trl_storages.serialization import Adopt, State, required_items
from trl_storages.storage import StorageView
from trl_storages.validation import Setting

__all__ = ["ERESampler"]

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

    def prepare_load(self, state: Any) -> Adopt:
        """Returns a function that adopts a state."""
        names = ("update", "num_updates", "written")
        update, num_updates, written = required_items("ERESampler", state, names)
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
