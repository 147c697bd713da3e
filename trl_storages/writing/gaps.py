"""Notices rows that do not begin where the row before them in their lane led to.

Letters: L lanes written now, T steps of each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages import arguments
from trl_storages.episodes import EpisodeIndex, Lanes
from trl_storages.keys import continued_keys, next_key
from trl_storages.priorities.late_error import LateError
from trl_storages.storages import as_array

__all__ = ["GapWatch", "OnGap"]

Array = Any  # NumPy's or torch's
OnGap = Literal["warn", "cut", "ignore"]

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REMEDY = (
    "Call end_episodes() where environments are reset without a `done`, or where another stream of "
    "steps begins; or make the writer (or the ready-made storage) with on_gap='cut' to begin an "
    "episode at each gap, or with on_gap='ignore' if observations may differ."
)


class GapWatch:
    """Finds gaps: rows whose observation is not, bit for bit, the next one of the row before.

    Rows after a `done`, and rows that are known to begin an episode, are no gaps.

    Args:
        on_gap: "warn" (once) before the row is written, "cut" begins an episode with it, "ignore"
            does not look.
        observation_keys: entries that are compared with what lies under `next`; None are those of
            `continued_keys`.

    Raises:
        ValueError: `on_gap` is something else.
        TypeError: `on_gap` is no name, or `observation_keys` is not a sequence of keys.
    """

    def __init__(
        self, on_gap: OnGap = "warn", observation_keys: Sequence[NestedKey] | None = None
    ) -> None:
        self.on_gap: OnGap = arguments.choice("on_gap", on_gap, get_args(OnGap))
        self.observation_keys: list[NestedKey] | None = None
        if observation_keys is not None:
            self.observation_keys = arguments.keys("observation_keys", observation_keys)
        #: Whether the warning was given.
        self.has_warned = False
        # Gaps in rows on a GPU, heard of at a later write.
        self._late: LateError | None = None
        # The keys of the rows before, and those of them that are compared.
        self._known: tuple[tuple[NestedKey, ...], list[NestedKey]] = ((), [])

    @property
    def is_looking(self) -> bool:
        """Whether gaps still matter."""
        return self.on_gap == "cut" or (self.on_gap == "warn" and not self.has_warned)

    def compared(self, keys: Collection[NestedKey]) -> list[NestedKey]:
        """Returns which of the entries of a row are compared.

        Raises:
            KeyError: one of `observation_keys`, or what lies under `next` of it, is missing.
        """
        seen = tuple(keys)
        if self._known[0] != seen:
            chosen = self.observation_keys
            if chosen is None:
                chosen = continued_keys(keys)
            for key in chosen:
                for name in (key, next_key(key)):
                    if name not in keys:
                        raise KeyError(
                            f"the data lacks {name!r}, which tells where a lane goes on "
                            f"(observation_keys); its keys are {sorted(map(str, keys))}."
                        )
            self._known = seen, chosen
        return self._known[1]

    def find(
        self,
        storage: Any,
        entries: Mapping[NestedKey, torch.Tensor],
        done: torch.Tensor,
        cut: torch.Tensor | None,
        lanes: Lanes,
        is_open: torch.Tensor,
    ) -> torch.Tensor | None:
        """Finds the gaps among rows that are to be written.

        Args:
            storage: where the rows before them are.
            entries: key -> tensor `[L, T, ...]`, `[T, ...]` or `[L, ...]` of what is to be stored.
            done: `[L, T]` bool.
            cut: `[L, T]` bool, rows that begin an episode anyway; or None.
            lanes: the L lanes; None is all of them.
            is_open: `[L]` bool, on the device of the index: the lane's last episode may go on.

        Returns:
            `[L, T]` bool on the device of the index; None if there is none, as far as the host may ask.
        """
        episodes: EpisodeIndex = storage.episodes
        on_host, shape = episodes.device.type == "cpu", done.shape
        # NumPy compares a few rows in a fifth of torch's time.
        see = as_array if on_host else torch.Tensor.detach
        first: Array | None = None
        later: Array | None = None
        for key in self.compared(entries):
            now, after = entries[key], entries[next_key(key)]
            if now.dtype is not after.dtype or now.shape != after.shape:
                # Not of one kind: whether they can be stored is for the storage to say.
                continue
            seen = _bits(see(now), shape)
            if shape[1] > 1:
                differs = (seen[:, 1:] != _bits(see(after), shape)[:, :-1]).any(2)
                later = differs if later is None else later | differs
            column = storage._storage.get(next_key(key)) if storage.initialized else None
            if column is not None and column.dtype is now.dtype:
                before = _bits(see(column)[see(episodes.newest_slots(lanes))], shape[:1])
                begins = seen[:, 0] if on_host else seen[:, 0].to(episodes.device)
                if begins.shape != before.shape:
                    continue
                differs = (begins != before).any(1)
                first = differs if first is None else first | differs
        if on_host and not any(found is not None and found.any() for found in (first, later)):
            return None
        gap = torch.zeros(shape, dtype=torch.bool, device=episodes.device)
        if first is not None:
            gap[:, 0] = torch.as_tensor(first) & is_open
        if later is not None:
            gap[:, 1:] = torch.as_tensor(later, device=gap.device) & ~done[:, :-1].to(gap.device)
        if cut is not None:
            gap &= ~cut
        return None if on_host and not gap.any() else gap

    def warn(self, gaps: Sequence[torch.Tensor], *, stacklevel: int = 6) -> bool:
        """Warns of gaps in rows that are about to be written, if there are any.

        On a GPU this is late: nothing waits for the device, and a later call of `warn_late` warns.

        Args:
            gaps: what `find` returned.
            stacklevel: how far up the loop is that writes.

        Returns:
            whether it did; `has_warned` is for the writer to set, once the rows are written.
        """
        if not gaps or self.on_gap != "warn":
            return False
        device = gaps[0].device
        if device.type == "cpu":
            warnings.warn(
                "a row does not begin with the observation that the row before it in its lane led to, "
                f"and is taken for its continuation all the same. {_REMEDY}",
                stacklevel=stacklevel,
            )
            return True
        if self._late is None:
            self._late = LateError(device)
        for gap in gaps:
            self._late.note(gap.any())
        return False

    def warn_late(self) -> None:
        """Warns of gaps in rows that were written to a GPU, as far as the device has come."""
        if self._late is not None and self.is_looking and self._late.pop():
            self.has_warned = True
            warnings.warn(
                "a row that was written did not begin with the observation that the row before it in its "
                f"lane led to, and was taken for its continuation all the same. {_REMEDY}",
                stacklevel=4,
            )


def _bits(array: Array, shape: Sequence[int]) -> Array:
    """Sees `[*shape, ...]` elements as integers `[*shape, n]`, so that NaN equals itself."""
    num_rows = math.prod(shape)
    if isinstance(array, np.ndarray):
        if array.itemsize > 8:
            array = np.ascontiguousarray(array).view(np.uint64)
        array = array.view(_UNSIGNED[array.itemsize])
        return array.reshape(*shape, array.size // num_rows)
    if array.is_complex():
        array = torch.view_as_real(array.resolve_conj())
    return array.view(_INTEGERS[array.dtype.itemsize]).reshape(*shape, array.numel() // num_rows)
