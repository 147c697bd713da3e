"""Checks steps before they are written.

Letters: E lanes, L of them written now, T steps of each, N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection

from trl_storages import keys
from trl_storages.arguments import counted
from trl_storages.streams.layout import Layout

__all__ = ["checked_fields", "end_flags", "entries_in", "num_steps_of"]


def num_steps_of(data: TensorDictBase, num_lanes: int) -> int:
    """Returns T of a batch `[L, T]`, `[T]` for one lane, or `[L]` for one step of several lanes.

    Raises:
        ValueError: the batch has another shape.
    """
    shape = data.batch_size
    if 0 in shape:
        raise ValueError(f"there must be steps to write, got a batch {list(shape)}.")
    if len(shape) == 1 and num_lanes == 1:
        return int(shape[0])
    if len(shape) in (1, 2) and shape[0] == num_lanes:
        return int(shape[1:].numel())
    raise ValueError(
        f"a batch for {counted(num_lanes, 'lane')} must be [{num_lanes}, T] (time last) or [{num_lanes}] "
        f"(one step of each), got {list(shape)}: make the storage with the num_envs of the data, name "
        "lanes=[...], or pass rows [N] with the numbers of their trajectories (traj_key)."
    )


def entries_in(data: Any, path: tuple[str, ...] = ()) -> dict[NestedKey, torch.Tensor]:
    """Returns the tensors of a TensorDict by key. Its own iterators take ten times as long."""
    found: dict[NestedKey, torch.Tensor] = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            found[(*path, name) if path else name] = value
        elif is_tensor_collection(value):
            found |= entries_in(value, (*path, name))
    return found


def checked_fields(
    data: Mapping[NestedKey, torch.Tensor], layout: Layout, batch_dims: int
) -> dict[NestedKey, torch.Tensor]:
    """Returns the entries of transitions that have fields.

    Raises:
        KeyError: the data lack a field.
        TypeError, ValueError: it has another dtype or shape; or some rows are padding; or rows on the
            host are not done where they are terminated or truncated.
    """
    mask = data.get(keys.MASK)
    if mask is not None and not mask.all():
        raise ValueError(
            f"all rows must be transitions, but {keys.MASK} says that some are padding: pass "
            f"traj_format='cat' to the collector, or write data[data[{keys.MASK!r}]]."
        )
    found = {}
    for field in layout.fields:
        value = data.get(field.key)
        if value is None:
            raise KeyError(f"the data lacks {field.key!r}, which every row holds as {field}.")
        if value.dtype is not field.dtype:
            raise TypeError(f"{field.key!r} must be {field}, got {value.dtype}.")
        if value.shape[batch_dims:] != field.shape:
            got = list(value.shape[batch_dims:])
            raise ValueError(f"{field.key!r} must be {field}, got {got}.")
        found[field.key] = value
    for key, done_key in keys.done_beside(found).items():
        _check_done(found, key, done_key)
    return found


def _check_done(
    found: Mapping[NestedKey, torch.Tensor], key: NestedKey, done_key: NestedKey
) -> None:
    flag, done = found[key], found[done_key]
    # Flags on another device are not waited for.
    if (
        flag.is_cpu
        and flag.dtype is torch.bool
        and done.shape == flag.shape
        and (flag > done).any()
    ):
        raise ValueError(
            f"{done_key!r} must be true wherever {key!r} is, as it ends the episode, got a row where it "
            "is not: set it to terminated | truncated. A trainer that flattens makes such rows: pass it "
            "flatten_tensordicts=False."
        )


def end_flags(
    data: Mapping[NestedKey, torch.Tensor], key: NestedKey, num_rows: int
) -> torch.Tensor:
    """Returns `[N]` bool, which rows end their episodes.

    Raises:
        KeyError: there are none.
        ValueError: they are not one bool a row.
    """
    flag = data.get(key)
    if flag is None:
        raise KeyError(f"the data lacks {key!r}, which ends episodes; it has {[*data]}.")
    if flag.dtype is not torch.bool or flag.numel() != num_rows:
        raise ValueError(
            f"{key!r} must be one bool a row, got {flag.dtype} {list(flag.shape)}. Where each agent has "
            f"its own make one for all, as by data.set({keys.DONE!r}, data[...].any(-2))."
        )
    return flag.detach().reshape(-1)
