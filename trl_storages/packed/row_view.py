"""Drawn rows, as the transforms have left them so far.

Letters: B batch, n rows of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from trl_storages import arguments
from trl_storages.packed.storage import PackedStorage
from trl_storages.streams.device_rows import sent, sent_together
from trl_storages.streams.layout import nest

__all__ = ["RowView"]


class RowView:
    """Rows of a storage: `rows[key]` reads an entry, `rows[key] = value` sets it, for this batch alone.

    The rows of a batch are gathered whole when one of their fields is first read, or at the end; of
    further rows (`at`, `window`) only those fields are fetched that are read. What the sampler drew, such
    as `goal_index`, is there from the beginning.

    Args:
        storage: holds the rows.
        slots: `[*B]` int64, on the host.
        drawn: the sampler's entries, on the host; None makes a view of further rows.
        slots_read: that of the view of which these are further rows.

    Attributes:
        slots: as given.
        drawn: as given; `rows[key]` has these entries on the device of the rows.
        device: where entries are.
        is_on_host: whether compiled loops read and write the rows.
        episodes: which rows are in which episodes; tensors that it is asked about are on the host.
        window: the n rows from each one, `[n, B]`, while an `NStep` is to fold them; else None. The last
            row of an episode is repeated.
        lengths: how many rows of the window differ, `[B]` int64 on the host; None if it was never there.
        changes: what the sampler drew and transforms set, key -> value.
        slots_read: what this view and all views of further rows have read: whoever draws beside a writer
            looks afterwards which of them gave way.
    """

    def __init__(
        self,
        storage: PackedStorage,
        slots: torch.Tensor,
        drawn: Mapping[NestedKey, torch.Tensor] | None = None,
        slots_read: list[torch.Tensor] | None = None,
    ) -> None:
        self._storage, self.slots, self.drawn = storage, slots, drawn or {}
        self.device, self.episodes = storage.device, storage.episodes
        self.is_on_host: bool = storage.is_on_host
        self.window: RowView | None = None
        self.lengths: Any = None
        self.slots_read = [] if slots_read is None else slots_read
        self.slots_read.append(slots)
        self.changes: dict[NestedKey, torch.Tensor] = dict(self.drawn)
        if drawn and not self.is_on_host:
            self.changes = sent_together(drawn, self.device)
        self._fetched: dict[NestedKey, torch.Tensor] = {}
        # What was pasted: key, entries `[B]` of the other rows, mask, targets and default.
        self._pasted: list[tuple[Any, ...]] = []
        # Numbers of entries: those that the rows are in, and those whose next observations they have,
        # which are others where windows are folded. And the rows, once gathered.
        self._first: Any = storage.rows.entries_of(slots)
        self._last = self._first
        self._block: torch.Tensor | None = None
        self._batch: TensorDictBase | None = None

    @property
    def steps(self) -> RowView:
        """The rows whose rewards and flags count: the window, if there is one, else these rows."""
        return self if self.window is None else self.window

    # Entries

    def __contains__(self, key: NestedKey) -> bool:
        key = unravel_key(key)
        if self._batch is not None:
            return key in self._batch.keys(True)
        return key in self.changes or key in self._fetched or key in self._storage.layout.described

    def __getitem__(self, key: NestedKey) -> torch.Tensor:
        """Returns an entry, `[*B, ...]`.

        Raises:
            KeyError: there is none; the message lists the fields of the rows.
        """
        if self._batch is not None:
            return self._batch[key]
        found = self.changes.get(key, self._fetched.get(key))
        if found is not None:
            return found
        key = unravel_key(key)
        if key not in self.changes and key not in self._fetched:
            if not self.drawn:
                self._fetched[key] = self._storage.rows.take(key, self._first)
            elif self._block is None:
                self._gather()
        found = self.changes.get(key, self._fetched.get(key))
        if found is None:
            self._storage.layout.by_key[key]  # raises, with the fields that there are
            raise KeyError(key)
        return found

    def __setitem__(self, key: NestedKey, value: torch.Tensor) -> None:
        """Sets an entry of this batch, `[*B, ...]` on the device of the rows.

        Raises:
            TypeError, ValueError: it is no tensor with a value for each row.
        """
        size = self.slots.shape
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{key!r} must be a tensor, got {type(value).__name__}.")
        if value.shape[: len(size)] != size:
            raise ValueError(
                f"{key!r} must have a value for each row, {[*size]}, got {[*value.shape]}."
            )
        if self._batch is not None:
            self._batch[key] = value
        else:
            self.changes[unravel_key(key)] = value

    def _gather(self) -> None:
        """Gathers whole rows, with what is to be pasted into them."""
        storage = self._storage
        self._block = storage.rows.gather(self._first, self._last)
        self._fetched = storage.layout.views(self._block)
        for pasted in self._pasted:
            self._paste(pasted)

    # Further rows

    def at(self, slots: torch.Tensor) -> RowView:
        """Returns further rows as they are stored.

        Args:
            slots: `[*]` int64 of live rows, such as those of `episodes.shift`.

        Raises:
            TypeError: they are no tensor of int64.
            IndexError: a slot holds no live row.
        """
        if not isinstance(slots, torch.Tensor) or slots.dtype is not torch.int64:
            raise TypeError(f"slots must be a tensor of int64, got {slots!r}.")
        # Where another process writes they may go at any time, which is seen later.
        if self._storage.place.is_writer:
            self.episodes.check_live(slots.reshape(-1).cpu())
        return RowView(self._storage, slots.cpu(), slots_read=self.slots_read)

    def widen(self, num_rows: int) -> None:
        """Opens the window, for what reads rows ahead; what stands under `next` is that of its last row.

        Args:
            num_rows: n, how many rows there are at most.

        Raises:
            RuntimeError: there is a window, or rows were read already: widen in `prepare`.
        """
        if self.window is not None or self._fetched:
            raise RuntimeError(
                "rows are widened once, before they are read: use one NStep, whose n_step may be "
                "changed at any time."
            )
        found, lengths = self.episodes.windows(self.slots.numpy(), num_rows)
        self.window = RowView(self._storage, torch.from_numpy(found), slots_read=self.slots_read)
        self.lengths, self._last = torch.from_numpy(lengths), self.window._first[-1]

    def follow(self, slots: torch.Tensor) -> None:
        """Takes what stands under `next` from other rows.

        Args:
            slots: `[B]` int64, on the host.

        Raises:
            RuntimeError: a transform has set an entry under `next` already.
            ValueError: they are not as many as the rows.
        """
        if slots.shape != self.slots.shape:
            raise ValueError(f"slots must be {[*self.slots.shape]}, got {[*slots.shape]}.")
        self.slots_read.append(slots)
        self._follow(self._storage.rows.entries_of(slots))

    def follow_window(self, at: torch.Tensor) -> None:
        """Takes what stands under `next` from row `at` `[B]` of each window, on the device of the rows.

        Raises:
            RuntimeError: there is no window, or a transform has set an entry under `next` already.
        """
        if self.window is None:
            raise RuntimeError("there must be a window to follow: widen first.")
        self._follow(self._storage.rows.picked(self.window._first, at))

    def _follow(self, last: Any) -> None:
        for key in self.changes:
            if key[0] == "next":
                raise RuntimeError(
                    f"{key!r} was set for another next row: set that of rows.steps, or put the transform "
                    "that does behind NStep."
                )
        self._last, self._block, self._fetched = last, None, {}

    def paste(
        self,
        targets: Sequence[NestedKey],
        key: NestedKey,
        slots: torch.Tensor,
        mask: torch.Tensor,
        *,
        default: NestedKey | None = None,
    ) -> None:
        """Sets entries to a field of other rows where a mask says so.

        Args:
            targets: which entries.
            key: the field that takes their place.
            slots: `[B]` int64 of the other rows, on the host.
            mask: `[B]` bool, on the host; elsewhere entries stay as they are.
            default: the field that targets which are no fields are elsewhere.

        Raises:
            KeyError: the rows have no such field.
            TypeError: the field is floating, and a target is not.
            ValueError: their shapes differ.
            RuntimeError: a transform of TorchRL's stands before, or one that has set a target.
        """
        if self._batch is not None:
            raise RuntimeError(
                "goals must be written before transforms of TorchRL's: put these behind."
            )
        if not self.changes.keys().isdisjoint(targets):
            raise RuntimeError(
                f"{targets} were set by a transform: put it behind the one of goals."
            )
        self.slots_read.append(slots)
        pasted = key, self._storage.rows.entries_of(slots), mask, tuple(targets), default
        # Kept for when `follow` gathers the rows again.
        self._pasted.append(pasted)
        if self._block is not None:
            self._paste(pasted)

    def _paste(self, pasted: tuple[Any, ...]) -> None:
        """Pastes into gathered rows, or beside them what does not fit into their fields."""
        key, at, mask, targets, default = pasted
        rows = self._storage.rows
        if rows.paste(self._block, key, at, mask, targets):
            return
        values = rows.take(key, at)
        chosen = sent(mask, self.device).view(-1, *(1,) * (values.ndim - 1))
        for target in targets:
            before = self[target if target in self._fetched else default or target]
            if values.is_floating_point() and not before.is_floating_point():
                raise TypeError(
                    f"{target!r} must be floating as {key!r} is, got {before.dtype}: values would be "
                    "truncated."
                )
            if values.shape != before.shape:
                raise ValueError(
                    f"{key!r} must have the shape of {target!r}, {[*before.shape[1:]]}, got "
                    f"{[*values.shape[1:]]}."
                )
            self._fetched[target] = torch.where(chosen, values.to(before.dtype), before)

    # Batches

    def transform(self, function: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Applies a function of batches, such as a transform of TorchRL's.

        Raises:
            RuntimeError: an `NStep` behind it would fold rewards that it has not seen.
            TypeError: it returns something else.
        """
        if self.window is not None:
            raise RuntimeError(
                f"{type(function).__name__} must stand behind NStep, which folds rewards of rows that it "
                "does not see."
            )
        self._batch = arguments.tensordict("what a transform returns", function(self.tensordict()))

    def tensordict(self) -> TensorDictBase:
        """Returns all entries as a TensorDict `[B]`, in new memory."""
        if self._batch is not None:
            return self._batch
        if self._block is None:
            self._gather()
        entries = {**self._fetched, **self.changes}
        return nest(entries, self.slots.shape, self.device, self._storage.layout.nested)
