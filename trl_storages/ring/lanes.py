"""Which lanes of a ring are meant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["Lanes", "named_lanes"]

Lanes = Sequence[int] | torch.Tensor | None


def named_lanes(lanes: Lanes, num_envs: int) -> Sequence[int]:
    """Returns the numbers of the lanes that `lanes` names, checked on the host.

    Args:
        lanes: distinct numbers as a sequence or tensor, or a bool mask `[E]`; None is all.
        num_envs: number of lanes E.

    Raises:
        ValueError: `lanes` is something else, or names an unknown lane or one twice.
    """
    if lanes is None:
        return range(num_envs)
    try:
        ids = np.asarray(lanes.cpu() if isinstance(lanes, torch.Tensor) else lanes)
    except ValueError:  # lists of unequal lengths
        ids = np.asarray(None)
    if ids.dtype == bool:
        if ids.shape != (num_envs,):
            raise ValueError(
                f"a mask of lanes must have shape [{num_envs}], got {list(ids.shape)}."
            )
        ids = ids.nonzero()[0]
    values = ids.reshape(-1).tolist() if ids.dtype.kind in "iu" else []
    if (
        ids.ndim != 1
        or not values
        or len(set(values)) != len(values)
        or not all(0 <= lane < num_envs for lane in values)
    ):
        raise ValueError(
            f"lanes must be a list of distinct numbers in 0..{num_envs - 1}, got {lanes}."
        )
    return values
