"""A TorchRL storage whose transitions are contiguous rows, so that a batch is one gather.

Letters: N rows, W words of 8 bytes a row, B batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import LazyTensorStorage

from trl_storages import arguments
from trl_storages.arguments import tracker
from trl_storages.disk.description import Description, holds_storage
from trl_storages.disk.directory import Directory
from trl_storages.disk.files import check_platform
from trl_storages.disk.reader import Reader
from trl_storages.disk.words import Track, Words
from trl_storages.kernels import backend
from trl_storages.kernels.memory import on_device, sendable, zeros
from trl_storages.kernels.sharing import SideTable, header_dtype
from trl_storages.keys import check_storable
from trl_storages.ring import EpisodeIndex
from trl_storages.ring.index import Kept
from trl_storages.ring.naming import is_key
from trl_storages.rows.declared import DeclaredFields, FieldOf
from trl_storages.rows.entries import Nested, nested_sizes, tensors_of
from trl_storages.rows.files import RowFiles
from trl_storages.rows.layout import Layout
from trl_storages.rows.saved_rows import Moved, SavedRows, named_entries, table_of, written_once
from trl_storages.rows.stacks import Stacks
from trl_storages.rows.staging import rows_of
from trl_storages.saved.files import copy_in_pieces
from trl_storages.saved.parts import SavedPart

if TYPE_CHECKING:
    from trl_storages.kernels.device import NewRows, RowTable
    from trl_storages.kernels.host import Commits

__all__ = ["PackedStorage", "Taken", "check_writable"]

#: `[B]` int64 other rows, the spans that are copied from them, and `[B]` bool for which rows.
Taken = tuple[torch.Tensor, np.ndarray, torch.Tensor]

_NO_SHARED_LAYOUT = (
    "the layout of rows must be fixed before other processes write them: make the storage for the spaces "
    "of the environment (a recipe, or PackedStorage(fields=...)), or write one transition and empty() it."
)


class PackedStorage(SavedPart, LazyTensorStorage):  # type: ignore[misc]
    """Keeps each transition as one contiguous row, in memory, on a GPU or in a memory-mapped file.

    The first write fixes the layout of the rows, or `fields` does. TorchRL's own code works on views
    of the rows; only reading a batch is special: one gather fetches the rows, and the fields are views
    of what it returns. A batch never aliases the storage.

    Args:
        max_size: N, the number of rows.
        device: where the rows live.
        scratch_dir: directory of memory-mapped rows that outlive the process; None keeps rows in
            memory. If it holds rows already, they are opened with their episodes, and TorchRL's logger
            says how many.
        existsok: whether to delete what `scratch_dir` holds and start empty.
        fields: key -> (dtype, shape) of a transition, to lay the rows out at once. Where one is None,
            the first write fixes it, and the layout with it. (dtype, shape, FrameStack) is a stack of
            frames, of which each is stored once; rows are then written by an `EpisodeWriter`.
        out_device: where `get` puts batches; None is `device`. Rows on the CPU are then gathered into
            one pinned block and sent in one copy.
        share_next: whether next observations are stored once, as the observations of the rows that
            follow. Those that no row follows, at the ends of episodes and lanes, go to a side table.
            Reads are bitwise the same; an `EpisodeWriter` must write the rows.
        mode: "r+" writes; "r" reads what `scratch_dir` holds while another process may be writing.
        check: whether to verify the checksum of every existing row; None does so after anything but a
            clean close.
        progress: whether to show progress while existing rows are opened.

    Raises:
        ValueError: `max_size` is below 1, or `scratch_dir` is given with a device other than the CPU, or
            what it holds is damaged, or of another size or layout; or no observation has a next value
            to share.
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
    #: The files of the rows; None while they are in memory.
    files: RowFiles | None = None
    #: How many steps a lane can be written while they are compared with the rows before them.
    most_compared = 0
    #: Whether it is the storage of a `ReplayStorage`, whose transforms see what the sampler drew.
    is_replayed = False
    # TorchRL counts here how often slots were written, if a writer tracks it.
    _slot_generations: torch.Tensor | None = None

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        scratch_dir: str | Path | None = None,
        existsok: bool = False,
        fields: Mapping[Any, FieldOf] | None = None,
        out_device: torch.device | str | None = None,
        share_next: bool = False,
        mode: str = "r+",
        check: bool | None = None,
        progress: bool = False,
    ) -> None:
        max_size = arguments.integer("max_size", max_size, at_least=1)
        progress = arguments.flag("progress", progress)
        device = arguments.device("device", device)
        if fields is not None:
            for key in arguments.mapping("fields", fields, "a mapping from key to (dtype, shape)"):
                check_storable(key)
        #: Whether next observations are stored once.
        self.share_next = arguments.flag("share_next", share_next)
        super().__init__(max_size, device=device)
        if scratch_dir is not None and self.device.type != "cpu":
            raise ValueError(
                f"memory-mapped rows live on the CPU, got device={self.device}; leave device out."
            )
        self.scratch_dir = arguments.optional(arguments.directory, "scratch_dir", scratch_dir)
        self.existsok = arguments.flag("existsok", existsok)
        mode = arguments.choice("mode", mode, ("r+", "r"))
        if mode == "r" and (self.scratch_dir is None or existsok):
            raise ValueError(
                "mode='r' reads the rows of a directory, which must be there: pass path, or scratch_dir "
                "without existsok."
            )
        check = arguments.optional(arguments.flag, "check", check)
        #: `[N, W]` int64, every transition; None until the layout is fixed.
        self.rows: torch.Tensor | None = None
        #: The place of each field in a row; None until it is fixed.
        self.layout: Layout | None = None
        # The process that called `share_memory_`: it alone may still lay rows out.
        self._sharing_process: int | None = None
        #: Copies rows in and out of `rows`.
        self.table: RowTable | None = None
        # With `share_next`, the next observations that are in no row.
        self._side: SideTable | None = None
        #: Assembles stacks of frames; None if rows have none.
        self.stacks: Stacks | None = None
        self.out_device = arguments.optional(arguments.device, "out_device", out_device)
        #: Whether batches go to another device than that of the rows.
        self.is_sent_away = self.out_device not in (None, self.device)
        header = header_dtype(max_size) if self.share_next else None
        self._declared = DeclaredFields(fields, header)
        if self.scratch_dir is not None:
            self._reopen(self.scratch_dir, mode, check, tracker("opening rows", progress))
        elif self._declared.are_complete:
            layout = self._declared.layout()
            # Stacks and shared observations need the writer's episode index first.
            if not (layout.past_steps or self.share_next):
                self._allocate(layout)

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        mode: str = "r+",
        out_device: torch.device | str | None = None,
        check: bool | None = None,
        fetch_every: int = 1,
        progress: bool = False,
    ) -> PackedStorage:
        """Opens the rows of a directory.

        Args:
            directory: as `scratch_dir`.
            mode: as in the constructor.
            out_device: where `get` puts batches.
            check: as in the constructor.
            fetch_every: with mode "r", the number of batches between checks for new rows.
            progress: whether to show progress.

        Raises:
            FileNotFoundError: it holds no storage. Otherwise as the constructor.
        """
        directory = arguments.directory("directory", directory)
        fetch_every = arguments.integer("fetch_every", fetch_every, at_least=1)
        found = Description.read(directory)
        storage = cls(
            found.num_rows,
            scratch_dir=directory,
            out_device=out_device,
            share_next=found.layout.framed.sharing is not None,
            mode=mode,
            check=check,
            progress=progress,
        )
        storage.files.fetch_every = fetch_every  # type: ignore[union-attr]
        return storage

    def _reopen(self, directory: Path, mode: str, check: bool | None, track: Track) -> None:
        """Opens the rows that the directory holds, if any; a reader needs some."""
        check_platform(directory)
        if self.existsok:
            Directory.delete_at(directory)
        if mode == "r+" and not holds_storage(directory):
            return
        found = Description.read(directory)
        if found.num_rows != self.max_size:
            raise ValueError(
                f"the storage in {directory} was made for {found.num_rows} rows, got "
                f"{self.max_size}: pass its size, or another directory."
            )
        if not self._declared.are_of(found.layout):
            raise ValueError(
                f"the rows in {directory} are of other fields: "
                f"{found.layout.unlike(self._declared.fields)}. Pass the spaces, keys and "
                "frame_stack they were made with, or another directory."
            )
        if (found.layout.framed.sharing is not None) != self.share_next:
            raise ValueError(
                f"the rows in {directory} were made with share_next={not self.share_next}, got "
                f"{self.share_next}: pass the one that they were made with, or another directory."
            )
        if mode == "r":
            self._follow(Reader(directory, check=check), track)
            return
        opened, self.episodes = Directory.open(directory, check=check, track=track)
        self._use(opened)

    def _use(self, source: Directory | Reader) -> None:
        """Uses files for the rows from now on."""
        self.scratch_dir = source.path
        self.files = RowFiles(source, self.episodes, self._adopt_words)  # type: ignore[arg-type]
        self._compare()

    def _follow(self, reader: Reader, track: Track = iter) -> None:
        """Reads rows that another process may be writing, from now on."""
        self.episodes = reader.description.new_index()
        self._use(reader)
        self.refresh(track)

    @property
    def directory(self) -> Directory | None:
        """The directory that this process writes or wrote; None in memory, and in a reader."""
        return None if self.files is None else self.files.directory

    @property
    def reader(self) -> Reader | None:
        """Follows the writer of a directory; None in the process that writes, and in memory."""
        return None if self.files is None else self.files.reader

    def refresh(self, track: Track = iter) -> None:
        """Takes in what the writer of a directory has committed; see `RowFiles.refresh`."""
        self.files.refresh(track)  # type: ignore[union-attr]

    @property
    def row_nbytes(self) -> int:
        """Bytes a row takes, padding included; 0 until the layout is fixed.

        With `share_next` next observations are not counted, see `side_nbytes`.
        """
        return 0 if self.layout is None else self.layout.stored_nbytes

    @property
    def side_nbytes(self) -> int:
        """Bytes that next observations take in the side table, with `share_next`."""
        return 0 if self._side is None else self._side.num_used * self._side.entry_nbytes

    @property
    def past_steps(self) -> int:
        """The most earlier rows of its episode that a row's stacks need."""
        return (self.layout or self._declared).past_steps

    @property
    def is_durable(self) -> bool:
        """Whether rows and episodes outlive the process in files, now or from the first write on."""
        return self.scratch_dir is not None

    # Layout

    def _init(self, data: TensorDictBase) -> None:
        """Lays the rows out for one transition like `data`; TorchRL calls it when it loads."""
        nested = nested_sizes(data, data.ndim)
        self._allocate(self._declared.first_layout(tensors_of(data), data.ndim, nested))

    def _allocate(self, layout: Layout) -> None:
        if self._sharing_process not in (None, os.getpid()):
            raise RuntimeError(_NO_SHARED_LAYOUT)
        if self.scratch_dir is None:
            sharing, episodes = layout.framed.sharing, self.episodes
            if episodes is None and (layout.stacks or sharing is not None):
                raise written_once(self)
            if episodes is not None and sharing is not None:
                lanes = self.max_size, episodes.num_envs
                self._side = SideTable.in_memory(*lanes, sharing.shared_words, self.device)
            rows = zeros(self.max_size, layout.stored_words, device=self.device)
            self._adopt(layout, rows)
            return
        if self.episodes is None:
            raise written_once(self)
        num_lanes = self.episodes.num_envs
        self._use(Directory.create(self.scratch_dir, layout, self.max_size, num_lanes))

    def share_memory_(self) -> PackedStorage:
        """Moves the rows to shared memory, for other processes that receive this storage.

        Raises:
            RuntimeError: the rows are on a GPU or in a directory, which have one writer.
        """
        if self.scratch_dir is not None or self.device.type != "cpu":
            where = self.scratch_dir or self.device
            raise RuntimeError(
                f"rows that several processes write must be in memory, these are in {where}: leave path "
                "and device out, or let the collector yield its batches and extend the storage with "
                "them. To draw in worker processes, use storage.loader(num_workers=...)."
            )
        self._sharing_process = os.getpid()
        if self.episodes is not None:
            # The number of rows comes from it.
            self.episodes.share_memory_()
        if self.rows is not None and not self.rows.is_shared():  # type: ignore[no-untyped-call]
            self._adopt(self.layout, self.rows)  # type: ignore[arg-type]
        return self

    def _adopt_words(self, layout: Layout, words: Words) -> None:
        self._side = words.side
        self._adopt(layout, words.rows, commits=words.commits)

    def _adopt(
        self,
        layout: Layout,
        rows: torch.Tensor,
        *,
        past: torch.Tensor | None = None,
        commits: Commits | None = None,
    ) -> None:
        if self._sharing_process is not None:
            rows.share_memory_()  # type: ignore[no-untyped-call]
            if self._side is not None:
                self._side.share_memory_()
        self.layout, self.rows = layout, rows
        self.table = table_of(layout.framed, rows, self._side, self.episodes, commits)
        self._storage = layout.framed.stored_tensordict(rows)
        if layout.stacks:
            if self.stacks is not None and not self.is_durable:
                past = self.stacks.past
            self.stacks = Stacks(layout, self.episodes, rows, past)  # type: ignore[arg-type]
        self.initialized = True
        self._compare()

    def _compare(self) -> None:
        """Sets how many steps can be compared as they are written."""
        if not self.initialized or self.episodes is None or self.stacks is not None:
            return
        most = self.episodes.steps_per_lane - 1
        if self.directory is not None:
            most = self.directory.description.most_steps
        self.most_compared = most if self.table.finds_gaps else 0  # type: ignore[union-attr]

    def keep_episodes(self, episodes: EpisodeIndex) -> None:
        """Takes the episode index from the `EpisodeWriter` that writes the rows.

        Allocates the rows if all fields are declared.
        """
        self.episodes = episodes
        self._compare()
        if self._sharing_process is not None:
            episodes.share_memory_()
        if not self.initialized and self._declared.are_complete:
            self._allocate(self._declared.layout())

    # Writing

    def mover(self, kept: Kept) -> Callable[[], None]:
        """Returns a function that moves the kept rows to their new slots."""
        table, framed = self.table, self.layout.framed  # type: ignore[union-attr]
        words = table.pick(kept.old)  # type: ignore[union-attr]
        ends = torch.zeros(len(words), 1, dtype=torch.bool, device=self.device)
        rows = table.new_rows.of_block(words, framed.places, ends, self.device)  # type: ignore[union-attr]
        past = None if self.stacks is None else self.stacks.mover(kept)

        def put() -> None:
            table.put(kept.new, rows, self.episodes.ring)  # type: ignore[union-attr]
            self._bump_mutation_revision()
            if past is not None:
                past()

        return put

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
            IndexError: a slot is beyond the last row. Nothing is written then.
        """
        self.check_mutable()
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
        layout, fields = self.fit(tensors_of(data), batch_size, nested=nested)
        rows = self.new_rows(layout, fields, batch_size)
        self.write(layout, slots, rows, set_cursor=set_cursor)

    def check_mutable(self) -> None:
        """Raises a RuntimeError if an `EpisodeWriter` must write the rows."""
        check_writable(self)
        if self.is_durable or self.past_steps or self.share_next:
            raise written_once(self)

    def fit(
        self,
        entries: Mapping[NestedKey, torch.Tensor],
        batch_size: torch.Size,
        *,
        strict: bool = True,
        nested: Nested = (),
    ) -> tuple[Layout, list[torch.Tensor]]:
        """Returns the layout of rows to write, and their fields; changes nothing.

        Args:
            entries: key -> tensor `[*batch_size, ...]`, as `tensors_of` finds them.
            batch_size: of the entries.
            strict: raise on an entry that is not in the layout; False drops it.
            nested: `nested_sizes` of what is written; only the first write fixes them.

        Raises:
            KeyError, TypeError, ValueError: an entry does not fit the layout.
        """
        layout = self.layout or self._declared.first_layout(entries, len(batch_size), nested)
        return layout, layout.fit(entries, batch_size, strict=strict)

    def new_rows(
        self,
        layout: Layout,
        fields: Sequence[torch.Tensor],
        batch_size: torch.Size,
        *,
        done: torch.Tensor | None = None,
        is_plain: bool = False,
    ) -> NewRows:
        """Returns the rows to write, from what `fit` returned; see `rows_of`."""
        kind = backend(self.device).NewRows if self.table is None else self.table.new_rows
        return rows_of(kind, layout, fields, batch_size, self.device, done=done, is_plain=is_plain)

    def lay_out(self, layout: Layout) -> None:
        """Allocates rows of this layout, unless that is done."""
        if not self.initialized:
            self._allocate(layout)

    def make_room(self, num_rows: int) -> None:
        """Makes sure that the side table has room for so many rows.

        Raises:
            OSError: the disk is full. Nothing has changed then.
        """
        if self._side is not None:
            self._side.make_room(num_rows)

    def write(
        self,
        layout: Layout,
        slots: torch.Tensor,
        rows: NewRows,
        *,
        set_cursor: bool = False,
    ) -> None:
        """Writes staged rows.

        Args:
            layout: of the rows.
            slots: `[n]` int64 on the device of the rows, all of them valid.
            rows: n of them.
            set_cursor: as in `set`.
        """
        self.lay_out(layout)
        length = min(len(self) + len(slots), self.max_size) if set_cursor else 0
        ring = None if self.episodes is None else self.episodes.ring
        self.table.put(slots, rows, ring)  # type: ignore[union-attr]
        if set_cursor:
            self._set_last_cursor(slots)
            self._len = length
        self._bump_mutation_revision()

    # With an episode index, TorchRL's counters are derived from it.

    def __len__(self) -> int:
        if self.episodes is not None:
            return len(self.episodes)
        found: int = self._len_value.get_obj().value
        return found

    @property
    def _len(self) -> int:
        return len(self)

    @_len.setter
    def _len(self, value: int) -> None:
        LazyTensorStorage._len.fset(self, value)

    @property
    def _last_cursor_index(self) -> int | None:
        if self.episodes is None:
            found: int | None = super()._last_cursor_index
            return found
        return self.episodes.newest_slot() if len(self.episodes) else None

    @property
    def _last_cursor(self) -> int | None:
        return self._last_cursor_index

    @_last_cursor.setter
    def _last_cursor(self, value: Any) -> None:
        """Ignores what TorchRL sets: the getter derives it."""

    @property
    def _mutation_revision(self) -> int:
        """Counts changes of rows for TorchRL: the steps that were written, and all else."""
        others: int = self._mutation_revision_value.value
        return others + (0 if self.episodes is None else int(self.episodes.host_steps.sum()))

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
        return on_device(slots, self.device), shape

    def forget_links(self, num_slots: int) -> None:
        """Clears what the rows in the first slots share with the rows after them, with `share_next`."""
        # The index counts its steps anew.
        self._mutation_revision_value.value += int(self.episodes.host_steps.sum())  # type: ignore[union-attr]
        if self._side is not None:
            self.table.clear(num_slots)  # type: ignore[union-attr]

    # Reading

    def get(self, index: Any) -> Any:
        """Returns the transitions at `index`.

        Args:
            index: int64 slots of any shape B, for one gather into new memory; anything else that
                TorchRL's storages take (int, slice, mask, list, key) reads through the views.

        Returns:
            TensorDict of batch size B; for a key, what is stored of it.
        """
        if self.rows is None:
            raise RuntimeError("the storage is empty: write transitions before reading them.")
        if isinstance(index, torch.Tensor) and index.dtype is torch.int64 and index.ndim:
            return self.layout.tensordict(self.gather(index))  # type: ignore[union-attr]
        is_viewed = not (self.is_durable or self.share_next or self.stacks is not None)
        if is_viewed or is_key(index):
            # TorchRL writes in place to these views.
            return super().get(index)
        # TorchRL would index below the length only, but a directory has more slots than rows; and its
        # views show only what is stored in the rows.
        size = len(self.rows if self.is_durable else self)
        slots = torch.arange(size, device=self.device)[index]
        return self.layout.tensordict(self.gather(slots.reshape(-1))).reshape(slots.shape)  # type: ignore

    def gather(
        self, slots: torch.Tensor, following: torch.Tensor | None = None, taken: Taken | None = None
    ) -> torch.Tensor:
        """Gathers rows on the device of batches.

        Args:
            slots: `[*B]` int64.
            following: `[*B]` int64, the rows that supply the entries under `next`; None: the rows
                themselves.
            taken: fields that come from other rows, as `RowTable.copy_into` takes them: these rows, the
                spans to copy, and where.

        Returns:
            `[*B, W]` int64 in new memory.
        """
        if self.files is not None:
            self.files.note(slots, following, None if taken is None else taken[0])
        table: RowTable = self.table  # type: ignore[assignment]
        is_sent_away = self.is_sent_away
        is_pinned = is_sent_away and self.device.type == "cpu" and sendable(self.out_device)  # type: ignore[arg-type]
        if self.stacks is not None:
            block = self.stacks.gather(table, slots, following, pin_memory=is_pinned)
        else:
            parts = self.layout.parts  # type: ignore[union-attr]
            block = table.pick(slots, following, parts, pin_memory=is_pinned)
        if taken is not None:
            table.copy_into(block, *taken)
        return on_device(block, self.out_device) if is_sent_away else block  # type: ignore[arg-type]

    def read(
        self,
        index: torch.Tensor,
        keys: Collection[NestedKey],
        following: torch.Tensor | None = None,
    ) -> dict[NestedKey, torch.Tensor]:
        """Gathers some fields in one call, which is faster than one by one.

        Args:
            index: int64 slots of any shape B.
            keys: the fields.
            following: as in `gather`.

        Returns:
            key -> tensor `[*B, *shape]` in new memory.

        Raises:
            KeyError: there is no such field.
        """
        if getattr(index, "dtype", None) is not torch.int64:
            arguments.slots("index", index)
        if following is not None:
            arguments.slots("following", following)
        if self.files is not None:
            self.files.note(index, following)
        places, stacks = self.layout.places_of[tuple(keys)]  # type: ignore[union-attr]
        groups = [(index, places)]
        if following is not None:
            lent = {key: place for key, place in places.items() if key[0] == "next"}
            own = {key: place for key, place in places.items() if key not in lent}
            groups = [(index, own), (following, lent)]
        found: dict[NestedKey, torch.Tensor] = {}
        for slots, wanted in groups:
            fields = self.table.pick_fields(slots, wanted.values())  # type: ignore[union-attr]
            found |= zip(wanted, fields, strict=True)
        if stacks:
            found |= self.stacks.read(self.table, index, stacks, following)  # type: ignore[union-attr, arg-type]
        return found

    def _rand_given_ndim(self, batch_size: int) -> torch.Tensor:
        """Draws for TorchRL's samplers: live rows only, whatever the lanes' fill."""
        if self.episodes is None:
            found: torch.Tensor = super()._rand_given_ndim(batch_size)
            return found
        return self.episodes.random_slots(batch_size, self._rng)

    # State

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Releases the directory to other writers if the block raises."""
        try:
            yield
        except BaseException:
            if (directory := self.directory) is not None:
                directory.abandon()
            raise

    def lay_out_anew(self, num_lanes: int) -> None:
        """Recreates the directory for another number of lanes, if nothing was ever written to it."""
        directory, layout = self.directory, self.layout
        if directory is None or directory.state.cursors.any():
            return
        directory.delete()
        made = Directory.create(directory.path, layout, self.max_size, num_lanes)  # type: ignore[arg-type]
        self.episodes, heard_by = made.description.new_index(), self.files.on_new_rows  # type: ignore[union-attr]
        self._use(made)
        self.files.on_new_rows = heard_by  # type: ignore[union-attr]

    def flush(self) -> None:
        """Waits until the rows of a directory are on disk; see `ReplayStorage.flush`."""
        if (directory := self.directory) is not None and directory.is_writer:
            directory.flush(self.episodes)  # type: ignore[arg-type]

    def close(self) -> None:
        """Flushes the rows of a directory, and releases it to other writers."""
        if (directory := self.directory) is not None and directory.is_writer:
            directory.close(self.episodes)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Returns the layout, the rows (not a copy) and their number."""
        state: dict[str, Any] = {
            "layout": None if self.layout is None else self.layout.to_json(),
            "_storage": self.rows,
            "initialized": self.initialized,
            "_len": self._len,
        }
        if self.stacks is not None:
            state["past"] = self.stacks.past
        if self._side is not None:
            state["side"] = self._side.taken
            if self.is_durable:
                table, known = self.table if self.reader else None, (self.layout, self.rows)
                named: Any = (*known, self._side.values, self.episodes, table)
                state["side"] = named_entries(*named)
        return state

    def read_state(self, state_dict: Any) -> dict[NestedKey, torch.Tensor]:
        """Returns the fields `[N, ...]` of a saved state, sharing its memory; empty if it has no rows.

        Next observations that are not stored in the rows are left out, and stacks are reduced to their
        newest frame.

        Raises:
            KeyError, TypeError, ValueError: as `check_state`.
        """
        return SavedRows(state_dict, self).fields

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Loads a checked state into rows of the same layout and number.

        Raises:
            RuntimeError: the state does not say in which slots of a directory the rows go.
            OSError: the disk is full. Nothing has changed then.
        """
        saved = SavedRows(state, self)
        check_writable(self)
        if saved.moved is None and (self.is_durable or self.share_next or saved.shares):
            where = self.scratch_dir or "a storage with share_next=True"
            raise RuntimeError(
                f"the rows in {where} are saved and loaded together with their episodes: load what a "
                "ReplayStorage saved into a ReplayStorage, by its loads() or load_state_dict()."
            )
        if saved.layout is not None and self.rows is None:
            self._allocate(self._declared.layout(saved.layout.declared, saved.layout.nested))
        if self.files is not None:
            self._load_files(saved, progress=progress)
        elif saved.moved is not None:
            self._put(saved, self.table, progress=progress)  # type: ignore[arg-type]
        elif saved.layout is not None:
            target = tensors_of(self.layout.framed.stored_tensordict(self.rows))  # type: ignore[union-attr, arg-type]
            copy_in_pieces(saved.fields, target, progress=progress)
        if saved.layout is not None and self.stacks is not None and self.files is None:
            self.stacks.past.copy_(saved.past)  # type: ignore[arg-type]
        self._len = state["_len"]
        self._bump_mutation_revision()

    def _put(self, saved: SavedRows, table: RowTable, *, progress: bool) -> None:
        """Copies saved rows to their slots, if there are any."""
        has_rows = saved.layout is not None
        if table is self.table:
            if has_rows and self.share_next and saved.rows.data_ptr() == self.rows.data_ptr():  # type: ignore[union-attr]
                # The state aliases the rows of this storage.
                saved.copy()
            if self.episodes is not None:
                self.forget_links(self.episodes.num_slots_reached)
        if has_rows:
            saved.put(self.layout.framed, table, self.device, progress=progress)  # type: ignore[union-attr]

    def _load_files(self, saved: SavedRows, *, progress: bool) -> None:
        """Replaces the rows of a directory atomically."""
        moved: Moved = saved.moved  # type: ignore[assignment]
        layout: Layout = self.layout  # type: ignore[assignment]

        def fill(new: Words) -> None:
            table = table_of(layout.framed, new.rows, new.side, moved.episodes)
            self._put(saved, table, progress=progress)
            if layout.stacks and saved.layout is not None:
                past: torch.Tensor = saved.past  # type: ignore[assignment]
                Stacks(layout, moved.episodes, new.rows).take_past(past, moved.saved)

        self.files.load(moved, fill)  # type: ignore[union-attr]

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            if self.rows is None:
                raise RuntimeError(_NO_SHARED_LAYOUT)
            self.share_memory_()
        # Views are rebuilt from the rows: they would be sent one by one.
        state: dict[str, Any] = super().__getstate__()
        state["_storage"] = state["table"] = None
        if self.stacks is not None:
            state["stacks"] = None if self.files is not None else self.stacks.past
        if self.files is not None:
            # A directory has one writer, so a copy is a reader.
            state["files"] = self.files.source.description.identity, self.files.fetch_every
            state |= {"rows": None, "episodes": None, "_side": None}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = state.pop("files", None)
        super().__setstate__(state)
        if files is not None:
            identity, fetch_every = files
            reader = Reader(self.scratch_dir, identity=identity, check=None)  # type: ignore[arg-type]
            self._follow(reader)
            self.files.fetch_every = fetch_every  # type: ignore[union-attr]
        elif self.rows is not None:
            past, self.stacks = self.stacks, None
            self._adopt(self.layout, self.rows, past=past)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        where = self.device if self.scratch_dir is None else self.scratch_dir
        fields = "no layout yet" if self.layout is None else f"{len(self.layout.fields)} fields"
        size = f"row_nbytes={self.row_nbytes}"
        if self.layout is not None and self.layout.stacks:
            stacked = {key: it.num_frames for key, it in self.layout.stacks.items()}
            size += f", single frames of the stacks {stacked}"
        if self._side is not None:
            shared = [field.key for field in self.layout.framed.shared]  # type: ignore[union-attr]
            size += f", side_nbytes={self.side_nbytes}, sharing the next {shared}"
        return (
            f"{type(self).__name__}(rows={len(self)}/{self.max_size}, {fields}, {size}, in {where})"
        )


def check_writable(storage: PackedStorage) -> None:
    """Raises a RuntimeError if rows are in a directory that this process may not write."""
    if storage.files is not None:
        storage.files.check_writable()
