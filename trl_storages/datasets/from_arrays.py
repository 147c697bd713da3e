"""A storage out of arrays, as D4RL, OGBench, garage and others keep them.

Letters: N rows of the arrays, T steps of a path, B batch, G goal size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trl_storages import arguments
from trl_storages.arrays import Transitions
from trl_storages.arrays.transitions import GoalOf
from trl_storages.datasets.filling import (
    Recipe,
    blocks_of,
    checked_dtype,
    filled,
)
from trl_storages.datasets.paths import join_paths
from trl_storages.recipes import UniformReplayStorage
from trl_storages.replay import ReplayStorage

__all__ = ["from_arrays"]


def from_arrays(
    data: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    ends: Any = None,
    *,
    recipe: Recipe = UniformReplayStorage,
    goal_fn: GoalOf | None = None,
    float_dtype: torch.dtype | None = None,
    progress: bool = False,
    **options: Any,
) -> ReplayStorage:
    """Makes a storage of the transitions of a dataset, with its episodes.

    Entries are known by the names of D4RL, OGBench, Minari, garage and others: `observations` (an array
    or a dictionary), `actions`, `rewards`, `next_observations`, flags of ends (`terminals`, `timeouts`,
    `terminations`, `truncations`, `dones`, `masks`, `valids`), goals (`achieved_goals`,
    `desired_goals`). All other entries with one row for each step are stored under their own names,
    `infos/qpos` as `("infos", "qpos")`, but for D4RL's `metadata`.

    Without `next_observations` they are those of the following row: the last row of an episode then only
    says what the row before it led to. A last row that is terminal stays, for its reward.

    Of OGBench's data, `terminals` mark where episodes end, and `masks` which states are terminal; data
    of other origin whose `terminals` are no terminal states need `ends="terminals"`.

    Args:
        data: name -> `[N, ...]` array; or a list of such dictionaries, one for each episode, where
            observations may be one more than actions.
        ends: `[N]` bool, where episodes end, or the name of an entry that says so; None looks for the
            names above.
        recipe: class of the storage, such as `HERReplayStorage`. It is given specs of the data, and
            `options`.
        goal_fn: returns the goals `[B, G]` that observations `[B, ...]` (or a dictionary of them) have
            reached, for hindsight over data without goals. The desired goal of a transition then is
            what its episode reached last; rewards that are missing are NaN, so that
            `num_goals=math.inf` is needed.
        float_dtype: what float64 entries become, such as `torch.float32`; None leaves them.
        progress: whether to show how much is written.
        **options: of the recipe. `storage_size` is the number of transitions unless given; with a smaller
            one the last ones stay.

    Returns:
        the storage.

    Raises:
        KeyError: an entry is missing; the message lists what there is.
        TypeError: an entry holds no numbers.
        ValueError: lengths differ, an episode does not fit into `storage_size`, or `path` holds rows.
            Nothing is written then.

    >>> import numpy as np
    >>> data = {"observations": np.arange(12.0).reshape(6, 2), "actions": np.zeros((6, 1)),
    ...         "rewards": np.arange(6), "terminals": [0, 0, 1, 0, 0, 0], "timeouts": [0, 0, 0, 0, 0, 1]}
    >>> storage = from_arrays(data, float_dtype=torch.float32, batch_size=2)
    >>> storage.episodes.episodes()["length"].tolist()  # the last row says where row 4 led
    [3, 2]
    """
    float_dtype, progress = checked_dtype(float_dtype), arguments.flag("progress", progress)
    goal_fn = arguments.optional(arguments.function, "goal_fn", goal_fn, "of observations")
    if isinstance(data, Sequence) and not isinstance(data, str):
        data, path_ends = join_paths(data)
        ends = path_ends if ends is None else ends
    transitions = Transitions(data, ends, float_dtype=float_dtype, goal_fn=goal_fn)
    return filled(
        recipe,
        transitions,
        blocks_of(transitions),
        num_rows=len(transitions),
        longest_episode=transitions.longest_episode,
        options=options,
        progress=progress,
    )
