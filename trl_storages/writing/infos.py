"""The infos of a step: gymnasium's dictionary of one environment, or of a vector of them.

That of a vector holds arrays `[E, ...]`, or dictionaries of them, each with a mask `_name` that says of
which environments it is. Where an environment is reset in the step that ends its episode, `final_obs`
and `final_info` hold what the step returned, and the rest is of the reset.

Letters: E environments, L of them that made a transition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.keys import key_path

__all__ = ["column_of", "final_obs", "info_of"]

Infos = Mapping[str, Any]


def info_of(infos: Infos, key: NestedKey) -> Any:
    """Returns an entry of the infos of a single environment; a leading "next" does not count.

    Raises:
        KeyError: there is none.
    """
    found: Any = infos
    for name in _path(key):
        if not isinstance(found, Mapping) or name not in found:
            raise _missing(infos, key)
        found = found[name]
    return found


def column_of(infos: Infos, key: NestedKey, lanes: np.ndarray, ended: np.ndarray) -> Any:
    """Returns an entry of the infos of a vector; a leading "next" does not count.

    Args:
        infos: of the step.
        key: of the entry.
        lanes: `[L]` the environments that made a transition.
        ended: `[E]` bool, those that were reset in the same step: their entry is in `final_info`. But
            what the loop itself added to the infos, which has no mask, is of the step.

    Returns:
        `[L, ...]`.

    Raises:
        KeyError: an environment does not have the entry.
        ValueError: there is not one value for each environment.
    """
    path = _path(key)
    found, is_there = _column(infos, path, len(ended))
    if ended.any() and (path[0] not in infos or f"_{path[0]}" in infos):
        last, is_last = _column(infos.get("final_info"), path, len(ended))
        is_there = np.where(ended, is_last, is_there)
        if found is None or last is None:
            found = last if found is None else found
        else:
            found = found.clone() if isinstance(found, torch.Tensor) else found.copy()
            found[ended] = last[ended]
    if not is_there[lanes].all():
        raise _missing(infos, key)
    found = found if len(lanes) == len(ended) else found[lanes]
    # What gymnasium has no dtype for, such as lists of numbers.
    return np.stack([*map(np.asarray, found)]) if found.dtype == object else found


def final_obs(infos: Infos, lane: int) -> Any:
    """Returns the last observation of an environment that ended and was reset.

    Raises:
        ValueError: it is not there.
    """
    found, mask = infos.get("final_obs"), infos.get("_final_obs")
    if found is None or (mask is not None and not mask[lane]):
        raise ValueError(
            f"environment {lane} ended, and infos['final_obs'] must hold its last observation with "
            f"autoreset_mode 'SameStep', got {sorted(map(str, infos))}: pass the infos of `step` as they "
            "are, or the mode that the environments have (env.metadata['autoreset_mode'])."
        )
    return _row(found, lane)


def _column(infos: Any, path: tuple[str, ...], num_envs: int) -> tuple[Any, np.ndarray]:
    """Returns an entry `[E, ...]`, None if there is none, and of which environments it is."""
    is_there = np.ones(num_envs, bool)
    for name in path:
        if not isinstance(infos, Mapping) or name not in infos:
            return None, np.zeros(num_envs, bool)
        is_there = is_there & np.asarray(infos.get(f"_{name}", True))
        infos = infos[name]
    found = infos.detach() if isinstance(infos, torch.Tensor) else np.asarray(infos)
    if found.shape[:1] != (num_envs,):
        raise ValueError(
            f"infos must hold a value of {'.'.join(path)!r} for each of {num_envs} environments, got "
            f"{infos!r:.80}."
        )
    return found, is_there


def _path(key: NestedKey) -> tuple[str, ...]:
    path = key_path(key)
    return path[1:] if path[0] == "next" else path


def _missing(infos: Infos, key: NestedKey) -> KeyError:
    there = sorted(str(name) for name in infos if not str(name).startswith("_"))
    return KeyError(
        f"the infos must hold {'.'.join(_path(key))!r} at every step of every environment, got {there}: "
        f"hand it on, as in {{**infos, {_path(key)[-1]!r}: ...}}."
    )


def _row(value: Any, lane: int) -> Any:
    """Returns the row of one environment, also of a dictionary of columns."""
    if isinstance(value, Mapping):
        return {name: _row(entry, lane) for name, entry in value.items()}
    return value[lane]
