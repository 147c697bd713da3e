"""Saving and loading: what was reloaded goes on exactly like what was saved."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

from torchrl.data import TensorDictReplayBuffer

from trl_storages.batch_files import dump_batches, load_batches
from trl_storages.episodes import episodes_of
from trl_storages.gym import GymRecorder
from trl_storages.writers import EpisodeWriter

__all__ = ["CheckpointedBuffer"]

_RECORDER_FILE = "recorder.json"
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

    def dumps(self, path: str | Path) -> None:
        """Saves all that the next samples and writes depend on. Loading it runs no code.

        Args:
            path: a directory, which may hold an earlier dump.
        """
        super().dumps(path)
        if self._recorder is not None:
            ended = self._recorder.state_dict()["ended"].tolist()
            (Path(path) / _RECORDER_FILE).write_text(json.dumps({"ended": ended}))
        else:
            (Path(path) / _RECORDER_FILE).unlink(missing_ok=True)

    def loads(self, path: str | Path) -> None:
        """Restores what `dumps` saved.

        Raises:
            FileNotFoundError: there is no such directory.
            ValueError: as `load_state_dict`.
        """
        path = Path(path)
        if not path.is_dir():
            raise FileNotFoundError(f"there must be a directory that dumps() wrote, got {path}.")
        if isinstance(self._writer, EpisodeWriter):
            self._writer.check_dump(path / "writer")
        super().loads(path)
        recorder = path / _RECORDER_FILE
        self._restore_recorder(json.loads(recorder.read_text()) if recorder.exists() else None)

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
        # An iterator that was left halfway can't be pickled, nor is it part of the state.
        state = {**super().__getstate__(), "_iterator": None}
        if get_spawning_popen() is not None:
            # TorchRL's copy of the generator's state is freed, and its memory closed, before the new
            # process opens it. Another process could only repeat the draws of this one, too.
            state["_rng"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prefetch_in_order()
