"""Samples one batch from several replay buffers.

Letters: B samples of a batch, S transitions of a sample (1 without a sample unit).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase

from trl_storages import keys, validation
from trl_storages.buffer.explain import Explanation
from trl_storages.buffer.replay_storage import ReplayStorage
from trl_storages.entries.layout import nest, nested_sizes
from trl_storages.functional import even_order, num_of_each
from trl_storages.settings import Setting, Strict

__all__ = ["ReplayStorageEnsemble"]

# Entries that some samplers add -> their values for transitions from other samplers, from the slots.
_DEFAULTS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    keys.PRIORITY_WEIGHT: lambda slots: torch.ones_like(slots, dtype=torch.float32),
    keys.HER_MASK: lambda slots: torch.zeros_like(slots, dtype=torch.bool),
    keys.GOAL_INDEX: torch.clone,
    keys.STEPS_TO_NEXT_OBS: lambda slots: torch.ones_like(slots).unsqueeze(-1),
}
# Dtypes that index_select does not support -> dtypes of the same size.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class ReplayStorageEnsemble(Strict):
    """Mixes several replay buffers in each batch at fixed ratios, such as half offline, half online.

    Each buffer samples with its own sampler and transforms. The number of samples from a buffer is its
    ratio of B, rounded by largest remainder. Samples of the buffers alternate evenly, so a batch that is
    split for several updates keeps the ratios in each part.

    Importance weights are (N P(i))^-beta within the buffer of a transition, where uniform buffers have
    weight 1. The weights are divided by the largest weight of the batch; `normalize` is ignored. Write to
    the buffers themselves, and save them one by one.

    Args:
        *storages: the replay buffers. Their batches must have the same fields and the same number of
            transitions per sample.
        shares: mixing ratios of the buffers, which add up to 1; None mixes equally. May be set later.
        batch_size: B; None requires a size with each `sample`.
        generator: random numbers of all buffers; None keeps the generator of each buffer.

    Raises:
        TypeError: an argument is not a `ReplayStorage`.
        ValueError: there is no buffer, one is repeated, or the shares do not fit.

    Reference: Ball et al. 2023, Efficient Online Reinforcement Learning with Offline Data (RLPD),
    arXiv:2302.02948.

    >>> from tensordict import TensorDict
    >>> from trl_storages import PackedStorage
    >>> offline, online = (ReplayStorage(storage=PackedStorage(100)) for _ in range(2))
    >>> for buffer, size in ((offline, 100), (online, 3)):
    ...     done = torch.zeros(size, 1, dtype=torch.bool)
    ...     _ = buffer.extend(TensorDict({"action": torch.rand(size), "next": {"done": done}}, [size]))
    >>> ensemble = ReplayStorageEnsemble(offline, online, shares=(0.75, 0.25), batch_size=8)
    >>> ensemble.sample()["buffer_ids"].tolist()
    [0, 0, 1, 0, 0, 0, 1, 0]
    """

    #: `buffer_ids` are positions in this tuple.
    storages: tuple[ReplayStorage, ...] = ()
    #: B; None requires a size with each `sample`.
    batch_size: int | None = Setting(  # type: ignore[assignment]
        partial(validation.optional, validation.integer), at_least=1
    )

    def __init__(
        self,
        *storages: ReplayStorage,
        shares: Sequence[float] | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        for storage in storages:
            validation.instance("storages", storage, ReplayStorage, what="ReplayStorages")
        if not storages or len({id(storage) for storage in storages}) < len(storages):
            raise ValueError(
                f"storages must be different buffers, at least one, got {len(storages)}."
            )
        self.storages = storages
        self.shares = (1 / len(storages),) * len(storages) if shares is None else shares
        self.batch_size = batch_size
        if generator is not None:
            for storage in storages:
                storage.set_rng(generator)

    @property
    def shares(self) -> tuple[float, ...]:
        """Mixing ratios of the buffers, which add up to 1."""
        return self._shares

    @shares.setter
    def shares(self, value: Sequence[float]) -> None:
        shares = validation.values("shares", value, dtype=torch.float64)
        number = len(self.storages)
        if shares.shape != (number,) or (shares < 0).any() or not abs(shares.sum() - 1) < 1e-6:
            raise ValueError(
                f"shares must be {number} numbers that add up to 1, one per buffer, got {value}."
            )
        self._shares = tuple(shares.tolist())

    def __len__(self) -> int:
        """The number of transitions in all buffers."""
        return sum(map(len, self.storages))

    # Sampling

    def _counts(self, batch_size: int | None) -> list[int]:
        """Returns the number of samples from each buffer."""
        batch_size = self.batch_size if batch_size is None else batch_size
        if batch_size is None:
            raise RuntimeError("batch_size is missing: pass it to the ensemble or to sample().")
        return num_of_each(validation.integer("batch_size", batch_size, at_least=1), self._shares)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether a batch can be sampled; `batch_size` defaults to the constructor's."""
        counts = zip(self.storages, self._counts(batch_size), strict=True)
        return all(not count or storage.can_sample(count) for storage, count in counts)

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Samples a batch.

        Args:
            batch_size: B; None uses the constructor's.

        Returns:
            TensorDict `[B * S]` with the fields of the buffers' batches, `buffer_ids`, the number of the
            buffer of each transition, and `index`, the slot in that buffer.

        Raises:
            RuntimeError: a buffer cannot sample its share, or no batch size is known.
            ValueError: the buffers' batches have different fields.
        """
        counts = self._counts(batch_size)
        pairs = [pair for pair in zip(self.storages, counts, strict=True) if pair[1]]
        batches = [storage.sample_share(count) for storage, count in pairs]
        first = batches[0]
        # Dicts, because operations on TensorDicts take four times as long.
        fields = [dict(batch.items(True, True)) for batch in batches]
        added = [key for key in _DEFAULTS if any(key in values for values in fields)]
        for values in fields:
            values |= {k: _DEFAULTS[k](values[keys.INDEX]) for k in added if k not in values}
        _check_alike(fields, [count for _, count in pairs])
        num_steps = len(first) // pairs[0][1]
        order, ids = (it.to(first.device) for it in _order_of(tuple(counts), num_steps))
        mixed = {
            key: _reorder(torch.cat([values[key] for values in fields]), order) for key in fields[0]
        }
        mixed[keys.BUFFER_IDS] = ids.clone()
        if keys.PRIORITY_WEIGHT in mixed:
            mixed[keys.PRIORITY_WEIGHT] /= mixed[keys.PRIORITY_WEIGHT].amax()
        if keys.SEQUENCE_ID in mixed:
            mixed[keys.SEQUENCE_ID] = torch.arange(len(ids), device=first.device) // num_steps
        return nest(mixed, ids.shape, first.device, nested_sizes(first, 1))

    batches = ReplayStorage.batches

    # Priorities

    def update_tensordict_priority(
        self, data: TensorDictBase, priority: torch.Tensor | None = None
    ) -> None:
        """Updates the priorities of a sampled batch, those of each transition in its buffer.

        Args:
            data: as in `ReplayStorage.update_tensordict_priority`, with `buffer_ids`.
            priority: as in `ReplayStorage.update_tensordict_priority`.

        Raises:
            KeyError, ValueError: as in `ReplayStorage.update_tensordict_priority`.
        """
        ids = validation.tensordict("data", data)[keys.BUFFER_IDS]
        key = keys.ANCHOR_INDEX if keys.ANCHOR_INDEX in data.keys(True) else keys.INDEX
        index = data[key]
        for number, storage in enumerate(self.storages):
            # Slot -1 is skipped.
            part = data.copy().set(key, torch.where(ids == number, index, -1))
            storage.update_tensordict_priority(part, priority)

    # Inspection

    def explain(self, batch: TensorDictBase) -> Explanation:
        """Reports the buffer of each sample, and the `explain` of that buffer; prints as a table.

        Raises:
            KeyError: the batch has no `buffer_ids`.
            IndexError: a transition of the batch was overwritten since.
        """
        flat = validation.tensordict("batch", batch).reshape(-1)
        ids = flat[keys.BUFFER_IDS].cpu()
        positions = [torch.where(ids == number)[0] for number in range(len(self.storages))]
        pairs = zip(self.storages, positions, strict=True)
        parts = [storage.explain(flat[at]).columns for storage, at in pairs if len(at)]
        order = torch.cat(positions).argsort()
        columns = {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
        return Explanation({"storage": ids, **columns}, len(self))

    def __repr__(self) -> str:
        parts = zip(self._shares, self.storages, strict=True)
        return f"{type(self).__name__}({', '.join(f'{share:g} of {it}' for share, it in parts)})"


@lru_cache(maxsize=16)
def _order_of(counts: tuple[int, ...], num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `[B * S]` order of the concatenated transitions in the batch, and numbers of buffers."""
    with torch.device("cpu"):
        order = (even_order(counts).unsqueeze(1) * num_steps + torch.arange(num_steps)).flatten()
        ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts) * num_steps)
    return order, ids[order]


def _reorder(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Returns `values[order]` in half the time."""
    if (signed := _SIGNED.get(values.dtype)) is None:
        return values.index_select(0, order)
    return values.view(signed).index_select(0, order).view(values.dtype)


def _check_alike(batches: list[dict[NestedKey, torch.Tensor]], counts: list[int]) -> None:
    """Raises a ValueError if fields differ in dtype, shape, transitions per sample, or device."""
    kinds: list[set[Any]] = [
        {(key, it.dtype, it.shape[1:], len(it) / count, it.device) for key, it in batch.items()}
        for batch, count in zip(batches, counts, strict=True)
    ]
    if differing := set.union(*kinds) - set.intersection(*kinds):
        raise ValueError(
            "the batches of an ensemble must have the same fields, dtypes, shapes and transitions per "
            f"sample, but differ in {sorted({str(key) for key, *_ in differing})}: drop or convert "
            "fields by a transform, or pass the same sample_unit to all buffers."
        )
