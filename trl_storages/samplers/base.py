"""The uniform sampler, and the base class of samplers that wrap another.

Letters: B batch.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

import torch
from torchrl.data import RandomSampler, SamplerWithoutReplacement, Storage
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments
from trl_storages.attributes import Setting, Strict
from trl_storages.functional.draws import random_noise
from trl_storages.kernels.memory import on_device
from trl_storages.ring import EpisodeIndex, episodes_of
from trl_storages.saved.parts import SavedPart, SavedState, as_part
from trl_storages.stock_parts import refuse_stock

__all__ = [
    "Drawn",
    "UniformSampler",
    "WrappingSampler",
    "check_live",
    "checked_draw",
    "layers_of",
    "own_sampler",
    "progress_of_draws",
    "resume_draws",
]

#: `[B]` int64 slots, and their info.
Drawn = tuple[torch.Tensor, dict[str, Any]]


def checked_draw(storage: Any, batch_size: int) -> tuple[int, EpisodeIndex]:
    """Checks that a storage has rows to draw; returns B and its episode index.

    Raises:
        RuntimeError: the storage is empty, or no `EpisodeWriter` writes to it.
        ValueError: B is below 1.
    """
    episodes = episodes_of(storage)
    if not len(episodes):
        raise RuntimeError(
            "the storage is empty: write transitions with record(), add() or extend() before sampling."
        )
    return arguments.integer("batch_size", batch_size, at_least=1), episodes


def check_live(part: Any, index: Any, num_rows: int, storage: Any) -> None:
    """Checks that a part that is not of this package gave slots of stored rows.

    Args:
        part: the sampler or sample unit.
        index: what it gave.
        num_rows: how many slots are wanted.
        storage: holds the rows and their episode index.

    Raises:
        TypeError: it is no tensor of int64.
        ValueError: they are fewer or more.
        RuntimeError: one of them holds no row.
    """
    if type(part).__module__.startswith("trl_storages."):
        return
    name, episodes = type(part).__name__, episodes_of(storage)
    if not isinstance(index, torch.Tensor) or index.dtype is not torch.int64:
        raise TypeError(f"{name} must give slots, a tensor of int64, got {index!r}.")
    if index.shape != (num_rows,):
        raise ValueError(f"{name} must give slots [{num_rows}], got {list(index.shape)}.")
    is_live = episodes.is_live(on_device(index, episodes.device))
    if not bool(is_live.all()):
        raise RuntimeError(
            f"{name} must give slots of stored rows, as in storage.episodes.live_slots(), got "
            f"{index[~is_live.to(index.device)][:5].tolist()}, which hold none."
        )


class UniformSampler(SavedPart, Strict, RandomSampler):  # type: ignore[misc]
    """Draws uniformly over the live rows, exactly, whatever the fill of each lane.

    Args:
        without_replacement: whether to go through the rows in epochs, in random order: each row that is
            live when an epoch begins is drawn once, unless it is evicted before. The last batch of an
            epoch is completed by rows of the next, and an iteration over the storage (`for batch in
            storage`) ends with it.

    >>> from trl_storages import PackedStorage, ReplayStorage
    >>> ReplayStorage(storage=PackedStorage(100)).sampler
    UniformSampler()
    """

    # Lane and step of the rows that are left of the epoch, on the host.
    _left: torch.Tensor

    def __init__(self, without_replacement: bool = False) -> None:
        super().__init__()
        self._is_by_epoch = arguments.flag("without_replacement", without_replacement)
        self._empty()

    @property
    def without_replacement(self) -> bool:
        """Whether rows are drawn in epochs."""
        return self._is_by_epoch

    # `storage` is Any, as TorchRL's type has no `episodes` and users' subclasses inherit the annotation.
    def sample(self, storage: Any, batch_size: int) -> Drawn:
        """Draws rows.

        Args:
            storage: holds the rows and their episode index.
            batch_size: B.

        Returns:
            `[B]` int64 slots, and an empty dict.

        Raises:
            RuntimeError: the storage is empty.
        """
        batch_size, episodes = checked_draw(storage, batch_size)
        if self._is_by_epoch:
            return self._go_on(episodes, batch_size), {}
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
            ValueError: the sampler draws without replacement.
        """
        arguments.tensor("window", window, dtype=torch.int64)
        if self._is_by_epoch:
            raise ValueError("UniformSampler(without_replacement=True) draws from all rows only.")
        batch_size, episodes = checked_draw(storage, batch_size)
        return self._draw(episodes, batch_size, window)

    def _draw(
        self, episodes: EpisodeIndex, batch_size: int, window: torch.Tensor | None = None
    ) -> Drawn:
        noise = random_noise(batch_size, generator=self._rng, device=episodes.device)
        return episodes.ring.draw(noise, window), {}

    # Epochs

    def _go_on(self, episodes: EpisodeIndex, batch_size: int) -> torch.Tensor:
        """Draws the next rows of the epoch, and of another one where they are not enough."""
        tails, left, room = torch.from_numpy(episodes.host_tails), self._left, batch_size
        found: list[torch.Tensor] = []
        has_run_out = False
        while room:
            if not len(left):
                has_run_out = len(found) > 0
                left = self._new_epoch(episodes)
            first, left = left[:room], left[room:]
            # Rows may have been evicted since the epoch began.
            first = first[first[:, 1] >= tails[first[:, 0]]]
            room -= len(first)
            found += [first] if len(first) else []
        self._left, self._has_run_out = left, has_run_out or not len(left)
        rows = on_device(torch.cat(found), episodes.device)
        return episodes.ring.slots_at(rows[:, 1], rows[:, 0])

    def _new_epoch(self, episodes: EpisodeIndex) -> torch.Tensor:
        """Returns lane and step of all live rows in random order, `[N, 2]` int64 on the host."""
        bounds = zip(episodes.host_tails.tolist(), episodes.host_steps.tolist(), strict=True)
        steps = [torch.arange(tail, cursor) for tail, cursor in bounds]
        lanes = [torch.full_like(step, lane) for lane, step in enumerate(steps)]
        rows = torch.stack([torch.cat(lanes), torch.cat(steps)], 1)
        noise = random_noise(len(rows), generator=self._rng, device=episodes.device)
        return rows[noise.argsort(stable=True).cpu()]

    @property
    def ran_out(self) -> bool:
        """Whether the last draw ended an epoch."""
        return self._has_run_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._has_run_out = value

    def _empty(self) -> None:
        self._left, self._has_run_out = torch.zeros(0, 2, dtype=torch.int64), False

    # State

    def state_dict(self) -> dict[str, Any]:
        """Returns what is left of the epoch; nothing if rows are drawn with replacement."""
        return {"left": self._left.clone()} if self._is_by_epoch else {}

    def check_state(self, state_dict: Any) -> None:
        """Checks a state; see `SavedPart.check_state`."""
        names = ("left",) if self._is_by_epoch else ()
        saved = SavedState(state_dict, f"the saved {type(self).__name__}", names)
        if self._is_by_epoch:
            left = saved.tensor("left", torch.int64)
            if left.ndim != 2 or left.shape[1] != 2 or bool((left < 0).any()):
                raise saved.error("left", "lanes and steps [n, 2]", list(left.shape))

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Loads a state that was checked."""
        self._empty()
        if self._is_by_epoch:
            self._left = state["left"].cpu().clone()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'without_replacement=True' * self._is_by_epoch})"


def own_sampler(sampler: Sampler) -> Sampler:
    """Returns the sampler to use in the place of one of TorchRL's; any other as it is.

    Raises:
        TypeError: TorchRL's sampler has no equal here.
    """
    if type(sampler) is RandomSampler:
        return UniformSampler()
    if type(sampler) is SamplerWithoutReplacement and sampler.shuffle and not sampler.drop_last:
        return UniformSampler(without_replacement=True)
    refuse_stock(sampler)
    return sampler


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
        if isinstance(value, Sampler):
            value = own_sampler(value)
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
