"""Rows that are about to be written, in tensor operations.

Letters: n rows, f fields of a row, W words of 8 bytes a row, L lanes and S steps written now.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trl_storages.kernels.memory import on_device, sendable
from trl_storages.kernels.tables import Block

__all__ = ["NewRows"]


class NewRows:
    """Rows copied to a block of their own; see `kernels.host.writing.NewRows`.

    Here fields and flags may be on any device, with any strides.
    """

    seen: NewRows | None = None
    #: Fields are copied when the rows are made.
    reads_fields = False

    def __init__(
        self,
        fields: Sequence[torch.Tensor],
        places: np.ndarray,
        num_rows: int,
        num_words: int,
        done: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        self.num_rows, self.places = num_rows, places
        # All fields cross to the device in one copy, unless some are there already.
        is_there = any(field.device == device for field in fields)
        begin = device if is_there else torch.device("cpu")
        pinned = not is_there and sendable(device)
        words = torch.zeros(
            (num_rows, num_words), dtype=torch.int64, device=begin, pin_memory=pinned
        )
        into = words.view(torch.uint8)
        for field, (start, size) in zip(fields, places.tolist(), strict=True):
            if size and num_rows:
                plain = field.detach().to(begin).resolve_neg().contiguous()
                # Flattened, as a 0-d tensor has no view as bytes.
                bytes_of_rows = plain.reshape(-1).view(torch.uint8).view(num_rows, size)
                into[:, start : start + size] = bytes_of_rows
        # Rows that came from the host can be checked without waiting for the device.
        self._on_host = None if is_there else words
        self._words = on_device(words, device)
        self.done = None if done is None else on_device(done.reshape(-1), device)
        # If these are parts of other rows: those, and which parts.
        self._whole: tuple[NewRows, np.ndarray] | None = None

    @classmethod
    def of_block(
        cls,
        words: torch.Tensor,
        places: np.ndarray,
        done: torch.Tensor | None,
        device: torch.device,
    ) -> NewRows:
        """Wraps rows that are laid out already; see `kernels.host.writing.NewRows`."""
        rows = cls([], places[:0], len(words), 0, None, device)
        rows.places, rows._words = places, on_device(words, device)
        rows.done = None if done is None else on_device(done.reshape(-1), device)
        return rows

    def words(self) -> torch.Tensor:
        """Returns the rows as `[n, W]` int64."""
        if self._whole is not None:
            rows, parts = self._whole
            bytes_of_rows, into = rows.words().view(torch.uint8), self._words.view(torch.uint8)
            for field, first, start, size in parts.tolist():
                at = rows.places[field, 0] + first
                into[:, start : start + size] = bytes_of_rows[:, at : at + size]
        return self._words

    def parts(self, parts: np.ndarray, num_words: int) -> NewRows:
        """Returns rows made of some bytes of these; see `kernels.host.writing.NewRows`."""
        words = torch.zeros(
            (self.num_rows, num_words), dtype=torch.int64, device=self._words.device
        )
        rows = self.of_block(words, parts[:, 2:], self.done, words.device)
        rows._whole = self, parts
        return rows

    def first_violation(self, implied: np.ndarray) -> int:
        """Checks rows that came from the host; see `kernels.host.writing.NewRows`."""
        words = self._words if self._words.device.type == "cpu" else self._on_host
        # Tensors of a simulated device (a subclass) have no values to read.
        if type(words) is torch.Tensor:
            values = words.view(torch.uint8)
            for number, pair in enumerate(self.places[implied].tolist()):
                one, other = (values[:, start : start + size] != 0 for start, size in pair)
                if (one & ~other).any():
                    return number
        return -1

    def steps(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows `[L, S, W]` and `done` flags `[L, S]` of a block."""
        words, done = self.words(), block.arranged(self.done)  # type: ignore[arg-type]
        if block.order is None:
            return words.view(*done.shape, words.shape[1]), done
        return words[block.order], done
