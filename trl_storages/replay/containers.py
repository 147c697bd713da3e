"""The replay storages of this process: parts they must not share, and what a forked child makes anew."""

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
    """Adds a replay storage whose parts were checked."""
    _CONTAINERS.add(container)


def check_own_parts(rows: Any, **parts: Any) -> None:
    """Checks that parts which keep the state of their rows are not those of other rows.

    Args:
        rows: the storage that they are for.
        **parts: sampler, writer and recorder, or functions that make them.

    Raises:
        ValueError: a replay storage with other rows has one of them.
    """
    for other in list(_CONTAINERS):
        if other._storage is rows:
            continue
        for name, part in parts.items():
            theirs = getattr(other, f"_{name}")
            if name == "sampler":
                part, theirs = layers_of(part)[-1], layers_of(theirs)[-1]
            # Those that draw uniformly keep nothing.
            if part is theirs and not isinstance(part, RandomSampler | None):
                raise ValueError(
                    f"{name} must be this storage's own, got a {type(part).__name__} that keeps the "
                    "state of another storage's rows: make one for each storage."
                )


def _make_anew() -> None:
    """Replaces what the threads of the parent may hold, and batches that they were drawing."""
    for container in list(_CONTAINERS):
        for name in ("_replay_lock", "_write_lock", "_futures_lock"):
            if isinstance(getattr(container, name), type(RLock())):
                setattr(container, name, RLock())
        container._prefetch_queue = deque()
        container._prefetch_in_order()


# A child reads on, whatever its parent was doing.
in_forked_child(_make_anew)
