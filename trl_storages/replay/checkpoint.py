"""Saving and loading: what was reloaded goes on exactly like what was saved."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import torch
from torchrl.data import TensorDictReplayBuffer

from trl_storages.episodes import episodes_of
from trl_storages.gym import GymRecorder
from trl_storages.replay.batch_files import dump_batches, load_batches
from trl_storages.storages import RowsCheckpointer
from trl_storages.writers import EpisodeWriter

__all__ = ["CheckpointedBuffer"]

_STATE_FILE = "state.json"
_STOCK_GENERATOR = "rng_state"
_PREFETCH_DIRECTORY = "prefetch"


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
        """Returns all that the next samples and writes depend on, in tensors and plain values."""
        state = super().state_dict()
        state["_recorder"] = None if self._recorder is None else self._recorder.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: the state is that of a storage of another size, layout or number of lanes.
                Nothing is changed then.
        """
        if isinstance(self._writer, EpisodeWriter):
            self._writer.check_state_dict(state_dict["_writer"])
        super().load_state_dict(state_dict)
        self._restore_recorder(state_dict.get("_recorder"))

    def dumps(self, path: str | Path, *, progress: bool = False) -> None:
        """Saves all that the next samples and writes depend on. Loading it runs no code.

        Args:
            path: a directory, which may hold an earlier dump.
            progress: whether to show how far the copying of packed rows is.
        """
        path = Path(path)
        with self._futures_lock:
            # Draws that are under way take the other lock.
            self.synchronize()
            with self._replay_lock, self._showing(progress):
                super().dumps(path)
                # TorchRL's own file is of no use if the generator is one of a GPU.
                shutil.rmtree(path / _STOCK_GENERATOR, ignore_errors=True)
                ended = None
                if self._recorder is not None:
                    ended = self._recorder.state_dict()["ended"].tolist()
                state = {"ended": ended, "generator": _describe(self._rng)}
                (path / _STATE_FILE).write_text(json.dumps(state))

    def loads(self, path: str | Path, *, progress: bool = False) -> None:
        """Restores what `dumps` saved.

        Args:
            path: the directory.
            progress: whether to show how far the copying of packed rows is.

        Raises:
            FileNotFoundError: there is no such directory.
            ValueError: as `load_state_dict`; or the directory holds a pickle.
        """
        path = Path(path)
        if not path.is_dir():
            raise FileNotFoundError(f"there must be a directory that dumps() wrote, got {path}.")
        _refuse_pickles(path)
        if isinstance(self._writer, EpisodeWriter):
            self._writer.check_dump(path / "writer")
        with self._showing(progress):
            super().loads(path)
        state = json.loads((path / _STATE_FILE).read_text())
        self._restore_recorder(None if state["ended"] is None else {"ended": state["ended"]})
        if state["generator"] is not None:
            self.set_rng(_generator(state["generator"]))

    def _showing(self, progress: bool) -> AbstractContextManager[None]:
        checkpointer = getattr(self._storage, "checkpointer", None)
        if isinstance(checkpointer, RowsCheckpointer):
            return checkpointer.showing(progress)
        return nullcontext()

    def _restore_recorder(self, state: dict[str, Any] | None) -> None:
        if self._recorder is None and state is not None:
            self._recorder = GymRecorder(episodes_of(self._storage).num_envs)
        if self._recorder is not None and state is not None:
            self._recorder.load_state_dict(state)
        elif self._recorder is not None:
            self._recorder.reset()

    def _dump_prefetch_state(self, path: Path, prefetch_state: dict[str, Any]) -> None:
        dump_batches(path / _PREFETCH_DIRECTORY, prefetch_state["queue"])

    def _load_prefetch_state(self, path: Path) -> dict[str, Any] | None:
        # Fewer batches may be drawn ahead here than where they were saved: the rest is lost then.
        queue = load_batches(path / _PREFETCH_DIRECTORY)[: self._prefetch_cap]
        return {"version": 1, "capacity": self._prefetch_cap, "queue": queue}

    def __getstate__(self) -> dict[str, Any]:
        # An iterator that was left halfway can't be pickled, nor is it part of the state, nor is the
        # short way to rows that are elsewhere then. TorchRL's copy of the generator's state is of no use
        # if the generator is one of a GPU.
        state = {**super().__getstate__(), "_iterator": None, "_rng": None, "_steps": None}
        # Another process could only repeat the draws of this one.
        is_spawning = get_spawning_popen() is not None
        state["generator__context"] = None if is_spawning else _describe(self._rng)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = state.pop("generator__context")
        super().__setstate__(state)
        self._prefetch_in_order()
        if generator is not None:
            self.set_rng(_generator(generator))


def _refuse_pickles(path: Path) -> None:
    # TorchRL reads directories of tensors in the way in which tensordict also opens pickles.
    for planted in (*path.rglob("*.pickle"), path / _STOCK_GENERATOR):
        if planted.exists():
            raise ValueError(
                f"{path} must be what dumps() wrote, which has no {planted.relative_to(path)}: it may be "
                "a pickle, whose loading runs code; delete it if you know better. Nothing was changed."
            )


def _describe(generator: torch.Generator | None) -> dict[str, str] | None:
    """Returns device and state of a generator in plain strings."""
    if generator is None:
        return None
    state = generator.get_state()  # on the CPU, wherever the generator is
    return {"device": str(generator.device), "state": bytes(state.tolist()).hex()}


def _generator(description: dict[str, str]) -> torch.Generator:
    """Makes the generator that `_describe` described."""
    generator = torch.Generator(description["device"])
    state = torch.tensor(list(bytes.fromhex(description["state"])), dtype=torch.uint8)
    generator.set_state(state)
    return generator
