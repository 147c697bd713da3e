"""Notices loops whose environments reset themselves otherwise than the storage was told.

Letters: E environments.
"""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor

from trl_storages.gym.infos import given_final_observation
from trl_storages.gym.layout import Layout, entries
from trl_storages.gym.trees import leaves
from trl_storages.keys import next_key

__all__ = ["ResetWatch", "check_last_observations"]


def check_last_observations(
    columns: Mapping[NestedKey, Tensor], layout: Layout, infos: Any, done: Tensor, is_vector: bool
) -> None:
    """Refuses first observations of new episodes in the place of last ones, where infos tell.

    Args:
        columns: the transitions of a step, `[E, ...]`.
        layout: how they were read.
        infos: those of the step.
        done: `[E, 1]` bool.
        is_vector: whether the infos are of a vector of environments.

    Raises:
        ValueError: an episode ended with another observation than the next one that was given.
    """
    name = "infos['final_obs']"
    for lane in done.reshape(-1).nonzero().reshape(-1).tolist():
        last = given_final_observation(infos, lane, is_vector=is_vector)
        if last is None:
            continue
        for leaf, value in leaves(layout.observations, entries(last), name):
            column = layout.columns[leaf.key].read(value, name, leaf.label, is_vector=False)
            if not torch.equal(column[0], columns[leaf.next_key][lane]):
                raise ValueError(
                    f"next_observations must hold the last observation of environment {lane}, which "
                    f"ended, but {name} is another one: the environment was reset in the same step; "
                    "make the storage with autoreset_mode=env.metadata['autoreset_mode']"
                )


class ResetWatch:
    """Warns, once, of an episode that seems to begin where the one before ended."""

    def __init__(self) -> None:
        #: What the episodes that ended with the last step ended with, by environment.
        self.last: dict[int, dict[NestedKey, Tensor]] = {}
        self._warned = False

    def look(
        self,
        columns: Mapping[NestedKey, Tensor],
        ended: Collection[int],
        infos: Collection[NestedKey],
    ) -> None:
        """Compares the beginnings of episodes with the ends before them.

        Args:
            columns: the transitions of a step, `[E, ...]`.
            ended: environments whose episodes end with it.
            infos: keys that are no observations.
        """
        if self._warned or not (self.last or ended):
            return
        keys = [
            (key, next_key(key)) for key in columns if next_key(key) in columns and key not in infos
        ]
        for lane, last in self.last.items():
            if all(torch.equal(columns[key][lane], last[key]) for key, _ in keys):
                self._warned = True
                warnings.warn(
                    f"environment {lane} ended, and its next step begins with the observation that it "
                    "ended with. If the environments reset themselves in the next step, make the "
                    "storage with autoreset_mode=env.metadata['autoreset_mode']; otherwise reset them "
                    "when they end.",
                    stacklevel=5,
                )
                break
        self.last = {
            lane: {key: columns[after][lane].clone() for key, after in keys}
            for lane in ended
            # Where a step changes nothing, nothing can be told.
            if not all(torch.equal(columns[key][lane], columns[after][lane]) for key, after in keys)
        }

    def forget(self) -> None:
        """Forgets what episodes ended with."""
        self.last = {}
