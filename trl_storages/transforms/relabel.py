"""Shows transitions as if a goal that was reached had been the goal all along.

Letters: B batch, G goal shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import Storage

from trl_storages import keys
from trl_storages._torchrl import set_entry
from trl_storages.episodes import episodes_of
from trl_storages.storages import read_fields
from trl_storages.transforms.base import ReplayTransform

__all__ = ["GoalRelabel", "RelabelAudit"]

GoalFunction = Callable[[torch.Tensor, torch.Tensor, Mapping[NestedKey, torch.Tensor]], Any]


class GoalRelabel(ReplayTransform):
    """Writes the goals that a `HERSampler` drew into the batch and recomputes what follows from them.

    Where `her_mask` is true, `desired_goal` and `("next", "desired_goal")` become the next achieved goal
    of the row `goal_index`, and the reward is `reward_fn(next achieved goal, goal, transition)`. The
    flags stay as stored unless `terminated_fn` is given; then `terminated` is recomputed, and `done` is
    terminated or truncated. Other rows of the batch, and the storage, are never changed.

    Args:
        reward_fn: `(achieved_goal [B, *G], desired_goal [B, *G], transition) -> [B]` or `[B, 1]`;
            `transition` maps each of `info_keys` to a tensor `[B, ...]`.
        terminated_fn: the same, returning bool; None leaves the flags.
        info_keys: further entries of the rows that the functions read.
        achieved_goal_key: entry of the goal that a state achieves.
        desired_goal_key: entry of the goal that is pursued.
        reward_key: entry of the reward, `[..., 1]`.
        done_key: entry of the flag that ends an episode, `[..., 1]` bool.
        terminated_key: entry of the flag of a terminal state.
        truncated_key: entry of the flag of an episode cut short.

    Raises:
        TypeError: `reward_fn` or `terminated_fn` cannot be called.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495, algorithm 1.
    """

    def __init__(
        self,
        reward_fn: GoalFunction,
        *,
        terminated_fn: GoalFunction | None = None,
        info_keys: Sequence[NestedKey] = (),
        achieved_goal_key: NestedKey = keys.ACHIEVED_GOAL,
        desired_goal_key: NestedKey = keys.DESIRED_GOAL,
        reward_key: NestedKey = keys.REWARD,
        done_key: NestedKey = keys.DONE,
        terminated_key: NestedKey = keys.TERMINATED,
        truncated_key: NestedKey = keys.TRUNCATED,
    ) -> None:
        super().__init__()
        if not callable(reward_fn):
            raise TypeError(f"reward_fn must be callable, got {type(reward_fn).__name__}.")
        if terminated_fn is not None and not callable(terminated_fn):
            raise TypeError(f"terminated_fn must be callable, got {type(terminated_fn).__name__}.")
        self.reward_fn = reward_fn
        self.terminated_fn = terminated_fn
        self.info_keys = tuple(info_keys)
        self.next_achieved_goal_key = keys.next_key(achieved_goal_key)
        self.desired_goal_key = desired_goal_key
        self.next_desired_goal_key = keys.next_key(desired_goal_key)
        self.reward_key = reward_key
        self.done_key = done_key
        self.terminated_key = terminated_key
        self.truncated_key = truncated_key

    def replay(self, batch: TensorDictBase, storage: Storage) -> TensorDictBase:
        """Relabels the rows of `batch` where `her_mask` is true.

        Raises:
            KeyError: the batch has no drawn goals, or the rows no goal entries.
            ValueError: goals differ in shape, or a function returned another shape than the batch's.
        """
        if batch.get(keys.GOAL_INDEX, None) is None:
            raise KeyError(
                "the batch has no 'goal_index': GoalRelabel writes the goals that a HERSampler draws; "
                "pass sampler=HERSampler(...) to the ReplayStorage."
            )
        goal_index, mask = batch.get(keys.GOAL_INDEX), batch.get(keys.HER_MASK)
        drawn = read_fields(storage, goal_index, [self.next_achieved_goal_key])
        drawn_goal = drawn[self.next_achieved_goal_key]
        goal = _blend(mask, drawn_goal, self._entry(batch, self.desired_goal_key))
        next_goal = batch.get(self.next_desired_goal_key, None)
        # A task that moves its goals stores another one after the step than before it.
        next_goal = goal if next_goal is None else _blend(mask, drawn_goal, next_goal)
        set_entry(batch, self.desired_goal_key, goal)
        set_entry(batch, self.next_desired_goal_key, next_goal)

        arguments = (
            self._entry(batch, self.next_achieved_goal_key),
            goal,
            {key: self._entry(batch, key) for key in self.info_keys},
        )
        stored = self._entry(batch, self.reward_key)
        reward = _column(self.reward_fn(*arguments), stored, "reward_fn")
        set_entry(batch, self.reward_key, _blend(mask, reward, stored))
        if self.terminated_fn is not None:
            stored = self._entry(batch, self.terminated_key)
            reached = _column(self.terminated_fn(*arguments), stored, "terminated_fn")
            terminated = _blend(mask, reached, stored)
            done = terminated | self._entry(batch, self.truncated_key)
            batch.set(self.terminated_key, terminated)
            batch.set(self.done_key, _blend(mask, done, self._entry(batch, self.done_key)))
        return batch

    def _entry(self, batch: TensorDictBase, key: NestedKey) -> torch.Tensor:
        entry = batch.get(key, None)
        if entry is None:
            there = sorted(map(str, batch.keys(include_nested=True, leaves_only=True)))
            raise KeyError(f"GoalRelabel needs {key!r} in the stored rows; they have {there}.")
        return entry

    def audit(self, storage: Any, num_rows: int = 10_000) -> RelabelAudit:
        """Compares `reward_fn` with stored rewards: on rows as they are, they must be equal.

        A reward function that disagrees with its environment is the commonest mistake with
        hindsight, and silent: relabelled rows then teach another task than the stored ones.

        Args:
            storage: a `ReplayStorage`, or the storage of one.
            num_rows: how many of the newest rows to compare.

        Returns:
            what was compared, and where it differs.

        Raises:
            RuntimeError: there are no rows.
        """
        storage = getattr(storage, "storage", storage)
        episodes = episodes_of(storage)
        if not len(episodes):
            raise RuntimeError("there are no rows to audit: write transitions first.")
        ranks = torch.arange(min(num_rows, len(episodes)), device=episodes.device)
        slots = episodes.slots_by_age(ranks)
        next_goal_key = keys.next_key(self.desired_goal_key)
        wanted = [self.next_achieved_goal_key, next_goal_key, self.reward_key, *self.info_keys]
        fields = read_fields(storage, slots, wanted)
        stored = fields[self.reward_key]
        computed = _column(
            self.reward_fn(
                fields[self.next_achieved_goal_key],
                fields[next_goal_key],
                {key: fields[key] for key in self.info_keys},
            ),
            stored,
            "reward_fn",
        )
        differs = ~torch.isclose(computed, stored, rtol=1e-5, atol=1e-6).reshape(-1)
        return RelabelAudit(
            num_rows=slots.shape[0],
            slots=slots[differs],
            stored=stored.reshape(-1)[differs],
            computed=computed.reshape(-1)[differs],
        )


@dataclass(frozen=True)
class RelabelAudit:
    """What `GoalRelabel.audit` found: the D rows on which function and storage disagree."""

    #: How many rows were compared.
    num_rows: int
    #: `[D]` int64, where they lie.
    slots: torch.Tensor
    #: `[D]` the stored rewards.
    stored: torch.Tensor
    #: `[D]` what the function returns for them.
    computed: torch.Tensor

    @property
    def passed(self) -> bool:
        """Whether all rows agree."""
        return not len(self.slots)

    def __str__(self) -> str:
        if self.passed:
            return f"reward_fn agrees with the stored rewards on all {self.num_rows} rows."
        lines = [
            f"reward_fn differs from the stored reward on {len(self.slots)} of {self.num_rows} rows:"
        ]
        worst = (self.stored - self.computed).abs().argsort(descending=True)[:5]
        for at in worst.tolist():
            lines.append(
                f"  slot {int(self.slots[at])}: stored {float(self.stored[at]):g}, computed "
                f"{float(self.computed[at]):g}"
            )
        return "\n".join(lines)


def _blend(mask: torch.Tensor, new: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Returns `new` where `mask`, `stored` elsewhere, both `[B, ...]` of one shape."""
    if new.shape != stored.shape:
        raise ValueError(
            f"the achieved goal must have the desired goal's shape {list(stored.shape)}, got "
            f"{list(new.shape)}."
        )
    return torch.where(mask.view(-1, *(1,) * (stored.ndim - 1)), new.to(stored.dtype), stored)


def _column(result: Any, stored: torch.Tensor, name: str) -> torch.Tensor:
    """Brings what a goal function returned, `[B]` or `[B, 1]`, to the stored entry's shape."""
    batch = stored.shape[0]
    try:
        result = torch.as_tensor(result, device=stored.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must return a tensor or an array of numbers, shape [{batch}] or [{batch}, 1]; "
            f"got {type(result).__name__}."
        ) from error
    if result.shape not in ((batch,), (batch, 1)):
        raise ValueError(
            f"{name} must return one value a row, shape [{batch}] or [{batch}, 1]; got "
            f"{list(result.shape)}."
        )
    return result.reshape(stored.shape).to(stored.dtype)
