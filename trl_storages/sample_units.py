"""What a drawn row grows into: a stretch of its episode.

Letters: B anchors, S rows of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrl.data import Storage
from torchrl.data.replay_buffers.sample_units import Sequence

from trl_storages import arguments
from trl_storages.ring import episodes_of

__all__ = ["EpisodeSequence"]


class EpisodeSequence(Sequence):
    """Takes the rows around each drawn one, without leaving its episode.

    An anchor at step t grows into the S = `burn_in + length + bootstrap` rows of steps

        [t - burn_in, t + length + bootstrap)

    in time order. Rows before the first surviving or after the last row of the anchor's episode
    repeat that row and are marked invalid. What the sampler said of the anchor (a priority weight,
    a goal) is said of each of its rows, so a sequence has one goal. The rows are found by index:
    nothing is stored twice, however the sequences overlap.

    It does what TorchRL's `Sequence(..., episode_boundary="pad")` does, with the same entries, but
    asks the episode index instead of searching all rows for boundaries after each write. It works
    with several lanes and where an episode was cut, on any device, without synchronising with the
    host.

    Args:
        length: rows to learn from, the anchor first.
        burn_in: rows before them, to warm a recurrent state up.
        bootstrap: rows after them, for targets.

    Raises:
        ValueError: `length` is below 1, `burn_in` or `bootstrap` below 0.

    >>> EpisodeSequence(8, burn_in=4, bootstrap=1).num_steps
    13
    """

    def __init__(self, length: int, burn_in: int = 0, bootstrap: int = 0) -> None:
        super().__init__(
            arguments.integer("length", length, at_least=1),
            burn_in=arguments.integer("burn_in", burn_in),
            bootstrap=arguments.integer("bootstrap", bootstrap),
        )
        # What is said of the rows of every batch of a size, as that of the last one.
        self._made_for: tuple | None = None

    @property
    def num_steps(self) -> int:
        """S, so that `batch.reshape(-1, unit.num_steps)` is one sequence a line."""
        return self.burn_in + self.length + self.bootstrap

    def expand(
        self, index: Tensor, info: dict[str, Any], storage: Storage
    ) -> tuple[Tensor, dict[str, Any]]:
        """Grows anchors into sequences, one after another.

        Args:
            index: `[B]` int64 slots of the anchors.
            info: what the sampler said of them: entries `[B, ...]` are repeated for each row.
            storage: its episode index knows the boundaries.

        Returns:
            `[B * S]` int64 slots, and the info with, for each of them, `anchor_index`, the slot of
            its anchor; `sequence_id` in 0 .. B - 1; `step_in_sequence` in 0 .. S - 1;
            `validity_mask`, whether the row is the one asked for and no repetition; and
            `learning_mask`, whether it is one of the `length` rows from the anchor on.

        Raises:
            RuntimeError: `storage` has no episode index.
        """
        episodes, num_steps = episodes_of(storage), self.num_steps
        arguments.slots("index", index)
        arguments.mapping("info", info, "a dict of what the sampler said")
        self._prepare(index.shape[0], index.device)
        rows, valid = episodes.sequences(index.to(episodes.device), self.burn_in, num_steps)

        expanded = {name: _repeat(value, num_steps) for name, value in info.items()}
        expanded["anchor_index"] = _repeat(index, num_steps)
        expanded |= {name: value.clone() for name, value in self._always.items()}
        expanded["validity_mask"] = valid.reshape(-1).to(index.device)
        return rows.reshape(-1).to(index.device), expanded

    def _prepare(self, num_anchors: int, device: torch.device) -> None:
        """Makes what does not depend on the anchors, unless the last batch needed the same."""
        made_for = (num_anchors, device, self.burn_in, self.length, self.bootstrap)
        if self._made_for == made_for:
            return
        number = torch.arange(num_anchors, device=device)
        step = torch.arange(self.num_steps, device=device)
        learning = (step >= self.burn_in) & (step < self.burn_in + self.length)
        self._always = {
            "sequence_id": _repeat(number, self.num_steps),
            "step_in_sequence": step.repeat(num_anchors),
            "learning_mask": learning.repeat(num_anchors),
        }
        self._made_for = made_for

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(length={self.length}, burn_in={self.burn_in}, "
            f"bootstrap={self.bootstrap})"
        )


def _repeat(value: Any, num_steps: int) -> Any:
    """Says of each row what `value` says of its anchor; a value without dimension is left alone."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    return value.unsqueeze(1).expand(-1, num_steps, *value.shape[1:]).flatten(0, 1)
