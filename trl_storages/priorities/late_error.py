"""An error found on a device, heard of on the host without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LateError"]


class LateError:
    """A flag on a device, and a copy of it on the host that follows in its own time.

    Reading the flag would make the host wait for all the work queued before it. The copy is read
    instead: it may lag behind, and is right once the device has come that far.

    Args:
        device: where errors are found.
    """

    def __init__(self, device: torch.device) -> None:
        # Only into pinned memory does a copy go its way alone.
        pinned = device.type == "cuda" and torch.cuda.is_available()
        self._flag = torch.zeros((), dtype=torch.bool, device=device)
        self._heard = torch.zeros((), dtype=torch.bool, pin_memory=pinned)

    def note(self, wrong: torch.Tensor) -> None:
        """Takes note of an error where `wrong`, bool `[]` on the device, is true."""
        self._flag.logical_or_(wrong)
        self._heard.copy_(self._flag, non_blocking=True)

    def pop(self, *, wait: bool = False) -> bool:
        """Returns whether there was an error, and forgets it.

        Args:
            wait: whether to wait for the device, and hear of all errors so far.
        """
        source = self._flag if wait else self._heard
        # Tensors of a simulated device (a subclass) have no value to read.
        if type(source) is not torch.Tensor or not bool(source):
            return False
        self._flag.zero_()
        self._heard.zero_()
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles would lose the pinned memory; and the error is not theirs.
        return type(self), (self._flag.device,)
