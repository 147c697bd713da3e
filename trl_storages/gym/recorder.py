"""Turns steps of a plain gymnasium loop into transitions to store.

Letters: E environments, L of them that made a transition in this step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from tensordict import NestedKey
from torch import Tensor

from trl_storages import arguments
from trl_storages.arguments import counted
from trl_storages.gym.columns import Column
from trl_storages.gym.desk import Desk
from trl_storages.gym.fields import OUTCOME_FIELDS, Choices, Field, InfoKeys
from trl_storages.gym.infos import Infos, last_observations
from trl_storages.gym.layout import StepLayout, entries, plan, read_tree
from trl_storages.keys import DONE
from trl_storages.ring.naming import Lanes, named_lanes
from trl_storages.rows import Layout, StepBlock, as_array
from trl_storages.saved.parts import SavedPart, SavedState

__all__ = ["GymRecorder", "Memory"]

_CPU, _NEXT_STEP = torch.device("cpu"), AutoresetMode.NEXT_STEP


class Memory(NamedTuple):
    """The state of a recorder once a step is written."""

    layout: StepLayout | None
    """How the arguments map to fields; None until the first step."""
    ended: NDArray[np.bool_]
    """`[E]` whether the next step of an environment only resets it."""


class GymRecorder(SavedPart):
    """Turns the steps of a gymnasium loop into transitions, whatever its autoreset mode.

    With the mode `SameStep` an environment that ended has already been reset: its true last
    observation is taken from `infos["final_obs"]`. With `NextStep` the step after the end only resets
    the environment, and is skipped for it, also after a load or a reopening. With `Disabled`, for loops
    that reset by themselves, everything is taken as given, and so is that of a single environment
    without a mode. Of several environments the mode must be named.

    Args:
        num_envs: E, the number of environments; a single one may also come without the
            leading dimension.
        fields: of a transition, from `transition_fields`. None takes them from the first step.
        choices: of discrete actions, from `choices_of`; other actions are refused.
        autoreset_mode: of the environments, `env.metadata["autoreset_mode"]`: gymnasium's
            `AutoresetMode` or its value.
        info_keys: entries of the infos to keep, under the key given; `"force"` and
            `("next", "force")` are both the infos' `force`, kept at the root and beside
            the reward (where TorchRL's own info readers put it).

    Raises:
        ValueError: `num_envs` is not positive or the mode unknown.
        TypeError: `info_keys` are not keys.

    >>> rows, memory = GymRecorder(1).read([[0.0], 1, 0.5, False, True, {}, [1.0]])
    >>> rows.tensordict()["next", "reward"], rows.tensordict()["next", "done"]
    (tensor([[0.5000]]), tensor([[True]]))
    """

    def __init__(
        self,
        num_envs: int,
        *,
        fields: Mapping[NestedKey, Field] | None = None,
        choices: Mapping[NestedKey, Choices] | None = None,
        autoreset_mode: AutoresetMode | str | None = None,
        info_keys: InfoKeys = (),
    ) -> None:
        self.num_envs = num_envs = arguments.integer("num_envs", num_envs, at_least=1)
        self.autoreset_mode = _mode(autoreset_mode)
        self.info_keys = arguments.keys("info_keys", info_keys)
        self._given, self.choices = fields, choices or {}
        #: How the arguments map to fields; None until the first step.
        self.layout: StepLayout | None = None
        # Environments whose next step only resets them.
        self._ended = np.zeros(num_envs, dtype=bool)
        self._all_lanes = list(range(num_envs))
        self._flag = Column(*OUTCOME_FIELDS[DONE], num_envs)
        # Gathers the next step.
        self._desk: Desk | None = None

    def read(
        self, step: Sequence[Any], row_layout: Layout | None = None
    ) -> tuple[StepBlock | None, Memory | None]:
        """Reads the transitions of one step.

        Args:
            step: observations from before the step, actions, rewards of any real dtype, the flags of
                terminal states and of truncated episodes, infos (a dictionary, of arrays; a list of
                dictionaries; or None) and next observations, as `step` returned them. They are arrays,
                tensors, numbers or lists, all `[E, ...]` or, for a single environment, all without the
                leading dimension; observations and actions may be nested dictionaries. They are copied.
            row_layout: that of transitions, used if they have exactly these fields; None for any.

        Returns:
            the transitions, valid until the next step is read, None if there are none; and what to
            `remember` once they are written, None if that has not changed.

        Raises:
            KeyError: an observation or an info lacks an entry.
            TypeError: a dtype is wrong, or not numeric.
            ValueError: a shape is wrong, a last observation is missing from the infos, or several
                environments have no mode.
        """
        observations, actions, rewards, terminateds, truncateds, infos, next_observations = step
        if self.num_envs > 1 and self.autoreset_mode is None:
            raise ValueError(
                f"autoreset_mode must be named for {self.num_envs} environments, got None: make the "
                "storage with env.metadata['autoreset_mode'], or with 'Disabled' if the loop resets them"
            )
        infos = {} if infos is None else infos
        is_vector = self._is_vector(terminateds, infos)
        said = Infos(infos, self.num_envs, is_vector)
        lanes, ended = self._all_lanes, self._ended
        if self.autoreset_mode is _NEXT_STEP and ended.any():
            lanes = np.flatnonzero(~ended).tolist()
            if not lanes:
                flags = self._ends(terminateds, truncateds, is_vector)
                return None, Memory(self.layout, as_array(flags)[:, 0])
        observations, next_observations = entries(observations), entries(next_observations)
        layout = self.layout
        if layout is None:
            flags = self._ends(terminateds, truncateds, is_vector)
            ended_now = self._reset_already(flags)
            found = {key: said.of_lanes(key, lanes, ended_now) for key in self.info_keys}
            layout = plan(self._given, observations, actions, found, self.num_envs, is_vector)
        values = [
            *read_tree(layout.observations, observations, "observations"),
            *read_tree(layout.actions, actions, "actions"),
            *read_tree(layout.observations, next_observations, "next_observations"),
        ]
        desk = self._desk_for(layout, row_layout, values[0], is_vector)
        block, done = desk.block, desk.ends
        is_end = desk.put(terminateds, truncateds, rewards, values)
        desk.check(lanes)
        finals = self._reset_already(done) if is_end else []
        for lane in finals:
            # Replace the first observations of the new episodes.
            for key, row in last_observations(layout, said, lane):
                block.put(key, row, lane)
        for key in self.info_keys:
            column = Column(*layout.fields[key], len(lanes))
            value = said.of_lanes(key, lanes, finals)
            block.put(key, column.read(value, "infos", f"[{key!r}]", is_vector), lanes)
        if self.autoreset_mode is _NEXT_STEP:
            ended = as_array(done)[:, 0].copy()
        block.lanes = None if len(lanes) == self.num_envs else lanes
        if layout is self.layout and ended is self._ended:
            return block, None
        return block, Memory(layout, ended)

    def _ends(self, terminateds: Any, truncateds: Any, is_vector: bool) -> Tensor:
        """Returns which episodes end, `[E, 1]` bool."""
        terminated = self._flag.read(terminateds, "terminateds", "", is_vector)
        return terminated | self._flag.read(truncateds, "truncateds", "", is_vector)

    def _desk_for(
        self, layout: StepLayout, row_layout: Layout | None, value: Any, is_vector: bool
    ) -> Desk:
        """Returns the desk for the values of a step, on the device of `value`."""
        made_for = (
            layout,
            row_layout,
            value.device if isinstance(value, Tensor) else _CPU,
            is_vector,
        )
        if self._desk is None or self._desk.made_for != made_for:
            self._desk = Desk(*made_for, num_envs=self.num_envs, choices=self.choices)
        return self._desk

    def __getstate__(self) -> dict[str, Any]:
        # A copy has a desk of its own.
        return self.__dict__ | {"_desk": None}

    def remember(self, memory: Memory | None) -> None:
        """Updates the state after a step is written, with what `read` returned."""
        if memory is not None:
            self.layout, self._ended = memory

    def reset(self, lanes: Lanes = None) -> None:
        """Forgets which environments ended, for use after a manual `reset` of the environments.

        Args:
            lanes: that were reset: distinct numbers, or `[E]` bool; None for all.

        Raises:
            ValueError: no such environment.
        """
        stays = np.ones(self.num_envs, dtype=bool)
        stays[[*named_lanes(lanes, self.num_envs)]] = False
        self._ended = self._ended & stays

    def state_dict(self) -> dict[str, Any]:
        """Returns which environments ended with the last step."""
        return {"ended": torch.from_numpy(self._ended.copy())}

    def check_state(self, state_dict: Any) -> None:
        """Checks a state; see `SavedPart.check_state`."""
        saved = SavedState(state_dict, "the saved recorder", ("ended",))
        hint = "one for each environment"
        saved.tensor("ended", torch.bool, (self.num_envs,), hint)

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Loads a checked state."""
        self._ended = state["ended"].cpu().numpy().copy()

    def _is_vector(self, terminateds: Any, infos: Any) -> bool:
        """Whether the arguments have a leading dimension; the flags are the surest sign."""
        is_mapping = type(infos) is dict or isinstance(infos, Mapping)
        # np.ndim is slow for values that are not arrays.
        kind = type(terminateds)
        if kind is bool or not (terminateds.ndim if kind is np.ndarray else np.ndim(terminateds)):
            if self.num_envs > 1:
                raise ValueError(
                    f"terminateds must hold {self.num_envs} flags, one for each environment, got "
                    "a single one; make the storage with num_envs=1 for a single environment"
                )
            if not is_mapping:
                raise TypeError(
                    "infos must be a dictionary for a single environment, got "
                    f"{type(infos).__name__}; pass the one that `step` returned"
                )
            return False
        if not is_mapping and len(infos) != self.num_envs:
            raise ValueError(
                f"infos must hold {counted(self.num_envs, 'environment')}, got {len(infos)}"
            )
        return True

    def _reset_already(self, done: Any) -> list[int]:
        """Returns the environments that ended and were reset in the same step."""
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            return []
        found: list[int] = np.flatnonzero(as_array(done)).tolist()
        return found


def _mode(mode: AutoresetMode | str | None) -> AutoresetMode | None:
    try:
        return None if mode is None else AutoresetMode(mode)
    except ValueError:
        raise ValueError(
            f"autoreset_mode must be None or one of {[item.value for item in AutoresetMode]}, "
            f"got {mode!r}; env.metadata['autoreset_mode'] has it"
        ) from None
