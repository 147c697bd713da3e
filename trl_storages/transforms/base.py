"""Transforms that look at other rows of the storage than the sampled ones."""

from __future__ import annotations

from abc import abstractmethod

from tensordict import TensorDictBase
from torchrl.data import Storage
from torchrl.envs.transforms import Transform

__all__ = ["ReplayTransform"]


class ReplayTransform(Transform):
    """A transform that a `ReplayStorage` hands its storage to.

    It runs where any other transform of the replay buffer would, in the same order, under the replay
    lock, and finds the sampler's entries (`index`, `goal_index`, ...) in the batch. A transform of
    one's own that reads further rows subclasses this and implements `replay`.
    """

    @abstractmethod
    def replay(self, batch: TensorDictBase, storage: Storage) -> TensorDictBase:
        """Changes a sampled batch.

        Args:
            batch: `[B]` transitions in memory of their own, with the sampler's entries.
            storage: where they came from; it must not be changed.

        Returns:
            the batch to train on.
        """

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Refuses to run where there is no storage to read.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{type(self).__name__} reads rows beside the sampled ones, so it works as the transform of "
            "a ReplayStorage only; this one was called without a storage."
        )
