"""Which dtypes of NumPy and torch are the same."""

import numpy as np
import torch
from torchrl.data.utils import numpy_to_torch_dtype_dict

__all__ = ["NUMPY_TO_TORCH", "TORCH_TO_NUMPY"]

#: TorchRL's table, and the unsigned integers that it leaves out.
NUMPY_TO_TORCH: dict[np.dtype, torch.dtype] = {
    **numpy_to_torch_dtype_dict,
    np.dtype(np.uint16): torch.uint16,
    np.dtype(np.uint32): torch.uint32,
    np.dtype(np.uint64): torch.uint64,
}
TORCH_TO_NUMPY: dict[torch.dtype, np.dtype] = {
    theirs: numpys for numpys, theirs in NUMPY_TO_TORCH.items()
}
