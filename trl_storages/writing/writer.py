"""Writes the rows of one or several environments, and keeps their episodes.

Letters: T steps, E lanes (environments), L lanes written now.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import Value
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.data import RoundRobinWriter, Storage, TensorStorage

from trl_storages import arguments
from trl_storages import keys as default_keys
from trl_storages.interrupts import complete, finish
from trl_storages.kernels import backend
from trl_storages.ring import EpisodeIndex, Lanes
from trl_storages.ring.history import slots_of
from trl_storages.ring.index import Kept
from trl_storages.rows import (
    DurableLanes,
    Layout,
    Nested,
    PackedStorage,
    StepBlock,
    nested_sizes,
    read_fields,
    rows_of_flags,
    stage,
    tensors_of,
)
from trl_storages.saved import SavedPart, SavedState
from trl_storages.signatures import SettledWriter
from trl_storages.stock_parts import check_buffers, check_draws, check_not_joined
from trl_storages.writing.checks import end_flags, lanes_and_steps, refuse_padding
from trl_storages.writing.gaps import GapWatch, OnGap
from trl_storages.writing.routing import route

if TYPE_CHECKING:
    from trl_storages.kernels import NewRows, RowTable

__all__ = ["EpisodeWriter", "num_slots"]

_NO_EPISODES = (
    "the saved state must hold an episode index, and that of other writers than EpisodeWriter has none; "
    "write the rows anew with extend(). Nothing was changed."
)

#: Takes the slots of rows that were written.
Then = Callable[[torch.Tensor], object]


class _Steps(NamedTuple):
    """n rows that may be written."""

    rows: NewRows
    """Of a storage of TorchRL's what is compared only."""
    layout: Layout | None
    """Of these rows; None where nothing of them is known."""
    trajectory: torch.Tensor | None = None
    """`[n]` int64 on the device of the index."""
    data: TensorDictBase | None = None
    """`[n]`, for a storage of TorchRL's own."""


class _Block(NamedTuple):
    """`[L, T]` of the rows that are the next steps of L lanes, and what is known of them."""

    num_steps: int
    lanes: Sequence[int] | None
    """None for all of them."""
    order: torch.Tensor | None = None
    """`[L, T]` which of the rows these are; None for all of them, in order."""
    cut: torch.Tensor | None = None
    """`[L, T]` bool, which begin an episode whatever came before; None for none."""
    last_trajectory: torch.Tensor | None = None
    """`[L]` int64."""


_ONE_STEP = _Block(1, None)


class EpisodeWriter(SavedPart, SettledWriter, RoundRobinWriter):
    """A round-robin writer that knows which rows belong to one episode.

    It takes what TorchRL's collectors send: `[T]` steps of one environment or whole trajectories one
    after another, `[E, T]` steps of several (time last, dense or lazily stacked), and single steps
    `[E]`. Flat rows `[N]` of several environments, such as `data.reshape(-1)`, find their lanes by
    `traj_key`. The storage gets an `EpisodeIndex` as its attribute `episodes`.

    A row goes on where its lane stands, unless the row before it was `done` or was of another
    trajectory. Where its observation is not that row's next one, environments were reset without a
    word, or another stream began: see `on_gap`.

    Args:
        num_envs: E, the lanes of the ring.
        done_key: `[..., 1]` bool entry that ends an episode.
        traj_key: integer entry, one number a trajectory, that cuts an episode where it changes; it
            may be absent.
        keys: entries to store, the others are left out; None stores all.
        track_generations: as in TorchRL's `RoundRobinWriter`.
        on_gap: what happens to a row that does not begin, bit for bit, with the next observation of
            the row before it: "warn" says so once, before the row is stored as its continuation; "cut"
            begins an episode with it; "ignore" does not look. Rows on a GPU are warned of a little
            later, so that nothing waits for it.
        observation_keys: entries that are compared with what lies under `next`; None compares
            `observation`, or, where that is missing, all that have a twin under `next` (other than
            the desired goal, rewards and flags).

    Raises:
        ValueError: `num_envs` is below 1, `on_gap` is something else, or `observation_keys` are not
            stored.
        TypeError: `observation_keys` is not a sequence of keys.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        done_key: NestedKey = default_keys.DONE,
        traj_key: NestedKey = default_keys.TRAJECTORY_IDS,
        keys: Sequence[NestedKey] | None = None,
        track_generations: bool = False,
        on_gap: OnGap = "warn",
        observation_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        num_envs = arguments.integer("num_envs", num_envs, at_least=1)
        track_generations = arguments.flag("track_generations", track_generations)
        # Which process wrote last to each lane, if several do.
        self._last_process: torch.Tensor | None = None
        self._write_count_value = Value("q", 0)
        super().__init__(track_generations=track_generations)
        # How many buffers have registered it with its storage.
        self._num_registered = 0
        self.num_envs = num_envs
        self.done_key = arguments.key("done_key", done_key)
        self.traj_key = arguments.key("traj_key", traj_key)
        self.keys = None if keys is None else arguments.keys("keys", keys)
        #: Looks for rows that do not continue the row before them.
        self.gaps = GapWatch(on_gap, observation_keys)
        self._check_stored(self.gaps.observation_keys)
        self._last_trajectory: torch.Tensor | None = None
        # When each lane was written last, in rows written.
        self._last_written = np.zeros(num_envs, np.int64)
        self._on_disk: DurableLanes | None = None
        # Whether the storage is ours, whose rows are copied together with the index.
        self._is_packed = False

    def _check_stored(self, observation_keys: Sequence[NestedKey] | None) -> None:
        if self.keys is None or observation_keys is None:
            return
        wanted = [name for key in observation_keys for name in (key, default_keys.next_key(key))]
        if missing := [key for key in wanted if key not in self.keys]:
            raise ValueError(
                f"observation_keys are compared with the rows that are stored, and {missing} are not: "
                f"keys must name them, got {self.keys}."
            )

    def register_storage(self, storage: Storage) -> None:
        """Gives `storage` its episode index.

        Raises:
            TypeError: the storage keeps no tensors on a device.
            ValueError: the storage has more dimensions than one, fewer rows than lanes, an index of
                another number of lanes, or rows without an index; or its buffer has a sampler or a sample
                unit of TorchRL's that can't be right over the lanes; or TorchRL's `ReplayBufferEnsemble`
                joins it with others.
        """
        if not isinstance(storage, TensorStorage) or not isinstance(storage.device, torch.device):
            raise TypeError(
                "EpisodeWriter needs a storage of tensors on a device that is known, such as "
                f"PackedStorage or LazyTensorStorage, got {type(storage).__name__} with device="
                f"{getattr(storage, 'device', None)!r}."
            )
        if storage.ndim != 1:
            raise ValueError(
                f"EpisodeWriter needs a storage of ndim=1, got ndim={storage.ndim}: lanes are "
                "interleaved in one dimension; pass num_envs to the writer instead."
            )
        index = getattr(storage, "episodes", None)
        if index is None and len(storage):
            raise ValueError(
                f"the storage must be empty, or written by an EpisodeWriter, got {len(storage)} rows "
                "without episodes: make an empty storage, and extend the buffer with the rows."
            )
        check_buffers(storage, self.num_envs)
        if self._storage is not storage:
            self._num_registered = 0
        check_not_joined(storage, self, self._num_registered)
        journal = getattr(storage, "journal", None)
        if journal is not None:
            journal.set_lanes(self.num_envs)
            # Where nothing was ever written, the number of lanes is still open.
            if index is not None and index.num_envs != self.num_envs:
                index = None
        if index is not None and index.num_envs != self.num_envs:
            raise ValueError(
                f"the storage is written in {index.num_envs} lanes already, got num_envs="
                f"{self.num_envs}."
            )
        super().register_storage(storage)
        self._num_registered += 1
        self._is_packed = isinstance(storage, PackedStorage)
        if index is None:
            storage.episodes = EpisodeIndex(storage.max_size, self.num_envs, storage.device)
        self._last_trajectory = torch.zeros(
            self.num_envs, dtype=torch.int64, device=storage.episodes.device
        )
        self._on_disk = None
        if isinstance(storage, PackedStorage) and storage.is_durable:
            self._on_disk = DurableLanes(storage)
            self._last_trajectory.copy_(torch.from_numpy(self._on_disk.trajectories))
            self._write_count = self._on_disk.write_count
            self._count()

    @property
    def _episodes(self) -> EpisodeIndex:
        return self._storage.episodes

    def add(self, data: TensorDictBase, *, then: Then | None = None) -> torch.Tensor:
        """Writes one step: a transition `[]` of a single lane, or `[E]` of all lanes.

        Args:
            data: the step.
            then: as in `extend`.

        Returns:
            int64 slots of the batch size of `data`.
        """
        if arguments.steps("data", data).ndim == 0 and self.num_envs > 1:
            raise ValueError(
                f"a single transition does not say which of the {self.num_envs} lanes it belongs to: "
                f"add a batch [{self.num_envs}], or extend(data, lanes=[lane]) with a batch [1]."
            )
        if data.ndim == 0:
            return self.extend(data.unsqueeze(0), then=then)[0]
        return self.extend(data, then=then)

    def extend(
        self, data: TensorDictBase, *, lanes: Lanes = None, then: Then | None = None
    ) -> torch.Tensor:
        """Writes steps of all lanes, or of `lanes`.

        Args:
            data: `[T]` for one lane, `[L, T]`, or `[L]` for one step of several lanes. Rows `[N]` for
                several lanes that hold `traj_key` may be of any trajectories: each goes on in its
                lane, and a new one begins in a lane whose episode is over, else in the one that was
                longest not written, whose episode is cut.
            lanes: the L distinct lanes that are written; None is all of them.
            then: called with the slots, as a part of the write: after an interrupt all of it is done, or
                nothing.

        Returns:
            int64 slots of the batch size of `data`, in its order; -1 for rows that found no room
            because more than the whole ring was written at once.

        Raises:
            ValueError: the batch does not match the lanes, or more trajectories run side by side than
                there are lanes. Nothing is written then.
            KeyError: `done_key` is missing. Nothing is written then.
        """
        arguments.steps("data", data)
        shape, is_routed = data.batch_size, self._is_routed(data, lanes)
        if is_routed and len(data):
            steps = self._stage(data)
            return self._write(steps, self._routes(steps), shape, then)
        num_steps = self._num_steps(data, lanes)
        named = None if lanes is None else self._episodes.named_lanes(lanes)
        return self._write(self._stage(data), [_Block(num_steps, named)], shape, then)

    def takes(self, layout: Layout) -> bool:
        """Whether `append` takes rows of just this layout."""
        storage = self._storage
        return (
            isinstance(storage, PackedStorage)
            and storage.layout is layout
            and self.done_key == default_keys.DONE
            and self.traj_key not in layout
            and default_keys.MASK not in layout
        )

    def append(self, block: StepBlock, lanes: Sequence[int] | None, then: Then) -> torch.Tensor:
        """Writes one step of all lanes, or of `lanes`, that is laid out already.

        Args:
            block: a step of all lanes, of the layout of the storage, as `takes` says.
            lanes: the L distinct lanes that are written; None is all of them.
            then: as in `extend`.

        Returns:
            `[L]` int64 slots.
        """
        self._prepare()
        rows = block.rows(self._episodes.device, lanes)
        one = _ONE_STEP if lanes is None else _Block(1, lanes)
        return self._write(_Steps(rows, block.layout), [one], None, then)

    def _is_routed(self, data: TensorDictBase, lanes: Lanes) -> bool:
        """Whether rows `[N]` say by their trajectories alone which of several lanes they are for."""
        return (
            lanes is None
            and data.ndim == 1
            and self.num_envs > 1
            and data.get(self.traj_key, None) is not None
        )

    def _routes(self, steps: _Steps) -> list[_Block]:
        """Gives rows of several lanes each to one."""
        blocks = route(
            _on_host(steps.trajectory),  # type: ignore[arg-type]
            _on_host(steps.rows.done).reshape(-1),  # type: ignore[arg-type]
            held=_on_host(self._last_trajectory),  # type: ignore[arg-type]
            is_open=_on_host(self._episodes.is_open),
            last_written=self._last_written,
        )
        device = self._episodes.device
        return [
            _Block(rows.shape[1], lanes.tolist(), torch.from_numpy(rows).to(device))
            for lanes, rows in blocks
        ]

    def _prepare(self) -> None:
        """Does what earlier writes have left to be done."""
        self.gaps.warn_late()
        if self._on_disk is not None:
            self._catch_up()

    def _stage(self, data: TensorDictBase) -> _Steps:
        """Finds out how `data` of any batch size becomes rows, and changes nothing."""
        self._prepare()
        entries = self._entries(data)
        refuse_padding(entries)
        done = end_flags(entries, self.done_key, data.numel())
        trajectory = entries.get(self.traj_key)
        if trajectory is not None:
            trajectory = trajectory.to(self._episodes.device).reshape(-1).long()
        if isinstance(self._storage, PackedStorage):
            layout, rows = self._stage_rows(data, entries, done)
            return _Steps(rows, layout, trajectory)
        compared: Mapping[NestedKey, torch.Tensor] = {}
        if self.gaps.is_looking:
            compared = self._compared(entries)
        device, stored = self._episodes.device, self._stored(data).reshape(-1)
        if not compared:
            return _Steps(rows_of_flags(done, data.numel(), device), None, trajectory, stored)
        layout = Layout.of(compared, data.ndim)
        rows = stage(layout, compared, data.batch_size, device, done=done)
        return _Steps(rows, layout, trajectory, stored)

    def _stored(self, data: TensorDictBase) -> TensorDictBase:
        """Returns what of `data` a storage of TorchRL's stores."""
        if self.keys is not None:
            return data.select(*self.keys)
        # Replay buffers set it on the data that they have written.
        return data.exclude(default_keys.INDEX) if default_keys.INDEX in data.keys() else data  # noqa: SIM118

    def _stage_rows(
        self,
        data: TensorDictBase,
        entries: Mapping[NestedKey, torch.Tensor],
        done: torch.Tensor | None = None,
    ) -> tuple[Layout, NewRows]:
        """Finds out how what is stored of `data` becomes rows of a `PackedStorage`."""
        nested: Nested = ()
        storage = self._storage
        if storage.layout is None:
            if self.keys is not None:
                data = data.select(*self.keys)
                entries = tensors_of(data)
            nested = nested_sizes(data, data.ndim)
        strict = self.keys is None
        return storage.stage(entries, data.batch_size, strict=strict, nested=nested, done=done)

    def _compared(self, entries: Mapping[NestedKey, torch.Tensor]) -> dict[NestedKey, torch.Tensor]:
        """Returns what tells where a lane goes on."""
        stored = [key for key in entries if self.keys is None or key in self.keys]
        pairs = [(key, default_keys.next_key(key)) for key in self.gaps.compared(stored)]
        return {key: entries[key] for pair in pairs for key in pair}

    def _checked(self, steps: _Steps, block: _Block, gaps: list[torch.Tensor]) -> _Block:
        """Finds out all about steps that must be known before they are written.

        Args:
            steps: that are written.
            block: some of them.
            gaps: gets `[L, T]` bool, rows to be warned of.
        """
        if steps.trajectory is not None:
            block = self._cut_between_trajectories(steps.trajectory, block)
        if self._last_process is not None:
            block = self._cut_between_processes(block)
        if self._on_disk is not None:
            cut = self._on_disk.cut_where_reset(steps.rows, *block[:4])
            block = block._replace(cut=cut)
        layout, watch = steps.layout, self.gaps
        if layout is None or not watch.is_looking:
            return block
        storage, rows, (num_steps, lanes, order, cut, _) = self._storage, steps.rows, block
        # Where there is no row yet, no lane goes on.
        is_ring = self._is_packed or not storage.initialized
        table = storage.table if self._is_packed else None
        if not is_ring:
            table = self._rows_before(layout, block)
        pairs = watch.pairs(layout)
        gap = storage.episodes.find_gaps(
            rows, num_steps, pairs, cut, lanes, order, table, is_ring=is_ring
        )
        if gap is None:
            return block
        if watch.on_gap == "cut":
            return block._replace(cut=gap if cut is None else cut | gap)
        gaps.append(gap)
        return block

    def _cut_between_trajectories(self, trajectory: torch.Tensor, block: _Block) -> _Block:
        """Cuts where a row has another trajectory than the row before it."""
        now, which = _in_lanes(trajectory, block), self._which(block)
        before = self._last_trajectory[which].unsqueeze(1)  # type: ignore[index]
        cut = now != torch.cat([before, now[:, :-1]], 1)
        return block._replace(cut=cut, last_trajectory=now[:, -1])

    def _cut_between_processes(self, block: _Block) -> _Block:
        """Cuts the lanes that another process wrote last: it has environments of its own."""
        is_other = self._last_process[self._which(block)] != os.getpid()  # type: ignore[index]
        cut = block.cut
        if cut is None:
            cut = torch.zeros(len(is_other), block.num_steps, dtype=torch.bool)
        cut = cut.clone()
        cut[:, 0] |= is_other.to(cut.device)
        return block._replace(cut=cut)

    def _rows_before(self, layout: Layout, block: _Block) -> RowTable:
        """Returns the newest rows of the lanes `[L, W]`, for a storage of TorchRL's."""
        episodes = self._episodes
        lanes = range(self.num_envs) if block.lanes is None else block.lanes
        newest = torch.tensor([episodes.newest_slot([lane]) for lane in lanes])
        newest, before = newest.to(episodes.device), {}
        for key in self.gaps.compared(layout.keys):
            after = default_keys.next_key(key)
            before[after] = read_fields(self._storage, newest, [after])[after]
            before[key] = before[after]
        rows = stage(layout, before, newest.shape, episodes.device)
        return backend(episodes.device).RowTable(rows.words())

    def _which(self, block: _Block) -> Any:
        """Returns which entries of tables of lanes are those of a block."""
        return slice(None) if block.lanes is None else [*block.lanes]

    def _write(
        self,
        steps: _Steps,
        blocks: Sequence[_Block],
        shape: torch.Size | None,
        then: Then | None,
    ) -> torch.Tensor:
        """Writes steps, each block to lanes of its own.

        Args:
            steps: n rows.
            blocks: which of them go where.
            shape: in which the slots are wanted; None is `[n]`.
            then: called with the slots, as a part of the write.
        """
        gaps: list[torch.Tensor] = []
        blocks = [self._checked(steps, block, gaps) for block in blocks]
        has_warned = bool(gaps) and self.gaps.warn(gaps)
        counters = self._storage.episodes.counters()
        count = self._write_count + steps.rows.num_rows
        try:
            slots = self._append(steps, blocks, shape, count, then)
        except BaseException as error:
            # Files have ways of their own to stay whole.
            if self._on_disk is None:
                act = partial(self._append, steps, blocks, shape, count, then)
                complete(error, act, partial(self._episodes.recount, counters))
            raise
        if has_warned:
            self.gaps.has_warned = True
        return slots

    def _append(
        self,
        steps: _Steps,
        blocks: Sequence[_Block],
        shape: torch.Size | None,
        count: int,
        then: Then | None,
    ) -> torch.Tensor:
        """Writes steps that were checked; done once more from the beginning, it leads to the same."""
        rows, storage = steps.rows, self._storage
        episodes = storage.episodes
        room, is_over, slots = episodes.steps_per_lane, False, None
        is_here = self._is_packed and self._on_disk is None
        if self._is_packed and not storage.initialized:
            storage.lay_out(steps.layout)
        if len(blocks) > 1:
            slots = torch.full((rows.num_rows,), -1, device=episodes.device)
        for block in blocks:
            num_steps, lanes, order, cut, last_trajectory = block
            if not is_here:
                self._put(steps, block)
            table = storage.table if is_here else None
            slots = episodes.write(rows, num_steps, cut, lanes, order, table, slots)
            is_over = is_over or num_steps > room
            if self.num_envs > 1:
                self._last_written[self._which(block)] = count
            if last_trajectory is not None:
                self._last_trajectory[self._which(block)] = last_trajectory  # type: ignore[index]
            if self._last_process is not None:
                self._last_process[self._which(block)] = os.getpid()
        self._write_count = count
        # Known to the host without waiting for the device, as TorchRL would.
        self._count(episodes.newest_slot(lanes))
        marked: torch.Tensor = slots  # type: ignore[assignment]
        if is_over:
            marked = torch.cat([_in_lanes(marked, it)[:, -room:].flatten() for it in blocks])
        self._bump_generation(marked, marked)
        # TorchRL's samplers by priority, and ours on a device of their own, hear of rows by this alone.
        self._mark_update_entities(marked)
        if shape is not None and len(shape) != 1:
            slots = slots.view(shape)  # type: ignore[union-attr]
        if then is not None:
            then(slots)  # type: ignore[arg-type]
        return slots  # type: ignore[return-value]

    def _put(self, steps: _Steps, block: _Block) -> None:
        """Writes rows that are not copied together with the index."""
        # If they do not fit the storage, nothing has changed. Only the newest find room.
        room = self._episodes.steps_per_lane
        slots = self._episodes.next_slots(block.num_steps, block.lanes)[:, -room:].reshape(-1)
        places = torch.arange(steps.rows.num_rows) if block.order is None else block.order
        places = places.reshape(-1, block.num_steps)[:, -room:].reshape(-1)
        if self._on_disk is None:
            self._storage.set(slots, steps.data[places], set_cursor=False)  # type: ignore[index]
            return
        told = self._on_disk.steps(steps.rows, *block)
        self._storage.write(steps.layout, slots, steps.rows.some(places), steps=told)

    def _entries(self, data: TensorDictBase) -> dict[NestedKey, torch.Tensor]:
        """Returns the tensors of `data`, at least those that are stored and those that are looked at."""
        if self.keys is None:
            # TorchRL's own storages take other things than tensors too.
            entries = tensors_of(data, strict=isinstance(self._storage, PackedStorage))
            # Replay buffers set it on the data that they have written.
            entries.pop(default_keys.INDEX, None)
            return entries
        if not isinstance(data, TensorDict):
            # To stack what is not wanted takes time, or cannot be done.
            wanted = [*self.keys, self.done_key, self.traj_key, default_keys.MASK]
            data = data.select(*wanted, strict=False)
        return tensors_of(data, strict=False)

    def _catch_up(self) -> None:
        """Takes in a write to disk that an interrupt kept from everything else."""
        missed = self._on_disk.catch_up()  # type: ignore[union-attr]
        if missed is not None:
            self._write_count = self._on_disk.write_count  # type: ignore[union-attr]
            self._count()
            self._mark_update_entities(missed)

    def _num_steps(self, data: TensorDictBase, lanes: Lanes) -> int:
        """Returns T, or says what to pass."""
        num_lanes = len(self._episodes.named_lanes(lanes))
        is_for_all = lanes is None
        return lanes_and_steps(data, num_lanes, is_for_all=is_for_all, traj_key=self.traj_key)[1]

    def share_memory_(self) -> EpisodeWriter:
        """Moves what is known of the episodes to memory that other processes see.

        Each of them then writes whole stretches: where the writing process changes, episodes are cut.

        Raises:
            RuntimeError: as the storage's own `share_memory_`.
        """
        if isinstance(self._storage, PackedStorage):
            self._storage.share_memory_()
        self._episodes.share_memory_()
        self._last_trajectory.share_memory_()  # type: ignore[union-attr]
        if self._last_process is None:
            self._last_process = torch.full((self.num_envs,), os.getpid()).share_memory_()
        return self

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            self.share_memory_()
        return super().__getstate__()

    @property
    def tracks_generations(self) -> bool:
        """Whether the rows that a slot ever held are counted.

        TorchRL's buffers ask for it between a draw and the gather. They have handed their sampler the
        storage as it is, so this is where a sampler is refused that was wrong about its lanes.
        """
        if self._storage is not None:
            check_draws(self._storage, self)
        return self._track_generations

    def _mark_update_entities(self, index: torch.Tensor) -> None:
        # As TorchRL does, without what it adds for compiled writers.
        for entity in self._storage._attached_entities:
            entity.mark_update(index)

    def _count(self, last_slot: int | None = None) -> None:
        """Tells TorchRL's counters how many rows there are now, and where the newest lies."""
        storage, episodes = self._storage, self._episodes
        if last_slot is None:
            storage._len = num_slots(storage, episodes)
            return
        # Once it is full, a storage stays so while rows are written.
        length = len(storage)
        if length < episodes.capacity:
            length = num_slots(storage, episodes)
        if self._is_packed:
            storage.count_write(length, last_slot)
        else:
            storage._len = length
            storage._set_last_cursor(last_slot)

    # TorchRL's own count is one of 32 bits, which a month of training may exceed.

    @property
    def _write_count(self) -> int:
        return self._write_count_value.get_obj().value

    @_write_count.setter
    def _write_count(self, value: int) -> None:
        if self._last_process is None:
            self._write_count_value.get_obj().value = value
        else:
            self._write_count_value.value = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        count = state.get("write_count__context")
        super().__setstate__(state)
        if count is not None:
            self._write_count_value = Value("q", count)

    @property
    def _cursor(self) -> int:
        """Where the next row of the first lane goes, for TorchRL."""
        storage = self._storage
        if storage is None:
            return 0
        episodes = storage.episodes
        return episodes.host_steps.item(0) % episodes.ring_steps * self.num_envs

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        # The episode index says where it is; TorchRL keeps a number besides.
        RoundRobinWriter._cursor.fset(self, value)

    def write_at(self, index: int | torch.Tensor, data: TensorDictBase) -> torch.Tensor:
        """Overwrites rows in place: they stay where they are in their episodes.

        Args:
            index: which rows, as in `slots_of`.
            data: TensorDict `[B]`.

        Returns:
            int64 slots `[B]`.

        Raises:
            TypeError: `data` is no TensorDict.
            IndexError: a slot holds no row. Nothing is written then.
            ValueError: there are more or fewer rows than slots, or an episode would end elsewhere
                than it does. Nothing is written then.
        """
        index = slots_of(self._episodes, index)
        if arguments.steps("data", data).batch_size != index.shape:
            raise ValueError(
                f"the data must have one row for each of the slots {list(index.shape)}, got a batch "
                f"{list(data.batch_size)}."
            )
        slots, data = index.reshape(-1), data.reshape(-1)
        entries = self._entries(data)
        if self.done_key in entries:
            done = end_flags(entries, self.done_key, len(slots)).to(slots.device)
            if not torch.equal(done.reshape(-1), self._episodes.is_end(slots)):
                raise ValueError(
                    f"rows that are overwritten must keep their {self.done_key!r}, or the episodes "
                    "would change: write another history with empty() and extend()."
                )

        storage = self._storage
        if isinstance(storage, PackedStorage):
            layout, rows = self._stage_rows(data, entries)
            put = partial(storage.write, layout, slots, rows)
        else:
            put = partial(storage.set, slots, self._stored(data), set_cursor=False)

        def write() -> None:
            put()
            self._bump_generation(slots, data)

        if self._on_disk is None:
            finish(write)
        else:
            write()
        return index

    def validate(self) -> None:
        """Checks that episodes end where the stored rows say so, walking all rows.

        Raises:
            RuntimeError: one does not; the message names its slot.
        """
        episodes, storage = self._episodes, self._storage
        data = storage._storage
        # Writers may be told not to store the flag.
        if not len(episodes) or data.get(self.done_key, None) is None:
            return
        slots = episodes.slots_by_age(torch.arange(len(episodes), device=episodes.device))
        done = read_fields(storage, slots, [self.done_key])[self.done_key].reshape(-1)
        wrong = slots[done != episodes.is_end(slots)]
        if len(wrong):
            raise RuntimeError(
                f"the rows in the slots {wrong.tolist()} have another {self.done_key!r} than when they "
                "were written: their episodes end elsewhere."
            )

    def restart(
        self,
        keep_steps: int,
        empty_write_count: bool = True,
        *,
        then: Then,
    ) -> torch.Tensor:
        """Forgets every row but the last `keep_steps` of each lane.

        Args:
            keep_steps: how many steps stay.
            empty_write_count: whether to count writes from zero again.
            then: called with the slots of the kept rows, as a part of it.

        Returns:
            int64 slots where the kept rows are now.
        """
        kept = self._episodes.newest(keep_steps)
        rows = self._storage.get(kept.old)
        restart = partial(self._restart, kept, rows, empty_write_count, then)
        return restart() if self._on_disk is not None else finish(restart)

    def _restart(
        self,
        kept: Kept,
        rows: TensorDictBase,
        empty_write_count: bool,
        then: Then,
    ) -> torch.Tensor:
        self._episodes.restart(kept)
        if empty_write_count:
            self._write_count = 0
        new = kept.new
        if self._on_disk is None:
            self._storage.set(new, rows, set_cursor=False)
        else:
            self._storage.restart(new, rows, self._write_count)
        self._count()
        self._bump_generation(new, rows)
        self._mark_update_entities(new)
        then(new)
        return new

    # State

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count)
        self._episodes.clear()
        if self._on_disk is not None:
            self._storage.restart(None, None, self._write_count)

    def state_dict(self) -> dict[str, Any]:
        """Returns the writer's counters and the episode index."""
        state = RoundRobinWriter.state_dict(self)
        state["episodes"] = self._episodes.state_dict()
        state["last_trajectory"] = self._last_trajectory.clone()  # type: ignore[union-attr]
        return state

    def check_state_dict(self, state_dict: Any) -> None:
        """Checks that `load_state_dict` can take a state, without changing anything.

        Raises:
            KeyError, TypeError, ValueError: it is that of another kind of writer, size or number of
                lanes, or damaged.
        """
        self.read_state(state_dict)

    def read_state(self, state_dict: Any) -> EpisodeIndex:
        """Returns the episode index of a saved state, on the CPU.

        Raises:
            KeyError, TypeError, ValueError: as `check_state_dict`.
        """
        if isinstance(state_dict, Mapping) and "episodes" not in state_dict:
            raise ValueError(_NO_EPISODES)
        keys = ("_cursor", "_write_count", "episodes", "last_trajectory")
        # Of a writer that counts generations.
        more = ("_generation",) if self.tracks_generations else ()
        saved = SavedState(state_dict, "the saved EpisodeWriter", keys, more)
        index = self._episodes.read_state(saved["episodes"])
        if len(index):
            SavedState(state_dict, "the saved EpisodeWriter", (*keys, *more))
        cursor = index.host_steps.item(0) % index.ring_steps * index.num_envs
        if saved.integer("_cursor") != cursor:
            raise saved.error("_cursor", f"{cursor}, as in its episode index", saved["_cursor"])
        saved.integer("_write_count")
        saved.tensor("last_trajectory", torch.int64, (self.num_envs,))
        if "_generation" in saved:
            generation = saved.tensor("_generation", torch.int64)
            if generation.ndim != 1 or len(generation) > self._storage.max_size:
                must = f"one number for each of at most {self._storage.max_size} slots"
                raise saved.error("_generation", must, list(generation.shape))
            saved.within("_generation", -1, 2**62)
        return index

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Takes over a state that was checked."""
        self._episodes.take_state(state["episodes"])
        self._last_trajectory.copy_(state["last_trajectory"])  # type: ignore[union-attr]
        RoundRobinWriter.load_state_dict(self, state)
        if len(self._episodes):
            # TorchRL's storages forget it when rows are loaded, and ask for it when they are saved.
            self._storage._set_last_cursor(self._episodes.newest_slot())
        if self._on_disk is not None:
            self._storage.restart(None, None, self._write_count)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_envs={self.num_envs}, write_count={self._write_count})"


def num_slots(storage: Storage, episodes: EpisodeIndex) -> int:
    """Returns what a storage counts as its length, with the rows of an episode index."""
    if isinstance(storage, PackedStorage):
        return len(episodes)
    # TorchRL's storages read the slots below their length only; lanes of unequal fill reach beyond the
    # number of rows.
    return int(episodes.host_fill.max()) * episodes.num_envs


def _in_lanes(flat: torch.Tensor, block: _Block) -> torch.Tensor:
    """Returns those of n numbers that belong to the steps of a block, `[L, T]`."""
    return flat.view(-1, block.num_steps) if block.order is None else flat[block.order]


def _on_host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
