"""One step of each environment of a plain loop, on its way into a storage.

Letters: E environments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages import keys
from trl_storages.entries.fields import Field
from trl_storages.entries.layout import Layout
from trl_storages.writing.spaces import (
    NUMPY_TO_TORCH,
    OUTCOME_FIELDS,
    TORCH_TO_NUMPY,
    Choices,
    as_field,
)
from trl_storages.writing.staging import Staging

__all__ = ["StagedStep"]

# Tuples, because a dtype is found in a tuple by identity, without its slow hash.
_REALS = tuple(dtype for dtype in NUMPY_TO_TORCH if dtype.kind in "biuf")
_FLOATS: frozenset[type] = frozenset({float, np.float64, np.float32})
_NUMBERS: dict[Any, frozenset[type]] = {
    np.dtype(bool): frozenset({bool, np.bool_}),
    np.dtype(np.int64): frozenset({int, np.int64}),
}
# An observation that is no dictionary has this key.
_SINGLE_OBSERVATION = {keys.OBSERVATION: keys.OBSERVATION}


class StagedStep(Staging):
    """The values of one step of each environment.

    Args:
        layout: of the transitions.
        num_envs: E.
        is_vector: whether values have the leading dimension E.
        info_keys: keys of the fields that are read from the infos.
        choices: values of discrete actions, from `choices_of`; other values raise.

    Raises:
        KeyError: the layout has fields that a step does not hold.
    """

    def __init__(
        self,
        layout: Layout,
        num_envs: int,
        is_vector: bool,
        info_keys: Collection[NestedKey],
        choices: Mapping[NestedKey, Choices],
    ) -> None:
        super().__init__(layout, [num_envs])
        self.is_vector = is_vector
        # Keys with a counterpart under `next` are observations; the rest, without infos, are actions.
        root_keys = [
            key for key in self.views if keys.key_path(key)[0] != "next" and key not in info_keys
        ]
        self._observations = _tree_of(key for key in root_keys if keys.next_key(key) in self.views)
        self._observation_keys = [key for _, key in keys.leaves(self._observations, "")]
        actions = _tree_of(key for key in root_keys if key not in self._observation_keys)
        # The field "action" is the argument itself; a TorchRL spec may name its actions otherwise.
        self._actions = actions["action"] if [*actions] == ["action"] else actions
        names: dict[NestedKey, str] = {
            keys.TERMINATED: "terminateds",
            keys.TRUNCATED: "truncateds",
            keys.REWARD: "rewards",
            **{key: f"observations {key!r}" for key in self._observation_keys},
            **{key: f"actions {key!r}" for _, key in keys.leaves(actions, "")},
            **{keys.next_key(key): f"next {key!r}" for key in self._observation_keys},
        }
        if missing := self.views.keys() - {keys.DONE, *names, *info_keys}:
            raise KeyError(f"a step of a loop does not hold the fields {[*missing]}: use extend().")
        self._targets = [self._target(key, name) for key, name in names.items()]
        self._next_targets = self._targets[len(names) - len(self._observation_keys) :]
        self._info_targets = {key: self._target(key, f"infos {key!r}") for key in info_keys}
        self._flags = [
            self.views[key][:, 0].numpy() for key in (keys.TERMINATED, keys.TRUNCATED, keys.DONE)
        ]
        self._choices = [
            (key, self.views[key].numpy(), *limits)
            for key, limits in choices.items()
            if key in self.views
        ]

    def _target(self, key: NestedKey, name: str) -> _FieldTarget:
        return _FieldTarget(self.layout.by_key[key], self.views[key], name, self.is_vector)

    def put(self, step: Sequence[Any]) -> None:
        """Copies the values of a step, without the infos.

        Args:
            step: observations, actions, rewards, terminateds, truncateds, infos, next observations.

        Raises:
            KeyError, TypeError, ValueError: a value does not fit, or an action is not in its space.
        """
        observations, actions, rewards, terminateds, truncateds, _, next_observations = step
        values = [
            *(terminateds, truncateds, rewards),
            *_values_of(self._observations, observations, "observations"),
            *_values_of(self._actions, actions, "actions"),
            *_values_of(self._observations, next_observations, "next_observations"),
        ]
        for target, value in zip(self._targets, values, strict=True):
            kind = type(value)
            if (
                kind is np.ndarray and value.shape == target.shape and value.dtype in target.dtypes
            ) or kind in target.numbers:
                target.view[...] = value
            else:
                target.set(target.all_envs, value)
        terminated, truncated, done = self._flags
        np.logical_or(terminated, truncated, out=self.done)
        done[...] = self.done
        for key, chosen, low, end in self._choices:
            if chosen.size == 1:
                is_valid = low <= chosen.item() < end
            else:
                is_valid = ((chosen >= low) & (chosen < end)).all()
            if not is_valid:
                raise ValueError(
                    f"{key!r} must be from {low} up to {end} (exclusive), got {chosen.tolist()}: "
                    "pass the action that `step` was given."
                )

    def put_final(self, lane: int, observation: Any) -> None:
        """Replaces the next observation of an environment with the last observation of its episode."""
        values = _values_of(self._observations, observation, "infos['final_obs']")
        for target, value in zip(self._next_targets, values, strict=True):
            target.set(lane, value)

    def put_info(self, key: NestedKey, value: Any) -> None:
        """Copies an info of all environments."""
        target = self._info_targets[key]
        target.set(target.all_envs, value)

    def _observations_in(self, source: Any) -> Iterable[tuple[NestedKey, Any, Any]]:
        before, after = (_values_of(self._observations, source[i], "") for i in (0, -1))
        return zip(self._observation_keys, before, after, strict=True)


class _FieldTarget:
    """The view that the values of a field are copied to.

    Args:
        field: the field.
        frames: `[E, *shape]` view of the field.
        name: of the values, for messages.
        is_vector: whether values have the leading dimension E.

    Attributes:
        all_envs: index of all environments; of the single one if values have no leading dimension.
        view: array to which values of `shape` and one of `dtypes`, and plain `numbers`, are copied
            without a conversion.
    """

    def __init__(self, field: Field, frames: torch.Tensor, name: str, is_vector: bool) -> None:
        self._field, self._frames, self._name = field, frames, name
        # Rewards may be rounded, as their dtype seldom is that of the field.
        self._is_rounded = field.key == keys.REWARD and field.dtype.is_floating_point
        self.all_envs: Any = slice(None) if is_vector else 0
        self.view: Any = frames[self.all_envs]
        self.dtypes: tuple[Any, ...] = ()
        self.numbers: frozenset[type] = frozenset()
        # Dtypes that NumPy lacks, and stacks, are always converted.
        if field.dtype in TORCH_TO_NUMPY and not field.stack:
            is_scalar = field.key in OUTCOME_FIELDS and field.shape == (1,)
            array = frames.numpy()
            self.view = array[self.all_envs, ..., 0] if is_scalar else array[self.all_envs, ...]
            dtype = self.view.dtype
            self.dtypes = _REALS if self._is_rounded else (dtype,)
            if not self.view.shape:
                self.numbers = _FLOATS if self._is_rounded else _NUMBERS.get(dtype, self.numbers)
        self.shape = tuple(self.view.shape)

    def set(self, envs: Any, value: Any) -> None:
        """Copies any value that the field can hold.

        Args:
            envs: index of one environment, or a slice of environments.
            value: the value.

        Raises:
            TypeError, ValueError: the field can't hold the value.
        """
        field, target = self._field, self._frames[envs]
        shape = field.shape if isinstance(envs, int) else (len(target), *field.shape)
        values = as_field(value, field.dtype, shape, self._name, is_rounded=self._is_rounded)
        target.copy_(field.stack.frames(values, field.shape) if field.stack else values)


def _tree_of(fields: Iterable[NestedKey]) -> dict[str, Any]:
    """Returns keys as nested dictionaries that end in the keys."""
    return keys.nested((keys.key_path(key), key) for key in fields)


def _values_of(tree: Any, values: Any, argument: str) -> list[Any]:
    """Returns the values of nested dictionaries with exactly the names of a tree from `_tree_of`.

    Raises:
        KeyError: a value is missing.
        TypeError: a value is not a dictionary where the tree has one.
        ValueError: there are values that the tree lacks.
    """
    if type(tree) is not dict:
        return [values]
    # `type` comes first: an isinstance check against Mapping takes longer than all else here.
    if type(values) is not dict and not isinstance(values, Mapping):
        if tree == _SINGLE_OBSERVATION:
            return [values]
        raise TypeError(
            f"{argument} must be a dictionary of {[*tree]}, got {type(values).__name__}."
        )
    if tree.keys() != values.keys():
        kind = KeyError if tree.keys() - values.keys() else ValueError
        raise kind(f"{argument} must have the keys {[*tree]}, got {sorted(map(str, values))}.")
    leaves: list[Any] = []
    for name, branch in tree.items():
        if type(branch) is dict:
            leaves += _values_of(branch, values[name], argument)
        else:
            leaves.append(values[name])
    return leaves
