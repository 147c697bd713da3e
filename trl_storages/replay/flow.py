"""The way of a batch: sampler, sample unit, rows, transforms; and that of its priorities back.

Letters: B batch, N rows of it, n sequences, S rows of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, pad
from tensordict.utils import expand_as_right
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Compose, Transform

from trl_storages import arguments, keys
from trl_storages._torchrl import dispatch_td_nn_modules, refuse_stock
from trl_storages.packed import PackedStorage, RowView
from trl_storages.samplers import REDUCTIONS, EpisodeSequence, HERSampler, OwnSampler
from trl_storages.transforms import ReplayTransform, parts_of

__all__ = ["Flow", "draw_episodes", "drawn_priorities", "one_each", "read"]

Entries = dict[Any, torch.Tensor]
#: A batch, what sampler and sample unit say of its rows, and all slots that were read, `[*, B]` each.
Batch = tuple[TensorDictBase, Entries, list[torch.Tensor]]


class Flow:
    """What a batch goes through, told apart once: our transforms see rows, TorchRL's see TensorDicts.

    Args:
        sampler: draws slots; those of a sampler of the user's are checked.
        unit: expands them; None leaves them.
        transform: all transforms.

    Raises:
        TypeError: a transform is one of TorchRL's that would be wrong over lanes of episodes.

    Attributes:
        transforms: the transforms by name; others may be added to the `Compose` itself.
        num_transforms: how many there were.
        num_steps: how many rows of a batch belong together, one behind another.
        others: the transforms that know batches alone.
    """

    def __init__(self, sampler: Sampler, unit: EpisodeSequence | None, transform: Compose) -> None:
        layers = sampler.layers if isinstance(sampler, OwnSampler) else []
        self._slots: Callable[..., tuple[torch.Tensor, Entries]] = (
            sampler.sample if layers else partial(_live, sampler)
        )
        self._unit, self.num_steps = unit, 1 if unit is None else unit.num_steps
        parts = parts_of(transform)
        # The public accessors of a module take several times as long.
        self.transforms = transform._modules["transforms"]._modules
        self.num_transforms = len(self.transforms)
        replayed = [part for part in parts if isinstance(part, ReplayTransform)]
        self.others = [part for part in parts if not isinstance(part, ReplayTransform)]
        refuse_stock(*self.others)
        written = [part.goal_key for part in replayed if part.uses_goals]
        drawn = [layer.goal_key for layer in layers if isinstance(layer, HERSampler)]
        self._unwritten = [] if None in written else [key for key in drawn if key not in written]
        # Those that need nothing more are not asked each time.
        prepared = [it for it in replayed if type(it).prepare is not ReplayTransform.prepare]
        self._prepares = [part.prepare for part in prepared]
        self._replays = [
            part.replay if isinstance(part, ReplayTransform) else partial(_transform, part)
            for part in parts
        ]

    def draw(self, storage: PackedStorage, batch_size: int) -> Batch:
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

    def draw_beside_writer(
        self, storage: PackedStorage, batch_size: int
    ) -> tuple[TensorDictBase, Entries]:
        """Draws a batch, all rows of which were live until all that they need was read.

        Those that were not come from further batches. So a reader gets on, however fast the writer is.
        """
        batch, info, gone = self._draw_and_look(storage, batch_size)
        while gone.any():
            other, others, is_gone = self._draw_and_look(storage, batch_size)
            if len(gone) != batch.numel():  # a transform has made something else of the rows
                batch, info, gone = other, others, is_gone
                continue
            taken = gone & ~is_gone
            batch = torch.where(taken.view(batch.batch_size).to(other.device), other, batch)
            for key, value in info.items():
                info[key] = torch.where(expand_as_right(taken, value), others[key], value)
            gone &= ~taken
        return batch, info

    def _draw_and_look(self, storage: PackedStorage, batch_size: int) -> tuple[Any, Entries, Any]:
        """Draws a batch, and says of which of its rows `[B]` something may have given way."""
        seen: Any = storage.look()
        batch, info, slots = self.draw(storage, batch_size)
        found = torch.zeros_like(slots[0], dtype=torch.bool)
        for read in slots:
            gone = storage.gave_way(seen, read)
            # What was read of other rows may have been for any.
            is_of_rows = gone.shape[-1:] == found.shape
            found |= gone.reshape(-1, len(found)).any(0) if is_of_rows else gone.any()
        # The rows of a sequence belong together.
        S = self.num_steps
        return batch, info, found.view(-1, S).any(1).repeat_interleave(S)


def _live(
    sampler: Sampler, storage: PackedStorage, batch_size: int
) -> tuple[torch.Tensor, Entries]:
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
        by_age = storage.episodes.slots_by_age().numpy()
        batch, gone = storage.read(torch.from_numpy(by_age[index].copy()), seen)
        return batch if gone is None else batch[~gone]
    if isinstance(index, tuple):
        raise TypeError(
            f"an index must be a slice, an int, a list, a mask, integer slots or a key, got {index!r}."
        )
    slots = arguments.values("index", index)
    is_mask = slots.dtype is torch.bool
    return storage.get(arguments.slots(slots.nonzero().squeeze(-1) if is_mask else slots))


def draw_episodes(
    storage: PackedStorage, n: int, generator: torch.Generator | None
) -> TensorDictBase:
    """Draws whole, finished episodes `[n, T]`, padded with zeros where the mask says so.

    Those that gave way while they were read are drawn again.
    """
    parts: list[TensorDictBase] = []
    while (missing := n - sum(map(len, parts))) > 0:
        parts.append(_draw_episodes(storage, missing, generator))
    if len(parts) == 1:
        return parts[0]
    longest = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, [0, 0, 0, longest - part.shape[1]]) for part in parts])


def _draw_episodes(
    storage: PackedStorage, n: int, generator: torch.Generator | None
) -> TensorDictBase:
    """Returns those of n drawn episodes that did not give way meanwhile."""
    episodes, seen = storage.episodes, storage.look()
    first = episodes.random_episodes(n, generator)
    length = episodes.ahead(first) + 1
    step = torch.arange(int(length.max())).expand(n, -1)
    offset = step.minimum(length[:, None] - 1)
    slots = episodes.shift(first[:, None], offset)
    batch, gone = storage.read(slots, seen)
    mask = (step < length[:, None]).to(storage.device)
    batch = batch.masked_fill_(~mask, 0)
    batch = batch.set(keys.INDEX, slots.to(storage.device)).set(keys.MASK, mask)
    return batch if gone is None else batch[~gone.any(1)]


def drawn_priorities(
    data: TensorDictBase,
    priority_key: NestedKey,
    priority: torch.Tensor | None,
    reduction: str,
    num_steps: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the drawn slots, their new priorities, and the steps that they were drawn as.

    Args:
        data: a sampled batch of any batch size; sequences as `[n * S]` or `[n, S]`, or with batch size
            `[n]` and entries `[n, S, ...]`.
        priority_key: entry of the priorities.
        priority: the priorities if they are not an entry of `data`. One per row (`[N]`, `[n, S]`) or one
            per sequence (`[n]`); trailing dimensions are allowed.
        reduction: how several values of one row become one: "max", "min", "mean" or "median".
        num_steps: S; the anchor gets the largest priority of its sequence's valid learning steps.

    Raises:
        KeyError: the batch lacks the priorities, or the entries that say which rows were drawn.
        ValueError: the priorities do not fit the rows, as `[N, N]` does not that comes of `[N]` and
            `[N, 1]`; or the batch does not consist of whole sequences.
    """
    anchors = data.get(keys.ANCHOR_INDEX, None)
    slots = data[keys.INDEX] if anchors is None else anchors
    priority = data[priority_key] if priority is None else arguments.values("priority", priority)
    # The batch size may be [n], with the rows of each sequence as a dimension of the entries.
    rows, given, priority = slots.shape, priority.shape, priority.detach()
    num_rows, S = rows.numel(), 1 if anchors is None else num_steps
    shape = num_rows // S, S
    is_of_sequences = anchors is not None and given in ((shape[0],), (shape[0], 1))
    is_of_rows = any(given[: len(size)] == size for size in (rows, (num_rows,), shape))
    is_spread = num_rows > 1 and given.numel() == num_rows**2
    if num_rows % S or not (is_of_sequences or (is_of_rows and not is_spread)):
        raise ValueError(
            f"there must be one priority a row, {[*rows]}, or one for all {S} rows of a sequence, got "
            f"{[*given]}, as arithmetic of {[*rows]} with {[*rows, 1]} makes. Nothing was updated."
        )
    steps = data.get(keys.PRIORITY_STAMP, None)
    if anchors is None:
        return slots, one_each(priority, num_rows, reduction), steps
    steps = None if steps is None else steps.reshape(shape)[:, 0]
    if is_of_sequences:
        values = priority.reshape(-1, 1)
    else:
        values = one_each(priority, num_rows, reduction).reshape(shape)
        learnt = data[keys.VALIDITY_MASK] & data[keys.LEARNING_MASK]
        values = torch.where(learnt.reshape(shape), values, 0)
    return slots.reshape(shape)[:, 0], values.amax(1), steps


def one_each(priority: torch.Tensor, num_rows: int, reduction: str) -> torch.Tensor:
    """Reduces the values of each row to one, `[N]`."""
    if priority.numel() == num_rows:
        return priority.flatten()
    return REDUCTIONS[reduction](priority.reshape(num_rows, -1), 1)
