"""Rows on their way into a storage: one block, sorted by lane.

Letters: N rows, L lanes that are written, S steps of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Block"]


class Block(NamedTuple):
    """Rows to be written.

    `which` `[L]` int64 are the lanes, in order; `offsets` `[L + 1]` int64 where the rows of each begin;
    `words` `[N, row_words]` int64 the rows; `done` and `cut` `[N]` bool whether a row ends its episode,
    and whether it begins one whatever came before. The last three are arrays on the host, or tensors on
    the device of the rows.
    """

    which: np.ndarray
    offsets: np.ndarray
    words: Any
    done: Any
    cut: Any

    @property
    def longest(self) -> int:
        """The largest number of rows of a lane."""
        return int(np.diff(self.offsets).max(initial=0))

    def part(self, firsts: np.ndarray, ends: np.ndarray) -> Block:
        """Returns rows `firsts` to `ends` `[L]`, positions in this block, of each lane as a block."""
        counts = ends - firsts
        offsets = np.concatenate([[0], counts.cumsum()])
        if len(self.which) == 1:
            rows: Any = slice(int(firsts[0]), int(ends[0]))
        else:
            rows = np.concatenate([np.arange(*pair) for pair in zip(firsts, ends, strict=True)])
            if isinstance(self.words, torch.Tensor):
                rows = torch.from_numpy(rows).to(self.words.device)
        return Block(self.which, offsets, self.words[rows], self.done[rows], self.cut[rows])
