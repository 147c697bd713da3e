"""Saving and loading: what was reloaded goes on exactly like what was saved."""

from __future__ import annotations

import copy
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import TensorDictReplayBuffer

from trl_storages import arguments
from trl_storages.gym import GymRecorder
from trl_storages.replay.batch_files import dump_batches, load_batches
from trl_storages.ring import EpisodeIndex, episodes_of
from trl_storages.rows import (
    RowsCheckpointer,
    field_keys,
    load_rows_state,
    read_rows_dump,
    read_rows_state,
)
from trl_storages.samplers import PERSampler, WrappingSampler
from trl_storages.saved import DumpFolder, SavedState, check_names, check_part, read_part
from trl_storages.writing import EpisodeWriter, num_slots

__all__ = ["CheckpointedBuffer"]

_STATE_FILE = "state.json"
_STOCK_GENERATOR = "rng_state"
_PREFETCH_DIRECTORY = "prefetch"
_TRANSFORMS = "transform.t"
_SIZES = "buffer_metadata.json"
_PARTS = (
    "_storage",
    "_sampler",
    "_writer",
    "_transforms",
    "_batch_size",
    "_consume_after_n_samples",
    "_rng",
    "_prefetch_state",
)


class CheckpointedBuffer(TensorDictReplayBuffer):
    """The part of a `ReplayStorage` that saves all its next samples and writes depend on.

    TorchRL saves storage, sampler, writer, transforms and generator. To these come which environments
    the recorder waits for, and checks that what is loaded fits, made before anything is changed.
    Batches that were drawn ahead are saved as raw tensors, not pickled: loading runs no code.
    """

    _recorder: GymRecorder | None = None

    def _prefetch_in_order(self) -> None:
        """Draws ahead in one thread: draws wait for each other anyway, and more would mix them up."""
        if self._prefetch:
            self._prefetch_executor = ThreadPoolExecutor(max_workers=1)

    def state_dict(self) -> dict[str, Any]:
        """Returns all that the next samples and writes depend on, in tensors and plain values.

        The rows among them are those of the storage, as with TorchRL's: later writes change them, so
        `copy.deepcopy` the state, or save it, before the storage is written again.
        """
        state = super().state_dict()
        state["_recorder"] = None if self._recorder is None else self._recorder.state_dict()
        return state

    def check_state_dict(self, state_dict: Any) -> None:
        """Checks that `load_state_dict` can take a state, without changing anything.

        Raises:
            KeyError, TypeError, ValueError: it is that of a storage of another size, layout, number of
                lanes or kind of sampler; or it is damaged. The message says what is wrong.
        """
        what = "the saved storage"
        saved, index = SavedState(state_dict, what, _PARTS, ("_recorder",)), None
        if isinstance(self._writer, EpisodeWriter):
            index = self._writer.read_state(saved["_writer"])
        else:
            check_part(self._writer, saved["_writer"])
        # TorchRL's replay buffers save the same, but for this.
        saved = SavedState(state_dict, what, (*_PARTS, "_recorder"))
        fields = read_rows_state(self._storage, saved["_storage"])
        check_part(self._sampler, saved["_sampler"])
        if index is not None:
            self._check_fits(index, fields, saved)
        if saved["_recorder"] is not None:
            self._a_recorder().check_state_dict(saved["_recorder"])
        if saved["_batch_size"] is not None:
            saved.integer("_batch_size", 1)
        if saved["_consume_after_n_samples"] is not None:
            raise saved.error("_consume_after_n_samples", "None", saved["_consume_after_n_samples"])
        _read_generator(saved)
        self._check_prefetch(saved)
        self._check_transforms(saved)

    def _check_fits(
        self, index: EpisodeIndex, fields: dict[NestedKey, torch.Tensor], saved: SavedState
    ) -> None:
        """Checks that rows and priorities are those of the episode index."""
        num_rows = num_slots(self._storage, index)
        if saved["_storage"]["_len"] != num_rows:
            raise saved.error(
                "_storage", f"of {num_rows} rows, as the index says", saved["_storage"]["_len"]
            )
        live = index.slots_by_age(torch.arange(len(index)))
        done = fields.get(self._writer.done_key)
        if done is not None and len(live):
            flags = done.reshape(len(done), -1)[live.to(done.device), 0].cpu()
            if len(others := live[flags != index.is_end(live)]):
                raise saved.error(
                    "_writer",
                    f"of the rows, whose {self._writer.done_key!r} ends episodes",
                    f"another in the slots {others[:5].tolist()}",
                )
        state, sampler = saved["_sampler"], self._sampler
        while isinstance(sampler, WrappingSampler):
            state, sampler = state["base"], sampler.base
        if isinstance(sampler, PERSampler) and (
            wrong := sampler.slots_amiss(state["priorities"], live)
        ):
            raise saved.error(
                "_sampler",
                f"of the {len(live)} rows",
                f"priorities without a row, or rows without one, in the slots {wrong[:5]}",
            )

    def _a_recorder(self) -> GymRecorder:
        return self._recorder or GymRecorder(episodes_of(self._storage).num_envs)

    def _check_prefetch(self, saved: SavedState) -> None:
        state = saved["_prefetch_state"]
        if state is None:
            return
        what = "the saved batches drawn ahead"
        ahead = SavedState(state, what, ("version", "capacity", "queue"))
        ahead.integer("version", 1, 1)
        capacity, queue = ahead.integer("capacity"), ahead["queue"]
        if capacity != self._prefetch_cap:
            raise ahead.error("capacity", f"{self._prefetch_cap}, as prefetch is here", capacity)
        if not isinstance(queue, list | tuple) or len(queue) > capacity:
            raise ahead.error(
                "queue", f"a list of at most {capacity} batches", type(queue).__name__
            )
        for item in queue:
            is_pair = isinstance(item, list | tuple) and len(item) == 2
            if not (is_pair and isinstance(item[0], TensorDictBase) and isinstance(item[1], dict)):
                raise ahead.error("queue", "of batches with their infos", type(item).__name__)
            keys = [{*batch.keys(True, True)} for batch in (item[0], queue[0][0])]
            if keys[0] != keys[1]:
                raise ahead.error("queue", "of batches alike", f"{keys[0] ^ keys[1]} in one alone")

    def _check_transforms(self, saved: SavedState) -> None:
        """Tries a state on: only a module itself knows what it takes."""
        before, state = copy.deepcopy(self._transform.state_dict()), saved["_transforms"]
        own = SavedState(state, "the saved state of the transforms", [*before])
        try:
            for key, value in before.items():
                if isinstance(value, torch.Tensor):
                    own.tensor(key, value.dtype, value.shape)
            self._transform.load_state_dict(state)
        except (RuntimeError, AttributeError, IndexError) as error:
            raise own.error("transforms", "that of these transforms", repr(error)) from error
        finally:
            self._transform.load_state_dict(before)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. All of it is checked before anything is changed.

        Raises:
            KeyError, TypeError, ValueError: as `check_state_dict`. Nothing is changed then.
        """
        self.synchronize()
        with self._futures_lock:
            with self._replay_lock:
                self.check_state_dict(state_dict)
            # Draws that are under way take the other lock.
            self._clear_prefetch_queue_locked()
            with self._replay_lock:
                self._load_parts(state_dict)

    def _load_parts(self, state: dict[str, Any]) -> None:
        # The rows first: they may need memory, or space on disk.
        load_rows_state(self._storage, state["_storage"])
        self._sampler.load_state_dict(state["_sampler"])
        self._writer.load_state_dict(state["_writer"])
        self._transform.load_state_dict(state["_transforms"])
        self._batch_size = state["_batch_size"]
        if (generator := _read_generator(state)) is not None:
            self.set_rng(generator)
        self._restore_prefetch_queue_locked(state["_prefetch_state"])
        if state["_recorder"] is not None:
            self._recorder = self._a_recorder()
            self._recorder.load_state_dict(state["_recorder"])
        elif self._recorder is not None:
            self._recorder.reset()

    def dumps(self, path: str | Path, *, progress: bool = False) -> None:
        """Saves all that the next samples and writes depend on. Loading it runs no code.

        Args:
            path: a directory, which may hold an earlier dump.
            progress: whether to show how far the copying of packed rows is.

        Raises:
            RuntimeError: nothing was written to the storage yet.
            ValueError: a field has a name that no file can have. Nothing is written then.
        """
        path, progress = arguments.directory("path", path), arguments.flag("progress", progress)
        with self._futures_lock:
            # Draws that are under way take the other lock.
            self.synchronize()
            with self._replay_lock, self._showing(progress):
                if self._storage.initialized:
                    check_names(field_keys(self._storage))
                self._forget_dump(path)
                super().dumps(path)
                # TorchRL's own file is of no use if the generator is one of a GPU.
                shutil.rmtree(path / _STOCK_GENERATOR, ignore_errors=True)
                ended = None
                if self._recorder is not None:
                    ended = self._recorder.state_dict()["ended"].tolist()
                state = {"ended": ended, "generator": _describe(self._rng)}
                (path / _STATE_FILE).write_text(json.dumps(state))

    def _forget_dump(self, path: Path) -> None:
        """Removes what an earlier dump holds, of which files may be longer or of other parts."""
        # Without it there is no dump, should this be interrupted.
        (path / _STATE_FILE).unlink(missing_ok=True)
        (path / _TRANSFORMS).unlink(missing_ok=True)
        folders = {"storage", "sampler", "writer", _STOCK_GENERATOR, _PREFETCH_DIRECTORY}
        rows = getattr(self._storage, "_storage", None)
        if isinstance(rows, TensorDictBase) and rows.is_memmap():
            folders.discard("storage")  # which may be where the rows are
        for name in folders:
            shutil.rmtree(path / name, ignore_errors=True)

    def loads(self, path: str | Path, *, progress: bool = False) -> None:
        """Restores what `dumps` saved. All of it is read and checked before anything is changed.

        Args:
            path: the directory.
            progress: whether to show how far the copying of packed rows is.

        Raises:
            FileNotFoundError: there is no such directory.
            KeyError, TypeError, ValueError: as `load_state_dict`; or a file is missing, cut or damaged,
                or a link, a pipe, a device or a pickle. Nothing is changed then.
        """
        progress = arguments.flag("progress", progress)
        state = self._read_dump(DumpFolder(path))
        with self._showing(progress):
            self.load_state_dict(state)

    def _read_dump(self, folder: DumpFolder) -> dict[str, Any]:
        """Returns the state that a dump holds, unchecked."""
        state: dict[str, Any] = {
            "_writer": read_part(self._writer, folder, "writer"),
            "_storage": read_rows_dump(self._storage, folder, "storage"),
            "_sampler": read_part(self._sampler, folder, "sampler"),
            "_transforms": folder.weights(_TRANSFORMS) if folder.has(_TRANSFORMS) else {},
        }
        sizes = SavedState(folder.json(_SIZES), _SIZES, ("batch_size", "consume_after_n_samples"))
        state |= {f"_{key}": sizes[key] for key in ("batch_size", "consume_after_n_samples")}
        more = SavedState(folder.json(_STATE_FILE), _STATE_FILE, ("ended", "generator"))
        ended = more["ended"]
        if ended is not None and not (
            isinstance(ended, list) and all(isinstance(flag, bool) for flag in ended)
        ):
            raise more.error("ended", "a list of flags", ended)
        state["_recorder"] = None if ended is None else {"ended": torch.tensor(ended)}
        state["_rng"] = None if more["generator"] is None else _described(more["generator"])
        # Fewer batches may be drawn ahead here than where they were saved: the rest is lost then.
        queue = load_batches(folder.folder(_PREFETCH_DIRECTORY))[: self._prefetch_cap]
        capacity = self._prefetch_cap
        return {**state, "_prefetch_state": {"version": 1, "capacity": capacity, "queue": queue}}

    def _showing(self, progress: bool) -> AbstractContextManager[None]:
        checkpointer = getattr(self._storage, "checkpointer", None)
        if isinstance(checkpointer, RowsCheckpointer):
            return checkpointer.showing(progress)
        return nullcontext()

    def _dump_prefetch_state(self, path: Path, prefetch_state: dict[str, Any]) -> None:
        dump_batches(path / _PREFETCH_DIRECTORY, prefetch_state["queue"])

    def __getstate__(self) -> dict[str, Any]:
        # An iterator that was left halfway can't be pickled, nor is it part of the state. TorchRL's copy
        # of the generator's state is of no use if the generator is one of a GPU.
        state = {**super().__getstate__(), "_iterator": None, "_rng": None}
        # Another process could only repeat the draws of this one.
        is_spawning = get_spawning_popen() is not None
        state["generator__context"] = None if is_spawning else _describe(self._rng)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = state.pop("generator__context")
        super().__setstate__(state)
        self._prefetch_in_order()
        if generator is not None:
            self.set_rng(_read_generator({"_rng": _described(generator)}))


def _describe(generator: torch.Generator | None) -> dict[str, str] | None:
    """Returns device and state of a generator in plain strings."""
    if generator is None:
        return None
    state = generator.get_state()  # on the CPU, wherever the generator is
    return {"device": str(generator.device), "state": bytes(state.tolist()).hex()}


def _described(description: Any) -> tuple[torch.Tensor, str]:
    """Returns state and device of a generator, as TorchRL saves them."""
    saved = SavedState(description, "the saved generator", ("device", "state"))
    try:
        state = bytearray(bytes.fromhex(saved["state"]))
    except (TypeError, ValueError) as error:
        raise saved.error("state", "hexadecimal numbers", repr(error)) from error
    return torch.frombuffer(state, dtype=torch.uint8) if state else torch.empty(0), saved["device"]


def _read_generator(state: Any) -> torch.Generator | None:
    """Makes a generator of a saved state; None if none was saved.

    Raises:
        ValueError: it is damaged, or of a device that is not here.
    """
    if state["_rng"] is None:
        return None
    try:
        saved, device = state["_rng"]
        generator = torch.Generator(device)
        generator.set_state(saved)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the saved generator must be one of a device that is here, and whole: {error}. Nothing was "
            "changed."
        ) from error
    return generator
