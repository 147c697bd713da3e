"""Where episodes go on after a directory was opened again.

Letters: T steps, E lanes (environments), L lanes written now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trl_storages.keys import continued_keys
from trl_storages.rows import PackedStorage, pairs_of

if TYPE_CHECKING:
    from trl_storages.kernels import NewRows

__all__ = ["Reopened"]


class Reopened:
    """Knows of which lanes it is not known yet whether their episode goes on.

    An episode that was going on when the directory was closed, or its writer killed, goes on if the
    next row of its lane shows what its last row led to. Otherwise the environment was reset in
    between, and the next row begins another episode.

    Args:
        storage: whose rows were there when it was opened.
    """

    def __init__(self, storage: PackedStorage) -> None:
        self._storage = storage
        self._unsure = storage.episodes.is_open  # type: ignore[union-attr]
        #: Whether there is such a lane.
        self.is_unsure = bool(self._unsure.any())

    def cut_where_reset(
        self,
        rows: NewRows,
        num_steps: int,
        lanes: Sequence[int] | None,
        order: torch.Tensor | None,
        cut: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns `cut`, with a cut where an episode does not go on.

        Args:
            rows: that are to be written.
            num_steps: of each lane.
            lanes: the lanes that are written; None is all of them.
            order: `[L, T]`, which of the rows; or None.
            cut: `[L, T]` bool, where rows are cut off from the row before them; or None.
        """
        storage, which = self._storage, slice(None) if lanes is None else [*lanes]
        episodes, layout = storage.episodes, storage.layout.framed  # type: ignore[union-attr]
        pairs = pairs_of(layout, continued_keys(layout.keys))
        find = episodes.ring.find_gaps  # type: ignore[union-attr]
        gap = find(rows, num_steps, pairs, cut, lanes, order, storage.table)
        unsure = self._unsure[which]
        shape = len(unsure), num_steps
        cut = torch.zeros(shape, dtype=torch.bool) if cut is None else cut.clone()
        begins = torch.zeros_like(unsure) if gap is None else gap[:, 0]
        # Where nothing tells, an episode does not go on.
        cut[:, 0] |= unsure & (begins | (not len(pairs)))
        return cut

    def may_begin(self, num_steps: int, lanes: Sequence[int] | None) -> torch.Tensor:
        """Returns where an episode may begin of so many steps of lanes, `[L, T]` bool."""
        unsure = self._unsure[slice(None) if lanes is None else [*lanes]]
        return unsure.bool().unsqueeze(1) & (torch.arange(num_steps) == 0)

    def settle(self, lanes: Sequence[int] | None) -> None:
        """Notes that lanes were written, or all of them."""
        self._unsure[slice(None) if lanes is None else [*lanes]] = False
        self.is_unsure = bool(self._unsure.any())
