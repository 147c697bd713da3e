"""A TorchRL storage whose transitions are contiguous rows, so that a batch is one gather.

Letters: N rows, W words of 8 bytes a row, B batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.data import LazyTensorStorage

from trl_storages import arguments
from trl_storages.disk.directory import check_is_storage, holds_storage, size_of
from trl_storages.disk.durable import Durable, Track, check_same
from trl_storages.disk.files import check_platform
from trl_storages.disk.journal import Journal, Steps
from trl_storages.interrupts import finish
from trl_storages.kernels import backend
from trl_storages.progress_bar import tracker
from trl_storages.ring import EpisodeIndex
from trl_storages.rows.entries import Nested, nested_sizes, tensors_of
from trl_storages.rows.layout import Layout
from trl_storages.saved import SavedPart, SavedState, copy_in_pieces

if TYPE_CHECKING:
    from trl_storages.kernels import NewRows, RowTable

__all__ = ["PackedStorage"]

_NO_SHARED_LAYOUT = (
    "the layout of rows must be fixed before other processes write them: make the storage for the spaces "
    "of the environment (a recipe, or PackedStorage(fields=...)), or write one transition and empty() it."
)


class PackedStorage(SavedPart, LazyTensorStorage):
    """Keeps each transition as one contiguous row, in memory, on a GPU or in a memory-mapped file.

    The first write fixes the layout of the rows, or `fields` does. TorchRL's own code works on views
    of the rows; only reading a batch is special: one gather fetches the rows, and the fields are views
    of what it returns. A batch never aliases the storage.

    Args:
        max_size: N, the number of rows.
        device: where the rows live.
        scratch_dir: directory of memory-mapped rows that outlive the process; None keeps rows in
            memory. If it holds rows, they are there again, with their episodes.
        existsok: whether to forget what `scratch_dir` holds, and begin anew.
        fields: key -> (dtype, shape) of a transition, to lay the rows out at once. Where one is None,
            the first write fixes it, and the layout with it.
        out_device: where `get` puts batches; None is `device`. Rows on the CPU are then gathered into
            one pinned block that crosses in one copy.
        progress: whether to show how far the episodes of rows that are there already are known.
        ndim: 1; named so that code which passes it to TorchRL's storages gets a clear answer.

    Raises:
        ValueError: `max_size` is below 1, `ndim` is not 1, or `scratch_dir` is given with a device
            other than the CPU, or what it holds is damaged, or of another size or layout.
        RuntimeError: another writer has `scratch_dir` open, or the platform has no file locks.
        OSError: the disk is full, or may not be written.

    >>> from tensordict import TensorDict
    >>> storage = PackedStorage(4)
    >>> storage.set(range(2), TensorDict({"observation": torch.ones(2, 3)}, [2]))
    >>> storage.get(torch.tensor([1, 1]))["observation"].shape, storage.row_nbytes
    (torch.Size([2, 3]), 16)
    """

    #: Set by the `EpisodeWriter` that writes to this storage.
    episodes: EpisodeIndex | None = None
    #: Counts how often what others write to the files was looked at; above 0 once there are files.
    refreshes = 0

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        scratch_dir: str | Path | None = None,
        existsok: bool = False,
        fields: Mapping[NestedKey, tuple[torch.dtype, Sequence[int]] | None] | None = None,
        out_device: torch.device | str | None = None,
        progress: bool = False,
        ndim: int = 1,
    ) -> None:
        max_size = arguments.integer("max_size", max_size, at_least=1)
        progress = arguments.flag("progress", progress)
        if arguments.integer("ndim", ndim, at_least=1) != 1:
            raise ValueError(
                f"PackedStorage holds transitions along one dimension (ndim=1), got ndim={ndim}. For "
                "several environments pass writer=EpisodeWriter(num_envs): it interleaves them."
            )
        if isinstance(device, str) and device == "auto":
            raise ValueError(
                "device must be named, got 'auto': rows are laid out before data comes."
            )
        device = arguments.device("device", device)
        if fields is not None:
            arguments.mapping("fields", fields, "a mapping from key to (dtype, shape)")
        super().__init__(max_size, device=device)
        if scratch_dir is not None and self.device.type != "cpu":
            raise ValueError(
                f"memory-mapped rows live on the CPU, got device={self.device}; leave device out."
            )
        self.scratch_dir = None
        if scratch_dir is not None:
            self.scratch_dir = arguments.directory("scratch_dir", scratch_dir)
        self.existsok = arguments.flag("existsok", existsok)
        #: `[N, W]` int64, every transition; None until the layout is fixed.
        self.rows: torch.Tensor | None = None
        #: Where each field lies in a row; None until it is fixed.
        self.layout: Layout | None = None
        # The process that shared the rows before there were any.
        self._sharing_process: int | None = None
        #: Copies rows out of that memory and into it.
        self.table: RowTable | None = None
        #: The files of the rows; None while they are in memory.
        self.journal: Journal | None = None
        self._durable: Durable | None = None
        self.out_device = None
        if out_device is not None:
            self.out_device = arguments.device("out_device", out_device)
        self._declared = dict(fields or {})
        if self.scratch_dir is not None:
            self._reopen(self.scratch_dir, tracker("opening rows", progress))
        if self.rows is None and fields is not None and None not in fields.values():
            self._allocate(Layout(fields))  # type: ignore[arg-type]

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        out_device: torch.device | str | None = None,
        progress: bool = False,
    ) -> PackedStorage:
        """Takes up the rows of a directory, to go on writing them.

        Args:
            directory: as `scratch_dir`.
            out_device: where `get` puts batches.
            progress: whether to show how far that is.

        Raises:
            FileNotFoundError: it holds no storage. Otherwise as the constructor.
        """
        directory = arguments.directory("directory", directory)
        check_is_storage(directory)
        size = size_of(directory)
        return cls(size, scratch_dir=directory, out_device=out_device, progress=progress)

    def _reopen(self, directory: Path, track: Track) -> None:
        """Takes up the rows that the directory holds, if it holds any."""
        check_platform(directory)
        if not holds_storage(directory):
            return
        journal = Journal.open(directory)
        if self.existsok:
            journal.delete()
            return
        try:
            check_same(journal, self.max_size, self._declared)
            self._take_up(journal, track)
        except BaseException:
            journal.close()
            raise

    def _take_up(self, journal: Journal, track: Track) -> None:
        self.journal, self._durable, self.refreshes = journal, Durable(journal), 1
        self._adopt(journal.layout, journal.tensor())
        self.episodes = self._durable.episodes(track)
        self._len = journal.state.num_rows

    @property
    def row_nbytes(self) -> int:
        """Bytes a row takes, padding included; 0 until the layout is fixed."""
        return 0 if self.layout is None else self.layout.row_nbytes

    @property
    def is_durable(self) -> bool:
        """Whether rows and episodes outlive the process in files, now or from the first write on."""
        return self.scratch_dir is not None

    # Layout

    def _init(self, data: TensorDictBase) -> None:
        """Lays the rows out for one transition like `data`; TorchRL calls it when it loads."""
        self._allocate(Layout.of(tensors_of(data), data.ndim, nested_sizes(data, data.ndim)))

    def _first_layout(
        self, entries: Mapping[NestedKey, torch.Tensor], batch_dims: int, nested: Nested
    ) -> Layout:
        """Returns the declared layout with what the first write adds to it."""
        seen = Layout.of(entries, batch_dims, nested)
        if not self._declared:
            return seen
        described = {field.key: (field.dtype, field.shape) for field in seen.fields}
        missing = [
            key for key, known in self._declared.items() if not known and key not in described
        ]
        if missing:
            raise KeyError(
                f"the first write must hold {missing}, whose dtype and shape it fixes; its keys are "
                f"{sorted(map(str, described))}."
            )
        fields = {key: known or described[key] for key, known in self._declared.items()}
        return Layout(fields, nested)

    def _allocate(self, layout: Layout) -> None:
        if self._sharing_process not in (None, os.getpid()):
            raise RuntimeError(_NO_SHARED_LAYOUT)
        if self.scratch_dir is None:
            self._adopt(layout, _zero_rows(self.max_size, layout.num_words, self.device))
            return
        lanes = None if self.episodes is None else self.episodes.num_envs
        self.journal = Journal.create(
            self.scratch_dir, layout, self.max_size, lanes or 1, has_episodes=lanes is not None
        )
        self._durable, self.refreshes = Durable(self.journal), 1
        self._adopt(layout, self.journal.tensor())

    def share_memory_(self) -> PackedStorage:
        """Moves the rows to memory that other processes see, when they get this storage.

        Raises:
            RuntimeError: the rows are on a GPU or in a directory, which have one writer.
        """
        if self.scratch_dir is not None or self.device.type != "cpu":
            where = self.scratch_dir or self.device
            raise RuntimeError(
                f"rows that several processes write must be in memory, these are in {where}: leave path "
                "and device out, or let the collector yield its batches and extend the storage with them."
            )
        self._sharing_process = os.getpid()
        if self.rows is not None and not self.rows.is_shared():
            self._adopt(self.layout, self.rows)  # type: ignore[arg-type]
        return self

    def _adopt(self, layout: Layout, rows: torch.Tensor) -> None:
        if self._sharing_process is not None:
            rows.share_memory_()
        self.layout, self.rows = layout, rows
        self.table = backend(rows.device).RowTable(rows)
        self._storage = layout.tensordict(rows)
        self.initialized = True

    # Writing

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes transitions at the slots `cursor`.

        Args:
            cursor: an int for one transition, else slots as a tensor, slice, range or list.
            data: TensorDict whose batch size is that of `cursor`, or a list of transitions.
            set_cursor: whether the write counts as new rows; false for a write in place.

        Raises:
            KeyError, TypeError, ValueError: a key is missing or new, or a dtype or shape differs from
                the layout. Nothing is written then.
            ValueError: there are more or fewer rows than slots. Nothing is written then.
            IndexError: a slot lies beyond the last row. Nothing is written then.
        """
        if isinstance(data, list):
            for transition in data:
                arguments.steps("data", transition)
            data = torch.stack(data) if data else None
        arguments.steps("data", data)
        slots, shape = self._slots(cursor)
        batch_size = data.batch_size[: len(shape)]
        if batch_size != shape:
            raise ValueError(
                f"the data must have one row for each of the slots {list(shape)}, "
                f"got a batch {list(data.batch_size)}."
            )
        nested = nested_sizes(data, len(batch_size)) if self.layout is None else ()
        layout, rows = self.stage(tensors_of(data), batch_size, nested=nested)
        write = partial(self.write, layout, slots, rows, set_cursor=set_cursor)
        if self.scratch_dir is None:
            finish(write)
        else:
            # Files have ways of their own to stay whole.
            write()

    def stage(
        self,
        entries: Mapping[NestedKey, torch.Tensor],
        batch_size: torch.Size,
        *,
        strict: bool = True,
        nested: Nested = (),
        done: torch.Tensor | None = None,
    ) -> tuple[Layout, NewRows]:
        """Finds out how what is to be written becomes rows, and changes nothing.

        Args:
            entries: key -> tensor `[*batch_size, ...]`, as `tensors_of` finds them.
            batch_size: of the entries.
            strict: whether entries that the rows have no room for are an error; they are left out
                otherwise.
            nested: `nested_sizes` of what is written; only the first write fixes them.
            done: n bool, which rows end their episodes; None where no lane is written.

        Returns:
            the layout of the rows, and the n rows.

        Raises:
            KeyError, TypeError, ValueError: an entry does not fit the layout.
        """
        layout = self.layout or self._first_layout(entries, len(batch_size), nested)
        rows_of = backend(self.device).NewRows if self.table is None else self.table.new_rows
        fields, size = layout.fit(entries, batch_size, strict=strict), batch_size.numel()
        return layout, rows_of(fields, layout.places, size, layout.num_words, done, self.device)

    def lay_out(self, layout: Layout) -> None:
        """Makes room for rows of this layout, if there is none yet."""
        if not self.initialized:
            self._allocate(layout)

    def write(
        self,
        layout: Layout,
        slots: torch.Tensor,
        rows: NewRows,
        *,
        steps: Steps | None = None,
        set_cursor: bool = False,
    ) -> None:
        """Writes what `stage` returned.

        Args:
            layout: of the rows.
            slots: `[n]` int64 on the device of the rows, all of them there.
            rows: n of them.
            steps: which steps of which lanes they are, for the files of a directory.
            set_cursor: as in `set`.
        """
        self.lay_out(layout)
        length = min(len(self) + len(slots), self.max_size) if set_cursor else 0
        if self._durable is None:
            self.table.put(slots, rows)  # type: ignore[union-attr, arg-type]
        else:
            with self._durable.writing(slots, steps, length, is_new=set_cursor):
                self.table.put(slots, rows)  # type: ignore[union-attr, arg-type]
        if set_cursor:
            self._set_last_cursor(slots)
            self._len = length
        self._bump_mutation_revision()

    # TorchRL's counters, in memory that processes share. Locks and checks for compiled storages take
    # longer than to write a row, and are left out where nobody needs them.

    def __len__(self) -> int:
        return self._len_value.get_obj().value

    def count_write(self, num_rows: int, last_slot: int) -> None:
        """Tells TorchRL's counters how many rows there are now, and where the newest lies."""
        self._last_cursor = last_slot
        if self._sharing_process is None:
            self._len_value.get_obj().value = num_rows
            self._last_cursor_index_value.get_obj().value = last_slot
            self._mutation_revision_value.get_obj().value += 1
        else:
            self._len_value.value = num_rows
            self._last_cursor_index_value.value = last_slot
            self._bump_mutation_revision()

    def _bump_mutation_revision(self) -> None:
        if self._sharing_process is None:
            self._mutation_revision_value.get_obj().value += 1
        else:
            super()._bump_mutation_revision()

    def _slots(self, cursor: Any) -> tuple[torch.Tensor, torch.Size]:
        """Returns the slots `[n]` that `cursor` names, and the shape in which it names them."""
        if isinstance(cursor, slice):
            cursor = range(*cursor.indices(self.max_size))
        slots = torch.as_tensor(cursor)
        if slots.dtype is torch.bool:
            slots = slots.nonzero().squeeze(1)
        shape, slots = slots.shape, slots.reshape(-1).long()
        if slots.device.type == "cpu" and len(slots):
            if not -self.max_size <= slots.min() <= slots.max() < self.max_size:
                raise IndexError(f"slots must be below {self.max_size}, got {slots.tolist()}.")
            slots = torch.where(slots < 0, slots + self.max_size, slots)
        return slots.to(self.device), shape

    # Reading

    def get(self, index: Any) -> Any:
        """Returns the transitions at `index`.

        Args:
            index: int64 slots of any shape B, for one gather into new memory; anything else that
                TorchRL's storages take (int, slice, mask, list) reads through the views.

        Returns:
            TensorDict of batch size B.
        """
        if self.rows is None:
            raise RuntimeError("the storage is empty: write transitions before reading them.")
        if isinstance(index, torch.Tensor) and index.dtype is torch.int64 and index.ndim:
            return self.layout.tensordict(self.gather(index))  # type: ignore[union-attr]
        return super().get(index)

    @property
    def is_sent_away(self) -> bool:
        """Whether batches are wanted on another device than that of the rows."""
        return self.out_device is not None and self.out_device != self.device

    def gather(self, slots: torch.Tensor, following: torch.Tensor | None = None) -> torch.Tensor:
        """Copies rows to where batches are wanted.

        Args:
            slots: `[*B]` int64.
            following: `[*B]` int64, the rows that lend what lies under `next`; None are the rows
                themselves.

        Returns:
            `[*B, W]` int64 in new memory.
        """
        spans = self.layout.following  # type: ignore[union-attr]
        if not self.is_sent_away:
            return self.table.pick(slots, following, spans)  # type: ignore[union-attr]
        is_pinned = self.device.type == "cpu"
        block = self.table.pick(slots, following, spans, pin_memory=is_pinned)  # type: ignore[union-attr]
        return block.to(self.out_device, non_blocking=True)

    def read(self, index: torch.Tensor, keys: Iterable[NestedKey]) -> dict[NestedKey, torch.Tensor]:
        """Gathers some fields only.

        Args:
            index: int64 slots of any shape B.
            keys: the fields.

        Returns:
            key -> tensor `[*B, *shape]` in new memory.

        Raises:
            KeyError: there is no such field.
        """
        arguments.slots("index", index)
        return {key: self._field(index, key) for key in keys}

    def _field(self, slots: torch.Tensor, key: NestedKey) -> torch.Tensor:
        """Gathers a field, see `read`."""
        field = self.layout.field(key)  # type: ignore[union-attr]
        return self.table.pick_field(slots, field.start_byte, field.dtype, field.shape)  # type: ignore[union-attr]

    def _rand_given_ndim(self, batch_size: int) -> torch.Tensor:
        """Draws for TorchRL's samplers: live rows only, whatever the lanes' fill."""
        if self.episodes is None:
            return super()._rand_given_ndim(batch_size)
        return self.episodes.random_slots(batch_size, self._rng)

    # State

    def _empty(self) -> None:
        if self._durable is not None:
            self._durable.clear()
        super()._empty()

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Lets another writer into the directory if what is built on this storage fails."""
        try:
            yield
        except BaseException:
            if self.journal is not None:
                self.journal.close()
            raise

    def flush(self) -> None:
        """Waits until the rows of a directory are on disk; see `ReplayStorage.flush`."""
        if self._durable is not None:
            self._durable.flush(self.episodes)

    def close(self) -> None:
        """Flushes the rows of a directory, and lets another writer in."""
        if self.journal is not None and self.journal.is_writer:
            try:
                self.flush()
            finally:
                self.journal.close()

    def restart(
        self, slots: torch.Tensor | None, rows: TensorDictBase | None, write_count: int
    ) -> None:
        """Brings the files of a directory in line with the episode index, after rows were forgotten.

        Args:
            slots: `[n]` int64 where kept rows are to lie now; None if none is moved.
            rows: TensorDict `[n]` of them.
            write_count: rows written, as the writer counts them.
        """
        if self._durable is None:
            return

        def move() -> None:
            if slots is not None and len(slots):
                _, staged = self.stage(tensors_of(rows), slots.shape)
                self.table.put(slots, staged)  # type: ignore[union-attr, arg-type]

        self._durable.restart(self.episodes, write_count, move)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Returns the layout, the rows (not a copy) and their number."""
        return {
            "layout": None if self.layout is None else self.layout.to_json(),
            "_storage": self.rows,
            "initialized": self.initialized,
            "_len": self._len,
        }

    def check_state_dict(self, state_dict: Any) -> None:
        """Checks that `load_state_dict` can take a state, without changing anything.

        Raises:
            KeyError, TypeError, ValueError: layout or number of rows differ, or it is damaged.
        """
        self.read_state(state_dict)

    def read_state(self, state_dict: Any) -> dict[NestedKey, torch.Tensor]:
        """Returns the fields `[N, ...]` of a saved state, which share its memory; none if it has no rows.

        Raises:
            KeyError, TypeError, ValueError: as `check_state_dict`.
        """
        keys = ("layout", "_storage", "initialized", "_len")
        saved = SavedState(state_dict, "the saved PackedStorage", keys)
        if saved["layout"] is None:
            if saved.flag("initialized") or saved["_storage"] is not None:
                raise saved.error("layout", "that of the rows, as there are some", None)
            saved.integer("_len", 0, 0)
            return {}
        if not saved.flag("initialized"):
            raise saved.error("initialized", "True, as there is a layout", False)
        saved.integer("_len", 0, self.max_size)
        layout = Layout.from_json(saved["layout"])
        self._check_layout(layout)
        shape = (self.max_size, layout.num_words)
        hint = "the size of the storage must be that of the saved one"
        return tensors_of(layout.tensordict(saved.tensor("_storage", torch.int64, shape, hint)))

    def _check_layout(self, layout: Layout) -> None:
        """Raises a ValueError if saved rows are others than those of this storage."""
        if self.layout is not None and layout.described != self.layout.described:
            raise ValueError(f"the saved rows are {layout}, this storage's are {self.layout}.")
        declared = {unravel_key(key): field for key, field in self._declared.items()}
        wrong = [
            key
            for key, (dtype, shape) in layout.described.items()
            if (declared and key not in declared)
            or ((field := declared.get(key)) and (field[0], torch.Size(field[1])) != (dtype, shape))
        ]
        if wrong or not declared.keys() <= layout.described.keys():
            raise ValueError(
                f"the saved rows are {layout}, this storage was made for rows of "
                f"{ {key: field and (field[0], [*field[1]]) for key, field in declared.items()} }. "
                "Nothing was changed."
            )

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Takes over a state that was checked, into rows of the same layout and number."""
        fields = self.read_state(state)
        if fields and self.rows is None:
            self._allocate(Layout.from_json(state["layout"]))
        if self._durable is not None:
            self._durable.clear()
        if fields:
            copy_in_pieces(fields, tensors_of(self._storage), progress=progress)
        self._len = state["_len"]
        self._bump_mutation_revision()

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            if self.rows is None:
                raise RuntimeError(_NO_SHARED_LAYOUT)
            self.share_memory_()
        # Views are made again from the rows, or they would be sent one by one.
        state = super().__getstate__()
        state["_storage"] = state["table"] = None
        if self.journal is not None:
            # A directory has one writer, so a copy lives in memory.
            state["journal"] = state["_durable"] = state["scratch_dir"] = None
            state["refreshes"] = 0
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.rows is not None:
            self._adopt(self.layout, self.rows)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        where = self.device if self.scratch_dir is None else self.scratch_dir
        fields = "no layout yet" if self.layout is None else f"{len(self.layout.fields)} fields"
        return (
            f"{type(self).__name__}(rows={len(self)}/{self.max_size}, {fields}, "
            f"row_nbytes={self.row_nbytes}, in {where})"
        )


def _zero_rows(num_rows: int, num_words: int, device: torch.device) -> torch.Tensor:
    """Returns `[N, W]` int64 zeros, in memory whose random access is cheap."""
    if device.type != "cpu":
        return torch.zeros(num_rows, num_words, dtype=torch.int64, device=device)
    # NumPy asks the kernel for huge pages, torch does not: a seventh of a gather's time is the
    # look-up of small ones.
    return torch.from_numpy(np.zeros((num_rows, num_words), np.int64))
