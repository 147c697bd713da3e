"""Stands where draws are made by another process."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data import RandomSampler, Storage

__all__ = ["ElsewhereSampler"]


class ElsewhereSampler(RandomSampler):
    """The sampler of a process that writes to a shared storage, where only one process can draw.

    Priorities live in the process that shared the storage; writing needs none of them.
    """

    def sample(
        self, storage: Storage, batch_size: int, *window: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Refuses to draw.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "draws by priority must be made in the process that shared the storage, this is one that it "
            "was sent to: sample there, or use a storage with alpha=0."
        )

    sample_window = sample
