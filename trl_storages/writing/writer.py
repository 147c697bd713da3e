"""Writes transitions to lanes: all data are checked, then one block is appended.

Letters: E lanes (environments), L of them that are written, T steps of each, N transitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.data.replay_buffers.writers import Writer

from trl_storages import keys as default_keys
from trl_storages import validation
from trl_storages.entries.layout import Block, Layout, nested_sizes
from trl_storages.serialization import Adopt, State, array, required_items
from trl_storages.storage.packed_storage import PackedStorage
from trl_storages.torchrl_compat import reject_torchrl_components
from trl_storages.validation import Lanes, lane_numbers, warn_caller
from trl_storages.writing.lanes import LaneNotes, Routing, in_lane_order, route
from trl_storages.writing.staging import StagedBlock, Staging, tensors_in
from trl_storages.writing.transfer import Transfer, match_fields

__all__ = ["EpisodeWriter"]

# Keys that sampled batches have in addition to the fields.
_BATCH_KEYS = (default_keys.INDEX, default_keys.INDEX_GENERATION, default_keys.MASK)
# Names under `next` that are left out without a warning.
_BY_PRODUCTS = frozenset(
    {"done", "terminated", "truncated", "is_init", "step_count", "episode_reward"}
)
_MAX_KEPT_BYTES = 1 << 24
# Shorter flat writes may be of several environments: this is not checked.
_MIN_CHECKED = 32


class EpisodeWriter(Writer):  # type: ignore[misc]
    """Writes transitions of E environments, each environment to one lane.

    A transition continues the episode of its lane, unless the transition before it was `done` or belongs
    to another trajectory. If its observation is not the next observation of the transition before it, the
    environment was reset without a `done`, or another trajectory began: see `on_gap`.

    Args:
        num_envs: E.
        done_key: key of the `[..., 1]` bool flag that ends an episode.
        traj_key: key of integers, one number per trajectory; an episode is split where the number
            changes. The data may lack this key.
        keys: keys to store, all others are left out; None stores all keys.
        on_gap: "cut" begins an episode with a transition whose observation is not bitwise identical to
            the next observation of the transition before it, and warns once; "cut_silently" does the same
            without a warning; "ignore" stores the transitions as one episode.

    >>> EpisodeWriter(num_envs=2)
    EpisodeWriter(num_envs=2)
    """

    #: TorchRL's buffers then add `index_generation` to batches, and accept `update_if_present`.
    tracks_generations = True

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
        self.on_gap = validation.choice("on_gap", on_gap, ("cut", "cut_silently", "ignore"))
        # The staging of the last write, to be filled again.
        self._staged: StagedBlock | None = None
        self._notes = LaneNotes(E)
        # The write count when transitions were loaded or opened, else -1. Lanes that were not written
        # since may be continued by another environment, so that their gaps are no reason for a warning.
        self._resumed_at = -1
        self._warned_of_gaps = self.on_gap == "cut_silently"
        self._warned_of_unstored = self._warned_of_flat = False

    @property
    def write_count(self) -> int:
        """Number of transitions ever written."""
        return int(self._notes.count[0])

    _write_count = write_count

    def share(self) -> None:
        """Shares the write count; from now on episodes are split where the writing process changes."""
        self._notes.share()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_staged": None}

    def register_storage(self, storage: PackedStorage) -> None:
        """Divides a storage into lanes and writes to it from now on.

        Raises:
            TypeError: `storage` is no `PackedStorage`, or belongs to a replay buffer with a sampler of
                TorchRL that does not support lanes.
            ValueError: the storage is too small, or holds transitions of another number of lanes.
        """
        reject_torchrl_components(storage)
        validation.instance("storage", storage, PackedStorage, what="a PackedStorage")
        for buffer in storage._attached_entities:
            reject_torchrl_components(buffer.sampler)
        storage.set_num_envs(self.num_envs)
        self._resumed_at = self.write_count if len(storage) else -1
        super().register_storage(storage)

    def generations_of(self, index: Any) -> torch.Tensor:
        """Returns the time index, in its lane, of the transition in each slot; -1 in empty slots.

        Args:
            index: `[*B]` slots; -1, as from `extend`, is an empty slot.

        Returns:
            `[*B]` int64, on the device of `index`.
        """
        index, episodes = torch.as_tensor(index), self._storage.episodes
        slots = index.cpu().numpy()
        is_live, generations = episodes.are_live(slots), np.full(slots.shape, -1)
        generations[is_live] = episodes.steps_of(slots[is_live])
        return torch.as_tensor(generations, device=index.device)

    # Steps as TensorDicts

    def add(self, data: TensorDictBase) -> torch.Tensor:
        """Writes one step: a transition `[]` of a single lane, or `[E]` of all lanes."""
        return self.extend(data)

    def extend(self, data: TensorDictBase, *, lanes: Lanes = None) -> torch.Tensor:
        """Writes steps of all lanes, or of `lanes`.

        Args:
            data: `[T]` or `[]` for one lane, `[L, T]`, or `[L]` for one step of several lanes.
                Transitions `[N]` with `traj_key` for several lanes may be of any trajectories: each
                trajectory continues in its lane, and a new one begins in a lane whose episode has ended,
                else in the least recently written lane, whose episode is split.
            lanes: the L distinct lanes that are written; None is all lanes.

        Returns:
            int64 slots of the batch size of `data`, in its order; -1 for transitions that the same write
            overwrote.

        Raises:
            ValueError, KeyError, TypeError: the data do not fit. Nothing is written then.
        """
        tensors, batch_size = tensors_in(validation.tensordict("data", data)), data.batch_size
        if not batch_size.numel():
            raise ValueError(f"the data must hold transitions, got the batch size {[*batch_size]}.")
        staged = self._staged_for(data, tensors)
        if staged.fill(tensors) and not self._warned_of_flat:
            self._warned_of_flat = True
            warn_caller(
                "every transition of a flat batch is truncated and some are not done, as TorchRL's "
                "trainers leave them: stored as truncated are those that are done and not terminated."
            )
        trajectories: Any = tensors.get(self.traj_key)
        if trajectories is not None:
            trajectories = trajectories.detach().cpu().reshape(-1).numpy().astype(np.int64)
        routing = self._route(staged, lanes, trajectories)
        if trajectories is not None and routing.order is not None:
            trajectories = trajectories[routing.order]
        slots = self.append(staged, routing, tensors, trajectories)
        if routing.order is not None:
            slots = slots[torch.from_numpy(routing.order.argsort())]
        return slots if len(batch_size) == 1 else slots.view(batch_size)

    def _route(self, staged: StagedBlock, lanes: Lanes, trajectories: np.ndarray | None) -> Routing:
        """Returns the lane of each transition; `trajectories` `[N]` are their numbers, if known."""
        if lanes is not None or trajectories is None or len(staged.batch_size) != 1:
            E = self.num_envs
            numbers = range(E) if lanes is None else (*lane_numbers(lanes, E),)
            return in_lane_order(numbers, staged.batch_size)
        return route(
            trajectories,
            torch.as_tensor(staged.done, device="cpu").numpy(),
            last_trajectories=self._trajectories(),
            is_open=self._storage.episodes.is_open,
            written_at=self._notes.written_at,
        )

    def _staged_for(
        self, data: TensorDictBase, tensors: Mapping[NestedKey, torch.Tensor]
    ) -> StagedBlock:
        """Returns the staging for the data; that of the last write, if it fits."""
        staged, storage, batch_size = self._staged, self._storage, data.batch_size
        device = None
        if not storage.is_on_host and tensors:
            first = next(iter(tensors.values()))
            device = storage.device if first.device == storage.device else None
        needs = storage.layout, batch_size, device, len(tensors)
        if (
            staged is None
            or (staged.layout, staged.batch_size, staged.device, staged.num_tensors) != needs
        ):
            layout = self._layout_of(data, tensors)
            staged = StagedBlock(layout, batch_size, device, self.done_key, tensors)
            # The system provides a new large block page by page at each write, unless it is kept.
            is_kept = device is None and staged.words.nbytes <= _MAX_KEPT_BYTES
            self._staged = staged if is_kept else None
        return staged

    def _layout_of(self, data: TensorDictBase, tensors: Mapping[NestedKey, torch.Tensor]) -> Layout:
        """Returns the layout of the stored transitions, or that of a first write.

        Raises:
            KeyError: a tensor is missing.
            ValueError: the data hold n-step returns, or a key that sampling sets.
        """
        storage = self._storage
        layout = storage.layout
        if layout is None:
            all_keys = [key for key in tensors if key not in _BATCH_KEYS]
            stored = self.keys or [*storage.fields] or all_keys
            if missing := [key for key in stored if key not in tensors]:
                raise KeyError(f"the data lack {missing}; they have {sorted(tensors, key=str)}.")
            kinds = {key: (tensors[key].dtype, tensors[key].shape[data.ndim :]) for key in stored}
            layout = storage.layout_for(kinds, nested_sizes(data.select(*stored), data.ndim))
        if (key := default_keys.STEPS_TO_NEXT_OBS) in tensors and key not in layout:
            raise ValueError(
                f"expected 1-step transitions, but the data hold {key!r} (already n-step): pass n_step= "
                "to the replay buffer instead of the collector."
            )
        if not self._warned_of_unstored and len(tensors) > len(layout.fields):
            self._warn_of_unstored(tensors, layout)
        return layout

    def _warn_of_unstored(self, tensors: Mapping[NestedKey, torch.Tensor], layout: Layout) -> None:
        """Warns once of tensors that are left out.

        If fields are named, only tensors under `next` count: those of the environment and of recurrent
        states are there, but not what a policy computes besides the action.
        """
        unstored = [key for key in tensors if key not in layout and key not in _BATCH_KEYS]
        hint = "the first write determines the fields, or PackedStorage(fields=...)."
        if self.keys or self._storage.fields:
            next_keys = [key for key in unstored if key[0] == "next" and not _BY_PRODUCTS & {*key}]
            # Next values of a field at the root are left out on purpose.
            roots = (unravel_key(key[1:]) for key in next_keys)
            unstored = [key for key in roots if key not in layout]
            hint = (
                "to store them, name them in extra_fields=. States of a recurrent policy have fields if "
                "its primer (make_tensordict_primer()) is part of the environment of from_env()."
            )
        if unstored:
            self._warned_of_unstored = True
            names = sorted(unstored, key=str)
            warn_caller(f"the replay buffer has no fields for {names}, which are left out: {hint}")

    # Staged steps

    def append(
        self,
        staged: Staging,
        routing: Routing,
        source: Any,
        trajectories: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Writes checked transitions; only their stacks of frames and their gaps are checked here.

        Args:
            staged: the transitions.
            routing: the lane of each transition.
            source: the values with which `staged` was filled.
            trajectories: `[N]` the trajectory of each transition, in the order of the routing; None if
                the numbers are unknown.

        Returns:
            `[N]` int64 slots in the order of the routing.

        Raises:
            ValueError: a stack does not continue with the next frame; an observation that shares memory
                with its next observation was changed after the last step; or the transitions of a flat
                batch can't be of one environment. Nothing is written then.
        """
        storage, layout, notes = self._storage, staged.layout, self._notes
        block, cuts_gaps = staged.block(routing), self.on_gap != "ignore"
        layout.check_stacks(block.words)
        if storage.layout is None:
            storage.allocate(layout)
        notes.add(block, trajectories, storage.episodes.cursors)
        # Gaps that are ignored may still show that an array was changed in place.
        stops = cuts_gaps or len(staged.aliased_keys(source)) > 0
        slots, num_gaps = storage.append(block, cuts_gaps=cuts_gaps, stops_at_gaps=stops)
        if num_gaps:  # nothing was written yet
            is_flat = trajectories is None and len(staged.batch_size) == len(block.lanes) == 1
            if cuts_gaps and is_flat:
                self._check_continues(num_gaps, len(block.done))
            self._check_unchanged(block, staged, source)
            num_gaps -= int((notes.written_at[block.lanes] <= self._resumed_at).sum())
            if cuts_gaps and num_gaps > 0 and not self._warned_of_gaps:
                self._warned_of_gaps = True
                warn_caller(
                    "a transition does not begin with the next observation of the transition before it "
                    "in its lane: its episode is split there. Time is the last dimension of a batch. "
                    "Call end_episodes() where environments are reset early, or pass on_gap='ignore' if "
                    "observations are changed between steps."
                )
            slots, _ = storage.append(block, cuts_gaps=cuts_gaps)
        notes.count_steps(block.lanes, len(slots))
        return torch.from_numpy(slots)

    def _check_continues(self, num_gaps: int, num_steps: int) -> None:
        """Raises a ValueError if a flat batch without trajectory ids can't be of one environment."""
        if num_steps >= _MIN_CHECKED and 2 * num_gaps > num_steps:
            raise ValueError(
                f"{num_gaps} of {num_steps} transitions do not begin with the next observation of the "
                "transition before. If the data are of several environments, create the replay buffer "
                f"with their num_envs and pass [num_envs, T], or [N] with trajectory ids, "
                f"{self.traj_key!r}. If the transitions are unrelated, set 'truncated' and 'done' of "
                "each. Nothing was written."
            )

    def _check_unchanged(self, block: Block, staged: Staging, source: Any) -> None:
        """Checks that observations equal the newest next observations of their lanes.

        Only observations that share memory with their next observations are checked.

        Raises:
            ValueError: an observation was changed in place.
        """
        storage, first = self._storage, block.offsets[:-1]
        index, cut = storage.episodes, torch.as_tensor(block.cut).cpu().numpy()
        continues = index.is_open[block.lanes] & ~cut[first]
        if not continues.any():
            return
        newest = torch.from_numpy(index.newest_slots()[block.lanes[continues]])
        views = staged.layout.views(torch.as_tensor(block.words)[first[continues]])
        entries: Any = storage.entries
        for key in staged.aliased_keys(source):
            stored = entries.take(default_keys.next_key(key), entries.entries_of(newest))
            values = views[key].to(stored.device)
            if not torch.equal(stored.view(len(values), -1), values.reshape(len(values), -1)):
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
        source_field = source.layout.by_key
        stacks = [(it.stack, source_field[sources[it.key]].stack) for it in layout.fields]
        if any(stack and stack != source_stack for stack, source_stack in stacks):
            for block, _ in Transfer(source, target).blocks(layout, sources):
                layout.check_stacks(block.words)
        if target.layout is None:
            target.allocate(layout)
        if transfer.keeps_lanes and not len(target):
            transfer.number_steps()
        priorities = source.episodes.priorities[transfer.slots]
        for block, ranks in transfer.blocks(layout, sources):
            self._notes.add(block, None, target.episodes.cursors)
            slots, _ = target.append(block, cuts_gaps=False)
            self._notes.count_steps(block.lanes, len(slots))
            is_live, index = slots >= 0, target.episodes
            index.priorities[slots[is_live]] = priorities[ranks[is_live]]
            index.num_updates[0] += 1
        target.end_episodes(transfer.ended_lanes())
        if transfer.keeps_lanes:
            self._notes.reset(other._trajectories())
        self._resumed_at = self.write_count

    def _layout_from(self, source: Layout) -> tuple[Layout, dict[NestedKey, NestedKey]]:
        """Returns the layout of transitions from another storage, and the source of each field.

        Raises:
            ValueError: fields do not fit.
        """
        storage, source_fields = self._storage, source.described
        fields = storage.fields or dict.fromkeys(self.keys or source_fields)
        sources = match_fields(
            storage.layout.described if storage.layout else fields, source_fields
        )
        layout = storage.layout_for(
            {key: source_fields[source_key] for key, source_key in sources.items()}, source.nested
        )
        if unstored := sorted(source_fields.keys() - {*sources.values()}, key=str):
            warn_caller(f"the replay buffer has no fields for {unstored}, which are left out.")
        return layout, sources

    def _trajectories(self) -> np.ndarray:
        """Returns the last trajectory of each lane, `[E]`."""
        return self._notes.trajectories(self._storage.episodes.cursors)

    # The interface of TorchRL's writers

    def _empty(self, empty_write_count: bool = True) -> None:
        if empty_write_count:
            self._notes.count[0] = self._notes.written_at[:] = 0
            self._resumed_at = -1

    def state(self) -> State:
        """Returns the write count, and per lane the last trajectory and the count at the last write."""
        lanes = torch.from_numpy(np.stack([self._trajectories(), self._notes.written_at]))
        return {"write_count": self.write_count, "lanes": lanes}

    def prepare_load(self, state: Any) -> Adopt:
        """Returns a function that adopts a state.

        Raises:
            ValueError, TypeError: the state is not from a writer with as many lanes.
        """
        count, lanes = required_items("EpisodeWriter", state, ("write_count", "lanes"))
        count = validation.integer("write_count", count)
        trajectories, written_at = array("lanes", lanes, torch.int64, 2, self.num_envs)

        def adopt() -> None:
            self._notes.count[0], self._notes.written_at[:] = count, written_at
            self._notes.reset(trajectories)
            self._resumed_at = count

        return adopt

    def state_dict(self) -> State:
        """Returns `state()`."""
        return self.state()

    def load_state_dict(self, state_dict: State) -> None:
        """Adopts what `state_dict` returned, once all of it is checked."""
        self.prepare_load(state_dict)()

    def dumps(self, path: Any) -> None:
        """Raises a NotImplementedError: only whole replay buffers are saved."""
        raise NotImplementedError(
            "use ReplayStorage.dumps, which saves transitions and components."
        )

    loads = dumps

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_envs={self.num_envs})"
