"""Detects loops whose environments are reset in another way than the storage was told.

Letters: E environments.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.callers import warn_caller
from trl_storages.gym.infos import final_observation
from trl_storages.gym.layout import StepLayout, entries
from trl_storages.keys import DONE, REWARD
from trl_storages.rows import as_array

__all__ = ["LastBits", "check_last_observations", "ends_to_watch", "last_observations"]

#: The bytes of the last observations of episodes, by environment.
LastBits = dict[int, list[bytes]]


def last_observations(
    layout: StepLayout, infos: Any, lane: int, *, is_vector: bool, needed: bool
) -> Iterator[tuple[NestedKey, torch.Tensor]]:
    """Yields the checked entries of the last observation of an environment that ended.

    Args:
        layout: of the transitions.
        infos: those of the step.
        lane: the environment.
        is_vector: whether the infos are of a vector of environments.
        needed: whether the infos must hold it; if False, nothing is yielded if they don't.

    Raises:
        KeyError, TypeError, ValueError: it is not an observation, or missing.
    """
    given = final_observation(infos, lane, is_vector=is_vector, needed=needed)
    if given is None:
        return
    name = "infos['final_obs']"
    values = layout.observations.read(entries(given), name)
    for leaf, value in zip(layout.observations.leaves, values, strict=True):
        column = layout.columns[leaf.key].read(value, name, leaf.label, is_vector=False)
        yield leaf.next_key, column[0]


def check_last_observations(
    columns: Mapping[NestedKey, Any], layout: StepLayout, infos: Any, is_vector: bool
) -> None:
    """Refuses next observations that are the first of a new episode, if the infos show it.

    Args:
        columns: the transitions of a step, `[E, ...]`.
        layout: how they were read.
        infos: those of the step.
        is_vector: whether the infos are of a vector of environments.

    Raises:
        ValueError: the last observation in the infos is not the next observation that was given.
    """
    for lane in np.flatnonzero(as_array(columns[DONE])).tolist():
        last = last_observations(layout, infos, lane, is_vector=is_vector, needed=False)
        for key, value in last:
            if not np.array_equal(as_array(value), as_array(columns[key][lane])):
                raise ValueError(
                    f"next_observations must hold the last observation of environment {lane}, which "
                    "ended, but infos['final_obs'] is another one: the environment was reset in the same "
                    "step; make the storage with "
                    "autoreset_mode=env.metadata['autoreset_mode']"
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
                f"every step must be a transition, but environment {lane} ended, and this step of "
                "it has no reward and begins with the observation that it ended with: gymnasium "
                "only resets it in this step. Make the storage with "
                "autoreset_mode=env.metadata['autoreset_mode'], which is 'NextStep' then; or with "
                "'Disabled', if the loop resets by itself to where an episode may end."
            )
        warn_caller(
            f"environment {lane} ended, and its next step begins with the observation that it "
            "ended with. If the environments reset themselves in the next step, that step is no "
            "transition: make the storage with autoreset_mode=env.metadata['autoreset_mode']; "
            "otherwise reset them when they end."
        )
        return None
    after = [as_array(columns[key]) for _, key in pairs]
    ends = {lane: _bits(after, lane) for lane in np.flatnonzero(done).tolist()}
    # A step that changes nothing says nothing about resets.
    return {lane: end for lane, end in ends.items() if end != _bits(before, lane)}


def _bits(columns: Sequence[np.ndarray], lane: int) -> list[bytes]:
    return [column[lane].tobytes() for column in columns]
