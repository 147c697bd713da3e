"""The steps that make a batch: sampler, sample unit, transforms.

Letters: B batch, S steps of a sequence, n episodes of T steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right
from torch.nn import ModuleList
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Compose, Transform

from trl_storages import keys
from trl_storages.samplers import EpisodeSequence, HERSampler, ReplaySampler, layers_of
from trl_storages.storage import BatchRows, PackedStorage, StorageView
from trl_storages.torchrl_compat import dispatch_td_nn_modules, reject_torchrl_components
from trl_storages.transforms import GoalRelabel, ReplayTransform, transforms_in

__all__ = ["SamplingPipeline"]

#: Fields that a sampler adds to a batch, key -> `[B, ...]` on the host.
Info = dict[Any, torch.Tensor]
# The number of written transitions from which on reward functions are audited.
_MIN_STEPS_TO_AUDIT = 1000
_MIN_BATCHES_BETWEEN_AUDITS = 1000


class SamplingPipeline:
    """Samples batches: `ReplayTransform`s see the sampled transitions, TorchRL's see TensorDicts.

    Args:
        storage: holds the transitions.
        sampler: chooses slots; the slots of a sampler that is not a `ReplaySampler` are checked.
        unit: expands slots to sequences; None leaves them.
        transform: all transforms. Others may be added to it at any time.
        generator: random numbers of the sampler; None is torch's default generator.

    Raises:
        TypeError: a transform is one of TorchRL's that would be wrong over lanes of episodes.
    """

    def __init__(
        self,
        storage: PackedStorage,
        sampler: Sampler,
        unit: EpisodeSequence | None,
        transform: Compose,
        generator: torch.Generator | None,
    ) -> None:
        self._storage, self._unit, self._transform = storage, unit, transform
        self._generator = generator
        # Batches that were sampled while an audit was due, and their number at the next audit.
        self._num_batches = self._next_audit = 0
        is_own = isinstance(sampler, ReplaySampler)
        self._choose: Callable[..., tuple[torch.Tensor, Info]] = (
            sampler.sample_view if is_own else partial(_choose_live, sampler, storage)
        )
        goal_samplers = [it for it in layers_of(sampler) if isinstance(it, HERSampler)]
        self._goal_samplers = {it.goal_key: it for it in goal_samplers}
        self._arrange()

    def _arrange(self) -> None:
        """Sorts the transforms by what they are given."""
        self._transforms = transforms = transforms_in(self._transform)
        # Without nested ones, because transforms appended to these later would not be noticed.
        self._transform.transforms = ModuleList(transforms)
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

    def _notice_changes(self) -> None:
        """Sorts the transforms again if one was added, replaced or removed."""
        # `_modules`, because the public accessors of a module take several times as long.
        if [*self._transform._modules["transforms"]._modules.values()] != self._transforms:
            self._arrange()

    @property
    def batch_transforms(self) -> list[Transform]:
        """The transforms of batches: all that are not `ReplayTransform`s."""
        self._notice_changes()
        return self._batch_transforms

    def sample(
        self, batch_size: int, needed: torch.Tensor | None = None
    ) -> tuple[TensorDictBase, Info]:
        """Samples a batch `[B]`, and returns it with the fields of sampler and sample unit.

        Samples that another process overwrites meanwhile are replaced by samples of further batches.
        Therefore a reader makes progress however fast the writer is.

        Args:
            batch_size: B.
            needed: `[B]` bool, the samples to replace in an earlier batch, which alone must be intact.

        Raises:
            RuntimeError: the storage is empty, or the sampler chooses goals that no transform writes.
        """
        self._notice_changes()
        if self._storage.is_evicting_early:
            self._storage.warn_of_early_eviction()
        view = self._storage.view()
        if self._unaudited and view.is_exclusive:
            self._num_batches += 1
            is_due = self._num_batches >= self._next_audit
            if is_due and view.episodes.cursors.sum() >= _MIN_STEPS_TO_AUDIT:
                self._audit()
        slots, info = self._choose(view, batch_size)
        if self._unwritten_goals:
            raise RuntimeError(
                f"the goals {self._unwritten_goals} that are drawn must be written by a transform: pass "
                "transform=GoalRelabel(reward_fn), with the goal_key of the sampler."
            )
        if self._unit is not None:
            slots, info = self._unit.expand(slots, info, view)
        info[keys.INDEX], info[keys.INDEX_GENERATION] = slots, view.episodes.steps_of(slots)
        rows = BatchRows(view, slots, info, self._generator)
        for prepare in self._prepares:
            prepare(rows)
        for replay in self._replays:
            replay(rows)
        batch = rows.tensordict()
        if not view.is_exclusive and (is_torn := self._torn(view, len(slots), needed)) is not None:
            batch, info = self._replace(batch, info, is_torn, batch_size)
        return batch, info

    def _audit(self) -> None:
        """Audits the reward functions, and again when twice as many batches were sampled."""
        for relabel in self._unaudited:
            # A sampler that is not a HERSampler may choose goals, too.
            sampler = self._goal_samplers.get(relabel.goal_key)
            relabel.audit_newest(self._storage, 1 if sampler is None else sampler.num_goals)
        self._unaudited = [it for it in self._unaudited if it.is_audit_due]
        self._next_audit = max(2 * self._num_batches, _MIN_BATCHES_BETWEEN_AUDITS)

    def _torn(
        self, view: StorageView, size: int, needed: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns which of the `needed` samples were overwritten; a sequence counts as a whole."""
        is_torn = view.torn(size)
        if is_torn is not None and self._unit is not None:
            S = self._unit.num_steps
            is_torn = is_torn.view(-1, S).any(1).repeat_interleave(S)
        if is_torn is not None and needed is not None:
            is_torn &= needed
        return is_torn if is_torn is not None and is_torn.any() else None

    def _replace(
        self, batch: TensorDictBase, info: Info, is_torn: torch.Tensor, batch_size: int
    ) -> tuple[TensorDictBase, Info]:
        """Replaces torn samples by those of further batches."""
        has_other_size = len(is_torn) != batch.numel()  # because of a transform
        other, other_info = self.sample(batch_size, is_torn | has_other_size)
        if has_other_size:
            return other, other_info
        batch = torch.where(is_torn.view(batch.batch_size).to(other.device), other, batch)
        for key, value in info.items():
            info[key] = torch.where(expand_as_right(is_torn, value), other_info[key], value)
        return batch, info

    def sample_episodes(self, num_episodes: int) -> TensorDictBase:
        """Samples complete, finished episodes `[n, T]`, padded with zeros where the mask is false.

        Episodes that another process overwrites while they are read are replaced by others.
        """
        batches: list[TensorDictBase] = []
        while (missing := num_episodes - sum(map(len, batches))) > 0:
            batches.append(_read_episodes(self._storage, missing, self._generator))
        longest = max(batch.shape[1] for batch in batches)
        padded = [_pad(batch, longest) for batch in batches]
        batch = padded[0] if len(padded) == 1 else torch.cat(padded)
        with dispatch_td_nn_modules(True):
            for transform in self.batch_transforms:
                batch = transform(batch)
        return batch


def _read_episodes(
    storage: PackedStorage, num_episodes: int, generator: torch.Generator | None
) -> TensorDictBase:
    """Samples episodes, and returns those that were not overwritten while they were read."""
    view = storage.view()
    first = view.episodes.random_episodes(num_episodes, generator)
    lengths = view.episodes.num_after(first) + 1
    steps = torch.arange(int(lengths.max()), device="cpu").expand(num_episodes, -1)
    slots = view.episodes.shift(first[:, None], steps.minimum(lengths[:, None] - 1))
    mask = (steps < lengths[:, None]).to(storage.device)
    batch, overwritten = view.read(slots, mask), view.overwritten(slots)
    generations, device = view.episodes.steps_of(slots), storage.device
    batch = batch.set(keys.INDEX, slots.to(device)).set(keys.MASK, mask)
    batch = batch.set(keys.INDEX_GENERATION, generations.to(device))
    return batch if overwritten is None else batch[~overwritten.any(1)]


def _pad(batch: TensorDictBase, length: int) -> TensorDictBase:
    """Returns episodes `[n, T]` as `[n, length]`, with zeros at the end."""
    if batch.shape[1] == length:
        return batch
    zeros = torch.zeros_like(batch[:, :1]).expand(-1, length - batch.shape[1])
    return torch.cat([batch, zeros], 1)


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
