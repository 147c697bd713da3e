"""Rows on their way into a storage: one block, and a view of each field, made once and filled again.

Letters: E environments, L lanes that are written, N rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, is_tensor_collection

from trl_storages import keys
from trl_storages.entries.layout import Block, Layout
from trl_storages.torchrl_compat import InferenceMode, copy_all
from trl_storages.writing.routing import Routing
from trl_storages.writing.spaces import NUMPY_TO_TORCH, OUTCOME_FIELDS, TORCH_TO_NUMPY, as_field

__all__ = ["Rows", "Staging", "StepRows", "entries_in", "is_same"]


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two values are arrays or tensors that begin at the same place in memory."""
    if one is other:
        return isinstance(one, np.ndarray | torch.Tensor)
    if type(one) is np.ndarray and type(other) is np.ndarray:
        if not np.may_share_memory(one, other):
            return False
        return bool(one.__array_interface__["data"] == other.__array_interface__["data"])
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.data_ptr() == other.data_ptr() != 0
    return False


class Staging:
    """A block of rows, and views of its fields.

    Args:
        layout: of the rows.
        batch: their batch size, of N rows in all.
        device: where they are staged, as tensors; None is as arrays on the host.

    Attributes:
        words: `[N, row_words]` int64 the rows.
        done: `[N]` bool which of them end their episodes.
        views: key -> `[*batch, *shape]`, and of stacks their frames.
    """

    @torch.inference_mode(False)  # it may be filled outside of it later
    def __init__(
        self, layout: Layout, batch: Sequence[int], device: torch.device | None = None
    ) -> None:
        self.layout, self.batch, self.device = layout, torch.Size(batch), device
        size = self.batch.numel(), layout.row_words
        if device is None:  # NumPy's zeros lie in huge pages
            self.words: Any = np.zeros(size, np.int64)
            self.done: Any = np.zeros(size[0], bool)
            words = torch.from_numpy(self.words)
        else:
            words = self.words = torch.zeros(size, dtype=torch.int64, device=device)
            self.done = torch.zeros(size[0], dtype=torch.bool, device=device)
        rows = words.view(*batch, layout.row_words)
        self.views = layout.views(rows)
        for field in layout.fields:
            if field.stack:
                self.views[field.key] = layout.frames_of(field, rows)

    def block(self, places: Routing, cut: np.ndarray | None = None) -> Block:
        """Returns the rows as a block, valid until others are filled in.

        Args:
            places: where they go.
            cut: `[N]` bool, which of them begin an episode whatever came before, in the order of their
                places; None is none of them.
        """
        which, offsets, order = places
        words, done = self.words, self.done
        if order is not None:
            words, done = words[order], done[order]
        cut = np.zeros(len(done), bool) if cut is None else cut
        begins = cut if self.device is None else torch.from_numpy(cut).to(self.device)
        return Block(which, offsets, words, done, begins)


# Rows of TensorDicts


def entries_in(data: Any, path: tuple[str, ...] = ()) -> dict[NestedKey, torch.Tensor]:
    """Returns the tensors of a TensorDict by key. Its own iterators take ten times as long."""
    found: dict[NestedKey, torch.Tensor] = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            found[(*path, name) if path else name] = value
        elif is_tensor_collection(value):
            found |= entries_in(value, (*path, name))
    return found


class Rows(Staging):
    """Takes the rows of TensorDicts of one batch size.

    Args:
        layout: as of `Staging`.
        batch: likewise.
        device: likewise.
        done_key: of the flag that ends episodes, one bool a row, which need not be a field.
        found: entries of such a TensorDict.

    Raises:
        KeyError: there are no such flags.
        ValueError: they are not one bool a row.
    """

    def __init__(
        self,
        layout: Layout,
        batch: torch.Size,
        device: torch.device | None,
        done_key: NestedKey,
        found: Mapping[NestedKey, torch.Tensor],
    ) -> None:
        super().__init__(layout, batch, device)
        #: How many entries they had.
        self.num_found = len(found)
        #: Keys of observations and of their next ones.
        self.pairs = [(key, keys.next_key(key)) for key in keys.shared_keys(self.views)]
        flag = found.get(done_key)
        if flag is None:
            raise KeyError(f"the data lacks {done_key!r}, which ends episodes; it has {[*found]}.")
        if flag.dtype is not torch.bool or flag.numel() != len(self.done):
            raise ValueError(
                f"{done_key!r} must be one bool a row, got {flag.dtype} {[*flag.shape]}. Where each "
                f"agent has its own make one for all: data.set({keys.DONE!r}, data[...].any(-2))."
            )
        fields = [layout.by_key[key] for key in self.views]
        shape = batch + layout.by_key[done_key].shape if done_key in layout else flag.shape
        self._keys = [*self.views, done_key]
        done = torch.from_numpy(self.done) if device is None else self.done
        self._targets = [*self.views.values(), done.view(shape)]
        self._kinds = [*((it.dtype, batch + it.shape) for it in fields), (torch.bool, shape)]
        # Stacks, by their places among the fields; they are copied as frames.
        self._stacks = [(place, it) for place, it in enumerate(fields) if it.stack]
        # Flags that end episodes, too, beside `done`; those of another device are not waited for.
        self._is_done: Any = done.numpy() if done.is_cpu else None
        self._ends: dict[NestedKey, Any] = {
            key: self.views[key].view(-1).numpy()
            for key in (keys.TERMINATED, keys.TRUNCATED)
            if done.is_cpu and key in layout and self.views[key].numel() == len(done)
        }

    def fill(self, found: Mapping[NestedKey, torch.Tensor]) -> bool:
        """Copies the entries of a TensorDict that have fields.

        Returns:
            whether all rows of a flat batch were truncated and some not done: those that are done and
            not terminated are truncated then.

        Raises:
            KeyError: an entry is missing.
            TypeError, ValueError: it has another dtype or shape; or some rows are padding; or rows on the
                host are not done where they are terminated or truncated.
        """
        try:
            values = [found[key] for key in self._keys]
        except KeyError as error:
            (key,) = error.args
            hint = ": env.add_truncated_keys() adds it" if key == keys.TRUNCATED else ""
            raise KeyError(f"the data lacks {key!r}, which every row holds{hint}.") from None
        if [(value.dtype, value.shape) for value in values] != self._kinds:
            self._refuse(values)
        if (mask := found.get(keys.MASK)) is not None and not mask.all():
            raise ValueError(
                f"all rows must be transitions, but {keys.MASK} says that some are padding: pass "
                f"traj_format='cat' to the collector, or write data[data[{keys.MASK!r}]]."
            )
        for place, field in self._stacks:
            values[place] = field.stack.frames(values[place], field.shape)  # type: ignore[union-attr]
        # An interrupt in the exit of torch.inference_mode(), which is Python, would leave the mode on.
        with InferenceMode(True):
            copy_all(self._targets, values)
        is_repaired, done = False, self._is_done
        for key, flag in self._ends.items():
            if not np.count_nonzero(flag > done):
                continue
            if key == keys.TERMINATED or len(self.batch) != 1 or flag.size == 1 or not flag.all():
                raise ValueError(
                    f"{self._keys[-1]!r} must be true where transitions are terminated or truncated, got "
                    "one where it is not: set it to terminated | truncated."
                )
            # TorchRL's trainers set all of them, not the last one of each environment.
            np.greater(done, self._ends.get(keys.TERMINATED, False), out=flag)
            is_repaired = True
        return is_repaired

    def _refuse(self, values: Sequence[torch.Tensor]) -> None:
        for key, value, (dtype, shape) in zip(self._keys, values, self._kinds, strict=True):
            must = f"{key!r} must be {dtype} {[*shape[len(self.batch) :]]}, got"
            if value.dtype is not dtype:
                raise TypeError(f"{must} {value.dtype}.")
            if value.shape != shape:
                raise ValueError(f"{must} {[*value.shape[len(self.batch) :]]}.")


# Steps of loops

_REALS = frozenset(dtype for dtype in NUMPY_TO_TORCH if dtype.kind in "biuf")
_FLOATS: frozenset[type] = frozenset({float, np.float64, np.float32})
_NUMBERS: dict[Any, frozenset[type]] = {
    np.dtype(bool): frozenset({bool, np.bool_}),
    np.dtype(np.int64): frozenset({int, np.int64}),
}


class StepRows(Staging):
    """Takes the values of one step of each environment.

    Args:
        layout: of the rows.
        num_envs: E.
        is_vector: whether values have the leading dimension.
        info_keys: fields that come from the infos.
        choices: of discrete actions, from `choices_of`; others are refused.
    """

    def __init__(
        self,
        layout: Layout,
        num_envs: int,
        is_vector: bool,
        info_keys: Collection[NestedKey],
        choices: Mapping[NestedKey, tuple[Any, Any]],
    ) -> None:
        super().__init__(layout, [num_envs])
        self.is_vector = is_vector
        # Keys that also exist under `next` are observations; the rest, infos aside, are actions.
        here = [
            key for key in self.views if keys.key_path(key)[0] != "next" and key not in info_keys
        ]
        self._observations = _tree(key for key in here if keys.next_key(key) in self.views)
        self._seen = seen = [key for _, key in keys.leaves(self._observations, "")]
        actions = _tree(key for key in here if key not in seen)
        acted = [key for _, key in keys.leaves(actions, "")]
        # "action" is the argument itself; a TorchRL spec may name its actions otherwise.
        self._actions = actions["action"] if [*actions] == ["action"] else actions
        self._next_places = [self._place(keys.next_key(key), f"next {key!r}") for key in seen]
        self._places = [
            self._place(keys.TERMINATED, "terminateds"),
            self._place(keys.TRUNCATED, "truncateds"),
            self._place(keys.REWARD, "rewards"),
            *(self._place(key, f"observations {key!r}") for key in seen),
            *(self._place(key, f"actions {key!r}") for key in acted),
            *self._next_places,
        ]
        self._infos = {key: self._place(key, f"infos {key!r}") for key in info_keys}
        known = {keys.DONE, *self._infos, *(each.key for each in self._places)}
        if lost := [key for key in self.views if key not in known]:
            raise KeyError(f"the rows hold {lost}, which a step of a loop does not: use extend().")
        self._flags = [
            self.views[key][:, 0].numpy() for key in (keys.TERMINATED, keys.TRUNCATED, keys.DONE)
        ]
        self._choices = [
            (key, self.views[key].numpy(), *limits)
            for key, limits in choices.items()
            if key in self.views
        ]

    def _place(self, key: NestedKey, name: str) -> _Place:
        return _Place(self.layout.by_key[key], self.views[key], name, self.is_vector)

    def put(self, step: Sequence[Any]) -> None:
        """Takes the seven values of a step but its infos.

        Args:
            step: observations, actions, rewards, terminateds, truncateds, infos, next observations.

        Raises:
            KeyError, TypeError, ValueError: a value does not fit, or an action is not in its space.
        """
        seen = _values(self._observations, _named(step[0]), "observations")
        after = _values(self._observations, _named(step[6]), "next_observations")
        #: Keys of observations that share the memory of their next ones.
        self.same = [
            key
            for key, one, other in zip(self._seen, seen, after, strict=True)
            if is_same(one, other)
        ]
        actions = _values(self._actions, step[1], "actions")
        values = [step[3], step[4], step[2], *seen, *actions, *after]
        for place, value in zip(self._places, values, strict=True):
            kind = type(value)
            if (
                kind is np.ndarray and value.shape == place.shape and value.dtype in place.dtypes
            ) or kind in place.numbers:
                place.target[...] = value
            else:
                place.set(place.all, value)
        terminated, truncated, done = self._flags
        np.logical_or(terminated, truncated, out=self.done)
        done[...] = self.done
        for key, taken, low, end in self._choices:
            if taken.size == 1:
                is_known = low <= taken.item() < end
            else:
                is_known = ((taken >= low) & (taken < end)).all()
            if not is_known:
                raise ValueError(
                    f"{key!r} must be from {low} up to {end} (exclusive), got {taken.tolist()}: "
                    "pass the action that `step` was given."
                )

    def put_final(self, lane: int, observation: Any) -> None:
        """Takes the last observation of an environment in the place of the first of a new episode."""
        values = _values(self._observations, _named(observation), "infos['final_obs']")
        for place, value in zip(self._next_places, values, strict=True):
            place.set(lane, value)

    def put_info(self, key: NestedKey, value: Any) -> None:
        """Takes an entry of the infos."""
        place = self._infos[key]
        place.set(place.all, value)


class _Place:
    """Where the values of a field go, and which are copied there as they are."""

    def __init__(self, field: Any, view: torch.Tensor, name: str, is_vector: bool) -> None:
        self.key, self._field, self._view, self._name = field.key, field, view, name
        self._is_reward = field.key == keys.REWARD
        #: The rows of all environments; of the single one if values have no leading dimension.
        self.all: Any = slice(None) if is_vector else 0
        #: Where values of `shape` and one of `dtypes` are copied as they are, and plain `numbers`.
        self.target: Any = view[self.all]
        self.dtypes: frozenset[Any] = frozenset()
        self.numbers: frozenset[type] = frozenset()
        # Views of what NumPy has no dtype for are tensors, and stacks are kept as frames.
        if field.dtype in TORCH_TO_NUMPY and not field.stack:
            is_scalar = field.key in OUTCOME_FIELDS and field.shape == (1,)
            self.target = (
                view.numpy()[self.all, ..., 0] if is_scalar else view.numpy()[self.all, ...]
            )
            dtype = self.target.dtype
            self.dtypes = _REALS if self._is_reward else frozenset({dtype})
            if not self.target.shape:
                self.numbers = _FLOATS if self._is_reward else _NUMBERS.get(dtype, self.numbers)
        self.shape = tuple(self.target.shape)

    def set(self, rows: Any, value: Any) -> None:
        """Takes any value that the field can hold, of one environment or of all.

        Raises:
            TypeError, ValueError: it can't.
        """
        field, target = self._field, self._view[rows]
        shape = field.shape if isinstance(rows, int) else (len(target), *field.shape)
        found = as_field(value, field.dtype, shape, self._name, is_rounded=self._is_reward)
        target.copy_(field.stack.frames(found, field.shape) if field.stack else found)


def _named(observations: Any) -> Any:
    """Returns observations as a dictionary."""
    if type(observations) is dict or isinstance(observations, Mapping):
        return observations
    return {"observation": observations}


def _tree(found: Iterable[NestedKey]) -> dict[str, Any]:
    """Returns keys by the names of nested dictionaries."""
    return keys.nested((keys.key_path(key), key) for key in found)


def _values(tree: Any, values: Any, argument: str) -> list[Any]:
    """Returns the values of nested dictionaries with exactly the names of a tree, which ends in keys.

    Raises:
        KeyError: an entry is missing.
        TypeError: a value is not a dictionary where the tree has one.
        ValueError: there are entries that the tree lacks.
    """
    if type(tree) is not dict:
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
        value = values[name]
        found += _values(branch, value, argument) if type(branch) is dict else [value]
    return found
