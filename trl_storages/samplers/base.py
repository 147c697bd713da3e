"""What samplers of this library have in common; uniform draws, and samplers that change what others draw.

Letters: B batch, D random numbers that a row takes, E lanes, N rows of an epoch.
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
from trl_storages.serialization import Adopt, State, entries_of, joined
from trl_storages.settings import Strict
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

#: `[B]` int64 slots, and the entries of the batch that go with them, as arrays.
Drawn = tuple[np.ndarray, dict[Any, np.ndarray]]


class ReplaySampler(Strict, Sampler):  # type: ignore[misc]
    """Draws rows of a `PackedStorage`; the base class of the samplers here.

    A sampler is never told of writes: it asks the episode index what there is when it draws. So it works
    in TorchRL's buffers too, over a `PackedStorage` that an `EpisodeWriter` writes. Subclasses implement
    `draw`; the random numbers of a batch are drawn at once, so that one seed means the same rows wherever
    they are.
    """

    #: D, how many random numbers it takes for each row.
    num_draws = 1
    #: Whether the last draw ended an epoch, and with it an iteration over the buffer.
    ran_out = False

    @property
    def layers(self) -> list[ReplaySampler]:
        """The samplers that this one is made of, itself first."""
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
            view: the storage as of now.
            batch_size: B.

        Returns:
            `[B]` int64 slots, and the sampler's entries of the batch, on the host.

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
            view: the storage as of now, which is not empty.
            noise: `[D, B]` int64 random numbers, uniform from 0 to 2^63 - 1.
            window: how many of the newest steps of each lane to draw from; None is all.

        Returns:
            As `sample_view`, but arrays.
        """
        raise NotImplementedError

    # What TorchRL's buffers call

    def state(self) -> State:
        """Returns what the next draws depend on, but for parameters and the generator."""
        return {}

    def parsed(self, state: Any) -> Adopt:
        """Returns a function that adopts a state.

        Raises:
            ValueError: the state is not that of such a sampler.
        """
        entries_of(type(self).__name__, state, ())
        return joined()

    def state_dict(self) -> State:
        """Returns `state()`."""
        return self.state()

    def load_state_dict(self, state_dict: State) -> None:
        """Adopts what `state_dict` returned, once all of it is checked."""
        self.parsed(state_dict)()

    def _empty(self) -> None:
        """Does nothing: the index says that there are no rows."""

    def dumps(self, path: Any) -> None:
        """Does nothing."""

    def loads(self, path: Any) -> None:
        """Does nothing."""


def layers_of(sampler: Sampler) -> list[Sampler]:
    """Returns the samplers that a sampler is made of, itself first."""
    return sampler.layers if isinstance(sampler, ReplaySampler) else [sampler]


@dataclass(frozen=True, eq=False)
class _Epoch:
    """The rows that were live when an epoch began, in an order that follows from its seed.

    Attributes:
        seed: of the order.
        tails: `[E]` the oldest live step of each lane then.
        cursors: `[E]` the first step that was not written yet.
        number: the epoch of the index; None if it was loaded.
    """

    seed: int
    tails: np.ndarray
    cursors: np.ndarray
    number: int | None = None

    def goes_on(self, index: EpisodeIndex) -> bool:
        """Whether its rows may be those of an index."""
        if len(self.tails) != index.num_envs or self.number not in (None, index.generation):
            return False
        fits = self.cursors - self.tails <= index.steps_per_lane
        return bool((fits & (self.cursors <= index.cursors)).all())

    @cached_property
    def order(self) -> np.ndarray:
        """`[N]` ranks of the rows, which are counted lane by lane, oldest first."""
        size, generator = int((self.cursors - self.tails).sum()), torch.Generator()
        generator.manual_seed(self.seed)
        return torch.randperm(size, generator=generator, device="cpu").numpy()

    def live_slots(self, index: EpisodeIndex, begin: int, end: int) -> np.ndarray:
        """Returns the slots of rows `begin` to `end` in order, but of those that were evicted since."""
        ranks, ends = self.order[begin:end], (self.cursors - self.tails).cumsum()
        lanes = ends.searchsorted(ranks, side="right")
        steps = ranks + (self.cursors - ends)[lanes]
        return index.slots_of(lanes, steps)[steps >= index.tails[lanes]]


_MOST = 2**53
_NONE = _Epoch(0, np.empty(0, np.int64), np.empty(0, np.int64))


class UniformSampler(ReplaySampler):
    """Draws uniformly over the live rows, exactly, whatever the fill of each lane.

    Args:
        without_replacement: whether to go through the rows in epochs, in random order: each row that is
            live when an epoch begins is drawn once, unless it is evicted before. The last batch of an
            epoch is completed by rows of the next, and an iteration over the storage (`for batch in
            storage`) ends with it. A reader beside a writer leaves out a few more, where it draws
            again in the place of rows that gave way.

    >>> from trl_storages import PackedStorage, ReplayStorage
    >>> ReplayStorage(storage=PackedStorage(100)).sampler
    UniformSampler()
    """

    def __init__(self, without_replacement: bool = False) -> None:
        super().__init__()
        self._is_by_epoch = validation.flag("without_replacement", without_replacement)
        # The running epoch, and how many of its rows were drawn or are gone.
        self._epoch, self._num_drawn = _NONE, 0

    @property
    def without_replacement(self) -> bool:
        """Whether rows are drawn in epochs."""
        return self._is_by_epoch

    def draw(self, view: StorageView, noise: np.ndarray, window: int | None) -> Drawn:
        """Draws `[B]` slots, and no entries.

        Raises:
            ValueError: there is a window, and rows are drawn without replacement.
        """
        if not self._is_by_epoch:
            return view.episodes.draw(noise[0], window), {}
        if window is not None:
            raise ValueError("UniformSampler(without_replacement=True) draws from all rows only.")
        return self._go_on(view.episodes, noise[0]), {}

    def _go_on(self, index: EpisodeIndex, noise: np.ndarray) -> np.ndarray:
        """Draws the next rows of the epoch, and of others where they are not enough."""
        found: list[np.ndarray] = []
        num_found, has_run_out, epoch, at = 0, False, self._epoch, self._num_drawn
        if not epoch.goes_on(index):
            epoch, at = _NONE, 0
        while num_found < len(noise):
            if at == len(epoch.order):
                index.check_filled()
                has_run_out |= num_found > 0
                bounds = index.tails.copy(), index.cursors.copy()
                epoch, at = _Epoch(int(noise[num_found]), *bounds, index.generation), 0
            end = min(at + len(noise) - num_found, len(epoch.order))
            found.append(epoch.live_slots(index, at, end))
            num_found, at = num_found + len(found[-1]), end
        self._epoch, self._num_drawn = epoch, at
        self.ran_out = has_run_out or at == len(epoch.order)
        return np.concatenate(found)

    def _empty(self) -> None:
        self._epoch, self._num_drawn = _NONE, 0

    def state(self) -> State:
        """Returns what the order of the running epoch follows from, if any, and how far it has come."""
        epoch = self._epoch
        tails, cursors = epoch.tails.tolist(), epoch.cursors.tolist()
        return {"seed": epoch.seed, "tails": tails, "cursors": cursors, "drawn": self._num_drawn}

    def parsed(self, state: Any) -> Adopt:
        """Returns a function that adopts a state."""
        seed, *bounds, drawn = entries_of(
            "UniformSampler", state, ("seed", "tails", "cursors", "drawn")
        )
        if not all(isinstance(steps, list) for steps in bounds):
            raise ValueError("the bounds of an epoch must be lists of steps: nothing changed.")
        tails, cursors = (
            np.array(
                [validation.integer("a step", step, at_most=_MOST) for step in steps], np.int64
            )
            for steps in bounds
        )
        epoch = _Epoch(validation.integer("seed", seed), tails, cursors)
        is_ordered = len(tails) == len(cursors) and (tails <= cursors).all()
        if not is_ordered or validation.integer("drawn", drawn) > (cursors - tails).sum():
            raise ValueError(
                "an epoch must have as many rows as were drawn of it: nothing changed."
            )

        def adopt() -> None:
            self._epoch, self._num_drawn = epoch, drawn

        return adopt

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'without_replacement=True' * self._is_by_epoch})"


def resolve_sampler(sampler: Any) -> Any:
    """Returns the sampler to use in the place of one of TorchRL's; any other as it is.

    Raises:
        TypeError: TorchRL's sampler has no equal here.

    >>> own_sampler(RandomSampler())
    UniformSampler()
    """
    if type(sampler) is RandomSampler:
        return UniformSampler()
    if type(sampler) is SamplerWithoutReplacement and sampler.shuffle:
        return UniformSampler(without_replacement=True)
    reject_torchrl_components(sampler)
    return validation.instance("sampler", sampler, Sampler, what="a sampler")


class _OfBase:
    """A parameter of the samplers below: TorchRL's schedulers ask the outermost one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, sampler: Any, owner: type) -> Any:
        return self if sampler is None else getattr(sampler.base, self._name)

    def __set__(self, sampler: Any, value: Any) -> None:
        setattr(sampler.base, self._name, value)


class WrappingSampler(ReplaySampler):
    """A sampler that changes what its `base` draws.

    Args:
        base: draws the rows; None draws uniformly. It may be replaced, from the innermost sampler
            outwards. Its `draw` is asked, not its `sample`.

    Raises:
        TypeError: it is no sampler of this library, and none of TorchRL's with an equal here.
    """

    # How many random numbers it takes for each row beside those of its base.
    _own_draws = 0
    alpha, beta, eps, eta = _OfBase(), _OfBase(), _OfBase(), _OfBase()

    def __init__(self, base: Sampler | None) -> None:
        super().__init__()
        self.base = base

    @property
    def base(self) -> Any:
        """The sampler that draws the rows."""
        return self._base

    @base.setter
    def base(self, base: Any) -> None:
        base = UniformSampler() if base is None else resolve_sampler(base)
        what = "a sampler of this library, such as PERSampler, or None for uniform draws"
        validation.instance("base", base, ReplaySampler, what=what)
        self._check_base(base)
        self._base: ReplaySampler = base
        self.num_draws = base.num_draws + self._own_draws

    def _check_base(self, base: ReplaySampler) -> None:
        """Raises if this sampler can't change what `base` draws."""

    @property
    def layers(self) -> list[ReplaySampler]:
        """The samplers that this one is made of, itself first."""
        return [self, *self._base.layers]

    @property
    def ran_out(self) -> bool:  # type: ignore[override]
        """Whether the last draw ended an epoch of the base."""
        return self._base.ran_out

    def _empty(self) -> None:
        self._base._empty()
