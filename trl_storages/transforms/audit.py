"""The result of comparing a reward function with the stored rewards.

Letters: D rows that differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trl_storages import validation

__all__ = ["RelabelAudit"]


@dataclass(frozen=True)
class RelabelAudit:
    """The result of `GoalRelabel.audit`: the D rows on which `reward_fn` and storage disagree.

    Attributes:
        num_rows: how many rows were compared.
        slots: `[D]` int64, on the host.
        stored: `[D]` the stored rewards, in a dtype that holds the computed ones too.
        computed: `[D]` the rewards that the function returns for them.
        num_ends: how many transitions are terminated, if the reward of each is larger than that of every
            other transition, as where success ends an episode; else 0.
    """

    num_rows: int
    slots: torch.Tensor
    stored: torch.Tensor
    computed: torch.Tensor
    num_ends: int = 0

    @property
    def passed(self) -> bool:
        """Whether all rows agree."""
        return not len(self.slots)

    def __str__(self) -> str:
        rows = validation.counted(self.num_rows, "row")
        if self.passed:
            return f"reward_fn agrees with the stored rewards on all {rows}."
        differs = f"reward_fn differs from the stored reward on {len(self.slots):,} of {rows}"
        return "\n".join([f"{differs}:", *(f"  {example}" for example in self.examples(5))])

    def examples(self, number: int) -> list[str]:
        """Returns the largest differences in words, at most as many as `number`."""
        worst = (self.stored.double() - self.computed.double()).abs().argsort(descending=True)
        return [
            f"slot {int(self.slots[at])}: stored {float(self.stored[at]):g}, computed "
            f"{float(self.computed[at]):g}"
            for at in worst[:number].tolist()
        ]
