"""A thin line through the new middle: rows are recorded or extended, drawn, transformed, prioritised.

Letters: B batch, E lanes, S steps.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs.transforms import Transform

from trl_storages import keys
from trl_storages.next.samplers import UniformSampler
from trl_storages.next.transforms import ReplayTransform
from trl_storages.streams.layout import Layout
from trl_storages.streams.packed import PackedStorage, checked_fields
from trl_storages.streams.row_view import RowView
from trl_storages.streams.staging import Block
from trl_storages.transforms import parts_of

__all__ = ["ReplayStorage"]


class _NoWriter(Writer):  # type: ignore[misc]
    """The place of a writer: here the storage writes itself."""

    def add(self, data: Any) -> None:
        """Raises."""
        raise NotImplementedError

    extend = _empty = dumps = loads = load_state_dict = add

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty dict."""
        return {}


class ReplayStorage(TensorDictReplayBuffer):  # type: ignore[misc]
    """Draws rows of a `PackedStorage` through its sampler and transforms.

    Args:
        storage: holds the rows.
        sampler: which of them are drawn.
        transform: what is made of them.
        batch_size: B.
        on_gap: "cut" ends an episode where the next row does not continue it though nobody ended it, and
            warns once; "ignore" takes rows as they come.
        generator: of the draws, on the CPU.
    """

    def __init__(
        self,
        *,
        storage: PackedStorage,
        sampler: Any = None,
        transform: Transform | None = None,
        batch_size: int | None = None,
        on_gap: str = "cut",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            storage=storage,
            sampler=UniformSampler() if sampler is None else sampler,
            writer=_NoWriter(),
            transform=transform,
            batch_size=batch_size,
            collate_fn=lambda batch: batch,
            generator=generator,
        )
        self._cuts_gaps, self._warned = on_gap == "cut", False
        self._drawn: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def episodes(self) -> Any:
        """Which rows there are."""
        return self._storage.episodes

    def extend(self, data: TensorDictBase, **_: Any) -> torch.Tensor:
        """Writes transitions, `[S]` of one lane or `[E, S]`.

        Returns:
            their slots.
        """
        storage = self._storage
        data = data.unsqueeze(0) if data.ndim == 1 else data
        trajectories = data.get(keys.TRAJECTORY_IDS, None)
        data = data.exclude("collector")
        if not storage.initialized:
            tensors = data.flatten_keys(".").items()
            fields = {tuple(key.split(".")): (it.dtype, it.shape[2:]) for key, it in tensors}
            storage.lay_out(Layout(fields))
        with self._replay_lock, self._write_lock:
            entries = checked_fields(data, storage.layout)
            lanes, steps = data.shape
            size = lanes * steps
            device = storage.device
            words = torch.zeros(size, storage.layout.row_words, dtype=torch.int64, device=device)
            for key, value in entries.items():
                storage.layout.fill(key, words, value.reshape(size, *value.shape[2:]))
            done = entries[keys.DONE].reshape(size, -1).any(1)
            cut = torch.zeros(size, dtype=torch.bool, device=device)
            if trajectories is not None:
                ids = trajectories.reshape(lanes, steps)
                cut.view(lanes, steps)[:, 1:] = (ids[:, 1:] != ids[:, :-1]).to(device)
            flags = words, done.to(device), cut
            if device.type == "cpu":
                flags = tuple(it.numpy() for it in flags)  # type: ignore[assignment]
            slots = self._append(Block(np.arange(lanes), np.arange(lanes + 1) * steps, *flags))
        return slots.view(lanes, steps).squeeze(0)

    def _append(self, block: Block) -> torch.Tensor:
        slots, gaps = self._storage.append(block, cuts_gaps=self._cuts_gaps)
        if gaps and not self._warned:
            self._warned = True
            warnings.warn(
                f"{gaps} rows do not continue the ones before them though no episode ended: cut there.",
                stacklevel=3,
            )
        return slots

    def record(self, values: dict[NestedKey, Any]) -> torch.Tensor:
        """Writes one step of each lane: key -> value `[E, ...]`."""
        storage, lanes = self._storage, self.episodes.num_envs
        words = np.zeros((lanes, storage.layout.row_words), np.int64)
        views = storage.layout.views(torch.from_numpy(words))
        for key, value in values.items():
            views[key][:] = torch.as_tensor(value)
        done = views[keys.DONE].reshape(lanes, -1).any(1).numpy()
        block = Block(np.arange(lanes), np.arange(lanes + 1), words, done, np.zeros(lanes, bool))
        return self._append(block)

    def sample(self, batch_size: int | None = None, **_: Any) -> TensorDictBase:
        """Draws a batch, `[B]`."""
        with self._replay_lock, self._write_lock:
            storage, sampler = self._storage, self._sampler
            slots, info = sampler.sample(storage, batch_size or self._batch_size)
            info[keys.INDEX] = slots
            info["step"] = self.episodes.steps_of(slots)
            rows = RowView(storage, slots, info)
            parts = parts_of(self._transform)
            for part in parts:
                if isinstance(part, ReplayTransform):
                    part.prepare(rows)
            for part in parts:
                if isinstance(part, ReplayTransform):
                    part.replay(rows)
                else:
                    rows.transform(part)
            return rows.tensordict()

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sets the priorities of a batch to its `td_error`."""
        priority = data["td_error"].abs().reshape(data.batch_size.numel(), -1).amax(1)
        slots, steps = (data[key].reshape(-1).cpu().numpy() for key in (keys.INDEX, "step"))
        self._sampler.update(self._storage, slots, steps, priority.detach().cpu().numpy())

    def empty(self, *, keep_steps: int = 0) -> None:
        """Removes the rows but the last `keep_steps` of each lane."""
        self.episodes.empty(keep_steps)
