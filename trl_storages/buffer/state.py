"""The state of a replay buffer: everything on which its next writes and samples depend.

All states are checked before one is adopted, so an invalid state changes nothing.
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

_COMPONENT = ("kind", "parameters", "state")
_REST = ("parts", "writer", "recorder", "generator", "cursors")


def component_states(storage: Any) -> State:
    """Returns the state of a `ReplayStorage`, except its transitions."""
    if (prioritized := storage._prioritized) is not None:
        prioritized.priorities_of(storage._storage.view())  # sets priorities of new transitions
    generator = storage._rng
    return {
        "parts": [_component_state(component) for component in storage.components()],
        "writer": storage._writer.state(),
        "recorder": storage._recorder.state(),
        "generator": None if generator is None else generator.get_state(),
        "cursors": storage.episodes.cursors.tolist(),
    }


def prepare_load(storage: Any, state: Any) -> Adopt:
    """Checks a state, and returns a function by which a replay buffer continues from it.

    Raises:
        ValueError, TypeError, KeyError: the state is damaged, or belongs to another buffer.
    """
    rows, rest = required_items("a replay buffer", state, ("rows", "rest"))
    adopt_rest = prepare_load_components(storage, rest)
    # Transitions first, because the disk may be too full for them.
    return all_of(storage._storage.prepare_load(rows, to_json(rest)), adopt_rest)


def prepare_load_components(storage: Any, state: Any, *, reopened: bool = False) -> Adopt:
    """Checks a state, and returns a function by which all but the transitions continues from it.

    A buffer that is `reopened` keeps the parameters of its constructor, and may have other components.
    The states of writer and recorder belong to the last transition that was written. If a killed writer
    wrote more transitions after the state was saved, only their number is adopted.
    """
    parts, writer, recorder, generator, cursors = required_items("a replay buffer", state, _REST)
    components = storage.components()
    if not isinstance(parts, list) or (len(parts) != len(components) and not reopened):
        raise ValueError(f"the state must have {len(components)} components: nothing changed.")
    if reopened:
        adopts = _prepare_load_samplers(components, parts)
    else:
        adopts = [*map(_prepare_load_component, components, parts)]
    adopts.append(_prepare_load_generator(storage, generator))
    if not isinstance(cursors, list) or not all(type(cursor) is int for cursor in cursors):
        raise ValueError("cursors must be a list of integers: nothing changed.")
    if reopened and cursors != (current := storage.episodes.cursors.tolist()):
        count = writer["write_count"] + sum(current) - sum(cursors)
        writer = {**storage._writer.state(), "write_count": count}
        recorder = storage._recorder.state()
    adopts += [storage._writer.prepare_load(writer), storage._recorder.prepare_load(recorder)]
    return all_of(*adopts)


def resume(storage: Any) -> None:
    """Continues from the state in the directory of a replay buffer that was reopened for writing.

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


def _component_state(component: Any) -> State:
    is_sampler = isinstance(component, ReplaySampler)
    return {
        "kind": type(component).__name__,
        "parameters": {name: component.__dict__[name] for name in _parameters(component)},
        "state": component.state() if is_sampler else dict(component.state_dict() or {}),
    }


def _parameters(component: Any) -> dict[str, Setting]:
    """Returns the settings of a component that its state contains."""
    settings = [(name, getattr(type(component), name, None)) for name in component.__dict__]
    return {name: it for name, it in settings if isinstance(it, Setting) and it.is_saved}


def _prepare_load_samplers(components: list[Any], parts: list[Any]) -> list[Adopt]:
    """Checks the states of samplers, each for the sampler of the same class, and ignores all others."""
    states: dict[str, list[Any]] = {}
    for part in parts:
        kind, _, state = required_items("a component", part, _COMPONENT)
        states.setdefault(kind, []).append(state)
    adopts = []
    for sampler in components:
        same_kind = states.get(type(sampler).__name__)
        if same_kind and isinstance(sampler, ReplaySampler):
            adopts.append(sampler.prepare_load(same_kind.pop(0)))
    return adopts


def _prepare_load_component(component: Any, state: Any) -> Adopt:
    kind, values, state = required_items("a component", state, _COMPONENT)
    if kind != type(component).__name__:
        raise ValueError(
            f"the state must belong to a {type(component).__name__}, got {validation.shown(kind)}: "
            "nothing changed."
        )
    is_sampler = isinstance(component, ReplaySampler)
    prepare = component.prepare_load if is_sampler else partial(_prepare_load_module, component)
    adopt_state = prepare(state)
    parameters, trial = _parameters(component), object.__new__(type(component))
    for name, value in zip(parameters, required_items(kind, values, parameters), strict=True):
        if isinstance(value, torch.Tensor):
            raise ValueError(f"{name} must not be a tensor: nothing changed.")
        parameters[name].__set__(trial, value)
    return all_of(partial(component.__dict__.update, trial.__dict__), adopt_state)


def _prepare_load_module(module: Any, state: Any) -> Adopt:
    """Checks that a state has the dtypes and shapes of a module's current state."""
    current = module.state_dict() or {}
    values = required_items(type(module).__name__, state, current)
    for (name, expected), value in zip(current.items(), values, strict=True):
        if isinstance(expected, torch.Tensor):
            array(name, value, expected.dtype, *expected.shape)
        else:
            validation.instance(name, value, type(expected))
    return partial(module.load_state_dict, state) if current else all_of()


def _prepare_load_generator(storage: Any, state: Any) -> Adopt:
    if state is None:
        return all_of()
    generator = torch.Generator()
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"the state of the generator is damaged: {error}") from None
    if storage._rng is None:
        return partial(storage.set_rng, generator)
    return partial(storage._rng.set_state, state)
