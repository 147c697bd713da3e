"""Which samples of a batch are relabelled.

Letters: B batch, R relabelled samples, n further rows of each sample.
"""

import torch

__all__ = ["RelabelledRows"]

# `index_copy_` knows these, but not every other dtype.
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RelabelledRows:
    """Narrows a batch down to the samples that are relabelled, and writes what they become.

    Where the host can see which these are, only they are looked at, and overwritten in place. On a GPU
    it cannot: then all samples are worked on, and the relabelled ones are chosen from the result. Both
    come to the same.

    Args:
        mask: `[B]` bool, the samples to relabel.
        in_place: whether what is stored may be overwritten, since nobody else sees that memory.

    Attributes:
        mask: as given.
        places: `[R]` int64, where these are in the batch, if the host knows; else None.
    """

    def __init__(self, mask: torch.Tensor, *, in_place: bool) -> None:
        self.mask = mask
        self.places: torch.Tensor | None = None
        if in_place and mask.device.type == "cpu":
            self.places = mask.nonzero().squeeze(1)

    @property
    def is_none(self) -> bool:
        """Whether no sample is relabelled, as far as the host knows."""
        return self.places is not None and not len(self.places)

    def pick(self, tensor: torch.Tensor, batch_dims: int = 1) -> torch.Tensor:
        """Returns the samples to work on: the relabelled ones, or all.

        Args:
            tensor: `[B, ...]`, or `[n, B, ...]`.
            batch_dims: 1 or 2 accordingly.
        """
        return tensor if self.places is None else tensor.index_select(batch_dims - 1, self.places)

    def put(self, new: torch.Tensor, stored: torch.Tensor, batch_dims: int = 1) -> torch.Tensor:
        """Returns all samples: `new` for the relabelled ones, `stored` for the others.

        Args:
            new: what the picked samples become; it is brought to the dtype of `stored`.
            stored: `[B, ...]`, or `[n, B, ...]`; overwritten if it may be.
            batch_dims: 1 or 2 accordingly.
        """
        if self.places is not None:
            new, into = new.to(stored.dtype), stored
            if stored.itemsize in _SAME_SIZE:
                new, into = (each.view(_SAME_SIZE[stored.itemsize]) for each in (new, stored))
            into.index_copy_(batch_dims - 1, self.places, new)
            return stored
        mask = self.mask.view(-1, *(1,) * (stored.ndim - batch_dims))
        return torch.where(mask, new.to(stored.dtype), stored)
