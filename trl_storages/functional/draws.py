"""Random integers below a bound that lives on the device."""

import torch

__all__ = ["random_below", "random_integers"]

_HIGHEST = 2**63 - 1


def random_integers(
    size: int | tuple[int, ...],
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Draws integers uniformly from `[0, 2^63 - 1)`: noise to be taken modulo a bound.

    Args:
        size: shape of the result; an int is a length.
        generator: source of randomness, on `device`; None is torch's default one.
        device: where the draw is made.

    Returns:
        int64 tensor of shape `size`.
    """
    size = (size,) if isinstance(size, int) else size
    return torch.randint(_HIGHEST, size, generator=generator, device=device)


def random_below(
    bound: torch.Tensor | int,
    size: int | tuple[int, ...],
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Draws integers uniformly from `[0, bound)`, without reading `bound` on the host.

    A 63-bit draw modulo the bound: exact up to a bias of `bound / 2^63`. A float32 draw times the
    bound would miss most integers above 2^24.

    Args:
        bound: a positive integer, or an integer tensor that broadcasts against `size`.
        size: shape of the result; an int is a length.
        generator: source of randomness, on `device`; None is torch's default one.
        device: where the draw is made.

    Returns:
        int64 tensor of shape `size`.

    >>> draws = random_below(torch.tensor([1, 2**40]), (3, 2))
    >>> draws.dtype, draws[:, 0].tolist()
    (torch.int64, [0, 0, 0])
    """
    return random_integers(size, generator=generator, device=device) % bound
