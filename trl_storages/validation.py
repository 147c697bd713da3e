"""Checks of arguments, with error messages of one form: "name must be ..., got ...".

Each check returns the normalised argument, or raises. NumPy scalars and one-element tensors count as
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
    "deprecated_method",
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
    "replace_deprecated",
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
        TypeError: `value` is not a number.
        ValueError: `value` is not whole, or out of range.

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
    """Applies a check to any value except None, which is returned as it is.

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
        above: exclusive lower bound, which replaces `at_least`.

    Raises:
        TypeError: `value` is not a number.
        ValueError: `value` is out of range or NaN.

    >>> number("eta", 1.2, above=0, at_most=1)
    Traceback (most recent call last):
    ValueError: eta must be in (0, 1], got 1.2.
    """
    scalar, minimum = _scalar(value), at_least if above is None else above
    is_number = _is_real(scalar)
    if is_number and minimum <= scalar <= at_most and scalar != above:
        return float(scalar)
    kind = ValueError if is_number else TypeError
    bracket = "[" if above is None else "("
    raise kind(f"{name} must be in {bracket}{minimum:g}, {at_most:g}], got {shown(value)}.")


def choice(name: str, value: Any, names: Collection[str]) -> Any:
    """Returns one of several names.

    Raises:
        ValueError: `value` is not one of `names`.
        TypeError: `value` is not a string.

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
        TypeError: `value` is not a bool.
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
        what: description of the class for the message; the class name if empty.

    Raises:
        TypeError: `value` is not an instance of the class.
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
        what: the parameters of the function, for the message.

    Raises:
        TypeError: `value` is not callable.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function {what}, got {shown(value)}.")
    return value


def mapping(name: str, value: Any, what: str) -> Mapping[Any, Any]:
    """Returns a mapping.

    Raises:
        TypeError: `value` is not a mapping.
    """
    # A TensorDict is a mapping, but TensorDictBase is not registered as one.
    return instance(name, value, (Mapping, TensorDictBase), what=what)


def device(name: str, value: Any) -> torch.device:
    """Returns a device.

    Raises:
        TypeError: `value` is neither a device nor a string.
        ValueError: torch has no device of this name.
    """
    what = "a torch.device or a name such as 'cpu' or 'cuda:0'"
    try:
        return torch.device(instance(name, value, (str, torch.device), what=what))
    except RuntimeError as error:
        raise ValueError(f"{name} must be {what}, got {shown(value)}.") from error


def directory(name: str, value: Any) -> Path:
    """Returns the absolute path of a directory; `~` is expanded. The directory need not exist.

    Raises:
        TypeError: `value` is not a path.
        ValueError: `value` is empty.
    """
    what = "the path of a directory"
    if not os.fspath(instance(name, value, (str, os.PathLike), what=what)):
        raise ValueError(f"{name} must be {what}, got {shown(value)}.")
    return Path(value).expanduser().absolute()


def key(name: str, value: Any) -> NestedKey:
    """Returns a TensorDict key, a string or a tuple of strings, in its shortest form.

    Raises:
        TypeError: `value` is not a key.
        ValueError: `value` is empty.
    """
    names = value if isinstance(value, tuple) else (value,)
    is_key = all(isinstance(name, str) for name in names)
    if not (is_key and names and all(names)):
        kind = ValueError if is_key else TypeError
        raise kind(f"{name} must be a key, a string or a tuple of them; got {shown(value)}.")
    return unravel_key(value)


def root_key(name: str, value: Any) -> NestedKey:
    """Returns a key outside of "next" whose counterpart is under "next", such as an observation's.

    Raises:
        TypeError: `value` is not a key.
        ValueError: `value` is empty, or a key under "next".
    """
    root = key(name, value)
    if root == "next" or root[0] == "next":
        raise ValueError(
            f"{name} must be a key outside of 'next', got {root!r}: pass the key of the current value; "
            "the key under 'next' is derived from it."
        )
    return root


def keys(name: str, value: Any) -> list[NestedKey]:
    """Returns several keys as a list.

    Raises:
        TypeError: `value` is a single string, or not a sequence of keys.
        ValueError: a key is empty.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a sequence of keys, got {shown(value)}.")
    return [key(name, item) for item in value]


def tensor(name: str, value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor.

    Args:
        name: name of the argument.
        value: the argument.
        dtype: required dtype; None accepts any.

    Raises:
        TypeError: `value` is not a tensor, or has another dtype.
    """
    if not isinstance(value, torch.Tensor) or (dtype is not None and value.dtype != dtype):
        what = "a tensor" if dtype is None else f"a tensor of {dtype}"
        raise TypeError(f"{name} must be {what}, got {shown(value)}.")
    return value


def values(name: str, value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Converts a number, a list of numbers, an array or a tensor to a tensor.

    Raises:
        TypeError: `value` can't be converted.
    """
    # Named, because torch's default device may be a GPU.
    device = value.device if isinstance(value, torch.Tensor) else "cpu"
    try:
        return torch.as_tensor(value, dtype=dtype, device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name} must be numbers, got {shown(value)}.") from error


def slots(value: Any) -> torch.Tensor:
    """Returns slots, the argument `index`, as int64 on the host.

    Raises:
        TypeError: `value` does not hold integers.
    """
    index = values("index", value)
    is_integer = not (index.is_floating_point() or index.is_complex() or index.dtype is torch.bool)
    if index.numel() and not is_integer:
        raise TypeError(f"index must hold integers, got {index.dtype}.")
    return index.long().cpu()


def tensordict(name: str, value: Any) -> TensorDictBase:
    """Returns a TensorDict of transitions.

    Raises:
        TypeError: `value` is not a TensorDict.
    """
    return instance(name, value, TensorDictBase, what="a TensorDict")


def _scalar(value: Any) -> Any:
    """Returns the number in a one-element tensor or array; any other value is returned as it is."""
    is_array = isinstance(value, torch.Tensor | np.ndarray | np.generic)
    return value.item() if is_array and math.prod(value.shape) == 1 else value


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}" + "s" * (number != 1)


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
    """Decorates a constructor: keywords that it lacks raise a TypeError, which may give advice.

    The error names the class that was called, which may be a subclass.

    Args:
        instead: advice, which begins with a keyword of the constructor and "=" -> the keywords of other
            libraries, separated by spaces. Advice is ignored if the constructor lacks its keyword.
    """
    advice_of = {foreign: advice for advice, names in instead.items() for foreign in names.split()}

    def decorate(construct: Callable[Options, None]) -> Callable[Options, None]:
        parameters = signature(construct).parameters
        accepts_any = any(it.kind is it.VAR_KEYWORD for it in parameters.values())

        @wraps(construct)
        def checked(*args: Any, **options: Any) -> None:
            for name in options:
                unknown = f"{type(args[0]).__name__} got an unexpected keyword argument {name!r}"
                if (advice := advice_of.get(name, "")).partition("=")[0] in parameters:
                    raise TypeError(f"{unknown}: use {advice}.")
                if name not in parameters and not accepts_any:
                    raise TypeError(f"{unknown}.")
            construct(*args, **options)

        return checked

    return decorate


def deprecated_method(old: str, new: str) -> Callable[..., Any]:
    """Returns a method that warns of its deprecation and calls the method `new`."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        _warn_deprecated(f"{old}()", f"{new}()")
        return getattr(self, new)(*args, **options)

    call.__name__, call.__doc__ = old, f"Deprecated: use `{new}`. Removed in 0.6."
    return call


def replace_deprecated(options: dict[str, Any], **names: str) -> None:
    """Renames keywords in `options` and warns of their deprecation.

    Args:
        options: keyword -> value.
        **names: deprecated keyword -> new keyword.
    """
    for old, new in names.items():
        if old in options:
            _warn_deprecated(f"{old}=", f"{new}=")
            options[new] = options.pop(old)


def _warn_deprecated(old: str, new: str) -> None:
    message = f"{old} is deprecated and will be removed in trl_storages 0.6: use {new}."
    warn_caller(message, DeprecationWarning)


#: Packages whose frames are skipped: this one and the libraries that call it.
_SKIPPED_PACKAGES = {
    *("trl_storages", "torchrl", "tensordict", "torch", "numba", "importlib"),
    *("stable_baselines3", "sb3_contrib"),
}


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the nearest line outside of this package and the libraries that call it."""
    depth, frame = 0, inspect.currentframe()
    while frame is not None:
        depth += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _SKIPPED_PACKAGES:
            break
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=depth)


Lanes = Sequence[int] | torch.Tensor | None


def lane_numbers(lanes: Lanes, num_envs: int) -> Sequence[int]:
    """Returns the numbers of lanes.

    Args:
        lanes: distinct numbers as a sequence or tensor, or a bool mask `[E]`; None is all lanes.
        num_envs: number of lanes E.

    Raises:
        ValueError: `lanes` is neither, or contains a lane twice or a number outside of 0..E-1.
    """
    if lanes is None:
        return range(num_envs)
    array = np.asarray(lanes.cpu() if isinstance(lanes, torch.Tensor) else lanes)
    if array.dtype == bool and array.shape == (num_envs,):
        array = array.nonzero()[0]
    is_list = array.ndim == 1 and (array.dtype.kind in "iu" or not len(array))
    numbers: list[int] = array.tolist() if is_list else [-1]
    if len({*numbers}) < len(numbers) or any(not 0 <= lane < num_envs for lane in numbers):
        raise ValueError(
            f"lanes must be distinct numbers in 0..{num_envs - 1}, or a mask [{num_envs}], got {lanes}."
        )
    return numbers
