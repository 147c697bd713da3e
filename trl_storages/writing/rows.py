"""Rows of TensorDicts on their way into a storage: checked, and copied into one block.

Letters: E lanes, L of them that are written, T steps of each, N rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, is_tensor_collection

from trl_storages import keys
from trl_storages._torchrl import copy_all
from trl_storages.arguments import counted
from trl_storages.streams.layout import Block, Layout

__all__ = ["Rows", "entries_in", "num_steps_of"]

Entries = Mapping[NestedKey, torch.Tensor]


def num_steps_of(batch: Sequence[int], num_lanes: int) -> int:
    """Returns T of a batch `[L, T]`, `[T]` for one lane, or `[L]` for one step of several lanes.

    Raises:
        ValueError: the batch has another shape.
    """
    if 0 in batch:
        raise ValueError(f"there must be steps to write, got a batch {[*batch]}.")
    if len(batch) == 1 and num_lanes == 1:
        return batch[0]
    if len(batch) in (1, 2) and batch[0] == num_lanes:
        return batch[1] if len(batch) == 2 else 1
    raise ValueError(
        f"a batch for {counted(num_lanes, 'lane')} must be [{num_lanes}, T] (time last) or [{num_lanes}] "
        f"(one step of each), got {[*batch]}: make the storage with the num_envs of the data, name "
        "lanes=[...], or pass rows [N] with the numbers of their trajectories (traj_key)."
    )


def entries_in(data: Any, path: tuple[str, ...] = ()) -> dict[NestedKey, torch.Tensor]:
    """Returns the tensors of a TensorDict by key. Its own iterators take ten times as long."""
    found: dict[NestedKey, torch.Tensor] = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            found[(*path, name) if path else name] = value
        elif is_tensor_collection(value):
            found |= entries_in(value, (*path, name))
    return found


class Rows:
    """Takes the rows of TensorDicts of one batch size, each field through a view that is made once.

    Args:
        layout: of the rows.
        batch: their batch size, of N rows in all.
        device: where they are staged, as tensors; None is as arrays on the host.
        done_key: of the flag that ends episodes, one bool a row, which need not be a field.
        found: entries of such a TensorDict.

    Raises:
        KeyError: there are no such flags.
        ValueError: they are not one bool a row.

    Attributes:
        words: `[N, row_words]` int64 the rows.
        done: `[N]` bool which of them end their episodes, a view.
    """

    def __init__(
        self,
        layout: Layout,
        batch: torch.Size,
        device: torch.device | None,
        done_key: NestedKey,
        found: Entries,
    ) -> None:
        self.layout, self.batch, self.device = layout, batch, device
        size = batch.numel(), layout.row_words
        if device is None:  # NumPy's zeros lie in huge pages
            words = torch.from_numpy(np.zeros(size, np.int64))
        else:
            words = torch.zeros(size, dtype=torch.int64, device=device)
        rows = words.view(*batch, layout.row_words)
        targets, kinds = layout.views(rows), {it.key: (it.dtype, it.shape) for it in layout.fields}
        flag = found.get(done_key)
        if flag is None:
            raise KeyError(f"the data lacks {done_key!r}, which ends episodes; it has {[*found]}.")
        if flag.dtype is not torch.bool or flag.numel() != size[0]:
            raise ValueError(
                f"{done_key!r} must be one bool a row, got {flag.dtype} {[*flag.shape]}. Where each "
                f"agent has its own make one for all: data.set({keys.DONE!r}, data[...].any(-2))."
            )
        if done_key not in targets:
            targets[done_key] = torch.zeros(flag.shape, dtype=torch.bool, device=device)
            kinds[done_key] = flag.dtype, flag.shape[len(batch) :]
        self.words: Any = words.numpy() if device is None else words
        flags = targets[done_key].view(size[0])
        self.done: Any = flags.numpy() if device is None else flags
        # Flags on another device are not waited for.
        beside = keys.done_beside(kinds) if words.is_cpu else {}

        def flat(key: NestedKey) -> np.ndarray:
            return targets[key].view(size[0], -1).squeeze(-1).numpy()

        self._implied = [
            (key, done, flat(key), flat(done))
            for key, done in beside.items()
            if kinds[key] == kinds[done] and kinds[key][0] is torch.bool
        ]
        # Stacks, with their places among the fields; they are copied as frames.
        self._stacks = [
            (place, layout.field(key), stack)
            for place, key in enumerate(targets)
            if key in layout and (stack := layout.field(key).stack)
        ]
        for _, field, _ in self._stacks:
            targets[field.key] = layout.frames_of(field, rows)
        self._keys, self._targets = [*targets], [*targets.values()]
        self._kinds = [(kinds[key][0], batch + kinds[key][1]) for key in targets]
        # To make it takes longer than to enter it.
        self._no_grad = torch.no_grad()

    def fill(self, found: Entries) -> None:
        """Copies the entries of a TensorDict that have fields.

        Raises:
            KeyError: an entry is missing.
            TypeError, ValueError: it has another dtype or shape; or some rows are padding; or rows on the
                host are not done where they are terminated or truncated.
        """
        try:
            values = [found[key] for key in self._keys]
        except KeyError as error:
            (key,) = error.args
            raise KeyError(f"the data lacks {key!r}, which every row holds.") from None
        if [(value.dtype, value.shape) for value in values] != self._kinds:
            self._refuse(found)
        if (mask := found.get(keys.MASK)) is not None and not mask.all():
            raise ValueError(
                f"all rows must be transitions, but {keys.MASK} says that some are padding: pass "
                f"traj_format='cat' to the collector, or write data[data[{keys.MASK!r}]]."
            )
        for place, field, stack in self._stacks:
            values[place] = stack.frames(values[place], field.shape)
        with self._no_grad:
            copy_all(self._targets, values)
        for key, done_key, flag, done in self._implied:
            if np.count_nonzero(flag > done):
                raise ValueError(
                    f"{done_key!r} must be true wherever {key!r} is, as it ends the episode, got a row "
                    "where it is not: set it to terminated | truncated. A trainer that flattens makes "
                    "such rows: pass it flatten_tensordicts=False."
                )

    def _refuse(self, found: Entries) -> None:
        for key, (dtype, shape) in zip(self._keys, self._kinds, strict=True):
            value, begin = found[key], len(self.batch)
            must = f"{key!r} must be {dtype} {[*shape[begin:]]}, got"
            if value.dtype is not dtype:
                raise TypeError(f"{must} {value.dtype}.")
            if value.shape != shape:
                raise ValueError(f"{must} {[*value.shape[begin:]]}.")

    def block(
        self, which: np.ndarray, offsets: np.ndarray, order: np.ndarray | None, cut: Any
    ) -> Block:
        """Returns the rows as a block, valid until others are filled in.

        Args:
            which: `[L]` the lanes, in order.
            offsets: `[L + 1]` where the rows of each begin.
            order: `[N]` the row at each place of the block; None if they are in order.
            cut: `[N]` bool, which of them begin an episode whatever came before, in the block's order.
        """
        words, done = self.words, self.done
        if order is not None:
            words, done = words[order], done[order]
        if self.device is not None:
            return Block(which, offsets, words, done, torch.from_numpy(cut).to(self.device))
        return Block(which, offsets, words, np.ascontiguousarray(done), cut)
