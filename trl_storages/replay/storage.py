"""A replay buffer over streams of observations: rows are recorded or extended, drawn, transformed."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from tensordict import TensorDictBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.replay_buffers import ReplayBuffer
from torchrl.data.replay_buffers.sample_units import SampleUnit
from torchrl.envs.transforms import Transform

from trl_storages import arguments, keys
from trl_storages.attributes import Strict
from trl_storages.index.naming import Lanes, named_lanes
from trl_storages.packed.row_view import RowView
from trl_storages.packed.storage import PackedStorage
from trl_storages.replay import history
from trl_storages.replay.batch_priorities import drawn_priorities
from trl_storages.replay.explain import Explanation, explain
from trl_storages.replay.loader import make_loader
from trl_storages.replay.parameters import Forwarded
from trl_storages.replay.progress import progress_of, resume
from trl_storages.replay.remote import StorageHandle, on_ray
from trl_storages.replay.state import parsed, parsed_rest, rest_of, state_of
from trl_storages.replay.undisturbed import undisturbed
from trl_storages.samplers import (
    HERSampler,
    OwnSampler,
    PERSampler,
    UniformSampler,
    checked_priorities,
    layers_of,
    own_sampler,
)
from trl_storages.states import State
from trl_storages.streams.layout import Layout
from trl_storages.streams.staging import Block
from trl_storages.transforms import ReplayTransform, parts_of
from trl_storages.writing.recorder import Recorder
from trl_storages.writing.writer import EpisodeWriter

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from typing_extensions import Self

__all__ = ["ReplayStorage"]


class ReplayStorage(Strict, TensorDictReplayBuffer):  # type: ignore[misc]
    """Draws rows of a `PackedStorage` through its sampler and transforms.

    Args:
        storage: holds the rows.
        sampler: which of them are drawn; None draws uniformly.
        writer: which lanes there are, and how rows are written there; None writes to those of the
            storage.
        transform: what is made of rows that are drawn.
        batch_size: B.
        sample_unit: what a drawn row becomes, such as `EpisodeSequence`; None leaves it.
        recorder: how `record` reads a step; None takes the fields from the first step.
        generator: of the draws, on the CPU.
        **options: of TorchRL's `TensorDictReplayBuffer`: prefetch, priority_key, ...
    """

    # What TorchRL's constructor sets.
    shared, priority_key = False, "td_error"

    n_step, discount = Forwarded(), Forwarded()
    alpha, beta, normalize, eps = Forwarded(), Forwarded(), Forwarded(), Forwarded()
    eta, c_min = Forwarded(), Forwarded()
    num_goals, strategy = Forwarded(), Forwarded()

    def __init__(
        self,
        *,
        storage: PackedStorage,
        sampler: Any = None,
        writer: EpisodeWriter | None = None,
        transform: Transform | None = None,
        batch_size: int | None = None,
        sample_unit: Any = None,
        recorder: Recorder | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        arguments.instance("storage", storage, PackedStorage, what="a PackedStorage")
        arguments.optional(arguments.function, "transform", transform, "of a batch")
        arguments.optional(arguments.instance, "sample_unit", sample_unit, SampleUnit)
        writer = EpisodeWriter(storage.episodes.num_envs) if writer is None else writer
        super().__init__(
            storage=storage,
            sampler=UniformSampler() if sampler is None else own_sampler(sampler),
            writer=writer,
            transform=transform,
            batch_size=batch_size,
            collate_fn=_as_it_is,
            generator=generator,
            **options,
        )
        storage.is_replayed = True
        self._unit = sample_unit
        self._recorder = Recorder(writer.num_envs) if recorder is None else recorder
        self._prefetch_in_order()
        self._warned_batch_size_conflict = True
        # A directory is made when all else has been checked.
        storage.prepare()
        resume(self)
        if (prioritized := self._prioritized) is not None:
            prioritized.priorities_of(storage)

    @classmethod
    def _ServiceClass(  # noqa: N802  (TorchRL's name)
        cls, service_backend: str, *args: Any, service_backend_options: Any, **options: Any
    ) -> StorageHandle:
        arguments.choice("service_backend", service_backend, ("direct", "ray"))
        return on_ray(cls, *args, options=service_backend_options, **options)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        mode: str = "r+",
        check: bool = False,
        **options: Any,
    ) -> Self:
        """Opens the rows of a directory, drawn uniformly unless a sampler is passed.

        A ready-made storage is opened by making it again, with its `path`.

        Args:
            path: what was the `path` of a storage.
            mode: "r+" goes on writing, as the only writer; "r" reads what another process may be writing.
            check: whether each row is checked, as by `validate`; after an unclean end each is.
            **options: as in the constructor: sampler, transform, batch_size, generator, ...

        Raises:
            FileNotFoundError: the directory holds no storage.
            ValueError: it is damaged, or of another format.
            RuntimeError: it has another writer.
        """
        rows = PackedStorage(None, path=path, mode=mode)
        try:
            if check:
                rows.validate()
            opened = cls.__new__(cls)
            ReplayStorage.__init__(opened, storage=rows, **options)
        except BaseException:
            rows.close()
            raise
        return opened

    def _prefetch_in_order(self) -> None:
        if self._prefetch:
            # In one thread: more would reorder the draws.
            self._prefetch_executor = ThreadPoolExecutor(max_workers=1)

    # What there is

    @property
    def episodes(self) -> Any:
        """Which rows there are."""
        return self._storage.episodes

    @property
    def sample_unit(self) -> Any:
        """Expands drawn rows, such as `EpisodeSequence`; None draws single rows."""
        return self._unit

    @property
    def is_full(self) -> bool:
        """Whether every slot holds a row, so that the next write evicts the oldest."""
        return self.episodes.is_full

    def parts(self) -> list[Any]:
        """Returns the samplers and the transforms."""
        return [*layers_of(self._sampler), *parts_of(self._transform)]

    @property
    def _prioritized(self) -> PERSampler | None:
        layer = layers_of(self._sampler)[-1]
        return layer if isinstance(layer, PERSampler) else None

    def __len__(self) -> int:
        if "_storage" not in self.__dict__:
            return 0
        self._storage.look()
        return len(self.episodes)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether a batch can be drawn; `batch_size` defaults to the constructor's."""
        arguments.optional(arguments.integer, "batch_size", batch_size, at_least=1)
        return len(self) > 0

    # Writing

    def extend(
        self,
        tensordicts: TensorDictBase,
        *,
        lanes: Lanes = None,
        update_priority: bool | None = None,
    ) -> torch.Tensor:
        """Writes steps.

        Args:
            tensordicts: `[T]` for one lane, `[L, T]` (time last) or `[L]` (one step each) for several; or
                rows `[N]` of any trajectories, see `EpisodeWriter`.
            lanes: the L distinct lanes to write, as numbers or as a mask; None is all of them.
            update_priority: whether to use the entry `priority_key`, if present, as the rows' priority;
                None is True.

        Returns:
            int64 slots of the batch size of the steps.

        Raises:
            ValueError, KeyError, TypeError: the steps do not fit, or a priority is negative or not
                finite. Nothing is written then.
        """
        data = self._inverse(arguments.steps("tensordicts", tensordicts))
        if data is None:
            return torch.zeros(0, dtype=torch.int64)
        priority = None
        if update_priority is not False and self._prioritized is not None:
            priority = data.get(self.priority_key, None)
        if priority is not None:
            size = data.numel()
            if priority.numel() != size:
                priority = priority.reshape(size, -1).amax(1)
            priority = checked_priorities(priority, size)
        with self._replay_lock, self._write_lock:
            slots = self._writer.extend(data, lanes=lanes)
            if priority is not None:
                self.update_priority(slots, priority)
        return slots

    def add(self, data: TensorDictBase) -> torch.Tensor:
        """Writes one step: a transition `[]` of a single lane, or `[E]` of all lanes.

        Returns:
            int64 slots of the batch size of `data`.
        """
        if arguments.steps("data", data).ndim or self._writer.num_envs > 1:
            with self._replay_lock, self._write_lock:
                return self._writer.add(self._inverse(data))
        return self.extend(data.unsqueeze(0))[0]

    def record(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
        infos: Any,
        next_observations: Any,
    ) -> torch.Tensor | None:
        """Writes one step of a plain gymnasium loop.

        Args:
            observations: the observations the actions were chosen for: an array, or a dict of them;
                `[E, ...]` for a vector environment, without the leading dimension for a single one.
            actions: the actions taken.
            rewards: as returned by `step`, like all that follow.
            terminateds: whether the state is terminal.
            truncateds: whether the episode was truncated, as by a time limit.
            infos: gymnasium's dict.
            next_observations: as returned, possibly the first observation of the next episode;
                `autoreset_mode` says where the final one is found.

        Returns:
            int64 slots of the written rows; None if every lane was only being reset.

        Raises:
            ValueError, TypeError, KeyError: something does not fit. Nothing is written then.
        """
        step = observations, actions, rewards, terminateds, truncateds, infos, next_observations
        with self._replay_lock, self._write_lock:
            read = self._recorder.read(step, self._storage)
            slots = None
            if read is not None:
                slots = self._writer.append(*read) if not self._has_inverse else self._put(*read)
            self._recorder.remember()
        return slots

    def _put(self, block: Block, layout: Layout) -> torch.Tensor | None:
        """Writes a recorded step through the inverse of the transforms."""
        rows = layout.tensordict(torch.from_numpy(block.words.copy()))
        rows = self._inverse(rows)
        if rows is None:
            return None
        return self._writer.extend(rows, lanes=block.which)

    @property
    def _has_inverse(self) -> bool:
        for part in parts_of(self._transform):  # noqa: SIM110
            if not isinstance(part, ReplayTransform):
                return True
        return False

    def _inverse(self, data: TensorDictBase) -> TensorDictBase | None:
        return self._transform.inv(data) if self._has_inverse else data

    def end_episodes(self, lanes: Lanes = None) -> None:
        """Cuts the running episodes of some lanes, or of all: their next rows begin new ones.

        For loops that reset their environments before an episode ends.

        Args:
            lanes: numbers, or a mask `[E]`; None is all.

        Raises:
            ValueError: there is no such lane. Nothing is changed then.
        """
        named = None if lanes is None else [*named_lanes(lanes, self._writer.num_envs)]
        with self._replay_lock, self._write_lock:
            self._storage.end_episodes(named)
            self._recorder.reset(lanes)

    def rewrite(self, index: torch.Tensor, values: Any) -> None:
        """Overwrites values of the step of some rows, such as rewards; see `PackedStorage.rewrite`."""
        with self._replay_lock, self._write_lock:
            self._storage.rewrite(index, values)

    def empty(self, empty_write_count: bool = True, *, keep_steps: int = 0) -> None:
        """Removes the rows but the last `keep_steps` of each lane, such as the burn-in of a network.

        Args:
            empty_write_count: whether to reset the write counter.
            keep_steps: how many of the last steps of each lane stay.
        """
        keep_steps = arguments.integer("keep_steps", keep_steps)
        with self._futures_lock:
            self._clear_prefetch_queue_locked()
            with self._replay_lock, self._write_lock:
                self._storage.empty(keep_steps)
                self._writer._empty(empty_write_count)
                self._sampler._empty()

    # Rows as they were stored

    def __getitem__(self, index: Any) -> Any:
        """Reads rows as they were stored, without transforms, into new memory.

        Args:
            index: a slice of the history in time order, oldest row first; or slots, as an int, a list, a
                mask or an integer tensor of any shape B; or a key, for that entry of the whole history.

        Raises:
            IndexError: a slot holds no row.
        """
        with self._replay_lock, self._write_lock:
            return history.read(self._storage, index)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        """Raises: rows are not overwritten in place."""
        raise RuntimeError("rows are not overwritten in place: write others, or rewrite() a value.")

    set_ = set_at_ = update_ = __setitem__

    def register_save_hook(self, hook: Any) -> NoReturn:
        """Raises: a storage is saved as it is."""
        raise RuntimeError("a ReplayStorage has no hooks of saving and loading.")

    register_load_hook = register_save_hook

    def sample_episodes(self, n: int) -> TensorDictBase:
        """Draws whole episodes uniformly: finished ones, no row of which was evicted.

        Returns:
            TensorDict `[n, T]` of the stored transitions, T the longest episode's length, padded with
            zeros where `("collector", "mask")` is false, with `index`. Transforms apply, except
            `ReplayTransform`s.

        Raises:
            ValueError: `n` is below 1.
            RuntimeError: no finished episode is stored whole.
        """
        n = arguments.integer("n", n, at_least=1)
        with self._replay_lock, self._write_lock:
            return self._with_transforms(history.draw_episodes(self._storage, n, self._rng))

    def _with_transforms(self, batch: TensorDictBase) -> TensorDictBase:
        """Applies all transforms but those that read further rows."""
        for part in parts_of(self._transform):
            if not isinstance(part, ReplayTransform):
                batch = part(batch)
        return batch

    # Drawing

    def sample(self, batch_size: int | None = None, return_info: bool = False, **_: Any) -> Any:
        """Draws a batch.

        Args:
            batch_size: B; None uses the constructor's, the only size that `prefetch` draws ahead.
            return_info: whether to return the samplers' entries as a dict, too.

        Returns:
            TensorDict `[B]` of the stored fields, after the transforms, with `index` and the samplers'
            other entries; the rows of a `sample_unit` are consecutive.

        Raises:
            ValueError: `batch_size` is below 1.
            RuntimeError: the storage is empty, no batch size is known, or a `HERSampler` draws goals that
                no transform writes.
        """
        if batch_size is not None:
            batch_size = arguments.integer("batch_size", batch_size, at_least=1)
        if self._prefetch and batch_size in (None, self._batch_size):
            return ReplayBuffer.sample(self, batch_size, return_info)
        if batch_size is None and (batch_size := self._batch_size) is None:
            raise RuntimeError(
                "batch_size must be named here or where the storage is made, got none."
            )
        with self._replay_lock, self._write_lock:
            batch, info = self._sample(batch_size)
        return (batch, info) if return_info else batch

    def sample_share(self, batch_size: int) -> TensorDictBase:
        """Draws a part of a larger batch: not drawn ahead, its importance weights not normalised."""
        sampler = self._prioritized
        with self._replay_lock, self._write_lock:
            if sampler is None:
                return self._sample(batch_size)[0]
            normalize, sampler.normalize = sampler.normalize, "none"
            try:
                return self._sample(batch_size)[0]
            finally:
                sampler.normalize = normalize

    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        unit = 1 if self._unit is None else self._unit.num_steps
        return undisturbed(self._storage, partial(self._draw, batch_size), unit)

    def _draw(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any], list[torch.Tensor]]:
        storage, parts = self._storage, parts_of(self._transform)
        self._check_goals(parts)
        slots, info = self._sampler.sample(storage, batch_size)
        if not isinstance(self._sampler, OwnSampler):
            storage.episodes.check_live(slots)
        if self._unit is not None:
            slots, info = self._unit.expand(slots, info, storage)
        info[keys.INDEX] = slots
        rows = RowView(storage, slots, info)
        for part in parts:
            if isinstance(part, ReplayTransform):
                part.prepare(rows)
        for part in parts:
            if isinstance(part, ReplayTransform):
                part.replay(rows)
            else:
                rows.transform(part)
        return rows.tensordict(), info, rows.read

    def _check_goals(self, parts: list[Transform]) -> None:
        for layer in layers_of(self._sampler):
            if isinstance(layer, HERSampler) and not any(
                getattr(part, "uses_goals", False) for part in parts
            ):
                raise RuntimeError(
                    "HERSampler draws goals that a transform must write: pass "
                    "transform=GoalRelabel(reward_fn)."
                )

    def batches(
        self, num_batches: int, batch_size: int | None = None, epochs: int = 1
    ) -> Iterator[TensorDictBase]:
        """Returns an iterator over `num_batches * epochs` batches."""
        num_batches = arguments.integer("num_batches", num_batches)
        epochs = arguments.integer("epochs", epochs)
        batch_size = arguments.optional(arguments.integer, "batch_size", batch_size, at_least=1)
        return (self.sample(batch_size) for _ in range(num_batches * epochs))

    def loader(
        self,
        num_workers: int = 0,
        *,
        batch_size: int | None = None,
        fetch_every: int = 1,
        pin_memory: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> DataLoader[TensorDictBase]:
        """Returns a `DataLoader` whose workers draw from the directory while this process writes.

        Each worker has its own seed, and copies of this storage's sampler, sample unit and transforms as
        they are now. Priorities are set by this storage.

        Args:
            num_workers: processes that draw; they wait a minute for the first rows. 0 draws in this
                process, and raises as `sample` does while there are none.
            batch_size: B; None uses the constructor's.
            fetch_every: after how many batches at most a worker sees new rows; it does with each.
            pin_memory: whether batches arrive in pinned memory.
            seed: of the workers; None uses torch's default generator.
            **options: as in `torch.utils.data.DataLoader`: prefetch_factor, multiprocessing_context, ...

        Raises:
            RuntimeError: the rows are not in a directory, or none exists yet.
            ValueError: a number is too small, or no batch size is known.
        """
        with self._replay_lock:
            return make_loader(
                self, num_workers, batch_size, fetch_every, pin_memory, seed, options
            )

    def set_sampler(self, sampler: Any) -> Any:
        """Replaces the sampler; the new one uses this storage's generator. Returns the old one."""
        sampler = own_sampler(sampler)
        previous = super().set_sampler(sampler)
        sampler._rng = self._rng
        return previous

    # Priorities

    def _initialize_prioritized_sampler(self) -> None:
        pass  # samplers catch up with the rows when they draw

    def update_tensordict_priority(
        self, data: TensorDictBase, priority: torch.Tensor | None = None
    ) -> None:
        """Updates the priorities of a drawn batch, from its entry `priority_key` or from `priority`.

        Rows that others have replaced since are skipped. For sequences, each anchor gets its sequence's
        priority or, with one per row, the largest over its valid learning steps. A no-op if the sampler
        does not use priorities, so training loops can call it unconditionally.

        Raises:
            KeyError: the batch was drawn by priority but holds none, or lacks its `index`.
            ValueError: a priority is negative or not finite, or the shape does not fit. Nothing is
                changed then.
        """
        arguments.steps("data", data)
        if (sampler := self._prioritized) is None:
            return
        num_steps = 1 if self._unit is None else self._unit.num_steps
        drawn = drawn_priorities(data, self.priority_key, priority, sampler.reduction, num_steps)
        if drawn is None:
            return
        slots, values, steps = drawn
        with self._replay_lock, self._write_lock:
            sampler.set_priorities(self._storage, slots, values, steps)

    def update_priority(self, index: torch.Tensor, priority: torch.Tensor) -> None:
        """Sets the priorities of rows by their slots, such as those that `extend` returned.

        Raises:
            ValueError: a priority is negative or not finite. Nothing is changed then.
        """
        if (sampler := self._prioritized) is not None:
            with self._replay_lock, self._write_lock:
                sampler.set_priorities(self._storage, index, priority)

    # State

    def state_dict(self) -> State:
        """Returns all that the next writes and draws depend on: tensors, numbers, text, lists, dicts.

        Batches that were drawn ahead are not part of it.
        """
        with self._futures_lock:
            self.synchronize()
            with self._replay_lock, self._write_lock:
                return copy.deepcopy(state_of(self))

    def load_state_dict(self, state_dict: State) -> None:
        """Goes on from what `state_dict` returned, parameters included.

        Raises:
            ValueError, TypeError, KeyError: the state is damaged, or of a storage of another size,
                layout, number of lanes, or with other parts. Nothing is changed then.
        """
        with self._futures_lock:
            self.synchronize()
            with self._replay_lock, self._write_lock:
                adopt = parsed(self, state_dict)
                self._clear_prefetch_queue_locked()
                adopt()

    # In a directory

    def flush(self) -> None:
        """Waits until all rows are on the disk, with the state of generator, samplers and recorder.

        They survive a loss of power, unless evicted since.

        What is written survives a kill without it. In memory there is nothing to do.

        Raises:
            OSError: the disk is full. The rows are there, as after a kill.
        """
        with self._replay_lock, self._write_lock:
            self._storage.flush(progress_of(self))

    def close(self, *, keep: bool = True) -> None:
        """Flushes the rows of a directory, and lets another process write. Drawing goes on.

        Args:
            keep: whether the directory stays; False removes it.

        Raises:
            OSError: the disk is full. The rows are there, as after a kill.
        """
        keep = arguments.flag("keep", keep)
        with self._replay_lock, self._write_lock:
            self._storage.close(progress_of(self), keep=keep)

    def __getstate__(self) -> State:
        """Returns what makes a copy of the storage, with rows of its own."""
        return {**super().__getstate__(), "_iterator": None, "rest": rest_of(self)}

    def __setstate__(self, state: State) -> None:
        rest = state.pop("rest")
        super().__setstate__(state)
        self._prefetch_in_order()
        parsed_rest(self, rest)()

    # Checks

    def explain(self, batch: TensorDictBase) -> Explanation:
        """Reports which row each sample of a batch is and how it was transformed; prints as a table.

        Args:
            batch: sampled from this storage; its rows must not have been overwritten since.

        Returns:
            columns of slot, lane, age, episode, step and more, see `replay.explain`.

        Raises:
            KeyError: the batch has no `index`.
            ValueError: some of its rows are no longer stored.
        """
        arguments.steps("batch", batch)
        drawn = [it.goal_key for it in layers_of(self._sampler) if isinstance(it, HERSampler)]
        with self._replay_lock, self._write_lock:
            return explain(batch, self.episodes, [keys.DESIRED_GOAL, *drawn])

    def validate(self) -> None:
        """Checks the tables against one another, and in a directory each row.

        Raises:
            RuntimeError, ValueError: a check failed, or a row is damaged.
        """
        self._storage.validate()


def _as_it_is(batch: Any) -> Any:
    return batch
