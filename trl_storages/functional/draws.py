"""Random numbers from which a batch is drawn."""

import torch

__all__ = ["random_noise"]


def random_noise(
    size: int | tuple[int, ...],
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Draws integers uniformly from 0 to 2^63 - 1.

    A number x is turned into one below n by floor(x n / 2^63), or by the remainder: exact up to a bias of
    n / 2^63. A float32 draw times n would miss most integers above 2^24.

    Args:
        size: shape of the result; an int is a length.
        generator: source of randomness, on `device`; None is torch's default one.
        device: where the draw is made.

    Returns:
        int64 tensor of shape `size`.
    """
    size = (size,) if isinstance(size, int) else size
    return torch.empty(size, dtype=torch.int64, device=device).random_(generator=generator)
