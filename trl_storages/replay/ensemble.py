"""Samples one batch from several storages.

Letters: B samples of a batch, S rows of each (1 without a sample unit).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import PrioritizedSampler

from trl_storages import arguments, keys
from trl_storages._torchrl import set_entry
from trl_storages.attributes import Strict
from trl_storages.functional.draws import even_order, num_of_each
from trl_storages.kernels.memory import on_device
from trl_storages.replay.batches import BatchSource
from trl_storages.replay.container import ReplayStorage
from trl_storages.replay.explain import Explanation
from trl_storages.rows import RowView
from trl_storages.rows.row_view import joined
from trl_storages.samplers import PERSampler, layers_of

__all__ = ["ReplayStorageEnsemble"]

# Sampler entries, and their defaults for rows drawn by a sampler that lacks them.
_WITHOUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    keys.PRIORITY_WEIGHT: lambda index: torch.ones_like(index, dtype=torch.float32),
    keys.PRIORITY_STAMP: lambda index: torch.zeros_like(index, dtype=torch.int32),
    keys.HER_MASK: lambda index: torch.zeros_like(index, dtype=torch.bool),
    keys.GOAL_INDEX: lambda index: index,
}


class ReplayStorageEnsemble(BatchSource, Strict):
    """Mixes several storages in each batch at fixed shares, such as half offline, half online data.

    Each storage uses its own sampler and transforms. Of B samples each contributes exactly its share,
    rounded by largest remainder, spread evenly through the batch: if the batch is split for several
    updates, each part keeps the shares.

    `sample` returns a TensorDict `[B * S]` of the storages' common entries, and `buffer_ids`. If the
    batches are incompatible (ValueError) or a storage can't give its share (RuntimeError), the
    generators and phases of all storages are restored.

    `buffer_ids` names each row's storage, and `index` its slot there. The importance weights are
    (N P(i))^-beta within the row's own storage, divided by the batch maximum whatever the sampler's
    `normalize`; rows of a uniform storage weigh 1 before that division.

    Write to and save the storages individually.

    Args:
        *storages: `ReplayStorage`s whose batches have the same entries and number of rows per sample.
        shares: each storage's fraction of the batch, summing to 1; None is equal shares. May be set
            later.
        batch_size: B; None requires it with each `sample`.
        generator: used by all storages from now on; None keeps each storage's own.

    Raises:
        TypeError: one is not a `ReplayStorage`.
        ValueError: there are none, one is repeated, the shares do not fit, or one uses TorchRL's
            prioritized sampler, which can't skip rows of other storages.

    Reference: Ball et al. 2023, Efficient Online Reinforcement Learning with Offline Data (RLPD),
    arXiv:2302.02948.

    >>> from tensordict import TensorDict
    >>> from trl_storages import PackedStorage
    >>> offline, online = (ReplayStorage(storage=PackedStorage(100)) for _ in range(2))
    >>> for storage, size in ((offline, 100), (online, 3)):
    ...     done = torch.zeros(size, 1, dtype=torch.bool)
    ...     _ = storage.extend(TensorDict({"action": torch.rand(size), "next": {"done": done}}, [size]))
    >>> ensemble = ReplayStorageEnsemble(offline, online, shares=(0.75, 0.25), batch_size=8)
    >>> ensemble.sample()["buffer_ids"].tolist()
    [0, 0, 1, 0, 0, 0, 1, 0]
    """

    # Default for objects whose constructor raised.
    _storages: tuple[ReplayStorage, ...] = ()

    def __init__(
        self,
        *storages: ReplayStorage,
        shares: Sequence[float] | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        for storage in storages:
            arguments.instance("storages", storage, ReplayStorage, what="ReplayStorages")
        if not storages or len({id(storage) for storage in storages}) < len(storages):
            raise ValueError(f"storages must be different ones, at least one, got {len(storages)}.")
        self._storages = storages
        for storage in storages:
            _prioritized_of(storage)
        self.shares = (1 / len(storages),) * len(storages) if shares is None else shares
        batch_size = arguments.optional(arguments.integer, "batch_size", batch_size, at_least=1)
        self._batch_size = batch_size
        if arguments.generator("generator", generator) is not None:
            for storage in storages:
                storage.set_rng(generator)
        # Cache: counts, S and device of the last batch, its row order and its storage ids.
        self._order: tuple[Any, torch.Tensor, torch.Tensor] = (None, torch.empty(0), torch.empty(0))

    @property
    def storages(self) -> tuple[ReplayStorage, ...]:
        """The storages; `buffer_ids` are positions in this tuple."""
        return self._storages

    @property
    def shares(self) -> tuple[float, ...]:
        """Each storage's fraction of the batch."""
        return self._shares

    @shares.setter
    def shares(self, value: Sequence[float]) -> None:
        what = f"{len(self._storages)} numbers, one for each storage"
        if isinstance(value, torch.Tensor | np.ndarray):
            value = value.tolist()
        arguments.instance("shares", value, (list, tuple), what=what)
        shares = tuple(arguments.number("shares", each, at_least=0, at_most=1) for each in value)
        if len(shares) != len(self._storages) or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"shares must be {what}, which add up to 1, got {shares}.")
        self._shares = shares

    @property
    def batch_size(self) -> int | None:
        """B, or None if each `sample` must name it."""
        return self._batch_size

    def __len__(self) -> int:
        """Total number of rows in all storages."""
        return sum(map(len, self._storages))

    # Sampling

    def _counts(self, batch_size: int | None) -> list[int]:
        """Returns how many samples each storage gives."""
        batch_size = self._batch_size if batch_size is None else batch_size
        if batch_size is None:
            raise RuntimeError("batch_size must be given to the ensemble, or with each sample.")
        return num_of_each(arguments.integer("batch_size", batch_size, at_least=1), self._shares)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether every storage can give its share.

        Args:
            batch_size: B; None uses the constructor's.
        """
        counts = zip(self._storages, self._counts(batch_size), strict=True)
        return all(not count or storage.can_sample(count) for storage, count in counts)

    def _sample_checked(self, batch_size: int | None, return_info: bool) -> Any:
        counts = self._counts(batch_size)
        drawn: dict[int, RowView] = {}
        names = {keys.BUFFER_IDS}
        try:
            for number, count in enumerate(counts):
                if count:
                    drawn[number], info = self._draw(number, count)
                    names.update(info)
            batch = self._joined(drawn, counts, names)
        except RuntimeError as error:
            self._check_shares(counts, error)
            raise
        if not return_info:
            return batch
        return batch, {name: batch.get(name) for name in sorted(names)}

    def _check_shares(self, counts: list[int], error: Exception) -> None:
        """Raises a RuntimeError from `error` if a storage can't give its share."""
        for number, (storage, count) in enumerate(zip(self._storages, counts, strict=True)):
            if count and not storage.can_sample(count):
                raise RuntimeError(
                    f"storage {number} of the ensemble must give {count} samples, but it holds "
                    f"{len(storage)} rows and can't: write to it, or set its share to 0."
                ) from error

    def _draw(self, number: int, count: int) -> tuple[RowView, dict[str, Any]]:
        """Draws from one storage, with unnormalised weights."""
        storage = self._storages[number]
        # Not `sample`: prefetched batches have other sizes and normalised weights.
        with storage._replay_lock:
            sampler = _prioritized_of(storage)
            with nullcontext() if sampler is None else sampler.plain_weights():
                return storage._sample_part(count)

    def _joined(
        self, drawn: dict[int, RowView], counts: list[int], names: set[str]
    ) -> TensorDictBase:
        """Merges the storages' rows into one batch.

        Args:
            drawn: storage number -> its rows, where it contributes any.
            counts: samples of each storage.
            names: entries set by the samplers.
        """
        views = [*drawn.values()]
        num_steps = _num_steps(views, [count for count in counts if count])
        said = [key for key in _WITHOUT if key in names and any(key in view for view in views)]
        for view in views:
            for key in said:
                if key not in view:
                    view[key] = _WITHOUT[key](view[keys.INDEX])
        order, ids = self._order_of(counts, num_steps, views[0][keys.INDEX].device)
        batch: Any = joined(views, order)
        if batch is None:
            # Their packed layouts differ.
            batches = {number: it.tensordict() for number, it in drawn.items()}
            _check_alike(batches)
            batch = torch.cat([*batches.values()])[order]
        set_entry(batch, keys.BUFFER_IDS, ids.clone())
        if keys.PRIORITY_WEIGHT in said:
            weight = batch.get(keys.PRIORITY_WEIGHT)
            set_entry(batch, keys.PRIORITY_WEIGHT, weight / weight.amax())
        if (sequence := batch.get(keys.SEQUENCE_ID, None)) is not None:
            number_of = torch.arange(sum(counts), device=sequence.device)
            batch.set(keys.SEQUENCE_ID, number_of.repeat_interleave(num_steps))
        return batch

    def _order_of(
        self, counts: list[int], num_steps: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `[B * S]` positions in the concatenated rows, and `[B * S]` storage ids."""
        made_for = counts, num_steps, device
        # Read and replaced as a whole, as several threads may draw.
        made = self._order
        if made[0] != made_for:
            step = torch.arange(num_steps)
            order = (even_order(counts).unsqueeze(1) * num_steps + step).flatten()
            ids = torch.cat([torch.full((n * num_steps,), at) for at, n in enumerate(counts)])
            ids = ids.index_select(0, order)
            made = self._order = made_for, on_device(order, device), on_device(ids, device)
        return made[1:]

    # Priorities

    def update_tensordict_priority(
        self, data: TensorDictBase, priority: torch.Tensor | None = None
    ) -> None:
        """Updates the priorities of a batch, each row in its own storage.

        Args:
            data: a sampled batch, as in `ReplayStorage.update_tensordict_priority`.
            priority: as there.

        Raises:
            KeyError: the batch has no `buffer_ids`, or was drawn by priority but holds none.
            ValueError: as in `ReplayStorage.update_tensordict_priority`.
        """
        arguments.steps("data", data)
        ids = self._ids_of(data)
        key = keys.INDEX if data.get(keys.ANCHOR_INDEX, None) is None else keys.ANCHOR_INDEX
        if (index := data.get(key, None)) is None:
            raise KeyError(
                f"the batch lacks its entry {key!r}, the rows drawn: pass what sample() returned."
            )
        self._check_rows(index, ids)
        for number, storage in enumerate(self._storages):
            # Slot -1 is skipped. Selecting rows with a mask would synchronise with the device.
            own = data.copy().set(key, torch.where(ids == number, index, -1))
            if _prioritized_of(storage) is not None:
                storage.update_tensordict_priority(own, priority)

    def update_priority(
        self, index: torch.Tensor, priority: torch.Tensor, buffer_ids: torch.Tensor
    ) -> None:
        """Updates priorities by slot, each in its own storage.

        Args:
            index: `[B]` int64 slots.
            priority: `[B]`, finite, at least 0.
            buffer_ids: `[B]` int64, the storage of each row.

        Raises:
            ValueError: a priority is NaN, negative or infinite, shapes differ, or there is no such
                storage.
            IndexError: a storage has no such slot. Nothing has changed then.
        """
        index = torch.as_tensor(arguments.slots("index", index))
        buffer_ids = torch.as_tensor(arguments.slots("buffer_ids", buffer_ids))
        priority = arguments.values("priority", priority)
        if buffer_ids.shape != index.shape:
            raise ValueError(
                f"buffer_ids must have the shape of index, {[*index.shape]}, got {[*buffer_ids.shape]}."
            )
        self._check_rows(index, buffer_ids)
        for number, storage in enumerate(self._storages):
            if _prioritized_of(storage) is not None:
                own = torch.where(buffer_ids == number, index, -1)
                storage.update_priority(own, priority)

    def _check_rows(self, index: torch.Tensor, ids: torch.Tensor) -> None:
        """Raises on invalid ids or slots, before any storage is updated."""
        if index.is_cuda or ids.is_cuda:
            # The check would synchronise with the device.
            return
        number = len(self._storages)
        strange = ids[(ids < 0) | (ids >= number)]
        if strange.numel():
            raise ValueError(
                f"buffer_ids must be numbers of storages, below {number}, got {int(strange[0])}: pass "
                "those of a batch that this ensemble drew."
            )
        # Rows in a directory have more slots than there are rows.
        sizes = torch.tensor([storage.episodes.num_slots for storage in self._storages])
        if (beyond := index >= sizes[ids.long()]).any():
            slot, number = int(index[beyond][0]), int(ids[beyond][0])
            raise IndexError(
                f"index must be below {int(sizes[number])}, the number of slots of storage {number}, got "
                f"{slot}."
            )

    def _ids_of(self, data: TensorDictBase) -> torch.Tensor:
        ids: torch.Tensor | None = data.get(keys.BUFFER_IDS, None)
        if ids is None:
            raise KeyError(
                f"the batch lacks {keys.BUFFER_IDS!r}, the storage of each row: pass what was sampled."
            )
        return ids

    # Inspection

    def explain(self, batch: TensorDictBase) -> Explanation:
        """Reports each sample's storage, and what that storage reports of it; prints as a table.

        Args:
            batch: sampled here; its rows must not have been overwritten since.

        Returns:
            columns as in `ReplayStorage.explain`, and `storage`.

        Raises:
            KeyError: the batch has no `buffer_ids`.
            ValueError: some of its rows are no longer stored.
        """
        flat = arguments.steps("batch", batch).reshape(-1)
        ids = self._ids_of(flat)
        parts, places = [], []
        for number, storage in enumerate(self._storages):
            (place,) = torch.where(ids == number)
            if len(place):
                parts.append(storage.explain(flat[place]).columns)
                places.append(place)
        order = torch.cat(places).argsort()
        columns = {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
        return Explanation({"storage": ids, **columns}, len(self))

    def __repr__(self) -> str:
        lines = "".join(
            f"\n    {share:g} of {str(storage).replace(chr(10), chr(10) + '    ')},"
            for share, storage in zip(self._shares, self._storages, strict=True)
        )
        return f"{type(self).__name__}({lines}\n    batch_size={self._batch_size})"


def _prioritized_of(storage: ReplayStorage) -> PERSampler | None:
    """Returns the sampler of a storage that draws by priority, which `set_sampler` may replace.

    Raises:
        ValueError: it is TorchRL's, which can't skip rows of other storages.
    """
    sampler = layers_of(storage._sampler)[-1]
    if isinstance(sampler, PrioritizedSampler) and not isinstance(sampler, PERSampler):
        raise ValueError(
            f"storages must draw by priority with PERSampler, got {type(sampler).__name__}: pass "
            "sampler=PERSampler(capacity) where the storage is made."
        )
    return sampler if isinstance(sampler, PERSampler) else None


def _num_steps(views: Sequence[RowView], counts: Sequence[int]) -> int:
    """Returns S, the rows per sample, which must be the same in all views."""
    sizes = [len(view.slots) for view in views]
    rows = {size / count for size, count in zip(sizes, counts, strict=True)}
    if len(rows) > 1:
        raise ValueError(
            f"the storages of an ensemble must give equally many rows a sample, got {sizes} rows of "
            f"{[*counts]} samples: give all of them one sample_unit, or none."
        )
    return int(rows.pop())


def _check_alike(batches: dict[int, TensorDictBase]) -> None:
    """Raises a ValueError if entries differ from the first batch's: in dtype, row shape or device."""
    kinds = {
        number: {
            key: f"{value.dtype} {list(value.shape[1:])} on {value.device}"
            for key, value in batch.items(True, True)
        }
        for number, batch in batches.items()
    }
    first, own = next(iter(kinds.items()))
    if differences := [
        f"{key!r} is {own.get(key, 'missing')} in storage {first} and {other.get(key, 'missing')} in "
        f"storage {number}"
        for number, other in kinds.items()
        for key in own | other
        if own.get(key) != other.get(key)
    ]:
        raise ValueError(
            f"the batches of an ensemble must have the same entries, but {'; '.join(differences)}. Leave "
            "it out, or convert it, by a transform of one (ExcludeTransform, DTypeCastTransform)."
        )
