"""Makes a storage from arrays, as in D4RL, OGBench, garage and others.

Letters: N rows of the arrays, T steps of a path, B batch, G goal size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from trl_storages import arguments
from trl_storages.datasets.filling import BLOCK, Recipe, filled
from trl_storages.datasets.names import ROLE_OF, as_dictionary
from trl_storages.datasets.transitions import GoalOf, Transitions
from trl_storages.keys import leaves, nested
from trl_storages.recipes import UniformReplayStorage
from trl_storages.replay import ReplayStorage

__all__ = ["from_arrays", "join_paths"]


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
    """Makes a storage from the transitions and episodes of a dataset.

    Entries are known by the names of D4RL, OGBench, Minari, garage and others: `observations` (an array
    or a dictionary), `actions`, `rewards`, `next_observations`, flags of ends (`terminals`, `timeouts`,
    `terminations`, `truncations`, `dones`, `masks`), goals (`achieved_goals`,
    `desired_goals`). All other entries with one row for each step are stored under their own names,
    `infos/qpos` as `("infos", "qpos")`, except D4RL's `metadata`.

    Without `next_observations`, these are the observations of the following rows: the last row of an
    episode only supplies the next observation of the row before. A terminal last row stays, for its
    reward.

    `terminals` are terminal states, except in OGBench's data, where they mark the ends of episodes and
    `masks` the terminal states: such are data with `masks`, and data with neither rewards nor
    `timeouts`. Other data whose `terminals` are only ends need `ends="terminals"`, also where rewards
    were added to OGBench's without its `masks`.

    Args:
        data: name -> `[N, ...]` array, in a dictionary or a TensorDict; or a list of them, one for each
            episode, which may have one observation more than actions.
        ends: `[N]` bool, where episodes end, or the name of an entry that holds it; None looks for the
            names above. For a single trajectory pass `np.zeros(N)`.
        recipe: class of the storage, such as `HERReplayStorage`. It is called with specs of the data and
            `options`.
        goal_fn: returns the goals `[B, G]` that observations `[B, ...]` (a tensor, or a dictionary of
            them) have reached, for hindsight over data without goals. The desired goal of a transition
            is then the last goal reached in its episode. Missing rewards are computed for that goal by
            the recipe's `reward_fn`, and are NaN if the recipe has none. Of data that have
            `achieved_goals` and `desired_goals` leave it out; `reward_fn` computes missing rewards there
            as well.
        float_dtype: converts float64 entries, as with `torch.float32`; None leaves them.
        progress: whether to show progress.
        **options: of the recipe. `storage_size` defaults to the number of transitions; a smaller one
            keeps the last ones.

    Returns:
        the storage.

    Raises:
        KeyError: an entry is missing; the message lists what there is.
        TypeError: an entry is not numeric.
        ValueError: lengths differ, an episode does not fit into `storage_size`, or `path` holds rows.
            Nothing is written then.

    >>> import numpy as np
    >>> data = {"observations": np.arange(12.0).reshape(6, 2), "actions": np.zeros((6, 1)),
    ...         "rewards": np.arange(6), "terminals": [0, 0, 1, 0, 0, 0], "timeouts": [0, 0, 0, 0, 0, 1]}
    >>> storage = from_arrays(data, float_dtype=torch.float32, batch_size=2)
    >>> storage.episodes.episodes()["length"].tolist()  # the last row says where row 4 led
    [3, 2]
    """
    goal_fn = arguments.optional(arguments.function, "goal_fn", goal_fn, "of observations")
    if isinstance(data, Sequence) and not isinstance(data, str):
        data, path_ends = join_paths(data)
        ends = path_ends if ends is None else ends
    transitions = Transitions(
        *(data, ends),
        float_dtype=float_dtype,
        goal_fn=goal_fn,
        computes_rewards=goal_fn is not None or options.get("reward_fn") is not None,
    )
    blocks = [
        partial(transitions.block, start, start + BLOCK)
        for start in range(0, len(transitions), BLOCK)
    ]
    return filled(
        *(recipe, transitions, blocks),
        num_rows=len(transitions),
        longest_episode=transitions.longest_episode,
        options=options,
        progress=progress,
    )


def join_paths(paths: Sequence[Any]) -> tuple[dict[str, Any], np.ndarray]:
    """Concatenates episodes.

    Args:
        paths: dictionaries of `[T, ...]` arrays, also nested; observations may be `[T + 1, ...]`,
            with the final observation.

    Returns:
        the entries of all episodes `[N, ...]`, and `[N]` bool, where the episodes end.

    Raises:
        TypeError: an episode is not a dictionary.
        KeyError: an episode has other entries than the first.
        ValueError: there are no episodes, or an entry has not one row for each step.

    >>> data, ends = join_paths([{"obs": [1, 2, 3], "acts": [0, 0]}, {"obs": [5, 6], "acts": [1]}])
    >>> data["obs"].tolist(), data["next_obs"].tolist(), ends.tolist()
    ([1, 2, 5], [2, 3, 6], [False, True, True])
    """
    if not len(paths):
        raise ValueError("data must hold an episode at least, got an empty sequence.")
    parts: dict[tuple[str, ...], list[Any]] = {}
    lengths = []
    for number, path in enumerate(paths):
        found, num_steps = _steps_of(path, number)
        if number and found.keys() != parts.keys():
            raise KeyError(
                f"all episodes of data must have the entries of the first, {[*parts]}; number {number} "
                f"has {[*found]}."
            )
        for key, value in found.items():
            parts.setdefault(key, []).append(value)
        lengths.append(num_steps)
    ends = np.zeros(sum(lengths), bool)
    ends[np.cumsum(lengths) - 1] = True
    return nested((key, _joined(key, values)) for key, values in parts.items()), ends


def _steps_of(path: Any, number: int) -> tuple[dict[tuple[str, ...], Any], int]:
    """Returns the entries of an episode, with one row for each step, and T."""
    path = as_dictionary(f"data[{number}]", path)
    found = dict(leaves(path, "each episode of data"))
    for key, value in found.items():
        if not (hasattr(value, "__len__") and getattr(value, "ndim", True)):
            raise TypeError(f"data[{number}][{key!r}] must have one row a step, got {value!r:.40}.")
    seen, actions = (
        [key for key in found if ROLE_OF.get(key[0]) == role]
        for role in ("observations", "actions")
    )
    if not actions:
        raise KeyError(f"data[{number}] must have the entry 'actions', it has {[*found]}.")
    num_steps = len(found[actions[0]])
    has_last = bool(seen) and all(len(found[key]) == num_steps + 1 for key in seen)
    if has_last and "next_observations" not in map(ROLE_OF.get, path):
        for key in seen:
            after = ("next_" + key[0], *key[1:])
            found[after], found[key] = found[key][1:], found[key][:-1]
    wrong = {key: len(value) for key, value in found.items() if len(value) != num_steps}
    if wrong or not num_steps:
        raise ValueError(
            f"each episode of data must have one row for each step, and one at least; number {number} "
            f"has {num_steps} actions, and {wrong}."
        )
    return found, num_steps


def _joined(key: tuple[str, ...], values: Sequence[Any]) -> Any:
    try:
        if isinstance(values[0], torch.Tensor):
            return torch.cat([torch.as_tensor(value) for value in values])
        return np.concatenate([np.asarray(value) for value in values])
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{key} must have the same shape in all episodes: {error}.") from error
