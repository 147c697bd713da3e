"""The way of a batch: sampler, sample unit, rows, transforms.

Letters: B batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Compose, Transform

from trl_storages import keys
from trl_storages._torchrl import dispatch_td_nn_modules
from trl_storages.packed import PackedStorage, RowView
from trl_storages.samplers import EpisodeSequence, HERSampler, OwnSampler
from trl_storages.stock_parts import refuse_stock
from trl_storages.transforms import ReplayTransform, parts_of

__all__ = ["Flow"]

Slots = tuple[torch.Tensor, dict[Any, torch.Tensor]]


class Flow:
    """What a batch goes through, told apart once: our transforms see rows, TorchRL's see TensorDicts.

    Args:
        sampler: draws slots; those of a sampler of the user's are checked.
        unit: expands them; None leaves them.
        transform: all transforms.

    Raises:
        TypeError: a transform is one of TorchRL's that would be wrong over lanes of episodes.

    Attributes:
        num_transforms: how many transforms there were.
        num_steps: how many rows of a batch belong together.
        others: the transforms that know batches alone.
    """

    def __init__(self, sampler: Sampler, unit: EpisodeSequence | None, transform: Compose) -> None:
        layers = sampler.layers if isinstance(sampler, OwnSampler) else []
        self._slots: Callable[..., Slots] = sampler.sample if layers else partial(_live, sampler)
        self._unit, self.num_steps = unit, 1 if unit is None else unit.num_steps
        self.num_transforms, parts = len(transform), parts_of(transform)
        replayed = [part for part in parts if isinstance(part, ReplayTransform)]
        self.others = [part for part in parts if not isinstance(part, ReplayTransform)]
        for part in self.others:
            refuse_stock(part)
        self._unwritten = _unwritten(layers, replayed)
        # Those that need nothing more are not asked each time.
        prepared = [it for it in replayed if type(it).prepare is not ReplayTransform.prepare]
        self._prepares = [part.prepare for part in prepared]
        self._replays = [
            part.replay if isinstance(part, ReplayTransform) else partial(_transform, part)
            for part in parts
        ]

    def draw(
        self, storage: PackedStorage, batch_size: int
    ) -> tuple[TensorDictBase, dict[Any, torch.Tensor], list[torch.Tensor]]:
        """Draws a batch `[B]`.

        Returns:
            the batch, the entries of sampler and sample unit, and all slots that were read.

        Raises:
            RuntimeError: the storage is empty, or the sampler draws goals that no transform writes.
        """
        slots, info = self._slots(storage, batch_size)
        if self._unwritten:
            raise RuntimeError(
                f"the goals {self._unwritten} that are drawn must be written by a transform: pass "
                "transform=GoalRelabel(reward_fn), with the goal_key of the sampler."
            )
        if self._unit is not None:
            slots, info = self._unit.expand(slots, info, storage)
        info[keys.INDEX] = slots
        rows = RowView(storage, slots, info)
        for prepare in self._prepares:
            prepare(rows)
        for replay in self._replays:
            replay(rows)
        return rows.tensordict(), info, rows.read


def _live(sampler: Sampler, storage: PackedStorage, batch_size: int) -> Slots:
    """Draws by a sampler of the user's.

    Raises:
        RuntimeError: the storage is empty.
        IndexError: a slot holds no row.
    """
    if not len(storage):
        raise RuntimeError("the storage is empty: write transitions before sampling.")
    slots, info = sampler.sample(storage, batch_size)
    slots = torch.as_tensor(slots, device="cpu").long()
    storage.episodes.check_live(slots)
    return slots, {key: torch.as_tensor(value) for key, value in info.items()}


def _transform(part: Transform, rows: RowView) -> None:
    with dispatch_td_nn_modules(True):
        rows.transform(part)


def _unwritten(layers: list[OwnSampler], parts: list[ReplayTransform]) -> list[NestedKey]:
    """Returns the goals that are drawn and that no transform writes."""
    written = [part.goal_key for part in parts if part.uses_goals]
    drawn = [layer.goal_key for layer in layers if isinstance(layer, HERSampler)]
    return [key for key in drawn if key not in written and None not in written]
