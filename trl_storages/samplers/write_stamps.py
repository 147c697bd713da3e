"""Tells whether a slot still holds the row that was drawn from it."""

from __future__ import annotations

import torch

__all__ = ["WriteStamps"]

_NEVER = 2**63 - 1


class WriteStamps:
    """Remembers when each slot was last written, on a clock that counts writes.

    A batch carries the time at which it was drawn. A row of it is gone if its slot was written
    later.

    Args:
        capacity: number of slots N.
        device: where the stamps live.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._time = torch.zeros((), dtype=torch.int64, device=device)
        # One more than there are slots: what is not written is noted there.
        self._spare = capacity
        self._written = torch.full((capacity + 1,), _NEVER, dtype=torch.int64, device=device)

    def mark(self, slots: torch.Tensor, there: torch.Tensor | None = None) -> None:
        """Takes note that slots were written.

        Args:
            slots: `[B]` int64.
            there: `[B]` bool, False where `slots` names none; None says that all do.
        """
        self._time += 1
        if there is not None:
            slots = torch.where(there, slots, self._spare)
        self._written[slots] = self._time

    def now(self, batch_size: int) -> torch.Tensor:
        """Returns the time, int64 `[B]`."""
        return self._time.expand(batch_size).clone()

    def is_current(self, slots: torch.Tensor, stamp: torch.Tensor | None) -> torch.Tensor:
        """Returns whether slots hold what they held at the time of `stamp`.

        Args:
            slots: `[B]` int64.
            stamp: `[B]` int64 of `now`; None asks only whether they hold anything.

        Returns:
            `[B]` bool.
        """
        return self._written.index_select(0, slots) <= (self._time if stamp is None else stamp)

    def clear(self) -> None:
        """Forgets what was written. What was drawn before is gone."""
        self._written.fill_(_NEVER)
        self._time += 1
