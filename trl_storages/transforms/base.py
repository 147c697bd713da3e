"""The base class of transforms that read further rows of the storage, and how transforms are applied."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from tensordict import TensorDictBase
from torchrl.envs.transforms import Compose, Transform

from trl_storages._torchrl import dispatch_td_nn_modules
from trl_storages.rows import RowView
from trl_storages.saved.parts import SavedState
from trl_storages.stock_parts import refuse_stock

__all__ = ["ReplayTransform", "check_transforms", "parts_of", "transform_batch"]


class ReplayTransform(Transform):  # type: ignore[misc]
    """A transform that can read the rows of its `ReplayStorage`.

    It runs in order with the other transforms of the replay buffer, under the replay lock. To write a
    transform that reads further rows, subclass this and implement `replay`.

    >>> class Halved(ReplayTransform):
    ...     def replay(self, rows):
    ...         rows["next", "reward"] = rows["next", "reward"] / 2
    >>> Halved()
    Halved(keys=[])
    """

    #: Whether this transform uses the goal rows that a `HERSampler` draws. A `ReplayStorage` refuses to
    #: draw them if no transform does.
    uses_goals = False
    #: Attributes that may change between samples; they are saved.
    live_parameters: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def replay(self, rows: RowView) -> None:
        """Transforms the sampled rows in place.

        Setting an entry (`rows[key] = value`) affects the sampled rows only; defining it
        (`rows.define(keys, rule)`) also affects further rows that later transforms read.

        Args:
            rows: `[B]` the sampled rows, after the preceding transforms, with the sampler's entries
                (`index`, `goal_index`, ...).
        """

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Raises: without a storage the transform can't run.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{type(self).__name__} reads rows beside the sampled ones and what the sampler drew, which "
            "only a ReplayStorage hands to its transforms; it was called without them. Pass it as "
            "transform= to a ReplayStorage; for several storages, to those of a ReplayStorageEnsemble."
        )

    # Module state besides tensors.

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the kind of the transform and its parameters."""
        parameters = {name: getattr(self, name) for name in self.live_parameters}
        return {"kind": type(self).__name__, **parameters}

    def set_extra_state(self, state: Any) -> None:
        """Restores what `get_extra_state` returned.

        Raises:
            KeyError, TypeError, ValueError: the state is damaged, or from another transform.
        """
        kind = type(self).__name__
        saved = SavedState(state, f"the saved {kind}", [*self.get_extra_state()])
        saved.one_of("kind", [kind])
        for name in self.live_parameters:
            setattr(self, name, saved[name])


def transform_batch(parts: Iterable[Transform], batch: TensorDictBase) -> TensorDictBase:
    """Applies all transforms except `ReplayTransform`s to a batch."""
    for part in parts:
        if not isinstance(part, ReplayTransform):
            with dispatch_td_nn_modules(True):
                batch = part(batch)
    return batch


def parts_of(transform: Transform) -> list[Transform]:
    """Returns the transforms of a `Compose`, flattened; any other transform as a list of one."""
    if not isinstance(transform, Compose):
        return [transform]
    parts: list[Transform] = []
    # The public accessors of a module take several times as long.
    for part in transform._modules["transforms"]._modules.values():
        parts += parts_of(part) if isinstance(part, Compose) else [part]
    return parts


def check_transforms(transform: Any) -> None:
    """Raises a TypeError if a transform, or a part of it, is one of TorchRL's that would be wrong."""
    for part in parts_of(transform):
        refuse_stock(part)
