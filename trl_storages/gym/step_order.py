"""Explains the expected arguments when a step comes in another library's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from trl_storages.other_names import STEP_NAMES

__all__ = ["STEP", "says_its_order"]

#: The parts of a step in the order in which `record` takes them: gymnasium's, around the outcome.
STEP = (
    "observations",
    "actions",
    "rewards",
    "terminateds",
    "truncateds",
    "infos",
    "next_observations",
)

Method = TypeVar("Method", bound=Callable[..., Any])


def says_its_order(method: Method) -> Method:
    """Makes a method that writes a step explain its arguments when it is given wrong ones.

    Arguments are examined only after the method has raised an error.

    Args:
        method: takes a `STEP`, or one TensorDict.
    """
    takes_step = method.__code__.co_argcount > 2
    explanation = _of_record if takes_step else _of_add

    @wraps(method)
    def checked(self: Any, *step: Any, **named: Any) -> Any:
        try:
            return method(self, *step, **named)
        except (TypeError, ValueError, KeyError) as error:
            wrong = explanation(step, named)
            if wrong is None:
                raise
            raise TypeError(f"{method.__name__} {wrong}") from error

    return checked  # type: ignore[return-value]


def _of_add(step: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    count = len(step) + len(named)
    if count == 1 and (step or "data" in named):
        return None
    return (
        f"takes one TensorDict, got {count} arguments: what a loop's step returned is written by "
        f"record({', '.join(STEP)})."
    )


def _of_record(step: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with the arguments of a step; None if they are in order."""
    order = f"takes {', '.join(STEP)}, in this order"
    given = {**dict(zip(STEP, step, strict=False)), **named}
    if len(given) == 1 and hasattr(given.get(STEP[0]), "batch_size"):
        return f"{order}, got a TensorDict: write it by extend or add."
    if strange := [name for name in named if name not in STEP]:
        ours = [f"{name} is {STEP_NAMES[name]}" for name in strange if name in STEP_NAMES]
        return f"{order}, got {', '.join(strange)}" + (f": {', '.join(ours)}." if ours else ".")
    missing = [name for name in STEP if name not in given]
    if missing or len(step) + len(named) != len(STEP):
        return (
            f"{order}, got {len(step) + len(named)} arguments. What others write by "
            "add(obs, next_obs, action, reward, done, infos) is "
            "record(obs, action, reward, terminated, truncated, infos, next_obs): an end is either a "
            "terminal state or a truncation."
        )
    infos = given["infos"]
    if infos is None or isinstance(infos, Mapping | list | tuple):
        return None
    return f"{order}: infos must be a dictionary, or a list of them, got {type(infos).__name__}."
