"""Extracts new priorities from a sampled batch, one per drawn row or sequence.

Letters: B batch, n sequences, S rows of a sequence.
"""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase

from trl_storages import keys
from trl_storages.samplers import REDUCTIONS

__all__ = ["drawn_priorities", "one_each"]


def drawn_priorities(
    data: TensorDictBase,
    priority_key: NestedKey,
    priority: torch.Tensor | None,
    reduction: str,
    sequence_length: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Returns the drawn slots, their new priorities, and the stamps they were drawn with.

    Args:
        data: a sampled batch of any batch size; sequences as `[n * S]` or `[n, S]`, or with batch size
            `[n]` and entries `[n, S, ...]`.
        priority_key: entry of the priorities.
        priority: the priorities if they are not an entry of `data`. One per row (`[B]`, `[n, S]`) or one
            per sequence (`[n]`); trailing dimensions are allowed.
        reduction: how several values of one row become one: "max", "min", "mean" or "median".
        sequence_length: S, rows per sequence; the anchor gets the largest priority of its sequence's
            valid learning steps.

    Returns:
        `[B]` slots, priorities, and stamps or None. Just None if there are neither priorities nor stamps.

    Raises:
        KeyError: the batch was drawn by priority but holds none, or lacks the entries that identify its
            rows.
        ValueError: the priorities have the shape that broadcasting `[B]` with `[B, 1]` makes, or do not
            match the number of rows; or the batch does not consist of whole, consecutive sequences.
    """
    stamp = data.get(keys.PRIORITY_STAMP, None)
    name = repr(priority_key) if priority is None else "priority"
    if priority is None and (priority := data.get(priority_key, None)) is None:
        if stamp is None:
            return None  # A new row passed by `add`: the writer has already set its priority.
        raise KeyError(
            f"the batch lacks {priority_key!r}: the loss writes it, or set it to the absolute "
            "temporal-difference errors."
        )
    anchor = data.get(keys.ANCHOR_INDEX, None)
    named = (keys.INDEX,) if anchor is None else (keys.VALIDITY_MASK, keys.LEARNING_MASK)
    saying = [data.get(key, None) for key in named]
    for key, entry in zip(named, saying, strict=True):
        if entry is None:
            raise KeyError(
                f"the batch lacks its entry {key!r}, which says what was drawn; its keys are "
                f"{sorted(map(str, data.keys()))}: pass it with all that sample() put into it."
            )
    # The batch size may be [n], with the rows of each sequence as a dimension of the entries.
    rows = data.batch_size if anchor is None else anchor.shape
    num_steps = 1 if anchor is None else sequence_length
    if rows and rows[-1] % num_steps:
        raise ValueError(
            f"a batch of sequences must hold them whole, as [n * {num_steps}] or [n, {num_steps}], got "
            f"{list(rows)}: give it back as sampled, or batch.reshape(-1, sample_unit.num_steps)."
        )
    num_sequences, given = rows.numel() // num_steps, priority.shape
    isone_each = anchor is not None and given in ((num_sequences,), (num_sequences, 1))
    if not isone_each and given != rows:
        for shape in {rows, torch.Size([rows.numel()])}:
            _check_not_broadcast(priority, shape, name)
    priority = priority.detach().flatten()
    if anchor is None:
        [slots] = saying
    else:
        slots = anchor.reshape(-1, num_steps)[:, 0]
        stamp = None if stamp is None else stamp.reshape(-1, num_steps)[:, 0]
    if isone_each:
        return slots, priority, stamp
    fitting = (rows, (rows.numel(),), (num_sequences, num_steps))
    if all(given[: len(shape)] != shape for shape in fitting):
        of_sequences = ""
        if anchor is not None:
            of_sequences = (
                f"one value a sequence, shape {[num_sequences]}, by sequence_priority, or "
            )
        raise ValueError(
            f"{name} must have {of_sequences}one value a row, shape {list(rows)}, got {list(given)}. "
            "Nothing was updated."
        )
    priority = one_each(priority, rows.numel(), reduction)
    if anchor is None:
        return slots, priority, stamp
    valid, learning = saying
    learnt = (valid & learning).reshape(-1)
    return slots, torch.where(learnt, priority, 0).reshape(-1, num_steps).amax(1), stamp


def one_each(priority: torch.Tensor, num_rows: int, reduction: str) -> torch.Tensor:
    """Reduces the values of each row to one, `[B]`."""
    if priority.numel() == num_rows:
        return priority
    return REDUCTIONS[reduction](priority.reshape(num_rows, -1), 1)


def _check_not_broadcast(priority: torch.Tensor, batch: torch.Size, name: str) -> None:
    """Raises if the priorities are `[B, B]` by accidental broadcasting."""
    shape = priority.shape[:-1] if priority.shape[-1:] == (1,) else priority.shape
    if len(shape) <= len(batch):
        return
    try:
        slip = torch.broadcast_shapes(batch, (*batch, 1))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return
    if shape == slip and slip.numel() > batch.numel():
        size = list(batch)
        raise ValueError(
            f"{name} must have one value a row, shape {size} or {[*size, 1]}, got "
            f"{list(priority.shape)}, which comes of arithmetic between {size} and {[*size, 1]}: compare "
            'with batch["next", "reward"].shape. Nothing was updated.'
        )
