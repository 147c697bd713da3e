"""What datasets call the entries of a transition.

Letters: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, unravel_key

from trl_storages.keys import ACHIEVED_GOAL, ACTION, DESIRED_GOAL, OBSERVATION, leaves

__all__ = ["ROLE_OF", "Entries", "sort_entries"]

# Role -> names of D4RL, OGBench, Minari, garage, Stable-Baselines3, imitation, jaxrl and TorchRL.
_ROLES: dict[str, tuple[str, ...]] = {
    "observations": ("observations", "observation", "obs"),
    "next_observations": ("next_observations", "next_observation", "next_obs"),
    "actions": ("actions", "action", "acts"),
    "rewards": ("rewards", "reward", "rews"),
    "terminals": ("terminals", "terminal", "terminations", "terminateds", "terminated"),
    "timeouts": ("timeouts", "timeout", "truncations", "truncateds", "truncated"),
    "dones": ("dones", "done", "dones_float"),
    "masks": ("masks",),
    "valids": ("valids",),
    "step_types": ("step_types",),
}
#: Name -> role.
ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
# Without the needed ones nothing can be stored.
_NEEDED = ("observations", "actions")
_GOALS = {"achieved_goals": ACHIEVED_GOAL, "desired_goals": DESIRED_GOAL}
# D4RL's files describe there how they came about.
_LEFT_OUT = ("metadata",)

Values = Any
"""`[N, ...]` array or tensor."""


class Entries(NamedTuple):
    """The entries of a dataset, by what they are for."""

    observations: dict[NestedKey, Values]
    next_observations: dict[NestedKey, Values]
    """By the key of the observation; empty where the next row holds them."""
    actions: dict[NestedKey, Values]
    flags: dict[str, Values]
    """Rewards and all that says where episodes end, by role."""
    others: dict[NestedKey, Values]
    names: dict[str, str]
    """What the data call each role that is there."""


def sort_entries(data: Mapping[str, Any], argument: str) -> Entries:
    """Sorts entries by their names.

    Args:
        data: name -> array, or a dictionary of them.
        argument: what messages call the data.

    Raises:
        KeyError: there are no observations or actions; the message lists what there is.
        TypeError: a name is not a string, or an entry no array of numbers.
        ValueError: two entries are for the same.

    >>> entries = sort_entries({"obs": np.zeros(2), "acts": np.ones(2), "infos/x": np.ones(2)}, "data")
    >>> list(entries.observations), list(entries.actions), list(entries.others)
    (['observation'], ['action'], [('infos', 'x')])
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
    observations = _observations(
        roles.pop("observations"), f"{argument}[{names['observations']!r}]"
    )
    after: dict[NestedKey, Any] = {}
    if (value := roles.pop("next_observations", None)) is not None:
        after = _observations(value, f"{argument}[{names['next_observations']!r}]")
        if {*after} - {*observations}:
            raise KeyError(
                f"{argument} must have the same observations now and next, got {list(observations)} "
                f"and {list(after)}."
            )
    label = f"{argument}[{names['actions']!r}]"
    actions = _leaves((ACTION,), roles.pop("actions"), label)
    if "step_types" in roles:
        # Members of an enumeration, which are integers.
        roles["step_types"] = [int(value) for value in roles["step_types"]]
    flags = {role: _array(value, f"{argument}[{names[role]!r}]") for role, value in roles.items()}
    _sort_goals(others, observations, after)
    return Entries(observations, after, actions, flags, others, names)


def _observations(value: Any, label: str) -> dict[NestedKey, Values]:
    return _leaves(() if isinstance(value, Mapping) else (OBSERVATION,), value, label)


def _sort_goals(
    others: dict[NestedKey, Any], observations: dict[NestedKey, Any], after: dict[NestedKey, Any]
) -> None:
    """Moves goals to the observations, and puts what is called `next_...` under "next"."""
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
        for found, leaf in leaves(value, label, path)
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
            f"{label} must be an array of numbers with one row for each step, got {_shown(value)}."
        )
    return array


def _shown(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return f"{type(value).__name__}" + ("" if dtype is None else f" of {dtype}")
