"""Priorities that come with written steps, and that go back with sampled batches.

Letters: N rows of a batch, n sequences, S rows of a sequence.
"""

from __future__ import annotations

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import keys
from trl_storages.samplers import REDUCTIONS, PERSampler, checked_priorities, layers_of

__all__ = ["drawn_priorities", "prioritized", "written_priorities"]


def prioritized(sampler: Sampler) -> PERSampler | None:
    """Returns the layer of a sampler that draws by priority, if one does."""
    layer = layers_of(sampler)[-1]
    return layer if isinstance(layer, PERSampler) else None


def written_priorities(
    data: TensorDictBase, priority_key: NestedKey, sampler: PERSampler | None
) -> np.ndarray | None:
    """Returns the priorities that written steps come with, `[N]`; None if there are none, or no use.

    Raises:
        ValueError: one is negative or not finite.
    """
    priority = None if sampler is None else data.get(priority_key, None)
    if sampler is None or priority is None:
        return None
    size = data.numel()
    return checked_priorities(_one_each(priority, size, sampler.reduction), size)


def drawn_priorities(
    data: TensorDictBase,
    priority_key: NestedKey,
    priority: torch.Tensor | None,
    reduction: str,
    num_steps: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the drawn slots, their new priorities, and the steps that they were drawn as.

    Args:
        data: a sampled batch of any batch size; sequences as `[n * S]` or `[n, S]`, or with batch size
            `[n]` and entries `[n, S, ...]`.
        priority_key: entry of the priorities.
        priority: the priorities if they are not an entry of `data`. One per row (`[N]`, `[n, S]`) or one
            per sequence (`[n]`); trailing dimensions are allowed.
        reduction: how several values of one row become one: "max", "min", "mean" or "median".
        num_steps: S; the anchor gets the largest priority of its sequence's valid learning steps.

    Raises:
        KeyError: the batch lacks the priorities, or the entries that say which rows were drawn.
        ValueError: the priorities do not fit the rows, as `[N, N]` does not that comes of `[N]` and
            `[N, 1]`; or the batch does not consist of whole sequences.
    """
    anchors = data.get(keys.ANCHOR_INDEX, None)
    slots = data[keys.INDEX] if anchors is None else anchors
    priority = data[priority_key] if priority is None else priority
    # The batch size may be [n], with the rows of each sequence as a dimension of the entries.
    rows, given, priority = slots.shape, priority.shape, priority.detach()
    num_rows, S = rows.numel(), 1 if anchors is None else num_steps
    shape = num_rows // S, S
    is_of_sequences = anchors is not None and given in ((shape[0],), (shape[0], 1))
    is_of_rows = any(given[: len(size)] == size for size in (rows, (num_rows,), shape))
    is_spread = num_rows > 1 and given.numel() == num_rows**2
    if num_rows % S or not (is_of_sequences or (is_of_rows and not is_spread)):
        raise ValueError(
            f"there must be one priority a row, {[*rows]}, or one for all {S} rows of a sequence, got "
            f"{[*given]}, as arithmetic of {[*rows]} with {[*rows, 1]} makes. Nothing was updated."
        )
    steps = data.get(keys.PRIORITY_STAMP, None)
    if anchors is None:
        return slots, _one_each(priority, num_rows, reduction), steps
    steps = None if steps is None else steps.reshape(shape)[:, 0]
    if is_of_sequences:
        values = priority.reshape(-1, 1)
    else:
        values = _one_each(priority, num_rows, reduction).reshape(shape)
        learnt = data[keys.VALIDITY_MASK] & data[keys.LEARNING_MASK]
        values = torch.where(learnt.reshape(shape), values, 0)
    return slots.reshape(shape)[:, 0], values.amax(1), steps


def _one_each(priority: torch.Tensor, num_rows: int, reduction: str) -> torch.Tensor:
    """Reduces the values of each row to one, `[N]`."""
    if priority.numel() == num_rows:
        return priority.flatten()
    return REDUCTIONS[reduction](priority.reshape(num_rows, -1), 1)
