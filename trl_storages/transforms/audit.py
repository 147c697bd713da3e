"""The result of comparing a reward function with the stored rewards.

Letters: D transitions with different rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trl_storages import validation

__all__ = ["RelabelAudit"]


@dataclass(frozen=True)
class RelabelAudit:
    """The result of `GoalRelabel.audit`: the D transitions whose stored and computed rewards differ.

    Attributes:
        num_rows: number of transitions that were compared.
        slots: `[D]` int64 slots of the transitions that differ, on the host.
        stored: `[D]` stored rewards, in a dtype that can also hold the computed rewards.
        computed: `[D]` rewards that `reward_fn` returns.
        num_ends: number of terminated transitions if success ends episodes, that is, if each of their
            rewards is larger than the reward of every transition that is not terminated; else 0.
    """

    num_rows: int
    slots: torch.Tensor
    stored: torch.Tensor
    computed: torch.Tensor
    num_ends: int = 0

    @property
    def passed(self) -> bool:
        """Whether no rewards differ."""
        return not len(self.slots)

    def __str__(self) -> str:
        total = validation.counted(self.num_rows, "transition")
        if self.passed:
            return f"reward_fn agrees with the stored rewards on all {total}."
        summary = f"reward_fn differs from the stored reward on {len(self.slots):,} of {total}"
        return "\n".join([f"{summary}:", *(f"  {example}" for example in self.examples(5))])

    def examples(self, number: int) -> list[str]:
        """Returns descriptions of at most `number` transitions, largest differences first."""
        order = (self.stored.double() - self.computed.double()).abs().argsort(descending=True)
        return [
            f"slot {int(self.slots[i])}: stored {float(self.stored[i]):g}, computed "
            f"{float(self.computed[i]):g}"
            for i in order[:number].tolist()
        ]
