"""States of components: dicts of tensors, numbers, strings, lists and None, and their checks.

A component has `state()`, and `prepare_load(state)`, which checks the whole state and returns a function
that adopts it and can't fail. A replay buffer checks the states of all components before any is adopted.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from trl_storages import validation

__all__ = ["Adopt", "State", "all_of", "array", "from_json", "required_items", "to_json"]

State = dict[str, Any]
Adopt = Callable[[], object]
# Names that mark a tensor and a tuple in JSON, which has neither. No name of a state begins with a dot.
_TENSOR, _TUPLE = ".tensor", ".tuple"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def all_of(*adopts: Adopt) -> Adopt:
    """Returns a function that adopts several states, one after another."""

    def adopt() -> None:
        for adopt_one in adopts:
            adopt_one()

    return adopt


def required_items(what: str, state: Any, names: Collection[str]) -> list[Any]:
    """Returns the items of a state in the order of `names`.

    Raises:
        ValueError: the state is not a mapping with exactly these names.

    >>> required_items("a writer", {"count": 3}, ["count"])
    [3]
    """
    if not isinstance(state, Mapping) or {*state} != {*names}:
        keys = [*state][:20] if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"the state of {what} must have {[*names]}, got {keys}: nothing changed.")
    return [state[name] for name in names]


def array(name: str, value: Any, dtype: torch.dtype, *shape: int | None) -> np.ndarray:
    """Returns a tensor of a state as an array on the host.

    Args:
        name: name of the tensor, for the message.
        value: the tensor.
        dtype: required dtype.
        shape: required size of each dimension; None accepts any size.

    Raises:
        ValueError: `value` is not a dense tensor of this dtype and shape.
    """
    is_valid = isinstance(value, torch.Tensor) and value.layout is torch.strided
    is_valid = is_valid and value.dtype is dtype and len(value.shape) == len(shape)
    if not is_valid or any(
        required not in (None, size) for required, size in zip(shape, value.shape, strict=True)
    ):
        raise ValueError(
            f"{name} must be {dtype} {[*shape]}, got {validation.shown(value)}: nothing changed."
        )
    values: np.ndarray = value.detach().cpu().contiguous().numpy()
    return values


def to_json(state: Any) -> Any:
    """Converts a state to JSON values, with tensors as text.

    Raises:
        TypeError: the state holds a value of another type.
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
    raise TypeError(f"a state has tensors, numbers, text, lists and dicts, got {type(state)}.")


def from_json(content: Any) -> Any:
    """Returns the state that `to_json` converted.

    Raises:
        ValueError: `content` is damaged.
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
        raise ValueError(f"a saved tensor is damaged: {error!s:.100}") from error
    return {name: from_json(value) for name, value in content.items()}
