"""Operations on a storage whose rows are in a directory: resume, flush, close and verify."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from trl_storages.arguments import tracker
from trl_storages.disk import Directory
from trl_storages.disk.words import State
from trl_storages.rows import PackedStorage, check_writable
from trl_storages.samplers import WrappingSampler, progress_of_draws, resume_draws

__all__ = [
    "check_rows",
    "close",
    "consistent_read",
    "flush",
    "look",
    "note_all",
    "resume",
]

Method = TypeVar("Method", bound=Callable[..., Any])


def _written_by(storage: PackedStorage) -> Directory | None:
    """Returns the directory if this process writes the rows, else None."""
    directory = None if storage.files is None else storage.files.directory
    return directory if directory is not None and directory.is_writer else None


def consistent_read(method: Method) -> Method:
    """Runs a method under the locks; retries it if another process overwrote rows that it read."""

    @wraps(method)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._replay_lock, self._write_lock:
            if (files := self._storage.files) is None:
                return method(self, *args, **kwargs)
            return files.read_consistently(partial(method, self, *args, **kwargs))

    return read  # type: ignore[return-value]


def look(rows: PackedStorage) -> State | None:
    """Refreshes rows that another process writes, unless a consistent read is under way.

    Returns:
        the last commit; None if this process writes or the rows are in memory.

    Raises:
        RuntimeError: as `RowFiles.refresh`.
    """
    files = rows.files
    reader = None if files is None else files.reader
    if reader is None:
        return None
    if reader.seen is None:
        files.refresh()  # type: ignore[union-attr]
    return reader.state


def resume(storage: Any) -> None:
    """Restores the generator, sampler and recorder state saved in a directory.

    Raises:
        ValueError: its description is damaged.
    """
    files, sampler = storage._storage.files, storage._sampler
    if files is None:
        return
    if isinstance(sampler, WrappingSampler):
        files.on_new_rows = sampler.hear_of_rows
    if (directory := files.directory) is None:
        return
    progress = directory.description.progress
    try:
        if storage._rng is not None and "generator" in progress:
            state = bytearray(base64.b64decode(progress["generator"]))
            storage._rng.set_state(torch.frombuffer(state, dtype=torch.uint8))
        resume_draws(sampler, progress.get("sampler", {}))
        # Recorder state only holds for the commit it was saved with: a writer killed after that one
        # took its environments with it.
        is_last = progress.get("number") == directory.words.commits.number
        if is_last and len(files.episodes) and "ended" in progress:
            storage._recorder.load_state_dict({"ended": torch.tensor(progress["ended"])})
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{directory.path} is damaged: its description says of generator, sampler or recorder "
            f"{error!r}. Bring it back from a copy; nothing was changed."
        ) from error


def _progress_of(storage: Any) -> dict[str, Any]:
    """Returns the state of generator, sampler and recorder in JSON types."""
    ended = storage._recorder.state_dict()["ended"].tolist()
    progress = {"sampler": progress_of_draws(storage._sampler), "ended": ended}
    if storage._rng is not None:
        state = storage._rng.get_state().numpy().tobytes()
        progress["generator"] = base64.b64encode(state).decode()
    return progress


def flush(storage: Any) -> None:
    """Syncs the rows to disk, with the state of generator, sampler and recorder."""
    if (directory := _written_by(storage._storage)) is not None:
        directory.flush(storage._storage.episodes, _progress_of(storage))


def close(storage: Any, *, keep: bool) -> None:
    """Flushes the rows and releases the directory to other writers, or deletes the files."""
    if not keep:
        check_writable(storage._storage)
    if (directory := _written_by(storage._storage)) is None:
        return
    if keep:
        directory.close(storage._storage.episodes, _progress_of(storage))
    else:
        directory.delete()


def note_all(rows: Any) -> None:
    """Marks all rows on disk as read, within a `consistent_read` method."""
    if (files := rows.files) is not None:
        episodes = rows.episodes
        files.note(files.source.words.slots_read(episodes.host_tails, episodes.host_steps))


def check_rows(rows: Any, progress: bool) -> None:
    """Raises a RuntimeError if a row on disk does not match its checksum."""
    if (files := rows.files) is None:
        return
    note_all(rows)
    episodes, track = rows.episodes, tracker("checking rows", progress)
    # For a reader, the next observations of the newest rows may change at any time.
    words, bounds = files.source.words, (episodes.host_tails, episodes.host_steps)
    bad = words.damaged(*bounds, words.intact(track), tips=files.reader is None)
    if len(bad):
        raise RuntimeError(
            f"{len(bad)} rows in {rows.scratch_dir} do not match their checksums, those in the slots "
            f"{bad[:5].tolist()} among them: they were changed from outside, or lost with the power. "
            "Bring the directory back from a copy."
        )
