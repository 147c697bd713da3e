"""The uniform sampler, and the base class of samplers that wrap another.

Letters: B batch.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

import torch
from torchrl.data import RandomSampler, Storage
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments
from trl_storages.attributes import Setting, Strict
from trl_storages.functional.draws import random_noise
from trl_storages.ring import EpisodeIndex, episodes_of
from trl_storages.saved.parts import SavedPart, SavedState, as_part
from trl_storages.stock_parts import checked_draw

__all__ = [
    "Drawn",
    "UniformSampler",
    "WrappingSampler",
    "layers_of",
    "progress_of_draws",
    "resume_draws",
]

#: `[B]` int64 slots, and their info.
Drawn = tuple[torch.Tensor, dict[str, Any]]


class UniformSampler(SavedPart, Strict, RandomSampler):  # type: ignore[misc]
    """Draws uniformly over the live rows, exactly, whatever the fill of each lane.

    TorchRL's `RandomSampler` draws slots below the length of the storage, which is wrong while the lanes
    of a ring are filled unequally. Without an episode index the two are identical.

    >>> from trl_storages import PackedStorage, ReplayStorage
    >>> ReplayStorage(storage=PackedStorage(100)).sampler
    UniformSampler()
    """

    # `storage` is Any, as TorchRL's type has no `episodes` and users' subclasses inherit the annotation.
    def sample(self, storage: Any, batch_size: int) -> Drawn:
        """Draws rows with replacement.

        Args:
            storage: holds the rows and their episode index.
            batch_size: B.

        Returns:
            `[B]` int64 slots, and an empty dict.

        Raises:
            RuntimeError: the storage is empty.
        """
        batch_size, episodes = checked_draw(storage, batch_size)
        if episodes is None:
            return super().sample(storage, batch_size)
        return self._draw(episodes, batch_size)

    def sample_window(self, storage: Storage, batch_size: int, window: torch.Tensor) -> Drawn:
        """Draws among the newest rows, with replacement.

        Args:
            storage: holds the rows and their episode index.
            batch_size: B.
            window: `[]` int64 on the storage's device: how many of the newest rows to draw from, at
                least 1 and at most the rows stored.

        Returns:
            `[B]` int64 slots, and an empty dict.

        Raises:
            RuntimeError: the storage is empty, or has no episode index.
        """
        arguments.tensor("window", window, dtype=torch.int64)
        batch_size, episodes = checked_draw(storage, batch_size)
        return self._draw(
            episodes_of(storage) if episodes is None else episodes, batch_size, window
        )

    def _draw(
        self, episodes: EpisodeIndex, batch_size: int, window: torch.Tensor | None = None
    ) -> Drawn:
        noise = random_noise(batch_size, generator=self._rng, device=episodes.device)
        return episodes.ring.draw(noise, window), {}

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty dict: the sampler is stateless."""
        return {}

    def check_state(self, state_dict: Any) -> None:
        """Checks a state; see `SavedPart.check_state`."""
        SavedState(state_dict, f"the saved {type(self).__name__}", ())

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Does nothing: the sampler is stateless."""


class _OfBase:
    """An attribute or method that forwards to the sampler's base.

    Args:
        doc: the docstring.
    """

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, sampler: Any, owner: type | None = None) -> Any:
        return self if sampler is None else getattr(sampler.base, self._name)

    def __set__(self, sampler: Any, value: Any) -> None:
        setattr(sampler.base, self._name, value)


class _Base(Setting[Sampler]):
    """The setting `base`, which the sampler itself checks as well."""

    def __set__(self, sampler: WrappingSampler, value: Any) -> None:
        sampler._check_base(value)
        super().__set__(sampler, value)
        if (generator := vars(sampler).get("_rng")) is not None:
            sampler._rng = generator


class _Generator:
    """The generator of the draws, of a sampler and of its base."""

    # As in `Setting`, reading needs no __get__.
    def __set__(self, sampler: Any, value: torch.Generator | None) -> None:
        vars(sampler)["_rng"] = sampler.base._rng = value


class WrappingSampler(SavedPart, Strict, Sampler):  # type: ignore[misc]
    """Wraps another sampler: changes its draws and forwards everything else to it.

    Args:
        base: the sampler that draws; None draws uniformly.
    """

    #: Attributes that may change between samples; they are saved.
    live_parameters: ClassVar[tuple[str, ...]] = ()

    base = _Base(
        partial(
            arguments.instance,
            kind=Sampler,
            what="a sampler, such as PERSampler, or None for uniform draws",
        ),
        "The sampler that draws.",
    )

    def __init__(self, base: Sampler | None = None) -> None:
        super().__init__()
        self.base = UniformSampler() if base is None else base
        self._rng = self.base._rng
        # Saved counters of this sampler's progress.
        self._counts: dict[str, int] = {}

    def _check_base(self, base: Sampler) -> None:
        """Raises if this sampler can't wrap `base`, which is known to be a sampler."""

    @abstractmethod
    def sample(self, storage: Any, batch_size: int) -> Drawn:
        """Draws a batch.

        Args:
            storage: holds the rows and their episode index.
            batch_size: B.

        Returns:
            `[B]` int64 slots, and their info.

        Raises:
            RuntimeError: the storage is empty, or has no episode index.
        """

    # The replay buffer knows only the outermost sampler: generator and notifications are forwarded.
    _rng: torch.Generator | None = _Generator()  # type: ignore[assignment]
    ran_out = _OfBase(
        "Whether the base has drawn every row once; an iteration over the buffer ends then."
    )
    _remaining_batches = _OfBase("How many batches are left until then.")
    add = _OfBase("Tells the base of one new row.")
    extend = _OfBase("Tells the base of new rows.")
    mark_update = _OfBase("Tells the base that rows were overwritten.")
    update_priority = _OfBase("Passes priorities on to the base.")
    default_priority = _OfBase("The priority that the base gives to new rows.")
    can_sample = _OfBase("Returns whether the base can draw the requested batch.")
    _empty = _OfBase("Tells the base that there are no rows any more.")

    def hear_of_rows(self) -> None:
        """Handles the notification that another process wrote rows."""
        if isinstance(self.base, WrappingSampler):
            self.base.hear_of_rows()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the sampler and of its base."""
        own = {name: getattr(self, name) for name in self.live_parameters}
        return {**own, **self._counts, "base": as_part(self.base).state_dict()}

    def check_state(self, state_dict: Any) -> None:
        """Checks a state; see `SavedPart.check_state`."""
        names = self.live_parameters
        saved = SavedState(
            state_dict, f"the saved {type(self).__name__}", [*names, *self._counts, "base"]
        )
        saved.check_parameters(type(self), names)
        for name in self._counts:
            saved.integer(name)
        as_part(self.base).check_state(saved["base"])

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Loads a state that was checked."""
        for name in self.live_parameters:
            setattr(self, name, state[name])
        self._counts = {name: state[name] for name in self._counts}
        as_part(self.base).take_state(state["base"])


def layers_of(sampler: Sampler) -> list[Sampler]:
    """Returns a sampler and those it wraps, innermost last."""
    layers = [sampler]
    # Called for each batch; `isinstance` takes three times as long.
    while WrappingSampler in type(sampler).__mro__:
        layers.append(sampler := sampler.base)
    return layers


def progress_of_draws(sampler: Sampler) -> dict[str, Any]:
    """Returns the counters of a sampler and its bases, without parameters, as plain values."""
    if not isinstance(sampler, WrappingSampler):
        return {}
    return {**sampler._counts, "base": progress_of_draws(sampler.base)}


def resume_draws(sampler: Sampler, progress: dict[str, Any]) -> None:
    """Restores what `progress_of_draws` returned, for each layer whose counters have the same names."""
    if not isinstance(sampler, WrappingSampler):
        return
    resume_draws(sampler.base, progress.get("base", {}))
    if {*progress} == {*sampler._counts, "base"}:
        saved = SavedState(progress, f"the saved {type(sampler).__name__}", [*progress])
        sampler._counts = {name: saved.integer(name) for name in sampler._counts}
