"""Lets the first steps after a resume show whether they are of the same environments.

Letters: E environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import NestedKey, TensorDict

from trl_storages.keys import next_key, shared_keys
from trl_storages.rows import PackedStorage, as_array, read_fields

__all__ = ["doubt_ends"]


def doubt_ends(storage: Any) -> None:
    """Lets the next `record` tell whether it is of the environments that were stored, or of new ones."""
    recorder, rows = storage._recorder, storage._storage
    if not recorder.ended or getattr(rows, "reader", None) is not None:
        return
    episodes, ends = rows.episodes, {}
    if not len(episodes) and recorder.is_in_doubt:
        # The rows were removed since.
        return
    if len(episodes):
        is_packed = isinstance(rows, PackedStorage)
        stored: Any = rows.layout.keys if is_packed else [*rows._storage.keys(True, True)]
        keys = [key for key in shared_keys(stored) if key not in recorder.info_keys]
        led_to = read_fields(rows, episodes.newest_slots(), [next_key(key) for key in keys])
        ends = {key: as_array(led_to[next_key(key)]) for key in keys}
    recorder.doubt(partial(_goes_on, storage, ends, episodes.host_fill > 0))


def _goes_on(
    storage: Any,
    ends: Mapping[NestedKey, NDArray[Any]],
    has_rows: NDArray[np.bool_],
    steps: TensorDict,
) -> NDArray[np.bool_]:
    """Returns which of the transitions `[E]` begin with what their lanes ended with, `[E]`.

    Args:
        storage: the `ReplayStorage`.
        ends: key -> `[E, *shape]`.
        has_rows: `[E]` which lanes have rows.
        steps: from before the transforms.
    """
    rows = storage._transform.inv(steps)
    known = [] if rows is None else [*rows.keys(True)]
    there = {key: as_array(rows[key]) for key in ends if key in known}
    return np.array(
        [
            is_known
            and all(it[lane].tobytes() == ends[key][lane].tobytes() for key, it in there.items())
            for lane, is_known in enumerate(has_rows)
        ]
    )
