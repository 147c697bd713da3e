"""Samples one batch from several storages.

Letters: B samples of a batch, S rows of each (1 without a sample unit).
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

# Entries of samplers, and what they are of rows that were drawn without such a sampler.
_WITHOUT: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    keys.PRIORITY_WEIGHT: lambda index: torch.ones_like(index, dtype=torch.float32),
    keys.PRIORITY_STAMP: torch.zeros_like,
    keys.HER_MASK: lambda index: torch.zeros_like(index, dtype=torch.bool),
    keys.GOAL_INDEX: torch.clone,
    keys.STEPS_TO_NEXT_OBS: lambda index: torch.ones_like(index).unsqueeze(-1),
}
# Dtypes that index_select lacks, and those of the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class ReplayStorageEnsemble(Strict):
    """Mixes several storages in each batch at fixed shares, such as half offline, half online data.

    Each storage draws with its own sampler and transforms. Of B samples each gives exactly its share,
    rounded by largest remainder and spread evenly: a batch that is split for several updates keeps the
    shares in each part.

    Importance weights are (N P(i))^-beta within the row's own storage, divided by the largest of the
    batch, whatever `normalize` says; rows of a uniform storage weigh 1 before that division. Write to
    the storages themselves, and save them one by one.

    Args:
        *storages: their batches must have the same entries and number of rows per sample.
        shares: each storage's part of the batch, which add up to 1; None is equal shares. May be set
            later.
        batch_size: B; None requires it with each `sample`.
        generator: of all draws from now on; None leaves each storage its own.

    Raises:
        TypeError: one is not a `ReplayStorage`.
        ValueError: there are none, one is repeated, or the shares do not fit.

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

    #: `buffer_ids` are positions in this tuple.
    storages: tuple[ReplayStorage, ...] = ()
    #: B, or None if each `sample` must name it.
    batch_size: Any = Setting(partial(validation.optional, validation.integer), at_least=1)

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
            raise ValueError(f"storages must be different ones, at least one, got {len(storages)}.")
        self.storages = storages
        self.shares = (1 / len(storages),) * len(storages) if shares is None else shares
        self.batch_size = batch_size
        if generator is not None:
            for storage in storages:
                storage.set_rng(generator)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each storage's part of the batch."""
        return self._shares

    @shares.setter
    def shares(self, value: Sequence[float]) -> None:
        shares = validation.values("shares", value, dtype=torch.float64)
        number = len(self.storages)
        if shares.shape != (number,) or (shares < 0).any() or not abs(shares.sum() - 1) < 1e-6:
            raise ValueError(
                f"shares must be {number} numbers, one a storage, which add up to 1, got {value}."
            )
        self._shares = tuple(shares.tolist())

    def __len__(self) -> int:
        """The number of rows in all storages."""
        return sum(map(len, self.storages))

    # Sampling

    def _counts(self, batch_size: int | None) -> list[int]:
        """Returns how many samples each storage gives."""
        batch_size = self.batch_size if batch_size is None else batch_size
        if batch_size is None:
            raise RuntimeError("batch_size must be given to the ensemble, or with each sample.")
        return num_of_each(validation.integer("batch_size", batch_size, at_least=1), self._shares)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether every storage can give its share of `batch_size`, or of B."""
        counts = zip(self.storages, self._counts(batch_size), strict=True)
        return all(not count or storage.can_sample(count) for storage, count in counts)

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Draws a batch.

        Args:
            batch_size: B; None uses the constructor's.

        Returns:
            TensorDict `[B * S]` of the entries that the storages' batches have, with `buffer_ids`, the
            number of each row's storage, and `index`, its slot there.

        Raises:
            RuntimeError: a storage can't give its share, or no batch size is known.
            ValueError: the storages' batches have different entries.
        """
        counts = self._counts(batch_size)
        given = [pair for pair in zip(self.storages, counts, strict=True) if pair[1]]
        drawn = [storage.sample_share(count) for storage, count in given]
        like = drawn[0]
        # A TensorDict does the same in four times the time.
        leaves = [dict(batch.items(True, True)) for batch in drawn]
        known = [key for key in _WITHOUT if any(key in own for own in leaves)]
        for own in leaves:
            own |= {key: _WITHOUT[key](own[keys.INDEX]) for key in known if key not in own}
        _check_alike(leaves, [count for _, count in given])
        num_steps = len(like) // given[0][1]
        order, ids = (it.to(like.device) for it in _order_of(tuple(counts), num_steps))
        batch = {
            key: _reordered(torch.cat([own[key] for own in leaves]), order) for key in leaves[0]
        }
        batch[keys.BUFFER_IDS] = ids.clone()
        if keys.PRIORITY_WEIGHT in batch:
            batch[keys.PRIORITY_WEIGHT] /= batch[keys.PRIORITY_WEIGHT].amax()
        if keys.SEQUENCE_ID in batch:
            batch[keys.SEQUENCE_ID] = torch.arange(len(ids), device=like.device) // num_steps
        return nest(batch, ids.shape, like.device, nested_sizes(like, 1))

    batches = ReplayStorage.batches

    # Priorities

    def update_tensordict_priority(
        self, data: TensorDictBase, priority: torch.Tensor | None = None
    ) -> None:
        """Updates the priorities of a drawn batch, each row in its own storage.

        Args:
            data: as in `ReplayStorage.update_tensordict_priority`, with its `buffer_ids`.
            priority: as there.

        Raises:
            KeyError, ValueError: as there. Nothing is changed then.
        """
        ids = validation.tensordict("data", data)[keys.BUFFER_IDS]
        key = keys.ANCHOR_INDEX if keys.ANCHOR_INDEX in data.keys(True) else keys.INDEX
        index = data[key]
        for number, storage in enumerate(self.storages):
            # Slot -1 is skipped.
            own = data.copy().set(key, torch.where(ids == number, index, -1))
            storage.update_tensordict_priority(own, priority)

    # Inspection

    def explain(self, batch: TensorDictBase) -> Explanation:
        """Reports each sample's storage, and what that storage reports of it; prints as a table.

        Raises:
            KeyError: the batch has no `buffer_ids`.
            IndexError: some of its rows are no longer stored.
        """
        flat = validation.tensordict("batch", batch).reshape(-1)
        ids = flat[keys.BUFFER_IDS].cpu()
        places = [torch.where(ids == number)[0] for number in range(len(self.storages))]
        pairs = zip(self.storages, places, strict=True)
        parts = [storage.explain(flat[at]).columns for storage, at in pairs if len(at)]
        order = torch.cat(places).argsort()
        columns = {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
        return Explanation({"storage": ids, **columns}, len(self))

    def __repr__(self) -> str:
        parts = zip(self._shares, self.storages, strict=True)
        return f"{type(self).__name__}({', '.join(f'{share:g} of {it}' for share, it in parts)})"


@lru_cache(maxsize=16)
def _order_of(counts: tuple[int, ...], num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `[B * S]` which of the concatenated rows each row of a batch is, and of which storage."""
    with torch.device("cpu"):
        order = (even_order(counts).unsqueeze(1) * num_steps + torch.arange(num_steps)).flatten()
        ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts) * num_steps)
    return order, ids[order]


def _reordered(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Returns `values[order]`; index_select takes half the time."""
    if (signed := _SIGNED.get(values.dtype)) is None:
        return values.index_select(0, order)
    return values.view(signed).index_select(0, order).view(values.dtype)


def _check_alike(batches: list[dict[NestedKey, torch.Tensor]], counts: list[int]) -> None:
    """Raises a ValueError if entries differ in dtype, row shape, rows a sample, or device."""
    kinds: list[set[Any]] = [
        {(key, it.dtype, it.shape[1:], len(it) / count, it.device) for key, it in batch.items()}
        for batch, count in zip(batches, counts, strict=True)
    ]
    if differing := set.union(*kinds) - set.intersection(*kinds):
        raise ValueError(
            "the batches of an ensemble must have the same entries, dtypes, shapes and rows a sample, "
            f"but differ in {sorted({str(key) for key, *_ in differing})}: drop or convert them by a "
            "transform, or give all storages one sample_unit, or none."
        )
