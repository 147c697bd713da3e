"""The parts of a storage, saved together: what is loaded goes on exactly like what was saved."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Transform

from trl_storages.gym import GymRecorder
from trl_storages.ring import EpisodeIndex, episodes_of
from trl_storages.rows import Moved, PackedStorage, StockRows, rows_part
from trl_storages.samplers import prioritized_of
from trl_storages.saved import SavedPart, SavedState, as_part
from trl_storages.writing import EpisodeWriter, num_slots

__all__ = ["Parts", "check_drawn_ahead", "fit_drawn_ahead", "read_generator", "saved_generator"]

_WHAT = "the saved storage"
#: The entries of a saved storage that are no parts.
_VALUES = ("_batch_size", "_consume_after_n_samples", "_rng", "_prefetch_state")


class Parts(NamedTuple):
    """The parts of a storage, in the order in which their states are taken over."""

    # The rows first: they may need memory, or space on disk.
    storage: Any
    sampler: Sampler
    writer: Any
    transforms: Transform
    recorder: GymRecorder

    def _saved(self) -> dict[str, SavedPart]:
        return {
            "_storage": rows_part(self.storage),
            "_sampler": as_part(self.sampler),
            "_writer": as_part(self.writer),
            "_transforms": _Transforms(self.transforms),
            "_recorder": self.recorder,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all parts by name."""
        return {name: part.state_dict() for name, part in self._saved().items()}

    def check(self, state: Any) -> SavedState:
        """Checks that the parts can take a state, each by itself and all together.

        Returns:
            the whole state, of which the values are not looked at yet.

        Raises:
            KeyError, TypeError, ValueError: it is that of a storage of another size, layout, number of
                lanes or kind of sampler; or it is damaged. The message says what is wrong.
        """
        parts = self._saved()
        # TorchRL's replay buffers save the same, but for the recorder.
        names = {*parts, *_VALUES} - {"_recorder"}
        saved = SavedState(state, _WHAT, sorted(names), ("_recorder",))
        parts.pop("_writer").check_state_dict(saved["_writer"])
        saved = SavedState(state, _WHAT, sorted(names | {"_recorder"}))
        fitted = self._fitted(state)
        for name, part in parts.items():
            part.check_state_dict(fitted[name] if name == "_storage" else saved[name])
        if isinstance(self.writer, EpisodeWriter):
            self._check_together(self.writer, saved, fitted["_storage"])
        return saved

    def _check_together(
        self, writer: EpisodeWriter, saved: SavedState, saved_rows: dict[str, Any]
    ) -> None:
        """Checks that rows and priorities are those of the episode index."""
        index = writer.read_state(saved["_writer"])
        rows, live = rows_part(self.storage), index.live_slots()
        if isinstance(rows, PackedStorage | StockRows):
            num_rows = num_slots(self.storage, index)
            if saved["_storage"]["_len"] != num_rows:
                must = f"of {num_rows} rows, as the index says"
                raise saved.error("_storage", must, saved["_storage"]["_len"])
            done = rows.read_state(saved_rows).get(writer.done_key)
            if done is not None and len(live):
                _check_ends(done, index, live, writer, saved)
        prioritized, state = prioritized_of(self.sampler), saved["_sampler"]
        while "base" in state:
            state = state["base"]
        if prioritized is not None and (
            wrong := prioritized.slots_amiss(state["priorities"], live)
        ):
            raise saved.error(
                "_sampler",
                f"of the {len(live)} rows",
                f"priorities without a row, or rows without one, in the slots {wrong[:5]}",
            )

    def take(self, state: dict[str, Any], *, progress: bool) -> None:
        """Takes over a state that was checked; `progress` shows how far the copying of rows is."""
        state, prioritized = self._fitted(state), prioritized_of(self.sampler)
        for name, part in self._saved().items():
            part.take_state(state[name], progress=progress)
            if name == "_storage" and prioritized is not None:
                prioritized.attach(self.storage)  # to the files that there are now

    def _fitted(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a state whose writer was checked, with its rows where this storage has room for them.

        A directory has spare slots, so that rows lie elsewhere in it than in memory.
        """
        storage, writer = self.storage, self.writer
        if not (isinstance(storage, PackedStorage) and isinstance(writer, EpisodeWriter)):
            return state
        saved, own = writer.read_state(state["_writer"]), episodes_of(storage).spare_steps
        rows, sampler = state["_storage"], state["_sampler"]
        is_shared = storage.share_next or (isinstance(rows, dict) and "side" in rows)
        if saved.spare_steps == own and not storage.is_durable and not is_shared:
            return state
        index = saved.moved(own)
        moved = Moved(
            index,
            saved.num_slots if saved.spare_steps else storage.max_size,
            saved.live_slots(),
            index.live_slots(),
            saved.num_slots,
            state["_writer"]["_write_count"],
            state["_writer"]["last_trajectory"].cpu().numpy(),
        )
        cursor = index.host_steps.item(0) % index.ring_steps * index.num_envs
        size = index.num_slots if storage.is_durable else None
        return {
            **state,
            "_storage": {**rows, "moved": moved} if isinstance(rows, dict) else rows,
            "_writer": {**state["_writer"], "episodes": index.state_dict(), "_cursor": cursor},
            "_sampler": _moved_priorities(sampler, moved, size),
        }


def _moved_priorities(state: Any, moved: Moved, num_slots: int | None) -> Any:
    """Returns the state of a sampler, of rows that lie elsewhere.

    Args:
        state: what was saved.
        moved: where rows lay and are to lie.
        num_slots: how many there are; None is what the sampler was made for.
    """
    if not isinstance(state, dict):
        return state
    if "base" in state:
        return {**state, "base": _moved_priorities(state["base"], moved, num_slots)}
    old = state.get("priorities")
    if not isinstance(old, torch.Tensor) or old.dtype is not torch.float32:
        return state
    priorities = torch.full((num_slots or state["max_capacity"],), torch.inf)
    if len(moved.old) and bool(old.isfinite().any()):
        priorities[moved.new] = old.cpu()[moved.old]
    return {**state, "priorities": priorities}


def _check_ends(
    done: torch.Tensor,
    index: EpisodeIndex,
    live: torch.Tensor,
    writer: EpisodeWriter,
    saved: SavedState,
) -> None:
    flags = done.reshape(len(done), -1)[live.to(done.device), 0].cpu()
    if len(others := live[flags != index.is_end(live)]):
        raise saved.error(
            "_writer",
            f"of the rows, whose {writer.done_key!r} ends episodes",
            f"another in the slots {others[:5].tolist()}",
        )


class _Transforms(SavedPart):
    """The transforms of a storage: modules, of which only each itself knows what it takes."""

    def __init__(self, module: Transform) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._module.state_dict()
        return state

    def check_state_dict(self, state_dict: Any) -> None:
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


# What is no part: batches that were drawn ahead, and the generator.


def check_drawn_ahead(state: Any, capacity: int) -> None:
    """Checks the batches that were drawn ahead of a saved storage, or None.

    Raises:
        KeyError, TypeError, ValueError: they are damaged, or more are drawn ahead here.
    """
    if state is None:
        return
    ahead = SavedState(state, "the saved batches drawn ahead", ("version", "capacity", "queue"))
    ahead.integer("version", 1, 1)
    if ahead.integer("capacity") != capacity:
        must = f"{capacity}, as prefetch is here"
        raise ahead.error("capacity", must, ahead["capacity"])
    queue = ahead["queue"]
    if not isinstance(queue, Sequence) or len(queue) > capacity:
        raise ahead.error("queue", f"a list of at most {capacity} batches", type(queue).__name__)
    for item in queue:
        is_pair = isinstance(item, list | tuple) and len(item) == 2
        if not (is_pair and isinstance(item[0], TensorDictBase) and isinstance(item[1], dict)):
            raise ahead.error("queue", "of batches with their infos", type(item).__name__)
        keys = [{*batch.keys(True, True)} for batch in (item[0], queue[0][0])]
        if keys[0] != keys[1]:
            raise ahead.error("queue", "of batches alike", f"{keys[0] ^ keys[1]} in one alone")


def fit_drawn_ahead(state: Any, capacity: int) -> None:
    """Leaves out of the batches of a dump those that are more than are drawn ahead here."""
    # What is damaged is left as it is, to be refused.
    match state:
        case {"capacity": int(before), "queue": list() | tuple() as queue} if (
            before >= 0 and type(before) is int
        ):
            state |= {"capacity": capacity, "queue": queue[:capacity]}


def saved_generator(generator: torch.Generator | None) -> tuple[torch.Tensor, str] | None:
    """Returns state and device of a generator, as TorchRL saves them."""
    # The state is on the CPU, wherever the generator is.
    return None if generator is None else (generator.get_state().clone(), str(generator.device))


def read_generator(saved: Any) -> torch.Generator | None:
    """Makes a generator of what `saved_generator` returned.

    Raises:
        ValueError: it is damaged, or of a device that is not here.
    """
    if saved is None:
        return None
    try:
        state, device = saved
        generator = torch.Generator(device)
        generator.set_state(state)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the saved generator must be one of a device that is here, and whole: {error}. Nothing was "
            "changed."
        ) from error
    return generator
