"""Replay buffers from arrays whose names say what they hold, as in D4RL, OGBench, garage and others.

Letters: N steps of the arrays, G goal size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, unravel_key

from trl_storages import keys, validation
from trl_storages.buffer import ReplayStorage
from trl_storages.datasets.transitions import FLAGS, Arrays, Preset, columns_of, create_and_fill
from trl_storages.keys import ACHIEVED_GOAL, ACTION, DESIRED_GOAL, OBSERVATION, REWARD, next_key
from trl_storages.presets import UniformReplayStorage
from trl_storages.writing.spaces import as_tensor

__all__ = ["concatenate", "from_arrays", "read_arrays"]

#: Returns the goals `[N, *G]` that observations `[N, ...]` achieve.
GoalOf = Callable[[Any], torch.Tensor]

# Role -> its names in D4RL, OGBench, Minari, garage, Stable-Baselines3, tianshou, jaxrl, TorchRL...
_NAMES = {
    "observation": "observations obs",
    "action": "actions acts act",
    "reward": "rewards rews rew",
    "achieved_goal": "achieved_goals",
    "desired_goal": "desired_goals",
    "terminals": "terminal terminations termination terminateds terminated",
    "timeouts": "timeout truncations truncation truncateds truncated",
    "dones": "done dones_float",
    "masks": "",
    "is_first": "",
    "is_last": "",
    "is_terminal": "",
}
_ROLES = {name: role for role, names in _NAMES.items() for name in (role, *names.split())}
# Words in names of flags, singular or plural, that may mark ends of episodes.
_END_WORDS = re.compile(
    r"(?:^|[_/.])(?:terminal|terminated|termination|done|last|truncated|truncation|timeout|end)s?(?:$|[_/.])",
    re.IGNORECASE,
)


def from_arrays(
    data: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    ends: Any = None,
    *,
    preset: Preset = UniformReplayStorage,
    goal_fn: GoalOf | None = None,
    float_dtype: torch.dtype | None = None,
    progress: bool = False,
    **options: Any,
) -> ReplayStorage:
    """Creates a replay buffer with the transitions and episodes of a dataset.

    Arrays are recognized by the names of D4RL, OGBench, Minari, garage and others: `observations` (an
    array or a dictionary), `actions`, `rewards`, `next_observations`, goals (`achieved_goals`,
    `desired_goals`), and flags of ends (`terminals`, `timeouts`, `terminations`, `truncations`, `dones`,
    `masks`, and `is_first`, `is_last`, `is_terminal` of RLDS). All other arrays with one value per step
    are stored under their names, `infos/qpos` as `("infos", "qpos")`, except D4RL's `metadata`. Flags
    whose name may mean an end, such as `episode_end`, raise unless an argument says what they are.

    Data without `next_observations` take them from the following steps. The last step of an episode then
    only supplies the next observation of the step before it. A terminal last step is stored nevertheless,
    because of its reward.

    `terminals` are terminal states, except in OGBench's data. There `terminals` mark the ends of episodes
    and `masks` the terminal states. Data with `masks`, and data with neither rewards nor `timeouts`, are
    read as OGBench's; rewards are NaN if they are neither in the data nor computed. If `terminals` are
    only ends in other data, pass `ends=data.pop("terminals")`. The same holds for OGBench's data with
    added rewards and without `masks`.

    `is_terminal`, without `next_observations`, marks terminal observations, as in RLDS: the step before
    leads to the terminal observation, and the marked step only supplies that observation. With
    `next_observations`, `is_terminal` marks the transitions that lead to a terminal observation.

    Args:
        data: name -> `[N, ...]` array or tensor on the CPU; or a list of such dictionaries, one for each
            episode, which may have one observation more than actions.
        ends: `[N]` bool, where episodes end, or the name of the array of these flags; None looks for the
            names above. For a single trajectory pass `np.zeros(N)`.
        preset: class of the replay buffer, such as `HERReplayStorage`, which is called with specs of the
            data and `options`.
        goal_fn: returns the goals `[N, G]` that all observations `[N, ...]` (a tensor, or a dictionary of
            tensors) achieve, for HER with data without goals. The desired goal of a transition is then
            the last goal achieved in its episode. Missing rewards are computed for that goal by the
            preset's `reward_fn`, and are NaN if the preset has none. Omit `goal_fn` if the data have
            `achieved_goals` and `desired_goals`; `reward_fn` computes missing rewards also then.
        float_dtype: dtype to which float64 arrays are converted, such as `torch.float32`; None keeps
            float64.
        progress: whether to show a progress bar of tqdm.
        **options: keywords of the preset. `storage_size` defaults to the number of transitions; a smaller
            one keeps the newest transitions. Arrays named in `info_keys` are stored as infos, `speed` as
            `("next", "speed")`. Arrays named in `extra_fields` are stored under their names, with that
            dtype and shape.

    Returns:
        the replay buffer.

    Raises:
        KeyError: an array is missing; the message lists the arrays of the data.
        TypeError: `data` is a path, or an array is not numeric.
        ValueError: lengths differ, an array may mark ends, or `path` already holds transitions. Nothing
            is written then.

    >>> import numpy as np
    >>> data = {"observations": np.arange(12.0).reshape(6, 2), "actions": np.zeros((6, 1)),
    ...         "rewards": np.arange(6), "terminals": [0, 0, 1, 0, 0, 0], "timeouts": [0, 0, 0, 0, 0, 1]}
    >>> buffer = from_arrays(data, float_dtype=torch.float32, batch_size=2)
    >>> buffer.episodes.table()["length"].tolist()  # the last step is an observation only
    [3, 2]
    """
    infos = validation.keys("info_keys", options.get("info_keys", ()))
    if isinstance(data, str | PathLike):
        raise TypeError(f"data must be arrays, got the path {str(data)!r}: pass numpy.load(path).")
    if isinstance(data, Mapping):
        arrays = read_arrays(data, goal_fn, infos)
    else:
        arrays, path_ends = concatenate([read_arrays(path, goal_fn, infos) for path in data])
        ends = path_ends if ends is None else ends
    fields = arrays.fields
    if isinstance(ends, str):
        key = unravel_key(tuple(_ROLES.get(ends, ends).split("/")))
        if key not in fields:
            raise KeyError(f"ends must be flags, or the name of one of {[*fields]}, got {ends!r}.")
        ends = fields.pop(key)
    _check_flags(arrays, {*map(keys.info_key, infos), *(options.get("extra_fields") or ())}, ends)
    is_ogbench = "terminals" in fields and "timeouts" not in fields  # data without rewards
    has_goals = goal_fn is not None or options.get("reward_fn") is not None
    if REWARD not in fields and not has_goals and not is_ogbench:
        raise KeyError(
            f"data must have the array 'rewards', got {[*fields]}. To compute rewards, pass goals (or "
            "goal_fn=) and a preset with reward_fn=."
        )
    columns = columns_of(arrays, ends, sets_goals=goal_fn is not None)
    num_transitions = len(columns[keys.DONE][1])
    return create_and_fill(
        preset, [columns], num_transitions, options, float_dtype=float_dtype, progress=progress
    )


def _check_flags(arrays: Arrays, named_keys: Collection[NestedKey], ends: Any) -> None:
    """Raises a ValueError if the name of a flag may mean the end of an episode and no argument names it.

    Args:
        arrays: the arrays.
        named_keys: keys that arguments name as infos or extra fields.
        ends: the flags that were passed.
    """
    observation_keys = arrays.observation_keys
    exempt = {*FLAGS, *named_keys, *observation_keys, *map(next_key, observation_keys)}
    for key, values in arrays.fields.items():
        path = keys.key_path(key)
        if key in exempt or path[0] == ACTION or values.dtype != bool or values.size != len(values):
            continue
        is_passed = np.array_equal(values.reshape(-1), np.reshape(ends, -1))
        if _END_WORDS.search("/".join(path)) and not is_passed:
            raise ValueError(
                f"{key!r} holds a flag for each step, and its name may mean the end of an episode. "
                "If it marks ends of either kind, pass its name as ends=. If it marks terminal states, "
                "rename it terminals; if it marks time limits, timeouts. To store it, name it in "
                "info_keys= or extra_fields=."
            )


def read_arrays(
    data: Any, goal_fn: GoalOf | None = None, info_keys: Collection[NestedKey] = ()
) -> Arrays:
    """Finds the keys of a dataset's arrays by their names.

    Args:
        data: the arrays.
        goal_fn: as in `from_arrays`.
        info_keys: names that are infos, even if they are names of other arrays in a convention above.

    Raises:
        KeyError: observations or actions are missing, or only some observations have next values.
        TypeError: an array is not numeric.
        ValueError: two arrays have the same key, or lengths differ.

    >>> [*read_arrays({"obs": np.zeros(2), "acts": np.ones(2), "infos/x": np.ones(2)}).fields]
    ['observation', 'action', ('infos', 'x')]
    """
    fields: dict[NestedKey, np.ndarray] = {}
    observation_keys: list[NestedKey] = []
    next_keys: list[NestedKey] = []
    for name, value in validation.mapping("data", data, "a dictionary of arrays").items():
        base = name.removeprefix("next_").removesuffix("_next")
        role = base if name in info_keys else _ROLES.get(base, base)
        root = () if role == OBSERVATION and isinstance(value, Mapping) else tuple(role.split("/"))
        if base != name or role == "reward":
            root = ("next", *root)
        # D4RL's files describe their origin there.
        for path, leaf in keys.leaves(value, "data", root) if root[:1] != ("metadata",) else ():
            if isinstance(leaf, Mapping):  # an empty group
                continue
            key = unravel_key(path)
            key = keys.info_key(key) if key in info_keys else key
            _add(fields, key, leaf)
            if role in (OBSERVATION, ACHIEVED_GOAL, DESIRED_GOAL):
                (observation_keys if base == name else next_keys).append(key)
    if "valids" in fields:  # in OGBench's compact data
        raise ValueError("data with 'valids' lack next observations: pass next_observations.")
    action_keys = [key for key in fields if keys.key_path(key)[0] == ACTION]
    if not (observation_keys and action_keys):
        raise KeyError(f"data must have the arrays observations and actions, got {[*data]}.")
    num_steps = len(fields[action_keys[0]])
    for key in observation_keys:
        if not next_keys and len(fields[key]) == num_steps + 1:
            fields[next_key(key)], fields[key] = fields[key][1:], fields[key][:-1]
    if goal_fn is not None:
        _add_achieved_goals(fields, observation_keys, goal_fn)
        observation_keys.append(ACHIEVED_GOAL)
    expected = {next_key(key) for key in observation_keys}
    if {*next_keys} - expected or expected & {*fields} not in (expected, set()):
        raise KeyError(f"data must have all next observations or none of them, got {[*fields]}.")
    if wrong := {key: len(values) for key, values in fields.items() if len(values) != num_steps}:
        raise ValueError(f"data must have a value for each of {num_steps} steps, got {wrong}.")
    return Arrays(fields, observation_keys)


def _add(fields: dict[NestedKey, np.ndarray], key: NestedKey, values: Any) -> None:
    """Adds an array to `fields`.

    Raises:
        TypeError: the values are not numbers.
        ValueError: `fields` contain the key, or the values have several shapes.
    """
    keys.check_free(key, (*fields, keys.DONE, keys.TERMINATED, keys.TRUNCATED))
    if isinstance(values, tuple) and not all(np.isscalar(value) for value in values):
        raise TypeError(
            f"{key!r} must be an array or a dictionary of arrays, got a tuple, as of a Tuple space: "
            "name its items, {'0': first, '1': second}."
        )
    try:
        array = np.asarray(values.detach() if isinstance(values, torch.Tensor) else values)
    except ValueError as error:  # steps of several shapes
        raise ValueError(f"{key!r} must have the same shape at all steps: {error}") from error
    if not array.ndim or array.dtype.kind not in "biuf":
        got = validation.shown(values)
        raise TypeError(f"data must be numbers, a value for each step, got {key!r}: {got}.")
    fields[key] = array


def _add_achieved_goals(
    fields: dict[NestedKey, np.ndarray], observation_keys: Sequence[NestedKey], goal_fn: GoalOf
) -> None:
    """Adds the goals that the observations achieve, and those that the next observations achieve."""
    for is_next in {False, next_key(observation_keys[0]) in fields}:
        sources = {key: next_key(key) if is_next else key for key in observation_keys}
        tree = keys.nested(
            (keys.key_path(key), as_tensor(fields[source], repr(key)))
            for key, source in sources.items()
        )
        goals = goal_fn(tree[OBSERVATION] if [*sources] == [OBSERVATION] else tree)
        key = next_key(ACHIEVED_GOAL) if is_next else ACHIEVED_GOAL
        _add(fields, key, as_tensor(goals, "the result of goal_fn"))


def concatenate(paths: Sequence[Arrays]) -> tuple[Arrays, np.ndarray]:
    """Concatenates episodes; returns also `[N]` bool, where episodes end.

    Raises:
        KeyError: an episode has other arrays than the first episode.
        ValueError: there are no episodes, or their shapes differ.
    """
    lengths = [len(next(iter(path.fields.values()))) for path in paths]
    ends = np.concatenate([np.arange(length) == length - 1 for length in lengths])
    first = paths[0]
    for number, path in enumerate(paths):
        if path.fields.keys() != first.fields.keys():
            raise KeyError(
                f"all episodes must have the arrays {[*first.fields]}, number {number} has "
                f"{[*path.fields]}."
            )
    fields = {key: np.concatenate([path.fields[key] for path in paths]) for key in first.fields}
    return Arrays(fields, first.observation_keys), ends
