"""Saves and loads all parts of a storage together, so that a loaded one continues identically.

Letters: E environments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torchrl.envs.transforms import Transform

from trl_storages.ring import EpisodeIndex
from trl_storages.rows import Moved, check_writable
from trl_storages.samplers import UniformSampler, layers_of, prioritized_of
from trl_storages.saved.parts import SavedPart, SavedState, as_part

__all__ = [
    "load_state",
    "read_generator",
    "saved_generator",
    "state_of",
]

_WHAT = "the saved storage"
#: The entries of a saved storage that are not parts.
_VALUES = ("_batch_size", "_rng")


def _parts(storage: Any) -> dict[str, SavedPart]:
    """Returns the parts of a `ReplayStorage` by name, in the order in which their states are loaded."""
    # Rows first: they are the ones that may run out of memory or disk space.
    return {
        "_storage": storage._storage,
        "_sampler": as_part(storage._sampler),
        "_writer": as_part(storage._writer),
        "_transforms": _Transforms(storage._transform),
        "_recorder": storage._recorder,
    }


def state_of(storage: Any) -> dict[str, Any]:
    """Returns the states of all parts by name, and everything else the next samples depend on."""
    if (prioritized := prioritized_of(storage._sampler)) is not None:
        prioritized.attach(storage._storage)  # picks up what the last refresh read
    return {
        **{name: part.state_dict() for name, part in _parts(storage).items()},
        "_batch_size": storage.batch_size,
        "_rng": saved_generator(storage._rng),
    }


def _check_state(storage: Any, state: Any) -> dict[str, Any]:
    """Checks that the parts of a storage can load a state, each by itself and all together.

    Returns:
        the state, with its rows mapped to this storage's slots.

    Raises:
        KeyError, TypeError, ValueError: the state is damaged, or from a storage of another size,
            layout, number of lanes or kind of sampler. The message says what is wrong.
    """
    parts = _parts(storage)
    saved = SavedState(state, _WHAT, sorted({*parts, *_VALUES}))
    # First, as the other parts differ too if the storage is of another size.
    index = storage._writer.read_state(saved["_writer"])
    for name in ("_sampler", "_transforms", "_recorder"):
        parts[name].check_state(saved[name])
    fitted = _fitted(storage, state, index) if isinstance(saved["_storage"], Mapping) else state
    parts["_storage"].check_state(fitted["_storage"])
    _check_together(storage, saved, fitted["_storage"], index)
    if saved["_batch_size"] is not None:
        saved.integer("_batch_size", 1)
    read_generator(saved["_rng"])
    return fitted


def _layers_in(state: Any) -> list[Any]:
    """Returns the states of a sampler and of those it wraps, as `layers_of` orders them."""
    states = [state]
    while isinstance(states[-1], Mapping) and "base" in states[-1]:
        states.append(states[-1]["base"])
    return states


def load_state(storage: Any, state: Any, *, progress: bool = False) -> None:
    """Loads a state after checking all of it; `progress` shows a progress bar."""
    check_writable(storage._storage)
    with storage._futures_lock:
        # Draws ahead need the replay lock, so wait for them before taking it.
        storage.synchronize()
        with storage._replay_lock:
            fitted = _check_state(storage, state)
            _take(storage, fitted, progress)


def _take(storage: Any, state: dict[str, Any], progress: bool) -> None:
    storage._clear_prefetch_queue_locked()
    prioritized = prioritized_of(storage._sampler)
    for name, part in _parts(storage).items():
        part.take_state(state[name], progress=progress)
        if name == "_storage" and prioritized is not None:
            prioritized.attach(storage._storage)  # loading rows may have created the files
    storage._batch_size = state["_batch_size"]
    if (generator := read_generator(state["_rng"])) is not None:
        storage.set_rng(generator)


def _check_together(
    storage: Any, saved: SavedState, saved_rows: dict[str, Any], index: EpisodeIndex
) -> None:
    """Checks that rows and priorities match the saved episode index."""
    writer, live = storage._writer, index.live_slots()
    if saved["_storage"]["_len"] != len(index):
        must = f"of {len(index)} rows, as the index says"
        raise saved.error("_storage", must, saved["_storage"]["_len"])
    done = storage._storage.read_state(saved_rows).get(writer.done_key)
    if done is not None and len(live):
        flags = done.reshape(len(done), -1)[live.to(done.device), 0].cpu()
        if len(others := live[flags != index.is_end(live)]):
            must = f"of the rows, whose {writer.done_key!r} ends episodes"
            got = f"another in the slots {others[:5].tolist()}"
            raise saved.error("_writer", must, got)
    prioritized, state = prioritized_of(storage._sampler), saved["_sampler"]
    while "base" in state:
        state = state["base"]
    if isinstance(layers_of(storage._sampler)[-1], UniformSampler) and "left" in state:
        lane, step = state["left"].cpu().unbind(1)
        if not bool((lane < index.num_envs).all()) or bool(
            (step >= index.num_steps_written[lane]).any()
        ):
            raise saved.error("_sampler", "of an epoch over the rows", "rows that were not written")
    if prioritized:
        # A directory has spare slots.
        size = index.num_slots if index.spare_steps else state["max_capacity"]
        if (found := len(state["priorities"])) != size:
            raise saved.error("_sampler", f"of {size} slots, as the rows are", found)
        if wrong := prioritized.inconsistent_slots(state["priorities"], live):
            got = f"priorities without a row, or rows without one, in the slots {wrong[:5]}"
            raise saved.error("_sampler", f"of the {len(live)} rows", got)


def _fitted(whole: Any, state: dict[str, Any], saved: EpisodeIndex) -> dict[str, Any]:
    """Maps the rows of a state to this storage's slots.

    A directory has spare slots, so its rows are in other slots than in memory.

    Args:
        whole: the `ReplayStorage`, of packed rows.
        state: fully checked except for the rows.
        saved: the episode index in it.
    """
    storage, rows, spare = whole._storage, state["_storage"], whole.episodes.spare_steps
    is_alone = not (storage.is_durable or storage.share_next or "side" in rows)
    if saved.spare_steps == spare and is_alone:
        return state
    index = saved.moved(spare)
    moved = Moved(
        index,
        saved,
        saved.num_slots if saved.spare_steps else storage.max_size,
        saved.live_slots(),
        index.live_slots(),
        state["_writer"]["_write_count"],
        state["_writer"]["last_trajectory"].cpu().numpy(),
    )
    cursor = index.ring.slots_at(index.host_steps.item(0), 0)
    sampler = state["_sampler"]
    if prioritized_of(whole._sampler) is not None:
        sampler = _moved_priorities(sampler, moved, storage.is_durable)
        own = _layers_in(sampler)[-1]
        # Slots without one are as those of new rows.
        largest = own["largest"]
        every = own["priorities"].nan_to_num(posinf=largest or 1.0)
        moved = moved._replace(priorities=(every, largest))
    return {
        **state,
        "_storage": {**rows, "moved": moved},
        "_writer": {**state["_writer"], "episodes": index.state_dict(), "_cursor": cursor},
        "_sampler": sampler,
    }


def _moved_priorities(state: dict[str, Any], moved: Moved, is_durable: bool) -> dict[str, Any]:
    """Returns the state of a prioritized sampler for rows that moved to other slots."""
    if "base" in state:
        return {**state, "base": _moved_priorities(state["base"], moved, is_durable)}
    old = state["priorities"].cpu()
    size = moved.episodes.num_slots if is_durable else state["max_capacity"]
    priorities = torch.full((size,), torch.inf)
    if len(moved.old) and bool(old.isfinite().any()):
        priorities[moved.new] = old[moved.old]
    return {**state, "priorities": priorities}


class _Transforms(SavedPart):
    """The transforms of a storage. A state is checked by loading it and restoring the old one."""

    def __init__(self, module: Transform) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return self._module.state_dict()

    def check_state(self, state_dict: Any) -> None:
        before = copy.deepcopy(self._module.state_dict())
        own = SavedState(state_dict, "the saved state of the transforms", [*before])
        try:
            for key, value in before.items():
                if isinstance(value, torch.Tensor):
                    own.tensor(key, value.dtype, value.shape)
            self._module.load_state_dict(state_dict)
        except (RuntimeError, AttributeError, IndexError) as error:
            raise own.error("transforms", "that of these transforms", repr(error)) from error
        finally:
            self._module.load_state_dict(before)

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        self._module.load_state_dict(state)


# The generator.


def saved_generator(generator: torch.Generator | None) -> tuple[torch.Tensor, str] | None:
    """Returns a generator's state and device, in TorchRL's format."""
    # The state is a CPU tensor for any device.
    return None if generator is None else (generator.get_state().clone(), str(generator.device))


def read_generator(saved: Any) -> torch.Generator | None:
    """Restores a generator from what `saved_generator` returned.

    Raises:
        ValueError: it is damaged, or its device is not available.
    """
    if saved is None:
        return None
    try:
        state, device = saved
        generator = torch.Generator(device)
        generator.set_state(state)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the saved generator must be whole, and of a device here: {error}. Nothing was changed."
        ) from error
    return generator
