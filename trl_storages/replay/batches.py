"""What batches are sampled from: one storage, or several.

Letters: B batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, overload

from tensordict import TensorDictBase

from trl_storages import arguments

__all__ = ["BatchSource"]

#: A batch, and what samplers said of it.
BatchWithInfo = tuple[TensorDictBase, dict[str, Any]]


class BatchSource:
    """Samples batches, one by one or so many of them."""

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
            batch_size: B; None is the one given to the constructor, the only one that `prefetch` draws
                ahead.
            return_info: whether to return the samplers' entries as a dict as well.

        Returns:
            TensorDict `[B]` of the stored fields, as the transforms show them, with `index` and the
            samplers' other entries; rows of a `sample_unit` follow one another.

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

    # Errors of Python's own name what was called, not this class.
    sample.__qualname__ = "sample"

    def batches(
        self, num_batches: int, batch_size: int | None = None, epochs: int = 1
    ) -> Iterator[TensorDictBase]:
        """Returns an iterator over `num_batches * epochs` batches.

        Args:
            num_batches: batches an epoch.
            batch_size: B; None is the one given to the constructor.
            epochs: how often.

        Raises:
            ValueError: a number is negative.
        """
        num_batches = arguments.integer("num_batches", num_batches)
        epochs = arguments.integer("epochs", epochs)
        batch_size = arguments.optional(arguments.integer, "batch_size", batch_size, at_least=1)
        return (self.sample(batch_size) for _ in range(num_batches * epochs))

    batches.__qualname__ = "batches"
