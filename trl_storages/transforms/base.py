"""Transforms that look at other rows of the storage than the sampled ones, and how all are applied."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from tensordict import TensorDictBase
from torchrl.envs.transforms import Compose, Transform

from trl_storages._torchrl import dispatch_td_nn_modules
from trl_storages.rows import RowView
from trl_storages.saved import SavedState

__all__ = ["ReplayTransform", "apply_transforms", "parts_of", "transform_batch"]


class ReplayTransform(Transform):  # type: ignore[misc]
    """A transform that a `ReplayStorage` hands its rows to.

    It runs where any other transform of the replay buffer would, in the same order, under the replay
    lock. A transform of one's own that reads further rows subclasses this and implements `replay`.

    >>> class Halved(ReplayTransform):
    ...     def replay(self, rows):
    ...         rows["next", "reward"] = rows["next", "reward"] / 2
    >>> Halved()
    Halved(keys=[])
    """

    #: Whether this transform makes use of the goal rows that a `HERSampler` draws. Where none does, a
    #: `ReplayStorage` refuses to draw them.
    uses_goals = False
    #: Name on the storage -> attribute of this transform that may change between samples; it is saved.
    live_parameters: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def replay(self, rows: RowView) -> None:
        """Changes how the sampled rows are seen.

        What is set (`rows[key] = value`) is so for the sampled rows; what is defined
        (`rows.define(keys, rule)`) for further rows too, which transforms behind this one read.

        Args:
            rows: `[B]` the sampled rows, as the transforms before this one show them, with the sampler's
                entries (`index`, `goal_index`, ...).
        """

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Refuses to run where there is no storage to read.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{type(self).__name__} reads rows beside the sampled ones and what the sampler drew, which "
            "only a ReplayStorage hands to its transforms; it was called without them. Pass it as "
            "transform= to a ReplayStorage; for several storages, to those of a ReplayStorageEnsemble."
        )

    # What is saved of a module beside its tensors.

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the kind of the transform and its parameters."""
        parameters = {name: getattr(self, name) for name in self.live_parameters.values()}
        return {"kind": type(self).__name__, **parameters}

    def set_extra_state(self, state: Any) -> None:
        """Restores what `get_extra_state` returned.

        Raises:
            KeyError, TypeError, ValueError: it is that of another transform, or damaged.
        """
        kind = type(self).__name__
        saved = SavedState(state, f"the saved {kind}", [*self.get_extra_state()])
        saved.one_of("kind", [kind])
        for name in self.live_parameters.values():
            setattr(self, name, saved[name])


def apply_transforms(parts: Iterable[Transform], rows: RowView) -> None:
    """Applies transforms to drawn rows.

    Args:
        parts: the transforms, as `parts_of` lists them.
        rows: what was drawn.
    """
    for part in parts:
        if isinstance(part, ReplayTransform):
            part.replay(rows)
        else:
            with dispatch_td_nn_modules(True):
                rows.transform(part)


def transform_batch(parts: Iterable[Transform], batch: TensorDictBase) -> TensorDictBase:
    """Applies those transforms to a batch that need no further rows."""
    for part in parts:
        if not isinstance(part, ReplayTransform):
            with dispatch_td_nn_modules(True):
                batch = part(batch)
    return batch


def parts_of(transform: Transform) -> list[Transform]:
    """Returns the transforms that a `Compose` is made of, nested ones included."""
    if not isinstance(transform, Compose):
        return [transform]
    parts: list[Transform] = []
    # To ask a module for its modules takes several times as long.
    for part in transform._modules["transforms"]._modules.values():
        parts += parts_of(part) if isinstance(part, Compose) else [part]
    return parts
