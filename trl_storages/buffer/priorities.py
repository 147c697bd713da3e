"""Reads the priorities of a batch: one per transition, or one per anchor of a sequence.

Letters: N transitions; n sequences, S steps of a sequence.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import torch
from tensordict import NestedKey, TensorDictBase

from trl_storages import keys, validation
from trl_storages.samplers import REDUCTIONS

__all__ = ["reduce_priorities", "sampled_priorities"]


def sampled_priorities(
    data: TensorDictBase, priority_key: NestedKey, priority: torch.Tensor | None, reduction: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the slots of a sampled batch (-1 for padding), their new priorities, and their steps.

    The anchor of a sequence gets the largest priority of its valid learning steps in `data`.

    Args:
        data: a sampled batch of any batch size, or a part of it; sequences also with batch size `[n]`
            and fields `[n, S, ...]`.
        priority_key: key of the priorities.
        priority: the priorities, if they are not a field of `data`: one per transition (`[N]`,
            `[n, S]`) or one per sequence (`[n]`); trailing dimensions are allowed.
        reduction: how several values of one transition become one: "max", "min", "mean" or "median".

    Raises:
        KeyError: the batch has no priorities, or no `index`.
        ValueError: the shape of the priorities does not fit, such as `[N, N]`, the result of combining
            `[N]` and `[N, 1]`.
    """
    anchors = data.get(keys.ANCHOR_INDEX, None)
    slots = data[keys.INDEX] if anchors is None else anchors
    generation = keys.INDEX_GENERATION if anchors is None else keys.ANCHOR_GENERATION
    steps = data.get(generation, None)
    priority = data[priority_key] if priority is None else validation.values("priority", priority)
    priority, shape, n = priority.detach(), slots.shape, priority.shape[:1].numel()
    num_rows = shape.numel()
    if anchors is not None and priority.shape in ((n,), (n, 1)) and n and num_rows % n == 0:
        sequences = anchors.reshape(n, -1)
        if (sequences == sequences[:, :1]).all():
            priority = priority.reshape(n, 1).expand_as(sequences)
    sizes = priority.shape
    is_per_transition = sizes[: len(shape)] == shape or num_rows in accumulate(sizes, mul)
    if not is_per_transition or (num_rows > 1 and sizes[-2:] == (num_rows, num_rows)):
        raise ValueError(
            f"expected one priority per transition, shape {[*shape]}, or one per sequence; got "
            f"{[*sizes]}. Did you combine shapes {[*shape]} and {[*shape, 1]}? No priority was updated."
        )
    values = reduce_priorities(priority, num_rows, reduction)
    if anchors is None:
        if (mask := data.get(keys.MASK, None)) is not None:  # padding of `sample_episodes`
            slots, values = slots.where(mask, -1), values.where(mask.reshape(-1), 0)
        return slots, values, steps
    is_learnt = (data[keys.VALIDITY_MASK] & data[keys.LEARNING_MASK]).reshape(-1)
    # An anchor may have several sequences; the last one counts.
    numbers = torch.stack([data[keys.SEQUENCE_ID], anchors], -1).reshape(-1, 2)
    sequences, at = torch.unique(numbers, dim=0, return_inverse=True)
    values, largest = torch.where(is_learnt, values, 0), values.new_empty(len(sequences))
    largest.scatter_reduce_(0, at, values, "amax", include_self=False)
    if steps is not None:
        steps = steps.new_empty(len(sequences)).scatter_(0, at, steps.reshape(-1))
    return sequences[:, 1], largest, steps


def reduce_priorities(priority: torch.Tensor, num_rows: int, reduction: str) -> torch.Tensor:
    """Reduces the values of each transition to one, `[N]`."""
    if priority.numel() == num_rows:
        return priority.flatten()
    return REDUCTIONS[reduction](priority.reshape(num_rows, -1), 1)
