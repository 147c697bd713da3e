"""One step of each environment on its way into a storage: a block of rows, and views of its fields.

Letters: E environments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages import keys
from trl_storages.streams.layout import Block, Layout
from trl_storages.writing.fields import NUMPY_TO_TORCH, TORCH_TO_NUMPY, Choices, as_field

__all__ = ["Staging"]

#: The names of nested dictionaries in the order of their values; None at the end of a path.
Tree = dict[str, Any] | None
_OUTCOMES = (keys.REWARD, keys.TERMINATED, keys.TRUNCATED)
_REALS = frozenset(dtype for dtype in NUMPY_TO_TORCH if dtype.kind in "biuf")
_FLOATS: frozenset[type] = frozenset({float, np.float64, np.float32})
_NUMBERS: dict[Any, frozenset[type]] = {
    np.dtype(bool): frozenset({bool, np.bool_}),
    np.dtype(np.int64): frozenset({int, np.int64}),
}


class Staging:
    """Takes the values of a step, each through a view that is made once.

    Args:
        keys_of_infos: fields that come from the infos.
        layout: of the rows.
        num_envs: E.
        is_vector: whether values have the leading dimension.
        choices: of discrete actions; others are refused.
    """

    def __init__(
        self,
        keys_of_infos: Collection[NestedKey],
        layout: Layout,
        num_envs: int,
        is_vector: bool,
        choices: Mapping[NestedKey, Choices],
    ) -> None:
        self.layout, self.is_vector = layout, is_vector
        self._words = np.zeros((num_envs, layout.row_words), np.int64)
        rows = torch.from_numpy(self._words)
        views = {field.key: _view(layout, field.key, rows) for field in layout.fields}

        def place(key: NestedKey, name: str) -> _Place:
            return _Place(layout.field(key), views[key], name, is_vector)

        # Keys that also exist under `next` are observations; the rest, infos aside, are actions.
        here = [
            key for key in views if keys.key_path(key)[0] != "next" and key not in keys_of_infos
        ]
        seen = [key for key in here if keys.next_key(key) in views]
        acted = [key for key in here if key not in seen]
        self._observations, seen = _tree(seen)
        actions, acted = _tree(acted)
        # "action" is the argument itself; a TorchRL spec may name its actions otherwise.
        self._actions: Tree = actions["action"] if [*actions] == ["action"] else actions
        self._next_places = [place(keys.next_key(key), f"next {key!r}") for key in seen]
        self._places = [
            place(keys.TERMINATED, "terminateds"),
            place(keys.TRUNCATED, "truncateds"),
            place(keys.REWARD, "rewards"),
            *(place(key, f"observations {key!r}") for key in seen),
            *(place(key, f"actions {key!r}") for key in acted),
            *self._next_places,
        ]
        self._infos = {key: place(key, f"infos {key!r}") for key in keys_of_infos}
        known = {keys.DONE, *self._infos, *(each.key for each in self._places)}
        if lost := [key for key in views if key not in known]:
            raise KeyError(f"the rows hold {lost}, which a step of a loop does not: use extend().")
        self._flags = views[keys.TERMINATED][:, 0], views[keys.TRUNCATED][:, 0]
        self._stored_done = views[keys.DONE][:, 0]
        #: `[E]` which episodes end with this step.
        self.done = np.zeros(num_envs, bool)
        self._choices = [
            (key, views[key], it.first, it.first + it.number)
            for key, it in choices.items()
            if key in views
        ]
        self._lanes, self._offsets = np.arange(num_envs), np.arange(num_envs + 1)
        self._cut = np.zeros(num_envs, bool)

    def put(self, step: Sequence[Any], lanes: np.ndarray | None) -> None:
        """Takes the seven values of a step but its infos.

        Args:
            step: observations, actions, rewards, terminateds, truncateds, infos, next observations.
            lanes: the environments that made a transition; None is all.

        Raises:
            KeyError, TypeError, ValueError: a value does not fit, or an action is not in its space.
        """
        values = [
            *(step[3], step[4], step[2]),
            *_values(self._observations, _named(step[0]), "observations"),
            *_values(self._actions, step[1], "actions"),
            *_values(self._observations, _named(step[6]), "next_observations"),
        ]
        for place, value in zip(self._places, values, strict=True):
            kind = type(value)
            if (
                kind is np.ndarray and value.shape == place.shape and value.dtype in place.dtypes
            ) or kind in place.numbers:
                place.target[...] = value
            else:
                place.set(place.all, value)
        np.logical_or(*self._flags, out=self.done)
        self._stored_done[...] = self.done
        for key, taken, low, end in self._choices:
            if taken.size == 1:
                is_strange = not low <= taken.item() < end
            else:
                is_strange = ((taken < low) | (taken >= end)).any()
            if is_strange:
                chosen = taken if lanes is None else taken[lanes]
                if ((chosen < low) | (chosen >= end)).any():
                    raise ValueError(
                        f"{key!r} must be from {low} up to {end} (exclusive), got {chosen.tolist()}: "
                        "pass the action that `step` was given."
                    )

    def put_final(self, lane: int, observation: Any) -> None:
        """Takes the last observation of an environment in the place of the first of a new episode."""
        values = _values(self._observations, _named(observation), "infos['final_obs']")
        for place, value in zip(self._next_places, values, strict=True):
            place.set(lane, value)

    def put_info(self, key: NestedKey, lanes: np.ndarray | None, value: Any) -> None:
        """Takes an entry of the infos of some environments, or of all."""
        place = self._infos[key]
        place.set(place.all if lanes is None else lanes, value)

    def block(self, lanes: np.ndarray | None) -> Block:
        """Returns the step as a block, valid until the next step is put."""
        self._cut[:] = False  # who writes the block marks gaps in it
        if lanes is None:
            return Block(self._lanes, self._offsets, self._words, self.done, self._cut)
        L = len(lanes)
        return Block(
            *(lanes, self._offsets[: L + 1], self._words[lanes], self.done[lanes], self._cut[:L])
        )


class _Place:
    """Where the values of a field go, and which are copied there as they are."""

    def __init__(self, field: Any, view: Any, name: str, is_vector: bool) -> None:
        self.key, self._field, self._view, self._name = field.key, field, view, name
        self._is_lossy = field.key == keys.REWARD
        #: The rows of all environments; of the single one if values have no leading dimension.
        self.all: Any = slice(None) if is_vector else 0
        is_scalar = field.key in _OUTCOMES and field.shape == (1,)
        #: Where values of `shape` and one of `dtypes` are copied as they are, and plain `numbers`.
        self.target = view[self.all, ..., 0] if is_scalar else view[self.all, ...]
        self.shape = tuple(self.target.shape)
        self.dtypes: frozenset[Any] = frozenset()
        self.numbers: frozenset[type] = frozenset()
        # Views of what NumPy has no dtype for are tensors, and stacks are kept as frames.
        if isinstance(view, np.ndarray) and view.shape[1:] == field.shape:
            self.dtypes = _REALS if self._is_lossy else frozenset({view.dtype})
            if not self.shape:
                self.numbers = _FLOATS if self._is_lossy else _NUMBERS.get(view.dtype, self.numbers)

    def set(self, rows: Any, value: Any) -> None:
        """Takes any value that the field can hold, of one or of some environments.

        Raises:
            TypeError, ValueError: it can't.
        """
        target, field = self._view[rows], self._field
        shape = (*target.shape[: len(target.shape) - self._view.ndim + 1], *field.shape)
        found = as_field(value, field.dtype, shape, self._name, lossy=self._is_lossy)
        found = found.cpu().reshape(target.shape)
        self._view[rows] = found if isinstance(target, torch.Tensor) else found.numpy()


def _view(layout: Layout, key: NestedKey, rows: torch.Tensor) -> Any:
    """Returns a view of a field, or of the frames of a stack, as an array where NumPy has the dtype."""
    field = layout.field(key)
    if field.stack is None:
        view = layout.views(rows)[key]
    else:
        view = layout.frames_of(field, rows)
        if place := field.stack.dim % len(field.shape):
            view = view.movedim(1, 1 + place)
    return view.numpy() if field.dtype in TORCH_TO_NUMPY else view


def _named(observations: Any) -> Any:
    """Returns observations as a dictionary, with the names of TorchRL's environments."""
    if type(observations) is not dict and not isinstance(observations, Mapping):
        return {"observation": observations}
    if "state" in observations and "observation" not in observations:
        return {
            "observation" if name == "state" else name: observations[name] for name in observations
        }
    return observations


def _tree(found: Iterable[NestedKey]) -> tuple[dict[str, Any], list[NestedKey]]:
    """Returns the names of nested dictionaries that hold these keys, and the keys in their order."""
    tree = keys.nested((keys.key_path(key), key) for key in found)
    ordered = [key for _, key in keys.leaves(tree, "")]
    return keys.nested((keys.key_path(key), None) for key in ordered), ordered


def _values(tree: Tree, values: Any, argument: str) -> list[Any]:
    """Returns the values of nested dictionaries with exactly the names of a tree.

    Raises:
        KeyError: an entry is missing.
        TypeError: a value is not a dictionary where the tree has one.
        ValueError: there are entries that the tree lacks.
    """
    if tree is None:
        return [values]
    # An isinstance check against Mapping takes longer than the reading.
    if type(values) is not dict and not isinstance(values, Mapping):
        raise TypeError(
            f"{argument} must be a dictionary of {[*tree]}, got {type(values).__name__}."
        )
    if tree.keys() != values.keys():
        kind = KeyError if tree.keys() - values.keys() else ValueError
        raise kind(f"{argument} must have the keys {[*tree]}, got {sorted(map(str, values))}.")
    found: list[Any] = []
    for name, branch in tree.items():
        found += [values[name]] if branch is None else _values(branch, values[name], argument)
    return found
