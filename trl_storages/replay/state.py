"""The state of a storage: all that its next writes and draws depend on.

All parts are parsed before any is adopted, so what is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trl_storages import arguments
from trl_storages.arguments import Checked
from trl_storages.samplers import OwnSampler
from trl_storages.states import Adopt, State, array, entries_of, from_json, nothing, to_json
from trl_storages.transforms import ReplayTransform

__all__ = ["PARAMETERS", "Parameter", "parsed", "parsed_rest", "rest_of", "resume", "state_of"]

_ALL = ("rows", "rest")
_REST = ("parts", "writer", "recorder", "generator", "batch_size", "cursors")


def state_of(storage: Any) -> State:
    """Returns the state of a `ReplayStorage`. Its rows may share the memory of the storage."""
    rest = rest_of(storage)
    return {"rows": storage._storage.state(), "rest": rest}


def rest_of(storage: Any) -> State:
    """Returns the state of all but the rows."""
    if (prioritized := storage._prioritized) is not None:
        prioritized.priorities_of(storage._storage)  # rows that are new get their priorities
    generator = storage._rng
    return {
        "parts": [_state_of_part(part) for part in storage.parts()],
        "writer": storage._writer.state(),
        "recorder": storage._recorder.state(),
        "generator": None if generator is None else generator.get_state(),
        "batch_size": storage.batch_size,
        "cursors": storage.episodes.cursors.tolist(),
    }


def parsed(storage: Any, state: Any) -> Adopt:
    """Returns a function that makes a storage go on from a state.

    Raises:
        ValueError, TypeError, KeyError: the state is damaged, or of another storage.
    """
    rows, rest = entries_of("a storage", state, _ALL)
    adopt_rest = parsed_rest(storage, rest)
    adopt_rows = storage._storage.parsed(rows, to_json(rest))

    def adopt() -> None:
        adopt_rows()  # first, as there may be no room for them on the disk
        adopt_rest()

    return adopt


def parsed_rest(storage: Any, state: Any, *, reopened: bool = False) -> Adopt:
    """Returns a function that makes all but the rows go on from a state; see `parsed`.

    What is `reopened` has the parameters that it is made with, and may have other parts. What writer and
    recorder know holds with the last row that they wrote only: of a writer that was killed after it the
    environments are gone.
    """
    rest = entries_of("a storage", state, _REST)
    parts, writer, recorder, generator, batch_size, cursors = rest
    own = storage.parts()
    if not isinstance(parts, list) or (len(parts) != len(own) and not reopened):
        raise ValueError(
            f"the state must be of {len(own)} samplers and transforms: nothing changed."
        )
    adopts = [
        _parsed_part(part, its, reopened=reopened)
        for part, its in zip(own, parts, strict=not reopened)
    ]
    adopts.append(_parsed_generator(storage, generator))
    if not isinstance(cursors, list) or not all(type(it) is int for it in cursors):
        raise ValueError("cursors must be a list of whole numbers: nothing changed.")
    if not reopened or cursors == storage.episodes.cursors.tolist():
        adopts += [storage._writer.parsed(writer), storage._recorder.parsed(recorder)]
    batch_size = arguments.optional(arguments.integer, "batch_size", batch_size, at_least=1)

    def adopt() -> None:
        for each in adopts:
            each()
        if not reopened:
            storage._batch_size = batch_size

    return adopt


def resume(storage: Any) -> None:
    """Makes a storage that was reopened to write go on from what its directory keeps.

    Raises:
        ValueError: the directory is damaged.
    """
    words = storage._storage.kept_state
    if not words or not storage._storage.writes:
        return
    try:
        adopt = parsed_rest(storage, from_json(words), reopened=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{storage._storage.path} is damaged: {error}") from error
    adopt()


def _state_of_part(part: Any) -> State:
    is_own = isinstance(part, OwnSampler | ReplayTransform)
    return {
        "kind": type(part).__name__,
        "parameters": {name: part.__dict__[name] for name in _parameters(part)},
        "state": part.state() if is_own else dict(part.state_dict() or {}),
    }


def _parsed_part(part: Any, state: Any, *, reopened: bool) -> Adopt:
    kind, parameters, state = entries_of("a part", state, ("kind", "parameters", "state"))
    is_own = isinstance(part, OwnSampler | ReplayTransform)
    is_same = isinstance(kind, str) and kind == type(part).__name__
    if reopened and not (is_same and is_own):
        return nothing
    if not is_same:
        raise ValueError(
            f"the state must be of a {type(part).__name__}, got {arguments.shown(kind)}: nothing changed."
        )
    names = _parameters(part)
    trial = object.__new__(type(part))
    for name, value in zip(names, entries_of(kind, parameters, names), strict=True):
        if isinstance(value, torch.Tensor):
            raise ValueError(f"{name} must be no tensor: nothing changed.")
        _parameter(part, name).__set__(trial, value)
    adopt_rest = part.parsed(state) if is_own else _parsed_other(part, state)

    def adopt() -> None:
        if not reopened:
            part.__dict__.update({name: trial.__dict__[name] for name in names})
        adopt_rest()

    return adopt


def _parameters(part: Any) -> list[str]:
    """Returns the names of the parameters of a part."""
    return [name for name in part.__dict__ if isinstance(_parameter(part, name), Checked)]


def _parameter(part: Any, name: str) -> Any:
    return getattr(type(part), name, None)


def _parsed_other(part: Any, state: Any) -> Adopt:
    """Parses the state of a part of TorchRL's, or of the user's own, that must be as it is now."""
    own = part.state_dict() or {}
    values = entries_of(type(part).__name__, state, [*own])
    for (name, now), value in zip(own.items(), values, strict=True):
        if isinstance(now, torch.Tensor):
            array(name, value, now.dtype, *now.shape)
        elif type(value) is not type(now):
            kind = type(now).__name__
            raise ValueError(
                f"{name} must be {kind}, got {arguments.shown(value)}: nothing changed."
            )
    load: Callable[[Any], Any] = part.load_state_dict
    return (lambda: load(state)) if own else nothing


def _parsed_generator(storage: Any, state: Any) -> Adopt:
    if state is None:
        return nothing
    generator = torch.Generator()
    array("generator", state, torch.uint8, *generator.get_state().shape)
    try:
        generator.set_state(state)
    except RuntimeError as error:
        raise ValueError(f"generator must be whole, got another: {error}") from None

    def adopt() -> None:
        if storage._rng is None:
            storage.set_rng(generator)
        else:
            storage._rng.set_state(state)

    return adopt


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
