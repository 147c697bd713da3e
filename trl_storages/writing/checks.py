"""Checks data before it is written, with errors that say what to pass instead.

Letters: L lanes written now, T steps of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import NestedKey, TensorDictBase

from trl_storages.arguments import counted
from trl_storages.keys import DONE, MASK

__all__ = [
    "end_flags",
    "num_steps_of",
    "refuse_padding",
]


def num_steps_of(
    data: TensorDictBase, lanes: Sequence[int] | None, num_envs: int, traj_key: NestedKey
) -> int:
    """Returns T of a batch.

    Args:
        data: `[T]` for one lane, `[L, T]`, or `[L]` for one step of several lanes.
        lanes: the L lanes; None is all of them.
        num_envs: how many there are.
        traj_key: assigns the rows of flat batches to lanes.

    Raises:
        ValueError: the batch has another shape.
    """
    batch_size, num_lanes = data.batch_size, num_envs if lanes is None else len(lanes)
    if 0 in batch_size:
        raise ValueError(f"there is nothing to write: the batch is {list(batch_size)}.")
    if len(batch_size) == 1 and num_lanes == 1:
        found: int = batch_size[0]
        return found
    if len(batch_size) in (1, 2) and batch_size[0] == num_lanes:
        return batch_size[1] if len(batch_size) == 2 else 1
    if data.get(MASK, None) is not None:
        raise ValueError(_padded(batch_size))
    if len(batch_size) > 2:
        joined = f"data.flatten(0, {len(batch_size) - 2})"
        remedy = f"join its leading dimensions for num_envs={batch_size[:-1].numel()}: {joined}"
    elif len(batch_size) == 2 and lanes is None and data.get(traj_key, None) is not None:
        remedy = (
            f"pass num_envs={batch_size[0]} where the storage or its writer is made; or, if these are "
            "steps of some of its environments, data.reshape(-1), whose trajectory numbers say of which"
        )
    elif len(batch_size) == 2 and lanes is None:
        remedy = f"pass num_envs={batch_size[0]} where the storage or its writer is made"
    else:
        remedy = (
            "nothing says which lane each row is for: pass the batch as the collector made it, "
            "without reshape(-1); or with its trajectory numbers (traj_key), which are in no "
            f"{traj_key!r} here; or name the lane of each with lanes=[...]; or pass num_envs=1 "
            "to store one stream of transitions or whole trajectories"
        )
    if batch_size[1:] == (num_lanes,):
        remedy = (
            f"write data.transpose(0, 1) if its last dimension is that of the lanes; or {remedy}"
        )
    raise ValueError(
        f"a batch for {counted(num_lanes, 'lane')} must be [{num_lanes}, T] (time last) or [{num_lanes}] "
        f"(one step of each), got {list(batch_size)}; {remedy}."
    )


def end_flags(
    entries: Mapping[NestedKey, torch.Tensor], key: NestedKey, num_rows: int
) -> torch.Tensor:
    """Returns n bool of any shape, which rows end their episodes.

    Args:
        entries: of the rows.
        key: of the flags.
        num_rows: n.

    Raises:
        KeyError: there are none.
        ValueError: they are not one bool a row.
    """
    flag = entries.get(key)
    if flag is None:
        raise KeyError(
            f"the data lacks {key!r}, which ends episodes; its keys are "
            f"{sorted(entries, key=str)}. Pass EpisodeWriter(done_key=...) if it has another name, "
            f"and make one for the lane where each agent has its own: {_one_for_all(key)}."
        )
    if flag.dtype is torch.bool and flag.numel() > num_rows:
        raise ValueError(
            f"{key!r} must be one bool a row, for {num_rows} rows, got {list(flag.shape)}: an "
            "episode ends for all agents of a lane at once. Pass the done_key of the flag that they "
            f"share, such as EpisodeWriter(done_key={DONE!r}), or make one: "
            f"{_one_for_all(key)}."
        )
    if flag.dtype is not torch.bool or flag.numel() != num_rows:
        raise ValueError(
            f"{key!r} must be one bool a row, for {num_rows} rows; got "
            f"{flag.dtype} {list(flag.shape)}."
        )
    return flag


def _one_for_all(key: NestedKey) -> str:
    per_agent = ("next", "agents", "done") if key == DONE else key
    return (
        f"data.set({DONE!r}, data[{per_agent!r}].any(-2)) if it ends with any agent, all(-2) if with "
        "the last"
    )


def refuse_padding(entries: Mapping[NestedKey, torch.Tensor]) -> None:
    """Raises a ValueError if some rows are padding."""
    mask = entries.get(MASK)
    if mask is not None and not mask.all():
        raise ValueError(_padded(mask.shape))


def _padded(batch_size: Sequence[int]) -> str:
    return (
        f"all rows must be transitions, but {MASK} says that the batch {list(batch_size)} is of "
        "trajectories that were padded to one length: pass traj_format='cat' to the collector, or "
        f"write data[data[{MASK!r}]], the rows one after another without the padding."
    )
