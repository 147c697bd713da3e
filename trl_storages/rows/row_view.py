"""A batch before it is one: the drawn rows, as transforms show them.

Letters: B samples of a batch, n further rows of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from trl_storages._torchrl import set_entry
from trl_storages.ring import EpisodeIndex, episodes_of
from trl_storages.rows.fields import BatchedFields, FollowingFields, StoredFields

__all__ = ["RowView", "Rule", "joined"]

Rule = Callable[["RowView", NestedKey], Mapping[NestedKey, torch.Tensor]]


#: How an entry is seen, given how all were seen before, and what that takes; without a rule it was set
#: for one batch.
_Light: TypeAlias = "tuple[Rule | None, _Lights, Collection[NestedKey]]"
_Lights: TypeAlias = Mapping[NestedKey, _Light]

_AS_STORED: _Lights = {}


class RowView:
    """The rows that were drawn, as the transforms that have run so far show them.

    Entries are read and set as those of a dictionary, and an entry that is replaced before anybody has
    asked for it is never worked out. `at` looks at further rows in the same light, such as those of an
    n-step window: a reward that is read ten steps after a sampled row is the one for the goal that
    this row was given.

    Args:
        stored: the rows.
        drawn: key -> `[*B, ...]` what the sampler drew, on `stored.device`.
        lights: how entries are seen, as further rows of another view.

    Attributes:
        slots: `[*B]` int64 where the rows lie, on the device of the storage.
        device: where entries are.
    """

    def __init__(
        self,
        stored: StoredFields,
        drawn: Mapping[NestedKey, torch.Tensor] | None = None,
        lights: _Lights = _AS_STORED,
    ) -> None:
        self.slots, self.device = stored.slots, stored.device
        self._stored = stored
        # What was set or worked out.
        self._entries: dict[NestedKey, torch.Tensor] = {} if drawn is None else dict(drawn)
        # Those that are seen otherwise than they are stored.
        self._lights = lights
        # The rows that lend what lies under `next`, where these are others.
        self._following: RowView | None = None
        # Why further rows can't be looked at, where they can't.
        self._obstacle: str | None = None

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
            KeyError: there is none; the message lists those that are there.
            RuntimeError: it was set for the sampled rows, and these are others.
        """
        entry = self._entries.get(key)
        if entry is not None:
            return entry
        light = self._lights.get(key)
        if light is None:
            return self._stored[key]
        rule, before, _ = light
        if rule is None:
            raise RuntimeError(
                f"{key!r} was set for the sampled rows, but is wanted of further rows too: the transform "
                "that sets it must define() it, or come behind those that read further rows "
                "(GoalRelabel, NStep)."
            )
        if self._following is not None and key[0] == "next":
            return self._following[key]
        seen = RowView(self._stored, None, before)
        for found, value in rule(seen, key).items():
            # What was set or defined since stays.
            if self._lights.get(found) is light:
                self._entries[found] = value
        return self._entries[key]

    def __setitem__(self, key: NestedKey, value: torch.Tensor) -> None:
        """Sets an entry of the rows, `[*B, ...]` on `device`."""
        self._entries[key] = value
        self._lights = {**self._lights, key: (None, self._lights, ())}

    def __contains__(self, key: object) -> bool:
        return key in self._entries or key in self._lights or key in self._stored.names()

    def keys(self) -> tuple[NestedKey, ...]:
        """Returns the keys of all entries, stored or not."""
        return tuple(dict.fromkeys((*self._stored.names(), *self._lights, *self._entries)))

    def define(
        self, keys: Collection[NestedKey], rule: Rule, *, reads: Collection[NestedKey] = ()
    ) -> None:
        """Shows entries in another light, for these rows and for further ones.

        Args:
            keys: the entries.
            rule: returns one of them when it is asked for, and perhaps others that come along. It is
                given rows as they are seen now, these or further ones `[n, B]` of each sample, to which
                what is known of the samples broadcasts; and which entry is asked for.
            reads: entries that it asks for, so that those of further rows are gathered together.
        """
        light = rule, self._lights, reads
        self._lights = lights = {**self._lights}
        for key in keys:
            lights[key] = light
            if key in self._entries:
                del self._entries[key]

    def is_defined(self, key: NestedKey) -> bool:
        """Returns whether an entry is seen in another light than it is stored in."""
        return key in self._lights

    # Further rows

    def at(self, slots: torch.Tensor, keys: Collection[NestedKey] = ()) -> RowView:
        """Looks at further rows as these are seen.

        Args:
            slots: `[B]` or `[n, B]` int64: rows of each sample, on the device of the storage.
            keys: entries that are wanted for certain, so that what they take is gathered together.

        Raises:
            RuntimeError: a transform has run that shows the sampled rows only.
        """
        if self._obstacle is not None:
            raise RuntimeError(self._obstacle)
        stored = self._stored.further(slots, _stored_for(keys, self._lights))
        return RowView(stored, None, self._lights)

    def follow(self, slots: torch.Tensor, *, reason: str) -> None:
        """Lets what lies under `next` be that of other rows.

        Args:
            slots: `[*B]` int64, a row for each of these.
            reason: why no further rows can be looked at after that, as the message of the error.

        Raises:
            RuntimeError: as `at`.
            KeyError: something was set under `next` that the rows do not hold.
        """
        if self._obstacle is not None:
            raise RuntimeError(self._obstacle)
        stored = self._stored.followed_by(slots)
        for key, (rule, *_) in self._lights.items():
            if key[0] == "next" and rule is None:
                raise KeyError(
                    f"{key!r} was set for the sampled rows and can't be read from later ones: put the "
                    "transform that sets it behind NStep."
                )
        for key in [key for key in self._entries if key[0] == "next"]:
            del self._entries[key]
        self._stored, self._obstacle = stored, reason
        self._following = RowView(FollowingFields(stored), None, self._lights)

    # The batch

    def tensordict(self) -> TensorDictBase:
        """Returns all entries, as a TensorDict of batch size B in memory of its own."""
        self._work_out()
        return self._stored.tensordict(self._entries)

    def gather(self) -> None:
        """Reads all that a batch of these rows needs, so that later writes no longer change it."""
        self._work_out()
        if self._stored.packed() is None:
            self._become(self.tensordict())

    def _work_out(self) -> None:
        for key in self._lights:
            if key not in self._entries:
                self._entries[key] = self[key]
        # Rules may hold these rows, whose memory would wait for the garbage collector then.
        self._lights, self._following = _AS_STORED, None

    def transform(self, function: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Lets a function of batches change all entries; further rows are out of sight then.

        Args:
            function: takes the batch and returns it, such as a transform of TorchRL's.
        """
        self._become(function(self.tensordict()))
        self._obstacle = (
            f"{type(function).__name__} has changed the sampled rows, but it cannot show further rows in "
            "the same way: put it behind the transforms that read further rows (GoalRelabel, NStep)."
        )

    def _become(self, batch: TensorDictBase) -> None:
        """Takes a batch, in which all entries are, for what is seen of the rows."""
        stored = self._stored
        self._stored = BatchedFields(stored.storage, stored.slots, stored.device)
        self._stored.batch, self._entries = batch, {}


def _stored_for(keys: Collection[NestedKey], lights: _Lights) -> set[NestedKey]:
    """Returns what is read of the rows themselves for entries that are seen in such lights."""
    found: set[NestedKey] = set()
    for key in keys:
        if (light := lights.get(key)) is None:
            found.add(key)
        else:
            found |= _stored_for(light[2], light[1])
    return found


def joined(views: Sequence[RowView], order: torch.Tensor) -> TensorDict | None:
    """Returns rows of several storages as one batch, if they are packed alike.

    Args:
        views: the rows, gathered, `[b]` each.
        order: `[B]` int64, which of the rows, one view after another, stands where.

    Returns:
        TensorDict `[B]`, or None if fields or entries of one are others than those of the first.
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
