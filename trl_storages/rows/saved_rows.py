"""Saved rows: checks them, and copies them to their new slots.

Letters: N rows, S 8-byte words of the next observations of a row, n live rows, E lanes (environments).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.arguments import tracker
from trl_storages.kernels import backend
from trl_storages.kernels.sharing import ENTRY_BIT, NUM_TIPS, SideTable, tips_of
from trl_storages.ring import EpisodeIndex
from trl_storages.rows.declared import DeclaredFields
from trl_storages.rows.entries import tensors_of
from trl_storages.rows.layout import Layout
from trl_storages.rows.stacks import Stacks
from trl_storages.rows.staging import stage
from trl_storages.saved.parts import SavedState

if TYPE_CHECKING:
    from trl_storages.kernels.device import RowTable
    from trl_storages.kernels.host import Commits

__all__ = ["Moved", "SavedRows", "named_entries", "table_of", "written_once"]

_PIECE = 1 << 24  # bytes loaded at a time
_NAME, _KEYS = "the saved PackedStorage", ("layout", "_storage", "initialized", "_len")
_OPTIONAL = ("moved", "side", "past")
_HINT = "the size of the storage must be that of the saved one"


class Moved(NamedTuple):
    """Where saved rows go that are loaded into other slots."""

    episodes: EpisodeIndex
    """Index of the rows in their new slots."""
    saved: EpisodeIndex
    """Index of the rows in their saved slots."""
    num_slots_saved: int
    """Number of slots that were saved."""
    old: torch.Tensor
    """`[n]` int64, the saved slots of the live rows."""
    new: torch.Tensor
    """`[n]` int64, their new slots."""
    write_count: int
    """Rows written, as TorchRL's writers count them."""
    trajectories: np.ndarray
    """`[E]` the collector's number of each lane's last trajectory."""
    priorities: tuple[torch.Tensor, float] | None = None
    """`[N]` float32 of all new slots, and the largest one that was reported."""


class SavedRows:
    """The rows of a saved state, if it has any, fully checked.

    Args:
        state: what `PackedStorage.state_dict` returned, with `moved` if rows go to other slots.
        storage: the `PackedStorage` that loads them.

    Attributes:
        layout: of the rows; None if there are none.
        moved: their new slots; None keeps the saved ones.

    Raises:
        KeyError, TypeError, ValueError: the state is damaged, or of more rows or other fields.
        RuntimeError: the storage lacks the writer that these rows need.
    """

    def __init__(self, state: Any, storage: Any) -> None:
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
        self._saved.integer("_len", 0, storage.max_size)
        self.layout = Layout.from_json(self._saved["layout"])
        self._check_fields(self.layout, storage.layout, storage._declared)
        if self.layout.stacks and storage.episodes is None:
            raise written_once(storage)
        self._take(self.layout, storage)

    def _check_fields(self, layout: Layout, own: Layout | None, declared: DeclaredFields) -> None:
        fits = declared.are_of(layout) if own is None else layout.declared == own.declared
        if not fits:
            named = declared.fields if own is None else own.declared
            raise ValueError(
                "the saved rows are of other fields than those of this storage: "
                f"{layout.unlike(named)}. Load them into a storage of the fields that they were saved "
                "with. Nothing was changed."
            )

    def _take(self, layout: Layout, storage: Any) -> None:
        """Checks the rows and keeps them."""
        saved, sharing = self._saved, layout.framed.sharing
        if self.moved is not None:
            num_slots = self.moved.num_slots_saved
        else:
            # A directory has spare steps, too.
            num_slots = storage.max_size if storage.files is None else len(storage.rows)
        shape = num_slots, layout.stored_words
        #: `[*, W]` int64, as they are stored.
        self.rows = saved.tensor("_storage", torch.int64, shape, _HINT)
        #: `[*, S]` int64, next observations that are in no row; None if rows hold their own.
        self.side: torch.Tensor | None = None
        #: Frames of evicted rows, as `Stacks.past`; None if rows have no stacks.
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
        if layout.stacks:
            SavedState(self._state, _NAME, (*_KEYS, "past"), _OPTIONAL)
            past_shape = Stacks.past_shape(layout, storage.episodes.num_envs)
            self.past = saved.tensor("past", torch.int64, past_shape, _HINT)

    @property
    def fields(self) -> dict[NestedKey, torch.Tensor]:
        """The fields `[N, ...]` of the rows, sharing their memory; empty if there are no rows.

        Next observations that are not stored in the rows are left out, and stacks are reduced to their
        newest frame.
        """
        if self.layout is None:
            return {}
        return tensors_of(self.layout.framed.stored_tensordict(self.rows))

    def copy(self) -> None:
        """Copies the rows, as they may alias the memory that loading overwrites."""
        self.rows = self.rows.clone()
        self.side = None if self.side is None else self.side.clone()

    def put(self, layout: Layout, table: RowTable, device: torch.device, *, progress: bool) -> None:
        """Copies the rows to their new slots.

        Args:
            layout: of the rows of the table, with the same fields.
            table: writes them.
            device: of the table.
            progress: whether to show progress.
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


def written_once(storage: Any) -> RuntimeError:
    """Returns the error for a write that is not an `EpisodeWriter`'s."""
    cure = "pass writer=EpisodeWriter(num_envs) to the replay buffer, and extend it with new rows."
    if storage.episodes is not None:
        cure = "extend the storage with new rows."
    return RuntimeError(
        "rows that are in a directory, that lend their frames to those after them, or that share next "
        f"observations are written once, by an EpisodeWriter, and never changed in place: {cure}"
    )


def named_entries(
    layout: Layout,
    rows: torch.Tensor,
    values: torch.Tensor,
    episodes: EpisodeIndex,
    table: RowTable | None = None,
) -> torch.Tensor:
    """Returns the side table of a directory up to the last entry that rows refer to, `[*, S]` int64.

    Args:
        layout: of the rows.
        rows: as they are stored.
        values: of the side table.
        episodes: of the rows.
        table: of the rows, if another process writes them; None if this one does.
    """
    sharing, num_lanes = layout.framed.sharing, episodes.num_envs
    headers, words = sharing.headers(rows), sharing.shared_words  # type: ignore[union-attr]
    named = (headers >> ENTRY_BIT).clamp(NUM_TIPS * num_lanes, len(values) - 1)
    values = values[: int(named.max()) + 1, :words].clone()
    if table is not None:
        # The writer may have moved the tips on to later rows.
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
    """Returns the table that copies rows of a layout in and out.

    `episodes` says which row follows which. The other arguments are as in `SharedTable`.
    """
    kernels = backend(rows.device)
    if layout.sharing is None:
        return kernels.RowTable(rows)
    ring = episodes.ring  # type: ignore[union-attr]
    if commits is None:
        return kernels.SharedTable(rows, layout.sharing, side, ring)  # type: ignore[arg-type]
    return kernels.SharedTable(rows, layout.sharing, side, ring, commits)  # type: ignore
