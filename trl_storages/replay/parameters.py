"""Parameters of parts, read and set through the storage."""

from __future__ import annotations

from typing import Any

from trl_storages.attributes import Checked

__all__ = ["PARAMETERS", "Parameter"]

#: Their names.
PARAMETERS: set[str] = set()


class Parameter:
    """An attribute of a storage that its samplers and transforms have; setting it sets all of them.

    It counts from the next batch on that is drawn.
    """

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        PARAMETERS.add(name)

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
        found = [part for part in storage.parts() if self._name in _names(part)]
        if not found:
            raise AttributeError(
                f"no part of this storage has {self._name!r}: make it with {self._name}=, or with a "
                "sampler or transform that has it."
            )
        return found


def _names(part: Any) -> set[str]:
    """Returns the parameters of a part."""
    kinds = type(part).__mro__
    return {name for kind in kinds for name, it in vars(kind).items() if isinstance(it, Checked)}
