"""Checks of what callers pass: what must hold and what came, in one wording.

Each function returns the argument as what is meant, or raises. NumPy scalars and tensors of one element
are numbers like any others; a bool is no number.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, SupportsFloat, TypeVar

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

__all__ = [
    "choice",
    "device",
    "directory",
    "flag",
    "function",
    "generator",
    "instance",
    "integer",
    "key",
    "keys",
    "mapping",
    "number",
    "optional",
    "root_key",
    "shown",
    "slots",
    "steps",
    "tensor",
    "values",
]

Kind = TypeVar("Kind")
Limits = ParamSpec("Limits")

_INT64_MAX = 2**63 - 1


def integer(name: str, value: Any, *, at_least: int = 0, at_most: int = _INT64_MAX) -> int:
    """Returns a whole number of a range.

    Raises:
        TypeError: it is no number.
        ValueError: it is not whole, or out of range.

    >>> integer("num_envs", np.int64(2), at_least=1)
    2
    >>> integer("num_envs", 1.5, at_least=1)
    Traceback (most recent call last):
    ValueError: num_envs must be an integer of at least 1, got 1.5.
    """
    if type(value) is int and at_least <= value <= at_most:
        return value
    try:
        whole = operator.index(value)
    except TypeError:
        whole = None
    if whole is not None and not _is_bool(value) and at_least <= whole <= at_most:
        return whole
    kind = ValueError if _is_number(value) else TypeError
    if isinstance(value, float) and value.is_integer():
        raise kind(f"{name} must be an integer, got {value} (float): pass {int(value)}.")
    too_large = whole is not None and whole > at_most
    limits = f"from {at_least} to {at_most}" if too_large else f"of at least {at_least}"
    raise kind(f"{name} must be an integer {limits}, got {shown(value)}.")


def optional(
    check: Callable[Concatenate[str, Any, Limits], Kind],
    name: str,
    value: Any,
    *limits: Limits.args,
    **named: Limits.kwargs,
) -> Kind | None:
    """Returns what another of these checks returns, or None.

    >>> optional(integer, "seed", None), optional(integer, "seed", np.int64(2), at_least=1)
    (None, 2)
    """
    return None if value is None else check(name, value, *limits, **named)


def number(
    name: str,
    value: SupportsFloat | None,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float = math.inf,
    infinite: bool = False,
) -> float:
    """Returns a number of a range, as a float.

    Args:
        name: of the argument.
        value: what came.
        above: excluded lower bound.
        at_least: included lower bound.
        at_most: included upper bound.
        infinite: whether it may be infinite.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of range or NaN.

    >>> number("eta", 1.2, above=0, at_most=1)
    Traceback (most recent call last):
    ValueError: eta must be in (0, 1], got 1.2.
    """
    low = above if above is not None else -math.inf if at_least is None else at_least
    opening = "[" if at_least is not None else "("
    closing = "]" if at_most < math.inf or infinite else ")"
    limits = f"in {opening}{low:g}, {at_most:g}{closing}"
    if not _is_number(value):
        raise TypeError(f"{name} must be a number {limits}, got {shown(value)}.")
    real = float(value)  # type: ignore[arg-type]
    is_above = real > low if at_least is None else real >= low
    if not (is_above and real <= at_most) or (math.isinf(real) and not infinite):
        raise ValueError(f"{name} must be {limits}, got {shown(value)}.")
    return real


def choice(name: str, value: Any, names: Collection[str]) -> Any:
    """Returns one of several names in small letters, also of one in others or an enum's member.

    Raises:
        ValueError: it is none of them.
        TypeError: it is no name.

    >>> choice("strategy", "FUTURE", ["final", "future"])
    'future'
    """
    named = value
    if isinstance(value, Enum):
        # Of some libraries' enums the names are the names, of others the values.
        named = value.value if isinstance(value.value, str) else value.name
    if isinstance(named, str) and named.lower() in names:
        return named.lower()
    kind = ValueError if isinstance(named, str) else TypeError
    raise kind(f"{name} must be one of {tuple(names)}, got {shown(value)}.")


def flag(name: str, value: Any) -> bool:
    """Returns a bool.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {shown(value)}.")
    return bool(value)


def instance(name: str, value: Any, kind: type[Kind] | tuple[type, ...], *, what: str = "") -> Kind:
    """Returns an object of a class.

    Args:
        name: of the argument.
        value: what came.
        kind: the class, or several.
        what: how the message calls it; the name of the class if empty.

    Raises:
        TypeError: it is of another class.
    """
    if not isinstance(value, kind):
        what = what or f"a {kind.__name__}"  # type: ignore[union-attr]
        raise TypeError(f"{name} must be {what}, got {shown(value)}.")
    return value  # type: ignore[return-value]


def function(name: str, value: Any, what: str, takes: int | None = None) -> Callable[..., Any]:
    """Returns something that can be called.

    Args:
        name: of the argument.
        value: what came.
        what: how it is called, for the message.
        takes: how many arguments it is called with; None does not look.

    Raises:
        TypeError: it can't be, or not with so many arguments.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function {what}, got {shown(value)}.")
    if takes is not None:
        try:
            parameters = inspect.signature(value)
        except ValueError:
            return value  # one of those in C that do not say
        try:
            parameters.bind(*[None] * takes)
        except TypeError:
            raise TypeError(f"{name} must be a function {what}, got one of {parameters}.") from None
    return value


def mapping(name: str, value: Any, what: str) -> Mapping[Any, Any]:
    """Returns a mapping.

    Raises:
        TypeError: it is none.
    """
    # A TensorDict is one that is not registered as such.
    return instance(name, value, (Mapping, TensorDictBase), what=what)


def device(name: str, value: Any) -> torch.device:
    """Returns a device.

    Raises:
        TypeError: it names none.
        ValueError: there is none of that name.
    """
    must = f"{name} must be a torch.device or a name such as 'cpu' or 'cuda:0', got {shown(value)}."
    if not isinstance(value, str | torch.device):
        raise TypeError(must)
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(must) from error


def directory(name: str, value: Any) -> Path:
    """Returns the path of a directory, which need not exist; `~` is the home of its user.

    Raises:
        TypeError: it is no path.
        ValueError: no file system has such a path.
        NotADirectoryError: there is a file of this name, or where a directory above it must be.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be the path of a directory, got {shown(value)}.")
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"{name} must be the path of a directory, got {shown(value)}.")
    path = Path(os.path.expanduser(text))
    nearest = next((it for it in (path, *path.parents) if os.path.lexists(it)), path)
    if os.path.lexists(nearest) and not nearest.is_dir():
        raise NotADirectoryError(
            f"{name} must be the path of a directory, got {text!r}, and {str(nearest)!r} is none: choose "
            "another, or move what is there away."
        )
    return path


def key(name: str, value: Any) -> NestedKey:
    """Returns the key of an entry of a TensorDict, a string or a tuple of them, in its short form.

    Raises:
        TypeError: it is none.
        ValueError: it is empty.
    """
    parts = value if isinstance(value, tuple) else (value,)
    is_key = all(isinstance(part, str | tuple) for part in parts)
    if not (is_key and parts and all(parts)):
        kind = ValueError if is_key else TypeError
        raise kind(f"{name} must be a key, a string or a tuple of them; got {shown(value)}.")
    for part in parts:
        if isinstance(part, tuple):
            key(name, part)
    return unravel_key(value)


def root_key(name: str, value: Any) -> NestedKey:
    """Returns the key of an entry that has a successor under "next", such as an observation.

    Raises:
        TypeError: it is none.
        ValueError: it is empty, or lies under "next" itself.
    """
    found = key(name, value)
    if found == "next" or found[0] == "next":
        raise ValueError(
            f"{name} must be the key of an entry now, not under 'next', got {found!r}: what follows it "
            "is found by itself."
        )
    return found


def keys(name: str, value: Any) -> list[NestedKey]:
    """Returns several keys.

    Raises:
        TypeError: they are none, or a single string.
        ValueError: one is empty.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a sequence of keys, got {shown(value)}.")
    return [key(name, each) for each in value]


def tensor(name: str, value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor.

    Args:
        name: of the argument.
        value: what came.
        dtype: what it must hold; None takes any.

    Raises:
        TypeError: it is none, or of another dtype.
    """
    if not isinstance(value, torch.Tensor) or (dtype is not None and value.dtype != dtype):
        what = "a tensor" if dtype is None else f"a tensor of {dtype}"
        raise TypeError(f"{name} must be {what}, got {shown(value)}.")
    return value


def values(name: str, value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns numbers as a tensor: a number, a list of them, an array or a tensor.

    Raises:
        TypeError: they are none.
    """
    try:
        return torch.as_tensor(value, dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name} must be numbers, got {shown(value)}.") from error


def slots(name: str, value: Any) -> Any:
    """Returns slots of rows as they came: a tensor or array of integers of any shape.

    Raises:
        TypeError: they are none.
    """
    if isinstance(value, torch.Tensor):
        fits = value.dtype in (torch.int64, torch.int32)
    else:
        fits = isinstance(value, np.ndarray) and value.dtype.kind in "iu"
    if not fits:
        raise TypeError(f"{name} must be a tensor of int64 slots, got {shown(value)}.")
    return value


def steps(name: str, value: Any) -> TensorDictBase:
    """Returns steps, rows or a batch as TorchRL's collectors and replay buffers hand them on.

    Raises:
        TypeError: they are no TensorDict.
    """
    if isinstance(value, TensorDictBase):
        return value
    if isinstance(value, list | tuple) and value and isinstance(value[0], TensorDictBase):
        raise TypeError(
            f"{name} must be a TensorDict, got {len(value)} of them: make one by torch.stack, or by "
            "torch.cat of several steps each."
        )
    raise TypeError(f"{name} must be a TensorDict, got {shown(value)}.")


def generator(name: str, value: Any) -> torch.Generator | None:
    """Returns a generator, or None for torch's default one.

    Raises:
        TypeError: it is something else.
    """
    if value is None:
        return None
    return instance(name, value, torch.Generator, what="a torch.Generator or None")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) in (
        torch.bool,
        np.bool_,
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, int | float | np.integer | np.floating):
        return not isinstance(value, bool)
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype is not torch.bool and not value.is_complex()
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "iuf"
    return False


def shown(value: Any) -> str:
    """Returns what came, short enough for a line."""
    if isinstance(value, torch.Tensor | np.ndarray) and (value.ndim or not _is_number(value)):
        return f"a {type(value).__name__} of {value.dtype} and shape {list(value.shape)}"
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return str(value.item())
    if isinstance(value, TensorDictBase):
        return f"a {type(value).__name__} {list(value.batch_size)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"
