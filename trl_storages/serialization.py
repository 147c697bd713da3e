"""States of parts: dicts of tensors, numbers, strings, lists and None, and how they are checked.

A part has `state()`, and `parsed(state)`, which checks all of it, and returns a function that adopts it
and can't fail. All parts of a storage are parsed before any is adopted.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from trl_storages import validation

__all__ = ["Adopt", "State", "array", "entries_of", "from_json", "joined", "to_json"]

State = dict[str, Any]
Adopt = Callable[[], None]
# How tensors and tuples are written, which JSON has not; in no module's state a name begins with a dot.
_TENSOR, _TUPLE = ".tensor", ".tuple"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def joined(*adopts: Adopt) -> Adopt:
    """Returns a function that adopts several states, one after another."""

    def adopt() -> None:
        for each in adopts:
            each()

    return adopt


def entries_of(what: str, state: Any, names: Collection[str]) -> list[Any]:
    """Returns the entries of a state in the order of their names.

    Raises:
        ValueError: it has others.

    >>> entries_of("a writer", {"count": 3}, ["count"])
    [3]
    """
    if not isinstance(state, Mapping) or {*state} != {*names}:
        got = [*state][:20] if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"the state of {what} must have {[*names]}, got {got}: nothing changed.")
    return [state[name] for name in names]


def array(name: str, value: Any, dtype: torch.dtype, *shape: int | None) -> np.ndarray:
    """Returns a tensor of a state as an array on the host; a size that is None may be any.

    Raises:
        ValueError: it is no dense tensor of this dtype and shape.
    """
    fits = isinstance(value, torch.Tensor) and value.layout is torch.strided
    fits = fits and value.dtype is dtype and len(value.shape) == len(shape)
    if not fits or any(
        size not in (None, got) for size, got in zip(shape, value.shape, strict=True)
    ):
        raise ValueError(
            f"{name} must be {dtype} {[*shape]}, got {validation.shown(value)}: nothing changed."
        )
    found: np.ndarray = value.detach().cpu().contiguous().numpy()
    return found


def to_json(state: Any) -> Any:
    """Returns a state as JSON has it: tensors as text.

    Raises:
        TypeError: it holds something else.
    """
    if isinstance(state, torch.Tensor):
        values = state.detach().cpu().contiguous()
        data = values.reshape(-1).view(torch.uint8).numpy()
        text = base64.b64encode(data.tobytes()).decode()
        return {_TENSOR: text, "dtype": str(values.dtype), "shape": [*values.shape]}
    if isinstance(state, Mapping):
        return {name: to_json(value) for name, value in state.items()}
    if isinstance(state, list):
        return [to_json(value) for value in state]
    if isinstance(state, tuple):
        return {_TUPLE: [to_json(value) for value in state]}
    if isinstance(state, str | int | float | None):
        return state
    raise TypeError(f"states must be of tensors, numbers, text, lists, dicts, got {type(state)}.")


def from_json(words: Any) -> Any:
    """Returns the state that was written as JSON.

    Raises:
        ValueError: it was not.
    """
    if isinstance(words, list):
        return [from_json(value) for value in words]
    if not isinstance(words, dict):
        return words
    try:
        if _TENSOR in words:
            data = base64.b64decode(words[_TENSOR], validate=True)
            values = torch.tensor([*data], dtype=torch.uint8, device="cpu").view(
                _DTYPES[words["dtype"]]
            )
            return values.reshape(words["shape"])
        if _TUPLE in words:
            return tuple(from_json(value) for value in words[_TUPLE])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"a saved tensor must be whole, got another: {error!s:.100}") from error
    return {name: from_json(value) for name, value in words.items()}
