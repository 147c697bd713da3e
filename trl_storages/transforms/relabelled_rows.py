"""Which samples of a batch are relabelled.

Letters: B batch, n further rows of each sample.
"""

import numpy as np
import torch

__all__ = ["RelabelledRows"]


class RelabelledRows:
    """Puts what was computed for all samples into those that are relabelled.

    A `HERSampler` relabels the first samples of a batch. Where the host can see that, the two parts are
    joined, which moves fewer bytes than choosing value by value. It cannot on a GPU, and a mask may be
    any. The result is the same.

    Args:
        mask: `[B]` bool, the samples to relabel.
        batch_dims: 1 for fields `[B, ...]`, 2 for fields `[n, B, ...]`.
    """

    def __init__(self, mask: torch.Tensor, batch_dims: int = 1) -> None:
        self.batch_dims = batch_dims
        self._mask = mask
        # How many samples come first, if all others follow them.
        self._count: int | None = None
        if mask.device.type == "cpu":
            flags = mask.numpy()
            count = int(np.count_nonzero(flags))
            if flags[:count].all():
                self._count = count

    def put(self, new: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        """Returns `new` for the relabelled samples and `stored` for the others, in new memory.

        Args:
            new: `[B, ...]` or `[n, B, ...]`, brought to the dtype of `stored`.
            stored: of the same shape.
        """
        new = new.to(stored.dtype)
        dim = self.batch_dims - 1
        if self._count is not None:
            rest = stored.narrow(dim, self._count, stored.shape[dim] - self._count)
            return torch.cat([new.narrow(dim, 0, self._count), rest], dim)
        mask = self._mask.view(-1, *(1,) * (stored.ndim - self.batch_dims))
        return torch.where(mask, new, stored)
