"""What a directory keeps beside its rows: how far generator, samplers, writer and recorder are."""

from __future__ import annotations

from typing import Any

import torch

from trl_storages.samplers import OwnSampler, layers_of
from trl_storages.states import Adopt, State, array, entries_of, from_json, nothing, to_json

__all__ = ["progress_of", "resume"]

_ENTRIES = ("cursors", "samplers", "writer", "recorder", "generator")


def progress_of(storage: Any) -> State:
    """Returns the progress of a `ReplayStorage` as JSON."""
    generator = storage._rng
    own = [it for it in layers_of(storage._sampler) if isinstance(it, OwnSampler)]
    return to_json(
        {
            "cursors": storage.episodes.cursors.tolist(),
            "samplers": {type(sampler).__name__: sampler.state() for sampler in own},
            "writer": storage._writer.state(),
            "recorder": storage._recorder.state(),
            "generator": None if generator is None else generator.get_state(),
        }
    )


def resume(storage: Any) -> None:
    """Makes a storage go on from what its directory keeps; parameters are those that it was made with.

    What writer and recorder know holds only with the last row that they wrote: of a writer that was
    killed after it the environments are gone.

    Raises:
        ValueError: the directory is damaged.
    """
    words = storage._storage.kept_state
    if not words:
        return
    try:
        state = from_json(words)
        cursors, samplers, writer, recorder, generator = entries_of("progress", state, _ENTRIES)
        adopts = [_parsed_generator(storage._rng, generator)]
        adopts += [
            sampler.parsed(samplers[type(sampler).__name__])
            for sampler in layers_of(storage._sampler)
            if type(sampler).__name__ in samplers
        ]
        if cursors == storage.episodes.cursors.tolist():
            adopts += [storage._writer.parsed(writer), storage._recorder.parsed(recorder)]
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{storage._storage.path} is damaged: of generator, samplers and recorder it says {error}"
        ) from error
    for adopt in adopts:
        adopt()


def _parsed_generator(generator: Any, state: Any) -> Adopt:
    if generator is None or state is None:
        return nothing
    array("generator", state, torch.uint8, *generator.get_state().shape)
    generator.clone_state().set_state(state)
    return lambda: generator.set_state(state)
