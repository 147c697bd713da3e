"""States of components: dicts of tensors, numbers, strings, lists and None, and checks of states.

A component has two methods: `state()`, and `parsed(state)`, which checks a state and returns a function
that adopts the state and can't fail. All components of a replay buffer are parsed before the first state
is adopted, so that a bad state changes nothing.
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
# Names that mark tensors and tuples, which JSON lacks. No name in a module's state begins with a dot.
_TENSOR, _TUPLE = ".tensor", ".tuple"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def joined(*adopts: Adopt) -> Adopt:
    """Returns a function that adopts several states, one after another."""

    def adopt() -> None:
        for adopt_one in adopts:
            adopt_one()

    return adopt


def entries_of(what: str, state: Any, names: Collection[str]) -> list[Any]:
    """Returns the entries of a state in the order of `names`.

    Args:
        what: the component, for the message.
        state: the state.
        names: the names that the state must have.

    Raises:
        ValueError: the state is no dict with exactly these names.

    >>> entries_of("a writer", {"count": 3}, ["count"])
    [3]
    """
    if not isinstance(state, Mapping) or {*state} != {*names}:
        got = [*state][:20] if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"the state of {what} must have {[*names]}, got {got}: nothing changed.")
    return [state[name] for name in names]


def array(name: str, value: Any, dtype: torch.dtype, *shape: int | None) -> np.ndarray:
    """Returns a tensor of a state as an array on the host; a size of None accepts any size.

    Raises:
        ValueError: `value` is no dense tensor of this dtype and shape.
    """
    is_valid = isinstance(value, torch.Tensor) and value.layout is torch.strided
    is_valid = is_valid and value.dtype is dtype and len(value.shape) == len(shape)
    if not is_valid or any(
        size not in (None, got) for size, got in zip(shape, value.shape, strict=True)
    ):
        raise ValueError(
            f"{name} must be {dtype} {[*shape]}, got {validation.shown(value)}: nothing changed."
        )
    values: np.ndarray = value.detach().cpu().contiguous().numpy()
    return values


def to_json(state: Any) -> Any:
    """Returns a state for JSON: tensors become text.

    Raises:
        TypeError: the state contains a value of another type.
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
    raise TypeError(f"states must hold tensors, numbers, text, lists, dicts, got {type(state)}.")


def from_json(content: Any) -> Any:
    """Returns the state whose JSON was parsed to `content`; the inverse of `to_json`.

    Raises:
        ValueError: a saved tensor or tuple is damaged.
    """
    if isinstance(content, list):
        return [from_json(value) for value in content]
    if not isinstance(content, dict):
        return content
    try:
        if _TENSOR in content:
            data = base64.b64decode(content[_TENSOR], validate=True)
            values = torch.tensor([*data], dtype=torch.uint8, device="cpu").view(
                _DTYPES[content["dtype"]]
            )
            return values.reshape(content["shape"])
        if _TUPLE in content:
            return tuple(from_json(value) for value in content[_TUPLE])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"a saved tensor or tuple is damaged: {error!s:.100}") from error
    return {name: from_json(value) for name, value in content.items()}
