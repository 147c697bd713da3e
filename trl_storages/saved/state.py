"""The saved state of one part, looked at entry by entry."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

__all__ = ["SavedState"]

_LARGEST = 2**63 - 1
_MENDED = "load what a storage of the same make saved. Nothing was changed."


class SavedState:
    """A dict that was saved, of which every entry is checked when it is asked for.

    Args:
        state: what `state_dict` returned, or what was read from a dump.
        what: names it in errors.
        keys: the entries it must have.
        optional: those that it may have.

    Raises:
        TypeError: it is no dict.
        KeyError: an entry is missing.
        ValueError: it has others too.

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

    def error(self, key: str, must: str, got: Any) -> ValueError:
        """Returns the error that says what an entry must be."""
        return ValueError(f"{key!r} of {self._what} must be {must}, got {got}; {_MENDED}")

    def _wrong_type(self, key: str, must: str, got: Any) -> TypeError:
        return TypeError(f"{key!r} of {self._what} must be {must}, got {got}; {_MENDED}")

    def flag(self, key: str) -> bool:
        """Returns an entry that is true or false."""
        value = self._state[key]
        if not isinstance(value, bool):
            raise self._wrong_type(key, "a bool", type(value).__name__)
        return value

    def integer(self, key: str, low: int = 0, high: int = _LARGEST) -> int:
        """Returns a whole number within `[low, high]`."""
        value = self._state[key]
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong_type(key, "a whole number", type(value).__name__)
        if not low <= value <= high:
            raise self.error(key, f"in [{low}, {high}]", value)
        return value

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float:
        """Returns a finite number within `[low, high]`."""
        value = self._state[key]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong_type(key, "a number", type(value).__name__)
        if not (math.isfinite(value) and low <= value <= high):
            raise self.error(key, f"finite and in [{low:g}, {high:g}]", value)
        return value

    def one_of(self, key: str, choices: Collection[Any]) -> Any:
        """Returns an entry that is one of some words."""
        value = self._state[key]
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, f"one of {list(choices)}", repr(value))
        return value

    def tensor(
        self, key: str, dtype: torch.dtype, shape: Sequence[int] | None = None, hint: str = ""
    ) -> torch.Tensor:
        """Returns a tensor of this dtype and shape.

        Args:
            key: the entry.
            dtype: of its elements.
            shape: all of it; None takes any.
            hint: what a shape that differs may come of.
        """
        value = self._state[key]
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise self._wrong_type(key, "a dense tensor", type(value).__name__)
        if value.dtype is not dtype:
            raise self._wrong_type(key, str(dtype), value.dtype)
        if shape is not None and value.shape != torch.Size(shape):
            must = f"of shape {list(shape)}" + (f" ({hint})" if hint else "")
            raise self.error(key, must, list(value.shape))
        return value

    def within(self, key: str, low: float, high: float) -> None:
        """Checks that all elements of a tensor lie within `[low, high]`."""
        value = self._state[key]
        if value.numel() and not bool(((value >= low) & (value <= high)).all()):
            found = f"{value.min().item()} to {value.max().item()}"
            raise self.error(key, f"from {low} to {high} everywhere", found)
