"""Emphasizing recent experience (ERE): draws from a window that narrows onto the newest rows.

Letters: B batch, N rows, K updates of a phase.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor
from torchrl.data import Storage
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments
from trl_storages.attributes import Setting
from trl_storages.functional.emphasis import window_size
from trl_storages.ring import EpisodeIndex
from trl_storages.samplers.base import Drawn, WrappingSampler, check_live, checked_draw

__all__ = ["ERESampler", "WindowSampler"]

Reference = Literal["stored", "capacity"]

# The paper's unit: in a phase of this many updates, each one narrows the window by the factor eta.
_SHORTEST_PHASE = 1000


@runtime_checkable
class WindowSampler(Protocol):
    """A sampler that can restrict its draws to the newest rows."""

    def sample_window(self, storage: Storage, batch_size: int, window: Tensor) -> Drawn:
        """Draws among the newest rows.

        Args:
            storage: holds the rows and their episode index.
            batch_size: B.
            window: `[]` int64 on the storage's device: how many of the newest rows to draw from, at
                least 1 and at most the rows stored.

        Returns:
            `[B]` int64 slots, and their info.
        """
        ...


class ERESampler(WrappingSampler):
    """Emphasises recent experience: a window that narrows onto the newest rows.

        c_k = max(N * eta^(k * 1000 / K), c_min)

    The k-th draw of a phase of K (k = 1 .. K, as in the paper) takes rows whose age
    (`EpisodeIndex.ages`) is below c_k: uniformly, or by priority with `base=PERSampler(...)`. It can
    draw exactly these rows, also right after wrap-around and with unequally filled lanes. With at most
    `c_min` rows stored, it draws from all.

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
        TypeError: `base` can't draw within a window.

    Reference: Wang & Ross 2019, Boosting Soft Actor-Critic: Emphasizing Recent Experience without
    Forgetting the Past, arXiv:1906.04009.

    >>> sampler = ERESampler(eta=0.99, c_min=100)
    >>> sampler.begin_phase(500)
    >>> sampler.update, sampler.num_updates
    (0, 500)
    """

    live_parameters: ClassVar[tuple[str, ...]] = ("eta", "c_min", "updates_per_phase", "reference")

    eta = Setting[float](
        partial(arguments.number, above=0, at_most=1), "Recency strength, in (0, 1]."
    )
    c_min = Setting[int](partial(arguments.integer, at_least=1), "The smallest window, in rows.")
    updates_per_phase = Setting[int | None](
        partial(arguments.optional, arguments.integer, at_least=1),
        "The updates of a phase that a write starts.",
    )
    reference = Setting[Reference](
        partial(arguments.choice, names=get_args(Reference)),
        'What N is: the rows "stored" or the "capacity".',
    )

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
        self.eta = eta
        self.c_min = c_min
        self.updates_per_phase = updates_per_phase
        self.reference = reference
        # No phase yet; the first write or draw starts one.
        self._counts = {"update": 0, "num_updates": 0}

    def _check_base(self, base: Sampler) -> None:
        if not isinstance(base, WindowSampler):
            raise TypeError(
                "base must be able to draw within a window, as PERSampler is (sample_window), got "
                f"{type(base).__name__}; leave base out for uniform draws."
            )

    @property
    def update(self) -> int:
        """The updates made in this phase: k of the last draw, 0 at the start of a phase."""
        return self._counts["update"]

    @property
    def num_updates(self) -> int:
        """K, the updates of this phase; 0 before the first phase."""
        return self._counts["num_updates"]

    def begin_phase(self, num_updates: int) -> None:
        """Starts a phase: the next draw is its first, with the widest window.

        Args:
            num_updates: K, the draws until the window is at its narrowest.

        Raises:
            ValueError: `num_updates` is below 1.
        """
        num_updates = arguments.integer("num_updates", num_updates, at_least=1)
        self._counts = {"update": 0, "num_updates": num_updates}

    def window(self, episodes: EpisodeIndex) -> Tensor:
        """Returns c_k, how many of the newest rows the current update draws from.

        In a captured CUDA graph the window grows with the storage, while k and `eta` keep their values
        from the time of capture.

        Returns:
            `[]` int64 on the device of `episodes`.
        """
        arguments.instance("episodes", episodes, EpisodeIndex, what="an EpisodeIndex")
        # Python arithmetic costs a tenth of a tensor operation.
        num_rows: Any = len(episodes) if episodes.device.type == "cpu" else episodes.num_rows
        update, num_updates = self._counts["update"], self._counts["num_updates"]
        size = window_size(
            num_rows,
            eta=self.eta,
            update=min(update, num_updates),
            num_updates=num_updates,
            c_min=self.c_min,
            reference_rows=episodes.capacity if self.reference == "capacity" else None,
        )
        return torch.as_tensor(size)

    def sample(self, storage: Any, batch_size: int) -> Drawn:
        """Draws the batch of the next update.

        Returns:
            `[B]` int64 slots, and the info of the base.

        Raises:
            RuntimeError: the storage is empty, or has no episode index.
        """
        batch_size, episodes = checked_draw(storage, batch_size)
        if not self._counts["num_updates"]:
            self._begin_next_phase()
        self._counts["update"] += 1
        index, info = self.base.sample_window(storage, batch_size, self.window(episodes))
        check_live(self.base, index, batch_size, storage)
        return index, info

    # TorchRL notifies of each write twice, through the container and the writer; the second time a
    # new phase has all its updates left, so nothing changes.

    def add(self, index: Any) -> None:
        """Handles the notification that a row was written."""
        super().add(index)
        self._on_write()

    def extend(self, index: Any) -> None:
        """Handles the notification that rows were written."""
        super().extend(index)
        self._on_write()

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Handles the writer's notification that rows were written."""
        super().mark_update(index, storage=storage)
        self._on_write()

    def _on_write(self) -> None:
        if self.update >= self.num_updates:
            self._begin_next_phase()

    def _begin_next_phase(self) -> None:
        self.begin_phase(self.updates_per_phase or max(_SHORTEST_PHASE, self.update))

    def _empty(self) -> None:
        super()._empty()
        self._counts = {"update": 0, "num_updates": 0}

    def hear_of_rows(self) -> None:
        """Handles the notification that another process wrote rows."""
        super().hear_of_rows()
        self._on_write()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(eta={self.eta}, c_min={self.c_min}, base={self.base})"
