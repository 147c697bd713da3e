"""Finds where stacks of frames can't be reassembled from their newest frames.

Letters: L lanes written now, T steps of each.
"""

from __future__ import annotations

import torch

from trl_storages.kernels.stack_fields import NOT_CONTINUED, NOT_PADDED
from trl_storages.kernels.tables import Block
from trl_storages.rows import Layout, PackedStorage, Stacks
from trl_storages.writing.steps import Steps

__all__ = ["gaps_of_stacks"]

_KINDS = 4


def gaps_of_stacks(
    storage: PackedStorage, steps: Steps, block: Block, *, cuts: bool
) -> torch.Tensor | None:
    """Finds stacks that do not continue the one before them in their lane, `[L, T]` bool.

    Args:
        storage: that they are written to.
        steps: rows.
        block: those of some lanes.
        cuts: whether such a stack begins an episode.

    Returns:
        the gaps; None if there are none.

    Raises:
        ValueError: a stack does not continue the one before and nothing is cut, or an episode begins with
            earlier frames that are not the padding.
    """
    layout, stacks = steps.layout, storage.stacks
    rows = steps.rows.seen
    if stacks is None:
        # Nothing is written yet, so there is nothing to continue.
        words = torch.zeros(1, layout.framed.num_words, dtype=torch.int64)
        stacks = Stacks(layout, storage.episodes, words.to(storage.device))  # type: ignore[arg-type]
    breaks = stacks.find_breaks(rows, block)  # type: ignore[arg-type]
    if breaks is None or not bool(breaks.any()):
        return None
    gap = breaks % _KINDS == NOT_CONTINUED
    if not (cuts and bool(gap.any())):
        raise _error(layout, block, breaks)
    gaps_of_stacks(storage, steps, block.cut_at(gap), cuts=False)
    return gap


def _error(layout: Layout, block: Block, breaks: torch.Tensor) -> ValueError:
    at, step = breaks.nonzero()[0].tolist()
    lane = at if block.lanes is None else block.lanes[at]
    place, kind = divmod(int(breaks[at, step]), _KINDS)
    field = layout.fields[place]
    padding = field.stack.padding  # type: ignore[union-attr]
    where = f"{field.key!r} of step {step} written to lane {lane}"
    if kind == NOT_CONTINUED:
        return ValueError(
            f"a stack of frames must continue the one before it in its lane, with one new frame; {where} "
            "does not. Call end_episodes() where environments are reset without a `done`, or another "
            "stream of steps begins, or pass on_gap='cut'. Nothing was written."
        )
    if kind == NOT_PADDED:
        before, other = "its newest frame", "constant"
        if padding == other:
            before, other = "zeros", "same"
        return ValueError(
            f"an episode must begin with a stack whose earlier frames are all {before}; {where} has "
            "others. Begin episodes with a reset, call end_episodes() after one that the environments "
            "did not make themselves, and make the storage with the padding that they have, "
            f"frame_stack={{{field.key!r}: FrameStack(..., padding={other!r})}}, or "
            "without frame_stack. Nothing was written."
        )
    return ValueError(
        f"a stack of frames under 'next' must be that at the root with one new frame; {where} is not. "
        "Nothing was written."
    )
