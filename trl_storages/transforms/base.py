"""The base class of transforms that read further rows of the storage, and how transforms are applied."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey, TensorDictBase
from torchrl.envs.transforms import Compose, Transform

from trl_storages.attributes import Strict
from trl_storages.packed import RowView
from trl_storages.states import Adopt, State, entries_of, nothing

__all__ = ["ReplayTransform", "parts_of"]


class ReplayTransform(Strict, Transform):  # type: ignore[misc]
    """A transform that reads rows of its storage beside those of the batch."""

    #: Whether it writes the goals that a `HERSampler` draws, and those of which key; None writes any.
    uses_goals = False
    goal_key: NestedKey | None = None

    def prepare(self, rows: RowView) -> None:
        """Says what further rows it needs, before any transform replays."""

    def replay(self, rows: RowView) -> None:
        """Changes the drawn rows; what changes rewards or flags changes those of `rows.steps`."""
        raise NotImplementedError

    def state(self) -> State:
        """Returns what the next batches depend on, but for parameters."""
        return {}

    def parsed(self, state: Any) -> Adopt:
        """Returns a function that adopts a state.

        Raises:
            ValueError: the state is not that of such a transform.
        """
        entries_of(type(self).__name__, state, ())
        return nothing

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Raises a RuntimeError: only a `ReplayStorage` hands it the rows."""
        raise RuntimeError(f"{type(self).__name__} works in a ReplayStorage only.")


def parts_of(transform: Transform) -> list[Transform]:
    """Returns the transforms of a `Compose`, flattened; any other transform as a list of one."""
    if not isinstance(transform, Compose):
        return [transform]
    parts: list[Transform] = []
    # The public accessors of a module take several times as long.
    for part in transform._modules["transforms"]._modules.values():
        parts += parts_of(part) if isinstance(part, Compose) else [part]
    return parts
