"""Which tree is made."""

import os

import torch

from trl_storages._torchrl import native_sum_tree
from trl_storages.priority_tree.base import PriorityTree
from trl_storages.priority_tree.levels import LevelTree
from trl_storages.priority_tree.native import NativeTree

__all__ = ["has_native_tree", "priority_tree"]


def has_native_tree() -> bool:
    """Returns whether TorchRL's compiled sum tree loads, and may be used.

    It loads with one release of torch only. The environment variable `TRL_STORAGES_NATIVE_TREE=0`
    hides it.
    """
    return native_sum_tree is not None and os.environ.get("TRL_STORAGES_NATIVE_TREE") != "0"


def priority_tree(
    capacity: int, *, alpha: float, eps: float, device: torch.device | str = "cpu"
) -> PriorityTree:
    """Makes the fastest tree there is on `device`.

    Args:
        capacity: number of leaves N.
        alpha: exponent of the draws, at least 0.
        eps: added to priorities, above 0.
        device: where the tree lives and answers.

    >>> tree = priority_tree(4, alpha=1.0, eps=1e-6)
    >>> tree.renew(torch.tensor([0, 2]), 1.0)
    >>> _ = tree.set(torch.tensor([0]), torch.tensor([3.0]))
    >>> leaf, priority, generation = tree.draw(torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64))
    >>> leaf.tolist()
    [0, 0, 2]
    """
    device = torch.device(device)
    kind = NativeTree if device.type == "cpu" and has_native_tree() else LevelTree
    return kind(capacity, alpha=alpha, eps=eps, device=device)
