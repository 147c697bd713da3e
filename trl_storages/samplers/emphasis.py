"""Emphasis on recent experience.

Letters: B batch.
"""

from __future__ import annotations

from typing import Any

from trl_storages import arguments
from trl_storages.attributes import Checked
from trl_storages.functional.emphasis import window_size
from trl_storages.index import EpisodeIndex
from trl_storages.packed import PackedStorage
from trl_storages.samplers.base import Drawn, OwnSampler, WrappingSampler
from trl_storages.samplers.hindsight import HERSampler
from trl_storages.samplers.uniform import UniformSampler
from trl_storages.states import Adopt, State, entries_of

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
        # The epoch of the index, None after a load, and how many steps were written by the last draw.
        self._seen: tuple[int | None, int] | None = None

    def begin_phase(self, num_updates: int) -> None:
        """Begins a phase: the next draw is its first, with the widest window."""
        self.num_updates = arguments.integer("num_updates", num_updates, at_least=1)
        self.update = 0

    def _next_update(self, index: EpisodeIndex) -> None:
        """Counts an update; what was written since a phase was over begins the next one."""
        before, now = self._seen, (index.epoch, int(index.cursors.sum()))
        self._seen = now
        is_new = before is None or before[1] < now[1]
        if before is not None and (before[0] not in (None, now[0]) or before[1] > now[1]):
            self.update, self.num_updates, is_new = 0, 0, True
        if is_new and self.update >= self.num_updates:
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
        index = storage.episodes
        self._next_update(index)
        return self.base.draw(storage, batch_size, index.window_of(self.window(index)))

    def state(self) -> State:
        """Returns where the phase is, and how many steps were written by the last draw, -1 before it."""
        written = -1 if self._seen is None else self._seen[1]
        return {"update": self.update, "num_updates": self.num_updates, "written": written}

    def parsed(self, state: Any) -> Adopt:
        """Returns a function that adopts a state."""
        names = ("update", "num_updates", "written")
        update, num_updates, written = entries_of("ERESampler", state, names)
        update = arguments.integer("update", update)
        num_updates = arguments.integer("num_updates", num_updates)
        written = arguments.integer("written", written, at_least=-1)

        def adopt() -> None:
            self.update, self.num_updates = update, num_updates
            self._seen = None if written < 0 else (None, written)

        return adopt
