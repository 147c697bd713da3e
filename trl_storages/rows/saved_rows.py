"""Rows as they are saved: what is checked of them, and how they are copied to where they are to lie.

Letters: N rows, S words of 8 bytes of what is next of a row, n live rows, E lanes (environments).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.kernels import backend
from trl_storages.kernels.sharing import ENTRY_BIT, NUM_TIPS, SideTable, tips_of
from trl_storages.progress_bar import tracker
from trl_storages.ring import EpisodeIndex
from trl_storages.rows.entries import tensors_of
from trl_storages.rows.layout import Layout
from trl_storages.rows.stacks import Stacks
from trl_storages.rows.staging import stage
from trl_storages.saved import SavedState

if TYPE_CHECKING:
    from trl_storages.kernels.device import Commits, RowTable

__all__ = ["Moved", "SavedRows", "named_entries", "table_of"]

_PIECE = 1 << 24  # bytes that are loaded at once
_NAME, _KEYS = "the saved PackedStorage", ("layout", "_storage", "initialized", "_len")
_OPTIONAL = ("moved", "side", "past")
_HINT = "the size of the storage must be that of the saved one"


class Moved(NamedTuple):
    """Rows that are loaded to other slots than those that they were saved from."""

    episodes: EpisodeIndex
    """Of the rows, where they are to lie."""
    saved: EpisodeIndex
    """Of the rows, where they were saved."""
    num_slots_saved: int
    """As many as were saved."""
    old: torch.Tensor
    """`[n]` int64, the slots of the live rows as they were saved."""
    new: torch.Tensor
    """`[n]` int64, where they are to lie."""
    write_count: int
    """Rows written, as TorchRL's writers count them."""
    trajectories: np.ndarray
    """`[E]` the collector's number of each lane's last trajectory."""


class SavedRows:
    """Rows that were saved, or that there were none.

    Args:
        state: what `PackedStorage.state_dict` returned, and `moved` if they are to lie elsewhere.
        max_size: N of the storage that takes them.

    Attributes:
        layout: of the rows; None if there are none.
        moved: where they are to lie; None where they were.

    Raises:
        KeyError, TypeError, ValueError: the state is damaged, or of more rows.
    """

    def __init__(self, state: Any, max_size: int) -> None:
        self._state, self._saved = state, SavedState(state, _NAME, _KEYS, _OPTIONAL)
        self.layout: Layout | None = None
        self.moved: Moved | None = state.get("moved")
        #: Whether next observations are stored once.
        self.shares = "side" in state
        if self._saved["layout"] is None:
            if self._saved.flag("initialized") or self._saved["_storage"] is not None:
                raise self._saved.error("layout", "that of the rows, as there are some", None)
            self._saved.integer("_len", 0, 0)
            return
        if not self._saved.flag("initialized"):
            raise self._saved.error("initialized", "True, as there is a layout", False)
        self._saved.integer("_len", 0, max_size)
        self.layout = Layout.from_json(self._saved["layout"])

    def take(self, num_slots: int, num_lanes: int) -> None:
        """Checks the rows, and takes them.

        Args:
            num_slots: as many as must have been saved, unless the rows are moved.
            num_lanes: E.

        Raises:
            KeyError, TypeError, ValueError: there are more or fewer, or they are damaged.
        """
        saved, layout = self._saved, self.layout
        sharing = layout.framed.sharing  # type: ignore[union-attr]
        if self.moved is not None:
            num_slots = self.moved.num_slots_saved
        shape = num_slots, layout.stored_words  # type: ignore[union-attr]
        #: `[*, W]` int64, as they are stored.
        self.rows = saved.tensor("_storage", torch.int64, shape, _HINT)
        #: `[*, S]` int64, next observations that lie in no row; None where all are stored.
        self.side: torch.Tensor | None = None
        #: Frames of rows that were evicted, as `Stacks.past`; None where rows have no stacks.
        self.past: torch.Tensor | None = None
        if sharing is not None:
            SavedState(self._state, _NAME, (*_KEYS, "side"), _OPTIONAL)
            self.side = saved.tensor("side", torch.int64)
            if self.side.ndim != 2 or self.side.shape[1] != sharing.shared_words:
                raise saved.error("side", f"[*, {sharing.shared_words}]", list(self.side.shape))
            entries = sharing.headers(self.rows) >> ENTRY_BIT
            if not bool(((entries >= 0) & (entries < len(self.side))).all()):
                raise saved.error(
                    "_storage", f"of rows that name {len(self.side)} entries", "others"
                )
        if layout.stacks:  # type: ignore[union-attr]
            SavedState(self._state, _NAME, (*_KEYS, "past"), _OPTIONAL)
            past_shape = Stacks.past_shape(layout, num_lanes)  # type: ignore[arg-type]
            self.past = saved.tensor("past", torch.int64, past_shape, _HINT)

    @property
    def fields(self) -> dict[NestedKey, torch.Tensor]:
        """The fields `[N, ...]` of the rows, which share their memory; none if there are no rows.

        Next observations that are not stored in the rows are not among them, and of stacks only the
        newest frames are.
        """
        if self.layout is None:
            return {}
        return tensors_of(self.layout.framed.stored_tensordict(self.rows))

    def is_restacked(self, wanted: Layout | None) -> bool:
        """Whether the rows are as wanted, but for stacks of frames that one of the two stores whole."""
        layout = self.layout
        if layout is None or wanted is None or self.moved is None:
            return False
        are_others = bool(layout.stacks) != bool(wanted.stacks)
        return are_others and layout.described == wanted.described

    def restack(self, wanted: Layout) -> None:
        """Lays the rows out with stacks of frames, if they were saved without, or the other way.

        Args:
            wanted: the layout of the storage that takes them, with the same fields.

        Raises:
            ValueError: stacks do not continue one another, so that no frame can be stored once.
        """
        layout, episodes = Layout(wanted.declared, wanted.nested), self.moved.saved  # type: ignore[union-attr]
        slots = self.moved.old.cpu()  # type: ignore[union-attr]
        rows = torch.zeros(len(self.rows), layout.stored_words, dtype=torch.int64)
        table, read = table_of(layout.framed, rows, None, episodes), self._reader(episodes)
        pieces = slots.split(max(_PIECE // layout.row_nbytes, 1))
        for some in pieces:
            table.put(some, stage(layout, read(some), some.shape, rows.device))
        past = None
        if layout.stacks:
            stacks = Stacks(layout, episodes, rows)
            oldest = slots[episodes.ring.steps(slots) == episodes.ring.oldest(slots)]
            if len(oldest):
                first = stage(layout, read(oldest), oldest.shape, rows.device).seen
                stacks.take_past_of(first.words(), oldest % episodes.num_envs)  # type: ignore[union-attr]
            for some in pieces:
                found, kept = stacks.read(table, some, layout.stacks), read(some)
                if wrong := [
                    key for key, value in found.items() if not _are_same(value, kept[key])
                ]:
                    raise ValueError(
                        f"the saved rows hold stacks {wrong} that do not continue one another, so that "
                        "their frames can't be stored once: load them into a storage without FrameStack "
                        "(frame_stack). Nothing was changed."
                    )
            past = stacks.past
        self.layout, self.rows, self.side, self.past = layout, rows, None, past

    def _reader(
        self, episodes: EpisodeIndex
    ) -> Callable[[torch.Tensor], dict[NestedKey, torch.Tensor]]:
        """Returns what reads the fields `[B, ...]` of rows as they are seen, on the CPU."""
        layout: Layout = self.layout  # type: ignore[assignment]
        side = None if self.side is None else SideTable.of(self.side.cpu())
        rows = self.rows.cpu()
        if not layout.stacks:
            table = table_of(layout, rows, side, episodes)
            return lambda slots: layout.views(table.pick(slots))
        # Where there are spare rows, the past is put among them.
        rows = rows.clone()
        table, stacks = (
            table_of(layout.framed, rows, side, episodes),
            Stacks(layout, episodes, rows),
        )
        stacks.take_past(self.past.cpu(), episodes)  # type: ignore[union-attr]
        return lambda slots: layout.views(stacks.gather(table, slots, None))

    def copy(self) -> None:
        """Takes memory of its own, as what is saved may be what is overwritten."""
        self.rows = self.rows.clone()
        self.side = None if self.side is None else self.side.clone()

    def put(self, layout: Layout, table: RowTable, device: torch.device, *, progress: bool) -> None:
        """Copies the rows to where they are to lie.

        Args:
            layout: of rows as the table takes them, with the same fields.
            table: where they go.
            device: of the table.
            progress: whether to show how far it is.
        """
        moved: Moved = self.moved  # type: ignore[assignment]
        saved = self.layout.framed  # type: ignore[union-attr]
        side = None if self.side is None else SideTable.of(self.side)
        source, piece = table_of(saved, self.rows, side, moved.saved), _PIECE // saved.row_nbytes
        slots = moved.old.to(self.rows.device), moved.new.to(device)
        old, new = (torch.split(it, max(piece, 1)) for it in slots)
        for some, places in tracker("loading rows", progress)([*zip(old, new, strict=True)]):
            rows = stage(layout, saved.views(source.pick(some)), some.shape, device)
            table.put(places, rows, moved.episodes.ring)


def _are_same(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether tensors are the same bit for bit."""
    one, another = (it.contiguous().view(-1).view(torch.uint8) for it in (value, other))
    return torch.equal(one, another)


def named_entries(
    layout: Layout,
    rows: torch.Tensor,
    values: torch.Tensor,
    episodes: EpisodeIndex,
    table: RowTable | None = None,
) -> torch.Tensor:
    """Returns the entries that the rows of a directory name, `[*, S]` int64.

    Args:
        layout: of the rows.
        rows: as they are stored.
        values: of the side table.
        episodes: of the rows.
        table: of the rows, where another process writes them; None where this one does.
    """
    sharing, num_lanes = layout.framed.sharing, episodes.num_envs
    headers, words = sharing.headers(rows), sharing.shared_words  # type: ignore[union-attr]
    named = (headers >> ENTRY_BIT).clamp(NUM_TIPS * num_lanes, len(values) - 1)
    values = values[: int(named.max()) + 1, :words].clone()
    if table is not None:
        # The tips may be of further rows by now.
        newest = episodes.newest_slots()[episodes.ring.fill > 0]
        tips = tips_of(headers[newest], newest % num_lanes, num_lanes)
        values[tips] = table.pick(newest)[:, :words]
    return values


def table_of(
    layout: Layout,
    rows: torch.Tensor,
    side: SideTable | None,
    episodes: EpisodeIndex | None,
    commits: Commits | None = None,
) -> RowTable:
    """Returns what copies rows of a layout, of which an index says how they follow one another.

    The others are as in `SharedTable`.
    """
    kernels = backend(rows.device)
    if layout.sharing is None:
        return kernels.RowTable(rows)
    ring = episodes.ring  # type: ignore[union-attr]
    return kernels.SharedTable(rows, layout.sharing, side, ring, commits)  # type: ignore[arg-type]
