"""Registry of this process's replay storages: rejects shared parts and resets locks after a fork."""

from __future__ import annotations

import weakref
from collections import deque
from threading import RLock
from typing import Any

from torchrl.data import RandomSampler

from trl_storages.disk.files import in_forked_child
from trl_storages.samplers import layers_of

__all__ = ["check_own_parts", "register"]

_CONTAINERS: weakref.WeakSet[Any] = weakref.WeakSet()


def register(container: Any) -> None:
    """Registers a replay storage whose parts were checked."""
    _CONTAINERS.add(container)


def check_own_parts(rows: Any, **parts: Any) -> None:
    """Checks that stateful parts are not already in use with other rows.

    Args:
        rows: the storage that they are for.
        **parts: sampler, writer and recorder, or functions that make them.

    Raises:
        ValueError: a replay storage with other rows uses one of them.
    """
    for other in list(_CONTAINERS):
        if other._storage is rows:
            continue
        for name, part in parts.items():
            theirs = getattr(other, f"_{name}")
            shared = [
                each for each in layers_of(part) if any(each is it for it in layers_of(theirs))
            ]
            if stateful := [each for each in shared if _has_state(each)]:
                raise ValueError(
                    f"{name} must be this storage's own, got a {type(stateful[-1]).__name__} that keeps "
                    "the state of another storage's rows: make one for each storage."
                )


def _has_state(part: Any) -> bool:
    """Whether a part keeps more than settings, unlike uniform samplers and most that wrap others."""
    if part is None or (isinstance(part, RandomSampler) and not part.state_dict()):
        return False
    return bool(getattr(part, "_counts", True))


def _make_anew() -> None:
    """Replaces locks that the parent's threads may hold, and drops the batches they were prefetching."""
    for container in list(_CONTAINERS):
        for name in ("_replay_lock", "_write_lock", "_futures_lock"):
            if isinstance(getattr(container, name), type(RLock())):
                setattr(container, name, RLock())
        container._prefetch_queue = deque()
        container._prefetch_in_order()


# A forked child can keep reading, whatever its parent's threads were doing.
in_forked_child(_make_anew)
