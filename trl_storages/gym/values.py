"""Finds actions and rewards that have the right dtype and shape but invalid values.

Letters: E environments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import NestedKey, unravel_key
from torchrl.data import Categorical, Composite, MultiCategorical, TensorSpec

from trl_storages.callers import warn_caller
from trl_storages.keys import ACTION, REWARD, key_path, leaves

__all__ = ["Choices", "ValueCheck", "choices_of", "strange_action"]


class Choices(NamedTuple):
    """The values of a discrete action: `number` of them from `first` on, each a number or `[*shape]`."""

    first: Any
    number: Any


def choices_of(action_space: spaces.Space[Any] | TensorSpec) -> dict[NestedKey, Choices]:
    """Returns the choices of the discrete actions of a space or spec, by key.

    >>> choices_of(spaces.Discrete(3, start=1))["action"]
    Choices(first=1, number=3)
    """
    found: list[tuple[NestedKey, Any]]
    if isinstance(action_space, Composite):
        found = [*action_space.items(include_nested=True, leaves_only=True)]
    elif isinstance(action_space, TensorSpec):
        found = [(ACTION, action_space)]
    else:
        found = [*leaves(action_space, "the action space", key_path(ACTION))]
    choices: dict[NestedKey, Choices] = {}
    for key, space in found:
        match space:
            case spaces.Discrete():
                choices[unravel_key(key)] = Choices(int(space.start), int(space.n))
            case spaces.MultiDiscrete():
                choices[unravel_key(key)] = Choices(space.start, space.nvec)
            # Before Categorical, its base class.
            case MultiCategorical():
                choices[unravel_key(key)] = Choices(0, space.nvec.numpy())
            case Categorical():
                choices[unravel_key(key)] = Choices(0, space.n)
    return choices


def strange_action(key: NestedKey, choices: Choices, taken: NDArray[Any]) -> tuple[int, str] | None:
    """Returns the first of the actions `[n, *shape]` that is outside its space, and what is wrong.

    >>> strange_action("action", Choices(0, 2), np.array([0, 1, 5]))
    (2, 'actions must be from 0 to 1, got 5')
    """
    first, number = choices
    strange = np.argwhere((taken < first) | (taken >= first + number))
    if not len(strange):
        return None
    row, place = int(strange[0, 0]), tuple(map(int, strange[0, 1:]))
    low, high = _limits(choices)[np.ravel_multi_index(place, taken.shape[1:])]
    label = "".join(f"[{name!r}]" for name in key_path(key)[1:])
    return row, f"actions{label} must be from {low} to {high}, got {taken[row][place]}"


class ValueCheck:
    """Checks the actions and rewards of each step in the arrays that gather it.

    On the host only, as reading values on a device would synchronize.

    Args:
        columns: key -> `[E, *shape]` arrays that gather each step.
        choices: of the discrete actions.
    """

    def __init__(
        self, columns: Mapping[NestedKey, NDArray[Any]], choices: Mapping[NestedKey, Choices]
    ) -> None:
        self._columns, self._choices = columns, choices
        self._actions = [
            (each, *limits)
            for key, of_key in choices.items()
            for each, limits in zip(_each(columns[key]), _limits(of_key), strict=True)
        ]
        rewards = columns[REWARD]
        self._rewards = _each(rewards) if rewards.dtype.kind == "f" else []
        self._has_warned = False

    def look(self, lanes: Sequence[int]) -> None:
        """Checks a step, and warns once of rewards that are not finite.

        Args:
            lanes: the environments that made a transition.

        Raises:
            ValueError: an action is not in its space.
        """
        # For the few numbers of a step, Python is faster than NumPy.
        for action, low, high in self._actions:
            for taken in action.tolist():
                if not low <= taken <= high:
                    self._refuse(lanes)
        for reward in self._rewards:
            number = sum(reward.tolist())
            if number - number != 0:
                self._warn(lanes)

    def _refuse(self, lanes: Sequence[int]) -> None:
        """Raises if an environment that made a transition took an action outside its space."""
        for key, choices in self._choices.items():
            if strange := strange_action(key, choices, self._columns[key][lanes]):
                lane, wrong = strange
                raise ValueError(
                    f"{wrong} in environment {lanes[lane]}; pass the action that `step` was given, or "
                    "make the storage for a space that has it"
                )

    def _warn(self, lanes: Sequence[int]) -> None:
        rewards = self._columns[REWARD][lanes]
        strange = np.argwhere(~np.isfinite(rewards))
        if len(strange) and not self._has_warned:
            self._has_warned, lane = True, int(strange[0, 0])
            got = rewards[tuple(strange[0])]
            warn_caller(
                f"rewards must be finite, got {got} of environment {lanes[lane]}: a batch that has such "
                "a row spoils the networks that learn from it. It is stored as it is, and this is said "
                "once."
            )


def _each(column: NDArray[Any]) -> list[NDArray[Any]]:
    """Returns a view `[E]` for each element of a column `[E, *shape]`."""
    places = np.ndindex(*column.shape[1:])
    return [np.moveaxis(column, 0, -1)[place] for place in places]


def _limits(choices: Choices) -> list[tuple[int, int]]:
    """Returns the first and the last choice for each element of an action."""
    first, number = np.broadcast_arrays(*choices)
    return [*zip(first.ravel().tolist(), (first + number - 1).ravel().tolist(), strict=True)]
