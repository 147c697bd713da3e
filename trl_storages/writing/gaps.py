"""Finds rows that do not continue the row before them in their lane.

Letters: L lanes written now, T steps of each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages import arguments
from trl_storages.callers import warn_caller
from trl_storages.kernels.tables import Block
from trl_storages.keys import continued_keys, next_key
from trl_storages.priorities import DeferredFlag
from trl_storages.rows import Layout, PackedStorage, pairs_of

if TYPE_CHECKING:
    from trl_storages.kernels.device import NewRows

__all__ = ["GapWatch", "Gaps", "OnGap"]

OnGap = Literal["cut", "ignore"]

#: `[L, T]` bool, rows that are gaps, and their lanes; None for all lanes.
Gaps = tuple[torch.Tensor, Sequence[int] | None]

_REMEDY = (
    "Look at the loop first: is `obs = next_obs` missing at its end, or is obs overwritten before it is "
    "recorded? If not, call end_episodes() where environments are reset without a `done`, or where "
    "another stream of steps begins; or make the storage (or its writer) with on_gap='ignore' if "
    "observations may differ."
)


class GapWatch:
    """Finds gaps: rows whose observation is not bitwise the next observation of the row before.

    Rows after a `done`, and rows that are known to begin an episode, are not gaps.

    Args:
        on_gap: "cut" begins an episode with the row, and warns once; "ignore" does not look.
        observation_keys: entries that are compared with their twins under `next`; None uses those of
            `continued_keys`.

    Raises:
        ValueError: `on_gap` is unknown.
        TypeError: `on_gap` is not a string, or `observation_keys` is not a sequence of keys.
    """

    def __init__(
        self, on_gap: OnGap = "cut", observation_keys: Sequence[NestedKey] | None = None
    ) -> None:
        self.on_gap: OnGap = arguments.choice("on_gap", on_gap, get_args(OnGap))
        self.observation_keys: list[NestedKey] | None = None
        if observation_keys is not None:
            self.observation_keys = arguments.keys("observation_keys", observation_keys)
        #: Whether the warning was given.
        self.has_warned = False
        #: Gaps in rows on a GPU, reported at a later write; None before the first.
        self.late: DeferredFlag | None = None
        # Cache: the compared fields of the last layout.
        self._pairs: tuple[Layout, np.ndarray] | None = None

    @property
    def is_looking(self) -> bool:
        """Whether gaps still matter."""
        return self.on_gap == "cut"

    def compared(self, keys: Collection[NestedKey]) -> list[NestedKey]:
        """Returns the keys of the entries that are compared.

        Raises:
            KeyError: one of `observation_keys`, or its twin under `next`, is missing.
        """
        chosen = self.observation_keys
        if chosen is None:
            return continued_keys(keys)
        for key in chosen:
            for name in (key, next_key(key)):
                if name not in keys:
                    raise KeyError(
                        f"the data lacks {name!r}, which tells where a lane goes on "
                        f"(observation_keys); its keys are {sorted(keys, key=str)}."
                    )
        return chosen

    def find(
        self,
        storage: PackedStorage,
        rows: NewRows,
        layout: Layout,
        block: Block,
    ) -> torch.Tensor | None:
        """Finds the gaps among rows to write; see `kernels.host.Ring`.

        Args:
            storage: holds the rows before them.
            rows: with at least the fields that are compared.
            layout: of these rows.
            block: maps rows to lanes and steps.

        Returns:
            `[L, T]` bool; may be None if there are none.
        """
        if not len(pairs := self.pairs(layout)):
            return None
        ring = storage.episodes.ring  # type: ignore[union-attr]
        found: torch.Tensor | None = ring.find_gaps(rows, block, pairs, storage.table)
        return found

    def pairs(self, layout: Layout) -> np.ndarray:
        """Returns the pairs of fields that are compared; see `pairs_of`.

        Raises:
            KeyError: as `compared`.
        """
        if self._pairs is None or self._pairs[0] is not layout:
            self._pairs = layout, pairs_of(layout, self.compared(layout.keys))
        return self._pairs[1]

    def warn(self, gaps: Sequence[Gaps]) -> None:
        """Warns once of gaps in rows that are about to be written, if there are any.

        On a GPU the warning is left to a later call of `warn_late`, to avoid synchronization.

        Args:
            gaps: of each block.
        """
        if self.has_warned:
            return
        device = gaps[0][0].device
        if device.type != "cpu":
            self.late = self.late or DeferredFlag(device)
            for gap, _ in gaps:
                self.late.note(gap.any())
            return
        found = []
        for gap, lanes in gaps:
            at = gap.any(1).nonzero().flatten().tolist()
            found += at if lanes is None else [lanes[number] for number in at]
        if found:
            warn_caller(
                "a row does not begin with the observation that the row before it in its lane "
                f"({min(found)}) led to: its episode is cut there. {_REMEDY}"
            )
            self.has_warned = True

    def warn_late(self) -> None:
        """Warns of gaps in rows that were written to a GPU, as far as it has checked them."""
        if not self.has_warned and self.late.pop():  # type: ignore[union-attr]
            self.has_warned = True
            warn_caller(
                "a row that was written did not begin with the observation that the row before it in its "
                f"lane led to: its episode was cut there. {_REMEDY}"
            )
