"""Reads the infos of a gymnasium step.

The infos of a vector environment hold arrays `[E, ...]`, or dictionaries of arrays. Each `name` has a
mask `_name`, which says which environments the values belong to. If an environment is reset in the step
that ends its episode, `final_obs` and `final_info` hold the values of that step, and all other infos
belong to the reset.

Letters: E environments, L of them that made a transition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import NestedKey, unravel_key

from trl_storages import keys

__all__ = ["any_info", "final_observation", "info_of_step", "info_path"]


def info_path(key: NestedKey, info_keys: Sequence[NestedKey]) -> tuple[str, ...]:
    """Returns the path of a field in the infos.

    A leading "next" is dropped, unless `info_keys` also name the field without "next".
    """
    path = keys.key_path(key)
    is_single = path[0] == "next" and unravel_key(path[1:]) not in info_keys
    return path[1:] if is_single else path


def info_of_step(infos: Any, path: tuple[str, ...], lanes: Any, was_reset: np.ndarray) -> Any:
    """Returns an info of one step, as the environment or the loop stored it.

    Args:
        infos: of the step.
        path: of the info.
        lanes: `[L]` the environments that made a transition; None is all.
        was_reset: `[E]` bool, whether an environment was reset in the same step: its info is in
            `final_info`. Infos without a mask, which the loop added, belong to the step.

    Raises:
        KeyError: an environment lacks the info.
    """
    value, has_value = _look_up(infos, path)
    if was_reset.any() and (value is None or f"_{path[0]}" in infos):
        final_value, has_final_value = _look_up(infos.get("final_info"), path)
        has_value = np.where(was_reset, has_final_value, has_value)
        if value is None:
            value = final_value
        elif final_value is not None:
            is_final = was_reset.reshape(-1, *[1] * (np.ndim(final_value) - 1))
            value = np.where(is_final, final_value, value)
    has_value = np.broadcast_to(has_value, was_reset.shape)
    if value is None or not has_value[slice(None) if lanes is None else lanes].all():
        raise _missing(infos, path)
    return value


def any_info(infos: Any, path: tuple[str, ...]) -> Any:
    """Returns an info of the step or of the last step before a reset, for its dtype and shape.

    Raises:
        KeyError: the info is missing.
    """
    for source in (infos, infos.get("final_info")):
        value, _ = _look_up(source, path)
        if value is not None:
            return value
    raise _missing(infos, path)


def final_observation(infos: Any, lane: int) -> Any:
    """Returns the last observation of an environment that ended and was reset.

    Raises:
        ValueError: the infos lack this observation.
    """
    observations, mask = infos.get("final_obs"), infos.get("_final_obs")
    if observations is None or (mask is not None and not mask[lane]):
        raise ValueError(
            f"environment {lane} ended, and infos['final_obs'] must hold its last observation with "
            f"autoreset_mode 'SameStep', got {sorted(map(str, infos))}: does the environment have that "
            "mode?"
        )
    return _row(observations, lane)


def _look_up(infos: Any, path: tuple[str, ...]) -> tuple[Any, Any]:
    """Returns an info, None if it is missing, and which environments have it: `[E]` bool, or one bool."""
    has_value: Any = True
    for name in path:
        if not isinstance(infos, Mapping) or name not in infos:
            return None, False
        has_value = has_value & np.asarray(infos.get(f"_{name}", True))
        infos = infos[name]
    return infos, has_value


def _missing(infos: Any, path: tuple[str, ...]) -> KeyError:
    names = sorted(str(name) for name in infos if not str(name).startswith("_"))
    return KeyError(
        f"the infos must hold {'.'.join(path)!r} at every step of every environment, got {names}: "
        f"pass it, as in {{**infos, {path[0]!r}: ...}}."
    )


def _row(values: Any, lane: int) -> Any:
    """Returns the value of one environment, also from dictionaries of arrays `[E, ...]`."""
    if isinstance(values, Mapping):
        return {name: _row(value, lane) for name, value in values.items()}
    return values[lane]
