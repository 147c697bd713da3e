"""Priorities on the CPU: TorchRL's compiled sum tree, and minima that are repaired on demand."""

from __future__ import annotations

import numpy as np
import torch

from trl_storages._torchrl import native_sum_tree
from trl_storages.functional.priorities import draw_weight
from trl_storages.priority_tree.base import ABSENT, PriorityTree

__all__ = ["NativeTree"]

# Leaves that share one bound from below on their least priority: a pass over so many costs no more
# than the call that makes it, and a million leaves have so few bounds that a pass over them does
# not either.
_BLOCK_BITS = 8
_BLOCK = 1 << _BLOCK_BITS

# From so many draws on, sorting them costs less than it saves.
_MANY = 1024

# The halves of a leaf.
_PRIORITY, _GENERATION = slice(0, None, 2), slice(1, None, 2)


class NativeTree(PriorityTree):
    """A priority tree on the CPU over TorchRL's `SumSegmentTreeFp64`.

    A batch of 256 has more calls than work, so everything else is NumPy on the tensors' memory,
    whose calls cost a third of torch's. Priority and generation of a leaf lie side by side: one
    cache miss fetches both.

    Minima need no second tree. Each block of leaves keeps a bound from below: a write can only
    lower it. Asked for the minimum, the block with the lowest bound is looked at; if its bound is
    too low it is raised to what is there, and the next lowest is looked at. A write spoils one
    bound at most and each look but the last repairs one, so the cost is that of the writes.

    Args and attributes: as in `PriorityTree`; `device` must be the CPU.
    """

    def _allocate(self) -> None:
        # Padded to whole blocks, with at least one absent leaf behind the last.
        padded = (self.capacity + _BLOCK) // _BLOCK * _BLOCK
        # A leaf is gathered as one integer and looked at as two numbers.
        self._leaves = np.zeros(padded, dtype=np.int64)
        self._column = self._leaves.view(np.float32)[_PRIORITY]
        self._column[:] = ABSENT
        self._generation = self._leaves.view(np.int32)[_GENERATION]
        self.priorities = torch.from_numpy(self._column)[: self.capacity]
        self.generations = torch.from_numpy(self._generation)[: self.capacity]
        self._sums = native_sum_tree(self.capacity)
        self._bound = np.full(padded >> _BLOCK_BITS, ABSENT, dtype=np.float32)

    def renew(
        self,
        index: torch.Tensor,
        priority: torch.Tensor | float,
        keep: torch.Tensor | None = None,
    ) -> None:
        """Takes in rows that were written; see `PriorityTree.renew`."""
        at, new = index.numpy(), np.float32(priority)
        if keep is not None:
            at = at[keep.numpy()]
        if not at.size:
            return
        self._generation[at] += 1
        self._column[at] = new
        self._sums[at] = draw_weight(np.float64(new), alpha=self.alpha, eps=self.eps)
        block = at >> _BLOCK_BITS
        self._bound[block] = np.minimum(self._bound[block], new)

    def set(
        self,
        index: torch.Tensor,
        priority: torch.Tensor,
        generation: torch.Tensor | None = None,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gives rows new priorities; see `PriorityTree.set`."""
        at, new = index.numpy(), priority.numpy()
        old = self._leaves.take(at)
        there = old.view(np.float32)[_PRIORITY] != ABSENT
        if generation is not None:
            there &= old.view(np.int32)[_GENERATION] == generation.numpy()
        if keep is not None:
            there &= keep.numpy()
        if not there.all():
            at, new = at[there], new[there]
            if not at.size:
                return torch.from_numpy(new)
        # All of these take repeated indices one after another, so the last wins.
        self._column[at] = new
        self._sums[at] = draw_weight(new.astype(np.float64), alpha=self.alpha, eps=self.eps)
        np.minimum.at(self._bound, at >> _BLOCK_BITS, new)
        return torch.from_numpy(new)

    def fill(self, priorities: torch.Tensor) -> None:
        """Replaces the whole column; see `PriorityTree.fill`."""
        self._column[: self.capacity] = priorities.numpy()
        self._bound = self._column.reshape(-1, _BLOCK).min(1)
        # The tree's own way of being unpickled builds it in one pass, not leaf by leaf.
        self._sums = native_sum_tree.__new__(native_sum_tree)
        self._sums.__setstate__((self._weigh(self.priorities).numpy(),))

    def total(
        self, start: torch.Tensor | None = None, stop: torch.Tensor | None = None
    ) -> torch.Tensor | float:
        """Returns sums over ranges; see `PriorityTree.total`."""
        if start is None or stop is None:
            return self._sums.query(0, self.capacity)
        return torch.from_numpy(self._sums.query(_array(start), _array(stop)))

    def least(self, start: torch.Tensor | None = None, stop: torch.Tensor | None = None) -> float:
        """Returns the least priority of ranges; see `PriorityTree.least`."""
        if start is None or stop is None:
            return self._least_of_blocks(0, len(self._bound))
        least = ABSENT
        for first, last in zip(start.tolist(), stop.tolist(), strict=True):
            # The blocks that lie in the range as a whole, and what is left on either side.
            head, tail = -(-first // _BLOCK), last // _BLOCK
            if head >= tail:
                least = min(least, self._column[first:last].min(initial=ABSENT))
                continue
            edges = (self._column[first : head * _BLOCK], self._column[tail * _BLOCK : last])
            least = min(
                least,
                self._least_of_blocks(head, tail),
                *(edge.min(initial=ABSENT) for edge in edges),
            )
        return least

    def _least_of_blocks(self, head: int, tail: int) -> float:
        bound = self._bound[head:tail]
        while True:
            lowest = int(bound.argmin())
            at = (head + lowest) << _BLOCK_BITS
            least = self._column[at : at + _BLOCK].min()
            if least == bound[lowest]:
                return float(least)
            bound[lowest] = least

    def draw(
        self,
        uniform: torch.Tensor,
        start: torch.Tensor | None = None,
        stop: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws leaves; see `PriorityTree.draw`."""
        # In (0, total]: the tree finds the first leaf up to which the sum is not less.
        mass = 1.0 - uniform.numpy()
        if start is None or stop is None:
            leaf = self._scan(mass * self.total())
        else:
            first, last = _array(start), _array(stop)
            sums = self._sums.query(first, last)
            ends = sums.cumsum()
            mass *= ends[-1]
            which = ends.searchsorted(mass)
            mass += (self._sums.query(np.zeros_like(first), first) - (ends - sums))[which]
            # Rounding may step over the edge of a range.
            leaf = self._scan(mass).clip(first[which], last[which] - 1)
        drawn = self._leaves.take(leaf)
        priority = drawn.view(np.float32)[_PRIORITY]
        if priority.max() == ABSENT:
            leaf = self._step_back(leaf)
            drawn = self._leaves.take(leaf)
            priority = drawn.view(np.float32)[_PRIORITY]
        return (
            torch.from_numpy(leaf),
            torch.from_numpy(priority),
            torch.from_numpy(drawn.view(np.int32)[_GENERATION]),
        )

    def _scan(self, mass: np.ndarray) -> np.ndarray:
        if mass.size < _MANY:
            return self._sums.scan_lower_bound(mass)
        # In order, the tree is walked from one side to the other, and not all over memory.
        order = mass.argsort()
        leaf = np.empty_like(order)
        leaf[order] = self._sums.scan_lower_bound(mass[order])
        return leaf

    def _step_back(self, leaf: np.ndarray) -> np.ndarray:
        """Moves draws that rounding put on an absent leaf back to one that is there."""
        while True:
            absent = self._column.take(leaf) == ABSENT
            if not absent.any():
                return leaf
            leaf = leaf - absent


def _array(index: torch.Tensor) -> np.ndarray:
    # The compiled tree reads arrays without their strides, and takes a tensor of one element for a
    # number.
    return np.ascontiguousarray(index.numpy())
