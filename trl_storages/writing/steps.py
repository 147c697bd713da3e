"""Turns a TensorDict into rows to write.

Letters: n rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key

from trl_storages.callers import warn_caller
from trl_storages.kernels.memory import on_device
from trl_storages.keys import (
    INDEX,
    MASK,
    key_path,
    next_key,
    shared_keys,
)
from trl_storages.rows import (
    Layout,
    Nested,
    PackedStorage,
    Structure,
    nested_sizes,
    tensors_of,
)
from trl_storages.writing.checks import check_flags, end_flags, refuse_padding

if TYPE_CHECKING:
    from trl_storages.kernels.device import NewRows

__all__ = ["Fields", "Steps"]


#: Names of what collectors and transforms of TorchRL add under `next`.
_BY_PRODUCTS = frozenset(
    {"done", "terminated", "truncated", "is_init", "step_count", "episode_reward"}
)


class Steps(NamedTuple):
    """n rows that may be written."""

    rows: NewRows
    layout: Layout
    trajectory: torch.Tensor | None = None
    """`[n]` int64 on the device of the index."""


class _Known(NamedTuple):
    """What holds for all steps of the same structure, found once."""

    layout: Layout
    structure: Structure | None
    """Of the fields in layout order, `done`, and the trajectories if there are any."""


class Fields:
    """Which entries of a TensorDict are stored, and which ones tell episodes apart.

    Args:
        keys: entries to store; None stores all.
        done_key: of the flag that ends an episode.
        traj_key: of the numbers of trajectories.
        warns: whether to warn of entries that are left out.
    """

    def __init__(
        self,
        keys: list[NestedKey] | None,
        done_key: NestedKey,
        traj_key: NestedKey,
        warns: bool,
    ) -> None:
        #: The arguments.
        self.wanted = keys, done_key, traj_key, warns
        self.keys, self.done_key, self.traj_key, self._warns = self.wanted
        # From the last steps, as the next ones usually have the same structure.
        self._known: _Known | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A cache, rebuilt in the copy.
        return self.__dict__ | {"_known": None}

    def steps(self, data: TensorDictBase, storage: PackedStorage) -> Steps:
        """Returns `data` of any batch size as rows to write; changes nothing.

        Args:
            data: steps.
            storage: that they are written to.

        Raises:
            KeyError, TypeError, ValueError: it does not fit the storage, or does not consist of steps.
        """
        known, tensors = self._alike(data, storage) or self._fitted(data, storage)
        layout, end = known.layout, len(known.layout.keys)
        is_plain = known.structure is not None and known.structure.is_plain
        rows = storage.new_rows(
            layout, tensors[:end], data.batch_size, done=tensors[end], is_plain=is_plain
        )
        check_flags(layout, rows.seen or rows)
        return Steps(rows, layout, _numbers(tensors[end + 1 :], storage))

    def _alike(
        self, data: TensorDictBase, storage: PackedStorage
    ) -> tuple[_Known, Sequence[torch.Tensor]] | None:
        """Returns the tensors of steps if they have the structure of the last ones, else None."""
        known = self._known
        if known is None or known.structure is None or known.layout is not storage.layout:
            return None
        tensors = known.structure.tensors(data)
        return None if tensors is None else (known, tensors)

    def _fitted(
        self, data: TensorDictBase, storage: PackedStorage
    ) -> tuple[_Known, Sequence[torch.Tensor]]:
        """Checks steps of a new structure, and returns their tensors."""
        entries = self.entries(data)
        refuse_padding(entries)
        done = end_flags(entries, self.done_key, data.numel())
        _refuse_compact(entries, storage.layout)
        layout, fields = self._fit(data, entries, storage)
        tensors = [*fields, done]
        if (trajectory := entries.get(self.traj_key)) is not None:
            tensors.append(trajectory)
        if self._warns:
            self._warn_of_dropped(data)
        # The structure does not tell whether a mask marks padding.
        structure = None if MASK in entries else Structure.of(data, tensors)
        self._known = _Known(layout, structure)
        return self._known, tensors

    def _warn_of_dropped(self, data: TensorDictBase) -> None:
        """Warns once of entries of the environment, and recurrent states, that are left out.

        They go on under `next`; what a policy computes on its way to an action does not.
        """
        known = {*self.keys, *map(next_key, self.keys)}  # type: ignore[misc, arg-type]
        paths = [key_path(key) for key in data.keys(True, True) if key not in known]
        lost = [
            unravel_key(path[1:])
            for path in paths
            if path[0] == "next" and not _BY_PRODUCTS.intersection(path)
        ]
        if lost:
            self._warns = False
            lost.sort(key=str)
            warn_caller(
                f"the storage has no fields for {lost}, which are left out: name those that are needed "
                "in extra_fields=. States of a recurrent policy have fields if its primer "
                "(make_tensordict_primer()) is part of the environment that the storage is made of."
            )

    def entries(self, data: TensorDictBase) -> dict[NestedKey, torch.Tensor]:
        """Returns the tensors of `data`, at least those that are stored or checked."""
        if self.keys is None:
            entries = tensors_of(data)
            # Replay buffers set it on data that they have written.
            entries.pop(INDEX, None)
            return entries
        if not isinstance(data, TensorDict):
            # Stacking unwanted entries of a lazy stack is slow, or impossible.
            wanted = [*self.keys, self.done_key, self.traj_key, MASK]
            data = data.select(*wanted, strict=False)
        return tensors_of(data, strict=False)

    def _fit(
        self,
        data: TensorDictBase,
        entries: Mapping[NestedKey, torch.Tensor],
        storage: PackedStorage,
    ) -> tuple[Layout, list[torch.Tensor]]:
        nested: Nested = ()
        if storage.layout is None:
            if self.keys is not None:
                data = data.select(*self.keys)
                entries = tensors_of(data)
            nested = nested_sizes(data, data.ndim)
        return storage.fit(entries, data.batch_size, strict=self.keys is None, nested=nested)


def _numbers(trajectory: Sequence[torch.Tensor], storage: PackedStorage) -> torch.Tensor | None:
    """Returns trajectory numbers as `[n]` int64 on the device of the index, if there are any."""
    for numbers in trajectory:
        return on_device(numbers, storage.episodes.device).reshape(-1).long()  # type: ignore[union-attr]
    return None


def _refuse_compact(entries: Mapping[NestedKey, torch.Tensor], layout: Layout | None) -> None:
    """Raises a ValueError if all next observations are missing, and they alone."""
    keys = () if layout is None else shared_keys(layout.keys)
    missing = [next_key(key) for key in keys if key in entries and next_key(key) not in entries]
    if missing and len(missing) == len(keys):
        raise ValueError(
            f"the data must hold {missing}, which collectors with compact_obs=True leave out: make the "
            "collector without it."
        )
