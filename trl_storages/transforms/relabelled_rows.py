"""Which samples of a batch are relabelled.

Letters: B batch, n further rows of each sample.
"""

import torch

__all__ = ["RelabelledRows"]


class RelabelledRows:
    """Narrows a batch down to the samples that are relabelled, and writes what they become.

    A `HERSampler` relabels the first samples of a batch. Where the host can see that, only these are
    looked at, and overwritten in place. It cannot on a GPU, and a mask may be any: then all samples
    are worked on, and the relabelled ones are chosen from the result. Both come to the same.

    Args:
        mask: `[B]` bool, the samples to relabel.
        in_place: whether what is stored may be overwritten, since nobody else sees that memory.

    Attributes:
        mask: as given.
        count: how many samples come first, if all others follow them and the host knows; else None.
    """

    def __init__(self, mask: torch.Tensor, *, in_place: bool) -> None:
        self.mask = mask
        self.count: int | None = None
        if in_place and mask.device.type == "cpu":
            flags = mask.numpy().tobytes()
            count = flags.find(0) if 0 in flags else len(flags)
            # After the first that is false none is true.
            if flags.find(1, count) < 0:
                self.count = count

    def pick(self, tensor: torch.Tensor, batch_dims: int = 1) -> torch.Tensor:
        """Returns the samples to work on: the relabelled ones, or all.

        Args:
            tensor: `[B, ...]`, or `[n, B, ...]`.
            batch_dims: 1 or 2 accordingly.
        """
        if self.count is None:
            return tensor
        return tensor[: self.count] if batch_dims == 1 else tensor[:, : self.count]

    def put(self, new: torch.Tensor, stored: torch.Tensor, batch_dims: int = 1) -> torch.Tensor:
        """Returns all samples: `new` for the relabelled ones, `stored` for the others.

        Args:
            new: what the picked samples become; it is brought to the dtype of `stored`.
            stored: `[B, ...]`, or `[n, B, ...]`; overwritten if it may be.
            batch_dims: 1 or 2 accordingly.
        """
        if self.count is not None:
            self.pick(stored, batch_dims).copy_(new)
            return stored
        mask = self.mask.view(-1, *(1,) * (stored.ndim - batch_dims))
        return torch.where(mask, new.to(stored.dtype), stored)
