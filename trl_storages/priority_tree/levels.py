"""Priorities on any device: sums and minima level by level, in plain PyTorch.

Letters: B batch, R ranges of leaves, F fan-out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trl_storages.priority_tree.base import ABSENT, PriorityTree

__all__ = ["LevelTree"]

# F children a node: few levels, as each costs the same few calls, and rows that a GPU reads in one
# go.
_FAN_OUT = 32
# A level of at most so many nodes is searched as a whole.
_TOP = 1024


class LevelTree(PriorityTree):
    """A priority tree of one tensor per level, without native code and without asking the host.

    The leaves are level 0; a node of level k + 1 holds the sum (and another tensor the minimum) of
    F nodes of level k. A write recomputes the nodes above it from their children. A draw searches
    the cumulative sum of the top level, then of one row of F children per level.

    Args and attributes: as in `PriorityTree`.
    """

    def _allocate(self) -> None:
        # At least one leaf lies behind the last: what must not be written is written there, which
        # spares a shape that depends on data. It stays absent.
        self._spare = self.capacity
        sizes = [_round_up(self.capacity + 1)]
        while sizes[-1] > _TOP:
            sizes.append(_round_up(sizes[-1] // _FAN_OUT))
        self._sums = [torch.zeros(n, dtype=torch.float64, device=self.device) for n in sizes]
        self._least = [torch.full((n,), ABSENT, device=self.device) for n in sizes]
        self._column_of_row = torch.arange(_FAN_OUT, device=self.device)
        self._generations = torch.zeros(sizes[0], dtype=torch.int32, device=self.device)
        self.priorities = self._least[0][: self.capacity]
        self.generations = self._generations[: self.capacity]

    def renew(
        self,
        index: torch.Tensor,
        priority: torch.Tensor | float,
        keep: torch.Tensor | None = None,
    ) -> None:
        """Takes in rows that were written; see `PriorityTree.renew`."""
        if keep is not None:
            index = torch.where(keep, index, self._spare)
        self._generations[index] = self._generations.index_select(0, index) + 1
        priority = torch.as_tensor(priority, dtype=torch.float32, device=self.device)
        self._write(index, torch.where(index == self._spare, ABSENT, priority))

    def set(
        self,
        index: torch.Tensor,
        priority: torch.Tensor,
        generation: torch.Tensor | None = None,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gives rows new priorities; see `PriorityTree.set`."""
        there = self._least[0].index_select(0, index) != ABSENT
        if generation is not None:
            there &= self._generations.index_select(0, index) == generation
        if keep is not None:
            there &= keep
        written = torch.where(there, priority, 0.0)
        index = torch.where(there, index, self._spare)
        # Scattering repeated indices has no defined order on a GPU: only the last goes through.
        index, order = torch.sort(index, stable=True)
        goes_on = torch.zeros_like(index, dtype=torch.bool)
        torch.eq(index[1:], index[:-1], out=goes_on[:-1])
        index = torch.where(goes_on, self._spare, index)
        self._write(index, torch.where(index == self._spare, ABSENT, priority[order]))
        return written

    def _write(self, index: torch.Tensor, priority: torch.Tensor) -> None:
        self._least[0][index] = priority
        self._sums[0][index] = self._weigh(priority)
        self._derive(index)

    def _derive(self, index: torch.Tensor) -> None:
        """Recomputes all nodes above some leaves."""
        for level in range(1, len(self._sums)):
            index = index // _FAN_OUT
            self._sums[level][index] = _rows(self._sums[level - 1], index).sum(1)
            self._least[level][index] = _rows(self._least[level - 1], index).amin(1)

    def fill(self, priorities: torch.Tensor) -> None:
        """Replaces the whole column; see `PriorityTree.fill`."""
        self.priorities.copy_(priorities)
        self._sums[0][: self.capacity] = self._weigh(self.priorities)
        for level in range(1, len(self._sums)):
            nodes = self._sums[level - 1].numel() // _FAN_OUT
            self._sums[level][:nodes] = self._sums[level - 1].view(-1, _FAN_OUT).sum(1)
            self._least[level][:nodes] = self._least[level - 1].view(-1, _FAN_OUT).amin(1)

    def total(
        self, start: torch.Tensor | None = None, stop: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns sums over ranges; see `PriorityTree.total`."""
        if start is None or stop is None:
            return self._sums[-1].sum()
        result = torch.zeros_like(start, dtype=torch.float64)
        for sums, row, inside in self._edges(self._sums, start, stop):
            result += torch.where(inside, _rows(sums, row), 0.0).sum(1)
        start, stop = self._whole_nodes(start, stop)
        return result + torch.where(self._on_top(start, stop), self._sums[-1], 0.0).sum(1)

    def least(
        self, start: torch.Tensor | None = None, stop: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the least priority of ranges; see `PriorityTree.least`."""
        if start is None or stop is None:
            return self._least[-1].amin()
        result = torch.full((), ABSENT, device=self.device)
        for least, row, inside in self._edges(self._least, start, stop):
            edge = torch.where(inside, _rows(least, row), ABSENT).amin()
            result = torch.minimum(result, edge)
        start, stop = self._whole_nodes(start, stop)
        inside = self._on_top(start, stop).any(0)
        return torch.minimum(result, torch.where(inside, self._least[-1], ABSENT).amin())

    def _edges(
        self, levels: list[torch.Tensor], start: torch.Tensor, stop: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Splits ranges into whole nodes of the top level and, below it, parts of two rows a level.

        Yields:
            a level, `[R]` the row, `[R, F]` which children of the row are a part of the range.
        """
        for level in levels[:-1]:
            # Whole rows [head, tail) are nodes of the level above; there may be none (tail < head).
            head, tail = (start + _FAN_OUT - 1) // _FAN_OUT, stop // _FAN_OUT
            left_end = torch.minimum(head * _FAN_OUT, stop)
            right_start = torch.maximum(head, tail) * _FAN_OUT
            for row, first, last in (
                (start // _FAN_OUT, start, left_end),
                (tail, right_start, stop),
            ):
                child = row.unsqueeze(1) * _FAN_OUT + self._column_of_row
                yield level, row, (child >= first.unsqueeze(1)) & (child < last.unsqueeze(1))
            start, stop = head, tail

    def _whole_nodes(
        self, start: torch.Tensor, stop: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the nodes of the top level that lie in the ranges as a whole, as ranges."""
        for _ in self._sums[:-1]:
            start, stop = (start + _FAN_OUT - 1) // _FAN_OUT, stop // _FAN_OUT
        return start, stop

    def _on_top(self, start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
        """Returns which nodes of the top level lie in each range, bool `[R, top]`."""
        node = torch.arange(self._sums[-1].numel(), device=self.device)
        return (node >= start.unsqueeze(1)) & (node < stop.unsqueeze(1))

    def _sum_before(self, leaf: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all leaves before each `[R]` leaf."""
        return self.total(torch.zeros_like(leaf), leaf)

    def draw(
        self,
        uniform: torch.Tensor,
        start: torch.Tensor | None = None,
        stop: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws leaves; see `PriorityTree.draw`."""
        mass = 1.0 - uniform  # in (0, 1]
        if start is None or stop is None:
            leaf = self._find(mass * self.total())
        else:
            sums = self.total(start, stop)
            ends = sums.cumsum(0)
            mass = mass * ends[-1]
            which = torch.searchsorted(ends, mass)
            leaf = self._find(mass + (self._sum_before(start) - (ends - sums))[which])
            # Rounding may step over the edge of a range.
            leaf = torch.minimum(torch.maximum(leaf, start[which]), stop[which] - 1)
        priority = self._least[0].index_select(0, leaf)
        return leaf, priority, self._generations.index_select(0, leaf)

    def _find(self, mass: torch.Tensor) -> torch.Tensor:
        """Returns the first leaf up to which the sum is not less than each `[B]` mass above 0."""
        top = self._sums[-1]
        ends = top.cumsum(0)
        # Rounding must not lead into a node without weight. The first node whose cumulative sum is
        # not less than a positive mass has some, if there is such a node: so the mass is kept
        # positive and at most the sum of the row.
        mass = torch.minimum(mass, ends[-1])
        node = torch.searchsorted(ends, mass)
        mass = mass - (ends - top)[node]
        for sums in reversed(self._sums[:-1]):
            row = _rows(sums, node)
            ends = row.cumsum(1)
            column_mass = torch.minimum(mass.clamp(min=_TINY).unsqueeze(1), ends[:, -1:])
            child = torch.searchsorted(ends, column_mass)
            mass = (column_mass - (ends - row).gather(1, child)).squeeze(1)
            node = torch.add(child.squeeze(1), node, alpha=_FAN_OUT)
        return node


_TINY = torch.finfo(torch.float64).tiny


def _round_up(n: int) -> int:
    return -(-n // _FAN_OUT) * _FAN_OUT


def _rows(level: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Gathers `[B, F]` children."""
    return level.view(-1, _FAN_OUT).index_select(0, row)
