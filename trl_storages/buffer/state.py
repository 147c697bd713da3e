"""The state of a storage: all that its next writes and draws depend on.

All components are checked before any state is adopted, so a rejected state changes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from trl_storages import validation
from trl_storages.samplers import ReplaySampler
from trl_storages.serialization import (
    Adopt,
    State,
    all_of,
    array,
    from_json,
    required_items,
    to_json,
)
from trl_storages.settings import Setting

__all__ = ["component_states", "prepare_load", "prepare_load_components", "resume"]

_REST = ("parts", "writer", "recorder", "generator", "cursors")


def component_states(storage: Any) -> State:
    """Returns the state of all of a `ReplayStorage` but its rows."""
    if (prioritized := storage._prioritized) is not None:
        prioritized.priorities_of(storage._storage.view())  # rows that are new get their priorities
    generator = storage._rng
    return {
        "parts": [_component_state(part) for part in storage.components()],
        "writer": storage._writer.state(),
        "recorder": storage._recorder.state(),
        "generator": None if generator is None else generator.get_state(),
        "cursors": storage.episodes.cursors.tolist(),
    }


def prepare_load(storage: Any, state: Any) -> Adopt:
    """Returns a function that makes a storage go on from a state.

    Raises:
        ValueError, TypeError, KeyError: the state is damaged, or of another storage.
    """
    rows, rest = required_items("a storage", state, ("rows", "rest"))
    adopt_rest = prepare_load_components(storage, rest)
    # Rows first, as there may be no room for them on the disk.
    return all_of(storage._storage.prepare_load(rows, to_json(rest)), adopt_rest)


def prepare_load_components(storage: Any, state: Any, *, reopened: bool = False) -> Adopt:
    """Returns a function that makes all but the rows go on from a state; see `prepare_load`.

    What is `reopened` has the parameters that it is made with, and may have other parts. What writer and
    recorder know holds with the last row that they wrote only: of a writer that was killed after it the
    environments are gone, and the count of rows alone goes on.
    """
    parts, writer, recorder, generator, cursors = required_items("a storage", state, _REST)
    own = storage.components()
    if not isinstance(parts, list) or (len(parts) != len(own) and not reopened):
        raise ValueError(
            f"the state must be of {len(own)} samplers and transforms: nothing changed."
        )
    pairs = zip(own, parts, strict=not reopened)
    adopts = [_prepare_load_component(part, its, reopened) for part, its in pairs]
    adopts.append(_prepare_load_generator(storage, generator))
    if not isinstance(cursors, list) or not all(type(it) is int for it in cursors):
        raise ValueError("cursors must be a list of whole numbers: nothing changed.")
    if reopened and cursors != (now := storage.episodes.cursors.tolist()):
        count = writer["write_count"] + sum(now) - sum(cursors)
        writer = {**storage._writer.state(), "write_count": count}
        recorder = storage._recorder.state()
    adopts += [storage._writer.prepare_load(writer), storage._recorder.prepare_load(recorder)]
    return all_of(*adopts)


def resume(storage: Any) -> None:
    """Makes a storage that was reopened to write go on from what its directory keeps.

    Raises:
        ValueError: the directory is damaged.
    """
    words = storage._storage.backend.state
    if not words or not storage._storage.backend.is_writer:
        return
    try:
        adopt = prepare_load_components(storage, from_json(words), reopened=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{storage._storage.path} is damaged: {error}") from error
    adopt()


# Samplers and transforms


def _component_state(part: Any) -> State:
    return {
        "kind": type(part).__name__,
        "parameters": {name: part.__dict__[name] for name in _parameters(part)},
        "state": part.state() if isinstance(part, ReplaySampler) else dict(part.state_dict() or {}),
    }


def _parameters(part: Any) -> dict[str, Setting]:
    """Returns the settings of a component that its state contains."""
    settings = [(name, getattr(type(part), name, None)) for name in part.__dict__]
    return {name: it for name, it in settings if isinstance(it, Setting) and it.is_saved}


def _prepare_load_component(part: Any, state: Any, reopened: bool) -> Adopt:
    kind, values, state = required_items("a part", state, ("kind", "parameters", "state"))
    is_own, is_same = isinstance(part, ReplaySampler), kind == type(part).__name__
    if reopened:
        return part.prepare_load(state) if is_own and is_same else all_of()
    if not is_same:
        raise ValueError(
            f"the state must be of a {type(part).__name__}, got {validation.shown(kind)}: "
            "nothing changed."
        )
    adopt_state = part.prepare_load(state) if is_own else _prepare_load_module(part, state)
    parameters, trial = _parameters(part), object.__new__(type(part))
    for name, value in zip(parameters, required_items(kind, values, parameters), strict=True):
        if isinstance(value, torch.Tensor):
            raise ValueError(f"{name} must be no tensor: nothing changed.")
        parameters[name].__set__(trial, value)
    return all_of(partial(part.__dict__.update, trial.__dict__), adopt_state)


def _prepare_load_module(part: Any, state: Any) -> Adopt:
    """Parses the state of a part of TorchRL's, or of the user's own, that must be as it is now."""
    own = part.state_dict() or {}
    values = required_items(type(part).__name__, state, own)
    for (name, now), value in zip(own.items(), values, strict=True):
        if isinstance(now, torch.Tensor):
            array(name, value, now.dtype, *now.shape)
        else:
            validation.instance(name, value, type(now))
    return partial(part.load_state_dict, state) if own else all_of()


def _prepare_load_generator(storage: Any, state: Any) -> Adopt:
    if state is None:
        return all_of()
    generator = torch.Generator()
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"generator must be whole, got another: {error}") from None
    if storage._rng is None:
        return partial(storage.set_rng, generator)
    return partial(storage._rng.set_state, state)
