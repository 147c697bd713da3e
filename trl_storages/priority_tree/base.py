"""What every priority tree answers.

Letters: B batch, N leaves, R ranges of leaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from trl_storages.functional.priorities import draw_weight

__all__ = ["ABSENT", "PriorityTree"]

#: The priority of a leaf that holds nothing. It is never drawn, and never the least.
ABSENT = float("inf")


class PriorityTree(ABC):
    """A column of priorities, and the sums and minima over it.

    A leaf is absent until it is renewed for the row that is written to it. Each renewal gives it
    another generation, so that a priority that comes late, for a row that is gone, can be told.

    Leaf i is drawn with probability `(p_i + eps)^alpha / sum_j (p_j + eps)^alpha`. The column holds
    the raw priorities; what is derived from it is recomputed from below, never added to, so that
    nothing drifts and equal columns give equal draws whatever their history.

    Args:
        capacity: N.
        alpha: exponent of the draws, at least 0.
        eps: added to priorities, above 0.
        device: where the tree lives.

    Attributes:
        priorities: `[N]` float32, `ABSENT` where a leaf holds nothing. To be read only.
        generations: `[N]` int32, how often each leaf was renewed. To be read only.
    """

    priorities: torch.Tensor
    generations: torch.Tensor

    def __init__(
        self, capacity: int, *, alpha: float, eps: float, device: torch.device | str = "cpu"
    ) -> None:
        self.capacity = capacity
        self.alpha = alpha
        self.eps = eps
        self.device = torch.device(device)
        self._allocate()

    @abstractmethod
    def _allocate(self) -> None:
        """Makes the column and what is derived from it, with all leaves absent."""

    @abstractmethod
    def renew(
        self,
        index: torch.Tensor,
        priority: torch.Tensor | float,
        keep: torch.Tensor | None = None,
    ) -> None:
        """Takes in rows that were written.

        Args:
            index: `[B]` int64 in `[0, N)`, contiguous; unchecked.
            priority: of all of them, finite, at least 0; a tensor is `[]`.
            keep: `[B]` bool, False where `index` names no row; None says that all do.
        """

    @abstractmethod
    def set(
        self,
        index: torch.Tensor,
        priority: torch.Tensor,
        generation: torch.Tensor | None = None,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gives rows new priorities. Of an index that occurs twice, the last wins.

        Absent leaves are left alone.

        Args:
            index: `[B]` int64 in `[0, N)`, contiguous; unchecked.
            priority: `[B]` float32, contiguous; finite, at least 0; unchecked.
            generation: `[B]` int32, as drawn: leaves that were renewed since are left alone.
            keep: `[B]` bool, False where nothing is to be written; None writes all.

        Returns:
            the priorities that were written, float32 `[n]`, with 0 for any that was left out.
        """

    @abstractmethod
    def fill(self, priorities: torch.Tensor) -> None:
        """Replaces the whole column, and leaves the generations as they are.

        Args:
            priorities: `[N]` float32, `ABSENT` where a leaf holds nothing.
        """

    @abstractmethod
    def total(self, start: torch.Tensor | None = None, stop: torch.Tensor | None = None) -> Any:
        """Returns the sum of `(p + eps)^alpha` over ranges of leaves.

        Args:
            start: `[R]` int64 in `[0, N]`.
            stop: `[R]` int64 in `[start, N]`; None sums over all leaves.

        Returns:
            float64: `[R]`, or a single number without ranges.
        """

    @abstractmethod
    def least(self, start: torch.Tensor | None = None, stop: torch.Tensor | None = None) -> Any:
        """Returns the least priority in the union of some ranges of leaves.

        Args:
            start: `[R]` int64 in `[0, N]`.
            stop: `[R]` int64 in `[start, N]`; None looks at all leaves.

        Returns:
            a single number; `ABSENT` where all of them are absent.
        """

    @abstractmethod
    def draw(
        self,
        uniform: torch.Tensor,
        start: torch.Tensor | None = None,
        stop: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws leaves, with replacement.

        Args:
            uniform: `[B]` float64 random numbers in [0, 1).
            start: `[R]` int64: draw within disjoint ranges only.
            stop: `[R]` int64 in `[start, N]`.

        Returns:
            `[B]` int64 leaves, never absent ones; `[B]` float32 priorities; `[B]` int32 generations.
            Unchecked: some leaf must be there to draw.
        """

    def get(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the priorities of some leaves, float32 of the shape of `index`."""
        return self.priorities[index]

    def clear(self) -> None:
        """Makes all leaves absent, and gives them another generation."""
        self.fill(torch.full_like(self.priorities, ABSENT))
        self.generations += 1

    def rescale(self, *, alpha: float, eps: float) -> None:
        """Changes the exponent, exactly: everything is derived anew from the raw priorities."""
        self.alpha = alpha
        self.eps = eps
        self.fill(self.priorities)

    def _weigh(self, priorities: torch.Tensor) -> torch.Tensor:
        """Returns `(p + eps)^alpha` in float64, 0 where a leaf is absent."""
        weight = draw_weight(priorities.double(), alpha=self.alpha, eps=self.eps)
        return torch.where(priorities == ABSENT, 0.0, weight)

    def validate(self) -> None:
        """Checks that sums and minima are those of the column, walking all leaves.

        Raises:
            RuntimeError: they are not; the message says which.
        """
        weight = self._weigh(self.priorities)
        bounds = torch.arange(0, self.capacity + 64, 64, device=self.device).clamp(
            max=self.capacity
        )
        start, stop = bounds[:-1], bounds[1:]
        expected = torch.stack([weight[a:b].sum() for a, b in zip(start, stop, strict=True)])
        for name, got, want in (
            ("sum", self.total(), weight.sum()),
            ("sums of 64 leaves", self.total(start, stop), expected),
            ("minimum", self.least(), self.priorities.min()),
        ):
            got = torch.as_tensor(got, dtype=torch.float64, device=self.device)
            if not torch.allclose(got, want.double(), rtol=1e-9, atol=0.0):
                raise RuntimeError(
                    f"the {name} over the priorities is {got.tolist()}, must be {want.tolist()}."
                )

    # Sums and minima can be derived from the column, so only that is copied and pickled.

    def __getstate__(self) -> dict[str, Any]:
        return {
            "capacity": self.capacity,
            "alpha": self.alpha,
            "eps": self.eps,
            "device": self.device,
            "priorities": self.priorities.clone(),
            "generations": self.generations.clone(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        priorities, generations = state.pop("priorities"), state.pop("generations")
        self.__dict__.update(state)
        self._allocate()
        self.fill(priorities)
        self.generations.copy_(generations)

    def __len__(self) -> int:
        return self.capacity

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.capacity}, alpha={self.alpha}, eps={self.eps}, "
            f"device={self.device})"
        )
