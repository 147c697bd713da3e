"""Picks rows out of a long table, which is what most of a sample's time goes to.

Letters: N rows, W words of 8 bytes a row, B batch.
"""

import numpy as np
import torch

__all__ = ["take_rows", "zero_rows"]


def zero_rows(num_rows: int, num_words: int, device: torch.device) -> torch.Tensor:
    """Returns `[N, W]` int64 zeros, in memory whose random access is cheap."""
    if device.type != "cpu":
        return torch.zeros(num_rows, num_words, dtype=torch.int64, device=device)
    # NumPy asks the kernel for huge pages, torch does not: a seventh of a gather's time is the
    # look-up of small ones.
    return torch.from_numpy(np.zeros((num_rows, num_words), np.int64))


def take_rows(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gathers rows in new memory.

    Args:
        rows: `[N, W]`, whole rows or some neighbouring words of them.
        slots: `[B]` int64 on the same device.

    Returns:
        `[B, W]`.
    """
    # Of no rows NumPy makes a tensor whose words cannot be seen as other dtypes.
    if rows.device.type == "cpu" and rows.is_contiguous() and len(slots):
        return torch.from_numpy(rows.numpy().take(slots.numpy(), 0))
    return rows.index_select(0, slots)
