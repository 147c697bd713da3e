"""The sampling interface that one storage and an ensemble share.

Letters: B batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, overload

from tensordict import TensorDictBase

from trl_storages import arguments

__all__ = ["BatchSource"]

#: A batch and the samplers' info.
BatchWithInfo = tuple[TensorDictBase, dict[str, Any]]


class BatchSource:
    """Samples single batches, or iterates over a given number of them."""

    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[False] = False
    ) -> TensorDictBase: ...
    @overload
    def sample(self, batch_size: int | None, return_info: Literal[True]) -> BatchWithInfo: ...
    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True]
    ) -> BatchWithInfo: ...
    @overload
    def sample(
        self, batch_size: int | None = None, return_info: bool = False
    ) -> TensorDictBase | BatchWithInfo: ...
    def sample(
        self, batch_size: int | None = None, return_info: bool = False
    ) -> TensorDictBase | BatchWithInfo:
        """Samples a batch.

        Args:
            batch_size: B; None uses the constructor's, the only size that `prefetch` draws ahead.
            return_info: whether to also return the samplers' entries as a dict.

        Returns:
            TensorDict `[B]` of the stored fields, after the transforms, with `index` and the samplers'
            other entries; the rows of a `sample_unit` are consecutive.

        Raises:
            ValueError: `batch_size` is below 1.
            RuntimeError: a storage is empty, no batch size is known, or a `HERSampler` draws goals that
                no transform writes.
        """
        if batch_size is not None:
            batch_size = arguments.integer("batch_size", batch_size, at_least=1)
        return self._sample_checked(batch_size, arguments.flag("return_info", return_info))

    def _sample_checked(self, batch_size: int | None, return_info: bool) -> Any:
        raise NotImplementedError

    def batches(
        self, num_batches: int, batch_size: int | None = None, epochs: int = 1
    ) -> Iterator[TensorDictBase]:
        """Returns an iterator over `num_batches * epochs` batches.

        Args:
            num_batches: batches per epoch.
            batch_size: B; None uses the constructor's.
            epochs: number of epochs.

        Raises:
            ValueError: a number is negative.
        """
        num_batches = arguments.integer("num_batches", num_batches)
        epochs = arguments.integer("epochs", epochs)
        batch_size = arguments.optional(arguments.integer, "batch_size", batch_size, at_least=1)
        return (self.sample(batch_size) for _ in range(num_batches * epochs))
