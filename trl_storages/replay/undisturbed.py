"""Draws beside a process that writes: rows that it overwrote meanwhile are drawn again.

Letters: B batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from trl_storages.packed.storage import PackedStorage

__all__ = ["undisturbed"]

Entries = dict[Any, torch.Tensor]
# A batch, what samplers say of its rows, and all slots that were read.
Drawn = tuple[TensorDictBase, Entries, list[torch.Tensor]]


def undisturbed(
    storage: PackedStorage, draw: Callable[[], Drawn], num_steps: int = 1
) -> tuple[TensorDictBase, Entries]:
    """Draws a batch, all rows of which were live until they were read, with all rows that they needed.

    Those that were not come from further batches. So a reader gets on, however fast the writer is.

    Args:
        storage: holds the rows.
        draw: returns B rows, what samplers say of them, and which slots were read, `[*, B]` each.
        num_steps: how many rows belong together, one behind another.
    """
    seen = storage.look()
    batch, info, slots = draw()
    gone = _gone(storage, seen, slots, num_steps)
    while gone is not None and gone.any():
        seen = storage.look()
        other, more, slots = draw()
        again = _gone(storage, seen, slots, num_steps)
        taken = gone if again is None else gone & ~again
        if len(gone) != batch.numel():  # a transform has made something else of the rows
            taken = torch.zeros_like(gone)
            if again is None or not again.any():
                return other, more
        batch = torch.where(taken.view(batch.batch_size).to(other.device), other, batch)
        info = {key: _merged(taken, more[key], value) for key, value in info.items()}
        gone &= ~taken
    return batch, info


def _gone(
    storage: PackedStorage, seen: np.ndarray | None, slots: list[torch.Tensor], num_steps: int
) -> torch.Tensor | None:
    """Returns of which rows `[B]` something gave way; None if nothing could."""
    if seen is None:
        return None
    found = torch.zeros_like(slots[0], dtype=torch.bool)
    for read in slots:
        gone = storage.gave_way(seen, read)
        # What was read of other rows may have been for any.
        is_of_rows = gone.shape[-1:] == found.shape
        found |= gone.reshape(-1, len(found)).any(0) if is_of_rows else gone.any()
    return found.view(-1, num_steps).any(1).repeat_interleave(num_steps)


def _merged(mask: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.view(-1, *(1 for _ in one.shape[1:])).to(one.device), one, other)
