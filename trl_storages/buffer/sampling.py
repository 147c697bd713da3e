"""The steps that make a batch: sampler, sample unit, transforms.

Letters: B batch, S steps of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Compose, Transform

from trl_storages import keys
from trl_storages.samplers import EpisodeSequence, HERSampler, ReplaySampler
from trl_storages.storage import BatchRows, PackedStorage, StorageView
from trl_storages.torchrl_compat import dispatch_td_nn_modules, reject_torchrl_components
from trl_storages.transforms import GoalRelabel, ReplayTransform, transforms_in

__all__ = ["SamplingPipeline"]

#: Entries that a sampler adds to a batch, key -> `[B, ...]` on the host.
Info = dict[Any, torch.Tensor]
# The number of stored transitions from which on reward functions are audited.
_MIN_STEPS_TO_AUDIT = 1000


class SamplingPipeline:
    """Samples batches: `ReplayTransform`s see the sampled transitions, TorchRL's see TensorDicts.

    Args:
        storage: holds the transitions.
        sampler: chooses slots; the slots of a sampler that is not a `ReplaySampler` are checked.
        unit: expands slots to sequences; None leaves them.
        transform: all transforms. Others may be added to it at any time.

    Raises:
        TypeError: a transform is one of TorchRL's that would be wrong over lanes of episodes.
    """

    def __init__(
        self,
        storage: PackedStorage,
        sampler: Sampler,
        unit: EpisodeSequence | None,
        transform: Compose,
    ) -> None:
        self._storage, self._unit, self._transform = storage, unit, transform
        layers = sampler.layers if isinstance(sampler, ReplaySampler) else []
        self._choose: Callable[..., tuple[torch.Tensor, Info]] = (
            sampler.sample_view if layers else partial(_choose_live, sampler, storage)
        )
        self._goal_samplers = {it.goal_key: it for it in layers if isinstance(it, HERSampler)}
        # The public accessors of a module take several times as long.
        self._modules = transform._modules["transforms"]._modules
        self._arrange()

    def _arrange(self) -> None:
        """Sorts the transforms by what they are given."""
        transforms = transforms_in(self._transform)
        self._num_modules = len(self._modules)
        replayed = [it for it in transforms if isinstance(it, ReplayTransform)]
        self._batch_transforms = [it for it in transforms if not isinstance(it, ReplayTransform)]
        reject_torchrl_components(*self._batch_transforms)
        written = [it.goal_key for it in replayed if it.uses_goals]
        self._unwritten_goals = (
            [] if None in written else [key for key in self._goal_samplers if key not in written]
        )
        # Most transforms need no further transitions.
        inherited = ReplayTransform.prepare
        self._prepares = [it.prepare for it in replayed if type(it).prepare is not inherited]
        self._unaudited = [it for it in replayed if isinstance(it, GoalRelabel)]
        self._replays = [
            it.replay if isinstance(it, ReplayTransform) else partial(_apply, it)
            for it in transforms
        ]

    @property
    def batch_transforms(self) -> list[Transform]:
        """The transforms of batches: all that are not `ReplayTransform`s."""
        if len(self._modules) != self._num_modules:
            self._arrange()
        return self._batch_transforms

    def sample(self, batch_size: int) -> tuple[TensorDictBase, Info]:
        """Samples a batch `[B]`, and returns it with the entries of sampler and sample unit.

        Samples that another process overwrites meanwhile are replaced by samples of further batches.
        Therefore a reader makes progress however fast the writer is.

        Raises:
            RuntimeError: the storage is empty, or the sampler chooses goals that no transform writes.
        """
        batch, info, is_torn = self._sample_once(batch_size)
        while is_torn is not None:
            other_batch, other_info, is_other_torn = self._sample_once(batch_size)
            if len(is_torn) != batch.numel():  # a transform has changed the number of samples
                batch, info, is_torn = other_batch, other_info, is_other_torn
                continue
            taken = is_torn if is_other_torn is None else is_torn & ~is_other_torn
            chosen = taken.view(batch.batch_size).to(other_batch.device)
            batch = torch.where(chosen, other_batch, batch)
            for key, value in info.items():
                info[key] = torch.where(expand_as_right(taken, value), other_info[key], value)
            is_torn = None if is_torn.equal(taken) else is_torn & ~taken
        return batch, info

    def _sample_once(self, batch_size: int) -> tuple[TensorDictBase, Info, torch.Tensor | None]:
        """Samples a batch, and returns which samples `[B]` were overwritten meanwhile; None if none."""
        if len(self._modules) != self._num_modules:
            self._arrange()
        view = self._storage.view()
        if self._unaudited and view.is_exclusive:
            num_written = view.episodes.cursors.sum()
            if num_written >= _MIN_STEPS_TO_AUDIT:
                self._audit()
        slots, info = self._choose(view, batch_size)
        if self._unwritten_goals:
            raise RuntimeError(
                f"the goals {self._unwritten_goals} that are drawn must be written by a transform: pass "
                "transform=GoalRelabel(reward_fn), with the goal_key of the sampler."
            )
        if self._unit is not None:
            slots, info = self._unit.expand(slots, info, view)
        info[keys.INDEX] = slots
        rows = BatchRows(view, slots, info, self._storage.generator)
        for prepare in self._prepares:
            prepare(rows)
        for replay in self._replays:
            replay(rows)
        batch = rows.tensordict()
        return batch, info, None if view.is_exclusive else self._torn(view, len(slots))

    def _torn(self, view: StorageView, batch_size: int) -> torch.Tensor | None:
        """Returns which samples `[B]` were overwritten, None if none; a sequence counts as a whole."""
        is_torn = view.torn(batch_size)
        if is_torn is None or self._unit is None:
            return is_torn
        S = self._unit.num_steps
        return is_torn.view(-1, S).any(1).repeat_interleave(S)

    def _audit(self) -> None:
        """Audits the reward function of each transform that relabels, once."""
        unaudited, self._unaudited = self._unaudited, []
        for relabel in unaudited:
            # A sampler that is not a HERSampler may choose goals, too.
            sampler = self._goal_samplers.get(relabel.goal_key)
            num_goals = 1 if sampler is None else sampler.num_goals
            if num_goals == 0:
                self._unaudited.append(relabel)
            elif relabel.is_audit_due:
                relabel.audit_once(self._storage, mixes_rewards=math.isfinite(num_goals))


def _choose_live(
    sampler: Sampler, storage: PackedStorage, view: StorageView, batch_size: int
) -> tuple[torch.Tensor, Info]:
    """Chooses slots by a sampler that is not a `ReplaySampler`.

    Raises:
        RuntimeError: the storage is empty.
        IndexError: a slot held no transition when sampling began. The view finds transitions that are
            overwritten meanwhile.
    """
    index = view.episodes
    index.check_filled()
    tails = index.tails.copy()
    slots, info = sampler.sample(storage, batch_size)
    slots = torch.as_tensor(slots, device="cpu").long()
    index.check_live(slots, tails)
    return slots, {key: torch.as_tensor(value, device="cpu") for key, value in info.items()}


def _apply(transform: Transform, rows: BatchRows) -> None:
    with dispatch_td_nn_modules(True):
        rows.transform(transform)
