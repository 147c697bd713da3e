"""Sequences of rows around each drawn one.

Letters: B anchors, S rows of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch

from trl_storages import keys
from trl_storages.sample_units import EpisodeSequence as _EpisodeSequence
from trl_storages.streams.packed import PackedStorage

__all__ = ["EpisodeSequence"]


class EpisodeSequence(_EpisodeSequence):
    """Expands each drawn row into a sequence, as `trl_storages.EpisodeSequence` describes."""

    def expand(
        self, index: torch.Tensor, info: dict[str, Any], storage: PackedStorage
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Expands anchors `[B]` into consecutive sequences `[B * S]`; entries are repeated."""
        S = self.num_steps
        rows, valid, begins = storage.episodes.sequences(index, self.burn_in, S, self.boundary)
        expanded = {name: value.repeat_interleave(S, 0) for name, value in info.items()}
        expanded[keys.ANCHOR_INDEX] = index.repeat_interleave(S)
        place = torch.arange(rows.numel())
        step = place % S
        expanded[keys.SEQUENCE_ID] = place // S
        expanded[keys.STEP_IN_SEQUENCE] = step
        expanded[keys.LEARNING_MASK] = (step >= self.burn_in) & (step < self.burn_in + self.length)
        expanded[keys.VALIDITY_MASK] = valid.reshape(-1)
        expanded[keys.IS_INIT] = begins.reshape(-1, 1)
        return rows.reshape(-1), expanded
