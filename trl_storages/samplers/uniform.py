"""Uniform sampling, with replacement or in epochs.

Letters: B batch, E lanes, N transitions of an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from trl_storages import validation
from trl_storages.index import EpisodeIndex
from trl_storages.samplers.base import Drawn, ReplaySampler
from trl_storages.serialization import Adopt, State, required_items
from trl_storages.storage import StorageView

__all__ = ["UniformSampler"]


@dataclass(frozen=True, eq=False)
class _Epoch:
    """The transitions that were stored when an epoch began, in an order that a seed determines.

    Attributes:
        seed: seed of the order.
        tails: `[E]` the oldest step of each lane when the epoch began.
        cursors: `[E]` the first unwritten step of each lane when the epoch began.
        generation: generation of the index; None if the epoch was loaded.
    """

    seed: int
    tails: np.ndarray
    cursors: np.ndarray
    generation: int | None = None

    def can_continue(self, index: EpisodeIndex) -> bool:
        """Returns whether an index may contain the transitions of the epoch."""
        if len(self.tails) != index.num_envs or self.generation not in (None, index.generation):
            return False
        has_room = self.cursors - self.tails <= index.steps_per_lane
        return bool((has_room & (self.cursors <= index.cursors)).all())

    @cached_property
    def order(self) -> np.ndarray:
        """`[N]` ranks of the transitions, which are counted lane by lane, oldest first."""
        size, generator = int((self.cursors - self.tails).sum()), torch.Generator()
        generator.manual_seed(self.seed)
        return torch.randperm(size, generator=generator, device="cpu").numpy()

    def live_slots(self, index: EpisodeIndex, begin: int, end: int) -> np.ndarray:
        """Returns the slots at positions `begin` to `end` of the order, without evicted transitions."""
        ranks, ends = self.order[begin:end], (self.cursors - self.tails).cumsum()
        lanes = ends.searchsorted(ranks, side="right")
        steps = ranks + (self.cursors - ends)[lanes]
        return index.slots_of(lanes, steps)[steps >= index.tails[lanes]]


# Larger step numbers in a state are rejected.
_MAX_STEP = 2**53
_STATE = "seed", "tails", "cursors", "drawn"
_NO_EPOCH = _Epoch(0, np.empty(0, np.int64), np.empty(0, np.int64))


class UniformSampler(ReplaySampler):
    """Samples uniformly from the stored transitions, also if lanes hold different numbers of them.

    Args:
        without_replacement: whether to sample in epochs, in random order: each transition that is stored
            when an epoch begins is sampled once, unless it is evicted first. The last batch of an epoch
            is completed with transitions of the next epoch, and ends an iteration over the buffer
            (`for batch in storage`). A reader of a directory that another process writes skips a few
            more transitions: those that are sampled in place of overwritten ones.

    >>> from trl_storages import PackedStorage, ReplayStorage
    >>> ReplayStorage(storage=PackedStorage(100)).sampler
    UniformSampler()
    """

    def __init__(self, without_replacement: bool = False) -> None:
        super().__init__()
        self._has_epochs = validation.flag("without_replacement", without_replacement)
        # The current epoch, and the position in its order of the next transition.
        self._epoch, self._position = _NO_EPOCH, 0

    @property
    def without_replacement(self) -> bool:
        """Whether transitions are sampled in epochs."""
        return self._has_epochs

    def draw(self, view: StorageView, noise: np.ndarray, window: int | None) -> Drawn:
        """Draws `[B]` slots, and no fields.

        Raises:
            ValueError: a window is given, and the sampler samples without replacement.
        """
        if not self._has_epochs:
            return view.episodes.draw(noise[0], window), {}
        if window is not None:
            raise ValueError(
                "UniformSampler(without_replacement=True) cannot sample from a window."
            )
        return self._continue_epoch(view.episodes, noise[0]), {}

    def _continue_epoch(self, index: EpisodeIndex, noise: np.ndarray) -> np.ndarray:
        """Returns the next slots `[B]` of the epoch, and those of the next epochs where it ends."""
        chunks: list[np.ndarray] = []
        num_slots, has_ended, epoch, position = 0, False, self._epoch, self._position
        if not epoch.can_continue(index):
            epoch, position = _NO_EPOCH, 0
        while num_slots < len(noise):
            if position == len(epoch.order):
                index.check_filled()
                has_ended |= num_slots > 0
                bounds = index.tails.copy(), index.cursors.copy()
                epoch, position = _Epoch(int(noise[num_slots]), *bounds, index.generation), 0
            end = min(position + len(noise) - num_slots, len(epoch.order))
            chunks.append(epoch.live_slots(index, position, end))
            num_slots, position = num_slots + len(chunks[-1]), end
        self._epoch, self._position = epoch, position
        self.ran_out = has_ended or position == len(epoch.order)
        return np.concatenate(chunks)

    def _empty(self) -> None:
        self._epoch, self._position = _NO_EPOCH, 0

    def state(self) -> State:
        """Returns the seed and the bounds of the current epoch, and the position in its order."""
        epoch = self._epoch
        tails, cursors = epoch.tails.tolist(), epoch.cursors.tolist()
        return {"seed": epoch.seed, "tails": tails, "cursors": cursors, "drawn": self._position}

    def prepare_load(self, state: Any) -> Adopt:
        """Checks a state, and returns a function that adopts the state."""
        seed, *bounds, position = required_items("UniformSampler", state, _STATE)
        if not all(isinstance(steps, list) for steps in bounds):
            raise ValueError("the bounds of an epoch must be lists of steps: nothing changed.")
        tails, cursors = (
            np.array([validation.integer("a step", t, at_most=_MAX_STEP) for t in steps], np.int64)
            for steps in bounds
        )
        epoch = _Epoch(validation.integer("seed", seed), tails, cursors)
        is_ordered = len(tails) == len(cursors) and (tails <= cursors).all()
        if not is_ordered or validation.integer("drawn", position) > (cursors - tails).sum():
            raise ValueError(
                "an epoch must have at least as many transitions as were sampled: nothing changed."
            )

        def adopt() -> None:
            self._epoch, self._position = epoch, position

        return adopt

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'without_replacement=True' * self._has_epochs})"
