"""Turns the steps of a plain gymnasium loop into transitions, for every autoreset mode.

Letters: E environments, S words of an observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import NestedKey, unravel_key

from trl_storages import keys, validation
from trl_storages.entries.layout import Block, Layout
from trl_storages.serialization import Adopt, State, array, required_items
from trl_storages.storage.packed_storage import PackedStorage
from trl_storages.writing.infos import any_info, final_observation, info_of_step, info_path
from trl_storages.writing.routing import Routing, all_lanes
from trl_storages.writing.spaces import OUTCOME_FIELDS, Choices, InfoKeys, Kind, as_tensor
from trl_storages.writing.staged_step import StagedStep

__all__ = ["Recorder"]

_SAME_STEP, _NEXT_STEP = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP
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
        self.num_envs = num_envs
        self.autoreset_mode = _as_mode(autoreset_mode)
        self.info_keys = validation.keys("info_keys", info_keys)
        self._info_paths = {key: info_path(key, self.info_keys) for key in self.info_keys}
        self._choices = choices or {}
        self._no_envs = np.zeros(num_envs, bool)
        # With `NextStep`: whether an environment has ended, whether the step that resets it was read, and
        # its last observation, `[E, S]`, None after a load.
        self._has_ended, self._was_reset = np.zeros((2, num_envs), bool)
        self._last_observations: np.ndarray | None = None
        self._staged: StagedStep | None = None

    def read(
        self, step: Step, storage: PackedStorage
    ) -> tuple[Block, Layout, Sequence[NestedKey]] | None:
        """Reads and checks the seven values of a step.

        Returns:
            the transitions, valid until the next step is read, their layout, and the keys of observations
            that share memory with their next observations; None if all environments were only reset.

        Raises:
            KeyError, TypeError, ValueError: a value does not fit.
        """
        infos = {} if step[5] is None else step[5]
        if type(infos) is not dict and not isinstance(infos, Mapping):
            raise TypeError(f"infos must be a dictionary as of `step`, got {type(infos).__name__}.")
        staged = self._staged_for(step, infos, storage)
        staged.put(step)
        routing, was_reset = all_lanes(self.num_envs, 1), self._no_envs
        lanes, is_reset, is_repeated = None, self._no_envs, self._no_envs
        if self.autoreset_mode is _NEXT_STEP:
            is_reset, is_repeated = self._find_resets(staged)
            if is_reset.any():
                lanes = np.flatnonzero(~is_reset)
                routing = Routing(lanes, np.arange(len(lanes) + 1), lanes)
        elif self.autoreset_mode is _SAME_STEP and staged.done.any():
            was_reset = staged.done
            for lane in was_reset.nonzero()[0].tolist():
                staged.put_final(lane, final_observation(infos, lane))
        has_transitions = len(routing.lanes) > 0
        for key in self.info_keys if has_transitions else ():
            path = self._info_paths[key]
            staged.put_info(key, info_of_step(infos, path, lanes, was_reset))
        if self.autoreset_mode is _NEXT_STEP:
            self._remember_ends(staged, is_reset, is_repeated)
        if not has_transitions:
            return None
        return staged.block(routing), staged.layout, staged.aliased_keys

    def _staged_for(self, step: Step, infos: Any, storage: PackedStorage) -> StagedStep:
        """Returns the staging for a step; that of the last step, if it fits.

        Raises:
            KeyError, TypeError, ValueError: the step has another number of environments, or a key or a
                value does not fit.
        """
        is_vector = self._is_vector(step[3])
        if is_vector and self.autoreset_mode is None:
            raise ValueError(
                "autoreset_mode must be passed for a vector environment, got None: create the replay "
                "buffer with env.metadata['autoreset_mode'], or with 'Disabled' if the loop resets the "
                "environments."
            )
        staged, layout = self._staged, storage.layout
        if staged is not None and staged.is_vector == is_vector and staged.layout is layout:
            return staged
        if layout is None:
            fields = _fields_of(step, is_vector)
            for key in self.info_keys:
                if key not in fields:
                    _add_field(fields, key, any_info(infos, self._info_paths[key]), is_vector)
            layout = storage.layout_for(fields)
        self._staged = StagedStep(layout, self.num_envs, is_vector, self.info_keys, self._choices)
        return self._staged

    def _find_resets(self, staged: StagedStep) -> tuple[np.ndarray, np.ndarray]:
        """Returns `[E]` whether a step only resets an environment, and whether it repeats an observation.

        A reset begins with the last observation of the episode. Therefore the result is the same if an
        interrupt came before or after the end was written, or if a step is recorded again. A reset
        repeats the observation if the new episode begins with that same observation.
        """
        has_ended, last = self._has_ended, self._last_observations
        begin, end = staged.layout.sizes.first, staged.layout.sizes.end
        if last is None or not has_ended.any():
            return has_ended, has_ended
        # As for consecutive transitions, recurrent states and similar fields are not compared.
        last, next_word = last[:, begin:end], staged.layout.next_word
        is_reset = has_ended & (staged.words[:, begin:end] == last).all(1)
        after = staged.words[:, next_word + begin : next_word + end]
        return is_reset, is_reset & (after == last).all(1)

    def _remember_ends(
        self, staged: StagedStep, is_reset: np.ndarray, is_repeated: np.ndarray
    ) -> None:
        """Remembers which environments have ended, before their last transitions are written."""
        last, S = self._last_observations, staged.layout.seen_words
        if last is None:
            last = np.zeros((self.num_envs, S), np.int64)
        # A reset may be recorded again, unless the next transition would look like that reset.
        self._has_ended, self._was_reset = is_reset & ~is_repeated, is_reset
        is_over = staged.done & ~is_reset
        np.copyto(last, staged.words[:, -S:], where=is_over[:, None])
        self._last_observations, self._has_ended = last, self._has_ended | is_over

    def reset(self, lanes: Sequence[int]) -> None:
        """Forgets which environments ended, after a manual `reset` of some."""
        self._has_ended[lanes] = False

    def __getstate__(self) -> dict[str, Any]:
        # A copied view does not share memory with its block.
        return {**self.__dict__, "_staged": None}

    def state(self) -> State:
        """Returns which environments are only reset by their next step."""
        return {"ended": torch.from_numpy(self._has_ended & ~self._was_reset)}

    def prepare_load(self, state: Any) -> Adopt:
        """Returns a function that adopts a state.

        Raises:
            ValueError: the state is not from a recorder with as many environments.
        """
        (ended,) = required_items("the recorder", state, ("ended",))
        ended = array("ended", ended, torch.bool, self.num_envs)

        def adopt() -> None:
            self._has_ended, self._was_reset = ended.copy(), self._no_envs.copy()
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
    observations = step[0] if isinstance(step[0], Mapping) else {"observation": step[0]}
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


def _as_mode(mode: AutoresetMode | str | None) -> AutoresetMode | None:
    if mode is None or isinstance(mode, AutoresetMode):
        return mode
    names = [item.value for item in AutoresetMode]
    return AutoresetMode(validation.choice("autoreset_mode", mode, names))
