"""Applies transforms to a sampled batch, in their order."""

from __future__ import annotations

from itertools import pairwise

from tensordict import TensorDictBase
from torchrl.envs.transforms import Compose, Transform

from trl_storages._torchrl import dispatch_td_nn_modules
from trl_storages.transforms.base import ReplayTransform, SeenRows

__all__ = ["apply_transforms"]


def apply_transforms(
    transform: Transform, batch: TensorDictBase, rows: SeenRows | None
) -> TensorDictBase:
    """Applies transforms to a batch, and to the rows that later ones read beside it.

    Args:
        transform: one, or several as a `Compose`, which may be empty.
        batch: sampled transitions.
        rows: of the storage; None leaves out the transforms that read them.

    Returns:
        the batch as the last transform shows it.
    """
    for part, follower in pairwise([*_parts(transform), None]):
        if not isinstance(part, ReplayTransform):
            with dispatch_td_nn_modules(True):
                batch = part(batch)
        elif rows is not None:
            rows.follower = follower
            batch = part.replay(batch, rows)
        if follower is not None and rows is not None:
            rows = rows.through(part)
    return batch


def _parts(transform: Transform) -> list[Transform]:
    """Returns the transforms that a `Compose` is made of, nested ones included."""
    if not isinstance(transform, Compose):
        return [transform]
    return [part for inner in transform.transforms for part in _parts(inner)]
