"""One step of each environment on its way into a storage: a block of rows, and views of its fields.

Letters: E environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages import keys
from trl_storages.streams.layout import Layout
from trl_storages.streams.staging import Block
from trl_storages.writing.columns import TORCH_TO_NUMPY, Column
from trl_storages.writing.fields import Choices, strange_action
from trl_storages.writing.plan import StepLayout

__all__ = ["Staging"]

_SCALARS = (keys.REWARD, keys.TERMINATED, keys.TRUNCATED)


class Staging:
    """Takes the values of a step, each through a view that is made once.

    Args:
        plan: how the arguments of a step map to fields.
        layout: of the rows.
        num_envs: E.
        is_vector: whether values have the leading dimension.
        choices: of discrete actions; others are refused.
    """

    def __init__(
        self,
        plan: StepLayout,
        layout: Layout,
        num_envs: int,
        is_vector: bool,
        choices: Mapping[NestedKey, Choices],
    ) -> None:
        self.layout, self.is_vector = layout, is_vector
        self._words = np.zeros((num_envs, layout.row_words), np.int64)
        rows = torch.from_numpy(self._words)
        self._views = {key: _view(layout, key, rows) for key in plan.fields}
        self._places = [
            _Place(self._views[key], key, column, argument, label, is_vector)
            for key, column, argument, label in plan.places
        ]
        self._stored_done = self._views[keys.DONE][:, 0]
        self._flags = self._views[keys.TERMINATED][:, 0], self._views[keys.TRUNCATED][:, 0]
        #: `[E]` which episodes end with this step.
        self.done = np.zeros(num_envs, bool)
        self._choices = {
            key: (self._views[key], of_key.first, of_key.first + of_key.number, of_key)
            for key, of_key in choices.items()
            if key in self._views
        }
        self._lanes, self._offsets = np.arange(num_envs), np.arange(num_envs + 1)

    def put(self, values: list[Any], lanes: np.ndarray | None) -> None:
        """Takes terminateds, truncateds, rewards, observations, actions and next observations.

        Args:
            values: in the order of the plan.
            lanes: the environments that made a transition; None is all.

        Raises:
            TypeError, ValueError: a value does not fit, or an action is not in its space.
        """
        for place, value in zip(self._places, values, strict=True):
            kind = type(value)
            if (
                kind is np.ndarray
                and value.shape == place.shape
                and (value.dtype == place.dtype or value.dtype in place.others)
            ) or kind in place.numbers:
                place.target[...] = value
            else:
                place.read(value)
        np.logical_or(*self._flags, out=self.done)
        self._stored_done[...] = self.done
        for key, (taken, low, high, choices) in self._choices.items():
            if ((taken < low) | (taken >= high)).any():
                _refuse(key, choices, taken, self._lanes if lanes is None else lanes)

    def set(self, key: NestedKey, lanes: Any, value: torch.Tensor) -> None:
        """Sets a checked field of one or some environments."""
        target = self._views[key]
        if isinstance(target, torch.Tensor):
            target[lanes] = value.cpu().reshape(target[lanes].shape)
        else:
            target[lanes] = value.cpu().numpy().reshape(target[lanes].shape)

    def block(self, lanes: np.ndarray | None) -> Block:
        """Returns the step as a block, valid until the next step is put."""
        if lanes is None:
            cut = np.zeros(len(self.done), bool)
            return Block(self._lanes, self._offsets, self._words, self.done, cut)
        cut = np.zeros(len(lanes), bool)
        return Block(
            lanes, self._offsets[: len(lanes) + 1], self._words[lanes], self.done[lanes], cut
        )


class _Place:
    """Where a value goes, and which values are copied there as they are."""

    def __init__(
        self,
        view: Any,
        key: NestedKey,
        column: Column,
        argument: str,
        label: str,
        is_vector: bool,
    ) -> None:
        target = view if is_vector else view[0, ...]
        if key in _SCALARS and view.shape[1:] == (1,):
            target = target[..., 0] if is_vector else target
        self.target, self.shape = target, tuple(target.shape)
        if key in _SCALARS and not is_vector:
            self.shape = ()
        # Views of what NumPy has no dtype for are tensors, into which nothing is copied as it is.
        is_array = isinstance(view, np.ndarray)
        self.dtype = view.dtype if is_array else None
        self.others = column.real_dtypes if is_array else frozenset()
        self.numbers: frozenset[type] = frozenset() if is_vector else column.numbers
        if self.dtype == np.int64 and self.shape == ():
            self.numbers = frozenset({int, np.int64})
        # Stacks are kept as frames.
        if is_array and view.shape[1:] != column._shape:
            self.dtype, self.others = None, frozenset()
        self._column, self._named = column, (argument, label, is_vector)

    def read(self, value: Any) -> None:
        """Takes any value that the column can hold.

        Raises:
            TypeError, ValueError: it can't.
        """
        found = self._column.read(value, *self._named).reshape(self.target.shape)
        if isinstance(self.target, torch.Tensor):
            self.target.copy_(found)
        else:
            self.target[...] = found.cpu().numpy()


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


def _refuse(key: NestedKey, choices: Choices, taken: np.ndarray, lanes: np.ndarray) -> None:
    if strange := strange_action(key, choices, taken[lanes]):
        lane, wrong = strange
        raise ValueError(
            f"{wrong} in environment {lanes[lane]}; pass the action that `step` was given, or make the "
            "storage for a space that has it."
        )
