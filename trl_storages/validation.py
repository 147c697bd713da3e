"""Argument checks with uniform error messages: what must hold, and what came.

Each function returns the normalised argument, or raises. NumPy scalars and one-element tensors count as
numbers; a bool does not.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    Options = ParamSpec("Options")

__all__ = [
    "Lanes",
    "choice",
    "counted",
    "device",
    "directory",
    "flag",
    "function",
    "instance",
    "integer",
    "key",
    "keys",
    "lane_numbers",
    "mapping",
    "number",
    "optional",
    "renamed",
    "root_key",
    "shown",
    "slots",
    "tensor",
    "tensordict",
    "values",
    "warn_caller",
]

Kind = TypeVar("Kind")

_INT64_MAX = 2**63 - 1


def integer(name: str, value: Any, *, at_least: int = 0, at_most: int = _INT64_MAX) -> int:
    """Returns an integer within a range.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not whole, or out of range.

    >>> integer("num_envs", np.int64(2), at_least=1)
    2
    >>> integer("num_envs", 1.5, at_least=1)
    Traceback (most recent call last):
    ValueError: num_envs must be an integer of at least 1, got 1.5.
    """
    if type(value) is int and at_least <= value <= at_most:
        return value
    number = _scalar(value)
    is_number = _is_real(number)
    if is_number and isinstance(number, int) and at_least <= number <= at_most:
        return int(number)
    limits = f"of at least {at_least}" if at_most == _INT64_MAX else f"from {at_least} to {at_most}"
    kind = ValueError if is_number else TypeError
    raise kind(f"{name} must be an integer {limits}, got {shown(value)}.")


def optional(
    check: Callable[..., Kind], name: str, value: Any, *limits: Any, **named: Any
) -> Kind | None:
    """Applies another check, but lets None pass.

    >>> optional(integer, "seed", None), optional(integer, "seed", np.int64(2), at_least=1)
    (None, 2)
    """
    return None if value is None else check(name, value, *limits, **named)


def number(
    name: str, value: Any, *, at_most: float, at_least: float = 0, above: float | None = None
) -> float:
    """Returns a number within a range, as a float.

    Args:
        name: name of the argument.
        value: the argument.
        at_most: inclusive upper bound.
        at_least: inclusive lower bound.
        above: exclusive lower bound, in its place.

    Raises:
        TypeError: it is not a number.
        ValueError: it is out of range or NaN.

    >>> number("eta", 1.2, above=0, at_most=1)
    Traceback (most recent call last):
    ValueError: eta must be in (0, 1], got 1.2.
    """
    real, low = _scalar(value), at_least if above is None else above
    is_number = _is_real(real)
    if is_number and low <= real <= at_most and real != above:
        return float(real)
    kind = ValueError if is_number else TypeError
    bracket = "[" if above is None else "("
    raise kind(f"{name} must be in {bracket}{low:g}, {at_most:g}], got {shown(value)}.")


def choice(name: str, value: Any, names: Collection[str]) -> Any:
    """Returns one of several names.

    Raises:
        ValueError: it is not one of them.
        TypeError: it is not a string.

    >>> choice("strategy", "future", ["final", "future"])
    'future'
    """
    if isinstance(value, str) and value in names:
        return value
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(f"{name} must be one of {tuple(names)}, got {shown(value)}.")


def flag(name: str, value: Any) -> bool:
    """Returns a bool.

    Raises:
        TypeError: it is not a bool.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {shown(value)}.")
    return bool(value)


def instance(name: str, value: Any, kind: type[Kind] | tuple[type, ...], *, what: str = "") -> Kind:
    """Returns an instance of a class.

    Args:
        name: name of the argument.
        value: the argument.
        kind: the class, or a tuple of classes.
        what: description for the message; the class name if empty.

    Raises:
        TypeError: it is not an instance.
    """
    if not isinstance(value, kind):
        what = what or f"a {kind.__name__}"  # type: ignore[union-attr]
        raise TypeError(f"{name} must be {what}, got {shown(value)}.")
    return value  # type: ignore[return-value]


def function(name: str, value: Any, what: str) -> Callable[..., Any]:
    """Returns a callable.

    Args:
        name: name of the argument.
        value: the argument.
        what: its parameters, for the message.

    Raises:
        TypeError: it is not callable.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function {what}, got {shown(value)}.")
    return value


def mapping(name: str, value: Any, what: str) -> Mapping[Any, Any]:
    """Returns a mapping.

    Raises:
        TypeError: it is not a mapping.
    """
    # A TensorDict is a mapping, but not registered as one.
    return instance(name, value, (Mapping, TensorDictBase), what=what)


def device(name: str, value: Any) -> torch.device:
    """Returns a device.

    Raises:
        TypeError: it is neither a device nor a string.
        ValueError: there is no such device.
    """
    what = "a torch.device or a name such as 'cpu' or 'cuda:0'"
    try:
        return torch.device(instance(name, value, (str, torch.device), what=what))
    except RuntimeError as error:
        raise ValueError(f"{name} must be {what}, got {shown(value)}.") from error


def directory(name: str, value: Any) -> Path:
    """Returns the absolute path of a directory, which need not exist; `~` is expanded.

    Raises:
        TypeError: it is not a path.
        ValueError: it is empty.
    """
    what = "the path of a directory"
    if not os.fspath(instance(name, value, (str, os.PathLike), what=what)):
        raise ValueError(f"{name} must be {what}, got {shown(value)}.")
    return Path(value).expanduser().absolute()


def key(name: str, value: Any) -> NestedKey:
    """Returns a TensorDict key, a string or a tuple of strings, in its shortest form.

    Raises:
        TypeError: it is not a key.
        ValueError: it is empty.
    """
    parts = value if isinstance(value, tuple) else (value,)
    is_key = all(isinstance(part, str) for part in parts)
    if not (is_key and parts and all(parts)):
        kind = ValueError if is_key else TypeError
        raise kind(f"{name} must be a key, a string or a tuple of them; got {shown(value)}.")
    return unravel_key(value)


def root_key(name: str, value: Any) -> NestedKey:
    """Returns the key of a root entry that has a counterpart under "next", such as an observation.

    Raises:
        TypeError: it is not a key.
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
    """Returns several keys as a list.

    Raises:
        TypeError: it is not a sequence of keys, or a single string.
        ValueError: a key is empty.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a sequence of keys, got {shown(value)}.")
    return [key(name, each) for each in value]


def tensor(name: str, value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor.

    Args:
        name: name of the argument.
        value: the argument.
        dtype: required dtype; None accepts any.

    Raises:
        TypeError: it is not a tensor, or of another dtype.
    """
    if not isinstance(value, torch.Tensor) or (dtype is not None and value.dtype != dtype):
        what = "a tensor" if dtype is None else f"a tensor of {dtype}"
        raise TypeError(f"{name} must be {what}, got {shown(value)}.")
    return value


def values(name: str, value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Converts a number, a list of numbers, an array or a tensor to a tensor.

    Raises:
        TypeError: it can't be converted.
    """
    # Whatever torch's default device is.
    device = value.device if isinstance(value, torch.Tensor) else "cpu"
    try:
        return torch.as_tensor(value, dtype=dtype, device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name} must be numbers, got {shown(value)}.") from error


def slots(value: Any) -> torch.Tensor:
    """Returns an index of rows as int64 on the host.

    Raises:
        TypeError: it is not of integers.
    """
    found = values("index", value)
    is_whole = not (found.is_floating_point() or found.is_complex() or found.dtype is torch.bool)
    if found.numel() and not is_whole:
        raise TypeError(f"index must hold integers, got {found.dtype}.")
    return found.long().cpu()


def tensordict(name: str, value: Any) -> TensorDictBase:
    """Returns steps, rows or a batch, which must be a TensorDict.

    Raises:
        TypeError: it is not a TensorDict.
    """
    return instance(name, value, TensorDictBase, what="a TensorDict")


def _scalar(value: Any) -> Any:
    """Returns the number in a one-element tensor or array, and any other value as it is."""
    is_array = isinstance(value, torch.Tensor | np.ndarray | np.generic)
    return value.item() if is_array and math.prod(value.shape) == 1 else value


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def counted(number: int, what: str) -> str:
    """Returns a number of things in words.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {what}" + "s" * (number != 1)


def shown(value: Any) -> str:
    """Returns a description of a value, short enough for one line."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        if not value.shape and _is_real(number := value.item()):
            return str(number)
        return f"a {type(value).__name__} of {value.dtype} and shape {list(value.shape)}"
    if isinstance(value, TensorDictBase):
        return f"a {type(value).__name__} {list(value.batch_size)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"


def renamed(
    instead: Mapping[str, str],
) -> Callable[[Callable[Options, None]], Callable[Options, None]]:
    """Decorates a constructor: keywords of other libraries raise a TypeError that names what to use.

    Args:
        instead: what to use, which begins with a keyword of the constructor and "=" -> the other
            libraries' keywords. Entries whose keyword the constructor does not have are ignored.
    """
    ours = {theirs: use for use, names in instead.items() for theirs in names.split()}

    def decorate(make: Callable[Options, None]) -> Callable[Options, None]:
        own = signature(make).parameters

        @wraps(make)
        def made(*args: Any, **options: Any) -> None:
            for name in filter(ours.get, options):
                if ours[name].partition("=")[0] in own:
                    raise TypeError(f"there is no keyword {name!r}: use {ours[name]}.")
            make(*args, **options)

        return made

    return decorate


#: Packages whose frames are skipped.
_BETWEEN = {"trl_storages", "torchrl", "tensordict", "torch", "numba", "importlib"}


def warn_caller(message: str) -> None:
    """Warns at the nearest line outside of this package and the libraries that call it."""
    depth, frame = 0, inspect.currentframe()
    while frame is not None:
        depth += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN:
            break
        frame = frame.f_back
    warnings.warn(message, UserWarning, stacklevel=depth)


Lanes = Sequence[int] | torch.Tensor | None


def lane_numbers(lanes: Lanes, num_envs: int) -> Sequence[int]:
    """Resolves lanes to their numbers, checked on the host.

    Args:
        lanes: distinct numbers as a sequence or tensor, or a bool mask `[E]`; None is all.
        num_envs: number of lanes E.

    Raises:
        ValueError: `lanes` is something else, or names an unknown lane or one twice.
    """
    if lanes is None:
        return range(num_envs)
    ids = np.asarray(lanes.cpu() if isinstance(lanes, torch.Tensor) else lanes)
    if ids.dtype == bool and ids.shape == (num_envs,):
        ids = ids.nonzero()[0]
    is_list = ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids))
    values: list[int] = ids.tolist() if is_list else [-1]
    if len({*values}) < len(values) or any(not 0 <= lane < num_envs for lane in values):
        raise ValueError(
            f"lanes must be distinct numbers in 0..{num_envs - 1}, or a mask [{num_envs}], got {lanes}."
        )
    return values
