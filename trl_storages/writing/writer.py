"""Writes the rows of one or several environments, and keeps their episodes.

Letters: T steps, E lanes (environments), L lanes written now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torchrl import torchrl_logger
from torchrl.data import ReplayBuffer, RoundRobinWriter, Storage

from trl_storages import arguments
from trl_storages import keys as default_keys
from trl_storages.disk import Directory, spare_steps
from trl_storages.kernels.tables import Block
from trl_storages.ring import EpisodeIndex, Lanes
from trl_storages.rows import (
    Evicted,
    Layout,
    PackedStorage,
    StepBlock,
    check_writable,
    read_fields,
)
from trl_storages.saved.parts import SavedPart, SavedState
from trl_storages.stock_parts import refuse_stock
from trl_storages.writing.checks import check_storage, num_steps_of
from trl_storages.writing.counting import CountingWriter
from trl_storages.writing.gaps import Gaps, GapWatch, OnGap
from trl_storages.writing.lanes import LaneNotes
from trl_storages.writing.stacks import gaps_of_stacks
from trl_storages.writing.steps import Fields, Steps

__all__ = ["EpisodeWriter"]

#: Called with the slots of the rows that were written.
Then = Callable[[torch.Tensor], object]


_ONE_STEP = (Block(1),)
_NO_PAIRS = np.zeros((0, 2), np.int64)


class EpisodeWriter(SavedPart, CountingWriter):
    """A round-robin writer that knows which rows belong to one episode.

    It takes what TorchRL's collectors send: `[T]` steps of one environment or whole trajectories one
    after another, `[E, T]` steps of several (time last, dense or lazily stacked), and single steps
    `[E]`. Flat rows `[N]` of several environments, such as `data.reshape(-1)`, find their lanes by
    `traj_key`. The storage gets an `EpisodeIndex` as its attribute `episodes`.

    A row continues its lane's episode, unless the row before it was `done` or of another trajectory. If
    its observation is not that row's next observation, the environment was reset without a `done`, or
    another stream began: see `on_gap`.

    Args:
        num_envs: E, the lanes of the ring, one for each environment whose steps are written.
        done_key: `[..., 1]` bool entry that ends an episode.
        traj_key: integer entry, one number a trajectory, that cuts an episode where it changes; it
            may be absent.
        keys: entries to store, the others are left out; None stores all.
        track_generations: as in TorchRL's `RoundRobinWriter`, for rows in memory.
        on_gap: what happens to a row that does not begin, bit for bit, with the next observation of
            the row before it: "cut" begins an episode with it and warns once; "ignore" does not check, so
            an open episode that was loaded goes on. For rows on a GPU the warning comes a little later,
            to avoid synchronization.
        observation_keys: entries that are compared with their twins under `next`; None compares
            `observation`, or, where that is missing, all that have a twin under `next` (other than
            the desired goal, rewards and flags).

    Raises:
        ValueError: `num_envs` is below 1, `on_gap` is unknown, or `observation_keys` are not
            stored.
        TypeError: `observation_keys` is not a sequence of keys.

    >>> from tensordict import TensorDict
    >>> from trl_storages import ReplayStorage
    >>> storage = ReplayStorage(storage=PackedStorage(100), writer=EpisodeWriter(2))
    >>> done = torch.tensor([[False, True, False], [False, False, False]]).unsqueeze(-1)
    >>> _ = storage.extend(TensorDict({"action": torch.rand(2, 3), "next": {"done": done}}, [2, 3]))
    >>> storage.episodes.episodes()["length"].tolist()
    [2, 1, 3]
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        done_key: NestedKey = default_keys.DONE,
        traj_key: NestedKey = default_keys.TRAJECTORY_IDS,
        keys: Sequence[NestedKey] | None = None,
        track_generations: bool = False,
        on_gap: OnGap = "cut",
        observation_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        num_envs = arguments.integer("num_envs", num_envs, at_least=1)
        track_generations = arguments.flag("track_generations", track_generations)
        super().__init__(track_generations=track_generations)
        self.num_envs = num_envs
        self.done_key = arguments.key("done_key", done_key)
        self.traj_key = arguments.key("traj_key", traj_key)
        self.keys = None if keys is None else arguments.keys("keys", keys)
        #: Looks for rows that do not continue the row before them.
        self.gaps = GapWatch(on_gap, observation_keys)
        self._check_stored(self.gaps.observation_keys)
        self._lanes: LaneNotes = None  # type: ignore[assignment]  # until there is a storage
        # `Fields` of the attributes, made anew when these change.
        self._asked: Fields | None = None
        # The layout that `append` takes, and the last step that it wrote.
        self._taken: Layout | None = None
        self._last = Steps(None, None)  # type: ignore[arg-type]

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
        """Registers `storage`, and gives it an episode index.

        Raises:
            TypeError: the storage is no `PackedStorage`, or its buffer has a sampler or sample unit of
                TorchRL's that would be wrong over the lanes.
            ValueError: the storage has fewer rows than lanes, an index of another number of lanes, or
                rows without an index.
        """
        check_storage(storage, tracks_generations=self._track_generations)
        for buffer in storage._attached_entities_list:
            if isinstance(buffer, ReplayBuffer):
                refuse_stock(buffer._sampler)
                refuse_stock(buffer._sample_unit)
        index = storage.episodes
        if index is not None and index.num_envs != self.num_envs:
            storage.lay_out_anew(self.num_envs)
            index = storage.episodes
        if index is not None and index.num_envs != self.num_envs:
            raise ValueError(
                f"the storage was made with num_envs={index.num_envs}, got {self.num_envs}: pass the one "
                "that it was made with, or make another."
            )
        super().register_storage(storage)
        if index is None:
            storage.episodes = index = _new_index(storage, self.num_envs)
        storage.keep_episodes(index)
        if self._lanes is not None and self._lanes.episodes is index:
            return  # Another buffer of the same rows.
        self._lanes = LaneNotes(index)
        if self._directory is not None:
            self._lanes.resume()
            self._take_up()

    @property
    def _directory(self) -> Directory | None:
        """The directory of the rows; None in memory."""
        return None if self._storage is None else self._storage.directory

    def _take_up(self) -> None:
        """Restores the state that was committed to the directory."""
        directory: Directory = self._directory  # type: ignore[assignment]
        state = directory.state
        self._lanes.trajectory.copy_(torch.from_numpy(state.trajectories))
        self._write_count = state.write_count
        if num_rows := len(self._storage.episodes):
            # Worth a message: TorchRL's own storages in files would start empty.
            torchrl_logger.info(
                f"PackedStorage goes on with {num_rows:,} rows that {directory.path} holds; to begin "
                "with none call empty(), or choose another directory."
            )

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
            return self._write(self._steps(data), _ONE_STEP, None, then)[0]
        return self.extend(data, then=then)

    def extend(
        self, data: TensorDictBase, *, lanes: Lanes = None, then: Then | None = None
    ) -> torch.Tensor:
        """Writes steps of all lanes, or of `lanes`.

        Args:
            data: `[T]` for one lane, `[L, T]`, or `[L]` for one step of several lanes. Rows `[N]` for
                several lanes that hold `traj_key` may be of any trajectories: each continues in its
                lane, and a new one begins in a lane whose episode has ended, else in the least recently
                written lane, whose episode is cut.
            lanes: the L distinct lanes that are written; None is all of them.
            then: called with the slots as part of the write.

        Returns:
            int64 slots of the batch size of `data`, in its order; -1 for rows that did not fit because
            more than the whole ring was written.

        Raises:
            ValueError: the batch does not match the lanes, more trajectories run side by side than there
                are lanes, or a row is `terminated` or `truncated` but not `done`. Nothing is written.
            KeyError: `done_key` is missing. Nothing is written then.
        """
        arguments.steps("data", data)
        shape, is_routed = data.batch_size, self._is_routed(data, lanes)
        if is_routed and len(data):
            steps = self._steps(data)
            return self._write(steps, self._lanes.routes(steps), shape, then)
        named = None if lanes is None else self._episodes.named_lanes(lanes)
        num_steps = num_steps_of(data, named, self.num_envs, self.traj_key)
        return self._write(self._steps(data), [Block(num_steps, named)], shape, then)

    def takes(self, layout: Layout) -> bool:
        """Whether `append` takes rows of exactly this layout."""
        if layout is self._taken and layout is self._storage.layout:
            return True
        others = (self.traj_key, default_keys.MASK)
        fits = self.done_key == default_keys.DONE and not any(key in layout for key in others)
        self._taken = layout if fits else None
        return self._taken is not None and self._storage.layout is layout

    def append(self, block: StepBlock, then: Then) -> torch.Tensor:
        """Writes one step that is already laid out as rows.

        Args:
            block: a step of L lanes, of the layout of the storage, as `takes` says.
            then: as in `extend`.

        Returns:
            `[L]` int64 slots.
        """
        self._prepare()
        rows = block.rows(self._storage.device)
        if self._last.rows is not rows:
            # Usually the rows are those of the last step.
            self._last = Steps(rows, block.layout)
        one = _ONE_STEP if block.lanes is None else (Block(1, block.lanes),)
        return self._write(self._last, one, None, then)

    def _is_routed(self, data: TensorDictBase, lanes: Lanes) -> bool:
        """Whether rows `[N]` are assigned to lanes by their trajectories alone."""
        return (
            lanes is None
            and data.ndim == 1
            and self.num_envs > 1
            and data.get(self.traj_key, None) is not None
        )

    def _prepare(self) -> None:
        """Gives warnings that come late, and checks that the storage is writable."""
        if self.gaps.late is not None:
            self.gaps.warn_late()
        check_writable(self._storage)

    @property
    def _fields(self) -> Fields:
        # Of ready-made storages, whose keys are those of the spaces.
        warns = self.keys is not None and self.gaps.observation_keys is not None
        wanted = self.keys, self.done_key, self.traj_key, warns
        if self._asked is None or wanted != self._asked.wanted:
            self._asked = Fields(*wanted)
        return self._asked

    def _steps(self, data: TensorDictBase) -> Steps:
        self._prepare()
        return self._fields.steps(data, self._storage)

    def _checked(self, steps: Steps, block: Block, gaps: list[Gaps]) -> Block:
        """Checks steps before they are written, and cuts episodes where they do not continue.

        Args:
            steps: about to be written.
            block: some of them.
            gaps: appended to, rows to warn of.
        """
        watch, storage = self.gaps, self._storage
        if watch.is_looking and steps.layout is not None:
            gap = watch.find(storage, steps.rows, steps.layout.framed, block)
            block = self._cut_at(gap, block, gaps)
        if steps.rows.seen is not None:
            gap = gaps_of_stacks(storage, steps, block, cuts=watch.is_looking)
            block = self._cut_at(gap, block, gaps)
        return block

    def _cut_at(self, gap: torch.Tensor | None, block: Block, gaps: list[Gaps]) -> Block:
        """Cuts episodes at gaps `[L, T]`, and appends those that it warns of."""
        if gap is None:
            return block
        gaps.append((self._lanes.surprises(gap, block), block.lanes))
        return block.cut_at(gap)

    def _write(
        self,
        steps: Steps,
        blocks: Sequence[Block],
        shape: torch.Size | None,
        then: Then | None,
    ) -> torch.Tensor:
        """Writes steps, each block to lanes of its own.

        Args:
            steps: n rows.
            blocks: map rows to lanes and steps.
            shape: of the slots that are returned; None is `[n]`.
            then: called with the slots as part of the write.
        """
        storage, lanes, watch = self._storage, self._lanes, self.gaps
        if steps.trajectory is not None or lanes.process is not None:
            blocks = [lanes.cut(steps, block) for block in blocks]
        count = self._write_count + steps.rows.num_rows
        is_one = len(blocks) == 1
        if is_one and blocks[0].num_steps <= storage.most_compared:
            # Fast path: usually there is no gap, and nothing else to check beforehand.
            pairs = watch.pairs(steps.layout) if watch.is_looking else _NO_PAIRS
            storage.make_room(steps.rows.num_rows)
            slots = self._commit(steps, blocks, pairs, (), shape, then, count)
            if slots is not None:
                return slots
        gaps: list[Gaps] = []
        blocks = [self._checked(steps, block, gaps) for block in blocks]
        if gaps:
            watch.warn(gaps)
        evicted: list[Evicted] = []
        # Allocate first, as that may fail.
        storage.lay_out(steps.layout)
        storage.make_room(steps.rows.num_rows)
        if storage.stacks is not None:
            # Frames of evicted rows that the remaining rows still need.
            found = [storage.stacks.evicted(steps.rows, block) for block in blocks]
            evicted = [frames for frames in found if frames is not None]
        return self._commit(steps, blocks, _NO_PAIRS, evicted, shape, then, count)  # type: ignore[return-value]

    def _commit(self, *write: Any) -> torch.Tensor | None:
        """Calls `_put_steps`; after an error a directory goes back to its last commit."""
        try:
            return self._put_steps(*write)
        except BaseException:
            if self._directory is not None:
                # A later commit would rely on marks that may be missing.
                self._storage.files.go_back()
                self._take_up()
            raise

    def _put_steps(
        self,
        steps: Steps,
        blocks: Sequence[Block],
        pairs: np.ndarray,
        evicted: Sequence[Evicted],
        shape: torch.Size | None,
        then: Then | None,
        count: int,
    ) -> torch.Tensor | None:
        """Writes checked steps.

        Args:
            steps: as in `_write`.
            blocks: as in `_write`.
            pairs: compared fields, as in `GapWatch.pairs`.
            evicted: frames that the remaining rows still need.
            shape: as in `_write`.
            then: as in `_write`.
            count: the write count after these steps.

        Returns:
            the slots; None if there is a gap in the fields `pairs`. Nothing is written then.
        """
        rows, storage, lanes = steps.rows, self._storage, self._lanes
        episodes, table, slots = storage.episodes, storage.table, None
        directory = None if storage.files is None else storage.files.directory
        if directory is not None:
            for block in blocks:
                directory.begin(episodes, block)
        for frames in evicted:
            storage.stacks.keep(frames)
        is_over = False
        for block in blocks:
            written = episodes.write(rows, block, table, pairs)
            if written is None:
                return None
            slots = written if slots is None else torch.maximum(slots, written)
            is_over = is_over or block.num_steps > episodes.steps_per_lane
            lanes.note(steps, block, count)
        # Bypass the property: setting attributes is checked, which takes time.
        self._write_count_value.get_obj().value = count
        if directory is not None:
            directory.seal(episodes, blocks, count, lanes.numbers)
        marked: torch.Tensor = slots  # type: ignore[assignment]
        if is_over:
            room = episodes.steps_per_lane
            marked = torch.cat([it.arranged(marked)[:, -room:].flatten() for it in blocks])
        if self._track_generations or getattr(storage, "_slot_generations", None) is not None:
            self._bump_generation(marked, marked)
        # This alone tells TorchRL's prioritized samplers, and ours on another device, of new rows.
        self._mark_update_entities(marked)
        if shape is not None and len(shape) != 1:
            slots = slots.view(shape)  # type: ignore[union-attr]
        if then is not None:
            then(slots)  # type: ignore[arg-type]
        return slots

    def share_memory_(self) -> EpisodeWriter:
        """Moves the episode index and the state of lanes to shared memory.

        Each process then writes whole segments: episodes are cut where the writing process changes.

        Raises:
            RuntimeError: as the storage's own `share_memory_`.
        """
        self._storage.share_memory_()
        self._episodes.share_memory_()
        self._lanes.share_memory_()
        return self

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            self.share_memory_()
        state: dict[str, Any] = super().__getstate__()
        return state

    def validate(self) -> None:
        """Checks that episodes end where the stored rows say so, walking all rows.

        Raises:
            RuntimeError: one does not; the message names its slot.
        """
        episodes, storage = self._episodes, self._storage
        data = storage._storage
        # `keys` may leave the flag out.
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
        """Evicts all but the last `keep_steps` rows of each lane.

        Args:
            keep_steps: how many steps stay.
            empty_write_count: whether to count writes from zero again.
            then: called with the slots of the kept rows, as part of the restart.

        Returns:
            int64 slots where the kept rows are now.
        """
        if self._directory is not None:
            self._evict(keep_steps, empty_write_count)
            slots = self._episodes.slots_by_age(torch.arange(len(self._episodes)).flip(0))
            then(slots)
            return slots
        kept, storage = self._episodes.newest(keep_steps), self._storage
        move = storage.mover(kept)

        self._forget_rows()
        self._episodes.restart(kept)
        if empty_write_count:
            self._write_count = 0
        move()
        storage._bump_mutation_revision()
        self._bump_generation(kept.new, kept.new)
        self._mark_update_entities(kept.new)
        then(kept.new)
        return kept.new

    def _evict(self, keep_steps: int, empty_write_count: bool) -> None:
        """Evicts all but the newest rows in a directory, where rows are never moved."""
        episodes, count = self._episodes, 0 if empty_write_count else self._write_count
        tails = episodes.host_steps - keep_steps
        self._directory.evict(episodes, tails, count, self._lanes.numbers)  # type: ignore[union-attr]
        self._write_count = count

    # State

    def _empty(self, empty_write_count: bool = True) -> None:
        if self._directory is not None:
            self._evict(0, empty_write_count)
        super()._empty(empty_write_count)
        if self._directory is None:
            self._forget_rows()
            self._episodes.clear()

    def _forget_rows(self) -> None:
        """Clears the links between rows, before rows are dropped."""
        self._storage.forget_links(self._episodes.num_slots_reached)

    def state_dict(self) -> dict[str, Any]:
        """Returns the writer's counters and the episode index."""
        state: dict[str, Any] = RoundRobinWriter.state_dict(self)
        state["episodes"] = self._episodes.state_dict()
        state["last_trajectory"] = self._lanes.trajectory.clone()
        reader = getattr(self._storage, "reader", None)
        if reader is not None and (committed := reader.state) is not None:
            state["_write_count"] = committed.write_count
            state["last_trajectory"] = torch.from_numpy(committed.trajectories.copy())
        return state

    def read_state(self, state_dict: Any) -> EpisodeIndex:
        """Returns the episode index of a saved state, on the CPU.

        Raises:
            KeyError, TypeError, ValueError: as `check_state`.
        """
        keys = ("_cursor", "_write_count", "episodes", "last_trajectory")
        # Only in the state of a writer that counts generations.
        more = ("_generation",) if self.tracks_generations else ()
        saved = SavedState(state_dict, "the saved EpisodeWriter", keys, more)
        index = self._episodes.read_state(saved["episodes"])
        if len(index):
            # The generations of these rows are required then.
            SavedState(state_dict, "the saved EpisodeWriter", (*keys, *more))
        cursor = index.ring.slots_at(index.host_steps.item(0), 0)
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
        """Loads a checked state.

        Raises:
            RuntimeError: its rows are not those of the directory.
        """
        if (directory := self._directory) is not None:
            cursors = self._episodes.read_state(state["episodes"]).host_steps
            if not np.array_equal(directory.state.cursors, cursors):
                raise RuntimeError(
                    f"the episodes of the rows in {directory.path} are loaded together with them: load "
                    "what a ReplayStorage saved, by its loads() or load_state_dict()."
                )
        self._episodes.take_state(state["episodes"])
        self._lanes.trajectory.copy_(state["last_trajectory"])
        RoundRobinWriter.load_state_dict(self, state)
        self._lanes.resume()
        if len(self._episodes):
            self._storage._bump_mutation_revision()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_envs={self.num_envs})"


def _new_index(storage: PackedStorage, num_envs: int) -> EpisodeIndex:
    """Returns the index of a storage that has none yet."""
    spare = 0
    if storage.is_durable:
        spare = spare_steps(storage.max_size // num_envs, storage.past_steps)
    return EpisodeIndex(storage.max_size, num_envs, storage.device, spare_steps=spare)
