"""Turns the steps of a plain gymnasium loop into rows, whatever the autoreset mode.

Letters: E environments, L of them that made a transition.
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
from trl_storages.writing.routing import Routing, all_lanes
from trl_storages.writing.spaces import OUTCOME_FIELDS, Choices, InfoKeys, Kind, as_tensor
from trl_storages.writing.staging import StepRows

__all__ = ["Recorder"]

_SAME_STEP, _NEXT_STEP = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP
#: observations, actions, rewards, terminateds, truncateds, infos, next observations
Step = Sequence[Any]


class Recorder:
    """Reads the steps of a loop over E environments.

    With the mode `SameStep` an environment that ended has already been reset: its true last observation
    is taken from `infos["final_obs"]`. With `NextStep` the step after the end only resets the
    environment, and is skipped for it. With `Disabled`, for loops that reset by themselves, everything
    is taken as given, and so is that of a single environment without a mode.

    Args:
        num_envs: E; a single environment may also come without the leading dimension.
        choices: of discrete actions, from `choices_of`; other actions are refused.
        autoreset_mode: `env.metadata["autoreset_mode"]`; vector environments need it, also those of one.
        info_keys: the stored fields that are read from the infos.
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
        self.autoreset_mode = _mode(autoreset_mode)
        self.info_keys = validation.keys("info_keys", info_keys)
        self._paths = {key: _path(key, self.info_keys) for key in self.info_keys}
        self._choices = choices or {}
        self._none = np.zeros(num_envs, bool)
        # Which environments have ended, and whether their reset was read; what they ended with, `[E, S]`,
        # None after a load.
        self._ended, self._was_reset = np.zeros((2, num_envs), bool)
        self._last: np.ndarray | None = None
        self._staging: StepRows | None = None

    def read(self, step: Step, storage: PackedStorage) -> tuple[Block, Layout, Any] | None:
        """Reads and checks the seven values of a step.

        Returns:
            the rows, valid until the next step is read, their layout, and the keys of observations that
            share the memory of their next ones; None if all environments were only reset.

        Raises:
            KeyError, TypeError, ValueError: something does not fit.
        """
        infos = {} if step[5] is None else step[5]
        if type(infos) is not dict and not isinstance(infos, Mapping):
            raise TypeError(f"infos must be a dictionary as of `step`, got {type(infos).__name__}.")
        is_vector = self._is_vector(step[3])
        if is_vector and self.autoreset_mode is None:
            raise ValueError(
                "autoreset_mode must be named for a vector environment, got None: make the storage with "
                "env.metadata['autoreset_mode'], or with 'Disabled' if the loop resets the environments."
            )
        made = self._staging
        if made is None or made.is_vector != is_vector or made.layout is not storage.layout:
            made = self._staging = self._stage(step, infos, storage, is_vector)
        made.put(step)
        lanes, was_reset = None, self._none
        if self.autoreset_mode is _NEXT_STEP:
            resets = self._resets(made)
            if resets[0].any():
                lanes = np.flatnonzero(~resets[0])
        if self.autoreset_mode is _SAME_STEP and made.done.any():
            was_reset = made.done
            for lane in was_reset.nonzero()[0].tolist():
                made.put_final(lane, _final_obs(infos, lane))
        if lanes is None or len(lanes):
            for key in self.info_keys:
                made.put_info(key, _info(infos, self._paths[key], lanes, was_reset))
        if self.autoreset_mode is _NEXT_STEP:
            self._remember(made, *resets)
        places = all_lanes(self.num_envs, 1)
        if lanes is not None:
            if not len(lanes):
                return None
            places = Routing(lanes, np.arange(len(lanes) + 1), lanes)
        return made.block(places), made.layout, made.same

    def _resets(self, made: StepRows) -> tuple[np.ndarray, np.ndarray]:
        """Returns `[E]` which environments a step only resets, and which of them look alike afterwards.

        A reset begins with the observation that the environment ended with. So it does not matter whether
        an interrupt came before or after the end was written, or whether a step is recorded again.
        """
        ended, last, sizes = self._ended, self._last, made.layout.sizes
        begin, end = sizes.first, sizes.end
        if last is None or not ended.any():
            return ended, ended
        # As where rows continue others, recurrent states and the like do not decide.
        last, next_word = last[:, begin:end], made.layout.next_word
        is_reset = ended & (made.words[:, begin:end] == last).all(1)
        after = made.words[:, next_word + begin : next_word + end]
        return is_reset, is_reset & (after == last).all(1)

    def _remember(self, made: StepRows, is_reset: np.ndarray, repeats: np.ndarray) -> None:
        """Remembers which environments have ended, before their last rows are written."""
        last, S = self._last, made.layout.seen_words
        if last is None:
            last = np.zeros((self.num_envs, S), np.int64)
        # The next step of the same observation is a real one.
        self._ended, self._was_reset = is_reset & ~repeats, is_reset
        is_over = made.done & ~is_reset
        np.copyto(last, made.words[:, -S:], where=is_over[:, None])
        self._last, self._ended = last, self._ended | is_over

    def _stage(self, step: Step, infos: Any, storage: PackedStorage, is_vector: bool) -> StepRows:
        """Makes what takes steps such as this one."""
        layout = storage.layout
        if layout is None:
            fields = _learned(step, is_vector)
            for key in self.info_keys:
                if key not in fields:
                    _add(fields, key, _any_info(infos, self._paths[key]), is_vector)
            layout = storage.layout_for(fields)
        return StepRows(layout, self.num_envs, is_vector, self.info_keys, self._choices)

    def reset(self, lanes: Sequence[int]) -> None:
        """Forgets which environments ended, after a manual `reset` of some."""
        self._ended[lanes] = False

    def __getstate__(self) -> dict[str, Any]:
        # Views that are copied are views no more.
        return {**self.__dict__, "_staging": None}

    def state(self) -> State:
        """Returns which environments are only reset by their next step."""
        return {"ended": torch.from_numpy(self._ended & ~self._was_reset)}

    def prepare_load(self, state: Any) -> Adopt:
        """Returns a function that adopts a state.

        Raises:
            ValueError: the state is not that of such a recorder.
        """
        (ended,) = required_items("the recorder", state, ("ended",))
        ended = array("ended", ended, torch.bool, self.num_envs)

        def adopt() -> None:
            self._ended, self._was_reset, self._last = ended.copy(), self._none.copy(), None

        return adopt

    def _is_vector(self, terminateds: Any) -> bool:
        """Whether the arguments have a leading dimension; the flags are the surest sign."""
        is_vector = type(terminateds) is not bool and np.ndim(terminateds) > 0
        found = len(terminateds) if is_vector else 1
        if found != self.num_envs:
            as_tensor(terminateds, "terminateds")  # a dictionary by agent has a message of its own
            raise ValueError(
                f"terminateds must hold a flag for each of num_envs={self.num_envs}, got {found}. Pass "
                f"num_envs={found} and the spaces of a single environment, or use from_env(env)."
            )
        return is_vector


def _learned(step: Step, is_vector: bool) -> dict[NestedKey, Kind]:
    """Returns the fields of a first step without its infos, with the dtypes of its values."""
    fields = dict(OUTCOME_FIELDS)
    observations = step[0] if isinstance(step[0], Mapping) else {"observation": step[0]}
    for path, value in keys.leaves(observations, "observations"):
        for each in (path, ("next", *path)):
            _add(fields, unravel_key(each), value, is_vector)
    for path, value in keys.leaves(step[1], "actions", keys.key_path(keys.ACTION)):
        _add(fields, unravel_key(path), value, is_vector)
    return fields


def _add(fields: dict[NestedKey, Kind], key: NestedKey, value: Any, is_vector: bool) -> None:
    tensor = as_tensor(value, repr(key))
    keys.check_free(key, fields)
    fields[key] = (tensor.dtype, tensor.shape[1:] if is_vector else tensor.shape)


def _mode(mode: AutoresetMode | str | None) -> AutoresetMode | None:
    if mode is None or isinstance(mode, AutoresetMode):
        return mode
    names = [item.value for item in AutoresetMode]
    return AutoresetMode(validation.choice("autoreset_mode", mode, names))


# The infos of a vector hold arrays `[E, ...]`, or dictionaries of them, each with a mask `_name` that
# says of which environments it is. Where an environment is reset in the step that ends its episode,
# `final_obs` and `final_info` hold what the step returned, and the rest is of the reset.


def _info(infos: Any, path: tuple[str, ...], lanes: Any, was_reset: np.ndarray) -> Any:
    """Returns an entry of the infos, as it is there.

    Args:
        infos: of the step.
        path: of the entry.
        lanes: `[L]` the environments that made a transition; None is all.
        was_reset: `[E]` bool, those that were reset in the same step: their entry is in `final_info`. But
            what the loop itself added to the infos, which has no mask, is of the step.

    Raises:
        KeyError: an environment does not have the entry.
    """
    found, is_there = _entry(infos, path)
    if was_reset.any() and (found is None or f"_{path[0]}" in infos):
        last, is_last = _entry(infos.get("final_info"), path)
        is_there = np.where(was_reset, is_last, is_there)
        if found is None:
            found = last
        elif last is not None:
            of_reset = was_reset.reshape(-1, *[1] * (np.ndim(last) - 1))
            found = np.where(of_reset, last, found)
    is_there = np.broadcast_to(is_there, was_reset.shape)
    if found is None or not is_there[slice(None) if lanes is None else lanes].all():
        raise _missing(infos, path)
    return found


def _any_info(infos: Any, path: tuple[str, ...]) -> Any:
    """Returns an entry of the infos for its dtype and shape.

    Raises:
        KeyError: there is none.
    """
    for each in (infos, infos.get("final_info")):
        found, _ = _entry(each, path)
        if found is not None:
            return found
    raise _missing(infos, path)


def _entry(infos: Any, path: tuple[str, ...]) -> tuple[Any, Any]:
    """Returns an entry, None if there is none, and of which environments it is: `[E]` bool, or one."""
    is_there: Any = True
    for name in path:
        if not isinstance(infos, Mapping) or name not in infos:
            return None, False
        is_there = is_there & np.asarray(infos.get(f"_{name}", True))
        infos = infos[name]
    return infos, is_there


def _final_obs(infos: Any, lane: int) -> Any:
    """Returns the last observation of an environment that ended and was reset.

    Raises:
        ValueError: it is not there.
    """
    found, mask = infos.get("final_obs"), infos.get("_final_obs")
    if found is None or (mask is not None and not mask[lane]):
        raise ValueError(
            f"environment {lane} ended, and infos['final_obs'] must hold its last observation with "
            f"autoreset_mode 'SameStep', got {sorted(map(str, infos))}: has the environment that mode?"
        )
    return _row(found, lane)


def _path(key: NestedKey, info_keys: Sequence[NestedKey]) -> tuple[str, ...]:
    """Returns where the infos hold an entry: a leading "next" does not count but for one of a pair."""
    path = keys.key_path(key)
    is_single = path[0] == "next" and unravel_key(path[1:]) not in info_keys
    return path[1:] if is_single else path


def _missing(infos: Any, path: tuple[str, ...]) -> KeyError:
    there = sorted(str(name) for name in infos if not str(name).startswith("_"))
    return KeyError(
        f"the infos must hold {'.'.join(path)!r} at every step of every environment, got {there}: "
        f"hand it on, as in {{**infos, {path[0]!r}: ...}}."
    )


def _row(value: Any, lane: int) -> Any:
    """Returns the row of one environment, also of a dictionary of columns."""
    if isinstance(value, Mapping):
        return {name: _row(entry, lane) for name, entry in value.items()}
    return value[lane]
