"""Which rows of a write go to which lanes.

Letters: n rows, L lanes and S steps written now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Block"]


class Block(NamedTuple):
    """n rows that are the next S steps of L lanes, `[L, S]`."""

    num_steps: int
    """S."""
    lanes: Sequence[int] | None = None
    """The L lanes, distinct; None for all of them."""
    order: torch.Tensor | None = None
    """`[L, S]` int64, the row of each step; None for all n in order, lane by lane."""
    cut: torch.Tensor | None = None
    """`[L, S]` bool, rows that begin an episode whatever came before; None for none."""

    @property
    def which(self) -> Any:
        """The index of the written lanes in a table of all lanes."""
        return slice(None) if self.lanes is None else [*self.lanes]

    def arranged(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the n elements of `flat` in the order of the steps, `[L, S]`."""
        return flat.view(-1, self.num_steps) if self.order is None else flat[self.order]

    def cut_at(self, begins: torch.Tensor) -> Block:
        """Returns the same block, with further rows that begin an episode: `[L, S]` bool."""
        return self._replace(cut=begins if self.cut is None else self.cut | begins)
