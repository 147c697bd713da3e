"""Rows without next observations, which TorchRL's collectors leave out with `compact_obs=True`."""

from __future__ import annotations

import torch
from tensordict import NestedKey

from trl_storages.callers import warn_caller
from trl_storages.keys import next_key, shared_keys
from trl_storages.rows import Layout

__all__ = ["warn_of_lost_ends", "with_next"]


def with_next(
    entries: dict[NestedKey, torch.Tensor], layout: Layout | None
) -> dict[NestedKey, torch.Tensor] | None:
    """Fills in missing next observations with the observations of the same rows.

    They stay until the following row is written; at the end of an episode, for good.

    Args:
        entries: of rows to write.
        layout: of the stored rows; None if there are none yet.

    Returns:
        None if no entry is missing, or others than next observations are.

    Raises:
        KeyError: next observations are missing, and the rows do not share them.
    """
    missing = () if layout is None else [key for key in layout.keys if key not in entries]
    if layout is None or not missing:
        return None
    keys = shared_keys(layout.keys)
    if not keys or any(next_key(key) in entries or key not in entries for key in keys):
        return None
    if layout.framed.sharing is None:
        raise KeyError(
            f"the data lacks {[*map(next_key, keys)]}, which collectors with compact_obs=True leave out: "
            "make the storage with share_next=True, or the collector without compact_obs."
        )
    return {**entries, **{next_key(key): entries[key] for key in keys}}


def warn_of_lost_ends() -> None:
    """Warns that the final observations of episodes are not written."""
    warn_caller(
        "next observations are left out of what is written, as by a collector with compact_obs=True: the "
        "last row of each episode shows its own observation as the next one, and what is bootstrapped "
        "from truncated ends, or is a goal by hindsight there, is of that. Make the collector without "
        "compact_obs if episodes are truncated or have goals; otherwise ignore this warning, which "
        "comes once."
    )
