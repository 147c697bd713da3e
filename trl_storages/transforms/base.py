"""Transforms that look at other rows of the storage than the sampled ones.

Letters: B samples of a batch, n further rows of each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import Storage
from torchrl.envs.transforms import Transform

from trl_storages.episodes import EpisodeIndex, episodes_of
from trl_storages.storages import field_keys, read_fields

__all__ = ["ReplayTransform", "SeenRows"]

Fields = dict[NestedKey, torch.Tensor]


class ReplayTransform(Transform):
    """A transform that a `ReplayStorage` hands its rows to.

    It runs where any other transform of the replay buffer would, in the same order, under the replay
    lock, and finds the sampler's entries (`index`, `goal_index`, ...) in the batch. A transform of
    one's own that reads further rows subclasses this and implements `replay`.

    A transform that shows the sampled rows in another light must show further rows in the same one,
    or those that run after it would mix the two: it names what it changes in `changed_keys` and
    implements `show`.
    """

    #: Entries of a row that this transform shows differently from what is stored.
    changed_keys: frozenset[NestedKey] = frozenset()
    #: Whether this transform makes use of the goal rows that a `HERSampler` draws. Where none does, a
    #: `ReplayStorage` refuses to draw them.
    uses_goals = False

    @abstractmethod
    def replay(self, batch: TensorDictBase, rows: SeenRows) -> TensorDictBase:
        """Changes a sampled batch.

        Args:
            batch: `[B]` transitions in memory of their own, with the sampler's entries.
            rows: the rows of the storage, as the transforms before this one show them.

        Returns:
            the batch to train on.
        """

    def show(
        self,
        batch: TensorDictBase,
        slots: torch.Tensor,
        wanted: Collection[NestedKey],
        rows: SeenRows,
    ) -> Fields:
        """Reads further rows for the transforms that run after this one.

        Args:
            batch: `[B]` transitions that `replay` has changed.
            slots: `[B]` or `[n, B]` int64: the further rows of each of them.
            wanted: the entries to read.
            rows: the rows as the transforms before this one show them.

        Returns:
            key -> `[B, ...]` or `[n, B, ...]`, at least the wanted ones.
        """
        return rows.read(batch, slots, wanted)

    def replaces(self, key: NestedKey) -> bool:
        """Returns whether this transform overwrites an entry of the batch without reading it.

        The transform that runs just before need not work it out then.
        """
        return False

    def hides_next(self, follower: Transform | None) -> bool:
        """Returns whether nobody reads what is stored under `next` of the sampled rows.

        It is so where this transform, or the `follower` that runs after it, overwrites all of that
        before anything looks at it. Then it need not be fetched, and the batch has no `next` yet.
        """
        return False

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Refuses to run where there is no storage to read.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{type(self).__name__} reads rows beside the sampled ones and what the sampler drew, which "
            "only a ReplayStorage hands to its transforms; it was called without them. Pass it as "
            "transform= to a ReplayStorage. A ReplayBufferEnsemble calls the transforms of its members "
            "alone: sample each ReplayStorage by itself, and join the batches with torch.cat."
        )


class SeenRows:
    """The rows of a storage, as the transforms that have run so far show them.

    Each transform sees the rows through those before it, so a reward that is read ten steps after
    a sampled row is the one for the goal that this row was given.

    Args:
        storage: holds the rows; it must not be changed.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._below: SeenRows | None = None
        self._transform: Transform | None = None
        self._changed: frozenset[NestedKey] = frozenset()
        #: The transform that runs after the one that is handed these rows.
        self.follower: Transform | None = None
        #: What that one has found out about the batch, for when it is asked to show further rows.
        self.found: Any = None

    def through(self, transform: Transform) -> SeenRows:
        """Returns the rows as a transform shows them that has just run."""
        seen = SeenRows(self.storage)
        seen._below, seen._transform = self, transform
        seen._changed = getattr(transform, "changed_keys", frozenset())
        return seen

    @property
    def episodes(self) -> EpisodeIndex:
        """The episode index of the storage."""
        return episodes_of(self.storage)

    @property
    def untouched(self) -> bool:
        """Whether no transform has run yet: batch and rows are as they were gathered, in new memory."""
        return self._below is None

    @property
    def keys(self) -> tuple[NestedKey, ...]:
        """The entries of a row, stored or added by a transform."""
        if self._below is None:
            return field_keys(self.storage)
        below = self._below.keys
        return (*below, *self._changed.difference(below))

    def changes(self, key: NestedKey) -> bool:
        """Returns whether an entry may be shown differently from what is stored."""
        return key in self._changed or (self._below is not None and self._below.changes(key))

    def needed(self, entries: frozenset[NestedKey]) -> frozenset[NestedKey]:
        """Returns those entries of the batch that the next transform does not replace anyway."""
        follower = self.follower
        if not isinstance(follower, ReplayTransform):
            return entries
        return frozenset(key for key in entries if not follower.replaces(key))

    def read(
        self, batch: TensorDictBase, slots: torch.Tensor, wanted: Collection[NestedKey]
    ) -> Fields:
        """Reads some entries of further rows of each sample.

        Args:
            batch: `[B]` the sampled transitions.
            slots: `[B]` or `[n, B]` int64, on any device.
            wanted: the entries.

        Returns:
            key -> `[B, ...]` or `[n, B, ...]` on the device of the batch, at least the wanted ones.

        Raises:
            KeyError: the rows have no such entry.
            RuntimeError: a transform that knows nothing of further rows has changed the sampled ones.
        """
        if self._below is None:
            device, at_rest = batch.device, self.storage.device
            if device is None or device == at_rest:
                return read_fields(self.storage, slots, wanted)
            # With rows on the CPU and batches on a GPU, slots that are read from the batch cross.
            fields = read_fields(self.storage, slots.to(at_rest), wanted)
            return {key: field.to(device, non_blocking=True) for key, field in fields.items()}
        if isinstance(self._transform, ReplayTransform):
            return self._transform.show(batch, slots, wanted, self._below)
        raise RuntimeError(
            f"{type(self._transform).__name__} has changed the sampled rows, but it cannot show further "
            "rows in the same way: put it behind the transforms that read further rows (GoalRelabel, "
            "NStep)."
        )
