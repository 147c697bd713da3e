"""Runs TorchRL's own samplers and sample units over rows in lanes, or rejects them.

They assume that the rows occupy the first slots, which does not hold while lanes are filled unequally,
and some that the next step is in the next slot, which may be of another episode or environment. Parts
that can be adapted are adapted here; the others are rejected with an error that names the part of this
package to use.

Letters: B batch, E lanes (environments).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torchrl.data import (
    ConsumingSampler,
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessAwareSampler,
    Storage,
    Writer,
)
from torchrl.data.replay_buffers.sample_units import SampleUnit, Sequence
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments
from trl_storages.callers import warn_caller
from trl_storages.ring import EpisodeIndex
from trl_storages.rows import PackedStorage

__all__ = [
    "check_buffers",
    "check_draws",
    "check_not_joined",
    "check_part",
    "checked_draw",
    "draw",
    "mark_stored_rows",
]

_USE_SEQUENCES = (
    "pass sample_unit=EpisodeSequence(length) for sequences, or draw whole episodes with "
    "ReplayStorage.sample_episodes(n)"
)
_USE_SINGLE_ROWS = "pass UniformSampler(), or PERSampler(capacity) for priorities"

#: What TorchRL's parts assume about the rows; the first matching class decides.
_ASSUMES: dict[type, str] = {
    ConsumingSampler: "to be consumed",
    SamplerEnsemble: "several storages",
    SliceSampler: "neighbours",
    Sequence: "neighbours",
    RandomSampler: "any slot",
    PrioritizedSampler: "a length",
    SamplerWithoutReplacement: "a number",
    StalenessAwareSampler: "the first slots",
    PromptGroupSampler: "the first slots",
    Sampler: "unknown",
    SampleUnit: "nothing",
}


def _assumed(kind: type) -> str | None:
    """Returns what a kind of part assumes about the rows; None if it is not TorchRL's."""
    method = getattr(kind, "sample", None) or getattr(kind, "expand", None)
    if not getattr(method, "__module__", "").startswith("torchrl."):
        return None
    return next(assumed for known, assumed in _ASSUMES.items() if issubclass(kind, known))


# Looked up for each batch.
_assumed_by: Callable[[type], str | None] = lru_cache(maxsize=1024)(_assumed)


# Checks that do not depend on the rows: done when parts are combined.


def check_part(part: Sampler | SampleUnit | None, num_envs: int, storage: Any = None) -> None:
    """Checks that a sampler (with its base samplers) or a sample unit can work correctly over lanes.

    Args:
        part: any sampler or unit; only TorchRL's own are checked.
        num_envs: E.
        storage: holds the rows; None if it is not known.

    Raises:
        ValueError: it can't. The message names what to use instead.
    """
    if (base := getattr(part, "base", None)) is not None:
        check_part(base, num_envs, storage)
    name, assumed = type(part).__name__, _assumed_by(type(part))
    if assumed is None:
        return
    if assumed == "to be consumed":
        raise ValueError(
            f"rows with episodes can't be consumed, got {name}: they leave in the order in which they "
            "came. Pass UniformSampler(), or use a TensorDictReplayBuffer with TorchRL's own writer."
        )
    if assumed == "several storages":
        raise ValueError(
            f"the sampler must draw from one storage, got {name}: join several by "
            f"ReplayStorageEnsemble(*storages); for one, {_USE_SINGLE_ROWS}."
        )
    if assumed == "neighbours":
        raise ValueError(
            f"{name} takes the next slot for the next step, which may be of another episode or "
            f"environment: {_USE_SEQUENCES}."
        )
    if assumed not in ("any slot", "nothing") and getattr(storage, "is_durable", False):
        raise ValueError(
            f"{name} takes the first slots for the rows, and those of a directory lie in some more "
            f"slots, around a ring: {_USE_SINGLE_ROWS}; {_USE_SEQUENCES}."
        )
    if num_envs > 1 and assumed == "unknown":
        raise ValueError(
            f"{name} is not known to be right over {num_envs} lanes of rows: {_USE_SINGLE_ROWS}; "
            f"{_USE_SEQUENCES}."
        )


def check_buffers(storage: Storage, num_envs: int) -> None:
    """Checks the samplers and sample units of all buffers that a storage is part of.

    Warns of sequences that are longer than a lane.

    Raises:
        ValueError: as `check_part`.
    """
    for buffer in _buffers(storage):
        check_part(buffer._sampler, num_envs, storage)
        unit = buffer._sample_unit
        check_part(unit, num_envs, storage)
        num_steps, room = getattr(unit, "num_steps", 1), storage.max_size // num_envs
        # Lanes without room for one row are refused elsewhere.
        if num_steps > room > 0:
            warn_caller(
                f"a sequence of sample_unit has {num_steps} steps, and a lane of the storage holds "
                f"{room}: the rest is padding. Make the storage larger, or the sequence shorter."
            )


def check_not_joined(storage: Storage, writer: Writer, num_registered: int) -> None:
    """Checks that only `ReplayStorage`s registered a writer with the storage it writes to.

    Args:
        storage: the storage it writes to.
        writer: the writer to check.
        num_registered: how often it was registered with this storage.

    Raises:
        ValueError: TorchRL's `ReplayBufferEnsemble` registered it too.
    """
    owners = [
        buffer
        for buffer in _buffers(storage)
        if getattr(buffer, "draws_live_rows", False) and buffer._writer is writer
    ]
    if owners and num_registered >= len(owners):
        raise ValueError(
            "the members of TorchRL's ReplayBufferEnsemble must be its own buffers, got a ReplayStorage: "
            "join storages by ReplayStorageEnsemble(*storages, shares=...)."
        )


def _buffers(storage: Storage) -> Iterator[ReplayBuffer]:
    return (
        buffer for buffer in storage._attached_entities_list if isinstance(buffer, ReplayBuffer)
    )


# Checks that depend on the rows: done at each draw.


class _Seen:
    """A stand-in storage for TorchRL's single-row samplers, with a different length."""

    ndim = 1

    def __init__(self, storage: Storage, length: int) -> None:
        self._storage, self._length = storage, length
        self.device = storage.device

    def __len__(self) -> int:
        return self._length


def checked_draw(storage: Any, batch_size: int) -> tuple[int, EpisodeIndex | None]:
    """Checks that a storage has rows to draw; returns B, and the episode index if there is one.

    Raises:
        RuntimeError: the storage is empty.
        TypeError, ValueError: it is not a storage, or B is below 1.
    """
    # Anything with an episode index will do.
    episodes = getattr(storage, "episodes", None)
    if episodes is None:
        arguments.instance("storage", storage, Storage, what="a TorchRL storage")
    if not len(storage if episodes is None else episodes):
        raise RuntimeError(
            "the storage is empty: write transitions with record(), add() or extend() before sampling."
        )
    return arguments.integer("batch_size", batch_size, at_least=1), episodes


def draw(sampler: Sampler, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
    """Draws live rows with any sampler, however full each lane is.

    Args:
        sampler: any sampler, TorchRL's or not.
        storage: holds the rows, and their episode index if there is one.
        batch_size: B.

    Returns:
        what the sampler returns: slots and its info.

    Raises:
        ValueError: as `check_part`.
        RuntimeError: with the rows as they are, the sampler would draw empty slots. The message names
            what to use instead.
    """
    if (assumed := _assumed_by(type(sampler))) is None:
        return sampler.sample(storage, batch_size)
    batch_size, episodes = checked_draw(storage, batch_size)
    if episodes is None:
        return sampler.sample(storage, batch_size)
    check_part(sampler, episodes.num_envs, storage)
    if not episodes.is_level:
        match assumed:
            case "any slot":
                return episodes.random_slots(batch_size, sampler._rng), {}
            case "a length":
                return sampler.sample(_Seen(storage, episodes.num_slots_reached), batch_size)
            case "a number":
                ranks, info = sampler.sample(_Seen(storage, len(episodes)), batch_size)
                return _live_slots(episodes, ranks), info
            case _:
                _check_level(sampler, episodes)
    return sampler.sample(storage, batch_size)


def _live_slots(episodes: EpisodeIndex, ranks: torch.Tensor) -> torch.Tensor:
    """Maps ranks to live slots, by a numbering that changes only when a lane grows.

    Args:
        episodes: gives the number of rows in each lane.
        ranks: `[B]` int64, below the number of live rows.

    Returns:
        `[B]` int64 slots.
    """
    fill, lanes = torch.sort(episodes.fill, stable=True)
    num_envs = episodes.num_envs
    # Level j holds the places at which exactly the j emptiest lanes have no row.
    first_place = torch.cat([fill.new_zeros(1), fill[:-1]])
    width = num_envs - torch.arange(num_envs, device=fill.device)
    size = (fill - first_place) * width
    end = size.cumsum(0)
    level = torch.searchsorted(end, ranks, right=True)
    offset = ranks - (end - size)[level]
    lane = lanes[num_envs - 1 - offset % width[level]]
    # A lane that is not full begins at its tail, which does not move until the lane is full.
    start = torch.where(episodes.fill < episodes.ring_steps, episodes.tails, 0)
    place = start[lane] + first_place[level] + offset // width[level]
    return episodes.ring.slots_at(place, lane)


def check_draws(storage: Any, writer: Writer) -> None:
    """Checks the draws of buffers that pass the storage straight to their sampler, as TorchRL's own do.

    Args:
        storage: written by an `EpisodeWriter`.
        writer: that writer; buffers with another one are skipped, as are those that call `draw`.

    Raises:
        ValueError: as `check_part`.
        RuntimeError: as `draw`.
    """
    for buffer in _buffers(storage):
        if buffer._writer is not writer or getattr(buffer, "draws_live_rows", False):
            continue
        sampler, episodes = buffer._sampler, storage.episodes
        check_part(sampler, episodes.num_envs)
        check_part(buffer._sample_unit, episodes.num_envs)
        if (assumed := _assumed_by(type(sampler))) is None:
            continue
        # Safe: a PackedStorage itself draws for an "any slot" sampler, and in other storages, whose
        # length is that of the longest lane, an "a length" sampler sees all slots.
        if assumed != ("any slot" if isinstance(storage, PackedStorage) else "a length"):
            _check_level(sampler, episodes)


def _check_level(sampler: Sampler, episodes: EpisodeIndex) -> None:
    if not episodes.is_level:
        fill = episodes.host_fill.tolist()
        raise RuntimeError(
            f"{type(sampler).__name__} takes the first slots for the rows, so that all lanes must hold "
            f"equally many, got {fill}: {_USE_SINGLE_ROWS}; {_USE_SEQUENCES}."
        )


def mark_stored_rows(sampler: Sampler, storage: Any) -> bool:
    """Gives already stored rows a priority in TorchRL's own sampler, whichever slots they are in.

    Returns:
        False if the storage has no episode index, so that the slots of its rows are not known.
    """
    episodes = getattr(storage, "episodes", None)
    if episodes is None:
        return False
    if isinstance(sampler, PrioritizedSampler) and len(episodes):
        sampler.mark_update(episodes.live_slots(), storage=storage)
    return True
