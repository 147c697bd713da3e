"""A gymnasium loop over two environments, recorded into a directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from trl_storages import UniformReplayStorage

__all__ = ["Recorded"]


class Recorded:
    """A loop over a vector environment that resets itself at the step after the last one."""

    def __init__(self, path: Path) -> None:
        self.storage = UniformReplayStorage(
            Box(-np.inf, np.inf, (1,), np.float32),
            Discrete(2),
            storage_size=20,
            num_envs=2,
            autoreset_mode="NextStep",
            batch_size=4,
            path=path,
        )

    def record(self, step: int, ended: list[bool]) -> torch.Tensor | None:
        observations = np.full((2, 1), step, np.float32)
        rest = np.zeros(2, bool), {}, observations + 1
        return self.storage.record(
            observations, np.zeros(2, np.int64), np.zeros(2), np.array(ended), *rest
        )

    def rows(self) -> list[list[float]]:
        storage = self.storage
        storage.validate()
        slots = storage.episodes.slots_by_age(torch.arange(len(storage)))
        steps = storage.storage.get(slots)["observation"].squeeze(-1).tolist()
        lanes = (slots % 2).tolist()
        return [
            sorted(s for s, of in zip(steps, lanes, strict=True) if of == lane) for lane in (0, 1)
        ]
