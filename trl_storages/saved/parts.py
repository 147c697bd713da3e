"""The save and load interface of a storage's parts, and checked access to saved dicts."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch

from trl_storages import arguments
from trl_storages.saved.files import NewState, read_state

__all__ = ["OtherPart", "SavedPart", "SavedState", "as_part"]

_LARGEST = 2**63 - 1
_MENDED = "load what a storage of the same make saved. Nothing was changed."


class SavedState:
    """A saved dict whose entries are checked on access.

    Args:
        state: what `state_dict` returned, or what was read from a dump.
        what: its name in error messages.
        keys: the required entries.
        optional: further entries it may have.

    Raises:
        TypeError: it is not a dict.
        KeyError: an entry is missing.
        ValueError: it has unknown entries.

    >>> SavedState({"beta": 0.4}, "the sampler", ["beta"]).number("beta", 0, 1)
    0.4
    """

    def __init__(
        self, state: Any, what: str, keys: Collection[str], optional: Collection[str] = ()
    ) -> None:
        self._what = what
        if not isinstance(state, Mapping):
            raise TypeError(f"{what} must be a dict, got {type(state).__name__}; {_MENDED}")
        got = sorted(map(str, state))
        if missing := [key for key in keys if key not in state]:
            raise KeyError(f"{what} must hold {missing}, got the entries {got}; {_MENDED}")
        if others := [key for key in state if key not in keys and key not in optional]:
            raise ValueError(
                f"{what} must hold the entries {list(keys)} alone, got {others} too: it is that of "
                f"another part; {_MENDED}"
            )
        self._state = state

    def __getitem__(self, key: str) -> Any:
        return self._state[key]

    def __contains__(self, key: str) -> bool:
        return key in self._state

    def error(self, key: str, must: str, got: Any, kind: type[Exception] = ValueError) -> Exception:
        """Builds the error for an invalid entry."""
        return kind(f"{key!r} of {self._what} must be {must}, got {got}; {_MENDED}")

    def _checked(
        self, key: str, kinds: tuple[type, ...], check: Callable[..., Any], **limits: Any
    ) -> Any:
        value = self._state[key]
        if type(value) not in kinds:
            must = " or ".join(kind.__name__ for kind in kinds)
            raise self.error(key, f"of type {must}", type(value).__name__, TypeError)
        try:
            return check(f"{key!r} of {self._what}", value, **limits)
        except ValueError as error:
            raise ValueError(f"{str(error).rstrip('.')}; {_MENDED}") from error

    def flag(self, key: str) -> bool:
        """Returns a bool entry."""
        return self._checked(key, (bool,), arguments.flag)

    def integer(self, key: str, low: int = 0, high: int = _LARGEST) -> int:
        """Returns an integer entry within `[low, high]`."""
        return self._checked(key, (int,), arguments.integer, at_least=low, at_most=high)

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float:
        """Returns a finite number within `[low, high]`."""
        return self._checked(key, (int, float), arguments.number, at_least=low, at_most=high)

    def one_of(self, key: str, choices: Collection[Any]) -> Any:
        """Returns a string entry that is one of `choices`."""
        value = self._state[key]
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, f"one of {list(choices)}", repr(value))
        return value

    def tensor(
        self, key: str, dtype: torch.dtype, shape: Sequence[int] | None = None, hint: str = ""
    ) -> torch.Tensor:
        """Returns a tensor entry of this dtype and shape.

        Args:
            key: the entry.
            dtype: required dtype.
            shape: required shape; None accepts any.
            hint: added to the message if the shape differs.
        """
        value = self._state[key]
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise self.error(key, "a dense tensor", type(value).__name__, TypeError)
        if value.dtype is not dtype:
            raise self.error(key, str(dtype), value.dtype, TypeError)
        if shape is not None and value.shape != torch.Size(shape):
            must = f"of shape {list(shape)}" + (f" ({hint})" if hint else "")
            raise self.error(key, must, list(value.shape))
        return value

    def check_parameters(self, kind: type, names: Collection[str]) -> None:
        """Checks entries by the setters of the attributes of these names in a class."""
        trial: Any = object.__new__(kind)
        for name in names:
            value = self._state[name]
            if isinstance(value, int) and abs(value) > _LARGEST:
                raise self.error(name, "a number of 64 bits", value)
            try:
                setattr(trial, name, value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self._what} is damaged: {error} {_MENDED}") from error

    def within(self, key: str, low: float, high: float, hint: str = "") -> None:
        """Checks that all elements of a tensor lie within `[low, high]`; `hint` as in `tensor`."""
        value = self._state[key]
        if value.numel() and not bool(((value >= low) & (value <= high)).all()):
            found = f"{value.min().item()} to {value.max().item()}"
            must = f"from {low} to {high} everywhere" + (f" ({hint})" if hint else "")
            raise self.error(key, must, found)


class SavedPart:
    """A part whose state, of tensors and plain values, is fully checked before it is loaded."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the complete state of the part, as tensors and plain values."""

    def check_state(self, state_dict: Any) -> None:
        """Checks that `take_state` can take a state, without changing anything.

        Raises:
            KeyError, TypeError, ValueError: the state is damaged, or from a different part.
        """
        self.read_state(state_dict)

    def read_state(self, state_dict: Any) -> Any:
        """Returns what a state holds; for parts whose check has a result."""
        raise NotImplementedError

    @abstractmethod
    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Loads a state that was checked; `progress` shows a progress bar for rows."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: as `check_state`. Nothing is changed then.
        """
        self.check_state(state_dict)
        self.take_state(state_dict)

    def dumps(self, path: str | Path) -> None:
        """Saves the state in the directory `path`, as JSON and raw tensor files."""
        with NewState(arguments.directory("path", path)) as saved:
            saved.write(self.state_dict())

    def loads(self, path: str | Path) -> None:
        """Restores what `dumps` saved.

        Raises:
            FileNotFoundError: the directory, or a file in it, is missing.
            KeyError, TypeError, ValueError: a file is truncated or damaged, or as `check_state`.
                Nothing is changed then.
        """
        self.load_state_dict(read_state(path))


def as_part(part: Any) -> SavedPart:
    """Returns the part itself if it is a `SavedPart`, else wraps it in a `OtherPart`."""
    return part if isinstance(part, SavedPart) else OtherPart(part)


class OtherPart(SavedPart):
    """Wraps a sampler of the user's own.

    A state is checked by comparing it with the part's current state and loading it into a copy.

    Args:
        part: the sampler.
    """

    def __init__(self, part: Any) -> None:
        self._part = part

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""
        # Samplers without a state return None.
        return self._part.state_dict() or {}

    def check_state(self, state_dict: Any) -> None:
        """Checks a state; see `SavedPart.check_state`."""
        what, own = f"the saved {type(self._part).__name__}", self.state_dict()
        saved = SavedState({} if state_dict is None else state_dict, what, [*own])
        for key, value in own.items():
            _check_like(saved, key, saved[key], value)
        # Shared with the copy, not copied: rows and generator are not part of the state.
        kept = (vars(self._part).get(name) for name in ("_rng", "_storage"))
        trial = copy.deepcopy(self._part, {id(it): it for it in kept if it is not None})
        try:
            OtherPart(trial).take_state(copy.deepcopy(state_dict))
        except Exception as error:  # third-party code may raise anything
            raise ValueError(f"{what} can't be loaded: {error!r}. Nothing was changed.") from error

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Loads a state that was checked."""
        self._part.load_state_dict(state)


def _check_like(saved: SavedState, key: str, value: Any, own: Any) -> None:
    """Checks an entry against the same entry of the current state."""
    if own is None or (value is None and isinstance(own, torch.Tensor)):
        return  # created lazily
    both = value, own
    numbers = all(isinstance(it, int | float) and not isinstance(it, bool) for it in both)
    is_alike = type(value) is type(own) or all(isinstance(it, Mapping) for it in both)
    if not numbers and not is_alike:
        raise saved.error(key, f"of type {type(own).__name__}", type(value).__name__)
    if numbers and not 0 <= value < 2**63:
        raise saved.error(key, "finite and at least 0", value)
    if isinstance(value, torch.Tensor):
        if value.dtype is not own.dtype or value.ndim != own.ndim:
            must = f"{own.dtype} of {own.ndim} dimensions"
            raise saved.error(key, must, f"{value.dtype} {list(value.shape)}")
    elif isinstance(value, Mapping):
        inner = SavedState(value, f"{key!r}", [*own])
        for name, entry in own.items():
            _check_like(inner, name, inner[name], entry)
    elif isinstance(own, Sized) and not isinstance(own, str) and len(value) != len(own):
        raise saved.error(key, f"of size {len(own)}", len(value))
