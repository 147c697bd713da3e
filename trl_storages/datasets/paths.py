"""Episodes that come one by one, joined into arrays.

Letters: T steps of an episode, N rows of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trl_storages.arrays.names import ROLE_OF
from trl_storages.keys import nested

__all__ = ["join_paths"]


def join_paths(paths: Sequence[Any]) -> tuple[dict[str, Any], np.ndarray]:
    """Joins episodes.

    Args:
        paths: dictionaries of `[T, ...]` arrays, also nested; observations may be `[T + 1, ...]`,
            with what the last step led to.

    Returns:
        the same entries of all `[N, ...]`, and `[N]` bool, where the episodes end.

    Raises:
        TypeError: one is no dictionary.
        KeyError: one has other entries than the first.
        ValueError: there is none.

    >>> data, ends = join_paths([{"obs": [1, 2, 3], "acts": [0, 0]}, {"obs": [5, 6], "acts": [1]}])
    >>> data["obs"].tolist(), data["next_obs"].tolist(), ends.tolist()
    ([1, 2, 5], [2, 3, 6], [False, True, True])
    """
    if not len(paths):
        raise ValueError("data must hold an episode at least, got an empty sequence.")
    parts: dict[tuple[str, ...], list[Any]] = {}
    lengths = []
    for number, path in enumerate(paths):
        if not isinstance(path, Mapping):
            raise TypeError(
                "data must be a dictionary of arrays, or a sequence of such dictionaries, got "
                f"{type(path).__name__} as number {number}."
            )
        leaves, num_steps = _steps_of(path, number)
        if number and leaves.keys() != parts.keys():
            raise KeyError(
                f"all episodes of data must have the entries of the first, {_names(parts)}; number "
                f"{number} has {_names(leaves)}."
            )
        for key, value in leaves.items():
            parts.setdefault(key, []).append(value)
        lengths.append(num_steps)
    joined = nested((key, _joined(key, values)) for key, values in parts.items())
    last = np.cumsum(lengths) - 1
    ends = np.zeros(last[-1] + 1, bool)
    ends[last] = True
    return joined, ends


def _steps_of(path: Mapping[str, Any], number: int) -> tuple[dict[tuple[str, ...], Any], int]:
    """Returns the entries of an episode, one row a step, and T."""
    leaves = dict(_leaves((), path))
    of = {name: ROLE_OF.get(name) for name in path}
    actions = [value for key, value in leaves.items() if of[key[0]] == "actions"]
    if not actions:
        raise KeyError(
            f"each episode of data must have the entry 'actions'; number {number} has {_names(leaves)}."
        )
    num_steps = len(actions[0])
    seen = [key for key in leaves if of[key[0]] == "observations"]
    has_last = bool(seen) and all(len(leaves[key]) == num_steps + 1 for key in seen)
    if has_last and "next_observations" not in of.values():
        for key in seen:
            after = ("next_" + key[0], *key[1:])
            leaves[after], leaves[key] = leaves[key][1:], leaves[key][:-1]
    wrong = {_name(key): len(value) for key, value in leaves.items() if len(value) != num_steps}
    if wrong or not num_steps:
        raise ValueError(
            f"each episode of data must have one row for each step, and one at least; number {number} "
            f"has {num_steps} actions, and {wrong or 'nothing else'}."
        )
    return leaves, num_steps


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves((*path, name), part)
        return
    try:
        len(value)
    except TypeError as error:
        raise TypeError(
            f"{_name(path)!r} of each episode of data must be an array of one row for each step, got "
            f"{type(value).__name__}."
        ) from error
    yield path, value


def _joined(key: tuple[str, ...], values: Sequence[Any]) -> Any:
    try:
        if isinstance(values[0], torch.Tensor):
            return torch.cat([torch.as_tensor(value) for value in values])
        return np.concatenate([np.asarray(value) for value in values])
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{_name(key)!r} must have the same shape in all episodes of data: {error}."
        ) from error


def _name(key: Sequence[str]) -> str:
    return "/".join(map(str, key))


def _names(keys: Iterable[Sequence[str]]) -> list[str]:
    return sorted(map(_name, keys))
