"""Transitions on their way into a storage: one block of packed words, with a view of each field.

A staging is created once for a batch size, and filled again for each write.

Letters: E environments, L lanes that are written, N transitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, is_tensor_collection

from trl_storages import keys
from trl_storages.entries.layout import Block, Layout
from trl_storages.torchrl_compat import InferenceMode, copy_all
from trl_storages.writing.lanes import Routing

__all__ = ["StagedBlock", "Staging", "tensors_in"]


class Staging:
    """A block of packed transitions, and views of its fields.

    Args:
        layout: of the transitions.
        batch_size: batch size of N transitions in all.
        device: device of the block, whose words are tensors there; None is the host, with arrays.

    Attributes:
        words: `[N, row_words]` int64 packed transitions.
        done: `[N]` bool, whether each transition ends its episode.
        views: key -> `[*batch_size, *shape]`; for a stack of frames, the view of its frames.
    """

    @torch.inference_mode(False)  # the block may be filled later outside of inference mode
    def __init__(
        self, layout: Layout, batch_size: Sequence[int], device: torch.device | None = None
    ) -> None:
        self.layout, self.batch_size, self.device = layout, torch.Size(batch_size), device
        size = self.batch_size.numel(), layout.row_words
        if device is None:  # NumPy's zeros are in huge pages
            self.words: Any = np.zeros(size, np.int64)
            self.done: Any = np.zeros(size[0], bool)
            words = torch.from_numpy(self.words)
        else:
            words = self.words = torch.zeros(size, dtype=torch.int64, device=device)
            self.done = torch.zeros(size[0], dtype=torch.bool, device=device)
        packed = words.view(*batch_size, layout.row_words)
        self.views = layout.views(packed)
        for field in layout.fields:
            if field.stack:
                self.views[field.key] = layout.frames_of(field, packed)

    def block(self, routing: Routing) -> Block:
        """Returns the transitions as a block, valid until the staging is filled again."""
        lanes, offsets, order = routing
        words, done = self.words, self.done
        if order is not None:
            words, done = words[order], done[order]
        cut: Any = np.zeros(len(done), bool)
        if self.device is not None:
            cut = torch.from_numpy(cut).to(self.device)
        return Block(lanes, offsets, words, done, cut)

    def aliased_keys(self, source: Any) -> list[NestedKey]:
        """Returns the keys of observations that share memory with their next observations.

        Args:
            source: the values with which the staging was filled.
        """
        return [key for key, *pair in self._observations_in(source) if _share_memory(*pair)]

    def _observations_in(self, source: Any) -> Iterable[tuple[NestedKey, Any, Any]]:
        """Returns key, value and next value of each observation."""
        raise NotImplementedError


def _share_memory(value: Any, next_value: Any) -> bool:
    """Returns whether two values are arrays or tensors that begin at the same address in memory."""
    if isinstance(value, np.ndarray) and isinstance(next_value, np.ndarray):
        return value.ctypes.data == next_value.ctypes.data
    if isinstance(value, torch.Tensor) and isinstance(next_value, torch.Tensor):
        return value.data_ptr() == next_value.data_ptr() != 0
    return False


def tensors_in(data: Any, path: tuple[str, ...] = ()) -> dict[NestedKey, torch.Tensor]:
    """Returns the tensors of a TensorDict by key. The iterators of TensorDict take ten times as long."""
    tensors: dict[NestedKey, torch.Tensor] = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            tensors[(*path, name) if path else name] = value
        elif is_tensor_collection(value):
            tensors |= tensors_in(value, (*path, name))
    return tensors


class StagedBlock(Staging):
    """Transitions from TensorDicts of one batch size.

    Args:
        layout: as in `Staging`.
        batch_size: as in `Staging`.
        device: as in `Staging`.
        done_key: key of the flag that ends episodes, one bool per transition; it need not be a field.
        tensors: the tensors of such a TensorDict, by key.

    Attributes:
        num_tensors: number of tensors of such a TensorDict.

    Raises:
        KeyError: the flag is missing.
        ValueError: the flag is not one bool per transition.
    """

    def __init__(
        self,
        layout: Layout,
        batch_size: torch.Size,
        device: torch.device | None,
        done_key: NestedKey,
        tensors: Mapping[NestedKey, torch.Tensor],
    ) -> None:
        super().__init__(layout, batch_size, device)
        self.num_tensors = len(tensors)
        flag = tensors.get(done_key)
        if flag is None:
            raise KeyError(
                f"the data lack {done_key!r}, which ends episodes; they have {[*tensors]}."
            )
        if flag.dtype is not torch.bool or flag.numel() != len(self.done):
            raise ValueError(
                f"{done_key!r} must be one bool per transition, got {flag.dtype} {[*flag.shape]}. If "
                f"each agent has a flag, combine them: data.set({keys.DONE!r}, data[...].any(-2))."
            )
        fields = [layout.by_key[key] for key in self.views]
        shape = batch_size + layout.by_key[done_key].shape if done_key in layout else flag.shape
        self._keys = [*self.views, done_key]
        done = torch.as_tensor(self.done)
        self._targets = [*self.views.values(), done.view(shape)]
        self._kinds = [*((it.dtype, batch_size + it.shape) for it in fields), (torch.bool, shape)]
        # Positions of stacks among the fields: their frames are copied.
        self._stacks = [(position, it) for position, it in enumerate(fields) if it.stack]
        # The other flags that end episodes. Flags on another device are not checked: no write waits.
        self._end_flags: dict[NestedKey, Any] = {
            key: self.views[key].view(-1).numpy()
            for key in (keys.TERMINATED, keys.TRUNCATED)
            if done.is_cpu and key in layout and self.views[key].numel() == len(done)
        }

    def fill(self, tensors: Mapping[NestedKey, torch.Tensor]) -> bool:
        """Copies the tensors of a TensorDict that have fields.

        Returns:
            whether flags were repaired, because all transitions of a flat batch are truncated and some
            are not done: then only those that are done and not terminated are stored as truncated.

        Raises:
            KeyError: a tensor is missing.
            TypeError, ValueError: a tensor has another dtype or shape; or the batch contains padding; or
                transitions on the host are terminated or truncated, but not done.
        """
        try:
            values = [tensors[key] for key in self._keys]
        except KeyError as error:
            (key,) = error.args
            hint = ": env.add_truncated_keys() adds it" if key == keys.TRUNCATED else ""
            raise KeyError(f"the data lack {key!r}, a field of every transition{hint}.") from None
        if [(value.dtype, value.shape) for value in values] != self._kinds:
            self._raise_mismatch(values)
        if (mask := tensors.get(keys.MASK)) is not None and not mask.all():
            raise ValueError(
                f"the data must not be padded, but {keys.MASK} is False for some transitions: pass "
                f"traj_format='cat' to the collector, or write data[data[{keys.MASK!r}]]."
            )
        for position, field in self._stacks:
            values[position] = field.stack.frames(values[position], field.shape)  # type: ignore[union-attr]
        # torch.inference_mode() is Python: an interrupt in its exit would leave the mode on.
        with InferenceMode(True):
            copy_all(self._targets, values)
        return self._repair_flags()

    def _repair_flags(self) -> bool:
        """Repairs the flags of TorchRL's trainers; see `fill`.

        Raises:
            ValueError: transitions are terminated or truncated, but not done.
        """
        is_repaired = False
        for key, flag in self._end_flags.items():
            done = np.asarray(self.done)
            if not np.count_nonzero(flag > done):
                continue
            is_flat = len(self.batch_size) == 1
            if key == keys.TERMINATED or not is_flat or flag.size == 1 or not flag.all():
                raise ValueError(
                    f"{self._keys[-1]!r} must be true where transitions are terminated or truncated, got "
                    "a transition where it is false: set it to terminated | truncated."
                )
            # TorchRL's trainers set all flags instead of the last one of each environment.
            np.greater(done, self._end_flags.get(keys.TERMINATED, False), out=flag)
            is_repaired = True
        return is_repaired

    def _raise_mismatch(self, values: Sequence[torch.Tensor]) -> None:
        num_dims = len(self.batch_size)
        for key, value, (dtype, shape) in zip(self._keys, values, self._kinds, strict=True):
            expected = f"{key!r} must be {dtype} {[*shape[num_dims:]]}, got"
            if value.dtype is not dtype:
                raise TypeError(f"{expected} {value.dtype}.")
            if value.shape != shape:
                raise ValueError(f"{expected} {[*value.shape[num_dims:]]}.")

    def _observations_in(self, source: Any) -> Iterable[tuple[NestedKey, Any, Any]]:
        pairs = ((key, keys.next_key(key)) for key in keys.shared_keys(self.views))
        return ((key, source[key], source[after]) for key, after in pairs)
