"""What is about to be written: rows made of a TensorDict.

Letters: n rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.data import Storage

from trl_storages.keys import INDEX, MASK
from trl_storages.rows import (
    Layout,
    Nested,
    PackedStorage,
    nested_sizes,
    rows_of_flags,
    stage,
    tensors_of,
)
from trl_storages.writing.checks import check_flags, check_flags_of, end_flags, refuse_padding
from trl_storages.writing.compact import with_next
from trl_storages.writing.gaps import GapWatch

if TYPE_CHECKING:
    from trl_storages.kernels.device import NewRows

__all__ = ["Fields", "Steps"]


class Steps(NamedTuple):
    """n rows that may be written."""

    rows: NewRows
    """Of a storage of TorchRL's what is compared only."""
    layout: Layout | None
    """Of these rows; None where nothing of them is known."""
    trajectory: torch.Tensor | None = None
    """`[n]` int64 on the device of the index."""
    data: TensorDictBase | None = None
    """`[n]`, for a storage of TorchRL's own."""


class Fields:
    """Which entries of a TensorDict are stored, and which tell how steps belong together.

    Args:
        keys: entries to store; None stores all.
        done_key: of the flag that ends an episode.
        traj_key: of the numbers of trajectories.
    """

    def __init__(
        self, keys: list[NestedKey] | None, done_key: NestedKey, traj_key: NestedKey
    ) -> None:
        self.keys, self.done_key, self.traj_key = keys, done_key, traj_key

    def steps(self, data: TensorDictBase, storage: Storage, gaps: GapWatch) -> Steps:
        """Finds out how `data` of any batch size becomes rows, and changes nothing.

        Raises:
            KeyError, TypeError, ValueError: it does not fit the storage, or is no steps.
        """
        device, num_rows = storage.episodes.device, data.numel()
        entries = self.entries(data, storage)
        refuse_padding(entries)
        done = end_flags(entries, self.done_key, num_rows)
        trajectory = entries.get(self.traj_key)
        if trajectory is not None:
            trajectory = trajectory.to(device).reshape(-1).long()
        if isinstance(storage, PackedStorage):
            try:
                layout, rows = self.rows(data, entries, storage, done)
            except KeyError:
                if (repeated := with_next(entries, storage.layout)) is None:
                    raise
                layout, rows = self.rows(data, repeated, storage, done)
                rows.is_compact = True
            return Steps(rows, layout, trajectory)
        check_flags_of(entries)
        stored = self.stored(data).reshape(-1)
        compared = gaps.values(entries, self.keys) if gaps.is_looking else {}
        if not compared:
            return Steps(rows_of_flags(done, num_rows, device), None, trajectory, stored)
        layout = Layout.of(compared, data.ndim)
        rows = stage(layout, compared, data.batch_size, device, done=done)
        return Steps(rows, layout, trajectory, stored)

    def entries(self, data: TensorDictBase, storage: Storage) -> dict[NestedKey, torch.Tensor]:
        """Returns the tensors of `data`, at least those that are stored and those that are looked at."""
        if self.keys is None:
            # TorchRL's own storages take other things than tensors too.
            entries = tensors_of(data, strict=isinstance(storage, PackedStorage))
            # Replay buffers set it on the data that they have written.
            entries.pop(INDEX, None)
            return entries
        if not isinstance(data, TensorDict):
            # To stack what is not wanted takes time, or cannot be done.
            wanted = [*self.keys, self.done_key, self.traj_key, MASK]
            data = data.select(*wanted, strict=False)
        return tensors_of(data, strict=False)

    def stored(self, data: TensorDictBase) -> TensorDictBase:
        """Returns what of `data` a storage of TorchRL's stores."""
        if self.keys is not None:
            return data.select(*self.keys)
        return data.exclude(INDEX) if INDEX in data.keys() else data  # noqa: SIM118

    def rows(
        self,
        data: TensorDictBase,
        entries: Mapping[NestedKey, torch.Tensor],
        storage: PackedStorage,
        done: torch.Tensor | None = None,
    ) -> tuple[Layout, NewRows]:
        """Returns what is stored of `data` as rows, and their layout.

        Args:
            data: of any batch size.
            entries: of it, as `entries` finds them.
            storage: where they go.
            done: which of them end their episodes; None where no lane is written.
        """
        nested: Nested = ()
        if storage.layout is None:
            if self.keys is not None:
                data = data.select(*self.keys)
                entries = tensors_of(data)
            nested = nested_sizes(data, data.ndim)
        strict = self.keys is None
        layout, rows = storage.stage(
            entries, data.batch_size, strict=strict, nested=nested, done=done
        )
        check_flags(layout, rows.seen or rows)
        return layout, rows
