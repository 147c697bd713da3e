"""Reads the infos of a step for each environment.

Infos come in the three forms that gymnasium has:

- for a single environment: a dictionary;
- for a vector: a dictionary of arrays `[E, ...]` or of such dictionaries, each with a mask
  `_name` that says for which environments it is set; `final_obs` is an array of objects;
- for a vector under `gymnasium.wrappers.vector.DictInfoToList`: a list of dictionaries.

Letters: E environments, L of them that made a transition.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.keys import key_path
from trl_storages.writing.plan import StepLayout, entries, leaves_of, read_tree

__all__ = [
    "Infos",
    "last_observations",
]

_MISSING = object()


class Infos:
    """The infos of a step.

    Args:
        infos: in any of the three forms.
        num_envs: E.
        is_vector: whether they are of a vector of environments.
    """

    def __init__(self, infos: Any, num_envs: int, is_vector: bool) -> None:
        self._infos, self._num_envs, self._is_vector = infos, num_envs, is_vector
        self._is_mapping = type(infos) is dict or isinstance(infos, Mapping)

    def of_lanes(self, key: NestedKey, lanes: Sequence[int], ended: Sequence[int]) -> Any:
        """Returns an entry of the L environments `lanes`.

        Args:
            key: of the entry; a leading "next" does not count.
            lanes: the L environments.
            ended: those of them that were reset in the same step: the infos of their step are in
                `final_info`, and those at the top level are of the reset. But what the loop itself added
                to the infos of a vector, which has no mask, is of the step.

        Returns:
            `[L, ...]`, without the leading dimension for a single environment.

        Raises:
            KeyError: an environment does not have the entry.
            TypeError: it is a tuple of tensors.
        """
        path = key_path(key)
        path = path[1:] if path[0] == "next" else path
        if self._is_mapping:
            _refuse_pair(self._infos.get(path[0]), path)
        is_of_loop = self._is_vector and self._is_mapping
        if is_of_loop and not ended and (whole := self._whole(path, lanes)) is not _MISSING:
            return whole
        is_of_loop = is_of_loop and f"_{path[0]}" not in self._infos
        values = []
        for lane in lanes:
            full = ("final_info", *path) if lane in ended else path
            value = self._of_lane(full, lane)
            if value is _MISSING and is_of_loop:
                value = self._of_lane(path, lane)
            if value is _MISSING:
                raise KeyError(
                    f"the info {'.'.join(full)!r} must be there at every step, environment {lane} does "
                    f"not have it; there are {self._names(lane)}; correct info_keys or extra_fields, or "
                    f"hand it on, as in {{**infos, {full[-1]!r}: ...}}"
                )
            values.append(value)
        if not self._is_vector:
            return values[0]
        if isinstance(values[0], torch.Tensor):
            return torch.stack(values)
        return np.stack([np.asarray(value) for value in values])

    def final_obs(self, lane: int) -> Any:
        """Returns the last observation of an environment that ended.

        Raises:
            ValueError: it is not there.
        """
        found = self._of_lane(("final_obs",), lane)
        if found is _MISSING or found is None:
            raise ValueError(
                f"environment {lane} ended, and infos['final_obs'] must hold its last observation with "
                f"autoreset_mode 'SameStep', got the keys {self._names(lane)}; pass the infos of `step` "
                "as they are, or the mode that the environments have (env.metadata['autoreset_mode'])"
            )
        return found

    def _whole(self, path: tuple[str, ...], lanes: Sequence[int]) -> Any:
        """Returns the entry of all `lanes` in one piece; _MISSING unless each of them has it."""
        value = self._infos
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
        return value if len(lanes) == self._num_envs else value[list(lanes)]

    def _of_lane(self, path: tuple[str, ...], lane: int) -> Any:
        is_masked = self._is_vector and self._is_mapping
        value = self._infos[lane] if self._is_vector and not is_masked else self._infos
        for name in path:
            if is_masked and isinstance(value, list | tuple | np.ndarray):
                # `final_info` with a dictionary for each environment.
                value, is_masked = value[lane], False
            if not isinstance(value, Mapping) or name not in value:
                return _MISSING
            mask = value.get(f"_{name}") if is_masked else None
            if mask is not None and not mask[lane]:
                return _MISSING
            value = value[name]
        return _row(value, lane) if is_masked else value

    def _names(self, lane: int) -> list[str]:
        infos = self._infos if self._is_mapping else self._infos[lane]
        return sorted(str(name) for name in infos if not str(name).startswith("_"))


def _refuse_pair(value: Any, path: tuple[str, ...]) -> None:
    if isinstance(value, tuple) and value and all(isinstance(each, torch.Tensor) for each in value):
        raise TypeError(
            f"infos[{path[0]!r}] must be one tensor, got a tuple of {len(value)}: store each under a "
            "name of its own, as with extra_fields={'hidden': ..., 'cell': ...}"
        )


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


def last_observations(
    layout: StepLayout, infos: Infos, lane: int
) -> Iterator[tuple[NestedKey, torch.Tensor]]:
    """Yields the checked entries of the last observation of an environment that ended.

    Args:
        layout: of the transitions.
        infos: those of the step.
        lane: the environment.

    Raises:
        KeyError, TypeError, ValueError: it is not an observation, or missing.
    """
    name, given = "infos['final_obs']", infos.final_obs(lane)
    values = read_tree(layout.observations, entries(given), name)
    for leaf, value in zip(leaves_of(layout.observations), values, strict=True):
        column = layout.columns[leaf.key].read(value, name, leaf.label, is_vector=False)
        yield leaf.next_key, column[0]
