"""The base class of samplers, uniform sampling, and samplers that change what another sampler draws.

Letters: B batch, D random numbers per transition, E lanes, N transitions of an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torchrl.data import RandomSampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import validation
from trl_storages.index import EpisodeIndex
from trl_storages.serialization import Adopt, State, all_of, required_items
from trl_storages.settings import ComponentSetting, Strict
from trl_storages.storage import PackedStorage, StorageView
from trl_storages.torchrl_compat import reject_torchrl_components

__all__ = [
    "Drawn",
    "ReplaySampler",
    "UniformSampler",
    "WrappingSampler",
    "layers_of",
    "resolve_sampler",
]

#: `[B]` int64 slots, and the sampler's fields of the batch, as arrays `[B, ...]`.
Drawn = tuple[np.ndarray, dict[Any, np.ndarray]]


class ReplaySampler(Strict, Sampler):  # type: ignore[misc]
    """Samples transitions of a `PackedStorage`; the base class of the samplers here.

    A sampler reads the episode index whenever it samples, and has no callbacks for writes. It therefore
    also works in TorchRL's buffers over a `PackedStorage` and an `EpisodeWriter`. Subclasses implement
    `draw`. All random numbers of a batch come from one call of the generator, so that a seed samples the
    same transitions in memory, on disk and on a GPU.
    """

    #: D, the number of random numbers per transition.
    num_draws = 1
    #: Whether the last batch ended an epoch, and therefore an iteration over the buffer.
    ran_out = False

    def components(self) -> list[ReplaySampler]:
        """Returns this sampler, followed by the samplers that it wraps, outermost first."""
        return [self]

    def sample(
        self, storage: PackedStorage, batch_size: int
    ) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
        """Samples a batch for one of TorchRL's buffers; see `sample_view`.

        Raises:
            RuntimeError: the storage is empty.
            TypeError: the storage is not a `PackedStorage`.
        """
        return self.sample_view(
            validation.instance("storage", storage, PackedStorage).view(), batch_size
        )

    def sample_view(
        self, view: StorageView, batch_size: int
    ) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
        """Samples a batch.

        Args:
            view: the storage as of one moment.
            batch_size: B.

        Returns:
            `[B]` int64 slots, and the sampler's fields of the batch, on the host.

        Raises:
            RuntimeError: the storage is empty.
        """
        view.episodes.check_filled()
        noise = np.empty((self.num_draws, batch_size), np.int64)
        torch.from_numpy(noise).random_(generator=self._rng)
        slots, info = self.draw(view, noise, None)
        tensors = map(torch.from_numpy, info.values())
        return torch.from_numpy(slots), dict(zip(info, tensors, strict=True))

    def draw(self, view: StorageView, noise: np.ndarray, window: int | None) -> Drawn:
        """Chooses the transitions of a batch by random numbers.

        Args:
            view: the storage as of one moment, which is not empty.
            noise: `[D, B]` int64 random numbers, uniform from 0 to 2^63 - 1.
            window: the recency window: how many of the newest steps of each lane to draw from; None
                draws from all steps.

        Returns:
            `[B]` int64 slots, and the sampler's fields of the batch, as arrays `[B, ...]`.
        """
        raise NotImplementedError

    # State

    def state(self) -> State:
        """Returns the state on which the next batches depend, except parameters and the generator."""
        return {}

    def prepare_load(self, state: Any) -> Adopt:
        """Checks a state, and returns a function that adopts the state.

        Raises:
            ValueError: `state` does not come from a sampler of this class.
        """
        required_items(type(self).__name__, state, ())
        return all_of()

    # Called by TorchRL's buffers

    def state_dict(self) -> State:
        """Returns `state()`."""
        return self.state()

    def load_state_dict(self, state_dict: State) -> None:
        """Adopts a state that `state_dict` returned, after all checks of `prepare_load`."""
        self.prepare_load(state_dict)()

    def _empty(self) -> None:
        """Does nothing, because the index already contains no transitions."""

    def dumps(self, path: Any) -> None:
        """Does nothing."""

    def loads(self, path: Any) -> None:
        """Does nothing."""


@dataclass(frozen=True, eq=False)
class _Epoch:
    """The transitions that were stored when an epoch began, in an order that a seed determines.

    Attributes:
        seed: seed of the order.
        tails: `[E]` the oldest step of each lane when the epoch began.
        cursors: `[E]` the first unwritten step of each lane when the epoch began.
        reset_count: reset count of the index; None if the epoch was loaded.
    """

    seed: int
    tails: np.ndarray
    cursors: np.ndarray
    reset_count: int | None = None

    def can_continue(self, index: EpisodeIndex) -> bool:
        """Returns whether an index may contain the transitions of the epoch."""
        if len(self.tails) != index.num_envs or self.reset_count not in (None, index.reset_count):
            return False
        has_room = self.cursors - self.tails <= index.steps_per_lane
        return bool((has_room & (self.cursors <= index.cursors)).all())

    @cached_property
    def order(self) -> np.ndarray:
        """`[N]` ranks of the transitions, which are counted lane by lane, oldest first."""
        size, generator = int((self.cursors - self.tails).sum()), torch.Generator()
        generator.manual_seed(self.seed)
        return torch.randperm(size, generator=generator, device="cpu").numpy()

    def live_slots(self, index: EpisodeIndex, begin: int, end: int) -> np.ndarray:
        """Returns the slots at positions `begin` to `end` of the order, without evicted transitions."""
        ranks, ends = self.order[begin:end], (self.cursors - self.tails).cumsum()
        lanes = ends.searchsorted(ranks, side="right")
        steps = ranks + (self.cursors - ends)[lanes]
        return index.slots_of(lanes, steps)[steps >= index.tails[lanes]]


# Larger step numbers in a state are rejected.
_MAX_STEP = 2**53
_STATE = "seed", "tails", "cursors", "drawn"
_NO_EPOCH = _Epoch(0, np.empty(0, np.int64), np.empty(0, np.int64))


class UniformSampler(ReplaySampler):
    """Samples uniformly from the stored transitions, also if lanes hold different numbers of them.

    Args:
        without_replacement: whether to sample in epochs, in random order: each transition that is stored
            when an epoch begins is sampled once, unless it is evicted first. The last batch of an epoch
            is completed with transitions of the next epoch, and ends an iteration over the buffer
            (`for batch in buffer`). A reader of a directory that another process writes skips a few
            more transitions: those that are sampled in place of overwritten ones.

    >>> from trl_storages import PackedStorage, ReplayStorage
    >>> ReplayStorage(storage=PackedStorage(100)).sampler
    UniformSampler()
    """

    def __init__(self, without_replacement: bool = False) -> None:
        super().__init__()
        self._has_epochs = validation.flag("without_replacement", without_replacement)
        # The current epoch, and the position in its order of the next transition.
        self._epoch, self._position = _NO_EPOCH, 0

    @property
    def without_replacement(self) -> bool:
        """Whether transitions are sampled in epochs."""
        return self._has_epochs

    def draw(self, view: StorageView, noise: np.ndarray, window: int | None) -> Drawn:
        """Draws `[B]` slots, and no fields.

        Raises:
            ValueError: a recency window is given, and the sampler samples without replacement.
        """
        if not self._has_epochs:
            return view.episodes.draw(noise[0], window), {}
        if window is not None:
            raise ValueError(
                "UniformSampler(without_replacement=True) cannot sample from a recency window."
            )
        return self._continue_epoch(view.episodes, noise[0]), {}

    def _continue_epoch(self, index: EpisodeIndex, noise: np.ndarray) -> np.ndarray:
        """Returns the next slots `[B]` of the epoch, and those of the next epochs where it ends."""
        chunks: list[np.ndarray] = []
        num_slots, has_ended, epoch, position = 0, False, self._epoch, self._position
        if not epoch.can_continue(index):
            epoch, position = _NO_EPOCH, 0
        while num_slots < len(noise):
            if position == len(epoch.order):
                index.check_filled()
                bounds = index.tails.copy(), index.cursors.copy()
                epoch, position = _Epoch(int(noise[num_slots]), *bounds, index.reset_count), 0
            end = min(position + len(noise) - num_slots, len(epoch.order))
            chunks.append(epoch.live_slots(index, position, end))
            num_slots, position = num_slots + len(chunks[-1]), end
            has_ended |= position == len(epoch.order)  # also if the rest of it was evicted
        self._epoch, self._position, self.ran_out = epoch, position, has_ended
        return np.concatenate(chunks)

    def _empty(self) -> None:
        self._epoch, self._position = _NO_EPOCH, 0

    def state(self) -> State:
        """Returns the seed and the bounds of the current epoch, and the position in its order."""
        epoch = self._epoch
        tails, cursors = epoch.tails.tolist(), epoch.cursors.tolist()
        return {"seed": epoch.seed, "tails": tails, "cursors": cursors, "drawn": self._position}

    def prepare_load(self, state: Any) -> Adopt:
        """Checks a state, and returns a function that adopts the state."""
        seed, *bounds, position = required_items("UniformSampler", state, _STATE)
        if not all(isinstance(steps, list) for steps in bounds):
            raise ValueError("the bounds of an epoch must be lists of steps: nothing changed.")
        tails, cursors = (
            np.array([validation.integer("a step", t, at_most=_MAX_STEP) for t in steps], np.int64)
            for steps in bounds
        )
        epoch = _Epoch(validation.integer("seed", seed), tails, cursors)
        is_ordered = len(tails) == len(cursors) and (tails <= cursors).all()
        if not is_ordered or validation.integer("drawn", position) > (cursors - tails).sum():
            raise ValueError(
                "an epoch must have at least as many transitions as were sampled: nothing changed."
            )

        def adopt() -> None:
            self._epoch, self._position = epoch, position

        return adopt

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'without_replacement=True' * self._has_epochs})"


def layers_of(sampler: Sampler) -> list[Sampler]:
    """Returns a sampler, followed by the samplers that it wraps, outermost first."""
    return sampler.components() if isinstance(sampler, ReplaySampler) else [sampler]


def resolve_sampler(sampler: Any) -> Any:
    """Returns the sampler that replaces None or a sampler of TorchRL's; any other sampler unchanged.

    Raises:
        TypeError: no sampler of this library replaces that of TorchRL.
        ValueError: it is a `SamplerWithoutReplacement` with `drop_last`.

    >>> resolve_sampler(RandomSampler())
    UniformSampler()
    """
    if sampler is None or type(sampler) is RandomSampler:
        return UniformSampler()
    if type(sampler) is SamplerWithoutReplacement and sampler.shuffle:
        if sampler.drop_last:
            raise ValueError(
                "drop_last must be False, got True: each batch is complete, because transitions of the "
                "next epoch complete the last batch of an epoch."
            )
        return UniformSampler(without_replacement=True)
    reject_torchrl_components(sampler)
    return validation.instance("sampler", sampler, Sampler, what="a sampler")


class WrappingSampler(ReplaySampler):
    """A sampler that changes what its `base` draws.

    Args:
        base: draws the transitions by its `draw`; None draws uniformly. The attribute may be set; to
            replace several bases, begin with the innermost one.

    Raises:
        TypeError: `base` is neither a sampler of this library nor one that `resolve_sampler` replaces.
    """

    # Number of random numbers per transition in addition to those of the base.
    _extra_draws = 0
    # TorchRL's schedulers set these on the outermost sampler.
    alpha = ComponentSetting("Priority exponent of the base.", "base=PERSampler(...)")
    beta = ComponentSetting("Exponent of importance weights.", "base=PERSampler(...)")
    eps = ComponentSetting("Is added to each priority of the base.", "base=PERSampler(...)")
    eta: Any = ComponentSetting("Recency strength of the base.", "base=ERESampler(...)")

    def __init__(self, base: Sampler | None) -> None:
        super().__init__()
        self.base = base

    @property
    def base(self) -> ReplaySampler:
        """The sampler that draws the transitions."""
        return self._base

    @base.setter
    def base(self, base: Any) -> None:
        base = resolve_sampler(base)
        what = "a sampler of this library, such as PERSampler, or None for uniform draws"
        validation.instance("base", base, ReplaySampler, what=what)
        self._check_base(base)
        self._base: ReplaySampler = base
        self.num_draws = base.num_draws + self._extra_draws

    def _check_base(self, base: ReplaySampler) -> None:
        """Raises if this sampler can't change the draws of `base`."""

    def components(self) -> list[ReplaySampler]:
        """Returns this sampler, followed by the samplers that it wraps, outermost first."""
        return [self, *self._base.components()]

    @property
    def ran_out(self) -> bool:  # type: ignore[override]
        """Whether the last batch ended an epoch of the base."""
        return self._base.ran_out

    def _empty(self) -> None:
        self._base._empty()
