"""Explains a sampled batch: which transitions it holds and how they were transformed.

Letters: B samples of a batch, flattened; A agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import keys
from trl_storages.index import EpisodeIndex
from trl_storages.samplers import HERSampler, layers_of
from trl_storages.validation import counted

__all__ = ["Explanation", "explain"]

_ROWS_SHOWN = 10
# Columns, and the keys of a batch that they show, if the batch has them.
_OPTIONAL: tuple[tuple[str, NestedKey], ...] = (
    ("valid", keys.VALIDITY_MASK),
    ("valid", keys.MASK),
    ("steps", keys.STEPS_TO_NEXT_OBS),
    ("weight", keys.PRIORITY_WEIGHT),
)


@dataclass(frozen=True, repr=False)
class Explanation:
    """One line per sample of a batch; prints as a table.

    Args:
        columns: name -> `[B]`, or `[B, A]` for several agents, as `ReplayStorage.explain` lists them.
        num_rows: the number of stored transitions.

    >>> columns = {"slot": torch.tensor([7, 3]), "age": torch.tensor([0, 4])}
    >>> print(Explanation(columns, 12))
    2 samples of 12 transitions stored
    slot  age
       7    0
       3    4
    """

    columns: Mapping[str, torch.Tensor]
    num_rows: int

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns the column of that name, `[B]` or `[B, A]`."""
        return self.columns[name]

    def __len__(self) -> int:
        """B, the number of samples."""
        return len(self.columns["slot"])

    def __repr__(self) -> str:
        title = f"{counted(len(self), 'sample')} of {counted(self.num_rows, 'transition')} stored"
        if "relabelled" in self.columns:
            title += f", {int(self['relabelled'].sum())} of them with a goal that was reached"
        shown = {name: it[:_ROWS_SHOWN].tolist() for name, it in self.columns.items()}
        columns = [[name, *map(_cell, values)] for name, values in shown.items()]
        aligned = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
        lines = [title, *map("  ".join, zip(*aligned, strict=True))]
        if (hidden := len(self) - _ROWS_SHOWN) > 0:
            lines.append(f"... {hidden} more")
        return "\n".join(lines)


def _cell(value: float | list[Any]) -> str:
    if isinstance(value, list):
        return "/".join(map(_cell, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def explain(batch: TensorDictBase, episodes: EpisodeIndex, sampler: Sampler) -> Explanation:
    """Reports which transition each sample is and how it was transformed; see `ReplayStorage.explain`.

    Args:
        batch: a sampled batch with its `index`, whose transitions are still stored.
        episodes: the index of the storage.
        sampler: the sampler of the buffer, which may have chosen goals.

    Raises:
        KeyError: the batch has no `index`.
        IndexError: `index` contains slots without a transition.
    """
    slots: Any = _column(batch, keys.INDEX)
    episodes.check_live(slots)
    lanes, step = episodes.lanes_of(slots), episodes.num_before(slots)
    columns = {
        "slot": slots,
        "lane": lanes,
        "age": torch.from_numpy(episodes.cursors)[lanes] - 1 - episodes.steps_of(slots),
        "episode": _episode_of(episodes, slots),
        "step": step,
        "length": step + episodes.num_after(slots) + 1,
    }
    for name, key in _OPTIONAL:
        if (column := _column(batch, key)) is not None:
            columns[name] = column
    # The batch may have been sampled before the sampler was replaced.
    goal_keys = [layer.goal_key for layer in layers_of(sampler) if isinstance(layer, HERSampler)]
    for key in dict.fromkeys([keys.DESIRED_GOAL, *goal_keys]):
        goals, mask = (_column(batch, it) for it in keys.goal_keys(key))
        if goals is not None and mask is not None:
            name = "goal" if key == keys.DESIRED_GOAL else ".".join(keys.key_path(key))
            same = columns["episode"] == _episode_of(episodes, goals)
            offset = episodes.steps_of(goals) - episodes.steps_of(slots)
            columns["relabelled" if name == "goal" else f"{name}_relabelled"] = mask
            columns[f"{name}_slot"] = goals
            columns[f"{name}_same_episode"] = same
            columns[f"{name}_offset"] = torch.where(same, offset, 0)
    return Explanation(columns, len(episodes))


def _episode_of(episodes: EpisodeIndex, slots: torch.Tensor) -> torch.Tensor:
    """Returns a number for the episode of each transition, different for each episode."""
    number_in_lane = torch.from_numpy(episodes.episode[slots.numpy()]).long()
    return number_in_lane + episodes.lanes_of(slots) * (episodes.steps_per_lane + 1)


def _column(batch: TensorDictBase, key: NestedKey) -> torch.Tensor | None:
    """Returns a field as `[B]`, or `[B, A]` if it has several values per sample; None if missing."""
    field, shape = batch.get(key, None), batch[keys.INDEX].shape
    # The batch size may be that of the sequences, with their steps as a dimension of the fields.
    if field is None or field.shape[: len(shape)] != shape:
        return None
    column = field.detach().cpu().reshape(shape.numel(), -1)
    return column.squeeze(1) if column.shape[1] == 1 else column
