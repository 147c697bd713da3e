"""The names of datasets for the entries of a transition, and how their flags end episodes.

Letters: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from trl_storages import arguments, keys
from trl_storages.keys import ACHIEVED_GOAL, DESIRED_GOAL, OBSERVATION

__all__ = [
    "ROLE_OF",
    "Ends",
    "Entries",
    "as_dictionary",
    "as_flags",
    "ends_of",
    "last_rows",
    "may_be_flags",
    "sort_entries",
    "whole_rows",
]

# Role -> names of D4RL, OGBench, Minari, garage, Stable-Baselines3, tianshou, imitation, jaxrl, TorchRL.
_ROLES: dict[str, tuple[str, ...]] = {
    "observations": ("observations", "observation", "obs"),
    "next_observations": ("next_observations", "next_observation", "next_obs", "obs_next"),
    "actions": ("actions", "action", "acts", "act"),
    "rewards": ("rewards", "reward", "rews", "rew"),
    "terminals": ("terminals", "terminal", "terminations", "terminateds", "terminated"),
    "timeouts": ("timeouts", "timeout", "truncations", "truncateds", "truncated"),
    "dones": ("dones", "done", "dones_float"),
    "masks": ("masks",),
}
#: Name -> role.
ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
# TorchRL keeps the outcome of a step under "next", its flags included.
ROLE_OF |= {
    f"next{between}{name}": role
    for role in ("terminals", "timeouts", "dones")
    for name in _ROLES[role]
    for between in "_/"
}
# Roles whose entries are not flags.
_VALUES = ("observations", "next_observations", "actions", "rewards")
# The roles that must be present.
_NEEDED = ("observations", "actions")
_GOALS = {"achieved_goals": ACHIEVED_GOAL, "desired_goals": DESIRED_GOAL}
# D4RL's files describe their origin there.
_LEFT_OUT = ("metadata",)

Values = Any
"""`[N, ...]` array or tensor."""


class Entries(NamedTuple):
    """The entries of a dataset, under the keys that transitions have."""

    fields: list[tuple[NestedKey, Values]]
    """In pairs, as two of them may have the same key."""
    observations: list[NestedKey]
    """Keys of the observations; without those under "next", if the following row holds them."""
    actions: list[NestedKey]
    flags: dict[str, Values]
    """Flags that mark the ends of episodes, by role."""
    names: dict[str, str]
    """The name that the data use for each role present."""


def as_dictionary(argument: str, data: Any) -> Mapping[str, Any]:
    """Returns a dictionary of arrays from a dictionary or a TensorDict.

    Raises:
        TypeError: `data` is neither, or holds transitions in TorchRL's form.
    """
    found = arguments.mapping(argument, data, "a dictionary of arrays")
    if isinstance(data, TensorDictBase):
        found = data.to_dict(convert_tensors=False)
    after = found.get("next")
    if isinstance(after, Mapping) and any(name in ROLE_OF for name in after):
        raise TypeError(
            f"{argument} must be a dictionary of arrays, got one with {sorted(map(str, after))} "
            "under 'next', as TorchRL's transitions are: write such a TensorDict by extend()."
        )
    return found


def sort_entries(data: Mapping[str, Any], argument: str) -> Entries:
    """Sorts entries into roles by their names.

    Args:
        data: name -> array, or a dictionary of them.
        argument: the name of the data in messages.

    Raises:
        KeyError: there are no observations or actions; the message lists what there is.
        TypeError: a name is not a string, or an entry is not an array of numbers.
        ValueError: two entries have the same role.

    >>> entries = sort_entries({"obs": np.zeros(2), "acts": np.ones(2), "infos/x": np.ones(2)}, "data")
    >>> [key for key, _ in entries.fields]
    ['observation', 'action', ('infos', 'x')]
    """
    if wrong := [name for name in data if not isinstance(name, str)]:
        raise TypeError(f"{argument} must have names that are strings, got {wrong[0]!r}.")
    roles: dict[str, Any] = {}
    names: dict[str, str] = {}
    others: dict[NestedKey, Any] = {}
    for name, value in data.items():
        role = ROLE_OF.get(name)
        if role is None:
            if name.split("/")[0] not in _LEFT_OUT:
                others |= _leaves(tuple(name.split("/")), value, f"{argument}[{name!r}]")
            continue
        if role in names:
            raise ValueError(
                f"{argument} must hold its {role} once, got {names[role]!r} and {name!r}: leave one out."
            )
        names[role] = name
        roles[role] = value
    if missing := [_ROLES[role][0] for role in _NEEDED if role not in roles]:
        raise KeyError(
            f"{argument} must have the entries {missing}; there are {sorted(map(str, data))}."
        )

    def taken(role: str, key: NestedKey) -> dict[NestedKey, Values]:
        value = roles.pop(role, {})
        path = () if key == OBSERVATION and isinstance(value, Mapping) else keys.key_path(key)
        return _leaves(path, value, f"{argument}[{names.get(role)!r}]")

    seen, after = taken("observations", OBSERVATION), taken("next_observations", OBSERVATION)
    actions, rewards = taken("actions", keys.ACTION), taken("rewards", keys.REWARD)
    flags = {role: _array(value, f"{argument}[{names[role]!r}]") for role, value in roles.items()}
    _sort_goals(others, seen, after)
    if after and DESIRED_GOAL in seen:
        # A desired goal without a next value does not change within the episode.
        after.setdefault(DESIRED_GOAL, seen[DESIRED_GOAL])
    if after and (missing := [*after.keys() ^ seen.keys()]):
        raise KeyError(
            f"{argument} must have the same observations now and next, or none that are next, and "
            f"{missing} are missing in one of them."
        )
    following = {keys.next_key(key): value for key, value in after.items()}
    groups = seen, following, actions, others, rewards
    fields = [pair for group in groups for pair in group.items()]
    return Entries(fields, [*seen], [*actions], flags, names)


def may_be_flags(data: Mapping[str, Any]) -> list[str]:
    """Returns the names of all entries that are not known to be something other than flags."""
    return sorted((name for name in data if ROLE_OF.get(name) not in _VALUES), key=str)


def _sort_goals(
    others: dict[NestedKey, Any], observations: dict[NestedKey, Any], after: dict[NestedKey, Any]
) -> None:
    """Moves goals to the observations, and entries named `next_...` under "next"."""
    for key in list(others):
        if not isinstance(key, str):
            continue
        is_next, name = key.startswith("next_"), key.removeprefix("next_")
        goal = _GOALS.get(name, name)
        if goal in (ACHIEVED_GOAL, DESIRED_GOAL):
            (after if is_next else observations)[goal] = others.pop(key)
        elif is_next:
            others["next", name] = others.pop(key)


def _leaves(path: tuple[str, ...], value: Any, label: str) -> dict[NestedKey, Values]:
    return {
        unravel_key(found): _array(
            leaf, label + "".join(f"[{name!r}]" for name in found[len(path) :])
        )
        for found, leaf in keys.leaves(value, label, path)
    }


def _array(value: Any, label: str) -> Values:
    if isinstance(value, torch.Tensor):
        array: Any = value.detach()
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise TypeError(f"{label} must be an array, got values of unequal shapes.") from error
        if array.dtype.kind not in "biufc":
            array = None
    if array is None or array.ndim == 0:
        raise TypeError(
            f"{label} must be numbers, one row for each step, got {arguments.shown(value)}."
        )
    return array


class Ends(NamedTuple):
    """How each of N rows ends its episode, `[N]` bool each."""

    terminated: np.ndarray
    truncated: np.ndarray
    leads_nowhere: np.ndarray
    """Whether the following row belongs to another episode, or there is none."""

    @property
    def done(self) -> np.ndarray:
        """Whether the episode ends with the row."""
        found: np.ndarray = self.terminated | self.truncated
        return found


def ends_of(
    flags: Mapping[str, np.ndarray], ends: np.ndarray | None, num_rows: int, *, has_rewards: bool
) -> Ends:
    """Combines flags by their role.

    `terminals` are terminal states, except in OGBench's data (recognized by `masks`, or by having neither
    rewards nor `timeouts`), where they only mark the last rows of episodes. `dones` are
    ends of either kind if other flags mark terminal states, and terminal states if none do.

    Args:
        flags: role -> `[N]` bool.
        ends: `[N]` bool, further ends; or None.
        num_rows: N.
        has_rewards: whether the data hold rewards.
    """
    nothing = np.zeros(num_rows, bool)
    terminals, timeouts = flags.get("terminals", nothing), flags.get("timeouts", nothing)
    dones, masks = flags.get("dones", nothing), flags.get("masks")
    is_ogbench = masks is not None or not (has_rewards or "timeouts" in flags)
    marked, terminated = nothing if ends is None else ends, nothing
    if is_ogbench:
        marked = marked | terminals
    else:
        terminated = terminals
    if "terminals" in flags or masks is not None:
        marked = marked | dones
    else:
        terminated = terminated | (dones & ~timeouts)
    leads_nowhere = marked | terminated | timeouts
    if masks is not None:
        # An episode may continue after its goal is reached.
        leads_nowhere = leads_nowhere if leads_nowhere.any() else ~masks
        terminated = terminated | ~masks
    leads_nowhere = leads_nowhere.copy()
    leads_nowhere[-1:] = True
    return Ends(terminated, timeouts | (marked & ~terminated), leads_nowhere)


def whole_rows(ends: Ends, kept: np.ndarray) -> tuple[np.ndarray, Ends]:
    """Drops rows; an episode that ends with a dropped row ends with the last kept row before it.

    Args:
        ends: of N rows.
        kept: `[N]` bool.

    Returns:
        int64 numbers of the kept rows, and the ends of all N rows.
    """
    at = np.arange(len(kept))
    before = np.maximum.accumulate(np.where(kept, at, -1))[~kept & ends.done]
    before = before[before >= 0]
    truncated = ends.truncated.copy()
    truncated[before] |= ~ends.terminated[before]
    return at[kept], ends._replace(truncated=truncated)


def last_rows(done: np.ndarray) -> np.ndarray:
    """Returns the number of the last row of each row's episode, `[n]` int64.

    >>> last_rows(np.array([False, True, False, False])).tolist()
    [1, 1, 3, 3]
    """
    at = np.arange(len(done))
    last = np.where(done, at, len(done) - 1)
    return np.minimum.accumulate(last[::-1])[::-1]


def as_flags(name: str, value: Any, num_rows: int) -> np.ndarray:
    """Returns flags, bool or 0 and 1 of any dtype, as `[N]` bool.

    Raises:
        ValueError: there is not one for each of N rows, or one is neither 0 nor 1.
    """
    array = value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.size != num_rows:
        joined = ""
        if array.ndim > 1:
            joined = " Join the episodes of every entry: entry.reshape(-1, *entry.shape[2:])."
        raise ValueError(
            f"{name} must be one flag for each of {num_rows} steps, got the shape {list(array.shape)}."
            f"{joined}"
        )
    if array.dtype != bool and (strange := array[(array != 0) & (array != 1)]).size:
        raise ValueError(f"{name} must be flags, 0 or 1, got {strange.flat[0]}.")
    found: np.ndarray = array.reshape(-1) != 0
    return found
