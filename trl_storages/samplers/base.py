"""What samplers that build on another sampler have in common."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict import NestedKey
from torchrl.data import Storage
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments, keys
from trl_storages.samplers.drawing import DrawingSampler, noise_of
from trl_storages.samplers.uniform import UniformSampler
from trl_storages.saved import SavedState, as_part

__all__ = ["WrappingSampler", "layers_of"]


class WrappingSampler(DrawingSampler):
    """Adds to what another sampler draws, and passes everything else on to it.

    Args:
        base: the sampler that draws; None draws uniformly.
    """

    #: Entries of its own state that say how far it has come; the others are parameters.
    _progress_keys: ClassVar[tuple[str, ...]] = ()

    def __init__(self, base: Sampler | None = None) -> None:
        super().__init__()
        what = "a sampler, such as PERSampler, or None for uniform draws"
        self.base = (
            UniformSampler()
            if base is None
            else arguments.instance("base", base, Sampler, what=what)
        )

    @property
    def noise_per_sample(self) -> int:
        """How many random numbers the base draws a sample with."""
        return noise_of(self.base)

    # The replay buffer sets the generator of its own sampler only.
    @property
    def _rng(self) -> torch.Generator | None:
        return self.base._rng

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        self.base._rng = generator

    # Samplers without replacement end an iteration over the buffer.
    @property
    def ran_out(self) -> bool:
        """Whether the base has drawn every row once."""
        return self.base.ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self.base.ran_out = value

    @property
    def _remaining_batches(self) -> int:
        return self.base._remaining_batches

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
        return self.base.update_priority(index, priority, storage=storage, **options)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Returns whether the base can draw the requested batch."""
        return self.base.can_sample(storage, batch_size)

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
