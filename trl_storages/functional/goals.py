"""Which row of an episode lends its achieved goal: the strategies of hindsight experience replay.

Each function maps 63-bit random integers to an offset in steps from the anchor row, given how many
surviving rows of the anchor's episode lie behind and ahead of it. All tensors are int64 of one shape.

Reference: Andrychowicz et al. 2017, Hindsight Experience Replay, arXiv:1707.01495, section 4.5. The
goal is the *next* achieved goal of the chosen row, so offset 0 is the anchor's own outcome.
"""

import torch

__all__ = ["episode_offset", "final_offset", "future_offset"]


def future_offset(noise: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
    """Returns an offset uniform over `0 .. ahead`: the anchor's own outcome or a later one.

    >>> future_offset(torch.tensor([0, 7, 9]), torch.tensor([0, 2, 4])).tolist()
    [0, 1, 4]
    """
    return noise % (ahead + 1)


def final_offset(ahead: torch.Tensor) -> torch.Tensor:
    """Returns the offset of the episode's last row so far.

    >>> final_offset(torch.tensor([3])).tolist()
    [3]
    """
    return ahead


def episode_offset(noise: torch.Tensor, behind: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
    """Returns an offset uniform over `-behind .. ahead`: any surviving row of the episode.

    >>> episode_offset(torch.tensor([0, 5]), torch.tensor([2, 2]), torch.tensor([3, 3])).tolist()
    [-2, 3]
    """
    return noise % (behind + ahead + 1) - behind
