"""The container: draws, gathers and transforms batches under its locks.

Letters: B batch, E lanes (environments).
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from tensordict import NestedKey, TensorDictBase
from torch.utils.data import DataLoader
from torchrl.data import (
    ReplayBuffer,
    Storage,
    TensorDictReplayBuffer,
    Trajectory,
    Writer,
)
from torchrl.data.replay_buffers.sample_units import SampleUnit
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.utils import pin_memory_output
from torchrl.envs.transforms import Transform

from trl_storages import arguments, keys
from trl_storages.arrays import steps_of
from trl_storages.attributes import Strict
from trl_storages.gym import GymRecorder
from trl_storages.priorities import Normalization
from trl_storages.replay import history, incoming, on_disk, registry
from trl_storages.replay.batch_priorities import drawn_priorities
from trl_storages.replay.batches import BatchSource
from trl_storages.replay.drawing import draw_rows
from trl_storages.replay.explain import Explanation, explain
from trl_storages.replay.incoming import KnownRows
from trl_storages.replay.loader import make_loader
from trl_storages.replay.parameters import Parameter
from trl_storages.replay.remote import RayHandle, in_actor
from trl_storages.replay.saving import (
    load_state,
    read_generator,
    saved_generator,
    state_of,
)
from trl_storages.ring import EpisodeIndex, Lanes, episodes_of
from trl_storages.rows import PackedStorage, RowView, check_writable
from trl_storages.sample_units import EpisodeSequence
from trl_storages.samplers import (
    GoalStrategy,
    UniformSampler,
    layers_of,
    own_sampler,
    prioritized_of,
)
from trl_storages.saved.files import NewState, read_state
from trl_storages.stock_parts import refuse_stock
from trl_storages.transforms import check_transforms, parts_of, transform_batch
from trl_storages.writing import EpisodeWriter

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ReplayStorage"]


class ReplayStorage(
    BatchSource,
    Strict,
    TensorDictReplayBuffer,  # type: ignore[misc]
):
    """A `TensorDictReplayBuffer` whose transforms see the sampler's entries and the storage.

    TorchRL merges the sampler's entries into a batch after its transforms have run, so a drawn goal
    never reaches the transform that must write it. Here they are merged first, each `ReplayTransform`
    gets access to the storage, and everything runs under the storage's locks, on one consistent state.

    Args:
        storage: holds the rows, ndim 1.
        sampler: chooses the rows of a batch; None draws uniformly over the live rows. TorchRL's
            `RandomSampler` and `SamplerWithoutReplacement` become a `UniformSampler`, its others raise;
            one of your own must return slots of live rows.
        writer: tracks the episodes; None is `EpisodeWriter()`, for one environment.
        transform: applied to each batch.
        recorder: turns the steps of a gymnasium loop into transitions, for `record`; None expects no
            autoreset.
        sample_unit: expands a drawn row, such as `EpisodeSequence`; None draws single rows.
        batch_size: B; None requires it with each `sample`.
        prefetch: number of batches to draw ahead in a background thread.
        generator: of the draws; None uses torch's default one.
        priority_key: entry of written steps, and of batches, that holds their priorities.
        collate_fn: applied to each batch before the transforms; see `TensorDictReplayBuffer`.
        pin_memory: whether batches are in pinned memory.
        shared: whether to `share()` at once.
        transform_factory: makes `transform`, in an actor of Ray.
        transport: how a storage in an actor is reached; see `TensorDictReplayBuffer`.
        service_backend: "ray" makes the storage in an actor of Ray, and returns a handle of it.
        service_backend_options: `remote_config` and `ray_init_config` of that actor.

    Raises:
        TypeError: a part is TorchRL's own and knows no episodes; the message names the one to use.
        ValueError: the writer does not fit the storage, or a stateful part belongs to another storage.

    >>> from tensordict import TensorDict
    >>> from trl_storages import NStep, PackedStorage
    >>> storage = ReplayStorage(storage=PackedStorage(100), transform=NStep(2, 0.9), batch_size=3)
    >>> outcome = {"reward": torch.ones(4, 1), "done": torch.zeros(4, 1, dtype=torch.bool)}
    >>> steps = {"observation": torch.rand(4, 2), "next": {**outcome, "terminated": outcome["done"]}}
    >>> storage.extend(TensorDict(steps, [4])).tolist()
    [0, 1, 2, 3]
    >>> storage.sample()["next", "reward"].shape
    torch.Size([3, 1])
    """

    # Set by TorchRL.
    is_remote = False
    shared = False
    priority_key: NestedKey = "td_error"

    if TYPE_CHECKING:
        # Typed Any, as users read and set attributes of many kinds of parts.
        @property
        def storage(self) -> Any:
            """Holds the rows."""

        @property
        def sampler(self) -> Any:
            """Draws the rows."""

        @property
        def writer(self) -> Any:
            """Tracks the episodes."""

        def client(self) -> Any:
            """Returns the storage, or a handle of the process that it is in."""

    n_step = Parameter[int]("n of the n-step returns, of `NStep`.")
    discount = Parameter[float](
        "gamma of the n-step returns, of `NStep`, and of geometric goals, of `HERSampler`; where the two "
        "differ, that of the returns is read, and both are set."
    )
    alpha = Parameter[float]("How strongly priorities count, of `PERSampler`.")
    beta = Parameter[float]("How far importance weights correct for priorities, of `PERSampler`.")
    normalize = Parameter[Normalization]("Whose largest weight is 1, of `PERSampler`.")
    eps = Parameter[float]("What is added to priorities, of `PERSampler`.")
    eta = Parameter[float]("Recency strength, of `ERESampler`.")
    c_min = Parameter[int]("The smallest window of recent rows, of `ERESampler`.")
    num_goals = Parameter[float]("Relabelled transitions for each one as stored, of `HERSampler`.")
    strategy = Parameter[GoalStrategy]("Where goals come from, of `HERSampler`.")

    _prefetch_queue: deque[Future[Any]]
    _prefetch_cap: int

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage],
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        transform: Transform | Callable[..., Any] | None = None,
        recorder: GymRecorder | None = None,
        sample_unit: SampleUnit | None = None,
        batch_size: int | None = None,
        prefetch: int | None = None,
        generator: torch.Generator | None = None,
        priority_key: NestedKey = "td_error",
        collate_fn: Callable[..., Any] | None = None,
        pin_memory: bool = False,
        shared: bool = False,
        transform_factory: Callable[[], Transform] | None = None,
        transport: Literal["auto", "direct", "ray", "distributed"] | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        # The metaclass has seen to them.
        del service_backend, service_backend_options
        if not callable(transform):
            arguments.optional(arguments.instance, "transform", transform, Transform)
        check_transforms(transform)
        refuse_stock(sample_unit)
        arguments.optional(arguments.instance, "sample_unit", sample_unit, EpisodeSequence)
        arguments.optional(arguments.instance, "recorder", recorder, GymRecorder)
        registry.check_own_parts(storage, sampler=sampler, writer=writer, recorder=recorder)
        super().__init__(
            storage=_made("storage", storage, Storage),
            sampler=UniformSampler() if sampler is None else _made("sampler", sampler, Sampler),
            writer=EpisodeWriter() if writer is None else _made("writer", writer, Writer),
            transform=transform,
            sample_unit=sample_unit,
            batch_size=arguments.optional(arguments.integer, "batch_size", batch_size, at_least=1),
            prefetch=arguments.optional(arguments.integer, "prefetch", prefetch),
            generator=arguments.generator("generator", generator),
            priority_key=arguments.key("priority_key", priority_key),
            collate_fn=collate_fn,
            pin_memory=arguments.flag("pin_memory", pin_memory),
            shared=arguments.flag("shared", shared),
            transform_factory=transform_factory,
            # TorchRL would delay initialization if given a `transform_factory`.
            delayed_init=False,
            transport=transport or "auto",
        )
        check_transforms(self._transform)
        self._storage.is_replayed = True
        self._recorder = recorder or GymRecorder(self._writer.num_envs)
        self._collates = collate_fn is not None
        self._known_rows = KnownRows()
        # The samplers and transforms of the last draw, if they fit whatever their settings are.
        self._fitting: tuple[list[Sampler], list[Transform]] | None = None
        # The samplers of the last draw.
        self._drawn_by: list[Sampler] | None = None
        if self.shared:
            self.share()
        # Suppresses TorchRL's warning about a batch size passed to a single `sample` call.
        self._warned_batch_size_conflict = True
        self._prefetch_in_order()
        on_disk.resume(self)
        registry.register(self)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        mode: Literal["r+", "r"] = "r+",
        sampler: Sampler | None = None,
        transform: Transform | Callable[..., Any] | None = None,
        device: torch.device | str | None = None,
        fetch_every: int = 1,
        check: bool | None = None,
        progress: bool = False,
        **options: Any,
    ) -> Self:
        """Opens the rows of a directory, with their episodes, priorities and counters.

        Samplers, transforms and reward functions are not stored and must be passed again: opening runs
        no stored code. Without them rows are drawn uniformly and shown as they were stored, also those
        of a ready-made storage. Make that one again with its options instead, such as `n_step` and
        `alpha`: `path=` goes on writing, `path=` with `mode="r"` reads.

        Args:
            path: a directory that was made with `path=` or `scratch_dir=`.
            mode: "r+" continues writing, as the only writer. "r" reads while another process writes;
                any number of readers may do so.
            sampler: as in the constructor.
            transform: as in the constructor.
            device: device of the batches; the rows stay in their files.
            fetch_every: with mode "r", how many batches to draw between checks for new rows.
            check: whether to verify every row's checksum. None verifies unless the directory was closed
                cleanly: after a kill or a power loss, intact rows are kept and a warning reports what
                was lost.
            progress: whether to show a progress bar.
            **options: as in the constructor: batch_size, generator, recorder, ...

        Raises:
            FileNotFoundError: the directory holds no storage.
            ValueError: it is damaged or of another format, or a row does not match its checksum.
            RuntimeError: it has another writer.
            OSError: it may not be written.
        """
        rows = PackedStorage.open(
            arguments.directory("path", path),
            mode=mode,
            out_device=arguments.optional(arguments.device, "device", device),
            check=check,
            fetch_every=fetch_every,
            progress=progress,
        )
        storage = cls.__new__(cls)
        with rows.released_on_error():
            num_envs, fields = episodes_of(rows).num_envs, rows.layout.keys  # type: ignore[union-attr]
            writer = EpisodeWriter(num_envs, keys=fields)
            # The constructors of ready-made storages take other arguments.
            parts: Any = {"storage": rows, "writer": writer, "sampler": sampler}
            ReplayStorage.__init__(storage, **parts, transform=transform, **options)
        return storage

    @classmethod
    def _open_reader(cls, path: Path, **options: Any) -> Self:
        # Ready-made storages override `open` to raise.
        return ReplayStorage.open.__func__(cls, path, mode="r", **options)  # type: ignore[attr-defined]

    @classmethod
    def _ServiceClass(  # noqa: N802  (TorchRL's name)
        cls, service_backend: str, *args: Any, service_backend_options: Any = None, **options: Any
    ) -> RayHandle:
        arguments.choice("service_backend", service_backend, ("direct", "ray"))
        # TorchRL's handle lacks the methods of this class.
        where = service_backend_options or {}
        return RayHandle(*args, where=where, replay_buffer_cls=cls, **options)

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Any:
        """Returns a Ray actor class; see `in_actor` for how it differs.

        Args:
            remote_config: resources of the actor, as in `ray.remote`; None is one processor, and a fifth
                of a GPU where there is one.
        """
        if remote_config is None:
            # TorchRL's default also reserves 2 GiB, which a small machine may never have free.
            remote_config = {"num_cpus": 1}
            if torch.cuda.is_available():
                remote_config["num_gpus"] = 0.2
        arguments.mapping("remote_config", remote_config, "a dict as in ray.remote, or None")
        return super(ReplayStorage, in_actor(cls)).as_remote(remote_config)  # type: ignore[misc]

    @property
    def sample_unit(self) -> SampleUnit | None:
        """Expands drawn rows, such as `EpisodeSequence`; None draws single rows."""
        return self._sample_unit

    @property
    def episodes(self) -> EpisodeIndex:
        """The episode index of the storage."""
        return episodes_of(self.storage)

    def __len__(self) -> int:
        if "_recorder" not in self.__dict__:
            return 0  # the constructor raised; do not hide its error
        # TorchRL's storages count all slots up to the last row, empty ones included.
        with self._replay_lock:
            on_disk.look(self._storage)
            return len(self.episodes)

    @property
    def is_full(self) -> bool:
        """Whether every slot holds a row, so that the next write overwrites the oldest."""
        with self._replay_lock:
            on_disk.look(self._storage)
            return self.episodes.is_full

    @property
    def write_count(self) -> int:
        """How many rows were ever written, including overwritten ones."""
        with self._replay_lock:
            committed = on_disk.look(self._storage)
        found: int = super().write_count if committed is None else committed.write_count
        return found

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether a batch can be drawn; `batch_size` defaults to the constructor's."""
        batch_size = arguments.optional(arguments.integer, "batch_size", batch_size, at_least=1)
        with self._replay_lock, self._write_lock:
            on_disk.look(self._storage)
            found: bool = super().can_sample(batch_size)
            return found

    # Writing

    def extend(
        self,
        tensordicts: TensorDictBase | Mapping[str, Any],
        *,
        lanes: Lanes = None,
        update_priority: bool | None = None,
    ) -> torch.Tensor:
        """Writes steps.

        Args:
            tensordicts: `[T]` for one lane, `[L, T]` (time last) or `[L]` (one step each) for several.
                Or a dictionary of dataset arrays, `[T, ...]` for one lane, under any names that
                `trl_storages.datasets.from_arrays` accepts.
            lanes: the L distinct lanes to write, as numbers or as a mask; None is all of them.
            update_priority: whether to use the entry `priority_key`, if present, as the steps' priority;
                None is True.

        Returns:
            int64 slots of the batch size of the steps.

        Raises:
            ValueError, KeyError: the steps do not fit, or a priority is NaN, negative or infinite.
                Nothing is written then.
        """
        update_priority = arguments.optional(arguments.flag, "update_priority", update_priority)
        steps = self._steps(tensordicts)
        put = partial(self._writer.extend, lanes=lanes)
        return incoming.write(self, put, steps, has_priority=update_priority is not False)

    def _steps(self, tensordicts: Any) -> TensorDictBase:
        return steps_of("tensordicts", tensordicts, getattr(self._storage, "layout", None))

    def add(self, data: TensorDictBase) -> torch.Tensor:
        """Writes one step: a transition `[]` of a single lane, or `[E]` of all lanes.

        Returns:
            int64 slots of the batch size of `data`.

        Raises:
            ValueError, KeyError: the step does not fit. Nothing is written then.
        """
        return incoming.write(self, self._writer.add, arguments.steps("data", data))

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
                `autoreset_mode` determines where the final one is found.

        Returns:
            int64 slots of the written rows; None if every lane was only being reset, or if a transform
            withheld the rows.

        Raises:
            ValueError, TypeError, KeyError: something does not fit. Nothing is written then.
        """
        step = observations, actions, rewards, terminateds, truncateds, infos, next_observations
        return incoming.record(self, step)

    def end_episodes(self, lanes: Any = None) -> None:
        """Cuts the running episodes: the next row of each lane starts a new one.

        For loops that reset their environments before an episode ends. An environment that gymnasium
        resets in its next step has ended already: cut then, that step would be stored as a row.

        Args:
            lanes: the lanes that were reset, as numbers or as a mask `[E]`, which may name none; None is
                all of them.

        Raises:
            ValueError: there is no such lane. Nothing is changed then.
            RuntimeError: the rows are in a directory that this process may not write.
        """
        with self._replay_lock, self._write_lock:
            check_writable(self._storage)
            self.episodes.end_episodes(lanes)
            self._recorder.reset(lanes)

    def share(self, shared: bool = True) -> ReplayStorage:
        """Lets other processes write, such as the workers of TorchRL's multi-process collectors.

        Rows and episodes move to shared memory. Only one process draws: before each draw its sampler
        is updated with the rows that others wrote.

        Args:
            shared: whether to share; TorchRL's constructor passes False.

        Returns:
            itself.

        Raises:
            RuntimeError: the rows are on a GPU or in a directory.
            ValueError: `prefetch` is set.
        """
        shared = arguments.flag("shared", shared)
        if shared and self._prefetch:
            raise ValueError(
                f"a storage that is shared can't draw ahead, got prefetch={self._prefetch}; leave it out."
            )
        # TorchRL's constructor calls this before there is anything to share.
        if shared and self.initialized:
            self._writer.share_memory_()
            self._known_rows = KnownRows(self.episodes)
        super().share(shared)
        if shared:
            # Methods that hold it call others that take it; TorchRL's lock would wait for itself.
            self._write_lock = multiprocessing.RLock()
        return self

    # Rows as they were stored

    @on_disk.consistent_read
    def __getitem__(self, index: Any) -> Any:
        """Reads rows as they were stored, without transforms, into new memory.

        Args:
            index: a slice of the history in time order, oldest row first (lanes are interleaved in the
                order of `EpisodeIndex.ages`); or slots, as an int, a list, a mask or an integer tensor
                of any shape B; or a key, for that entry of the whole history.

        Returns:
            TensorDict `[B]`, or the entry.

        Raises:
            IndexError: a slot holds no row.
        """
        return history.read_rows(self._storage, index)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        """Raises a RuntimeError: stored rows are never changed in place."""
        history.refuse_changes()

    # TorchRL's versions write, unchecked, into views of the rows, or into temporary copies.

    def set_(self, key: NestedKey, value: Any) -> NoReturn:
        """Raises a RuntimeError: stored rows are never changed in place."""
        history.refuse_changes()

    def set_at_(self, key: NestedKey, value: Any, index: Any) -> NoReturn:
        """Raises a RuntimeError: stored rows are never changed in place."""
        history.refuse_changes()

    def update_(self, value: Any) -> NoReturn:
        """Raises a RuntimeError: stored rows are never changed in place."""
        history.refuse_changes()

    def register_save_hook(self, hook: Any) -> NoReturn:
        """Raises a RuntimeError: a storage is saved as it is."""
        raise RuntimeError(
            "a ReplayStorage has no hooks of saving and loading: change what state_dict() returns"
        )

    register_load_hook = register_save_hook

    @on_disk.consistent_read
    def query(
        self,
        predicate: Callable[[Trajectory], bool] | None = None,
        *,
        trajectory_key: NestedKey | None = None,
    ) -> list[Trajectory]:
        """Lists the stored episodes, lane by lane, oldest first.

        Args:
            predicate: a filter as built from `torchrl.data.traj`; None lists all.
            trajectory_key: entry that tells episodes apart; None uses the episode index.

        Returns:
            TorchRL `Trajectory`s of the rows as stored, including running and cut episodes;
            `("collector", "traj_ids")` numbers the episodes.
        """
        if predicate is not None:
            arguments.function("predicate", predicate, "of a Trajectory, or None")
        trajectory_key = arguments.optional(arguments.key, "trajectory_key", trajectory_key)
        return history.list_trajectories(self._storage, predicate, trajectory_key)

    # Priorities

    def _initialize_prioritized_sampler(self) -> None:
        # TorchRL would reset the priorities of rows already stored. Attach now, as later writes notify
        # the sampler without passing it the storage.
        if (sampler := prioritized_of(self._sampler)) is not None:
            sampler.attach(self._storage)
            sampler.catch_up(self._storage)

    def update_tensordict_priority(
        self, data: TensorDictBase, priority: torch.Tensor | None = None
    ) -> None:
        """Updates the priorities of a sampled batch, from its entry `priority_key` or from `priority`.

        Rows overwritten since the draw are skipped. For sequences, each anchor gets its sequence's
        priority or, with one per row, the largest over its valid learning steps. A no-op if the sampler
        does not use priorities, so training loops can call it unconditionally.

        Args:
            data: a sampled batch, possibly reshaped to sequences by `batch.reshape(-1, num_steps)`; its
                priorities are `[B]`, `[B, 1]`, or `[B, ...]`, reduced by the sampler's `reduction`.
            priority: the priorities, if not an entry of the batch: one per row, shape `[B]`, or `[n, S]`
                for n sequences of S rows; or one per sequence, `[n]`, as from `sequence_priority`.

        Raises:
            KeyError: the batch was drawn by priority but holds none, or lacks its `index`.
            ValueError: a priority is NaN, negative or infinite; the shape is `[B, B]`, as produced by
                broadcasting `[B]` with `[B, 1]`; or the count does not match. Nothing is changed then.
        """
        arguments.steps("data", data)
        if priority is not None:
            priority = arguments.values("priority", priority)
        if (sampler := prioritized_of(self._sampler)) is None:
            return
        num_steps = 1 if self._sample_unit is None else self._sample_unit.num_steps
        drawn = drawn_priorities(data, self.priority_key, priority, sampler.reduction, num_steps)
        if drawn is None:
            return
        index, priority, stamp = drawn
        with self._replay_lock, self._write_lock:
            if self.shared:
                self._known_rows.tell(self._sampler, self.episodes)
            sampler.update_priority(index, priority, storage=self._storage, stamp=stamp)

    def update_priority(self, index: torch.Tensor, priority: torch.Tensor) -> None:
        """Sets the priorities of rows by their slots, such as those that `extend` returned.

        For a sampled batch call `update_tensordict_priority`, which skips rows overwritten since the draw
        and knows sequences.

        Args:
            index: `[B]` int64 slots.
            priority: `[B]` non-negative numbers, or one for all.

        Raises:
            ValueError: a priority is NaN, negative or infinite. Nothing is changed then.
        """
        super().update_priority(index, arguments.values("priority", priority))

    # Sampling

    def append_transform(
        self, transform: Transform | Callable[..., Any], *, invert: bool = False
    ) -> Self:
        """Appends a transform.

        Args:
            transform: a TorchRL transform, or a function of a batch. Its inverse, if any, is applied to
                what is written: `DoubleToFloat`'s makes actions float64, unless `in_keys` is given.
            invert: whether to swap the directions: forward on writes, inverse on samples.

        Returns:
            itself.
        """
        if not callable(transform):
            what = "a TorchRL transform, or a function of a batch"
            arguments.instance("transform", transform, Transform, what=what)
        check_transforms(transform)
        # A batch that is drawn meanwhile must not see the transforms half changed.
        with self._replay_lock:
            return super().append_transform(transform, invert=arguments.flag("invert", invert))

    def insert_transform(self, index: int, transform: Transform, *, invert: bool = False) -> Self:
        """Inserts a transform.

        Args:
            index: how many transforms come before it.
            transform: a TorchRL transform.
            invert: as in `append_transform`.

        Returns:
            itself.
        """
        index = arguments.integer("index", index, at_most=len(self._transform))
        arguments.instance("transform", transform, Transform, what="a TorchRL transform")
        check_transforms(transform)
        with self._replay_lock:
            return super().insert_transform(
                index, transform, invert=arguments.flag("invert", invert)
            )

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replaces the sampler; the new one uses this storage's generator.

        One that drew before keeps its priorities; rows written since get the largest of them.

        Returns:
            the previous sampler.

        Raises:
            TypeError: it is a sampler of TorchRL's that has no equal here. Nothing is changed then.
            ValueError: it holds the priorities of another storage. Nothing is changed then.
        """
        arguments.instance("sampler", sampler, Sampler, what="a sampler, such as PERSampler")
        sampler = own_sampler(sampler)
        registry.check_own_parts(self._storage, sampler=sampler)
        leaves, comes = prioritized_of(self._sampler), prioritized_of(sampler)
        with self._replay_lock, self._write_lock:
            if comes is not None and comes is not leaves:
                comes.catch_up(self._storage)
            if leaves is not None and comes is not leaves:
                leaves.leave(self._storage)
            previous = super().set_sampler(sampler)
            sampler._rng = self._rng
        return previous

    def _sample_checked(self, batch_size: int | None, return_info: bool) -> Any:
        # TensorDictReplayBuffer.sample would merge the sampler's entries a second time.
        sample = partial(ReplayBuffer.sample, self, batch_size, return_info)
        if not self._prefetch or batch_size is None or batch_size == self._batch_size:
            return sample()
        # TorchRL would return a prefetched batch of the wrong size and prefetch one of this size.
        with self._futures_lock:
            before = self._prefetch_queue, self._prefetch_cap
            # Let pending draws finish first, so that draws are reproducible from a seed.
            wait(self._prefetch_queue)
            try:
                self._prefetch_queue, self._prefetch_cap = deque(), 0
                return sample()
            finally:
                self._prefetch_queue, self._prefetch_cap = before

    @pin_memory_output  # type: ignore[untyped-decorator]
    @on_disk.consistent_read
    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        rows, info = draw_rows(self, batch_size)
        return rows.tensordict(), info

    @on_disk.consistent_read
    def _sample_part(self, batch_size: int) -> tuple[RowView, dict[str, Any]]:
        """Samples this storage's part of an ensemble's batch."""
        rows, info = draw_rows(self, batch_size)
        rows.gather()
        return rows, info

    @on_disk.consistent_read
    def sample_episodes(self, n: int) -> TensorDictBase:
        """Samples whole episodes uniformly: finished ones, no row of which was overwritten.

        Args:
            n: how many.

        Returns:
            TensorDict `[n, T]` of the stored transitions, T the longest episode's length, padded with
            zeros where `("collector", "mask")` is false, with `index`. Transforms apply, except
            `ReplayTransform`s. `returns_to_go` computes their returns.

        Raises:
            ValueError: `n` is below 1.
            RuntimeError: no finished episode is stored whole.
        """
        n = arguments.integer("n", n, at_least=1)
        batch = history.draw_episodes(self._storage, n, self._rng)
        return transform_batch(parts_of(self._transform), batch)

    def empty(self, empty_write_count: bool = True, *, keep_steps: int = 0) -> None:
        """Removes the stored rows.

        Args:
            empty_write_count: whether to reset the write counter.
            keep_steps: how many of the last steps of each lane to keep, such as the burn-in of a
                recurrent network. Their priorities are reset.

        Raises:
            ValueError: `keep_steps` is negative.
            RuntimeError: the rows are in a directory that this process may not write.
        """
        empty_write_count = arguments.flag("empty_write_count", empty_write_count)
        keep_steps = arguments.integer("keep_steps", keep_steps)
        check_writable(self._storage)
        with self._futures_lock:
            # Prefetched batches hold removed rows.
            self._clear_prefetch_queue_locked()
            with self._replay_lock, self._write_lock:
                self._known_rows = KnownRows()
                if keep_steps and len(self):
                    self.writer.restart(keep_steps, empty_write_count, then=self._tell_of_kept)
                    return
                super().empty(empty_write_count)

    def _tell_of_kept(self, slots: torch.Tensor) -> None:
        """Resets the sampler to the rows that were kept."""
        self._sampler._empty()
        self._sampler.extend(slots)

    # On disk

    def flush(self) -> None:
        """Syncs all rows to disk, together with the state of generator and samplers.

        Written rows survive a killed process even without a flush. Flushed rows also survive a power
        loss at any later time, unless evicted since. Does nothing for rows in memory.

        Raises:
            OSError: the disk is full. Rows already written are not lost.
            FileNotFoundError: the directory was removed; the message says how to save the rows.
        """
        with self._replay_lock, self._write_lock:
            on_disk.flush(self)

    def close(self, *, keep: bool = True) -> None:
        """Flushes the rows of a directory and releases it to other writers. Sampling still works.

        Args:
            keep: whether to keep the files; False deletes them.

        Raises:
            RuntimeError: `keep` is False, but this process may not write the files.
            OSError: the disk is full. Rows already written are not lost.
            FileNotFoundError: as `flush`. The directory is released even so.
        """
        keep = arguments.flag("keep", keep)
        with self._replay_lock, self._write_lock:
            on_disk.close(self, keep=keep)

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
        """Returns a `DataLoader` whose workers draw batches from the directory while this process writes.

        Each worker has its own seed and reads committed rows; sampler, sample unit, transforms and
        `collate_fn` are copies of this storage's current ones. Priorities are set by this storage: a
        worker draws by those it last fetched.

        Workers are started by the method set in `torch.multiprocessing`. TorchRL sets "spawn": scripts
        then need an `if __name__ == "__main__":` guard, and reward functions must be importable;
        `multiprocessing_context="fork"` requires neither.

        Args:
            num_workers: processes that draw; they wait for the first rows, or whole episodes. 0 draws in
                this process and raises as `sample` does while there are none.
            batch_size: B; None uses the constructor's.
            fetch_every: batches that a worker draws between checks for new rows and priorities.
            pin_memory: whether batches arrive in pinned memory.
            seed: seed of the workers; None uses torch's default generator.
            **options: as in `torch.utils.data.DataLoader`: prefetch_factor, persistent_workers, ...

        Raises:
            RuntimeError: the rows are not in a directory, or none exists yet.
            ValueError: a number is too small, or no batch size is known.
        """
        return make_loader(self, num_workers, batch_size, fetch_every, pin_memory, seed, options)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Returns everything the next samples and writes depend on, as tensors and plain values.

        As in TorchRL, the rows alias the storage: later writes change them, so `copy.deepcopy` the state,
        or save it, before writing again. Batches that were drawn ahead are dropped: only without
        `prefetch` does a loaded storage draw what this one would have drawn next.
        """
        with self._capture_prefetch_state(clone_queue=False), self._write_lock:
            return state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Everything is checked before anything is changed.

        Raises:
            RuntimeError: the rows are in a directory that this process may not write.
            KeyError, TypeError, ValueError: the state is damaged, or from a storage of another size,
                layout, number of lanes or kind of sampler. Nothing is changed then.
        """
        load_state(self, state_dict)

    def dumps(self, path: str | Path, *, progress: bool = False) -> None:
        """Saves what `state_dict` returns. Loading it runs no code.

        Other threads may write and draw meanwhile: they wait. Pickling and deep copies do not make them
        wait, so pause them then.

        An earlier dump in the directory is replaced once this one is complete and on disk: after an
        error, a kill or a power cut, one of the two is there.

        Args:
            path: a directory, which may hold an earlier dump.
            progress: whether to show a progress bar.

        Raises:
            OSError: the disk is full; it must have room for both.
            TypeError: the state of a third-party part holds more than tensors and plain values. Nothing
                is written then.
            RuntimeError: the rows are in a directory whose writer overwrites them faster than this
                process copies them.
        """
        path, progress = arguments.directory("path", path), arguments.flag("progress", progress)
        with (
            self._capture_prefetch_state(clone_queue=False),
            NewState(path) as saved,
        ):
            self._write_dump(saved, progress)

    @on_disk.consistent_read
    def _write_dump(self, saved: NewState, progress: bool) -> None:
        on_disk.note_all(self._storage)
        saved.write(state_of(self), progress=progress)

    def loads(self, path: str | Path, *, progress: bool = False) -> None:
        """Restores what `dumps` saved. Everything is checked before anything is changed.

        The saved generator, batch size and parameters, such as `alpha` and `n_step`, replace those that
        this storage was made with.

        Args:
            path: the directory.
            progress: whether to show a progress bar.

        Raises:
            FileNotFoundError: there is no such directory.
            KeyError, TypeError, ValueError: as `load_state_dict`; or a file is missing, truncated or
                damaged, or a link, a pipe or a device. Nothing is changed then.
        """
        progress, state = arguments.flag("progress", progress), read_state(path)
        load_state(self, state, progress=progress)

    def _prefetch_in_order(self) -> None:
        """Prefetches in one thread: draws are serialized anyway, and more threads would reorder them."""
        if self._prefetch:
            self._prefetch_executor = ThreadPoolExecutor(max_workers=1)

    def __getstate__(self) -> dict[str, Any]:
        # An unfinished iterator can't be pickled and is not part of the state. TorchRL's copy of the
        # generator's state does not work for a GPU generator.
        state = {
            **super().__getstate__(),
            "_iterator": None,
            "_rng": None,
            "_fitting": None,
            "_drawn_by": None,
        }
        # With the same generator a spawned process would repeat this one's draws.
        is_spawning = get_spawning_popen() is not None
        state["generator__context"] = None if is_spawning else saved_generator(self._rng)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = read_generator(state.pop("generator__context"))
        super().__setstate__(state)
        registry.register(self)
        self._prefetch_in_order()
        if generator is not None:
            self.set_rng(generator)

    # Inspection

    def explain(self, batch: TensorDictBase) -> Explanation:
        """Reports which row each sample of a batch is and how it was transformed; prints as a table.

        Args:
            batch: sampled from this storage; its rows must not have been overwritten since.

        Returns:
            columns of slot, lane, age, episode, step and more.

        Raises:
            KeyError: the batch has no `index`.
            ValueError: some of its rows are no longer stored.
        """
        arguments.steps("batch", batch)
        with self._replay_lock, self._write_lock:
            # The batch may have been drawn before `set_sampler`.
            drawn = [getattr(layer, "goal_key", None) for layer in layers_of(self._sampler)]
            goals = dict.fromkeys([keys.DESIRED_GOAL, *filter(None, drawn)])
            return explain(batch, self.episodes, goals)

    @on_disk.consistent_read
    def validate(self, *, progress: bool = False) -> None:
        """Checks the invariants of rows, index and priorities, and the checksums of rows on disk.

        Args:
            progress: whether to show a progress bar for the rows on disk.

        Raises:
            RuntimeError: a check failed; the message says which and where.
        """
        progress = arguments.flag("progress", progress)
        self.episodes.validate()
        self._writer.validate()
        if (sampler := prioritized_of(self._sampler)) is not None:
            if self.shared:
                self._known_rows.tell(self._sampler, self.episodes)
            sampler.attach(self._storage)  # picks up what the last refresh read
            sampler.validate(self.episodes.live_slots())
        on_disk.check_rows(self._storage, progress)

    def __repr__(self) -> str:
        parts = [self._storage, self._sampler, self._writer]
        parts += list(self._transform) if len(self._transform) else []
        lines = "".join(f"\n    {part}," for part in parts)
        return f"{type(self).__name__}({lines}\n    batch_size={self._batch_size})"


def _made(name: str, part: Any, kind: type) -> Any:
    """Returns a part, or what a function makes; raises if it is TorchRL's and knows no episodes."""
    if not isinstance(part, kind) and callable(part):
        part = part()
    arguments.instance(name, part, kind)
    if kind is Sampler:
        return own_sampler(part)
    refuse_stock(part)
    return part
