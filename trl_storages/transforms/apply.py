"""Shows drawn rows as transforms say, in their order."""

from __future__ import annotations

from collections.abc import Iterable

from tensordict import TensorDictBase
from torchrl.envs.transforms import Compose, Transform

from trl_storages._torchrl import dispatch_td_nn_modules
from trl_storages.rows import RowView
from trl_storages.transforms.base import ReplayTransform

__all__ = ["apply_transforms", "parts_of", "transform_batch"]


def apply_transforms(parts: Iterable[Transform], rows: RowView) -> TensorDictBase:
    """Applies transforms to drawn rows.

    Args:
        parts: the transforms, as `parts_of` lists them.
        rows: what was drawn.

    Returns:
        the batch as the last transform shows it.
    """
    for part in parts:
        if isinstance(part, ReplayTransform):
            part.replay(rows)
        else:
            with dispatch_td_nn_modules(True):
                rows.transform(part)
    return rows.tensordict()


def transform_batch(parts: Iterable[Transform], batch: TensorDictBase) -> TensorDictBase:
    """Applies those transforms to a batch that need no further rows."""
    for part in parts:
        if not isinstance(part, ReplayTransform):
            with dispatch_td_nn_modules(True):
                batch = part(batch)
    return batch


def parts_of(transform: Transform) -> list[Transform]:
    """Returns the transforms that a `Compose` is made of, nested ones included."""
    if not isinstance(transform, Compose):
        return [transform]
    parts: list[Transform] = []
    # To ask a module for its modules takes several times as long.
    for part in transform._modules["transforms"]._modules.values():
        parts += parts_of(part)
    return parts
