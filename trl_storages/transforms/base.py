"""The base class of transforms that read further transitions of a `ReplayStorage`."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase
from torchrl.envs.transforms import Compose, Transform

from trl_storages.settings import Strict
from trl_storages.storage import BatchRows

__all__ = ["ReplayTransform", "transforms_in"]


class ReplayTransform(Strict, Transform):  # type: ignore[misc]
    """A transform that can read further transitions of its `ReplayStorage`.

    The transforms of a replay buffer run in order, under the replay lock. To write a transform that reads
    further transitions, subclass `ReplayTransform` and implement `replay`; implement `prepare` only if
    the transform needs an n-step window.

    >>> class Halved(ReplayTransform):
    ...     def replay(self, rows):
    ...         rows.steps["next", "reward"] = rows.steps["next", "reward"] / 2
    >>> Halved()
    Halved(keys=[])
    """

    #: Whether the transform writes the goals that a `HERSampler` draws. A `ReplayStorage` raises if no
    #: transform writes them.
    uses_goals = False
    #: The goal that the transform writes; None writes every goal.
    goal_key: NestedKey | None = None

    def prepare(self, rows: BatchRows) -> None:
        """Requests further transitions, for instance by `rows.widen`, before any `replay`."""

    def replay(self, rows: BatchRows) -> None:
        """Changes the sampled transitions.

        Args:
            rows: `[B]` the transitions, as changed by earlier transforms, with the sampler's fields. To
                change rewards or flags, change those of `rows.steps`, from which a later `NStep`
                computes n-step returns. Then the transform works before and after `NStep`.
        """
        raise NotImplementedError

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Raises a RuntimeError, because only a `ReplayStorage` can apply the transform."""
        raise RuntimeError(
            f"{type(self).__name__} reads further transitions and the fields of the sampler, which only "
            "a ReplayStorage passes to its transforms: use ReplayStorage(transform="
            f"{type(self).__name__}(...))."
        )


def transforms_in(transform: Transform) -> list[Transform]:
    """Returns the transforms of a `Compose`, flattened; any other transform as a list of one."""
    if not isinstance(transform, Compose):
        return [transform]
    transforms: list[Transform] = []
    # `_modules`, because the public accessors of a module take several times as long.
    for child in transform._modules["transforms"]._modules.values():
        transforms += transforms_in(child) if isinstance(child, Compose) else [child]
    return transforms
