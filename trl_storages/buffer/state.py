"""The states of samplers, transforms and random numbers, on which the next samples depend."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from trl_storages import validation
from trl_storages.samplers import ReplaySampler
from trl_storages.serialization import Adopt, State, all_of, array, required_items
from trl_storages.settings import Setting

__all__ = [
    "component_state",
    "prepare_load_component",
    "prepare_load_generator",
    "prepare_load_samplers",
]

_NAMES = ("kind", "parameters", "state")


def component_state(component: Any) -> State:
    """Returns the class, the parameters and the state of a sampler or transform."""
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


def prepare_load_samplers(components: list[Any], parts: list[Any]) -> list[Adopt]:
    """Checks the states of samplers, each for the sampler of the same class, and ignores all others."""
    states: dict[str, list[Any]] = {}
    for part in parts:
        kind, _, state = required_items("a component", part, _NAMES)
        states.setdefault(kind, []).append(state)
    adopts = []
    for sampler in components:
        same_kind = states.get(type(sampler).__name__)
        if same_kind and isinstance(sampler, ReplaySampler):
            adopts.append(sampler.prepare_load(same_kind.pop(0)))
    return adopts


def prepare_load_component(component: Any, state: Any) -> Adopt:
    """Checks a state that `component_state` returned, and returns a function that adopts it.

    Raises:
        ValueError, TypeError: the state is damaged, or belongs to another component.
    """
    kind, values, state = required_items("a component", state, _NAMES)
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


def prepare_load_generator(generator: torch.Generator, state: Any) -> Adopt:
    """Checks the state of random numbers, and returns a function that adopts it."""
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"the state of the generator is damaged: {error}") from None
    return partial(generator.set_state, state)
