"""The base class of transforms that read further rows of the storage, and how transforms are applied."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torchrl.envs.transforms import Compose, Transform

from trl_storages.settings import Strict
from trl_storages.storage import BatchRows

__all__ = ["ReplayTransform", "transforms_in"]


class ReplayTransform(Strict, Transform):  # type: ignore[misc]
    """A transform that can read the rows of its `ReplayStorage`.

    It runs in order with the other transforms of the replay buffer, under the replay lock. To write one
    that reads further rows, subclass this and implement `replay`; and `prepare` only if it reads rows
    ahead, or must know of a window.

    >>> class Halved(ReplayTransform):
    ...     def replay(self, rows):
    ...         rows.steps["next", "reward"] = rows.steps["next", "reward"] / 2
    >>> Halved()
    Halved(keys=[])
    """

    #: Whether it writes the goals that a `HERSampler` draws, and those of which key; None writes any. A
    #: `ReplayStorage` refuses to draw goals that no transform writes.
    uses_goals = False
    goal_key: Any = None

    def prepare(self, rows: BatchRows) -> None:
        """Says what further rows it needs, as by `rows.widen`, before any transform replays."""

    def replay(self, rows: BatchRows) -> None:
        """Changes the drawn rows.

        Args:
            rows: `[B]` the rows, as the transforms before have left them, with the sampler's entries.
                What changes rewards or flags changes those of `rows.steps`, which an `NStep` behind it
                folds: so it fits before that as well as behind it.
        """
        raise NotImplementedError

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Raises a RuntimeError: only a `ReplayStorage` hands it the rows."""
        raise RuntimeError(
            f"{type(self).__name__} reads rows beside the sampled ones and what the sampler drew, which "
            "only a ReplayStorage hands to its transforms: pass it as transform= to one."
        )


def transforms_in(transform: Transform) -> list[Transform]:
    """Returns the transforms of a `Compose`, flattened; any other transform as a list of one."""
    if not isinstance(transform, Compose):
        return [transform]
    parts: list[Transform] = []
    # The public accessors of a module take several times as long.
    for part in transform._modules["transforms"]._modules.values():
        parts += transforms_in(part) if isinstance(part, Compose) else [part]
    return parts
