"""Writes steps to lanes: everything is checked, then one block is appended.

Letters: E lanes (environments), L of them that are written, T steps of each, N rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.data.replay_buffers.writers import Writer

from trl_storages import keys as default_keys
from trl_storages import validation
from trl_storages.entries.arena import Arena
from trl_storages.entries.layout import Block, Layout, nested_sizes
from trl_storages.serialization import Adopt, State, array, required_items
from trl_storages.storage.packed_storage import PackedStorage
from trl_storages.torchrl_compat import reject_torchrl_components
from trl_storages.validation import Lanes, lane_numbers, warn_caller
from trl_storages.writing.routing import Routing, all_lanes, in_lane_order, num_steps_of, route
from trl_storages.writing.staging import Rows, entries_in, is_same
from trl_storages.writing.transfer import Transfer, matched

__all__ = ["EpisodeWriter"]

# Entries that drawn rows have beside their fields.
_OF_BATCHES = (default_keys.INDEX, default_keys.MASK)
# Entries under `next` that may be left out without a word.
_BY_PRODUCTS = frozenset(
    {"done", "terminated", "truncated", "is_init", "step_count", "episode_reward"}
)
_MOST_KEPT = 1 << 24  # bytes
# Of shorter writes it is not checked whether they are of one environment.
_LEAST_CHECKED = 32
_NEVER = np.iinfo(np.int64).max


class EpisodeWriter(Writer):  # type: ignore[misc]
    """Writes steps of E environments, each to a lane of its own.

    A row continues its lane's episode, unless the row before it was `done` or of another trajectory. If
    its observation is not that row's next observation, the environment was reset without a `done`, or
    another stream began: see `on_gap`.

    Args:
        num_envs: E.
        done_key: `[..., 1]` bool entry that ends an episode.
        traj_key: integer entry, one number a trajectory, that cuts an episode where it changes; it
            may be absent.
        keys: entries to store, the others are left out; None stores all.
        on_gap: "cut" begins an episode with a row whose observation is not, bit for bit, the next
            observation of the row before it, and warns once; "ignore" takes rows as they come.

    >>> EpisodeWriter(num_envs=2)
    EpisodeWriter(num_envs=2)
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        done_key: NestedKey = default_keys.DONE,
        traj_key: NestedKey = default_keys.TRAJECTORY_IDS,
        keys: Sequence[NestedKey] | None = None,
        on_gap: str = "cut",
    ) -> None:
        super().__init__()
        self.num_envs = E = validation.integer("num_envs", num_envs, at_least=1)
        self.done_key = validation.key("done_key", done_key)
        self.traj_key = validation.key("traj_key", traj_key)
        self.keys = None if keys is None else validation.keys("keys", keys)
        self.on_gap = validation.choice("on_gap", on_gap, ("cut", "ignore"))
        # Of the last write, to be filled again.
        self._rows: Rows | None = None
        self._shared: Arena | None = None
        self._take(np.zeros((8, E), np.int64))
        # The count when rows were loaded or opened, else -1: who goes on in a lane that was not written
        # since may be another.
        self._resumed_at = -1
        self._warned_of_gaps = self._warned_of_lost = self._warned_of_flat = False

    def _take(self, notes: np.ndarray) -> None:
        # How many rows were written, in the first place, and the count at the last write of each lane.
        self._notes = notes
        self._count, self._written_at = notes[:2]
        # Two notes of each lane, `[2, 3, E]`: from which cursor on it holds, the number of the last
        # trajectory, and the process that wrote it, if several write.
        self._lanes = notes[2:].reshape(2, 3, -1)

    def _held(self, lanes: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns which of their notes holds for lanes, their trajectories, and their processes `[L]`.

        The later note holds, unless the rows that it was made for were never published.
        """
        since, cursors = self._lanes[:, 0, lanes], self._storage.episodes.cursors[lanes]
        which = since.argmax(0) ^ (since.max(0) > cursors)
        return which, *self._lanes[which, 1:, lanes].T

    def _note(self, block: Block, trajectories: np.ndarray | None) -> None:
        """Makes the notes that hold once a block is published, beside those that hold until then.

        In shared memory, lanes that another process has written are cut: it has other environments.
        """
        lanes, offsets, own = block.lanes, block.offsets, os.getpid()
        held, trajectory, process = self._held(lanes)
        if self._shared is not None:
            block.cut[offsets[:-1][process != own]] = True
        notes, other = self._lanes, 1 - held
        notes[other, 0, lanes] = _NEVER  # while it is made
        notes[other, 1, lanes] = trajectory if trajectories is None else trajectories
        notes[other, 2, lanes] = own
        notes[other, 0, lanes] = self._storage.episodes.cursors[lanes] + np.diff(offsets)

    @property
    def write_count(self) -> int:
        """How many rows were ever written."""
        return int(self._count[0])

    _write_count = write_count

    def share(self) -> None:
        """Counts in memory that other processes share, and cuts lanes where the process changes."""
        self._lanes[:, 2] = os.getpid()
        self._shared = Arena.shared({"notes": (np.int64, self._notes.shape)})
        self._shared.copy_from({"notes": self._notes})
        self._take(self._shared.arrays["notes"])

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_rows": None, "_notes": self._notes.copy()}
        return state if get_spawning_popen() else {**state, "_shared": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take(self._notes if self._shared is None else self._shared.arrays["notes"])

    def register_storage(self, storage: PackedStorage) -> None:
        """Divides a storage into lanes, to write there.

        Raises:
            TypeError: it is no `PackedStorage`, or a buffer of TorchRL's draws its rows by a sampler that
                knows no lanes.
            ValueError: it is too small, or holds the rows of another number of lanes.
        """
        reject_torchrl_components(storage)
        validation.instance("storage", storage, PackedStorage, what="a PackedStorage")
        for buffer in storage._attached_entities:
            reject_torchrl_components(buffer.sampler)
        storage.set_num_lanes(self.num_envs)
        self._resumed_at = self.write_count if len(storage) else -1
        super().register_storage(storage)

    # Steps as TensorDicts

    def add(self, data: TensorDictBase) -> torch.Tensor:
        """Writes one step: a transition `[]` of a single lane, or `[E]` of all lanes."""
        return self.extend(data)

    def extend(self, data: TensorDictBase, *, lanes: Lanes = None) -> torch.Tensor:
        """Writes steps of all lanes, or of `lanes`.

        Args:
            data: `[T]` or `[]` for one lane, `[L, T]`, or `[L]` for one step of several lanes. Rows
                `[N]` for several lanes that hold `traj_key` may be of any trajectories: each continues in
                its lane, and a new one begins in a lane whose episode has ended, else in the least
                recently written lane, whose episode is cut.
            lanes: the L distinct lanes that are written; None is all of them.

        Returns:
            int64 slots of the batch size of `data`, in its order; -1 for rows that gave way at once.

        Raises:
            ValueError, KeyError, TypeError: the steps do not fit. Nothing is written then.
        """
        found, batch = entries_in(validation.tensordict("data", data)), data.batch_size
        if not batch.numel():
            raise ValueError(f"there must be steps to write, got a batch {[*batch]}.")
        rows = self._rows_for(data, found, batch)
        if rows.fill(found) and not self._warned_of_flat:
            self._warned_of_flat = True
            warn_caller(
                "every transition of a flat batch is truncated and some are not done, as TorchRL's "
                "trainers leave them: stored as truncated are those that are done and not terminated."
            )
        numbers: Any = found.get(self.traj_key)
        if numbers is not None:
            numbers = numbers.detach().cpu().reshape(-1).numpy().astype(np.int64)
        places, cut = self._places(rows, lanes, numbers), None
        if numbers is not None:
            numbers = numbers if places.order is None else numbers[places.order]
            cut = self._cut(numbers, places)
        block = rows.block(places, cut)
        if numbers is None and len(batch) == len(places.which) == 1 and self.on_gap == "cut":
            self._check_continues(block, rows.layout)
        last = None if numbers is None else numbers[places.offsets[1:] - 1]
        same = [key for key, after in rows.pairs if is_same(found[key], found[after])]
        slots = self.append(block, rows.layout, last, same)
        if places.order is not None:
            slots = slots[torch.from_numpy(places.order.argsort())]
        return slots if len(batch) == 1 else slots.view(batch)

    def _places(self, rows: Rows, lanes: Lanes, numbers: np.ndarray | None) -> Routing:
        """Returns where rows go, which may have the numbers of their trajectories."""
        E, batch = self.num_envs, rows.batch
        if lanes is not None:
            which = np.array(lane_numbers(lanes, E), np.int64)
            return in_lane_order(which, num_steps_of(batch, len(which)))
        if numbers is None or len(batch) != 1:
            return all_lanes(E, num_steps_of(batch, E))
        return route(
            *(numbers, torch.as_tensor(rows.done, device="cpu").numpy()),
            held=self._held(np.arange(E))[1],
            is_open=self._storage.episodes.is_open,
            last_written=self._written_at,
        )

    def _rows_for(
        self, data: TensorDictBase, found: Mapping[NestedKey, torch.Tensor], batch: torch.Size
    ) -> Rows:
        """Returns what takes these rows: that of the last write, if they are of its batch size."""
        rows, storage = self._rows, self._storage
        device = None
        if not storage.is_on_host and found and next(iter(found.values())).device == storage.device:
            device = storage.device
        wanted = storage.layout, batch, device, len(found)
        if rows is None or (rows.layout, rows.batch, rows.device, rows.num_found) != wanted:
            layout = self._layout_of(data, found)
            rows = Rows(layout, batch, device, self.done_key, found)
            # Large blocks come fresh from the system, page by page, unless they are kept.
            self._rows = rows if device is None and rows.words.nbytes <= _MOST_KEPT else None
        return rows

    def _layout_of(self, data: TensorDictBase, found: Mapping[NestedKey, torch.Tensor]) -> Layout:
        """Returns the layout of the rows; of those of the first write, if there are none yet.

        Raises:
            KeyError, ValueError: an entry is missing, or has a name that sampling sets.
        """
        storage = self._storage
        layout = storage.layout
        if layout is None:
            every = [key for key in found if key not in _OF_BATCHES]
            stored = self.keys or [*storage.fields] or every
            if missing := [key for key in stored if key not in found]:
                raise KeyError(f"the data must hold {missing}, it has {sorted(found, key=str)}.")
            kinds = {key: (found[key].dtype, found[key].shape[data.ndim :]) for key in stored}
            layout = storage.layout_for(kinds, nested_sizes(data.select(*stored), data.ndim))
        if (folded := default_keys.STEPS_TO_NEXT_OBS) in found and folded not in layout:
            raise ValueError(
                f"steps must be single ones, got sums over several, with {folded!r}: pass n_step= here."
            )
        if not self._warned_of_lost and len(found) > len(layout.fields):
            self._warn_of_lost(found, layout)
        return layout

    def _warn_of_lost(self, found: Mapping[NestedKey, torch.Tensor], layout: Layout) -> None:
        """Warns once of entries that are left out.

        Where fields are named, of those of the environment and of recurrent states: they go on under
        `next`; what a policy computes on its way to an action does not.
        """
        others = [key for key in found if key not in layout and key not in _OF_BATCHES]
        hint = "the first write says which there are, or PackedStorage(fields=...)."
        if self.keys or self._storage.fields:
            nested = [key for key in others if key[0] == "next" and not _BY_PRODUCTS & {*key}]
            # What a field at the root leads to is left out on purpose.
            others = [key for key in (unravel_key(it[1:]) for it in nested) if key not in layout]
            hint = (
                "name those that are needed in extra_fields=. States of a recurrent policy have fields "
                "if its primer (make_tensordict_primer()) is part of the storage's environment."
            )
        if lost := sorted(others, key=str):
            self._warned_of_lost = True
            warn_caller(f"the storage has no fields for {lost}, which are left out: {hint}")

    def _cut(self, numbers: np.ndarray, places: Routing) -> np.ndarray:
        """Returns `[N]` where trajectories change, in the order of their places."""
        cut = np.append(False, numbers[1:] != numbers[:-1])
        # The first row of a lane goes on with the lane's last trajectory, or with none.
        first = places.offsets[:-1]
        cut[first] = numbers[first] != self._held(places.which)[1]
        return cut

    def _check_continues(self, block: Block, layout: Layout) -> None:
        """Raises a ValueError if a flat block without trajectory ids can't be of one environment."""
        size = len(block.done)
        if (
            size >= _LEAST_CHECKED
            and 2 * (gaps := layout.count_gaps(block.words, block.done)) > size
        ):
            raise ValueError(
                f"{gaps} of {size} transitions do not begin with the observation that the one before led "
                "to. Of several environments: make the replay buffer with their num_envs and pass "
                f"[num_envs, T], or [N] with trajectory ids, {self.traj_key!r}. Unrelated transitions: "
                "set 'truncated' and 'done' of each. Nothing was written."
            )

    # Steps as blocks

    def append(
        self,
        block: Block,
        layout: Layout,
        trajectories: np.ndarray | None = None,
        same: Sequence[NestedKey] = (),
        *,
        cuts_gaps: bool | None = None,
    ) -> torch.Tensor:
        """Writes rows that are checked but for their stacks of frames.

        Args:
            block: the rows.
            layout: of the rows.
            trajectories: `[L]` the last trajectory of each lane; None is that of before.
            same: keys of observations that share the memory of their next ones.
            cuts_gaps: whether to split episodes at gaps; None as `on_gap` says.

        Returns:
            `[N]` int64 slots in the order of the block.

        Raises:
            ValueError: a stack does not continue with the next frame, or the array was changed since the
                last step. Nothing is written then.
        """
        storage = self._storage
        layout.check_stacks(block.words)
        if storage.layout is None:
            storage.set_layout(layout)
        if self._shared is not None or trajectories is not None:
            self._note(block, trajectories)
        cuts_gaps = self.on_gap == "cut" if cuts_gaps is None else cuts_gaps
        warns = cuts_gaps and not self._warned_of_gaps
        stops = warns or bool(same)
        slots, gaps = storage.append(block, cuts_gaps=cuts_gaps, stops_at_gaps=stops)
        if stops and gaps:
            self._check_unchanged(block, layout, same)
            gaps -= int((self._written_at[block.lanes] <= self._resumed_at).sum())
            if warns and gaps > 0:
                self._warn_of_gaps()
            slots, _ = storage.append(block, cuts_gaps=cuts_gaps)
        self._count[0] = count = int(self._count[0]) + len(block.done)
        self._written_at[block.lanes] = count
        return torch.from_numpy(slots)

    def _warn_of_gaps(self) -> None:
        self._warned_of_gaps = True
        warn_caller(
            "a row does not begin with the observation that the row before it in its lane led to: "
            "its episode is cut there. Call end_episodes() where environments are reset early, or "
            'pass on_gap="ignore" if observations are changed between steps.'
        )

    def _check_unchanged(self, block: Block, layout: Layout, same: Sequence[NestedKey]) -> None:
        """Raises a ValueError if an observation in `same` is not what the episode in its lane led to."""
        storage, first = self._storage, block.offsets[:-1]
        index, cut = storage.episodes, torch.as_tensor(block.cut).cpu().numpy()
        runs = index.is_open[block.lanes] & ~cut[first]
        if not same or not runs.any():
            return
        newest = torch.from_numpy(index.newest_slots()[block.lanes[runs]])
        views = layout.views(torch.as_tensor(block.words)[first[runs]])
        for key in same:
            led_to = storage.entries.take(
                default_keys.next_key(key), storage.entries.entries_of(newest)
            )
            now = views[key].to(led_to.device)
            if not torch.equal(led_to.view(len(now), -1), now.reshape(len(now), -1)):
                raise ValueError(
                    f"{key!r} and its next value are the same array, which has changed since the last "
                    f"step: pass a copy of each, such as {default_keys.key_path(key)[-1]}.copy()."
                )

    def extend_from(self, other: EpisodeWriter) -> None:
        """Writes the transitions of another writer's storage; see `ReplayStorage.extend_from`.

        Raises:
            ValueError: fields do not fit. Nothing is written then.
        """
        source, target = other._storage, self._storage
        target.backend.check_writer()
        transfer = Transfer(source, target)
        if not len(transfer.slots):
            return
        layout, sources = self._layout_from(source.layout)
        stacks = [(it.stack, source.layout.by_key[sources[it.key]].stack) for it in layout.fields]
        if any(own and own != its for own, its in stacks):
            for block, _ in Transfer(source, target).blocks(layout, sources):
                layout.check_stacks(block.words)
        if target.layout is None:
            target.set_layout(layout)
        if transfer.keeps_lanes and not len(target):
            transfer.number_steps()
        priorities = source.episodes.priorities[transfer.slots]
        for block, ranks in transfer.blocks(layout, sources):
            slots = self.append(block, layout, cuts_gaps=False).numpy()
            is_live, index = slots >= 0, target.episodes
            index.priorities[slots[is_live]] = priorities[ranks[is_live]]
            index.num_updates[0] += 1
        target.end_episodes(transfer.ended_lanes())
        if transfer.keeps_lanes:
            self._lanes[:, 0] = 0
            self._lanes[:, 1] = other._held(np.arange(self.num_envs))[1]
        self._resumed_at = self.write_count

    def _layout_from(self, source: Layout) -> tuple[Layout, dict[NestedKey, NestedKey]]:
        """Returns the layout of transitions from another storage, and the source of each field.

        Raises:
            ValueError: fields do not fit.
        """
        storage, given = self._storage, source.described
        wanted = storage.fields or dict.fromkeys(self.keys or given)
        sources = matched(storage.layout.described if storage.layout else wanted, given)
        layout = storage.layout_for(
            {key: given[its] for key, its in sources.items()}, source.nested
        )
        if lost := sorted(given.keys() - {*sources.values()}, key=str):
            warn_caller(f"the replay buffer has no fields for {lost}, which are left out.")
        return layout, sources

    # As TorchRL's buffers ask

    def _empty(self, empty_write_count: bool = True) -> None:
        if empty_write_count:
            self._count[0] = self._written_at[:] = 0
            self._resumed_at = -1

    def state(self) -> State:
        """Returns the write count, and of each lane its trajectory and when it was written."""
        lanes = torch.from_numpy(
            np.stack([self._held(np.arange(self.num_envs))[1], self._written_at])
        )
        return {"write_count": self.write_count, "lanes": lanes}

    def prepare_load(self, state: Any) -> Adopt:
        """Returns a function that adopts a state.

        Raises:
            ValueError, TypeError: the state is not that of such a writer.
        """
        count, lanes = required_items("EpisodeWriter", state, ("write_count", "lanes"))
        count = validation.integer("write_count", count)
        lanes = array("lanes", lanes, torch.int64, 2, self.num_envs)

        def adopt() -> None:
            self._count[0], self._lanes[:, 1], self._written_at[:] = count, *lanes
            self._lanes[:, 0], self._resumed_at = 0, count

        return adopt

    def state_dict(self) -> State:
        """Returns `state()`."""
        return self.state()

    def load_state_dict(self, state_dict: State) -> None:
        """Adopts what `state_dict` returned, once all of it is checked."""
        self.prepare_load(state_dict)()

    def dumps(self, path: Any) -> None:
        """Raises: a storage is saved as a whole."""
        raise NotImplementedError("use a ReplayStorage, which saves rows and parts as one.")

    loads = dumps

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_envs={self.num_envs})"
