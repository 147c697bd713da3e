"""Reads the infos of a step for each environment, and detects resets that they don't announce.

Infos come in the three forms that gymnasium has:

- for a single environment: a dictionary;
- for a vector: a dictionary of arrays `[E, ...]` or of such dictionaries, each with a mask
  `_name` that says for which environments it is set; `final_obs` is an array of objects;
- for a vector under `gymnasium.wrappers.vector.DictInfoToList`: a list of dictionaries.

Letters: E environments, L of them that made a transition.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.callers import warn_caller
from trl_storages.gym.layout import StepLayout, entries, leaves_of, read_tree
from trl_storages.keys import DONE, REWARD, TERMINATED, TRUNCATED, key_path
from trl_storages.rows import as_array

__all__ = [
    "Infos",
    "LastBits",
    "check_last_observations",
    "check_time_limits",
    "ends_to_watch",
    "last_observations",
]

_MISSING = object()
# Names of last observations: gymnasium's of today and before 1.0, and that of Stable-Baselines3's VecEnv.
_LAST = ("final_obs", "final_observation", "terminal_observation")
#: The bytes of the last observations of episodes, by environment.
LastBits = dict[int, list[bytes]]


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

    def final_observation(self, lane: int, *, needed: bool) -> tuple[str, Any] | None:
        """Returns the name and value of the last observation of an environment that ended, if there.

        Raises:
            ValueError: it is needed, and not there.
        """
        for name in _LAST:
            found = self._of_lane((name,), lane)
            if found is not _MISSING and found is not None:
                return f"infos[{name!r}]", found
        if needed:
            raise ValueError(
                f"environment {lane} ended, and infos['final_obs'] must hold its last observation with "
                f"autoreset_mode 'SameStep', got the keys {self._names(lane)}; pass the infos of `step` "
                "as they are, or the mode that the environments have (env.metadata['autoreset_mode'])"
            )
        return None

    def has_reached_limit(self, lane: int) -> bool:
        """Returns whether a time limit alone ended the episode of an environment, if that is said."""
        name = "TimeLimit.truncated"
        for path in ((name,), ("final_info", name)):
            # What is not one flag of each environment says nothing of this one.
            with suppress(IndexError, TypeError, ValueError):
                value = np.asarray(self._of_lane(path, lane))
                if value.dtype == bool and value.ndim == 0 and value:
                    return True
        return False

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


# Loops whose environments are reset in another way than the storage was told.


def last_observations(
    layout: StepLayout, infos: Infos, lane: int, *, needed: bool
) -> Iterator[tuple[NestedKey, torch.Tensor]]:
    """Yields the checked entries of the last observation of an environment that ended.

    Args:
        layout: of the transitions.
        infos: those of the step.
        lane: the environment.
        needed: whether the infos must hold it; if False, nothing is yielded if they don't.

    Raises:
        KeyError, TypeError, ValueError: it is not an observation, or missing.
    """
    if (found := infos.final_observation(lane, needed=needed)) is None:
        return
    name, given = found
    values = read_tree(layout.observations, entries(given), name)
    for leaf, value in zip(leaves_of(layout.observations), values, strict=True):
        column = layout.columns[leaf.key].read(value, name, leaf.label, is_vector=False)
        yield leaf.next_key, column[0]


def check_last_observations(
    columns: Mapping[NestedKey, Any], layout: StepLayout, infos: Infos
) -> None:
    """Refuses next observations that are the first of a new episode, if the infos show it.

    Args:
        columns: the transitions of a step, `[E, ...]`.
        layout: how they were read.
        infos: those of the step.

    Raises:
        ValueError: the last observation in the infos is not the next observation that was given.
    """
    for lane in np.flatnonzero(as_array(columns[DONE])).tolist():
        last = last_observations(layout, infos, lane, needed=False)
        for key, value in last:
            if not np.array_equal(as_array(value), as_array(columns[key][lane])):
                raise ValueError(
                    f"next_observations must hold the last observation of environment {lane}, which "
                    "ended, but the one in the infos is another: it was reset in the same step; make "
                    "the storage with autoreset_mode=env.metadata['autoreset_mode'], or 'SameStep'"
                )


def check_time_limits(columns: Mapping[NestedKey, Any], infos: Infos) -> None:
    """Refuses terminal flags of episodes that only a time limit ended, if the infos show it.

    Args:
        columns: the transitions of a step, `[E, ...]`.
        infos: those of the step.

    Raises:
        ValueError: an episode terminated and was not truncated, and the infos say the opposite.
    """
    terminated, truncated = (as_array(columns[key]) for key in (TERMINATED, TRUNCATED))
    for lane in np.flatnonzero(terminated & ~truncated).tolist():
        if infos.has_reached_limit(lane):
            raise ValueError(
                f"environment {lane} was cut by its time limit, as infos['TimeLimit.truncated'] says, "
                "and got a terminal flag alone: pass the limits as truncateds, and terminateds without "
                "them (or with them, if they count as terminal states too)"
            )


def ends_to_watch(
    last: LastBits,
    columns: Mapping[NestedKey, Any],
    pairs: Sequence[tuple[NestedKey, NestedKey]],
    *,
    is_told: bool,
) -> LastBits | None:
    """Detects a step in which a vector of environments only resets some of them.

    With gymnasium's next-step autoreset, the step after a done one has no reward and no flag, and
    starts from exactly the observation that the episode ended with. A loop that resets by itself
    continues from another observation; once one has, there is nothing more to watch.

    Args:
        last: the last observations of the episodes that ended in the step before, by environment.
        columns: the transitions of a step, `[E, ...]`.
        pairs: the keys of the observations, now and one step later.
        is_told: whether the storage was told that the environments do not reset themselves.

    Returns:
        `last` for the next step; None if there is nothing more to watch.

    Raises:
        ValueError: the step only resets an environment. If that was told, or in a single environment,
            it may be a transition: then this warns.
    """
    # Bytes are compared, in a tenth of the time that a comparison takes in torch.
    before = [as_array(columns[key]) for key, _ in pairs]
    done, rewards = as_array(columns[DONE]), as_array(columns[REWARD])
    several = len(done) > 1
    for lane, end in last.items():
        if _bits(before, lane) != end or (several and (done[lane] or rewards[lane].any())):
            return None
    if last:
        lane = next(iter(last))
        if several and not is_told:
            raise ValueError(
                f"every step must be a transition, but environment {lane} ended, and this step has no "
                "reward and begins with the observation that it ended with: gymnasium only resets it. "
                "Make the storage with autoreset_mode=env.metadata['autoreset_mode'] ('NextStep'), or "
                "with 'Disabled', if the loop resets by itself to where an episode may end."
            )
        warn_caller(
            f"environment {lane} ended, and its next step begins with the observation it ended with. "
            "If environments reset themselves, that step is no transition: make the storage with "
            "autoreset_mode=env.metadata['autoreset_mode']; otherwise reset them when they end."
        )
        return None
    after = [as_array(columns[key]) for _, key in pairs]
    ends = {lane: _bits(after, lane) for lane in np.flatnonzero(done).tolist()}
    # A step that changes nothing says nothing about resets.
    return {lane: end for lane, end in ends.items() if end != _bits(before, lane)}


def _bits(columns: Sequence[np.ndarray], lane: int) -> list[bytes]:
    return [column[lane].tobytes() for column in columns]
