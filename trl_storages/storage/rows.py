"""Transitions of a batch, as its transforms see and change them.

Letters: B batch, n transitions of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from trl_storages import validation
from trl_storages.entries.device import sent, sent_together
from trl_storages.entries.layout import nest
from trl_storages.storage.view import StorageView

__all__ = ["BatchRows", "Rows"]


class Rows:
    """Stored transitions: `rows[key]` reads a field, `rows[key] = value` sets it for this batch alone.

    A field is read from the storage at its first use.

    Args:
        view: the storage, as of the moment at which the batch is sampled.
        slots: `[*B]` int64, on the host.

    Attributes:
        slots: the argument.
        device: the device of the fields.
        is_on_host: whether compiled loops read the entries.
        episodes: the episode index, whose methods accept slots on the host.
        changes: the fields that transforms have set, key -> value.
    """

    def __init__(self, view: StorageView, slots: torch.Tensor) -> None:
        self._view, self.slots = view, slots
        self.device, self.episodes, self.is_on_host = view.device, view.episodes, view.is_on_host
        self.changes: dict[NestedKey, torch.Tensor] = {}
        self._fetched: dict[NestedKey, torch.Tensor] = {}
        # The entry of each transition.
        self._entries: Any = view.locate(slots)

    @property
    def has_next(self) -> bool:
        """Whether the transitions have next observations."""
        return bool(self._view.layout.has_next)

    def __contains__(self, key: NestedKey) -> bool:
        key = unravel_key(key)
        return key in self.changes or key in self._fetched or key in self._view.layout

    def __getitem__(self, key: NestedKey) -> torch.Tensor:
        """Returns a field, `[*B, ...]`.

        Raises:
            KeyError: no such field is stored; the message lists the stored fields.
        """
        value = self.changes.get(key, self._fetched.get(key))
        if value is None:
            key = unravel_key(key)
            value = self.changes.get(key)
        return self._fetch(key) if value is None else value

    def _fetch(self, key: NestedKey) -> torch.Tensor:
        value = self._fetched.get(key)
        if value is None:
            value = self._fetched[key] = self._view.entries.take(key, self._entries)
        return value

    def __setitem__(self, key: NestedKey, value: torch.Tensor) -> None:
        """Sets a field of this batch, `[*B, ...]` on `device`.

        Raises:
            TypeError, ValueError: the value is not a tensor with one value per transition.
        """
        size = self.slots.shape
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{key!r} must be a tensor, got {type(value).__name__}.")
        if value.shape[: len(size)] != size:
            raise ValueError(
                f"{key!r} must have one value per transition, shape {[*size, '...']}, got "
                f"{[*value.shape]}."
            )
        self.changes[unravel_key(key)] = value

    def at(self, slots: torch.Tensor) -> Rows:
        """Returns other transitions, as they are stored.

        Args:
            slots: `[*]` int64 of valid transitions, such as those of `episodes.shift`.

        Raises:
            TypeError: the slots are not an int64 tensor.
            IndexError: a slot holds no valid transition.
        """
        if not isinstance(slots, torch.Tensor) or slots.dtype is not torch.int64:
            raise TypeError(f"slots must be a tensor of int64, got {slots!r}.")
        slots = slots.cpu()
        self._view.check_live(slots.reshape(-1))
        return Rows(self._view, slots)


class BatchRows(Rows):
    """The transitions of a batch, with the fields of the sampler.

    Complete transitions are gathered when the first field is read, or at the end.

    Args:
        view: the storage, as of the moment at which the batch is sampled.
        slots: `[B]` int64, on the host.
        drawn: fields of the sampler, such as `goal_index`, on the host.
        generator: random numbers of the buffer, on the host; None is torch's default generator.

    Attributes:
        drawn: the argument; `rows[key]` returns its values on `device`.
        generator: the argument, for transforms that draw random numbers.
        window: the n-step window of each transition, `[n, B]`, until `NStep` has computed returns; else
            None. Beyond the end of an episode a window repeats the episode's last transition.
        lengths: `[B]` int64, on the host: number of different transitions in each window.
    """

    def __init__(
        self,
        view: StorageView,
        slots: torch.Tensor,
        drawn: Mapping[NestedKey, torch.Tensor],
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(view, slots)
        self.drawn, self.generator = drawn, generator
        self.changes = dict(drawn) if self.is_on_host else sent_together(drawn, self.device)
        self.window: Rows | None = None
        self.lengths: Any = None
        # Pasted fields: key, entries `[B]` of the other transitions, mask, targets and default.
        self._pasted: list[tuple[Any, ...]] = []
        # The entries whose next observations are those of the batch: the last entry of each window.
        self._last_entries = self._entries
        # The gathered transitions `[B, row_words]`, and the batch after the first function of batches.
        self._gathered: torch.Tensor | None = None
        self._batch: TensorDictBase | None = None

    # Not an attribute: memory that refers to itself is only released by the garbage collector.
    @property
    def steps(self) -> Rows:
        """The transitions whose rewards and flags transforms change: `window`, else these."""
        return self if self.window is None else self.window

    def __contains__(self, key: NestedKey) -> bool:
        if self._batch is not None:
            return unravel_key(key) in self._batch.keys(True)
        return super().__contains__(key)

    def _fetch(self, key: NestedKey) -> torch.Tensor:
        if self._batch is not None:
            return self._batch[key]
        if self._gathered is None:
            self._gather()
        return super()._fetch(key)

    def __setitem__(self, key: NestedKey, value: torch.Tensor) -> None:
        super().__setitem__(key, value)
        if self._batch is not None:
            self._batch[key] = value

    def _gather(self) -> None:
        """Gathers complete transitions, and pastes into them."""
        view = self._view
        self._gathered = view.entries.gather(self._entries, self._last_entries)
        self._fetched = view.layout.views(self._gathered)
        for pasted in self._pasted:
            self._paste(pasted)

    # Next observations of later steps

    def widen(self, num_rows: int) -> None:
        """Opens the n-step windows; fields under `next` are read from their last transitions.

        Args:
            num_rows: n, the largest number of transitions of a window.

        Raises:
            RuntimeError: the windows are open already, or a field was read: call this in `prepare`.
        """
        if self.window is not None or self._fetched:
            raise RuntimeError(
                "n-step windows must be opened once, before a field is read: use one NStep, whose n_step "
                "may be changed at any time."
            )
        slots, lengths = self.episodes.windows(self.slots.numpy(), num_rows)
        self.lengths = torch.from_numpy(lengths)
        self.window = Rows(self._view, torch.from_numpy(slots))
        self._last_entries = self.window._entries[-1]

    @property
    def has_returns(self) -> bool:
        """Whether the rewards are n-step returns already."""
        return self.lengths is not None and self.window is None

    def close_windows(self) -> None:
        """Ends the n-step windows: from now on the rewards of the batch are n-step returns."""
        self.window = None

    def follow_window(self, at: torch.Tensor) -> None:
        """Reads fields under `next` from transition `at` `[B]` of each window, on `device`.

        Raises:
            RuntimeError: no windows are open, or a transform has set a field under `next` already.
        """
        if self.window is None:
            raise RuntimeError("no n-step windows are open: call widen() in prepare().")
        for key in self.changes:
            if key[0] == "next":
                raise RuntimeError(
                    f"{key!r} was set for another next observation: set it in rows.steps, or put the "
                    "transform that sets it after NStep."
                )
        self._last_entries = self._view.entries.picked(self.window._entries, at)
        self._gathered, self._fetched = None, {}

    # Fields of other transitions

    def paste(
        self,
        targets: Sequence[NestedKey],
        key: NestedKey,
        slots: torch.Tensor,
        mask: torch.Tensor,
        *,
        default: NestedKey | None = None,
    ) -> None:
        """Replaces fields by a field of other transitions where a mask is true.

        Args:
            targets: the fields that are replaced.
            key: the field of the other transitions.
            slots: `[B]` int64 of the other transitions, on the host.
            mask: `[B]` bool, on the host; elsewhere fields keep their values.
            default: the field whose values an unstored target has elsewhere.

        Raises:
            KeyError: the field is not stored.
            TypeError: the field is floating, and a target is not.
            ValueError: the shapes differ.
            RuntimeError: an earlier transform is one of TorchRL's, or has set a target.
        """
        if self._batch is not None:
            raise RuntimeError(
                "goals must be written before TorchRL's transforms: put these after."
            )
        if not self.changes.keys().isdisjoint(targets):
            raise RuntimeError(
                f"a transform has set {targets}: put it after the one that writes goals."
            )
        pasted = key, self._view.locate(slots), mask, tuple(targets), default
        # Kept, because `follow_window` gathers again.
        self._pasted.append(pasted)
        if self._gathered is not None:
            self._paste(pasted)

    def _paste(self, pasted: tuple[Any, ...]) -> None:
        """Pastes into the gathered transitions, or sets separate fields if a target is not stored."""
        key, at, mask, targets, default = pasted
        entries: Any = self._view.entries
        if entries.paste(self._gathered, key, at, mask, targets):
            return
        values = entries.take(key, at)
        is_replaced = sent(mask, self.device).view(-1, *(1,) * (values.ndim - 1))
        for target in targets:
            current = self[target if target in self._fetched else default or target]
            if values.is_floating_point() and not current.is_floating_point():
                raise TypeError(
                    f"{target!r} must be floating like {key!r}, got {current.dtype}: values would be "
                    "truncated."
                )
            if values.shape != current.shape:
                raise ValueError(
                    f"{key!r} must have the shape of {target!r}, {[*current.shape[1:]]}, got "
                    f"{[*values.shape[1:]]}."
                )
            self._fetched[target] = torch.where(is_replaced, values.to(current.dtype), current)

    # The batch

    def transform(self, function: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Applies a function of batches, such as one of TorchRL's transforms.

        Raises:
            RuntimeError: a later `NStep` sums rewards that the function does not receive.
            TypeError: the function does not return a TensorDict.
        """
        if self.window is not None:
            raise RuntimeError(
                f"{type(function).__name__} must come after NStep, because NStep sums rewards of later "
                "transitions, which a function of a batch does not receive."
            )
        self._batch = validation.tensordict(
            "the result of a transform", function(self.tensordict())
        )
        self.changes, self._fetched = {}, {}

    def tensordict(self) -> TensorDictBase:
        """Returns all fields as a TensorDict `[B]`, in new memory."""
        if self._batch is not None:
            return self._batch
        if self._gathered is None:
            self._gather()
        fields = {**self._fetched, **self.changes}
        return nest(fields, self.slots.shape, self.device, self._view.layout.nested)
