"""Turns the steps of a plain gymnasium loop into rows, whatever the autoreset mode.

Letters: E environments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import NestedKey

from trl_storages import arguments
from trl_storages.arguments import counted
from trl_storages.index.naming import Lanes, named_lanes
from trl_storages.packed.storage import PackedStorage
from trl_storages.states import Adopt, State, array, entries_of
from trl_storages.streams.layout import Layout
from trl_storages.streams.staging import Block
from trl_storages.writing.columns import Column, as_tensor
from trl_storages.writing.fields import Choices, Field, InfoKeys
from trl_storages.writing.infos import Infos, last_observations
from trl_storages.writing.plan import StepLayout, entries, plan, read_tree
from trl_storages.writing.staging import Staging

__all__ = ["Recorder"]

_SAME_STEP, _NEXT_STEP = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


class Recorder:
    """Reads the steps of a loop over E environments.

    With the mode `SameStep` an environment that ended has already been reset: its true last observation
    is taken from `infos["final_obs"]`. With `NextStep` the step after the end only resets the
    environment, and is skipped for it. With `Disabled`, for loops that reset by themselves, everything
    is taken as given, and so is that of a single environment without a mode.

    Args:
        num_envs: E; a single environment may also come without the leading dimension.
        fields: of a transition, from `transition_fields`. None takes them from the first step.
        choices: of discrete actions, from `choices_of`; other actions are refused.
        autoreset_mode: `env.metadata["autoreset_mode"]`; several environments need it.
        info_keys: entries of the infos to keep.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        fields: Mapping[NestedKey, Field] | None = None,
        choices: Mapping[NestedKey, Choices] | None = None,
        autoreset_mode: AutoresetMode | str | None = None,
        info_keys: InfoKeys = (),
    ) -> None:
        self.num_envs = num_envs
        self.autoreset_mode = _mode(autoreset_mode)
        self.info_keys = arguments.keys("info_keys", info_keys)
        self._fields, self._choices = fields, choices or {}
        # Which environments are only reset by their next step.
        self._ended = np.zeros(num_envs, bool)
        self._plan: StepLayout | None = None
        self._staging: Staging | None = None

    def read(self, step: Sequence[Any], storage: PackedStorage) -> tuple[Block, Layout] | None:
        """Reads and checks the seven values of a step.

        Returns:
            the rows, valid until the next step is read, and their layout; None if all environments were
            only reset.

        Raises:
            KeyError, TypeError, ValueError: something does not fit.
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
        lanes = None
        if self.autoreset_mode is _NEXT_STEP and self._ended.any():
            lanes = np.flatnonzero(~self._ended)
            if not len(lanes):
                return None
        observations, next_observations = entries(observations), entries(next_observations)
        made = self._staging
        if made is None or made.is_vector != is_vector or made.layout is not storage.layout:
            made = self._stage(observations, actions, said, lanes, step, storage, is_vector)
        stepped: StepLayout = self._plan  # type: ignore[assignment]
        made.put(
            [
                *(terminateds, truncateds, rewards),
                *read_tree(stepped.observations, observations, "observations"),
                *read_tree(stepped.actions, actions, "actions"),
                *read_tree(stepped.observations, next_observations, "next_observations"),
            ],
            lanes,
        )
        finals = []
        if self.autoreset_mode is _SAME_STEP and made.done.any():
            finals = np.flatnonzero(made.done).tolist()
            for lane in finals:
                # In the place of the first observations of the new episodes.
                for key, value in last_observations(stepped, said, lane):
                    made.set(key, lane, value)
        if self.info_keys:
            rows = [*range(self.num_envs)] if lanes is None else lanes.tolist()
            for key in self.info_keys:
                column = Column(*stepped.fields[key], len(rows))
                value = said.of_lanes(key, rows, finals)
                value = column.read(value, "infos", f"[{key!r}]", is_vector)
                made.set(key, slice(None) if lanes is None else lanes, value)
        return made.block(lanes), made.layout

    def _stage(
        self,
        observations: Any,
        actions: Any,
        infos: Infos,
        lanes: np.ndarray | None,
        step: Sequence[Any],
        storage: PackedStorage,
        is_vector: bool,
    ) -> Staging:
        """Makes what takes steps such as this one."""
        fields = self._fields
        if fields is None and storage.layout is not None:
            fields = {key: kind[:2] for key, kind in storage.layout.described.items()}
        rows = [*range(self.num_envs)] if lanes is None else lanes.tolist()
        ended: Sequence[int] = ()
        if self.autoreset_mode is _SAME_STEP:
            ended = np.flatnonzero(_ended(step)).tolist()
        found = {key: infos.of_lanes(key, rows, ended) for key in self.info_keys}
        stepped = plan(fields, observations, actions, found, self.num_envs, is_vector)
        layout = storage.layout_for(stepped.fields)
        if missing := [key for key in layout.described if key not in stepped.fields]:
            raise KeyError(f"the rows have {missing} too, which this step does not hold.")
        self._plan = stepped
        self._staging = made = Staging(stepped, layout, self.num_envs, is_vector, self._choices)
        return made

    def remember(self, step: Sequence[Any]) -> None:
        """Remembers, once a step is written, which environments it ended."""
        if self.autoreset_mode is _NEXT_STEP:
            self._ended = _ended(step) & ~self._ended

    def reset(self, lanes: Lanes = None) -> None:
        """Forgets which environments ended, after a manual `reset` of some, or of all."""
        self._ended[[*named_lanes(lanes, self.num_envs)]] = False

    def state(self) -> State:
        """Returns which environments are only reset by their next step."""
        return {"ended": torch.from_numpy(self._ended.copy())}

    def parsed(self, state: Any) -> Adopt:
        """Returns a function that adopts a state.

        Raises:
            ValueError: the state is not that of such a recorder.
        """
        (ended,) = entries_of("the recorder", state, ("ended",))
        ended = array("ended", ended, torch.bool, self.num_envs)

        def adopt() -> None:
            self._ended = ended.copy()

        return adopt

    def _is_vector(self, terminateds: Any, infos: Any) -> bool:
        """Whether the arguments have a leading dimension; the flags are the surest sign."""
        is_mapping = type(infos) is dict or isinstance(infos, Mapping)
        kind = type(terminateds)
        if kind is bool or not (terminateds.ndim if kind is np.ndarray else np.ndim(terminateds)):
            if self.num_envs > 1:
                raise ValueError(
                    f"terminateds must hold {self.num_envs} flags, one for each environment, got a "
                    "single one; make the storage with num_envs=1 for a single environment"
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


def _ended(step: Sequence[Any]) -> np.ndarray:
    """Returns `[E]` which episodes a step ended."""
    terminated, truncated = (as_tensor(flags, "flags").cpu().numpy() for flags in step[3:5])
    return np.logical_or(terminated, truncated).reshape(-1)


def _mode(mode: AutoresetMode | str | None) -> AutoresetMode | None:
    if mode is None or isinstance(mode, AutoresetMode):
        return mode
    known = {item.value.lower(): item for item in AutoresetMode}
    found = known.get(mode.lower().replace("_", "")) if isinstance(mode, str) else None
    if found is None:
        raise ValueError(
            f"autoreset_mode must be None or one of {[item.value for item in AutoresetMode]}, "
            f"got {mode!r}; env.metadata['autoreset_mode'] has it"
        )
    return found
