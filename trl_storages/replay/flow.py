"""The way of a batch: sampler, sample unit, rows, transforms.

Letters: B batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, pad
from tensordict.utils import expand_as_right
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Compose, Transform

from trl_storages import arguments, keys
from trl_storages._torchrl import dispatch_td_nn_modules
from trl_storages.packed import PackedStorage, RowView
from trl_storages.refused import refuse_stock
from trl_storages.samplers import EpisodeSequence, HERSampler, OwnSampler
from trl_storages.transforms import ReplayTransform, parts_of

__all__ = ["Flow", "draw_episodes", "read", "undisturbed"]

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


Entries = dict[Any, torch.Tensor]
# A batch, what samplers say of its rows, and all slots that were read.
Drawn = tuple[TensorDictBase, Entries, list[torch.Tensor]]


def undisturbed(
    storage: PackedStorage, draw: Callable[[], Drawn], num_steps: int = 1
) -> tuple[TensorDictBase, Entries]:
    """Draws a batch, all rows of which were live until they were read, with all rows that they needed.

    Those that were not come from further batches. So a reader gets on, however fast the writer is.

    Args:
        storage: holds the rows.
        draw: returns B rows, what samplers say of them, and which slots were read, `[*, B]` each.
        num_steps: how many rows belong together, one behind another.
    """
    seen = storage.look()
    batch, info, slots = draw()
    gone = _gone(storage, seen, slots, num_steps)
    while gone is not None and gone.any():
        seen = storage.look()
        other, more, slots = draw()
        again = _gone(storage, seen, slots, num_steps)
        taken = gone if again is None else gone & ~again
        if len(gone) != batch.numel():  # a transform has made something else of the rows
            taken = torch.zeros_like(gone)
            if again is None or not again.any():
                return other, more
        batch = torch.where(taken.view(batch.batch_size).to(other.device), other, batch)
        info = {key: _merged(taken, more[key], value) for key, value in info.items()}
        gone &= ~taken
    return batch, info


def _gone(
    storage: PackedStorage, seen: np.ndarray | None, slots: list[torch.Tensor], num_steps: int
) -> torch.Tensor | None:
    """Returns of which rows `[B]` something gave way; None if nothing could."""
    if seen is None:
        return None
    found = torch.zeros_like(slots[0], dtype=torch.bool)
    for read in slots:
        gone = storage.gave_way(seen, read)
        # What was read of other rows may have been for any.
        is_of_rows = gone.shape[-1:] == found.shape
        found |= gone.reshape(-1, len(found)).any(0) if is_of_rows else gone.any()
    return found.view(-1, num_steps).any(1).repeat_interleave(num_steps)


def _merged(mask: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.view(-1, *(1 for _ in one.shape[1:])).to(one.device), one, other)


def read(storage: PackedStorage, index: Any) -> Any:
    """Reads rows by a slice of the history, oldest first, by slots or a mask; or an entry of all.

    Raises:
        IndexError: a slot holds no row.
        TypeError: the index is none of these.
    """
    if isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str)):
        return read(storage, slice(None))[index]
    if isinstance(index, slice):
        seen = storage.look()
        slots = storage.episodes.slots_by_age()
        slots = slots[torch.tensor([*range(len(slots))[index]], dtype=torch.int64)]
        batch, gone = storage.read(slots, seen)
        return batch if gone is None else batch[~gone]
    slots = arguments.values("index", index).cpu()
    if slots.dtype is torch.bool:
        slots = slots.nonzero().squeeze(-1)
    is_whole = not (slots.is_floating_point() or slots.is_complex())
    if isinstance(index, tuple) or (slots.numel() and not is_whole):
        raise TypeError(
            f"an index must be a slice, an int, a list, a mask, integer slots or a key, got {index!r}."
        )
    return storage.get(slots.long())


def draw_episodes(
    storage: PackedStorage, n: int, generator: torch.Generator | None
) -> TensorDictBase:
    """Draws whole, finished episodes `[n, T]`, padded with zeros where the mask says so.

    Those that gave way while they were read are drawn again.
    """
    parts: list[TensorDictBase] = []
    while (missing := n - sum(map(len, parts))) > 0:
        seen = storage.look()
        batch, gone = _draw_episodes(storage, seen, missing, generator)
        parts.append(batch if gone is None else batch[~gone])
    longest = max(part.shape[1] for part in parts)
    padded = [pad(part, [0, 0, 0, longest - part.shape[1]]) for part in parts]
    return torch.cat(padded) if len(parts) > 1 else parts[0]


def _draw_episodes(
    storage: PackedStorage, seen: Any, n: int, generator: torch.Generator | None
) -> tuple[TensorDictBase, torch.Tensor | None]:
    """Returns episodes `[n, T]`, and which of them `[n]` gave way."""
    episodes = storage.episodes
    first = episodes.random_episodes(n, generator)
    length = episodes.ahead(first) + 1
    step = torch.arange(int(length.max())).expand(n, -1)
    offset = step.minimum(length[:, None] - 1)
    slots = episodes.shift(first[:, None].expand_as(step).flatten(), offset.flatten()).view(n, -1)
    batch, gone = storage.read(slots, seen)
    mask = (step < length[:, None]).to(storage.device)
    batch = batch.apply(
        lambda leaf: torch.where(expand_as_right(mask, leaf), leaf, leaf.new_zeros(()))
    )
    batch = batch.set(keys.INDEX, slots.to(storage.device)).set(keys.MASK, mask)
    return batch, None if gone is None else gone.any(1)
