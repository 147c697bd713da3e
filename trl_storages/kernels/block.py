"""Which of the rows that are written now go to which lanes.

Letters: n rows, L lanes and S steps written now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Block"]


class Block(NamedTuple):
    """`[L, S]` of n rows that are the next steps of L lanes."""

    num_steps: int
    """S."""
    lanes: Sequence[int] | None = None
    """The L lanes, distinct; None for all of them."""
    order: torch.Tensor | None = None
    """`[L, S]` int64, which of the rows these are; None for all of them, the steps of a lane together."""
    cut: torch.Tensor | None = None
    """`[L, S]` bool, which begin an episode whatever came before; None for none."""

    @property
    def which(self) -> Any:
        """Which entries of a table of all lanes are theirs."""
        return slice(None) if self.lanes is None else [*self.lanes]

    def arranged(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns those of n numbers that belong to these steps, `[L, S]`."""
        return flat.view(-1, self.num_steps) if self.order is None else flat[self.order]

    def cut_at(self, begins: torch.Tensor) -> Block:
        """Returns the same steps, of which those at `[L, S]` begin an episode too."""
        return self._replace(cut=begins if self.cut is None else self.cut | begins)
