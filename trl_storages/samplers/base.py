"""What samplers have in common, and the plainest of them.

Letters: B batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from tensordict import NestedKey
from torchrl.data import RandomSampler, Storage
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments, keys
from trl_storages.functional.draws import random_noise
from trl_storages.ring import episodes_of
from trl_storages.saved import SavedPart, SavedState, as_part
from trl_storages.signatures import SettledSampler
from trl_storages.stock_parts import draw

__all__ = [
    "DrawingSampler",
    "UniformSampler",
    "WrappingSampler",
    "check_not_empty",
    "draw_from",
    "layers_of",
    "noise_of",
]

Noise = Sequence[torch.Tensor]


class DrawingSampler(SavedPart, SettledSampler, Sampler):  # type: ignore[misc]
    """A sampler that is handed its random numbers, so that those of a batch are made at once."""

    #: Which of `sample` and `sample_window` a subclass has overridden without `draw`.
    overridden: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for kind in cls.__mro__:
            if methods := vars(kind).keys() & {"draw", "sample", "sample_window"}:
                cls.overridden = frozenset() if "draw" in methods else frozenset(methods)
                return

    @property
    def noise_per_sample(self) -> int:
        """How many random numbers a sample is drawn with."""
        return 1

    @abstractmethod
    def draw(
        self, storage: Storage, batch_size: int, noise: Noise, window: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws a batch.

        Args:
            storage: holds rows.
            batch_size: B.
            noise: `noise_per_sample` rows `[B]` of `random_noise`.
            window: `[]` int64, how many of the newest rows to draw from; None is all. Only samplers
                that have `sample_window` are handed one.

        Returns:
            `[B]` int64 slots, and the info that goes with them.
        """

    # Of all types: TorchRL's has no `episodes`, and type checkers give it to subclasses of users too.
    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws a batch.

        Args:
            storage: holds the rows and their episode index.
            batch_size: B.

        Returns:
            `[B]` int64 slots, and the info that goes with them.

        Raises:
            RuntimeError: the storage is empty, or has no episode index.
        """
        return self._sample(storage, batch_size)

    def _sample(
        self, storage: Storage, batch_size: int, *window: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        check_not_empty(storage)
        batch_size = arguments.integer("batch_size", batch_size, at_least=1)
        size, device = (self.noise_per_sample, batch_size), self._noise_device(storage)
        noise: Noise = ()
        if size[0]:
            noise = random_noise(size, generator=self._rng, device=device).unbind()
        return self.draw(storage, batch_size, noise, *window)

    def _noise_device(self, storage: Storage) -> torch.device:
        return episodes_of(storage).device


def noise_of(sampler: Sampler) -> int:
    """Returns how many random numbers a sampler is handed for a sample.

    Those of TorchRL make their own, as do subclasses that override `sample`.
    """
    if isinstance(sampler, DrawingSampler) and not sampler.overridden:
        return sampler.noise_per_sample
    return 0


def draw_from(
    sampler: Any, storage: Storage, batch_size: int, noise: Noise, *window: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Draws a batch from a sampler of any kind; the arguments are those of `DrawingSampler.draw`."""
    if isinstance(sampler, DrawingSampler) and not sampler.overridden:
        return sampler.draw(storage, batch_size, noise, *window)
    if window:
        found: tuple[torch.Tensor, dict[str, Any]] = sampler.sample_window(
            storage, batch_size, *window
        )
        return found
    return draw(sampler, storage, batch_size)


def check_not_empty(storage: Storage) -> None:
    """Raises a RuntimeError that says what to do if there is nothing to draw from."""
    # Anything with an episode index and a length will do.
    if getattr(storage, "episodes", None) is None:
        arguments.instance("storage", storage, Storage, what="a TorchRL storage")
    if not len(storage):
        raise RuntimeError(
            "the storage is empty: write transitions with record(), add() or extend() before sampling."
        )


class UniformSampler(DrawingSampler, RandomSampler):  # type: ignore[misc]
    """Draws uniformly over the live rows, exactly, whatever the fill of each lane.

    TorchRL's `RandomSampler` draws below the length of the storage, which is wrong while lanes of a
    ring are filled unequally. Over a storage without an episode index the two are the same.
    """

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws rows with replacement.

        Returns:
            `[B]` int64 slots, and an empty dict.

        Raises:
            RuntimeError: the storage is empty.
        """
        if getattr(storage, "episodes", None) is not None:
            return self._sample(storage, batch_size)
        check_not_empty(storage)
        batch_size = arguments.integer("batch_size", batch_size, at_least=1)
        found: tuple[torch.Tensor, dict[str, Any]] = RandomSampler.sample(self, storage, batch_size)
        return found

    def sample_window(
        self, storage: Storage, batch_size: int, window: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws among the newest rows, with replacement.

        Args:
            storage: holds the rows and their episode index.
            batch_size: B.
            window: `[]` int64 on the storage's device: how many of the newest rows to draw from, at
                least 1 and at most the rows stored.

        Returns:
            `[B]` int64 slots, and an empty dict.
        """
        arguments.tensor("window", window, dtype=torch.int64)
        return self._sample(storage, batch_size, window)

    def draw(
        self, storage: Storage, batch_size: int, noise: Noise, window: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws rows with replacement, see `DrawingSampler.draw`."""
        return episodes_of(storage).draw(noise[0], window), {}

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing, as each draw is as likely as any other."""
        return {}

    def check_state_dict(self, state_dict: Any) -> None:
        """Checks that a state is that of such a sampler, which has none: it must be empty.

        Raises:
            TypeError, ValueError: it is not.
        """
        SavedState(state_dict, f"the saved {type(self).__name__}", ())

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Takes over a state, of which there is none."""


class WrappingSampler(DrawingSampler):
    """Adds to what another sampler draws, and passes everything else on to it.

    Args:
        base: the sampler that draws; None draws uniformly.
    """

    #: Entries of its own state that say how far it has come; the others are parameters.
    _progress_keys: ClassVar[tuple[str, ...]] = ()

    def __init__(self, base: Sampler | None = None) -> None:
        super().__init__()
        self.base = UniformSampler() if base is None else base

    @property
    def base(self) -> Sampler:
        """The sampler that draws."""
        return self._base

    @base.setter
    def base(self, value: Sampler) -> None:
        self._check_base(value)
        what = "a sampler, such as PERSampler, or None for uniform draws"
        self._base: Sampler = arguments.instance("base", value, Sampler, what=what)

    def _check_base(self, base: Sampler) -> None:
        """Raises what is wrong with what is to draw for this one, beside that it is no sampler."""

    @property
    def noise_per_sample(self) -> int:
        """How many random numbers the base draws a sample with."""
        return noise_of(self.base)

    # The replay buffer sets the generator of its own sampler only.
    @property
    def _rng(self) -> torch.Generator | None:
        found: torch.Generator | None = self.base._rng
        return found

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        self.base._rng = generator

    # Samplers without replacement end an iteration over the buffer.
    @property
    def ran_out(self) -> bool:
        """Whether the base has drawn every row once."""
        found: bool = self.base.ran_out
        return found

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self.base.ran_out = value

    @property
    def _remaining_batches(self) -> int:
        found: int = self.base._remaining_batches
        return found

    @property
    def draws_goals(self) -> bool:
        """Whether this sampler names goal rows, which a transform must write into the batch."""
        return False

    @property
    def goal_key(self) -> NestedKey:
        """Which goal of the batch those rows are for."""
        return keys.DESIRED_GOAL

    def add(self, index: Any) -> None:
        """Tells the base of one new row."""
        self.base.add(index)

    def extend(self, index: Any) -> None:
        """Tells the base of new rows."""
        self.base.extend(index)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Tells the base that rows were overwritten."""
        self.base.mark_update(index, storage=storage)

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None, **options: Any
    ) -> dict[str, Any] | None:
        """Passes priorities on to the base."""
        found: dict[str, Any] | None = self.base.update_priority(
            index, priority, storage=storage, **options
        )
        return found

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Returns whether the base can draw the requested batch."""
        found: bool = self.base.can_sample(storage, batch_size)
        return found

    @property
    def default_priority(self) -> Any:
        """The priority that the base gives to new rows."""
        return self.base.default_priority

    def _own_state(self) -> dict[str, Any]:
        """Returns the state of this sampler without the base's, in plain values."""
        return {}

    def _check_own_state(self, saved: SavedState) -> None:
        """Raises what is wrong with a state that `_own_state` returned elsewhere."""

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Restores what `_own_state` returned."""

    def progress(self) -> dict[str, Any]:
        """Returns how far the sampler has come, without its parameters, in plain values."""
        own, base = self._own_state(), {}
        if isinstance(self.base, WrappingSampler):
            base = self.base.progress()
        return {**{key: own[key] for key in self._progress_keys}, "base": base}

    def resume(self, progress: dict[str, Any]) -> None:
        """Goes on where `progress` was taken, if it was by a sampler of this kind."""
        if isinstance(self.base, WrappingSampler):
            self.base.resume(progress.get("base", {}))
        if self._progress_keys and {*progress} == {*self._progress_keys, "base"}:
            state = self._own_state() | {key: progress[key] for key in self._progress_keys}
            self._check_own_state(SavedState(state, f"the saved {type(self).__name__}", [*state]))
            self._load_own_state(state)

    def hear_of_rows(self) -> None:
        """Hears that another process wrote rows."""
        if isinstance(self.base, WrappingSampler):
            self.base.hear_of_rows()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the sampler and of its base."""
        return {**self._own_state(), "base": as_part(self.base).state_dict()}

    def check_state_dict(self, state_dict: Any) -> None:
        """Checks that `load_state_dict` can take a state, without changing anything.

        Raises:
            KeyError, TypeError, ValueError: it is that of another sampler or base, or damaged.
        """
        what = f"the saved {type(self).__name__}"
        saved = SavedState(state_dict, what, (*self._own_state(), "base"))
        self._check_own_state(saved)
        as_part(self.base).check_state_dict(saved["base"])

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Takes over a state that was checked."""
        self._load_own_state({key: state[key] for key in self._own_state()})
        as_part(self.base).take_state(state["base"])

    def _empty(self) -> None:
        self.base._empty()


def layers_of(sampler: Sampler) -> list[Sampler]:
    """Returns a sampler and those it builds on, the innermost last."""
    layers = [sampler]
    while isinstance(sampler, WrappingSampler):
        layers.append(sampler := sampler.base)
    return layers
