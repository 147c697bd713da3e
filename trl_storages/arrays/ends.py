"""Where the episodes of a dataset end, and why.

Letters: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Ends", "as_flags", "check_flags", "ends_of", "last_rows", "whole_rows"]

# garage's StepType.
_TERMINAL, _TIMEOUT = 2, 3


class Ends(NamedTuple):
    """How each of N rows ends its episode, `[N]` bool each."""

    terminated: np.ndarray
    truncated: np.ndarray
    leads_nowhere: np.ndarray
    """Whether the following row is of another episode, or there is none."""

    @property
    def done(self) -> np.ndarray:
        """Whether the episode ends with the row."""
        found: np.ndarray = self.terminated | self.truncated
        return found


def ends_of(flags: Mapping[str, Any], ends: np.ndarray | None, num_rows: int) -> Ends:
    """Reads flags by their role.

    `terminals` are terminal states, but for OGBench's data (which have `masks`, or `valids`, or neither
    rewards nor `timeouts`), where they only mark the last rows of episodes. `dones` are ends of either
    kind where other flags tell terminal states apart, and terminal states where none do.

    Args:
        flags: role -> `[N]` array; of rewards it only matters whether they are there.
        ends: `[N]` bool, further ends; or None.
        num_rows: N.
    """
    read = {role: as_flags(flag) for role, flag in flags.items() if role != "rewards"}
    nothing = np.zeros(num_rows, bool)
    terminals, timeouts = read.get("terminals", nothing), read.get("timeouts", nothing)
    dones, masks, valids = read.get("dones", nothing), read.get("masks"), read.get("valids")
    steps = np.asarray(flags.get("step_types", nothing)).reshape(-1)
    is_ogbench = masks is not None or valids is not None or not {"rewards", "timeouts"} & {*flags}
    marked = nothing if ends is None else ends
    terminated = steps == _TERMINAL
    if is_ogbench:
        marked = marked | terminals
    else:
        terminated = terminated | terminals
    if "terminals" in read or masks is not None or "step_types" in read:
        marked = marked | dones
    else:
        terminated = terminated | (dones & ~timeouts)
    truncated = timeouts | (steps == _TIMEOUT)
    leads_nowhere = marked | terminated | truncated
    if masks is not None:
        # An episode may go on behind a goal that was reached.
        leads_nowhere = leads_nowhere if leads_nowhere.any() else ~masks
        terminated = terminated | ~masks
    if valids is not None:
        # The row behind an end shows what the end led to.
        leads_nowhere = ~valids
    leads_nowhere = leads_nowhere.copy()
    leads_nowhere[-1:] = True
    return Ends(terminated, truncated | (marked & ~terminated), leads_nowhere)


def whole_rows(ends: Ends, kept: np.ndarray) -> tuple[np.ndarray, Ends]:
    """Leaves out rows, and ends the episodes that end with one of them a row earlier.

    Args:
        ends: of N rows.
        kept: `[N]` bool.

    Returns:
        int64 numbers of the rows that are kept, and all N rows' ends.
    """
    at = np.arange(len(kept))
    before = np.maximum.accumulate(np.where(kept, at, -1))[~kept & ends.done]
    before = before[before >= 0]
    truncated = ends.truncated.copy()
    truncated[before] |= ~ends.terminated[before]
    return at[kept], ends._replace(truncated=truncated)


def last_rows(done: np.ndarray) -> np.ndarray:
    """Returns for each of n rows the number of the last row of its episode, `[n]` int64.

    >>> last_rows(np.array([False, True, False, False])).tolist()
    [1, 1, 3, 3]
    """
    at = np.arange(len(done))
    last = np.where(done, at, len(done) - 1)
    return np.minimum.accumulate(last[::-1])[::-1]


def as_flags(value: Any) -> np.ndarray:
    """Returns flags as `[N]` bool."""
    array = value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
    found: np.ndarray = array.reshape(-1) != 0
    return found


def check_flags(name: str, value: Any) -> None:
    """Raises a ValueError unless each value is a flag: False or True, or 0 or 1 of any dtype."""
    array = value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype != bool and (strange := array[(array != 0) & (array != 1)]).size:
        raise ValueError(f"{name} must be flags, 0 or 1, got {strange.flat[0]}.")
