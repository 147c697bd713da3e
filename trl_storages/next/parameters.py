"""Parameters of parts: checked where they are set, and read and set through the storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl_storages import arguments

__all__ = ["Checked", "Forwarded", "unit_interval"]


class Checked:
    """An attribute of a part that is checked whenever it is set."""

    def __init__(self, check: Callable[..., Any], *choices: Any, **bounds: Any) -> None:
        self._check = check, choices, bounds

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    # The value is in the instance's __dict__ under the same name, so reading it needs no __get__.

    def __set__(self, part: Any, value: Any) -> None:
        check, choices, bounds = self._check
        part.__dict__[self._name] = check(self._name, value, *choices, **bounds)


class Forwarded:
    """An attribute of a storage that its sampler and transforms have; setting it sets all of them."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, storage: Any, owner: type) -> Any:
        if storage is None:
            return self
        # That of returns is read where goals have one too.
        return getattr(self._holders(storage)[-1], self._name)

    def __set__(self, storage: Any, value: Any) -> None:
        with storage._replay_lock:
            for part in self._holders(storage):
                setattr(part, self._name, value)

    def _holders(self, storage: Any) -> list[Any]:
        found = [part for part in storage.parts() if isinstance(_of(part, self._name), Checked)]
        if not found:
            raise AttributeError(
                f"no part of this storage has {self._name!r}: make it with {self._name}=, or with a "
                "sampler or transform that has it."
            )
        return found


def _of(part: Any, name: str) -> Any:
    return getattr(type(part), name, None)


def unit_interval(name: str, value: Any) -> float:
    """Returns a number from 0 to 1."""
    return arguments.number(name, value, at_least=0, at_most=1)
