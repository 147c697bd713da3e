"""Applies transforms to a sampled batch, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tensordict import TensorDictBase
from torchrl.envs.transforms import Compose, Transform

from trl_storages._torchrl import dispatch_td_nn_modules
from trl_storages.transforms.base import ReplayTransform, SeenRows

__all__ = ["apply_transforms", "hide_next", "parts_of"]


def apply_transforms(
    parts: Sequence[Transform], batch: TensorDictBase, rows: SeenRows | None
) -> TensorDictBase:
    """Applies transforms to a batch, and to the rows that later ones read beside it.

    Args:
        parts: the transforms, as `parts_of` lists them.
        batch: sampled transitions.
        rows: of the storage; None leaves out the transforms that read them.

    Returns:
        the batch as the last transform shows it.
    """
    for part, follower in pairwise([*parts, None]):
        if not isinstance(part, ReplayTransform):
            with dispatch_td_nn_modules(True):
                batch = part(batch)
        elif rows is not None:
            rows.follower = follower
            batch = part.replay(batch, rows)
        if follower is not None and rows is not None:
            rows = rows.through(part)
    return batch


def hide_next(parts: Sequence[Transform]) -> bool:
    """Returns whether what is stored under `next` of the sampled rows is never read."""
    first, second = [*parts[:2], None, None][:2]
    return isinstance(first, ReplayTransform) and first.hides_next(second)


def parts_of(transform: Transform) -> list[Transform]:
    """Returns the transforms that a `Compose` is made of, nested ones included."""
    if not isinstance(transform, Compose):
        return [transform]
    return [part for inner in transform.transforms for part in parts_of(inner)]
