"""Writes the steps of plain loops straight into rows, where these are arrays as the fields want them.

Letters: E lanes (environments), W words of 8 bytes a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import NestedKey

from trl_storages.episodes import episodes_of
from trl_storages.gym import GymRecorder
from trl_storages.gym.layout import Layout
from trl_storages.gym.trees import Leaf, Tree
from trl_storages.keys import ACTION, DONE, MASK, OBSERVATION, REWARD, TERMINATED, TRUNCATED
from trl_storages.storages import Layout as RowLayout
from trl_storages.storages import PackedStorage
from trl_storages.writers import EpisodeWriter

__all__ = ["StepWriter"]

_FLAGS = frozenset({bool, np.bool_})
_NUMBERS = frozenset({float, int, np.float64, np.float32})
_REWARDS = frozenset({np.dtype(np.float32), np.dtype(np.float64)})
_BOOL = np.dtype(bool)


class _Part(NamedTuple):
    """Where the values of one field come from and go to."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    target: np.ndarray


class StepWriter:
    """Takes the short way for ordinary steps: from arrays into rows, without a tensor in between.

    A step is ordinary if its values are arrays of exactly the fields' dtypes and shapes (plain numbers
    and flags for a single environment), and the infos hold no other last observation of an episode that
    ends. Any other step is for `GymRecorder` and `EpisodeWriter`, which take whatever can be taken and
    say what is wrong with the rest. Both ways lead to the same rows.

    Args:
        recorder: of the steps.
        plan: its layout, which says how the arguments are nested.
        storage: in memory, on the CPU.
        writer: of the storage.

    Use `of`, which knows when there is a short way.
    """

    def __init__(
        self,
        recorder: GymRecorder,
        plan: Layout,
        storage: PackedStorage,
        writer: EpisodeWriter,
    ) -> None:
        self._recorder, self._storage, self._writer = recorder, storage, writer
        self._episodes, self._num_envs = episodes_of(storage), writer.num_envs
        self._plan, self._rows = plan, storage.row_writer
        self._words: np.ndarray = storage.rows.numpy()  # type: ignore[union-attr]
        # A step is gathered here first, so that nothing is written before all is checked. Its flags are
        # false between two steps.
        layout: RowLayout = storage.layout  # type: ignore[assignment]
        block = torch.zeros(writer.num_envs, layout.num_words, dtype=torch.int64)
        self._block, self._tensors = block.numpy(), layout.views(block)
        columns = {key: view.numpy() for key, view in self._tensors.items()}
        self._flags = [columns[key][:, 0] for key in (TERMINATED, TRUNCATED, DONE)]
        self._vector = _Form(plan, columns)
        first = {key: column[0, ...] for key, column in columns.items()}
        self._single = _Form(plan, first) if writer.num_envs == 1 else None
        self._lanes = np.arange(writer.num_envs)

    @classmethod
    def of(cls, recorder: GymRecorder, storage: Any, writer: Any) -> StepWriter | None:
        """Returns the short way into a storage, or None where there is none (yet)."""
        plan = recorder.layout
        if plan is None or recorder.info_keys or not _is_in_memory(storage, writer):
            return None
        is_flat = all(isinstance(leaf, Leaf) for leaf in _branches(plan))
        if not is_flat or not _fits(plan, storage, writer):
            return None
        return cls(recorder, plan, storage, writer)

    def is_for(self, recorder: GymRecorder | None, storage: Any, writer: Any) -> bool:
        """Returns whether this is the way from this recorder into this storage as they are now."""
        return (
            self._recorder is recorder
            and self._writer is writer
            and self._storage is storage
            and self._plan is recorder.layout
            and self._rows is storage.row_writer
            and writer.is_plain
        )

    def write(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
        infos: Any,
        next_observations: Any,
    ) -> torch.Tensor | None:
        """Writes one step, if it is ordinary.

        The arguments are those of `GymRecorder.rows`.

        Returns:
            int64 slots, or None if the step is not ordinary. Nothing is written then.
        """
        recorder = self._recorder
        try:
            form = self._form(rewards, terminateds, truncateds, infos)
            if form is None:
                return None
            done = self._done(terminateds, truncateds)
            if done is not None and not self._ends_here(infos):
                return None
            if not form.take(observations, actions, rewards, next_observations):
                return None
        except (AttributeError, LookupError, TypeError, OverflowError):
            # Not arrays, or not these entries.
            return None
        lanes = None
        if done is not None or not recorder.is_idle:
            lanes = recorder.stepping
            if lanes is not None and not len(lanes):
                return None
            recorder.note(self._tensors, done)
        return self._put(lanes, done, terminateds, truncateds)

    def _form(self, rewards: Any, terminateds: Any, truncateds: Any, infos: Any) -> _Form | None:
        """Returns the form that the step has, if flags, rewards and infos are ordinary."""
        if type(terminateds) in _FLAGS:
            is_ordinary = (
                type(truncateds) in _FLAGS and type(rewards) in _NUMBERS and isinstance(infos, dict)
            )
            return self._single if is_ordinary else None
        shape = (self._num_envs,)
        is_ordinary = (
            terminateds.dtype == truncateds.dtype == _BOOL
            and terminateds.shape == truncateds.shape == rewards.shape == shape
            and rewards.dtype in _REWARDS
            and (isinstance(infos, dict) or len(infos) == self._num_envs)
        )
        return self._vector if is_ordinary else None

    def _done(self, terminateds: Any, truncateds: Any) -> np.ndarray | None:
        """Returns `[E]` whether the episode ends, or None where none does."""
        done = terminateds | truncateds
        if isinstance(done, np.ndarray):
            return done if np.count_nonzero(done) else None
        return np.ones(1, dtype=bool) if done else None

    def _ends_here(self, infos: Any) -> bool:
        """Whether the next observations are the last ones of the episodes that end, as far as is told."""
        is_reset = self._recorder.autoreset_mode is AutoresetMode.SAME_STEP
        return not is_reset and isinstance(infos, dict) and "final_obs" not in infos

    def _put(
        self, lanes: np.ndarray | None, done: np.ndarray | None, terminateds: Any, truncateds: Any
    ) -> torch.Tensor:
        """Writes what was gathered of the lanes, and returns its slots."""
        episodes, block = self._episodes, self._block
        if done is not None:
            for flag, values in zip(self._flags, (terminateds, truncateds, done), strict=True):
                flag[...] = values
        run = episodes.next_run(1) if lanes is None else None
        if run is not None:
            slots = np.arange(run.start, run.stop)
            self._words[run.start : run.stop] = block
        else:
            lanes = self._lanes if lanes is None else lanes
            slots = episodes.host.next_slots(lanes)
            self._words[slots] = block[lanes]
        if done is not None:
            for flag in self._flags:
                flag[...] = False
            done = done if lanes is None else done[lanes]
        return self._writer.count_step(slots, lanes, done)


class _Form:
    """How the values of a step with or without a leading dimension are checked and gathered."""

    def __init__(self, plan: Layout, columns: Mapping[NestedKey, np.ndarray]) -> None:
        def part(name: str, key: NestedKey) -> _Part:
            column = columns[key]
            return _Part(name, column.dtype, column.shape, column)

        # Neither is nested here.
        observations = plan.observations.items()  # type: ignore[union-attr]
        self._observations = [part(name, leaf.key) for name, leaf in observations]
        self._next = [part(name, leaf.next_key) for name, leaf in observations]
        actions = {ACTION: plan.actions} if isinstance(plan.actions, Leaf) else plan.actions
        self._actions = [part(name, leaf.key) for name, leaf in actions.items()]
        self._reward = columns[REWARD][..., 0]

    def take(self, observations: Any, actions: Any, rewards: Any, next_observations: Any) -> bool:
        """Gathers the values, and returns whether all of them are what the fields are."""
        if not isinstance(observations, dict):
            observations = {OBSERVATION: observations}
            next_observations = {OBSERVATION: next_observations}
        if not isinstance(actions, dict):
            actions = {ACTION: np.int64(actions) if type(actions) is int else actions}
        for parts, values in (
            (self._observations, observations),
            (self._actions, actions),
            (self._next, next_observations),
        ):
            if len(values) != len(parts):
                return False
            for name, dtype, shape, target in parts:
                value = values[name]
                if value.dtype != dtype or value.shape != shape:
                    return False
                target[...] = value
        self._reward[...] = rewards
        return True


def _is_in_memory(storage: Any, writer: Any) -> bool:
    """Whether rows are arrays in the memory of this process, which no file must hear of."""
    return (
        type(storage) is PackedStorage
        and type(writer) is EpisodeWriter
        and storage.layout is not None
        and storage.device.type == "cpu"
        and storage.scratch_dir is None
    )


def _fits(plan: Layout, storage: PackedStorage, writer: EpisodeWriter) -> bool:
    """Whether the rows hold exactly what a step has, and the flags where the writer looks for them."""
    fields = storage.layout.described  # type: ignore[union-attr]
    return (
        fields == dict(plan.fields)
        and writer.done_key == DONE
        and writer.traj_key not in fields
        and MASK not in fields
        # NumPy has no bfloat16.
        and not any(dtype is torch.bfloat16 for dtype, _ in fields.values())
    )


def _branches(plan: Layout) -> list[Tree]:
    actions = [plan.actions] if isinstance(plan.actions, Leaf) else plan.actions.values()
    return [*plan.observations.values(), *actions]  # type: ignore[union-attr]
