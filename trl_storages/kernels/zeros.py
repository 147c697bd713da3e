"""Memory of zeros for tables that are filled little by little and read at random."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["zeros"]

_NUMPY_DTYPES = {torch.int32: np.int32, torch.int64: np.int64}


def zeros(*shape: int, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Returns int32 or int64 zeros of a shape."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Unlike torch's, NumPy's take no memory before they are written to, and the kernel is asked for huge
    # pages: a seventh of a gather's time is the look-up of small ones.
    return torch.from_numpy(np.zeros(shape, _NUMPY_DTYPES[dtype]))
