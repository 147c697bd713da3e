"""Writes the steps of plain loops straight into rows, where they are arrays of the right kind already.

Letters: E lanes (environments), W words of 8 bytes a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.episodes import episodes_of
from trl_storages.gym import GymRecorder
from trl_storages.gym.layout import Layout
from trl_storages.gym.recorder import Memory
from trl_storages.gym.trees import Leaf, TreeReader
from trl_storages.interrupts import complete
from trl_storages.keys import (
    DONE,
    MASK,
    OBSERVATION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    next_key,
)
from trl_storages.storages import Field, PackedStorage
from trl_storages.storages import Layout as RowLayout
from trl_storages.writers import EpisodeWriter

__all__ = ["StepWriter"]

_FLAGS = frozenset({bool, np.bool_})
_NUMBERS = frozenset({float, int, np.float64, np.float32})
_BYTE = b"\0", b"\1"
_NO_FLAGS = (_BYTE[0],) * 3
_REWARDS = frozenset({np.dtype(np.float32), np.dtype(np.float64)})


class StepWriter:
    """Takes the short way for ordinary steps: from arrays into rows, without a tensor in between.

    A step is ordinary if its values are arrays of exactly the fields' dtypes and shapes (plain numbers
    and flags for a single environment). Any other step is for `GymRecorder` and `EpisodeWriter`, which
    take whatever can be taken and say what is wrong with the rest. Both ways lead to the same rows.

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
        self._plan, self._rows, self._gaps = plan, storage.row_writer, writer.gaps
        layout: RowLayout = storage.layout  # type: ignore[assignment]
        words: Any = storage.rows.numpy()  # type: ignore[union-attr]
        self._num_words, self._words = layout.num_words, words
        self._ring = memoryview(words.reshape(-1))
        # A step is gathered here first, so that nothing is written before all is checked.
        block = torch.zeros(writer.num_envs, layout.num_words, dtype=torch.int64)
        views = layout.views(block)
        columns = {key: view.numpy() for key, view in views.items()}
        #: `[E, 1]` bool, whether the episodes of the gathered step end with it.
        self._ends = views[DONE]
        steps: Any = block.numpy()
        self._steps, self._columns = steps, columns
        # To copy from here to the ring takes a third of NumPy's time.
        self._block = memoryview(steps.reshape(-1))
        flags = [columns[key][:, 0] for key in (DONE, TERMINATED, TRUNCATED)]
        self._reward, (self._done, *others) = columns[REWARD][:, 0], flags
        # Whether the block has flags that are true.
        self._has_flags = False
        self._vector = _Form(plan, columns, others)
        first = {key: column[0, ...] for key, column in columns.items()}
        self._single = _Form(plan, first) if writer.num_envs == 1 else None
        # Of a single step, bytes are joined as they follow one another in the row.
        self._bytes = self._block.cast("B")
        keys = [*self._vector.keys, REWARD, DONE, TERMINATED, TRUNCATED]
        self._in_order = itemgetter(*(keys.index(key) for key in layout.keys), len(keys))
        self._one_reward, self._padding = np.zeros(1, self._reward.dtype), bytes(layout.padding)
        # Where a row says what its step began with, and what it led to, in bytes.
        place = {field.key: _bytes_of(field) for field in layout.fields}
        compared = writer.gaps.compared(layout.keys) if writer.gaps.is_looking else []
        self._compared = [(place[key], place[next_key(key)]) for key in compared]
        self._step_bytes, self._row_bytes = steps.view(np.uint8), words.view(np.uint8)
        self._ring_bytes = self._ring.cast("B")

    @classmethod
    def of(cls, recorder: GymRecorder, storage: Any, writer: Any) -> StepWriter | None:
        """Returns the short way into a storage, or None where there is none (yet)."""
        plan = recorder.layout
        if plan is None or recorder.info_keys or not _is_in_memory(storage, writer):
            return None
        if not _fits(plan, storage, writer):
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

    def __reduce__(self) -> tuple[type, tuple]:
        # A copy of a storage has rows of its own, and finds its own way there.
        return type(None), ()

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
        lanes = recorder.stepping
        if lanes is not None and not len(lanes):
            return None
        is_vector = type(terminateds) not in _FLAGS
        gather = self._gather_lanes if is_vector else self._gather_one
        try:
            is_ordinary = gather(
                observations, actions, rewards, terminateds, truncateds, infos, next_observations
            )
        except (AttributeError, LookupError, TypeError, OverflowError):
            # Not arrays, or not these entries.
            return None
        if not is_ordinary:
            return None
        memory = None
        if self._has_flags or lanes is not None or recorder.is_watching:
            memory = recorder.settle(self._columns, infos, is_vector=is_vector)
        if self._gaps.is_looking:
            self._look_for_gaps(lanes)
        episodes, num_rows = self._episodes, self._num_envs if lanes is None else len(lanes)
        point, count = episodes.counters(), self._writer._write_count + num_rows
        try:
            return self._put(lanes, count, memory)
        except BaseException as error:
            complete(
                error,
                partial(self._put, lanes, count, memory),
                partial(episodes.recount, point),
            )
            raise

    def _look_for_gaps(self, lanes: np.ndarray | None) -> None:
        """Warns of lanes that do not go on from their newest rows, or ends their episodes there."""
        found = self._gap_of_the_only_lane() if self._num_envs == 1 else self._gaps_of(lanes)
        if not found:
            return
        if self._gaps.on_gap == "cut":
            self._episodes.end_episodes(found)
        else:
            self._gaps.has_warned = self._gaps.warn([torch.ones(len(found))], stacklevel=5)

    def _gap_of_the_only_lane(self) -> list[int]:
        episodes = self._episodes
        if not episodes.is_open.item():
            return []
        step, ring, width = self._bytes, self._ring_bytes, len(self._bytes)
        row = episodes.newest_slot() * width
        for begin, end in self._compared:
            # As bytes they are compared at once, as views one by one.
            before = ring[row + end.start : row + end.stop].tobytes()
            if step[begin].tobytes() != before:
                return [0]
        return []

    def _gaps_of(self, lanes: np.ndarray | None) -> list[int]:
        """Returns those of some lanes, or of all, whose step does not continue their newest row."""
        episodes = self._episodes
        which = np.arange(self._num_envs) if lanes is None else lanes
        steps = self._step_bytes if lanes is None else self._step_bytes[lanes]
        before = episodes.newest_slots(None if lanes is None else torch.from_numpy(lanes)).numpy()
        gap = np.zeros(len(which), bool)
        for begin, end in self._compared:
            differs = steps[:, begin] != self._row_bytes[before, end]
            if differs.any():
                gap |= differs.any(1)
        return which[gap & episodes.is_open.numpy()[which]].tolist() if gap.any() else []

    def _put(
        self, lanes: np.ndarray | None, write_count: int, memory: Memory | None
    ) -> torch.Tensor:
        """Writes what was gathered of some lanes, or of all, and returns its slots."""
        episodes = self._episodes
        run = episodes.next_run(1) if lanes is None else None
        if run is not None:
            begin = run.start * self._num_words
            self._ring[begin : begin + len(self._block)] = self._block
            slots = episodes.advance(self._ends)
        else:
            which = slice(None) if lanes is None else lanes
            which_lanes = None if lanes is None else torch.from_numpy(lanes)
            self._words[episodes.next_slots(1, which_lanes)[:, 0].numpy()] = self._steps[which]
            slots = episodes.advance(self._ends[which], None, which_lanes)
        if memory is not None:
            self._recorder.remember(memory)
        return self._writer.count_step(slots, write_count)

    def _gather_one(
        self,
        observations: Any,
        actions: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        infos: Any,
        next_observations: Any,
    ) -> bool:
        """Gathers a step without a leading dimension, and returns whether it is ordinary."""
        if (
            self._single is None
            or type(truncated) not in _FLAGS
            or type(reward) not in _NUMBERS
            or not isinstance(infos, dict)
        ):
            return False
        values = self._single.values(observations, actions, next_observations)
        if values is None:
            return False
        self._one_reward[0] = reward
        self._has_flags = is_end = bool(terminated or truncated)
        flags = (_BYTE[1], _BYTE[bool(terminated)], _BYTE[bool(truncated)]) if is_end else _NO_FLAGS
        parts = self._in_order((*values, self._one_reward, *flags, self._padding))
        try:
            self._bytes[:] = b"".join(parts)
        except (BufferError, TypeError, ValueError):
            # An array is not in one piece.
            self._bytes[:] = b"".join([memoryview(part).tobytes() for part in parts])
        return True

    def _gather_lanes(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
        infos: Any,
        next_observations: Any,
    ) -> bool:
        """Gathers a step with a leading dimension, and returns whether it is ordinary."""
        if (
            rewards.dtype not in _REWARDS
            or rewards.shape != self._reward.shape
            or not (isinstance(infos, dict) or len(infos) == self._num_envs)
        ):
            return False
        flags = terminateds, truncateds
        values = self._vector.values(observations, actions, next_observations, flags)
        if values is None:
            return False
        for target, value in zip(self._vector.targets, values, strict=False):
            target[...] = value
        self._reward[...] = rewards
        np.logical_or(terminateds, truncateds, self._done)
        self._has_flags = bool(np.count_nonzero(self._done))
        return True


class _Form:
    """How the values of a step with or without a leading dimension are found and checked.

    Args:
        plan: how the arguments are nested.
        columns: key -> where the values of a field go.
        flags: where further values go.
    """

    def __init__(
        self,
        plan: Layout,
        columns: Mapping[NestedKey, np.ndarray],
        flags: Sequence[np.ndarray] = (),
    ) -> None:
        self._see = TreeReader(plan.observations)  # type: ignore[arg-type]
        actions = plan.actions
        # None where the action is the only one, and no dictionary.
        self._act = None if isinstance(actions, Leaf) else TreeReader(actions)
        seen, done = self._see.leaves, [actions] if isinstance(actions, Leaf) else self._act.leaves  # type: ignore[union-attr]
        #: The fields of the values, without the flags.
        self.keys = [leaf.key for leaf in seen + done] + [leaf.next_key for leaf in seen]
        #: Where they go.
        self.targets = [*(columns[key] for key in self.keys), *flags]
        self._dtypes = [target.dtype for target in self.targets]
        self._shapes = [target.shape for target in self.targets]

    def values(
        self, observations: Any, actions: Any, next_observations: Any, flags: Sequence[Any] = ()
    ) -> tuple[Any, ...] | None:
        """Returns the values in the order of `targets`; None if they are not what the fields are.

        Raises:
            AttributeError, LookupError, TypeError: as well where they are not.
        """
        if not isinstance(observations, dict):
            observations = {OBSERVATION: observations}
            next_observations = {OBSERVATION: next_observations}
        if self._act is not None:
            actions = self._act.read(actions)
        else:
            actions = (np.int64(actions) if type(actions) is int else actions,)
        see = self._see.read
        values = (*see(observations), *actions, *see(next_observations), *flags)
        if [value.dtype for value in values] != self._dtypes:
            return None
        return values if [value.shape for value in values] == self._shapes else None


def _is_in_memory(storage: Any, writer: Any) -> bool:
    """Whether rows are arrays in the memory of this process, which no file must hear of."""
    return (
        type(storage) is PackedStorage
        and type(writer) is EpisodeWriter
        and storage.layout is not None
        and storage.device.type == "cpu"
        and not storage.is_durable
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


def _bytes_of(field: Field) -> slice:
    """Where a field lies in a row."""
    return slice(field.start_byte, field.start_byte + field.size * field.dtype.itemsize)
