"""A lazy batch: the drawn rows, as transforms present them.

Letters: B samples of a batch, n further rows of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from trl_storages._torchrl import set_entry
from trl_storages.kernels.memory import on_device
from trl_storages.ring import EpisodeIndex, episodes_of
from trl_storages.rows.fields import (
    BatchedFields,
    Copied,
    FollowingFields,
    SingleFields,
    StoredFields,
    read_fields,
)

__all__ = ["RowView", "Rule", "joined"]

Rule = Callable[["RowView", NestedKey], Mapping[NestedKey, torch.Tensor]]


#: How an entry is computed: its rule, how all entries were defined before it, and the stored fields it
#: reads. Without a rule, the entry was set for one batch.
_Definition: TypeAlias = "tuple[Rule | None, _Definitions, Collection[NestedKey]]"
_Definitions: TypeAlias = Mapping[NestedKey, _Definition]

_AS_STORED: _Definitions = {}
_NOTHING: Mapping[NestedKey, torch.Tensor] = {}


class RowView:
    """The rows that were drawn, as presented by the transforms that have run so far.

    Entries are read and set as in a dictionary; one that is replaced before it is read is never
    computed. `at` applies the same rules to further rows, such as those of an n-step window: a reward
    that is read ten steps after a sampled row is the one for the goal that this row was given.

    Args:
        stored: the rows.
        drawn: key -> `[*B, ...]` what the sampler drew, on `stored.device`.
        defined: how entries are computed, for further rows of another view.

    Attributes:
        slots: `[*B]` int64 slots of the rows, on the device of the storage.
        device: where entries are.
    """

    # The definitions of entries that the gather of these rows copies, see `define`.
    _copied: _Definitions = _AS_STORED
    # The rows that supply the entries under `next`, if they are others, and the definitions before that.
    _following: FollowingFields | None = None
    _followed: _Definitions = _AS_STORED
    # Why further rows can't be read; None if they can.
    _obstacle: str | None = None

    def __init__(
        self,
        stored: StoredFields,
        drawn: Mapping[NestedKey, torch.Tensor] | None = None,
        defined: _Definitions = _AS_STORED,
    ) -> None:
        self.slots, self.device = stored.slots, stored.device
        self._stored = stored
        # Entries that were set or computed.
        self._entries: dict[NestedKey, torch.Tensor] = {} if drawn is None else dict(drawn)
        # How entries are computed that are not read as stored.
        self._defined = defined

    @property
    def batch_size(self) -> torch.Size:
        """B."""
        return self.slots.shape

    @property
    def episodes(self) -> EpisodeIndex:
        """The episode index of the storage."""
        return episodes_of(self._stored.storage)

    # Entries

    def __getitem__(self, key: NestedKey) -> torch.Tensor:
        """Returns an entry, `[*B, ...]`.

        Raises:
            KeyError: no such entry; the message lists the existing ones.
            RuntimeError: it was set for the sampled rows only, and these are further rows.
        """
        entry = self._entries.get(key)
        if entry is not None:
            return entry
        definition = self._defined.get(key)
        if definition is None or self._copied.get(key) is definition:
            return self._stored[key]
        rule, before, _ = definition
        if rule is None:
            raise RuntimeError(
                f"{key!r} was set for the sampled rows, but is wanted of further rows too: the transform "
                "that sets it must define() it, or come behind those that read further rows "
                "(GoalRelabel, NStep)."
            )
        following, is_next = self._following, key[0] == "next"
        if following is not None and is_next and self._followed.get(key) is definition:
            seen = RowView(following, None, before)
        else:
            seen = RowView(self._stored, None, before)
            seen._following, seen._followed = following, self._followed
            seen._copied = self._copied
        for found, value in rule(seen, key).items():
            # Keep what was set or defined since, and what other rows supply.
            if self._defined.get(found) is definition and (
                following is None or (found[0] == "next") is is_next
            ):
                self._entries[found] = value
        return self._entries[key]

    def __setitem__(self, key: NestedKey, value: torch.Tensor) -> None:
        """Sets an entry of the rows, `[*B, ...]` on `device`."""
        self._entries[key] = value
        self._defined = {**self._defined, key: (None, self._defined, ())}

    def __contains__(self, key: object) -> bool:
        return key in self._entries or key in self._defined or key in self._stored.names()

    def keys(self) -> tuple[NestedKey, ...]:
        """Returns the keys of all entries, stored or not."""
        return tuple(dict.fromkeys((*self._stored.names(), *self._defined, *self._entries)))

    def define(
        self,
        keys: Sequence[NestedKey],
        rule: Rule,
        *,
        reads: Collection[NestedKey] = (),
        copied: Copied | None = None,
    ) -> Mapping[NestedKey, torch.Tensor]:
        """Defines entries by a rule, for these rows and for further ones.

        Args:
            keys: the entries.
            rule: called with a view of rows as they are now, and the entry to compute; returns that
                entry, and others if they come for free. The rows are these, or further ones `[n, B]`,
                to which values `[B]` of the samples broadcast.
            reads: entries that the rule reads, so that those of further rows are gathered in one call.
            copied: which entry of which other rows the rule copies, and where, if it does no more: then
                the gather of these rows may copy it.

        Returns:
            those of the entries that were copied, once these rows are gathered.
        """
        definition, gathered = (rule, self._defined, reads), _NOTHING
        # Entries that were defined before may be computed from these as they are stored.
        if copied is not None and not self._defined and self._stored.take(keys, copied):
            self._copied = dict.fromkeys(keys, definition)
            gathered = self._stored
        self._defined = defined = {**self._defined}
        for key in keys:
            defined[key] = definition
            if key in self._entries:
                del self._entries[key]
        return gathered

    def is_defined(self, key: NestedKey) -> bool:
        """Returns whether an entry was set or defined, rather than read as stored."""
        return key in self._defined

    # Further rows

    def at(self, slots: torch.Tensor, keys: Collection[NestedKey] = ()) -> RowView:
        """Returns a view of further rows under the same rules.

        Args:
            slots: `[B]` or `[n, B]` int64: rows of each sample, on the device of the storage.
            keys: entries that will be read, so that their fields are gathered in one call.

        Raises:
            RuntimeError: a transform has run that works on the sampled rows only.
        """
        if self._obstacle is not None:
            raise RuntimeError(self._obstacle)
        storage = self._stored.storage
        if slots.device != self.slots.device:
            slots = on_device(slots, self.slots.device)
        stored = SingleFields(storage, slots, self.device)
        if keys:
            wanted = _stored_for(keys, self._defined) if self._defined else keys
            stored.update(read_fields(storage, slots, wanted, self.device))
        return RowView(stored, None, self._defined)

    def follow(self, slots: torch.Tensor, *, reason: str) -> None:
        """Takes the entries under `next` from other rows.

        Args:
            slots: `[*B]` int64, a row for each of these.
            reason: why further rows can't be read after that, as the error message.

        Raises:
            RuntimeError: as `at`.
            KeyError: an entry under `next` was set for the sampled rows.
        """
        if self._obstacle is not None:
            raise RuntimeError(self._obstacle)
        for key, (rule, *_) in self._defined.items():
            if key[0] == "next" and rule is None:
                raise KeyError(
                    f"{key!r} was set for the sampled rows and can't be read from later ones: put the "
                    "transform that sets it behind NStep."
                )
        for key in tuple(self._entries):
            if key[0] == "next":
                del self._entries[key]
        self._stored.follow(slots)
        self._following, self._followed = FollowingFields(self._stored), self._defined
        self._obstacle = reason

    # The batch

    def tensordict(self) -> TensorDictBase:
        """Returns all entries as a TensorDict of batch size B in new memory."""
        self._work_out()
        return self._stored.tensordict(self._entries)

    def gather(self) -> None:
        """Reads all that a batch of these rows needs, so that later writes no longer change it."""
        self._work_out()
        if self._stored.packed() is None:
            self._become(self.tensordict())

    def _work_out(self) -> None:
        for key, definition in self._defined.items():
            if key not in self._entries and self._copied.get(key) is not definition:
                self._entries[key] = self[key]
        # Rules may refer to this view: break the cycle, or its memory waits for the garbage collector.
        self._defined = self._followed = _AS_STORED
        self._following = None

    def transform(self, function: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Applies a function of batches to all entries; further rows can't be read after that.

        Args:
            function: takes the batch and returns it, such as a transform of TorchRL's.
        """
        self._become(function(self.tensordict()))
        self._obstacle = (
            f"{type(function).__name__} has changed the sampled rows, but it cannot show further rows in "
            "the same way: put it behind the transforms that read further rows (GoalRelabel, NStep)."
        )

    def _become(self, batch: TensorDictBase) -> None:
        """Replaces all entries by those of a batch."""
        stored = self._stored
        self._stored = BatchedFields(stored.storage, stored.slots, stored.device)
        self._stored.batch, self._entries = batch, {}


def _stored_for(keys: Collection[NestedKey], defined: _Definitions) -> dict[NestedKey, None]:
    """Returns the stored fields that are read for entries under such rules."""
    found: dict[NestedKey, None] = {}
    for key in keys:
        _, before, reads = defined.get(key, (None, defined, None))
        found.update({key: None} if reads is None else _stored_for(reads, before))
    return found


def joined(views: Sequence[RowView], order: torch.Tensor) -> TensorDict | None:
    """Returns rows of several storages as one batch, if they are packed alike.

    Args:
        views: the rows, gathered, `[b]` each.
        order: `[B]` int64, the number of each sample's row among the concatenated views.

    Returns:
        TensorDict `[B]`, or None if the views differ in fields or entries.
    """
    pieces = [view._stored.packed() for view in views]
    if pieces[0] is None:
        return None
    (layout, first), entries = pieces[0], views[0]._entries
    blocks = [first]
    for view, piece in zip(views[1:], pieces[1:], strict=True):
        if piece is None or piece[0] != layout or piece[1].device != first.device:
            return None
        if not _are_alike(view._entries, entries):
            return None
        blocks.append(piece[1])
    batch = layout.tensordict(torch.cat(blocks).index_select(0, order))
    for key in entries:
        entry = torch.cat([view._entries[key] for view in views])
        set_entry(batch, key, entry.index_select(0, order))
    return batch


def _are_alike(
    entries: Mapping[NestedKey, torch.Tensor], others: Mapping[NestedKey, torch.Tensor]
) -> bool:
    """Returns whether two views have entries of the same names, dtypes and shapes."""
    return entries.keys() == others.keys() and all(
        entry.dtype is others[key].dtype and entry.shape[1:] == others[key].shape[1:]
        for key, entry in entries.items()
    )
