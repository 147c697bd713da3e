"""Writes rows to a storage and notifies its sampler.

Letters: E lanes (environments).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Transform

from trl_storages.ring import EpisodeIndex
from trl_storages.samplers import prioritized_of
from trl_storages.stock_parts import refuse_stock
from trl_storages.transforms import ReplayTransform, parts_of

__all__ = ["KnownRows", "record", "write"]


def write(
    storage: Any,
    put: Callable[..., torch.Tensor],
    data: TensorDictBase,
    *,
    has_priority: bool = True,
) -> torch.Tensor:
    """Applies the inverse transforms, writes the rows, and notifies the sampler.

    Args:
        storage: the `ReplayStorage`.
        put: the writer's method, `(data, then=) -> slots`.
        data: as `put` takes it.
        has_priority: whether to use the entry `priority_key`, if present, as the rows' priority.
    """
    transform = storage._transform
    # Skipped without inverses, as TorchRL would copy the data and add an index to the copy.
    rows = transform.inv(data) if _may_have_inverse(transform) else data
    if rows is None:
        return torch.zeros(0, dtype=torch.int64)
    key, priority = storage.priority_key, None
    if has_priority and key in rows.keys(isinstance(key, tuple)):
        priority = rows.get(key)

    def hear(slots: torch.Tensor) -> None:
        storage._sampler.extend(slots)
        if priority is not None:
            storage.update_priority(slots, priority)

    with storage._replay_lock, storage._write_lock:
        # Before anything is written.
        if priority is not None and (sampler := prioritized_of(storage._sampler)) is not None:
            sampler.check_priorities(priority, rows.numel())
        return put(rows, then=hear)


def record(storage: Any, step: Sequence[Any]) -> torch.Tensor | None:
    """Writes one step of a plain gymnasium loop; see `ReplayStorage.record`."""
    recorder, writer = storage._recorder, storage._writer
    with storage._replay_lock, storage._write_lock:
        transform, then = storage._transform, storage._sampler.extend
        read, memory = recorder.read(step, storage._storage.layout)
        if memory is not None:
            tell = then

            def then(slots: torch.Tensor) -> None:
                tell(slots)
                recorder.remember(memory)

        rows = None
        if read is not None:
            changes = _may_have_inverse(transform)
            if not changes and writer.takes(read.layout):
                return writer.append(read, then)
            rows = transform.inv(read.tensordict()) if changes else read.tensordict()
        if read is None or rows is None:
            recorder.remember(memory)
            return None
        return writer.extend(rows, lanes=read.lanes, then=then)


def _may_have_inverse(transform: Transform) -> bool:
    others = [part for part in parts_of(transform) if not isinstance(part, ReplayTransform)]
    for part in others:
        # Of those that the storage was not told of, as by storage.transform.append().
        refuse_stock(part)
    return bool(others)


class KnownRows:
    """Tracks which rows of a shared storage the sampler knows, as other processes write to it too.

    Args:
        episodes: index of the rows, all of which are known; None if none are.
    """

    def __init__(self, episodes: EpisodeIndex | None = None) -> None:
        #: `[E]` known steps of each lane.
        self._steps = None if episodes is None else episodes.num_steps_written.clone()

    def tell(self, sampler: Sampler, episodes: EpisodeIndex) -> None:
        """Notifies the sampler of rows written since the last call."""
        written = episodes.num_steps_written
        if self._steps is None or bool((written < self._steps).any()):
            # The storage was emptied, by this process or another.
            sampler._empty()
            self._steps = torch.zeros_like(written)
        if not torch.equal(written, self._steps):
            sampler.extend(episodes.slots_since(self._steps))
            self._steps = written.clone()
