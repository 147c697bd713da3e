"""Drawn rows, as the transforms have left them so far.

Letters: B batch, n rows of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from trl_storages.index import EpisodeIndex
from trl_storages.packed.storage import PackedStorage
from trl_storages.streams.device_rows import sent
from trl_storages.streams.layout import nest

__all__ = ["RowView"]


class RowView:
    """Rows of a storage: `rows[key]` reads an entry, `rows[key] = value` sets it, for this batch alone.

    The rows of a batch are gathered whole when one of their fields is first read, or at the end; of
    further rows (`at`, `window`) only those fields are fetched that are read. The entries of the sampler,
    such as `goal_index`, are there from the beginning.

    Args:
        storage: holds the rows.
        slots: `[*B]` int64, on the host.
        entries: of the sampler; None makes a view of further rows.

    Attributes:
        slots: as given.
        window: the n rows from each one, `[n, B]`, while an `NStep` is to fold them; else None. What
            changes rewards or flags changes those of `steps`.
    """

    def __init__(
        self,
        storage: PackedStorage,
        slots: torch.Tensor,
        entries: Mapping[NestedKey, torch.Tensor] | None = None,
    ) -> None:
        self._storage, self.slots = storage, slots
        self._is_batch = entries is not None
        # What the sampler and transforms set, what was fetched, and the goals that are pasted into it.
        self._set: dict[NestedKey, torch.Tensor] = dict(entries or {})
        self._fetched: dict[NestedKey, torch.Tensor] = {}
        self._pasted: list[tuple[Any, ...]] = []
        self._block: Any = None
        self._next_slots = slots
        self._batch: TensorDictBase | None = None
        self.window: RowView | None = None
        #: All slots that were read, of further rows too.
        self.read = [slots]

    @property
    def device(self) -> torch.device:
        """Where entries are."""
        return self._storage.device

    @property
    def episodes(self) -> EpisodeIndex:
        """Which rows are in which episodes; it takes and returns tensors on the host."""
        return self._storage.episodes

    @property
    def steps(self) -> RowView:
        """The rows whose rewards and flags count: the window, if there is one."""
        return self if self.window is None else self.window

    def at(self, slots: torch.Tensor) -> RowView:
        """Returns further rows as they are stored, `[*]` slots on the host."""
        rows = RowView(self._storage, slots)
        rows.read = self.read
        return rows

    def follow(self, slots: torch.Tensor) -> None:
        """Takes what stands under `next` from other rows, `[B]`; what was set there is forgotten."""
        self._next_slots, self._block, self._fetched = slots, None, {}
        self._set = {key: value for key, value in self._set.items() if key[0] != "next"}

    def __contains__(self, key: NestedKey) -> bool:
        key = unravel_key(key)
        if self._batch is not None:
            return key in self._batch.keys(True)
        return key in self._set or key in self._storage.layout

    def is_set(self, key: NestedKey) -> bool:
        """Whether the sampler or a transform has set an entry."""
        return unravel_key(key) in self._set

    def is_alike(self, key: NestedKey, other: NestedKey) -> bool:
        """Whether both are fields, of one dtype and shape."""
        layout = self._storage.layout
        if key not in layout or other not in layout:
            return False
        one, two = layout.field(key), layout.field(other)
        return one.dtype is two.dtype and one.shape == two.shape

    def __getitem__(self, key: NestedKey) -> torch.Tensor:
        key = unravel_key(key)
        if self._batch is not None:
            return self._batch[key]
        if key in self._set:
            return self._set[key]
        if key not in self._fetched:
            if self._is_batch:
                self._fetch()
            else:
                self._fetched[key] = self._storage.rows.take(key, self._places(self.slots))
        return self._fetched[key]

    def __setitem__(self, key: NestedKey, value: torch.Tensor) -> None:
        if self._batch is not None:
            self._batch[key] = value
        else:
            self._set[unravel_key(key)] = value

    def _places(self, slots: torch.Tensor) -> torch.Tensor:
        if slots is not self.read[0]:
            self.read.append(slots)
        return self.episodes.places(slots)

    def paste(
        self,
        targets: Sequence[NestedKey],
        key: NestedKey,
        slots: torch.Tensor,
        mask: torch.Tensor,
    ) -> None:
        """Sets fields to one of other rows, `[B]` slots, where `mask` `[B]` says so, on the host."""
        if self._batch is not None:
            raise RuntimeError(
                "goals must be written before transforms of TorchRL's: put these behind."
            )
        layout = self._storage.layout
        fields = [layout.field(target) for target in targets]
        pasted = layout.field(key), slots, mask, fields
        # Kept for when `follow` gathers the rows again.
        self._pasted.append(pasted)
        if self._block is not None:
            self._paste(*pasted)

    def _paste(self, field: Any, slots: torch.Tensor, mask: torch.Tensor, targets: Any) -> None:
        self._storage.rows.paste(self._block, field, self._places(slots), mask, targets)

    def _fetch(self) -> None:
        """Gathers whole rows."""
        rows, places = self._storage.rows, self._places(self.slots)
        last = places if self._next_slots is self.slots else self._places(self._next_slots)
        self._block = rows.gather(places, last)
        for pasted in self._pasted:
            self._paste(*pasted)
        self._fetched = self._storage.layout.views(self._block)

    def transform(self, function: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Applies a function of batches, such as a transform of TorchRL's.

        Raises:
            RuntimeError: an `NStep` behind it would fold rewards that it has not seen.
        """
        if self.window is not None:
            raise RuntimeError(
                f"{type(function).__name__} must stand behind NStep, which folds rewards of rows that it "
                "does not see."
            )
        self._batch = function(self.tensordict())

    def tensordict(self) -> TensorDictBase:
        """Returns all entries as a TensorDict `[B]`, in new memory."""
        if self._batch is not None:
            return self._batch
        if self._block is None:
            self._fetch()
        given = {key: sent(value, self.device) for key, value in self._set.items()}
        fields, layout = {**self._fetched, **given}, self._storage.layout
        return nest(fields, self.slots.shape, self.device, layout.nested)
