"""The declared fields of a storage, before the row layout is fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, unravel_key

from trl_storages.rows.entries import Nested
from trl_storages.rows.frames import FrameStack, stacks_of
from trl_storages.rows.layout import Layout

__all__ = ["DeclaredFields", "FieldOf"]

#: Dtype and shape of a field, and its `FrameStack` if it has one; None leaves them to the first write.
FieldOf = tuple[torch.dtype, Sequence[int]] | tuple[torch.dtype, Sequence[int], FrameStack] | None


class DeclaredFields:
    """The declared fields of a storage.

    Args:
        fields: by key; None leaves all of them to the first write.
        header: dtype of the row header, as in `Layout`.
    """

    def __init__(
        self, fields: Mapping[NestedKey, FieldOf] | None, header: torch.dtype | None
    ) -> None:
        #: The declared fields by key.
        self.fields = dict(fields or {})
        #: Whether the layout is known before the first write.
        self.are_complete = fields is not None and None not in fields.values()
        self._header = header

    @property
    def past_steps(self) -> int:
        """As `Layout.past_steps`."""
        said = [part for field in self.fields.values() for part in field or ()]
        return max([0, *(it.num_frames - 1 for it in said if isinstance(it, FrameStack))])

    def layout(self, fields: Mapping[NestedKey, Any] | None = None, nested: Nested = ()) -> Layout:
        """Returns the layout of `fields`, by default of the declared ones."""
        return Layout(self.fields if fields is None else fields, nested, header=self._header)

    def first_layout(
        self, entries: Mapping[NestedKey, torch.Tensor], batch_dims: int, nested: Nested
    ) -> Layout:
        """Returns the layout, with the fields that were left open taken from the first write.

        Raises:
            KeyError: the first write lacks a field that was left open.
        """
        described = Layout.of(entries, batch_dims, nested).described
        if not self.fields:
            return self.layout(described, nested)
        missing = [key for key, known in self.fields.items() if not known and key not in described]
        if missing:
            raise KeyError(
                f"the first write must hold {missing}, whose dtype and shape it fixes; its keys are "
                f"{sorted(described, key=str)}."
            )
        fields = {key: known or described[key] for key, known in self.fields.items()}
        return self.layout(fields, nested)

    def are_of(self, layout: Layout) -> bool:
        """Returns whether a layout has exactly the declared fields; true if none were declared."""
        known = layout.described
        wanted: Any = {
            unravel_key(key): field or known.get(key) for key, field in self.fields.items()
        }
        if not wanted or None in wanted.values():
            return not wanted
        open_keys = {unravel_key(key) for key, field in self.fields.items() if field is None}
        stacks = {key: stack for key, stack in layout.stacks.items() if key not in open_keys}
        return stacks_of(wanted) == stacks and Layout(wanted).described == known
