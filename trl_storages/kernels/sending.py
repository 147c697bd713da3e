"""Copies from the host to a device that nothing waits for."""

from __future__ import annotations

import torch

__all__ = ["on_device", "sendable"]


def sendable(device: torch.device) -> bool:
    """Whether memory must be pinned for copies to the device to be asynchronous."""
    return device.type == "cuda" and torch.cuda.is_available()


def on_device(
    values: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns a tensor on a device; on the way from the host to a GPU nothing waits for either.

    `Tensor.to` waits until the GPU has done all that is queued, unless the memory is pinned. torch keeps
    pinned memory until the copy is made.

    Args:
        values: the tensor.
        device: the device.
        dtype: of the result; None keeps it.
    """
    if values.device.type == "cpu" and sendable(device):
        return values.to(dtype).pin_memory().to(device, non_blocking=True)
    return values.to(device, dtype)
