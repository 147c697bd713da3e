"""Makes a storage from arrays, as in D4RL, OGBench, garage and others.

Letters: N rows of the arrays, G goal size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import Composite, Unbounded

from trl_storages import arguments, keys
from trl_storages.datasets.columns import GoalOf, blocks_of, columns_of, entries_of, joined
from trl_storages.recipes import UniformReplayStorage
from trl_storages.replay import ReplayStorage
from trl_storages.transforms import GoalRelabel
from trl_storages.writing.fields import OUTCOME_FIELDS

__all__ = ["Recipe", "filled", "from_arrays"]

#: A class of ready-made storages, or a function with the same arguments.
Recipe = Callable[..., ReplayStorage]


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
    `timeouts`. Other data whose `terminals` are only ends need `ends=data.pop("terminals")`, also where
    rewards were added to OGBench's without its `masks`.

    Args:
        data: name -> `[N, ...]` array or tensor on the CPU; or a list of such dictionaries, one for each
            episode, which may have one observation more than actions.
        ends: `[N]` bool, where episodes end; None looks for the names above. For a single trajectory pass
            `np.zeros(N)`.
        recipe: class of the storage, such as `HERReplayStorage`. It is called with specs of the data and
            `options`.
        goal_fn: returns the goals `[N, G]` that all observations `[N, ...]` (a tensor, or a dictionary of
            them) have reached, for hindsight over data without goals. The desired goal of a transition
            is then the last goal reached in its episode. Missing rewards are computed for that goal by
            the recipe's `reward_fn`, and are NaN if the recipe has none. Of data that have
            `achieved_goals` and `desired_goals` leave it out; `reward_fn` computes missing rewards there
            as well.
        float_dtype: converts float64 entries, as with `torch.float32`; None leaves them.
        progress: whether to show a bar of tqdm.
        **options: of the recipe. `storage_size` defaults to the number of transitions; a smaller one
            keeps the last ones.

    Returns:
        the storage.

    Raises:
        KeyError: an entry is missing; the message lists what there is.
        TypeError: an entry is not numeric.
        ValueError: lengths differ, or `path` holds rows. Nothing is written then.

    >>> import numpy as np
    >>> data = {"observations": np.arange(12.0).reshape(6, 2), "actions": np.zeros((6, 1)),
    ...         "rewards": np.arange(6), "terminals": [0, 0, 1, 0, 0, 0], "timeouts": [0, 0, 0, 0, 0, 1]}
    >>> storage = from_arrays(data, float_dtype=torch.float32, batch_size=2)
    >>> storage.episodes.episodes()["length"].tolist()  # the last row says where row 4 led
    [3, 2]
    """
    if isinstance(data, Mapping):
        entries = entries_of(data, goal_fn)
    else:
        entries, path_ends = joined([entries_of(path, goal_fn) for path in data])
        ends = path_ends if ends is None else ends
    if keys.REWARD not in entries.fields and goal_fn is None and options.get("reward_fn") is None:
        raise KeyError(
            f"data must have the entry 'rewards', there are {[*entries.fields]}; or goals (or goal_fn=) "
            "and a recipe with reward_fn=, which computes them."
        )
    columns = columns_of(entries, ends, sets_goals=goal_fn is not None)
    num_rows = len(columns[keys.DONE][1])
    return filled(recipe, blocks_of(columns, float_dtype), num_rows, options, progress=progress)


def filled(
    recipe: Recipe,
    blocks: Iterator[TensorDict],
    num_rows: int,
    options: Mapping[str, Any],
    *,
    progress: bool,
) -> ReplayStorage:
    """Makes a storage and writes blocks of steps to it. If writing fails, its files are deleted.

    Raises:
        ValueError: the storage holds rows already, or is of several environments.
    """
    first = next(blocks)
    infos = {*arguments.keys("info_keys", options.get("info_keys", ()))}
    fields = {key: (leaf.dtype, leaf.shape[1:]) for key, leaf in first.items(True, True)}
    twins = {*keys.shared_keys(fields)} - infos
    observations, actions, further = Composite(), Composite(), {}
    for key, (dtype, shape) in fields.items():
        if key in twins:
            observations[key] = Unbounded(shape, dtype=dtype)
        elif keys.key_path(key)[0] == keys.ACTION:
            actions[key] = Unbounded(shape, dtype=dtype)
        elif (
            key not in {*infos, *map(keys.next_key, twins)}
            and OUTCOME_FIELDS.get(key) != fields[key]
        ):
            further[key] = dtype, shape
    options = {"storage_size": max(num_rows, 2), **options, "extra_fields": further}
    storage = recipe(observations, actions, **options)
    num_stored, num_envs = len(storage), storage.episodes.num_envs
    if num_stored or num_envs > 1:
        storage.close()
        raise ValueError(
            "the storage must be empty and of one environment for a dataset, and it holds "
            f"{num_stored} rows of {num_envs}."
        )
    relabel = next((part for part in storage.parts() if isinstance(part, GoalRelabel)), None)
    every: Iterable[TensorDict] = chain([first], blocks)
    try:
        for steps in _shown(every, num_rows) if progress else every:
            if keys.REWARD not in fields:
                steps[keys.REWARD] = _rewards(relabel, steps)
            storage.extend(steps)
    except BaseException:
        storage.close(keep=False)
        raise
    # Later writes do not continue the data.
    storage.end_episodes()
    return storage


def _shown(blocks: Iterable[TensorDict], num_rows: int) -> Iterator[TensorDict]:
    from tqdm import tqdm

    with tqdm(total=num_rows, desc="writing rows", leave=False) as bar:
        for steps in blocks:
            yield steps
            bar.update(len(steps))


def _rewards(relabel: GoalRelabel | None, steps: TensorDict) -> torch.Tensor:
    """Returns the rewards of the desired goals of steps, NaN if nothing computes them."""
    if relabel is None or relabel.reward_fn is None:
        return torch.full((len(steps), 1), torch.nan)
    achieved, goals = (steps[keys.next_key(key)] for key in (keys.ACHIEVED_GOAL, keys.DESIRED_GOAL))
    found = relabel.reward_fn(achieved, goals, {key: steps[key] for key in relabel.info_keys})
    return torch.as_tensor(found).float().reshape(-1, 1)
