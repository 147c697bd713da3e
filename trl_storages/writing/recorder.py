"""Turns the steps of a plain gymnasium loop into transitions, for every autoreset mode.

The infos of a vector environment hold arrays `[E, ...]`, or dictionaries of arrays. Each `name` has a
mask `_name`, which says which environments the values belong to. If an environment is reset in the step
that ends its episode, `final_obs` and `final_info` hold the values of that step, and all other infos
belong to the reset.

Letters: E environments, L of them that made a transition, S words of an observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import NestedKey, unravel_key

from trl_storages import keys, validation
from trl_storages.serialization import Adopt, State, array, required_items
from trl_storages.storage.packed_storage import PackedStorage
from trl_storages.writing.lanes import Routing, in_lane_order
from trl_storages.writing.spaces import OUTCOME_FIELDS, Choices, InfoKeys, Kind, as_tensor
from trl_storages.writing.staged_step import StagedStep

__all__ = ["Recorder"]

_SAME_STEP, _NEXT_STEP = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP
# The last event of an environment with `NextStep`: a step, the end of an episode, or a reset.
_RUNNING, _ENDED, _RESET = range(3)
#: observations, actions, rewards, terminateds, truncateds, infos, next observations
Step = Sequence[Any]


class Recorder:
    """Reads the steps of a loop over E environments.

    With the mode `SameStep` an environment that ended has already been reset: its last observation is
    read from `infos["final_obs"]`. With `NextStep` the step after the end only resets the environment,
    and no transition is stored for it. With `Disabled`, for loops that call `reset`, all values are
    stored as given. A single environment without a mode is read in the same way.

    Args:
        num_envs: E; the values of a single environment may lack the leading dimension.
        choices: values of discrete actions, from `choices_of`; other values raise.
        autoreset_mode: `env.metadata["autoreset_mode"]`, needed for all vector environments, also those
            with one environment.
        info_keys: keys of the fields that are read from the infos.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        choices: Mapping[NestedKey, Choices] | None = None,
        autoreset_mode: AutoresetMode | str | None = None,
        info_keys: InfoKeys = (),
    ) -> None:
        if not isinstance(autoreset_mode, AutoresetMode | None):
            names = [mode.value for mode in AutoresetMode]
            autoreset_mode = AutoresetMode(
                validation.choice("autoreset_mode", autoreset_mode, names)
            )
        self.num_envs, self.autoreset_mode = num_envs, autoreset_mode
        self.info_keys = validation.keys("info_keys", info_keys)
        self._info_paths = {key: _info_path(key, self.info_keys) for key in self.info_keys}
        self._choices = choices or {}
        self._no_envs = np.zeros(num_envs, bool)
        self._all_lanes = in_lane_order(range(num_envs), (num_envs,))
        # With `NextStep`: the phase `[E]` of each environment, and the last observation of its last
        # episode, `[E, S]`, None after a load.
        self._phases = np.full(num_envs, _RUNNING)
        self._last_observations: np.ndarray | None = None
        self._staged: StagedStep | None = None

    def read(self, step: Step, storage: PackedStorage) -> tuple[StagedStep, Routing] | None:
        """Reads and checks the seven values of a step.

        Returns:
            the transitions, valid until the next step is read, and their lanes; None if all environments
            were only reset.

        Raises:
            KeyError, TypeError, ValueError: a value does not fit.
        """
        infos = {} if step[5] is None else step[5]
        if type(infos) is not dict and not isinstance(infos, Mapping):
            raise TypeError(f"infos must be a dictionary as of `step`, got {type(infos).__name__}.")
        staged, is_vector = self._staged, self._is_vector(step[3])
        if staged is None or staged.is_vector != is_vector or staged.layout is not storage.layout:
            staged = self._staged = self._staging_for(step, infos, is_vector, storage)
        staged.put(step)
        routing, was_reset = self._all_lanes, self._no_envs
        is_reset = is_repeated = self._no_envs
        mode = self.autoreset_mode
        has_ends = mode is not None and np.count_nonzero(staged.done) > 0
        follows_resets = mode is _NEXT_STEP and (has_ends or np.count_nonzero(self._phases) > 0)
        if follows_resets:
            is_reset, is_repeated = self._find_resets(staged)
            if is_reset.any():
                lanes = np.flatnonzero(~is_reset)
                routing = Routing(lanes, np.arange(len(lanes) + 1), lanes)
        elif has_ends and mode is _SAME_STEP:
            was_reset = staged.done
            for lane in was_reset.nonzero()[0].tolist():
                staged.put_final(lane, _final_observation(infos, lane))
        has_transitions = len(routing.lanes) > 0
        for key in self.info_keys if has_transitions else ():
            path = self._info_paths[key]
            staged.put_info(key, _info_of_step(infos, path, routing.lanes, was_reset))
        if follows_resets:
            self._remember_ends(staged, is_reset, is_repeated)
        return (staged, routing) if has_transitions else None

    def _staging_for(
        self, step: Step, infos: Any, is_vector: bool, storage: PackedStorage
    ) -> StagedStep:
        """Returns a staging for steps like this one.

        Raises:
            KeyError, TypeError, ValueError: a key or a value does not fit, or there is no mode.
        """
        if is_vector and self.autoreset_mode is None:
            raise ValueError(
                "autoreset_mode must be passed for a vector environment, got None: create the replay "
                "buffer with env.metadata['autoreset_mode'], or with 'Disabled' if the loop resets the "
                "environments."
            )
        layout = storage.layout
        if layout is None:
            fields = _fields_of(step, is_vector)
            for key in self.info_keys:
                if key not in fields:
                    _add_field(fields, key, _any_info(infos, self._info_paths[key]), is_vector)
            layout = storage.layout_for(fields)
        return StagedStep(layout, self.num_envs, is_vector, self.info_keys, self._choices)

    def _find_resets(self, staged: StagedStep) -> tuple[np.ndarray, np.ndarray]:
        """Returns `[E]` whether a step only resets an environment, and whether it repeats an observation.

        A reset begins with the last observation of the episode. Therefore the result is the same if an
        interrupt came before or after the end was written, or if a step is recorded again. A reset
        repeats the observation if the new episode begins with that same observation.
        """
        is_over, last = self._phases != _RUNNING, self._last_observations
        begin, end = staged.layout.sizes.first, staged.layout.sizes.end
        if last is None or not is_over.any():
            return is_over, is_over
        # As for consecutive transitions, recurrent states and similar fields are not compared.
        last, next_word = last[:, begin:end], staged.layout.next_word
        is_reset = is_over & (staged.words[:, begin:end] == last).all(1)
        after = staged.words[:, next_word + begin : next_word + end]
        return is_reset, is_reset & (after == last).all(1)

    def _remember_ends(
        self, staged: StagedStep, is_reset: np.ndarray, is_repeated: np.ndarray
    ) -> None:
        """Remembers which environments have ended, before their last transitions are written."""
        if self._last_observations is None:
            self._last_observations = np.zeros((self.num_envs, staged.layout.seen_words), np.int64)
        # A reset may be recorded again, unless the next transition would look like that reset.
        self._phases = np.where(is_reset & ~is_repeated, _RESET, _RUNNING)
        has_ended, last = staged.done & ~is_reset, self._last_observations
        np.copyto(last, staged.words[:, -last.shape[1] :], where=has_ended[:, None])
        self._phases = np.where(has_ended, _ENDED, self._phases)

    def reset(self, lanes: Sequence[int]) -> None:
        """Forgets which environments ended, after a manual `reset` of some."""
        self._phases[lanes] = _RUNNING

    def __getstate__(self) -> dict[str, Any]:
        # A copied view does not share memory with its block.
        return {**self.__dict__, "_staged": None}

    def state(self) -> State:
        """Returns which environments are only reset by their next step."""
        return {"ended": torch.from_numpy(self._phases == _ENDED)}

    def prepare_load(self, state: Any) -> Adopt:
        """Returns a function that adopts a state.

        Raises:
            ValueError: the state is not from a recorder with as many environments.
        """
        (ended,) = required_items("the recorder", state, ("ended",))
        ended = array("ended", ended, torch.bool, self.num_envs)

        def adopt() -> None:
            self._phases = np.where(ended, _ENDED, _RUNNING)
            self._last_observations = None

        return adopt

    def _is_vector(self, terminateds: Any) -> bool:
        """Returns whether the values have a leading dimension, as the flags tell most reliably.

        Raises:
            TypeError: the flags are a dictionary.
            ValueError: they are of another number of environments.
        """
        is_vector = type(terminateds) is not bool and np.ndim(terminateds) > 0
        num_flags = len(terminateds) if is_vector else 1
        if num_flags != self.num_envs:
            as_tensor(terminateds, "terminateds")  # a dictionary by agent has its own message
            raise ValueError(
                f"terminateds must hold a flag for each of num_envs={self.num_envs}, got {num_flags}. "
                f"Pass num_envs={num_flags} and the spaces of a single environment, or use from_env(env)."
            )
        return is_vector


def _fields_of(step: Step, is_vector: bool) -> dict[NestedKey, Kind]:
    """Returns the fields of a first step without its infos, with the dtypes of its values."""
    fields = dict(OUTCOME_FIELDS)
    observations = step[0] if isinstance(step[0], Mapping) else {keys.OBSERVATION: step[0]}
    for path, value in keys.leaves(observations, "observations"):
        _add_field(fields, unravel_key(path), value, is_vector)
        _add_field(fields, unravel_key(("next", *path)), value, is_vector)
    for path, value in keys.leaves(step[1], "actions", keys.key_path(keys.ACTION)):
        _add_field(fields, unravel_key(path), value, is_vector)
    return fields


def _add_field(fields: dict[NestedKey, Kind], key: NestedKey, value: Any, is_vector: bool) -> None:
    tensor = as_tensor(value, repr(key))
    keys.check_free(key, fields)
    fields[key] = (tensor.dtype, tensor.shape[1:] if is_vector else tensor.shape)


# Infos


def _info_path(key: NestedKey, info_keys: Sequence[NestedKey]) -> tuple[str, ...]:
    """Returns the path of a field in the infos.

    A leading "next" is dropped, unless `info_keys` also name the field without "next".
    """
    path = keys.key_path(key)
    is_single = path[0] == "next" and unravel_key(path[1:]) not in info_keys
    return path[1:] if is_single else path


def _info_of_step(
    infos: Any, path: tuple[str, ...], lanes: np.ndarray, was_reset: np.ndarray
) -> Any:
    """Returns an info of one step, as the environment or the loop stored it.

    Args:
        infos: of the step.
        path: of the info.
        lanes: `[L]` the environments that made a transition.
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
    if value is None or not np.broadcast_to(has_value, was_reset.shape)[lanes].all():
        raise _missing(infos, path)
    return value


def _any_info(infos: Any, path: tuple[str, ...]) -> Any:
    """Returns an info of the step or of the last step before a reset, for its dtype and shape.

    Raises:
        KeyError: the info is missing.
    """
    for source in (infos, infos.get("final_info")):
        value, _ = _look_up(source, path)
        if value is not None:
            return value
    raise _missing(infos, path)


def _final_observation(infos: Any, lane: int) -> Any:
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
    return _values_at(observations, lane)


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


def _values_at(values: Any, lane: int) -> Any:
    """Returns the value of one environment, also from dictionaries of arrays `[E, ...]`."""
    if isinstance(values, Mapping):
        return {name: _values_at(value, lane) for name, value in values.items()}
    return values[lane]
