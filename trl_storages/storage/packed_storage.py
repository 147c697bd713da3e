"""A TorchRL storage whose lanes are streams of observations.

Letters: E lanes, M entries a lane, B batch.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict
from torchrl.data import Storage, TensorStorage

from trl_storages import keys, validation
from trl_storages.directory import Description, Directory
from trl_storages.entries import HostEntries
from trl_storages.entries.fields import WORD
from trl_storages.entries.layout import Block, Layout, Nested
from trl_storages.index import EpisodeIndex
from trl_storages.kernels.frames import EVERY
from trl_storages.serialization import Adopt, State
from trl_storages.storage import dumps, memory
from trl_storages.storage.memory import Memory
from trl_storages.storage.view import StorageView
from trl_storages.validation import renamed, warn_caller

__all__ = ["PackedStorage"]

_FLAGS = ("done", "terminated", "truncated")
# What to use -> keywords of TorchRL's storages and of other libraries.
_SYNONYMS = {
    "max_size=": "buffer_size capacity size storage_size",
    "path=, and fresh=True to discard what the directory holds": "scratch_dir",
}
_BRIDGE = (
    "To use rows of other fields, such as infos that are not under 'next', make a new storage and call "
    "new.extend_from(old), old as it was made or ReplayStorage.open(path) of a directory."
)


class PackedStorage(TensorStorage):  # type: ignore[misc]
    """Keeps each observation once, as part of its lane's stream: in memory, in a directory or on a GPU.

    An `EpisodeWriter` writes the rows. The first write fixes their layout, or `fields` does.

    Args:
        max_size: the number of rows, rounded down to a multiple of `num_envs`; None is that of the
            directory.
        num_envs: E, the number of lanes; None is that of the directory, else one.
        device: where the rows are; their index is always on the host.
        fields: key -> (dtype, shape) of a transition, or (dtype, shape, FrameStack); or None, for what
            the first write fixes.
        nested: which TensorDicts of the rows have further batch sizes, as those of agents have: path and
            sizes. Without fields the first write says so.
        compress: whether stacks of frames, and observations that are uint8 with two dimensions or
            more, are stored losslessly as what changed since the entry before. The transitions are on
            the host then. None is as the directory says, else False.
        max_entries: room for observations, over all lanes. None is enough in memory for `max_size` rows
            whatever they are; on a GPU for episodes of about eight steps and longer, shorter ones are
            evicted early.
        path: of a directory that keeps the rows, whatever becomes of the process; what it holds already
            is opened.
        mode: "r+" for the one process that writes to the directory; "r" for any number of readers.
        fresh: whether what the directory holds is discarded.
        cold: whether the directory is larger than the memory: entries that are sampled are read from the
            disk together then, and no others. None is so where it takes more than the memory when it is
            opened.

    Raises:
        ValueError: a lane has fewer than two steps, or too few entries; or the directory is damaged, or
            holds the rows of another storage; or `compress` has nothing to compress, or a GPU.
        FileNotFoundError: the directory holds no storage, and `mode` is "r" or `max_size` is None.
        RuntimeError: the directory has a writer, and `mode` is "r+".

    >>> PackedStorage(1000)
    PackedStorage(0 of 1,000 rows, cpu)
    """

    supports_conditional_update = False

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
        # With the number of a GPU, as tensors say it.
        self.device = torch.empty(0, device=device).device
        #: Whether compiled loops read and write the rows.
        self.is_on_host = self.device.type in memory.HOSTS
        #: None where there is none.
        self.path: Any = None if path is None else validation.directory("path", path)
        validation.choice("mode", mode, ("r+", "r"))
        self._is_fresh = validation.flag("fresh", fresh)
        #: As given.
        self.cold = validation.optional(validation.flag, "cold", cold)
        found = self._found(mode, is_required=mode == "r" or max_size is None)
        if found is not None:
            max_size = found.max_size if max_size is None else max_size
            num_envs = found.num_envs if num_envs is None else num_envs
            max_entries = found.max_entries if max_entries is None else max_entries
        max_size = validation.integer("max_size", max_size, at_least=1)
        num_envs = validation.integer("num_envs", 1 if num_envs is None else num_envs, at_least=1)
        max_entries = validation.optional(
            validation.integer, "max_entries", max_entries, at_least=1
        )
        # TorchRL's tensors have no part in it, but that its buffers know how to collate what it returns.
        Storage.__init__(self, max_size)
        self._given_size = self.max_size
        self._max_entries = max_entries
        #: As given.
        what = "a mapping from key to (dtype, shape)"
        self.fields = dict(validation.mapping("fields", fields or {}, what))
        self.nested = _checked_nested(nested)
        for key in self.fields:
            keys.check_storable(key)
        # How many transitions the directory held when it was opened.
        self._num_opened = 0
        # Whether there were not entries enough for any rows, and whether it was said.
        self.is_short = self._is_warned = False
        # Whether the memory that rows need was compared with that of the machine.
        self._is_sized = False
        # Before the layout is known there is an empty index, so that sizes are checked at once.
        self._take(Memory(None, self._given_size, num_envs, max_entries, self.device))
        if found is not None:
            self._check_fits(found)
            self._take(Directory.open(str(self.path), mode))
            self._num_opened = len(self)
        elif path is None:
            self.prepare()

    def _take(self, backend: Memory | Directory) -> None:
        """Takes rows and index from where they are."""
        #: Where rows and index are.
        self.backend = backend
        #: Which rows there are; the rows, and their layout, None until it is fixed.
        self.episodes: EpisodeIndex = backend.index
        self.entries: Any = backend.entries
        self.layout: Any = backend.layout
        self.max_size = self.episodes.capacity
        if self.cold is not None and isinstance(backend, Directory):
            backend.entries.read_cold(self.cold)
        self._view = StorageView(backend, self.device)

    def _found(self, mode: str, *, is_required: bool) -> Description | None:
        """Returns what a directory says of itself; None where there is none, or it is to be discarded."""
        if self.path is None:
            if mode == "r" or self._is_fresh:
                raise ValueError("mode='r' and fresh=True are of a directory, got path=None.")
            return None
        if not self.is_on_host:
            raise ValueError(f"rows in a directory are on the host, got device={self.device}.")
        if mode == "r" and self._is_fresh:
            raise ValueError("fresh=True writes to the directory, got mode='r'.")
        try:
            return None if self._is_fresh else Description.read(self.path)
        except FileNotFoundError:
            if is_required:
                raise
            return None

    def _check_fits(self, found: Description) -> None:
        """Raises a ValueError unless a directory is that of a storage like this one."""
        own = self.max_size, self.episodes.num_envs, self._max_entries
        theirs = found.max_size, found.num_envs, found.max_entries
        if own != theirs:
            what = "max_size, num_envs and max_entries"
            raise ValueError(f"{self.path} holds a storage with {what} {theirs}, got {own}.")
        if self._compress not in (None, bool(found.layout.keyframes)):
            raise ValueError(
                f"{self.path} holds transitions of compress={not self._compress}, got compress="
                f"{self._compress}: copy them to another storage with extend_from to change it."
            )
        if self.fields:
            described = found.layout.described
            known: Any = {key: kind or described.get(key) for key, kind in self.fields.items()}
            if None in known.values() or Layout(known).described != described:
                raise ValueError(
                    f"{self.path} holds rows of {found.layout}, got fields {self.fields}. {_BRIDGE}"
                )

    def prepare(self) -> None:
        """Makes room for the rows, if their layout is known."""
        if self.layout is None and self.fields and None not in self.fields.values():
            self.set_layout(self.layout_for({}))

    def set_num_lanes(self, num_envs: int) -> None:
        """Divides the storage into as many lanes.

        Raises:
            ValueError: it holds rows of another number, or a lane has no room for two steps.
        """
        if num_envs == self.episodes.num_envs:
            return
        if len(self):
            raise ValueError(
                f"the storage holds rows of num_envs={self.episodes.num_envs}, got {num_envs}: make "
                "another."
            )
        self.backend.check_writer()
        layout, before = self.layout, self.backend
        self._take(Memory(None, self._given_size, num_envs, self._max_entries, self.device))
        before.close()
        if layout is not None:
            self._is_fresh = True
            self.set_layout(layout)

    def layout_for(self, found: Mapping[NestedKey, Sequence[Any]], nested: Nested = ()) -> Layout:
        """Returns the layout; of a first write with these fields, key -> (dtype, shape).

        Raises:
            ValueError: one has a name that sampling sets.
            KeyError: a field is missing.
        """
        if self.layout is not None:
            return self.layout
        if missing := [key for key, kind in self.fields.items() if not kind and key not in found]:
            raise KeyError(f"rows must hold {missing}, they have {[*found]}. {_BRIDGE}")
        for key in found:
            keys.check_storable(key)
        kinds = {key: kind or found[key] for key, kind in self.fields.items()}
        keyframes = EVERY if self._compress else 0
        return Layout(kinds or found, nested or self.nested, keyframes)

    def set_layout(self, layout: Layout) -> None:
        """Fixes the layout, and makes room for the rows."""
        sizes = layout, self.max_size, self.episodes.num_envs, self._max_entries
        if self.path is None and self.is_on_host and not self._is_sized:
            self._is_sized = True
            memory.warn_if_too_large(self.max_size, layout.entry_words * WORD)
        if self.path is None:
            self._take(Memory(*sizes, self.device))
        else:
            self._take(Directory.create(self.path, *sizes, fresh=self._is_fresh))

    def share(self) -> None:
        """Moves the rows to memory that other processes share.

        Raises:
            RuntimeError: they are on a GPU or in a directory, or their fields are not known.
        """
        if not (isinstance(self.backend, Memory) and isinstance(self.entries, HostEntries)):
            raise RuntimeError(
                "rows are shared in memory of the host, once their fields are known: pass fields=, or "
                "write first; those of a directory are opened to read."
            )
        self._take(self.backend.shared())

    @property
    def initialized(self) -> bool:
        """Whether the layout is fixed; TorchRL's collectors ask."""
        return self.entries is not None

    def append(
        self, block: Block, *, cuts_gaps: bool, stops_at_gaps: bool = False
    ) -> tuple[np.ndarray, int]:
        """Writes a block, in parts where it is long; see `HostEntries.append`.

        Returns:
            `[N]` int64 slots, -1 of rows that gave way at once, and how many gaps were cut.
        """
        self.backend.check_writer()
        if self.is_short:
            self.warn_of_size()
        index, gaps = self.episodes, 0
        tails = None if index.is_roomy or self._is_warned else index.tails.copy()
        parts = block.parts(self.entries.most_steps)
        if stops_at_gaps and len(parts) > 1 and (gaps := self.entries.count_gaps(block)):
            return np.empty(0, np.int64), gaps
        for part in parts:
            slots, more = self.entries.append(
                part, cuts_gaps=cuts_gaps, stops_at_gaps=stops_at_gaps and len(parts) == 1
            )
            gaps += more
        if len(parts) > 1:
            slots = self._slots_of(block)
        if tails is not None:
            due = np.maximum(tails, index.cursors - index.steps_per_lane)
            self.is_short = bool((index.tails > due).any())
        return slots, gaps

    def warn_of_size(self) -> None:
        """Warns once if rows were evicted early, before the next rows are written or sampled."""
        if self.is_short and not self._is_warned:
            self._is_warned, index = True, self.episodes
            warn_caller(
                f"{len(index):,} of {self.max_size:,} transitions fit, because short episodes take more "
                f"entries: there is room for {index.entries_per_lane * index.num_envs:,} entries. Pass a "
                "larger max_entries=."
            )

    def _slots_of(self, block: Block) -> np.ndarray:
        """Returns the slots of a block that was written just now."""
        index, counts = self.episodes, np.diff(block.offsets)
        lane = block.lanes.repeat(counts)
        first = index.cursors[block.lanes] - block.offsets[1:]
        step = first.repeat(counts) + np.arange(len(lane))
        return np.where(step < index.tails[lane], -1, index.slots_of(lane, step))

    def rewrite(self, index: Any, values: Mapping[NestedKey, torch.Tensor]) -> None:
        """Overwrites fields of the step of some rows, such as rewards of a learned model.

        Args:
            index: `[B]` slots of live rows; the last of equals counts. `episodes.slots_by_age()` names
                all, in the order of `[:]`.
            values: key -> `[B, *shape]`; no observations and no flags.

        Raises:
            IndexError: a slot holds no live row.
            KeyError, TypeError, ValueError: the index is no integers, a key is no field of the step, or a
                value does not fit. Nothing is written then.
        """
        self.backend.check_writer()
        slots = validation.slots(index).reshape(-1)
        self.episodes.check_live(slots)
        values = {key: validation.values(repr(key), value) for key, value in values.items()}
        for key, value in values.items():
            field = self.layout.by_key[key]
            if not self.layout.is_step(field) or keys.key_path(key)[-1] in _FLAGS:
                raise ValueError(
                    f"{key!r} must be a value of the step, and no flag, to be rewritten."
                )
            if value.dtype is not field.dtype or value.shape != (len(slots), *field.shape):
                got = f"{value.dtype} {list(value.shape)}"
                raise ValueError(f"{key!r} must be {field} for {len(slots)} rows, got {got}.")
        # The last of equal slots, in any order.
        _, last = np.unique(slots.numpy()[::-1], return_index=True)
        chosen = torch.from_numpy(len(slots) - 1 - last)
        at = self.entries.entries_of(slots[chosen])
        for key, value in values.items():
            self.entries.rewrite(key, at, value[chosen.to(value.device)])

    def number_steps(self, steps: np.ndarray, firsts: np.ndarray) -> None:
        """Empties all lanes, and numbers their next steps; see `dumps.numbered`."""
        lanes = dumps.numbered(self.layout, steps, firsts)
        self._take(self.backend.replaced(partial(dumps.fill, lanes), None))

    # State

    def state(self) -> State:
        """Returns what is saved of the rows; see `storage.dumps`. In memory they are shared."""
        self.view()
        return dumps.packed(self.backend)

    def prepare_load(self, state: Any, rest: Any = None) -> Adopt:
        """Returns a function that makes saved rows those of the storage.

        Args:
            state: of the rows.
            rest: the state of other parts, as JSON, that a directory is to hold.

        Raises:
            RuntimeError: the storage is open for reading only.
            ValueError, KeyError: the rows are damaged, or of a storage of another size or layout.
        """
        self.backend.check_writer()
        layout, lanes = dumps.parsed(state, self.max_size, self.episodes.num_envs)
        if layout is not None:
            own = self.layout_for(layout.described, layout.nested)
            if own.keyframes != layout.keyframes:
                raise ValueError(
                    "compressed transitions cannot be loaded as others, and vice versa: nothing changed. "
                    "Load them into a storage with the same compress=, and copy with extend_from."
                )
            if own != layout:
                raise ValueError(f"rows must be {own}, got {layout}: nothing changed. {_BRIDGE}")

        def adopt() -> None:
            if layout is not None and self.layout is None:
                self.set_layout(layout)
            self._take(self.backend.replaced(partial(dumps.fill, lanes), rest))

        return adopt

    def dumps(self, path: Any, rest: Any = None) -> None:
        """Saves the rows as a closed directory, in the place of what it may hold.

        Args:
            path: the directory.
            rest: the state of other parts, as JSON.

        Raises:
            RuntimeError: nothing says yet what rows hold, or the directory has a writer.
            ValueError: the state is too large.
            OSError: the disk is full, or the directory holds something else.
        """
        if self.layout is None:
            raise RuntimeError("rows must be written, or their fields be named, before a dump.")
        if rest is not None and not Description.has_room_for(rest):
            raise ValueError(
                "the state of samplers and transforms must be smaller than 8 MiB, as that of a transform "
                "with a large network is not: apply it to the batches that are drawn instead."
            )
        _, lanes = dumps.parsed(self.state(), self.max_size, self.episodes.num_envs)
        sizes = path, self.layout, self.max_size, self.episodes.num_envs
        Directory.create(*sizes, fresh=True, fill=partial(dumps.fill, lanes), state=rest).close()

    def loads(self, path: Any) -> None:
        """Adopts the rows that `dumps` saved, once all of them are checked."""
        self.prepare_load(dumps.read(path)[0])()

    def state_dict(self) -> State:
        """Returns `state()`, in memory of its own."""
        return copy.deepcopy(self.state())

    def load_state_dict(self, state_dict: State) -> None:
        """Adopts what `state_dict` returned, once all of it is checked."""
        self.prepare_load(state_dict)()

    def empty(self, keep_steps: int = 0) -> None:
        """Lets all rows give way but the last `keep_steps` of each lane, and all priorities."""
        self.backend.check_writer()
        self.backend.empty(keep_steps)
        self.episodes.priorities[self.episodes.live_slots().numpy()] = 0
        self.episodes.num_updates[0] += 1

    def end_episodes(self, lanes: Sequence[int] | np.ndarray | None = None) -> None:
        """Cuts the running episodes of some lanes, or of all."""
        self.backend.check_writer()
        self.episodes.end_episodes(lanes)

    # In a directory

    def flush(self, state: Mapping[str, Any] | None = None) -> None:
        """Waits until all rows are on the disk, with the `state` of other parts."""
        if self.backend.is_writer:
            self.backend.flush(state)

    def close(self, state: Mapping[str, Any] | None = None, *, keep: bool = True) -> None:
        """Flushes, and lets another process write; rows are read still. Without `keep` they go."""
        self.backend.close(state, keep=keep)

    def view(self) -> StorageView:
        """Returns the transitions as of now.

        If another process has replaced the directory's contents, `episodes`, `rows` and `layout` are
        those of the new contents afterwards.
        """
        if self.backend.is_writer:
            return self._view
        if (newest := self.backend.newest()) is not self.backend:
            self._take(newest)
        return StorageView(self.backend, self.device, self.episodes.cursors.copy())

    def validate(self) -> None:
        """Raises a RuntimeError or ValueError if tables contradict one another, or rows are damaged."""
        self.backend.validate()

    def __getstate__(self) -> State:
        """Returns what makes a copy, with rows as a `Memory` or `Directory` is copied."""
        own = ("episodes", "entries", "layout", "_view")
        return {name: it for name, it in Storage.__getstate__(self).items() if name not in own}

    def __setstate__(self, state: State) -> None:
        Storage.__setstate__(self, state)
        self._take(self.backend)

    # As TorchRL's buffers ask

    def get(self, index: Any) -> TensorDict:
        """Returns rows as a batch, in new memory.

        Args:
            index: slots, `[B]`, of live rows.

        Raises:
            IndexError: a slot holds no live row.
        """
        slots, view = torch.as_tensor(index, dtype=torch.int64, device="cpu"), self.view()
        view.episodes.check_live(slots.reshape(-1))
        batch, overwritten = view.read(slots), view.overwritten(slots)
        if overwritten is not None and overwritten.any():
            raise IndexError("some of the slots were overwritten while they were read.")
        return batch

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Raises: rows are written in the order of their lanes, by an `EpisodeWriter`."""
        raise RuntimeError(
            "rows are not set by slot: pass writer=EpisodeWriter(num_envs), and extend."
        )

    def contains(self, item: Any) -> torch.Tensor:
        """Returns whether slots hold rows, a bool of their shape."""
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
        opened = f", reopened with {self._num_opened:,} rows" if self._num_opened else ""
        return (
            f"{type(self).__name__}({len(self):,} of {self.max_size:,} rows, {self.device}{opened})"
        )


def _checked_nested(nested: Any) -> Nested:
    """Returns paths and sizes of nested TensorDicts.

    Raises:
        TypeError: they are not pairs of both.
    """
    try:
        return tuple((keys.key_path(path), torch.Size(sizes)) for path, sizes in nested)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"nested must hold pairs of a path and sizes, as in ((('agents',), (3,)),), got {nested!r}."
        ) from error
