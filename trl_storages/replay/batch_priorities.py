"""Reads the new priorities of a sampled batch, one for each row or sequence that was drawn.

Letters: B batch.
"""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase

from trl_storages import keys
from trl_storages.samplers import REDUCTIONS

__all__ = ["drawn_priorities"]


def drawn_priorities(
    data: TensorDictBase, priority_key: NestedKey, *, reduction: str, sequence_length: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Returns the slots that were drawn, their priorities, and the stamps they were drawn with.

    Args:
        data: a sampled batch.
        priority_key: entry of the priorities, `[B]` or `[B, ...]`.
        reduction: how several values of one row become one: "max", "min", "mean" or "median".
        sequence_length: rows of each sequence; its anchor gets the largest valid one of the steps that
            are learnt from.

    Returns:
        `[B]` slots, priorities, and stamps or None. None at all for rows that were never drawn.

    Raises:
        KeyError: the batch was drawn by priority, and holds none.
    """
    priority = data.get(priority_key, None)
    stamp = data.get(keys.PRIORITY_STAMP, None)
    if priority is None:
        if stamp is None:
            return None  # A new row, as `add` passes it: the writer has given it its priority.
        raise KeyError(
            f"the batch lacks {priority_key!r}: the loss writes it, or set it to the absolute "
            "temporal-difference errors."
        )
    priority = priority.detach().reshape(-1)
    if priority.numel() != data.numel():
        priority = REDUCTIONS[reduction](priority.reshape(data.numel(), -1), 1)
    if data.get(keys.ANCHOR_INDEX, None) is None:
        return data.get(keys.INDEX), priority, stamp
    learnt = data.get(keys.VALIDITY_MASK) & data.get(keys.LEARNING_MASK)
    priority = torch.where(learnt, priority, 0).reshape(-1, sequence_length).amax(1)
    anchor = data.get(keys.ANCHOR_INDEX).reshape(-1, sequence_length)[:, 0]
    return anchor, priority, None if stamp is None else stamp.reshape(-1, sequence_length)[:, 0]
