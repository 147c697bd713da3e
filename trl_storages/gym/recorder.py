"""From one step of a plain gymnasium loop to the transitions to store.

Letters: E environments, L of them that made a transition in this step.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from tensordict import NestedKey, TensorDict
from torch import Tensor

from trl_storages import arguments
from trl_storages.gym.columns import Column
from trl_storages.gym.fields import Field, InfoKeys, info_key_names, key_path
from trl_storages.gym.infos import final_observation, info_values
from trl_storages.gym.layout import Layout, add_field, entries, layout_of, learn_fields
from trl_storages.gym.resets import Ends, ResetWatch, check_last_observations
from trl_storages.gym.trees import leaves
from trl_storages.keys import DONE, REWARD, TERMINATED, TRUNCATED
from trl_storages.saved import SavedState
from trl_storages.storages import nest

__all__ = ["GymRecorder", "Memory"]


class Memory(NamedTuple):
    """What a recorder knows of the loop once a step is written."""

    layout: Layout | None
    """Where the arguments hold the fields; None until the first step."""
    ended: NDArray[np.bool_]
    """`[E]` whether the next step of an environment only resets it."""
    last: Ends | None
    """As `ResetWatch.last`."""


class GymRecorder:
    """Turns the steps of a gymnasium loop into transitions, whatever its autoreset mode.

    With the mode `SameStep` an environment that ended has been reset already: its true last
    observation is taken from the infos. With `NextStep` the step after the last one only resets
    the environment, and is left out for it. With `Disabled`, everything is taken as it is given.
    None is for loops that reset by themselves: so is everything then too, but a step of a vector
    that seems to be gymnasium's own reset raises an error, until the loop has shown what it does.

    Args:
        num_envs: E, the number of environments; a single one may also come without the
            leading dimension.
        fields: of a transition, from `transition_fields`. None takes them from the first step.
        autoreset_mode: that of the environments, `env.metadata["autoreset_mode"]`: gymnasium's
            `AutoresetMode` or its value.
        info_keys: entries of the infos to keep, under the key given; `"force"` and
            `("next", "force")` are both the infos' `force`, kept at the root and beside
            the reward (where TorchRL's own info readers put it).

    Raises:
        ValueError: `num_envs` is not positive or the mode unknown.
        TypeError: `info_keys` are not keys.

    >>> recorder = GymRecorder(1)
    >>> rows, lanes = recorder.rows([0.0], 1, 0.5, False, True, {}, [1.0])
    >>> rows["next", "reward"], rows["next", "done"], lanes
    (tensor([[0.5000]]), tensor([[True]]), None)
    """

    def __init__(
        self,
        num_envs: int,
        *,
        fields: Mapping[NestedKey, Field] | None = None,
        autoreset_mode: AutoresetMode | str | None = None,
        info_keys: InfoKeys = (),
    ) -> None:
        self.num_envs = num_envs = arguments.integer("num_envs", num_envs, at_least=1)
        self.autoreset_mode = _mode(autoreset_mode)
        self.info_keys = info_key_names(info_keys)
        self._given = fields
        #: Where the arguments hold the fields; None until the first step.
        self.layout: Layout | None = None
        # Environments whose next step only resets them.
        self._ended = np.zeros(num_envs, dtype=bool)
        self._watch = ResetWatch(num_envs)
        self._all_lanes = list(range(num_envs))
        one = torch.Size([1])
        self._flag = Column(torch.bool, one, num_envs)
        self._reward = Column(torch.float32, one, num_envs, lossy=True)

    def rows(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
        infos: Any,
        next_observations: Any,
    ) -> tuple[TensorDict, Tensor | None] | None:
        """Returns the transitions of one step.

        Arrays, tensors, numbers or lists, all `[E, ...]` or, of a single environment, all without
        the leading dimension; observations and actions may be nested dictionaries. The transitions
        share memory with the arguments, which are never altered: store them before the next step.

        Args:
            observations: what was seen before the step.
            actions: what was done.
            rewards: of any real dtype.
            terminateds: bool, whether the step led to a terminal state.
            truncateds: bool, whether the episode was broken off.
            infos: a dictionary (of arrays), a list of dictionaries, or None.
            next_observations: what `step` returned.

        Returns:
            TensorDict `[L]` of the transitions, and the `[L]` int64 numbers of their environments,
            None where these are all. None instead of the pair where no environment is left.

        Raises:
            KeyError: an observation or an info lacks an entry.
            TypeError: a dtype is another one, or not that of numbers.
            ValueError: a shape is another one, a last observation is missing from the infos, or the
                step only resets an environment and no mode says so. Nothing is remembered then.
        """
        made, memory = self.read(
            observations, actions, rewards, terminateds, truncateds, infos, next_observations
        )
        self.remember(memory)
        return made

    def read(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
        infos: Any,
        next_observations: Any,
    ) -> tuple[tuple[TensorDict, Tensor | None] | None, Memory]:
        """Returns what `rows` does, and what to `remember` once the transitions are written."""
        infos = {} if infos is None else infos
        is_vector = self._is_vector(terminateds, infos)
        terminated = self._flag.read(terminateds, "terminateds", "", is_vector)
        truncated = self._flag.read(truncateds, "truncateds", "", is_vector)
        done = terminated | truncated
        lanes, finals, ended = self._who(done)
        if not lanes:
            return None, Memory(self.layout, ended, self._watch.last)
        found = {
            key: info_values(
                infos, _info_path(key), lanes, finals, num_envs=self.num_envs, is_vector=is_vector
            )
            for key in self.info_keys
        }
        observations, next_observations = entries(observations), entries(next_observations)
        layout = self.layout or self._plan(observations, actions, found, is_vector)
        columns = _read(layout, observations, actions, next_observations, is_vector)
        columns[REWARD] = self._reward.read(rewards, "rewards", "", is_vector)
        columns[DONE], columns[TERMINATED], columns[TRUNCATED] = done, terminated, truncated
        self._see_to_ends(columns, layout, infos, finals, is_vector)
        last = self._look(columns, layout)
        index = None
        if len(lanes) < self.num_envs:
            index = torch.tensor(lanes)
            columns = {
                key: column.index_select(0, index.to(column.device))
                for key, column in columns.items()
            }
        for key, value in found.items():
            column = Column(*layout.fields[key], len(lanes))
            columns[key] = column.read(value, "infos", f"[{key!r}]", is_vector)
        return (_transitions(columns, len(lanes)), index), Memory(layout, ended, last)

    def _look(self, columns: Mapping[NestedKey, Any], layout: Layout) -> Ends | None:
        if self.autoreset_mode is not None:
            return self._watch.last
        return self._watch.look(columns, columns[DONE], layout.pairs)

    def remember(self, memory: Memory) -> None:
        """Takes over what is known once a step is written."""
        self.layout, self._ended, self._watch.last = memory

    def settle(
        self, columns: Mapping[NestedKey, NDArray[Any]], infos: Any, *, is_vector: bool
    ) -> Memory:
        """Does what `rows` does about the ends of episodes, for who has read a step otherwise.

        Args:
            columns: `[E, ...]` the transitions; true last observations are put there.
            infos: as in `rows`, but not None.
            is_vector: whether the infos are of a vector of environments.

        Returns:
            what to `remember` once the transitions are written.

        Raises:
            KeyError, TypeError, ValueError: as `rows`.
        """
        layout: Layout = self.layout  # type: ignore[assignment]
        done = torch.from_numpy(columns[DONE])
        _, finals, ended = self._who(done)
        if finals or infos:
            found = {key: torch.from_numpy(column) for key, column in columns.items()}
            self._see_to_ends(found, layout, infos, finals, is_vector)
            if finals:
                for _, key in layout.pairs:
                    columns[key][...] = found[key].numpy()
        return Memory(layout, ended, self._look(columns, layout))

    @property
    def stepping(self) -> NDArray[np.int64] | None:
        """`[L]` the environments that the next step does not merely reset; None where these are all."""
        if self.autoreset_mode is not AutoresetMode.NEXT_STEP or not self._ended.any():
            return None
        return np.flatnonzero(~self._ended)

    @property
    def is_watching(self) -> bool:
        """Whether the next step is compared with the one before it."""
        return bool(self._watch.last)

    def _see_to_ends(
        self,
        columns: dict[NestedKey, Tensor],
        layout: Layout,
        infos: Any,
        finals: list[int],
        is_vector: bool,
    ) -> None:
        """Takes last observations from the infos, or checks that they are there already."""
        if finals:
            self._put_last_observations(columns, layout, infos, finals, is_vector)
        elif infos and (done := columns[DONE]).any():
            check_last_observations(columns, layout, infos, done, is_vector)

    def reset(self, lanes: Any = None) -> None:
        """Forgets which environments ended, as after a `reset` of the environments by hand.

        Args:
            lanes: those that were reset: numbers, or `[E]` bool; None for all.

        Raises:
            ValueError: there is no such environment.
        """
        which = np.asarray(self._all_lanes if lanes is None else lanes)
        size = self.num_envs
        is_mask = which.dtype == bool
        if which.shape != (size,) if is_mask else not np.isin(which, self._all_lanes).all():
            raise ValueError(
                f"lanes must be numbers from 0 to {size - 1} or {size} flags, got {lanes!r}"
            )
        ended = self._ended.copy()
        ended[which if is_mask else which.astype(np.int64)] = False
        self._watch.forget()
        self._ended = ended

    def state_dict(self) -> dict[str, Any]:
        """Returns which environments ended with the last step."""
        return {"ended": torch.from_numpy(self._ended.copy())}

    def check_state_dict(self, state_dict: Any) -> None:
        """Checks that `load_state_dict` can take a state, without changing anything.

        Raises:
            KeyError, TypeError, ValueError: it is of another number of environments, or damaged.
        """
        saved = SavedState(state_dict, "the saved recorder", ("ended",))
        hint = "one for each environment"
        saved.tensor("ended", torch.bool, (self.num_envs,), hint)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: as `check_state_dict`. Nothing is changed then.
        """
        self.check_state_dict(state_dict)
        self._watch.forget()
        self._ended = state_dict["ended"].cpu().numpy().copy()

    def _is_vector(self, terminateds: Any, infos: Any) -> bool:
        """Whether the arguments have a leading dimension, as the flags tell most surely."""
        if not np.ndim(terminateds):
            if self.num_envs > 1:
                raise ValueError(
                    f"terminateds must hold {self.num_envs} flags, one for each environment, got "
                    "a single one; make the storage with num_envs=1 for a single environment"
                )
            if not isinstance(infos, Mapping):
                raise TypeError(
                    "infos must be a dictionary for a single environment, got "
                    f"{type(infos).__name__}; pass the one that `step` returned"
                )
            return False
        if not isinstance(infos, Mapping) and len(infos) != self.num_envs:
            raise ValueError(f"infos must hold {self.num_envs} environments, got {len(infos)}")
        return True

    def _who(self, done: Tensor) -> tuple[list[int], list[int], NDArray[np.bool_]]:
        """The lanes with a transition, those of them reset already, those about to be reset."""
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            ended = done.cpu().numpy().reshape(-1).copy()
            if self._ended.any():
                return np.flatnonzero(~self._ended).tolist(), [], ended
            return self._all_lanes, [], ended
        if self.autoreset_mode is AutoresetMode.SAME_STEP and done.any():
            return self._all_lanes, done.reshape(-1).nonzero().reshape(-1).tolist(), self._ended
        return self._all_lanes, [], self._ended

    def _plan(
        self, observations: Any, actions: Any, found: Mapping[NestedKey, Any], is_vector: bool
    ) -> Layout:
        """The layout of the fields given, or of those of this first step."""
        if self._given is None:
            fields = learn_fields(observations, actions, is_vector=is_vector)
        else:
            fields = dict(self._given)
        for key, value in found.items():
            if self._given is None or key not in fields:
                add_field(fields, key, value, f"infos[{key!r}]", is_vector=is_vector)
        return layout_of(fields, self.info_keys, self.num_envs)

    def _put_last_observations(
        self,
        columns: dict[NestedKey, Tensor],
        layout: Layout,
        infos: Any,
        ended: list[int],
        is_vector: bool,
    ) -> None:
        """Replaces the first observations of new episodes by the last ones of those that ended."""
        name = "infos['final_obs']"
        copied: dict[NestedKey, Tensor] = {}
        for lane in ended:
            last = entries(final_observation(infos, lane, is_vector=is_vector))
            for leaf, value in leaves(layout.observations, last, name):
                column = layout.columns[leaf.key].read(value, name, leaf.label, is_vector=False)
                if leaf.next_key not in copied:
                    # The columns share memory with the caller's arrays.
                    copied[leaf.next_key] = columns[leaf.next_key].clone()
                copied[leaf.next_key][lane] = column[0]
        columns.update(copied)


def _mode(mode: AutoresetMode | str | None) -> AutoresetMode | None:
    try:
        return None if mode is None else AutoresetMode(mode)
    except ValueError:
        raise ValueError(
            f"autoreset_mode must be None or one of {[item.value for item in AutoresetMode]}, "
            f"got {mode!r}; env.metadata['autoreset_mode'] has it"
        ) from None


def _info_path(key: NestedKey) -> tuple[str, ...]:
    path = key_path(key)
    return path[1:] if path[0] == "next" else path


def _read(
    layout: Layout, observations: Any, actions: Any, next_observations: Any, is_vector: bool
) -> dict[NestedKey, Tensor]:
    columns: dict[NestedKey, Tensor] = {}
    read = layout.columns
    for leaf, value in leaves(layout.observations, observations, "observations"):
        columns[leaf.key] = read[leaf.key].read(value, "observations", leaf.label, is_vector)
    for leaf, value in leaves(layout.actions, actions, "actions"):
        columns[leaf.key] = read[leaf.key].read(value, "actions", leaf.label, is_vector)
    for leaf, value in leaves(layout.observations, next_observations, "next_observations"):
        columns[leaf.next_key] = read[leaf.key].read(
            value, "next_observations", leaf.label, is_vector
        )
    return columns


def _transitions(columns: Mapping[NestedKey, Tensor], num_rows: int) -> TensorDict:
    """The columns as a TensorDict `[num_rows]`, all on the device of the first observation."""
    device = next(iter(columns.values())).device
    columns = {
        key: column if column.device == device else column.to(device)
        for key, column in columns.items()
    }
    return nest(columns, torch.Size([num_rows]), device)
