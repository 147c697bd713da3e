"""n-step returns.

Letters: B batch, n rows of a window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages import arguments, keys
from trl_storages.attributes import Checked, unit_interval
from trl_storages.functional.returns import discounts, return_dtype
from trl_storages.kernels import folds
from trl_storages.packed import RowView
from trl_storages.transforms.base import ReplayTransform

__all__ = ["NStep"]


class NStep(ReplayTransform):
    """Folds each transition with those that follow it in its episode.

        m = min(n, rows to the end of the episode, rows to the newest one)
        reward_t <- Σ γ^i · reward_{t+i}, i = 0 .. m - 1;   next_t <- next_{t+m-1}

    `steps_to_next_obs` is m. Sums are made in float64, and rounded once.
    """

    reward_key: NestedKey = keys.REWARD
    n_step: Any = Checked(arguments.integer, at_least=1)
    discount: Any = Checked(unit_interval)

    def __init__(
        self, n_step: int = 3, discount: float = 0.99, *, reward_key: NestedKey = keys.REWARD
    ) -> None:
        super().__init__()
        self.n_step, self.discount, self.reward_key = n_step, discount, reward_key
        self._lengths = torch.empty(0, dtype=torch.int64)

    def prepare(self, rows: RowView) -> None:
        """Finds the window of each row, and takes what stands under `next` from its last one."""
        window, self._lengths = rows.episodes.windows(rows.slots, self.n_step)
        rows.window = rows.at(window)
        rows.follow(window[-1])

    def replay(self, rows: RowView) -> None:
        """Folds the windows."""
        window, lengths = rows.steps, self._lengths.to(rows.device)
        rows.window = None
        reward = window[self.reward_key]
        if window.is_set(keys.TERMINATED):  # a goal may be reached within the window
            flags = window[keys.TERMINATED].flatten(1)
            first = torch.where(flags.any(0), flags.long().argmax(0) + 1, self.n_step)
            lengths = torch.minimum(lengths, first)
            last = (lengths - 1).unsqueeze(0)
            rows.follow(window.slots.gather(0, last.cpu()).squeeze(0))
            for key in (keys.TERMINATED, keys.DONE):
                flag = window[key]
                rows[key] = flag.gather(0, last.view(1, -1, *(1,) * (flag.ndim - 2))).squeeze(0)
        size = reward.shape[1:]
        rows[self.reward_key] = self._folded(reward, lengths)
        rows[keys.STEPS_TO_NEXT_OBS] = (
            lengths.view(-1, *(1,) * (len(size) - 1)).expand(size).clone()
        )

    def _folded(self, reward: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Sums rewards `[n, B, *]` of windows of some lengths."""
        weights = discounts(len(reward), self.discount, device=reward.device)
        flat = reward.reshape(*reward.shape[:2], -1)
        if reward.device.type == "cpu":
            total = np.empty(flat.shape[1:])
            folds.fold(flat.double().numpy(), lengths.numpy(), weights.numpy(), total)
            folded = torch.from_numpy(total)
        else:
            counts = (
                torch.arange(len(reward), device=reward.device)[:, None, None] < lengths[:, None]
            )
            folded = (torch.where(counts, flat, 0).double() * weights[:, None, None]).sum(0)
        return folded.to(return_dtype(reward.dtype)).view(reward.shape[1:])
