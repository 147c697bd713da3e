"""Gathers the values of a step in the rows that are written, and checks them.

Letters: E environments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NestedKey

from trl_storages.gym.columns import Column
from trl_storages.gym.fields import Choices, limits_of, strange_action
from trl_storages.gym.layout import StepLayout
from trl_storages.keys import DONE, REWARD, TERMINATED, TRUNCATED
from trl_storages.rows import Layout, StepBlock, as_array

__all__ = ["Desk"]

# A dtype that matches no array.
_NONE = object()
_kind_of = attrgetter("dtype", "shape")
_BYTES = {False: b"\0", True: b"\1"}


class Desk:
    """Gathers the values of a step.

    Args:
        layout: of the transitions.
        row_layout: that of the rows, used if it has exactly these fields; None if it is not known.
        device: of the gathered values.
        is_vector: whether values have the leading dimension.
        num_envs: E.
        choices: of discrete actions.
    """

    def __init__(
        self,
        layout: StepLayout,
        row_layout: Layout | None,
        device: torch.device,
        is_vector: bool,
        *,
        num_envs: int,
        choices: Mapping[NestedKey, Choices],
    ) -> None:
        #: The arguments that may change from step to step.
        self.made_for = layout, row_layout, device, is_vector
        known = Layout(layout.fields)
        if row_layout is not None and row_layout.described == known.described:
            known = row_layout
        # In the order in which `put` copies them.
        keys = [DONE, *(key for key, *_ in layout.places)]
        #: The rows of a step.
        self.block = block = StepBlock(known, num_envs, device, keys)
        columns = block.columns
        #: `[E, 1]` which episodes end.
        self.ends = columns[DONE]
        targets = [_Target.of(block, is_vector, *place) for place in layout.places]
        self._takes_numbers = block.is_on_host and not is_vector
        self._outcomes, self._targets = targets[:3], targets[3:]
        self._kinds = [it.kind for it in self._targets]
        # What `check` looks at.
        self._choices = choices if block.is_on_host else {}
        self._actions = [
            (each, *limits)
            for key, of_key in self._choices.items()
            for each, limits in zip(_each(columns[key]), limits_of(of_key), strict=True)
        ]

    def put(self, terminated: Any, truncated: Any, reward: Any, others: Sequence[Any]) -> bool:
        """Copies the values of a step to their columns.

        Args:
            terminated: the flags of terminal states.
            truncated: the flags of truncated episodes.
            reward: the rewards.
            others: observations, actions and next observations, in the order of the layout's places.

        Returns:
            whether an episode ends.

        Raises:
            TypeError, ValueError: as `Column.read`.
        """
        # They usually have the right kinds, and are checked all at once.
        if not self._are_alike(others):
            others = [it.fitted(value) for it, value in zip(self._targets, others, strict=True)]
        is_terminal, is_truncated, rewarded = self._outcomes
        if self._takes_numbers:
            # For single numbers, Python is faster than NumPy.
            if type(terminated) not in is_terminal.numbers:
                terminated = is_terminal.read(terminated).item()
            if type(truncated) not in is_truncated.numbers:
                truncated = is_truncated.read(truncated).item()
            is_number = type(reward) in rewarded.numbers
            reward = rewarded.kind[0].type(reward) if is_number else rewarded.read(reward)
            is_end = bool(terminated or truncated)
            values = [_BYTES[is_end], _BYTES[terminated], _BYTES[truncated], reward, *others]
        else:
            terminated, truncated = is_terminal.fitted(terminated), is_truncated.fitted(truncated)
            ends = terminated | truncated
            values = [ends, terminated, truncated, rewarded.fitted(reward), *others]
            # NumPy's count_nonzero takes a tenth of the time of any().
            is_end = bool(np.count_nonzero(ends) if self.block.is_on_host else ends.any())
        self.block.fill(values)
        return is_end

    def _are_alike(self, values: Sequence[Any]) -> bool:
        """Whether all values are arrays of exactly the right dtypes and shapes."""
        try:
            return [*map(_kind_of, values)] == self._kinds
        except AttributeError:
            return False

    def check(self, lanes: Sequence[int]) -> None:
        """Checks the actions of a step; on the host only, as reading a device would synchronize.

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

    def _refuse(self, lanes: Sequence[int]) -> None:
        """Raises if an environment that made a transition took an action outside its space."""
        for key, choices in self._choices.items():
            if strange := strange_action(key, choices, self.block.columns[key][lanes]):
                lane, wrong = strange
                raise ValueError(
                    f"{wrong} in environment {lanes[lane]}; pass the action that `step` was given, or "
                    "make the storage for a space that has it"
                )


class _Target(NamedTuple):
    """The column of a value of a step, and which values are copied there as they are."""

    kind: tuple[Any, tuple[int, ...]]
    """Dtype and shape of arrays."""
    dtypes: frozenset[Any]
    """Other dtypes that NumPy converts, even with a loss."""
    numbers: frozenset[type]
    """Types of scalars."""
    read: Callable[[Any], Any]
    """Converts any other value to a column, or raises the error that says what is wrong with it."""

    @classmethod
    def of(
        cls,
        block: StepBlock,
        is_vector: bool,
        key: NestedKey,
        column: Column,
        argument: str,
        label: str,
    ) -> _Target:
        """Returns the target of one of a layout's places."""
        into = block.columns[key]
        if block.is_on_host and not is_vector:
            into = into[0, ...]
        if block.is_on_host and key in (REWARD, TERMINATED, TRUNCATED):
            into = into[..., 0]
        shape = tuple(into.shape)

        def read(value: Any) -> Any:
            found = column.read(value, argument, label, is_vector)
            return (as_array(found) if block.is_on_host else found).reshape(shape)

        # Tensors always go through `read`, as they may require gradients.
        if not block.is_on_host:
            return cls((_NONE, shape), frozenset(), frozenset(), read)
        dtype = column.numpy_dtype or _NONE
        return cls((dtype, shape), column.real_dtypes, column.numbers, read)

    def fitted(self, value: Any) -> Any:
        """Returns a value as the column takes it."""
        if type(value) is np.ndarray and value.shape == self.kind[1]:
            if value.dtype == self.kind[0]:
                return value
            if value.dtype in self.dtypes:
                return value.astype(self.kind[0])
        return self.read(value)


def _each(column: NDArray[Any]) -> list[NDArray[Any]]:
    """Returns a view `[E]` for each element of a column `[E, *shape]`."""
    places = np.ndindex(*column.shape[1:])
    return [np.moveaxis(column, 0, -1)[place] for place in places]
