"""Emphasis on recent experience.

Letters: B batch.
"""

from __future__ import annotations

from typing import Any

from trl_storages import arguments
from trl_storages.attributes import Checked
from trl_storages.functional.emphasis import window_size
from trl_storages.index import EpisodeIndex, Seen
from trl_storages.packed import PackedStorage
from trl_storages.samplers.base import Drawn, OwnSampler, WrappingSampler
from trl_storages.samplers.hindsight import HERSampler
from trl_storages.samplers.uniform import UniformSampler

__all__ = ["ERESampler"]

_SHORTEST_PHASE = 1000


class ERESampler(WrappingSampler):
    """Draws from a window that narrows onto recent steps with each update of a phase.

        c_k = max(N * eta^(k * 1000 / K), c_min)

    Reference: Wang & Ross 2019, arXiv:1906.04009.
    """

    updates_per_phase: int | None = None
    reference, update, num_updates = "stored", 0, 0
    eta: Any = Checked(arguments.number, above=0, at_most=1)
    c_min: Any = Checked(arguments.integer, at_least=1)

    def __init__(
        self,
        eta: float = 0.996,
        c_min: int = 5000,
        *,
        updates_per_phase: int | None = None,
        base: OwnSampler | None = None,
        reference: str = "stored",
    ) -> None:
        super().__init__(UniformSampler() if base is None else base)
        if any(isinstance(layer, HERSampler) for layer in self.base.layers):
            raise TypeError("base must draw rows, got a HERSampler: pass this sampler as its base.")
        self.eta, self.c_min = eta, c_min
        self.updates_per_phase = arguments.optional(
            arguments.integer, "updates_per_phase", updates_per_phase, at_least=1
        )
        self.reference = arguments.choice("reference", reference, ("stored", "capacity"))
        #: The updates made in this phase, and how many there are to be; 0 before the first phase.
        self.update, self.num_updates = 0, 0
        self._seen: Seen | None = None

    def begin_phase(self, num_updates: int) -> None:
        """Begins a phase: the next draw is its first, with the widest window."""
        self.num_updates = arguments.integer("num_updates", num_updates, at_least=1)
        self.update = 0

    def _next_update(self, storage: PackedStorage) -> None:
        """Counts an update; what was written since a phase was over begins the next one."""
        before, (changes, self._seen) = self._seen, storage.episodes.since(self._seen)
        if before is not None and before.epoch != self._seen.epoch:
            self.update, self.num_updates = 0, 0
        if changes is not None and self.update >= self.num_updates:
            self.begin_phase(self.updates_per_phase or max(_SHORTEST_PHASE, self.update))
        self.update += 1

    def window(self, episodes: EpisodeIndex) -> int:
        """Returns c_k, how many of the newest rows the current update draws from."""
        size: int = window_size(
            len(episodes),
            eta=self.eta,
            update=min(self.update, self.num_updates),
            num_updates=self.num_updates,
            c_min=self.c_min,
            reference_rows=episodes.capacity if self.reference == "capacity" else None,
        )
        return size

    def draw(self, storage: PackedStorage, batch_size: int, window: int | None) -> Drawn:
        """Draws from the newest w steps of each lane, w the least with which they reach c_k."""
        self._next_update(storage)
        index = storage.episodes
        return self.base.draw(storage, batch_size, index.window_of(self.window(index)))
