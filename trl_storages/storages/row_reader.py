"""Reads rows as a whole, or some of their fields.

Letters: N rows, W words of 8 bytes a row, B any shape of slots.
"""

from __future__ import annotations

import torch
from tensordict import NestedKey

from trl_storages.storages.gather import Picker
from trl_storages.storages.layout import Layout, Span

__all__ = ["RowReader"]


class RowReader:
    """Reads rows into new memory, with as few gathers as pay.

    Args:
        layout: of the rows.
        rows: `[N, W]` int64.
    """

    def __init__(self, layout: Layout, rows: torch.Tensor) -> None:
        self._layout, self._rows = layout, rows
        self._whole = Picker(rows)
        # What was found out for each choice of fields: the same ones are read with every batch.
        self._pickers: dict[tuple[NestedKey, ...], list[tuple[Span, Picker]]] = {}

    def whole(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the rows `[*B, W]` at int64 slots `[*B]`."""
        return self._whole.pick(slots)

    def read(
        self, slots: torch.Tensor, keys: tuple[NestedKey, ...]
    ) -> dict[NestedKey, torch.Tensor]:
        """Gathers some fields.

        Args:
            slots: `[*B]` int64.
            keys: the fields.

        Returns:
            key -> tensor `[*B, *shape]`.

        Raises:
            KeyError: there is no such field; the message lists those that are there.
        """
        pickers = self._pickers.get(keys)
        if pickers is None:
            spans = self._layout.spans(keys)
            pickers = [(span, Picker(self._rows, span.words)) for span in spans]
            self._pickers[keys] = pickers
        fields: dict[NestedKey, torch.Tensor] = {}
        for span, picker in pickers:
            views = span.views(picker.pick(slots))
            for field, view in zip(span.fields, views, strict=True):
                fields[field.key] = view
        return fields if len(keys) == 1 else {key: fields[key] for key in keys}
