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

__all__ = ["ROLE_OF", "Ends", "Entries", "as_dictionary", "as_flags", "ends_of", "sort_entries"]

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
_FLAGS = ("terminals", "timeouts", "dones", "masks")
_GOALS = {"achieved_goals": ACHIEVED_GOAL, "desired_goals": DESIRED_GOAL}

Values = Any
"""`[N, ...]` array or tensor."""


class Entries(NamedTuple):
    """The entries of a dataset, under the keys that transitions have."""

    fields: dict[NestedKey, Values]
    observations: list[NestedKey]
    """Keys of the observations; without those under "next", if the following row holds them."""
    actions: list[NestedKey]
    flags: dict[str, np.ndarray]
    """`[N]` bool flags that mark the ends of episodes, by role."""
    num_rows: int


def as_dictionary(name: str, data: Any) -> Mapping[str, Any]:
    """Returns a dictionary of arrays from a dictionary or a TensorDict."""
    found = arguments.mapping(name, data, "a dictionary of arrays")
    return data.to_dict(convert_tensors=False) if isinstance(data, TensorDictBase) else found


def sort_entries(data: Mapping[str, Any]) -> Entries:
    """Sorts arrays into roles by their names.

    Raises:
        KeyError: there are no observations or actions; the message lists what there is.
        TypeError: a name is not a string, or an entry is not an array of numbers.
        ValueError: two entries have the same role, or lengths differ.

    >>> [*sort_entries({"obs": np.zeros(2), "acts": np.ones(2), "infos/x": np.ones(2)}).fields]
    ['observation', 'action', ('infos', 'x')]
    """
    roles: dict[str, Any] = {}
    others: dict[NestedKey, Values] = {}
    for name, value in data.items():
        role = ROLE_OF.get(arguments.instance("a name of data", name, str, what="a string"))
        if role in roles:
            raise ValueError(f"data must hold its {role} once, got {name!r} too: leave one out.")
        if role is not None:
            roles[role] = value
        # D4RL's files describe their origin there.
        elif name.split("/")[0] != "metadata":
            others |= _leaves(tuple(name.split("/")), value)
    if missing := [role for role in ("observations", "actions") if role not in roles]:
        raise KeyError(f"data must have the entries {missing}; there are {sorted(data)}.")

    def taken(role: str, key: NestedKey) -> dict[NestedKey, Values]:
        value = roles.get(role, {})
        at_root = key == OBSERVATION and isinstance(value, Mapping)
        return _leaves(() if at_root else keys.key_path(key), value)

    seen, after = taken("observations", OBSERVATION), taken("next_observations", OBSERVATION)
    actions, rewards = taken("actions", keys.ACTION), taken("rewards", keys.REWARD)
    others = _without_goals(others, seen, after)
    if after and DESIRED_GOAL in seen:
        # A desired goal without a next value does not change within the episode.
        after.setdefault(DESIRED_GOAL, seen[DESIRED_GOAL])
    if after and after.keys() != seen.keys():
        raise KeyError(
            f"data must have the same observations now and next, got {[*seen]} and {[*after]}."
        )
    following = {keys.next_key(key): value for key, value in after.items()}
    fields = {**seen, **following, **actions, **others, **rewards}
    lengths = {key: len(value) for key, value in fields.items()}
    if len({*lengths.values()}) > 1:
        raise ValueError(f"data must have one row for each step, got {lengths}.")
    num_rows = next(iter(lengths.values()))
    flags = {role: as_flags(role, roles[role], num_rows) for role in _FLAGS if role in roles}
    return Entries(fields, [*seen], [*actions], flags, num_rows)


def _without_goals(
    others: dict[NestedKey, Any], seen: dict[NestedKey, Any], after: dict[NestedKey, Any]
) -> dict[NestedKey, Any]:
    """Moves goals to the observations, and entries named `next_...` under "next"."""
    rest = {}
    for key, value in others.items():
        name = key.removeprefix("next_") if isinstance(key, str) else key
        goal = _GOALS.get(name, name) if isinstance(name, str) else name
        if goal in (ACHIEVED_GOAL, DESIRED_GOAL):
            (seen if name == key else after)[goal] = value
        else:
            rest[key if name == key else ("next", name)] = value
    return rest


def _leaves(path: tuple[str, ...], value: Any) -> dict[NestedKey, Values]:
    return {
        unravel_key(found): _array(leaf, "/".join(found))
        for found, leaf in keys.leaves(value, "data", path)
    }


def _array(value: Any, name: str) -> Values:
    try:
        array: Any = value.detach() if isinstance(value, torch.Tensor) else np.asarray(value)
    except ValueError as error:
        raise TypeError(f"data[{name!r}] must be an array, got values of other shapes.") from error
    is_number = isinstance(array, torch.Tensor) or array.dtype.kind in "biufc"
    if not is_number or array.ndim == 0:
        got = arguments.shown(value)
        raise TypeError(f"data[{name!r}] must be numbers, one row for each step, got {got}.")
    return array


class Ends(NamedTuple):
    """How each of N rows ends its episode, `[N]` bool each."""

    terminated: np.ndarray
    truncated: np.ndarray
    leads_nowhere: np.ndarray
    """Whether the following row belongs to another episode, or there is none."""


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


def as_flags(name: str, value: Any, num_rows: int) -> np.ndarray:
    """Returns flags, bool or 0 and 1 of any dtype, as `[N]` bool.

    Raises:
        ValueError: there is not one for each of N rows, or one is neither 0 nor 1.
    """
    array = value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.size != num_rows:
        raise ValueError(
            f"{name} must be one flag for each of {num_rows} steps, got {array.shape}."
        )
    if array.dtype != bool and not ((array == 0) | (array == 1)).all():
        raise ValueError(f"{name} must be flags, 0 or 1, got {arguments.shown(value)}.")
    found: np.ndarray = array.reshape(-1) != 0
    return found
