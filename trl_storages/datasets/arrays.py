"""Storages from arrays, as in D4RL, OGBench, garage and others, which are known by their names.

The transitions are columns: a column is an array of N rows, and which row each of n transitions takes
from it. So a next observation may be that of the following row, and a desired goal the one that is
reached at the end of the episode.

Letters: N rows of the arrays, G goal size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, unravel_key
from torchrl.data import Composite, Unbounded

from trl_storages import keys, validation
from trl_storages.buffer import ReplayStorage
from trl_storages.keys import ACHIEVED_GOAL, ACTION, DESIRED_GOAL, OBSERVATION, REWARD, next_key
from trl_storages.presets import UniformReplayStorage
from trl_storages.transforms import GoalRelabel, goal_values
from trl_storages.writing.spaces import OUTCOME_FIELDS, as_field, as_tensor

__all__ = [
    "BLOCK",
    "Preset",
    "blocks_of",
    "columns_of",
    "entries_of",
    "filled",
    "from_arrays",
    "joined",
]

#: A class of ready-made storages, or a function with the same arguments.
Preset = Callable[..., ReplayStorage]
#: Returns the goals `[N, *G]` that observations `[N, ...]` have reached.
GoalOf = Callable[[Any], torch.Tensor]
#: Arrays under the keys that transitions have, with flags of ends by their roles; and the keys of the
#: observations, of which the following row holds those that are not under "next".
Entries = tuple[dict[NestedKey, np.ndarray], list[NestedKey]]
Columns = dict[NestedKey, tuple[np.ndarray, np.ndarray]]
#: Rows written at a time: few calls, and little extra memory.
BLOCK = 1 << 16

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
_FLAGS = ("terminals", "timeouts", "dones", "masks", "is_first", "is_last", "is_terminal")
# In names of entries, as they are or as plurals: the entry may mark ends of episodes.
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
    """Makes a storage from the transitions and episodes of a dataset.

    Entries are known by the names of D4RL, OGBench, Minari, garage and others: `observations` (an array
    or a dictionary), `actions`, `rewards`, `next_observations`, flags of ends (`terminals`, `timeouts`,
    `terminations`, `truncations`, `dones`, `masks`, and `is_first`, `is_last`, `is_terminal` of RLDS),
    goals (`achieved_goals`, `desired_goals`). All other entries with one row for each step are stored
    under their own names, `infos/qpos` as `("infos", "qpos")`, except D4RL's `metadata`. Flags whose
    name may mean an end, such as `episode_end`, raise unless an argument says what they are.

    Without `next_observations`, these are the observations of the following rows: the last row of an
    episode only supplies the next observation of the row before. A terminal last row stays, for its
    reward.

    `terminals` are terminal states, except in OGBench's data, where they mark the ends of episodes and
    `masks` the terminal states: such are data with `masks`, and data with neither rewards nor
    `timeouts`. Other data whose `terminals` are only ends need `ends=data.pop("terminals")`, also where
    rewards were added to OGBench's without its `masks`.

    `is_terminal`, without `next_observations`, marks the rows of terminal observations, as in RLDS: the
    row before leads there, and the row itself only supplies that observation. With `next_observations` it
    marks the transitions that lead to one.

    Args:
        data: name -> `[N, ...]` array or tensor on the CPU; or a list of such dictionaries, one for each
            episode, which may have one observation more than actions.
        ends: `[N]` bool, where episodes end, or the name of the entry that says so; None looks for the
            names above. For a single trajectory pass `np.zeros(N)`.
        preset: class of the storage, such as `HERReplayStorage`. It is called with specs of the data and
            `options`.
        goal_fn: returns the goals `[N, G]` that all observations `[N, ...]` (a tensor, or a dictionary of
            them) have reached, for hindsight over data without goals. The desired goal of a transition
            is then the last goal reached in its episode. Missing rewards are computed for that goal by
            the preset's `reward_fn`, and are NaN if the preset has none. Of data that have
            `achieved_goals` and `desired_goals` leave it out; `reward_fn` computes missing rewards there
            as well.
        float_dtype: converts float64 entries, as with `torch.float32`; None leaves them.
        progress: whether to show a bar of tqdm.
        **options: of the preset. `storage_size` defaults to the number of transitions; a smaller one
            keeps the last ones. Entries named in `info_keys` are stored as infos, `speed` as
            `("next", "speed")`; those in `extra_fields` under their names, with that dtype and shape.

    Returns:
        the storage.

    Raises:
        KeyError: an entry is missing; the message lists what there is.
        TypeError: an entry is not numeric.
        ValueError: lengths differ, an entry may mark ends, or `path` holds rows. Nothing is written then.

    >>> import numpy as np
    >>> data = {"observations": np.arange(12.0).reshape(6, 2), "actions": np.zeros((6, 1)),
    ...         "rewards": np.arange(6), "terminals": [0, 0, 1, 0, 0, 0], "timeouts": [0, 0, 0, 0, 0, 1]}
    >>> storage = from_arrays(data, float_dtype=torch.float32, batch_size=2)
    >>> storage.episodes.table()["length"].tolist()  # the last row says where row 4 led
    [3, 2]
    """
    infos = validation.keys("info_keys", options.get("info_keys", ()))
    if isinstance(data, Mapping):
        entries = entries_of(data, goal_fn, infos)
    else:
        entries, path_ends = joined([entries_of(path, goal_fn, infos) for path in data])
        ends = path_ends if ends is None else ends
    if isinstance(ends, str):
        name = unravel_key(tuple(_ROLES.get(ends, ends).split("/")))
        if name not in entries[0]:
            raise KeyError(f"ends must be flags or name an entry of {[*entries[0]]}, got {ends!r}.")
        ends = entries[0].pop(name)
    _check_names(entries, {*map(keys.info_key, infos), *(options.get("extra_fields") or ())}, ends)
    if REWARD not in entries[0] and goal_fn is None and options.get("reward_fn") is None:
        raise KeyError(
            f"data must have the entry 'rewards', there are {[*entries[0]]}; or goals (or goal_fn=) "
            "and a preset with reward_fn=, which computes them."
        )
    columns = columns_of(entries, ends, sets_goals=goal_fn is not None)
    num_rows = len(columns[keys.DONE][1])
    return filled(preset, blocks_of(columns, float_dtype), num_rows, options, progress=progress)


def _check_names(entries: Entries, named: Collection[NestedKey], ends: Any) -> None:
    """Raises a ValueError if flags that nothing explains have a name that may mean the end of an episode.

    Args:
        entries: the arrays.
        named: entries that are named as infos or further fields.
        ends: the flags that were passed.
    """
    fields, observations = entries
    known = {*_FLAGS, *named, *observations, *map(next_key, observations)}
    for key, values in fields.items():
        path = keys.key_path(key)
        if key in known or path[0] == ACTION or values.dtype != bool or values.size != len(values):
            continue
        is_passed = np.array_equal(values.reshape(-1), np.reshape(ends, -1))
        if _END_WORDS.search("/".join(path)) and not is_passed:
            raise ValueError(
                f"{key!r} holds a flag for each step, and its name may mean the end of an episode. "
                "For ends of either kind pass ends= with its name. For terminal states rename it "
                "terminals, for time limits timeouts. To store it name it in info_keys= or extra_fields=."
            )


def filled(
    preset: Preset,
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
    if (first := next(blocks, None)) is None:
        raise ValueError("a dataset must have steps, got none.")
    infos = {*map(keys.info_key, validation.keys("info_keys", options.get("info_keys", ())))}
    given = {**(options.get("extra_fields") or {})}
    fields = {key: (leaf.dtype, leaf.shape[1:]) for key, leaf in first.items(True, True)}
    twins = {*keys.shared_keys(fields)} - infos - given.keys()
    known = {*infos, *map(next_key, twins)}
    observations, actions, further = Composite(), Composite(), {}
    for key, (dtype, shape) in fields.items():
        if key in twins:
            observations[key] = Unbounded(shape, dtype=dtype)
        elif keys.key_path(key)[0] == ACTION:
            actions[key] = Unbounded(shape, dtype=dtype)
        elif key not in known and OUTCOME_FIELDS.get(key) != fields[key]:
            further[key] = dtype, shape
    options = {"storage_size": max(num_rows, 2), **options, "extra_fields": {**further, **given}}
    storage = preset(observations, actions, **options)
    num_stored, num_envs = len(storage), storage.episodes.num_envs
    if num_stored or num_envs > 1:
        storage.close(keep=num_stored > 0)
        raise ValueError(
            "the storage must be empty and of one environment for a dataset, and it holds "
            f"{num_stored} rows of {num_envs}."
        )
    relabel = next((part for part in storage.components() if isinstance(part, GoalRelabel)), None)
    every: Iterable[TensorDict] = chain([first], blocks)
    try:
        for steps in _shown(every, num_rows) if progress else every:
            for key, (dtype, shape) in given.items():
                values = validation.values(repr(key), steps[key])
                steps[key] = as_field(values, dtype, (len(steps), *shape), repr(key))
            if REWARD not in fields:
                steps[REWARD] = _rewards(relabel, steps)
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
        return torch.full((len(steps), 1), torch.nan, device="cpu")
    achieved, goals = (steps[next_key(key)] for key in (ACHIEVED_GOAL, DESIRED_GOAL))
    stored = steps.keys(True)
    infos = {key: steps[keys.stored_info(key, stored)] for key in relabel.info_keys}
    found = goal_values("reward_fn", relabel.reward_fn, achieved, goals, infos)
    return found.float().reshape(-1, 1)


def entries_of(
    data: Any, goal_fn: GoalOf | None = None, infos: Collection[NestedKey] = ()
) -> Entries:
    """Sorts the arrays of a dataset by their names.

    Args:
        data: the arrays.
        goal_fn: as in `from_arrays`.
        infos: names that are read as infos, whatever they mean elsewhere.

    Raises:
        KeyError: there are no observations or actions, or only some have next values.
        TypeError: an entry is not an array of numbers.
        ValueError: two entries have the same role, or lengths differ.

    >>> [*entries_of({"obs": np.zeros(2), "acts": np.ones(2), "infos/x": np.ones(2)})[0]]
    ['observation', 'action', ('infos', 'x')]
    """
    fields: dict[NestedKey, np.ndarray] = {}
    seen: list[NestedKey] = []
    after: list[NestedKey] = []

    def add(key: NestedKey, values: Any) -> None:
        keys.check_free(key, (*fields, keys.DONE, keys.TERMINATED, keys.TRUNCATED))
        if isinstance(values, tuple) and not all(np.isscalar(value) for value in values):
            raise TypeError(
                f"{key!r} must be an array or a dictionary of arrays, got a tuple, as of a Tuple space: "
                "give each part a name, {'0': first, '1': second}."
            )
        try:
            array = np.asarray(values.detach() if isinstance(values, torch.Tensor) else values)
        except ValueError as error:  # rows of several lengths
            raise ValueError(f"{key!r} must have rows of one shape: {error}") from error
        if not array.ndim or array.dtype.kind not in "biuf":
            got = validation.shown(values)
            raise TypeError(f"data must be numbers, a row for each step, got {key!r}: {got}.")
        fields[key] = array

    for name, value in validation.mapping("data", data, "a dictionary of arrays").items():
        base = name.removeprefix("next_").removesuffix("_next")
        role = base if name in infos else _ROLES.get(base, base)
        path = () if role == OBSERVATION and isinstance(value, Mapping) else tuple(role.split("/"))
        if base != name or role == "reward":
            path = ("next", *path)
        # D4RL's files describe their origin there.
        for found, leaf in keys.leaves(value, "data", path) if path[:1] != ("metadata",) else ():
            if isinstance(leaf, Mapping):  # an empty group
                continue
            key = unravel_key(found)
            key = keys.info_key(key) if key in infos else key
            add(key, leaf)
            if role in (OBSERVATION, ACHIEVED_GOAL, DESIRED_GOAL):
                (seen if base == name else after).append(key)
    if "valids" in fields:  # of OGBench's compact data
        raise ValueError("valids mark rows of next observations alone: pass next_observations.")
    actions = [key for key in fields if keys.key_path(key)[0] == ACTION]
    if not (seen and actions):
        raise KeyError(f"data must have the entries observations and actions, has {[*data]}.")
    num_rows = len(fields[actions[0]])
    for key in seen:
        if not after and len(fields[key]) == num_rows + 1:
            fields[next_key(key)], fields[key] = fields[key][1:], fields[key][:-1]
    if goal_fn is not None:
        for is_next in {False, next_key(seen[0]) in fields}:
            places = {key: next_key(key) if is_next else key for key in (*seen, ACHIEVED_GOAL)}
            tree = keys.nested(
                (keys.key_path(key), as_tensor(fields[places[key]], repr(key))) for key in seen
            )
            goals = goal_fn(tree[OBSERVATION] if seen == [OBSERVATION] else tree)
            add(places[ACHIEVED_GOAL], as_tensor(goals, "the result of goal_fn"))
        seen.append(ACHIEVED_GOAL)
    following = {next_key(key) for key in seen}
    if {*after} - following or following & {*fields} not in (following, set()):
        raise KeyError(f"data must have the same observations now and next, got {[*fields]}.")
    if wrong := {key: len(values) for key, values in fields.items() if len(values) != num_rows}:
        raise ValueError(f"data must have one row for each of {num_rows} steps, got {wrong}.")
    return fields, seen


def joined(paths: Sequence[Entries]) -> tuple[Entries, np.ndarray]:
    """Concatenates episodes; returns also `[N]` bool, where they end.

    Raises:
        KeyError: an episode has other entries than the first.
        ValueError: there are none, or their shapes differ.
    """
    lengths = [len(next(iter(fields.values()))) for fields, _ in paths]
    ends = np.concatenate([np.arange(length) == length - 1 for length in lengths])
    first, seen = paths[0]
    for number, (fields, _) in enumerate(paths):
        if fields.keys() != first.keys():
            raise KeyError(
                f"all episodes must have the entries {[*first]}, number {number} has {[*fields]}."
            )
    whole = {key: np.concatenate([fields[key] for fields, _ in paths]) for key in first}
    return (whole, seen), ends


def columns_of(entries: Entries, ends: Any = None, *, sets_goals: bool = False) -> Columns:
    """Returns the columns of transitions.

    If there are no next observations, these are the observations of the following rows. The last row of
    an episode then has none, and is dropped: the episode ends with the row before it. Only a terminal
    row is kept, for its reward, with its own observation as the next one, from which nothing bootstraps.

    Args:
        entries: the arrays.
        ends: `[N]` bool, where episodes end; None looks for flags.
        sets_goals: adds desired goals, the last that are reached in their episodes.

    Raises:
        ValueError: nothing tells where episodes end, or no transition is left.
    """
    fields, observations = {**entries[0]}, entries[1]
    num_rows = len(next(iter(fields.values())))
    flags = {role: _flags(role, fields.pop(role), num_rows) for role in _FLAGS if role in fields}
    if ends is not None:
        flags["ends"] = _flags("ends", ends, num_rows)
    if not flags:
        raise ValueError(
            "data must tell where episodes end (terminals, timeouts, dones...): pass ends=, a flag for "
            "each row; np.zeros(N) for a single trajectory."
        )
    at, follows = np.arange(num_rows), next_key(observations[0]) not in fields
    has_rewards = REWARD in fields
    terminated, truncated, leads_nowhere = _ends_of(flags, num_rows, has_rewards, follows)
    kept = ~leads_nowhere | terminated if follows else at >= 0
    # An episode that ends with a dropped row ends with the last kept one before it.
    before = np.maximum.accumulate(np.where(kept, at, -1))[~kept & (terminated | truncated)]
    before = before[before >= 0]
    truncated[before] |= ~terminated[before]
    rows = at[kept]
    if not len(rows):
        raise ValueError(f"data must hold a transition at least, got {num_rows} rows.")
    following = rows + (follows & ~leads_nowhere[rows])
    done = terminated | truncated
    fields |= {keys.DONE: done, keys.TERMINATED: terminated, keys.TRUNCATED: truncated}
    columns = {key: (values, rows) for key, values in fields.items()}
    for key in observations if follows else ():
        columns[next_key(key)] = fields[key], following
    if sets_goals:
        last = np.where(done[rows], np.arange(len(rows)), len(rows) - 1)
        reached, where = columns[next_key(ACHIEVED_GOAL)]
        goals = reached, where[np.minimum.accumulate(last[::-1])[::-1]]
        columns |= {DESIRED_GOAL: goals, next_key(DESIRED_GOAL): goals}
    return columns


def blocks_of(columns: Columns, float_dtype: torch.dtype | None = None) -> Iterator[TensorDict]:
    """Yields the transitions, some at a time."""
    num_rows, twins = len(next(iter(columns.values()))[1]), keys.shared_keys(columns)
    # As the spaces of scalars say it; infos stay as they are.
    spaces = {*OUTCOME_FIELDS, *twins, *map(next_key, twins)}
    for start in range(0, num_rows, BLOCK):
        steps = TensorDict({}, batch_size=[min(BLOCK, num_rows - start)])
        for key, (values, rows) in columns.items():
            taken = as_tensor(values[rows[start : start + BLOCK]], repr(key))
            if taken.dtype == torch.float64 and float_dtype is not None:
                taken = taken.to(float_dtype)
            is_scalar = taken.ndim == 1 and (key in spaces or keys.key_path(key)[0] == ACTION)
            if is_scalar and (
                key == REWARD or taken.is_floating_point() or taken.dtype == torch.bool
            ):
                taken = taken.unsqueeze(-1)
            steps.set(key, taken)
        yield steps


def _ends_of(
    flags: Mapping[str, np.ndarray], num_rows: int, has_rewards: bool, follows: bool
) -> Any:
    """Returns which rows are terminated, which truncated, and which lead to none of their episode.

    `terminals` are terminal states, except in OGBench's data (recognized by `masks`, or by having neither
    rewards nor `timeouts`), where they only mark the last rows of episodes. `dones` are ends of either
    kind if other flags mark terminal states, and terminal states if none do. `is_terminal` marks terminal
    observations: if `follows`, next observations are those of the following rows, and the row before
    leads to it.
    """
    ends, terminated = np.zeros((2, num_rows), bool)
    if "is_first" in flags:
        flags = {**flags, "is_first": np.append(flags["is_first"][1:], False)}
    timeouts = flags.get("timeouts", terminated)
    for name, flag in flags.items():
        ends = ends if name == "masks" else ends | flag
    if "masks" in flags:
        terminated = ~flags["masks"]
        # An episode may continue after its goal is reached.
        ends = ends if ends.any() else terminated
    elif "terminals" in flags:
        terminated = flags["terminals"] if has_rewards or "timeouts" in flags else terminated
    elif "is_terminal" in flags:
        terminated = flags["is_terminal"]
        if follows:
            terminated = np.append(terminated[1:], False) & ~ends
    elif "dones" in flags:
        terminated = flags["dones"] & ~timeouts
    is_last = np.arange(num_rows) == num_rows - 1
    return terminated, timeouts | (ends & ~terminated), ends | is_last


def _flags(name: str, value: Any, num_rows: int) -> np.ndarray:
    """Returns flags, bool or 0 and 1 of any dtype, as `[N]` bool."""
    array = np.asarray(value)
    if array.size != num_rows or not ((array == 0) | (array == 1)).all():
        raise ValueError(
            f"{name} must be 0 or 1 for each of {num_rows} steps, got {validation.shown(value)}."
        )
    return array.reshape(-1) != 0
