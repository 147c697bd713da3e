"""A TorchRL storage whose lanes are streams of observations.

Letters: E lanes, B batch, N transitions of a block.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import NestedKey, TensorDict
from torchrl.data import Storage, TensorStorage

from trl_storages import keys, validation
from trl_storages.directory import Description, Directory
from trl_storages.entries import DeviceEntries, HostEntries
from trl_storages.entries.fields import WORD
from trl_storages.entries.layout import Block, Layout, Nested
from trl_storages.index import EmptyError, EpisodeIndex
from trl_storages.kernels.frames import EVERY
from trl_storages.serialization import Adopt, State
from trl_storages.storage import dumps, memory
from trl_storages.storage.memory import Memory
from trl_storages.storage.view import StorageView
from trl_storages.validation import renamed, warn_caller

__all__ = ["PackedStorage"]

_FLAGS = ("done", "terminated", "truncated")
# Keyword of this class -> keywords of TorchRL's storages and of other libraries.
_SYNONYMS = {
    "max_size=": "buffer_size capacity size storage_size",
    "path=, and fresh=True to discard the contents of the directory": "scratch_dir",
}
_BRIDGE = (
    "To change the fields, create a new replay buffer and call new.extend_from(old); old may be "
    "ReplayStorage.open(path)."
)


class PackedStorage(TensorStorage):  # type: ignore[misc]
    """Stores each observation once, in the stream of its lane: in memory, in a directory or on a GPU.

    An `EpisodeWriter` writes the transitions. Their layout is fixed by `fields`, or by the first write.

    Args:
        max_size: number of transitions, rounded down to a multiple of `num_envs`; None takes that of the
            directory.
        num_envs: E, the number of lanes; None takes the number of the directory, else one.
        device: device of the transitions; their index is always on the host.
        fields: key -> (dtype, shape) of a transition, or (dtype, shape, FrameStack); or None for a field
            that the first write fixes.
        nested: path and further batch sizes of nested TensorDicts, such as those of agents. Without
            `fields` the first write fixes them.
        compress: whether to compress stacks of frames, and uint8 observations with two or more
            dimensions, losslessly: each entry stores only its changes since the previous entry. The
            transitions must be on the host. None takes the setting of the directory, else False.
        max_entries: number of observations that fit, over all lanes. With None any `max_size` transitions
            fit in memory. On a GPU None fits episodes of about eight steps or more, with stacks of k
            frames 8 k steps; with shorter episodes the oldest transitions are evicted early.
        path: directory that keeps the transitions after the process ends. If it contains a storage, the
            storage is opened.
        mode: "r+" for the one process that writes to the directory; "r" for any number of readers.
        fresh: whether to discard the contents of the directory.
        cold: whether the directory is larger than the memory: then sampled entries are read from the disk
            together, and nothing else is read. None decides by the sizes when the directory is opened.

    Raises:
        ValueError: a lane has fewer than two steps, or too few entries; the directory is damaged, or
            contains another storage; `compress` is True on a GPU, or without a field to compress.
        FileNotFoundError: the directory contains no storage, and `mode` is "r" or `max_size` is None.
        RuntimeError: the directory has another writer, and `mode` is "r+".

    >>> PackedStorage(1000)
    PackedStorage(0 of 1,000 transitions, cpu)
    """

    supports_conditional_update = True

    @renamed(_SYNONYMS)
    def __init__(
        self,
        max_size: int | None,
        *,
        num_envs: int | None = None,
        device: torch.device | str = "cpu",
        fields: Mapping[NestedKey, Sequence[Any] | None] | None = None,
        nested: Nested = (),
        compress: bool | None = None,
        max_entries: int | None = None,
        path: str | os.PathLike[str] | None = None,
        mode: str = "r+",
        fresh: bool = False,
        cold: bool | None = None,
    ) -> None:
        device = validation.device("device", device)
        self._compress = validation.optional(validation.flag, "compress", compress)
        if compress and device.type not in memory.HOSTS:
            raise ValueError(
                f"compress=True needs device='cpu', got {device}: frames are decoded on the host. Pass "
                "prefetch=1 and pin_memory=True to ReplayStorage, and move each batch to the GPU with "
                "batch.to('cuda', non_blocking=True)."
            )
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"device must be 'cpu' or 'cuda', got {str(device)!r}: keep the transitions on the CPU, "
                "and move batches with batch.to(device)."
            )
        #: The device of the transitions, with its number.
        self.device: torch.device = torch.empty(0, device=device).device
        #: Whether compiled loops read and write the transitions.
        self.is_on_host: bool = self.device.type in memory.HOSTS
        #: The directory; None in memory.
        self.path: Path | None = None if path is None else validation.directory("path", path)
        validation.choice("mode", mode, ("r+", "r"))
        self._is_fresh = validation.flag("fresh", fresh)
        #: The argument.
        self.cold: bool | None = validation.optional(validation.flag, "cold", cold)
        description = self._read_description(mode, is_required=mode == "r" or max_size is None)
        if description is not None:
            max_size = description.max_size if max_size is None else max_size
            num_envs = description.num_envs if num_envs is None else num_envs
            max_entries = description.max_entries if max_entries is None else max_entries
        max_size = validation.integer("max_size", max_size, at_least=1)
        num_envs = validation.integer("num_envs", 1 if num_envs is None else num_envs, at_least=1)
        max_entries = validation.optional(
            validation.integer, "max_entries", max_entries, at_least=1
        )
        # Not TensorStorage.__init__: TorchRL's buffers only use the class, to choose a collate function.
        Storage.__init__(self, max_size)
        self._requested_size = self.max_size
        self._max_entries = max_entries
        expected = "a mapping from key to (dtype, shape)"
        #: The arguments.
        self.fields: dict[NestedKey, Any] = dict(
            validation.mapping("fields", fields or {}, expected)
        )
        self.nested: Nested = _checked_nested(nested)
        for key in self.fields:
            keys.check_storable(key)
        # The number of transitions of the directory when it was opened.
        self._num_opened = 0
        #: Whether the last write evicted transitions early because entries were short.
        self.is_evicting_early: bool = False
        self._is_warned = False
        # Whether the size of the transitions was compared with the memory of the machine.
        self._is_sized = False
        # Until the layout is known the storage has an empty index, which checks the sizes.
        self._attach(Memory(None, self._requested_size, num_envs, max_entries, self.device))
        if description is not None:
            self._check_fits(description)
            self._attach(Directory.open(str(self.path), mode))
            self._num_opened = len(self)
        elif path is None:
            self.prepare()

    def _attach(self, backend: Memory | Directory) -> None:
        """Makes a backend the one that holds the transitions."""
        #: Holds the transitions and their index.
        self.backend: Memory | Directory = backend
        #: The episode index of the transitions.
        self.episodes: EpisodeIndex = backend.index
        #: Reads and writes entries; None until the layout is fixed.
        self.entries: HostEntries | DeviceEntries | None = backend.entries
        #: The layout of a transition; None until it is fixed.
        self.layout: Layout | None = backend.layout
        #: The number of slots.
        self.max_size: int = self.episodes.capacity
        if self.cold is not None and isinstance(backend, Directory):
            backend.entries.read_cold(self.cold)
        self._view = StorageView(backend, self.device)

    def _read_description(self, mode: str, *, is_required: bool) -> Description | None:
        """Returns the description of the directory; None if there is none, or if it is discarded."""
        if self.path is None:
            if mode == "r" or self._is_fresh:
                raise ValueError("mode='r' and fresh=True need a directory, got path=None.")
            return None
        if not self.is_on_host:
            raise ValueError(f"device must be 'cpu' with path=, got {str(self.device)!r}.")
        if mode == "r" and self._is_fresh:
            raise ValueError("fresh=True writes to the directory, got mode='r'.")
        try:
            return None if self._is_fresh else Description.read(self.path)
        except FileNotFoundError:
            if is_required:
                raise
            return None

    def _check_fits(self, description: Description) -> None:
        """Raises a ValueError unless the arguments fit the description of the directory."""
        requested = self.max_size, self.episodes.num_envs, self._max_entries
        stored = description.max_size, description.num_envs, description.max_entries
        if requested != stored:
            names = "max_size, num_envs and max_entries"
            raise ValueError(f"{names} must be {stored} as in {self.path}, got {requested}.")
        if self._compress not in (None, bool(description.layout.keyframes)):
            raise ValueError(
                f"compress must be {not self._compress} as in {self.path}, got {self._compress}: to "
                "change it, create a new replay buffer and call new.extend_from(old)."
            )
        if self.fields:
            described = description.layout.described
            fields: Any = {key: kind or described.get(key) for key, kind in self.fields.items()}
            if None in fields.values() or Layout(fields).described != described:
                raise ValueError(
                    f"fields must be those of {self.path}, {description.layout}, got {self.fields}. "
                    f"{_BRIDGE}"
                )

    def prepare(self) -> None:
        """Allocates the entries, if the layout is known."""
        if self.layout is None and self.fields and None not in self.fields.values():
            self.allocate(self.layout_for({}))

    def set_num_envs(self, num_envs: int) -> None:
        """Divides an empty storage into `num_envs` lanes.

        Raises:
            ValueError: the storage is not empty, or a lane has fewer than two steps.
        """
        if num_envs == self.episodes.num_envs:
            return
        if len(self):
            raise ValueError(
                f"num_envs must be {self.episodes.num_envs} as in the stored transitions, got "
                f"{num_envs}: create another storage."
            )
        self.backend.check_writer()
        layout, previous = self.layout, self.backend
        self._attach(Memory(None, self._requested_size, num_envs, self._max_entries, self.device))
        previous.close()
        if layout is not None:
            self._is_fresh = True
            self.allocate(layout)

    def layout_for(self, kinds: Mapping[NestedKey, Sequence[Any]], nested: Nested = ()) -> Layout:
        """Returns the layout, or the layout that a first write would fix.

        Args:
            kinds: key -> (dtype, shape) of the fields of the write.
            nested: path and further batch sizes of nested TensorDicts.

        Raises:
            ValueError: a field has a name that sampling sets.
            KeyError: a field is missing.
        """
        if self.layout is not None:
            return self.layout
        if missing := [key for key, kind in self.fields.items() if not kind and key not in kinds]:
            raise KeyError(f"fields {missing} are missing, got {[*kinds]}. {_BRIDGE}")
        for key in kinds:
            keys.check_storable(key)
        fields = {key: kind or kinds[key] for key, kind in self.fields.items()}
        keyframes = EVERY if self._compress else 0
        return Layout(fields or kinds, nested or self.nested, keyframes)

    def allocate(self, layout: Layout) -> None:
        """Fixes the layout, and allocates the entries."""
        sizes = layout, self.max_size, self.episodes.num_envs, self._max_entries
        if self.path is None and self.is_on_host and not self._is_sized:
            self._is_sized = True
            memory.warn_if_too_large(self.max_size, layout.entry_words * WORD)
        if self.path is None:
            self._attach(Memory(*sizes, self.device))
        else:
            self._attach(Directory.create(self.path, *sizes, fresh=self._is_fresh))

    def share(self) -> None:
        """Moves the transitions to memory that other processes share.

        Raises:
            RuntimeError: the transitions are on a GPU or in a directory, or the fields are not known yet.
        """
        if not (isinstance(self.backend, Memory) and isinstance(self.entries, HostEntries)):
            raise RuntimeError(
                "share() needs transitions in memory of the host, and known fields: pass fields=, or "
                "write first. To share a directory, open it in the other process with mode='r'."
            )
        self._attach(self.backend.copy_to_shared_memory())

    @property
    def initialized(self) -> bool:
        """Whether the layout is fixed; TorchRL's collectors read this."""
        return self.entries is not None

    def append(
        self, block: Block, *, cuts_gaps: bool, stops_at_gaps: bool = False
    ) -> tuple[np.ndarray, int]:
        """Writes a block, a long one in chunks; see `HostEntries.append`.

        Returns:
            `[N]` int64 slots, -1 for transitions that the same block overwrote; and the number of
            discontinuities if `stops_at_gaps`, in which case a block with any is not written.
        """
        assert self.entries is not None
        self.backend.check_writer()
        if self.is_evicting_early:
            self.warn_of_early_eviction()
        index, most_gaps = self.episodes, 0 if stops_at_gaps else None
        tails = None if index.is_roomy or self._is_warned else index.tails.copy()
        chunks = block.parts(self.entries.most_steps)
        if stops_at_gaps and len(chunks) > 1:
            slots, gaps = self.entries.append(block, cuts_gaps=cuts_gaps, most_gaps=-1)
            if gaps:
                return slots, gaps
        for chunk in chunks:
            slots, gaps = self.entries.append(chunk, cuts_gaps=cuts_gaps, most_gaps=most_gaps)
        if len(chunks) > 1:
            slots = self._slots_of(block)
        if tails is not None:
            expected = np.maximum(tails, index.cursors - index.steps_per_lane)
            self.is_evicting_early = bool((index.tails > expected).any())
        return slots, gaps

    def warn_of_early_eviction(self) -> None:
        """Warns once if transitions were evicted early; called before the next write or sample."""
        if self.is_evicting_early and not self._is_warned:
            self._is_warned, index = True, self.episodes
            warn_caller(
                f"{len(index):,} of {self.max_size:,} transitions fit into "
                f"{index.entries_per_lane * index.num_envs:,} entries, because short episodes need more "
                "entries per transition. Pass a larger max_entries=."
            )

    def _slots_of(self, block: Block) -> np.ndarray:
        """Returns the slots of the block that was written last."""
        index, counts = self.episodes, np.diff(block.offsets)
        lane = block.lanes.repeat(counts)
        first = index.cursors[block.lanes] - block.offsets[1:]
        step = first.repeat(counts) + np.arange(len(lane))
        return np.where(step < index.tails[lane], -1, index.slots_of(lane, step))

    def rewrite(self, index: Any, values: Mapping[NestedKey, torch.Tensor]) -> None:
        """Overwrites fields of stored transitions, such as rewards, by those of a learned model.

        Args:
            index: `[B]` slots of valid transitions. If a slot is repeated, its last value is stored.
                `episodes.slots_by_age()` returns all slots, in the order of `[:]`.
            values: key -> `[B, *shape]`; neither observations nor flags.

        Raises:
            IndexError: a slot holds no valid transition.
            KeyError, TypeError, ValueError: the index does not hold integers, a key is no field of the
                step, a value does not fit, or the transitions are in a directory. Nothing was written.
        """
        slots = validation.slots(index).reshape(-1)
        values = self._validate_conditional_patch(slots, values)
        self.episodes.check_live(slots)
        self._apply_conditional_patch(slots, values)

    def _validate_conditional_patch(
        self, index: torch.Tensor, patch: Mapping[NestedKey, torch.Tensor]
    ) -> dict[NestedKey, torch.Tensor]:
        """Checks new values of transitions in slots `[B]`, for `rewrite` and `update_if_present`."""
        if self.path is not None:
            # A power cut could leave torn values, which would cost the transitions after them.
            raise TypeError("transitions in a directory can't be overwritten; keep them in memory.")
        if self.entries is None or self.layout is None:
            raise EmptyError("the storage is empty: write steps with record() or extend() first.")
        slots = validation.slots(index)
        if len(slots) and slots.amax() >= self.max_size:
            raise IndexError(f"slots must be below {self.max_size}, got {slots.amax()}.")
        values = {key: validation.values(repr(key), value) for key, value in patch.items()}
        for key, value in values.items():
            field = self.layout.by_key[key]
            if not self.layout.is_step(field) or keys.key_path(key)[-1] in _FLAGS:
                raise ValueError(f"{key!r} cannot be rewritten: it is an observation or a flag.")
            if value.dtype is not field.dtype or value.shape != (len(slots), *field.shape):
                got = f"{value.dtype} {list(value.shape)}"
                raise ValueError(
                    f"{key!r} must be {field} for {len(slots)} transitions, got {got}."
                )
        return values

    def _apply_conditional_patch(
        self, index: torch.Tensor, patch: Mapping[NestedKey, torch.Tensor]
    ) -> None:
        """Overwrites checked values of transitions in slots `[B]`."""
        slots = index.cpu()
        # The last occurrence of each slot.
        _, last = np.unique(slots.numpy()[::-1], return_index=True)
        chosen = torch.from_numpy(len(slots) - 1 - last)
        entries: Any = self.entries
        at = entries.entries_of(slots[chosen])
        for key, value in patch.items():
            entries.rewrite(key, at, value[chosen.to(value.device)])

    def _conditional_patch_leaf(self, key: NestedKey) -> NoReturn:
        raise NotImplementedError(
            f"version_key is not supported, got {key!r}: compare versions before update_if_present."
        )

    def number_steps(self, steps: np.ndarray, firsts: np.ndarray) -> None:
        """Evicts all steps, and sets the numbers of the next steps; see `dumps.empty_lanes`."""
        assert self.layout is not None
        lanes = dumps.empty_lanes(self.layout, steps, firsts)
        self._attach(self.backend.replace_rows(partial(dumps.fill_lanes, lanes), None))

    # State

    def state(self) -> State:
        """Returns the saved state of the transitions, which shares their memory; see `storage.dumps`."""
        self.view()
        return dumps.collect_lanes(self.backend)

    def prepare_load(self, state: Any, rest: Any = None) -> Adopt:
        """Checks a saved state, and returns a function that loads its transitions.

        Args:
            state: the saved state of transitions.
            rest: the state of the other components, as JSON; a directory stores it.

        Raises:
            RuntimeError: the storage is open for reading only.
            ValueError, KeyError: the state is damaged, or belongs to a storage of another size or layout.
        """
        self.backend.check_writer()
        layout, lanes = dumps.parse_lanes(state, self.max_size, self.episodes.num_envs)
        if layout is not None:
            expected = self.layout_for(layout.described, layout.nested)
            if expected.keyframes != layout.keyframes:
                raise ValueError(
                    f"compress must be {bool(layout.keyframes)} as in the saved state: nothing changed. "
                    "Load it into a storage with the same compress=, and copy with extend_from."
                )
            if expected != layout:
                raise ValueError(
                    f"fields must be {expected}, got {layout}: nothing changed. {_BRIDGE}"
                )

        def adopt() -> None:
            if layout is not None and self.layout is None:
                self.allocate(layout)
            self._attach(self.backend.replace_rows(partial(dumps.fill_lanes, lanes), rest))

        return adopt

    def dumps(self, path: Any, rest: Any = None) -> None:
        """Saves the transitions in a directory, which replaces an earlier dump.

        Args:
            path: the directory.
            rest: the state of the other components, as JSON.

        Raises:
            RuntimeError: the fields are not known yet, or the directory has a writer.
            ValueError: the state of the components is too large.
            OSError: the disk is full, or the directory contains other files.
        """
        if self.layout is None:
            raise RuntimeError("the fields are not known yet: write first, or pass fields=.")
        if rest is not None and not Description.has_room_for(rest):
            raise ValueError(
                "the state of samplers and transforms must be smaller than 8 MiB. Apply a transform with "
                "a large network to the sampled batches instead."
            )
        _, lanes = dumps.parse_lanes(self.state(), self.max_size, self.episodes.num_envs)
        sizes = path, self.layout, self.max_size, self.episodes.num_envs
        Directory.create(
            *sizes, fresh=True, fill=partial(dumps.fill_lanes, lanes), state=rest
        ).close()

    def loads(self, path: Any) -> None:
        """Replaces the transitions by those that `dumps` saved, once all of them are checked."""
        self.prepare_load(dumps.read(path)[0])()

    def state_dict(self) -> State:
        """Returns a copy of `state()`."""
        return copy.deepcopy(self.state())

    def load_state_dict(self, state_dict: State) -> None:
        """Replaces the transitions by those of a `state_dict`, once all of them are checked."""
        self.prepare_load(state_dict)()

    def empty(self, keep_steps: int = 0) -> None:
        """Evicts all transitions except the last `keep_steps` of each lane, and resets all priorities."""
        self.backend.check_writer()
        self.backend.evict(keep_steps)
        self.episodes.priorities[self.episodes.live_slots().numpy()] = 0
        self.episodes.num_updates[0] += 1

    def end_episodes(self, lanes: Sequence[int] | np.ndarray | None = None) -> None:
        """Splits the running episodes of some lanes, or of all: their next steps begin new episodes."""
        self.backend.check_writer()
        self.episodes.end_episodes(lanes)

    # In a directory

    def flush(self, state: Mapping[str, Any] | None = None) -> None:
        """Waits until all transitions are on the disk, with the `state` of the other components."""
        if self.backend.is_writer:
            self.backend.flush(state)

    def close(self, state: Mapping[str, Any] | None = None, *, keep: bool = True) -> None:
        """Flushes, and lets another process write; `keep=False` removes the directory.

        The transitions can still be read.
        """
        self.backend.close(state, keep=keep)

    def view(self) -> StorageView:
        """Returns the transitions as of now.

        If another process has replaced the contents of the directory, `episodes`, `entries` and `layout`
        become those of the new contents.
        """
        if self.backend.is_writer:
            return self._view
        if (backend := self.backend.reopen_if_replaced()) is not self.backend:
            self._attach(backend)
        return StorageView(self.backend, self.device, self.episodes.cursors.copy())

    def validate(self) -> None:
        """Raises a RuntimeError or ValueError if the index or a transition is damaged."""
        self.backend.validate()

    def __getstate__(self) -> State:
        """Returns the state of a copy; the backend copies the transitions."""
        derived = ("episodes", "entries", "layout", "_view")
        return {name: it for name, it in Storage.__getstate__(self).items() if name not in derived}

    def __setstate__(self, state: State) -> None:
        Storage.__setstate__(self, state)
        self._attach(self.backend)

    # Methods that TorchRL's buffers call

    def get(self, index: Any) -> TensorDict:
        """Returns transitions as a batch, in new memory.

        Args:
            index: slots, `[B]`, of valid transitions.

        Raises:
            IndexError: a slot holds no valid transition.
        """
        slots, view = torch.as_tensor(index, dtype=torch.int64, device="cpu"), self.view()
        view.episodes.check_live(slots.reshape(-1))
        batch, overwritten = view.read(slots), view.overwritten(slots)
        if overwritten is not None and overwritten.any():
            raise IndexError("a slot was overwritten while it was read.")
        return batch

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Raises a RuntimeError, because an `EpisodeWriter` writes transitions in the order of lanes."""
        raise RuntimeError("transitions cannot be set by slot: write them with extend().")

    def contains(self, item: Any) -> torch.Tensor:
        """Returns whether slots hold valid transitions, a bool tensor of the shape of the slots."""
        slots = torch.as_tensor(item, dtype=torch.int64, device="cpu")
        return torch.isin(slots, self.episodes.live_slots())

    @property
    def shape(self) -> torch.Size:
        """`[max_size]`."""
        return torch.Size([self.max_size])

    def _rand_given_ndim(self, batch_size: int) -> torch.Tensor:
        noise = np.empty(batch_size, np.int64)
        torch.from_numpy(noise).random_(generator=self._rng)
        return torch.from_numpy(self.episodes.draw(noise))

    def __len__(self) -> int:
        return len(self.episodes)

    def _empty(self) -> None:
        self.empty()

    def __repr__(self) -> str:
        size = f"{len(self):,} of {self.max_size:,} transitions"
        opened = f", reopened with {self._num_opened:,} transitions" if self._num_opened else ""
        return f"{type(self).__name__}({size}, {self.device}{opened})"


def _checked_nested(nested: Any) -> Nested:
    """Returns paths and sizes of nested TensorDicts.

    Raises:
        TypeError: the argument does not consist of pairs of a path and sizes.
    """
    try:
        return tuple((keys.key_path(path), torch.Size(sizes)) for path, sizes in nested)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"nested must hold pairs of a path and sizes, as in ((('agents',), (3,)),), got {nested!r}."
        ) from error
