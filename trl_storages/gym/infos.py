"""Reads the infos of a step for each environment, in the three forms that gymnasium has.

- for a single environment: a dictionary;
- for a vector: a dictionary of arrays `[E, ...]` or of such dictionaries, each with a mask
  `_name` that says for which environments it is set; `final_obs` is an array of objects;
- for a vector under `gymnasium.wrappers.vector.DictInfoToList`: a list of dictionaries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.keys import key_path

__all__ = ["final_observation", "info_values"]

_MISSING = object()


def final_observation(infos: Any, lane: int, *, is_vector: bool, needed: bool) -> Any:
    """Returns the true last observation of an environment; None if the infos lack it.

    Raises:
        ValueError: they lack it, and it is needed.
    """
    found = _lane_value(infos, ("final_obs",), lane, is_vector)
    found = None if found is _MISSING else found
    if found is None and needed:
        raise ValueError(
            f"environment {lane} ended, and with autoreset_mode 'SameStep' "
            f"infos['final_obs'] must hold its last observation, got the keys "
            f"{_names(infos, lane)}; pass the infos of `step` as they are, or the autoreset_mode "
            "that the environments have (env.metadata['autoreset_mode'])"
        )
    return found


def info_values(
    infos: Any,
    key: NestedKey,
    lanes: Sequence[int],
    ended: Sequence[int],
    *,
    num_envs: int,
    is_vector: bool,
) -> Any:
    """Returns an info entry of the L environments `lanes`.

    Args:
        infos: of the step.
        key: of the entry in the infos; a leading "next" does not count.
        lanes: the L environments.
        ended: those of them that were reset in the same step: the infos of their step are in
            `final_info`, and those at the top level are of the reset. But what the loop itself added
            to the infos of a vector, which has no mask, is of the step.
        num_envs: E.
        is_vector: whether the infos are of a vector of environments.

    Returns:
        `[L, ...]`, without the leading dimension where `is_vector` is false.

    Raises:
        KeyError: an environment does not have the entry.
        TypeError: it is a tuple of tensors.
    """
    path = key_path(key)
    path = path[1:] if path[0] == "next" else path
    if isinstance(infos, Mapping):
        _refuse_pair(infos.get(path[0]), path)
    if is_vector and not ended and isinstance(infos, Mapping):
        whole = _whole(infos, path, lanes, num_envs)
        if whole is not _MISSING:
            return whole
    values = []
    was_reset = set(ended)
    is_of_loop = is_vector and isinstance(infos, Mapping) and f"_{path[0]}" not in infos
    for lane in lanes:
        full = ("final_info", *path) if lane in was_reset else path
        value = _lane_value(infos, full, lane, is_vector)
        if value is _MISSING and is_of_loop:
            value = _lane_value(infos, path, lane, is_vector)
        if value is _MISSING:
            raise KeyError(
                f"the info {'.'.join(full)!r} must be there at every step, environment {lane} "
                f"does not have it; there are {_names(infos, lane)}; "
                "correct info_keys or extra_fields, or hand it on, as in "
                f"{{**infos, {full[-1]!r}: ...}}"
            )
        values.append(value)
    if not is_vector:
        return values[0]
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    return np.stack([np.asarray(value) for value in values])


def _refuse_pair(value: Any, path: tuple[str, ...]) -> None:
    if isinstance(value, tuple) and value and all(isinstance(each, torch.Tensor) for each in value):
        raise TypeError(
            f"infos[{path[0]!r}] must be one tensor, got a tuple of {len(value)}: store each under a "
            "name of its own, such as the two of an LSTM with extra_fields={'hidden': ..., 'cell': ...} "
            "by {**infos, 'hidden': hidden, 'cell': cell}"
        )


def _whole(infos: Any, path: tuple[str, ...], lanes: Sequence[int], num_envs: int) -> Any:
    """Returns the entry of all `lanes` in one piece; _MISSING unless each of them has it."""
    value = infos
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return _MISSING
        mask = value.get(f"_{name}")
        if mask is not None and not mask.all() and not mask[list(lanes)].all():
            return _MISSING
        value = value[name]
    # Object arrays and lists, filled by the environments, are read one environment at a time.
    if not getattr(value, "shape", ()) or value.dtype == object:
        return _MISSING
    return value if len(lanes) == num_envs else value[list(lanes)]


def _lane_value(infos: Any, path: tuple[str, ...], lane: int, is_vector: bool) -> Any:
    if is_vector and not isinstance(infos, Mapping):
        infos, is_vector = infos[lane], False
    for name in path:
        if not isinstance(infos, Mapping) or name not in infos:
            return _MISSING
        mask = infos.get(f"_{name}") if is_vector else None
        if mask is not None and not mask[lane]:
            return _MISSING
        infos = infos[name]
    if not is_vector:
        return infos
    return _row(infos, lane)


def _row(value: Any, lane: int) -> Any:
    """Returns the row of one environment, also from dictionaries of columns."""
    if isinstance(value, Mapping):
        return {name: _row(entry, lane) for name, entry in value.items()}
    try:
        return value[lane]
    except (IndexError, TypeError) as error:
        raise ValueError(
            f"the infos of a vector must hold a value for each environment, got {value!r:.80}; pass "
            "the infos of `step` as they are, or a list with a dictionary for each environment"
        ) from error


def _names(infos: Any, lane: int) -> list[str]:
    if not isinstance(infos, Mapping):
        infos = infos[lane] if isinstance(infos, Sequence) and lane < len(infos) else {}
    return sorted(str(name) for name in infos if not str(name).startswith("_"))
