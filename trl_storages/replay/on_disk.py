"""What becomes of rows that lie in a directory: they are gone on with, flushed, closed and checked."""

from __future__ import annotations

import base64
import copy
import weakref
from collections.abc import Callable
from functools import partial, wraps
from threading import RLock
from typing import Any, TypeVar

import torch
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages.disk import Directory
from trl_storages.disk.files import in_forked_child
from trl_storages.progress_bar import tracker
from trl_storages.replay.saving import Parts
from trl_storages.rows import PackedStorage
from trl_storages.samplers import WrappingSampler, prioritized_of

__all__ = [
    "check_rows",
    "check_writable",
    "close",
    "flush",
    "has_files",
    "intact",
    "is_read",
    "renew_locks_of",
    "resume",
    "without_rows",
]

Method = TypeVar("Method", bound=Callable[..., Any])

_PIECE = 1 << 16  # rows that are checked at a time


def _directory_of(storage: Any) -> Directory | None:
    """Returns the files of rows; None in memory, and where they are only read."""
    return storage.directory if isinstance(storage, PackedStorage) else None


def is_read(storage: Any) -> bool:
    """Returns whether another process may write the rows."""
    return isinstance(storage, PackedStorage) and storage.reader is not None


def has_files(storage: Any) -> bool:
    """Returns whether there are files of rows, which this process writes or reads."""
    return _directory_of(storage) is not None or is_read(storage)


def check_writable(storage: Any) -> None:
    """Raises a RuntimeError if the rows are in a directory that this process may not write."""
    if isinstance(storage, PackedStorage):
        storage.check_writable()


def intact(method: Method) -> Method:
    """Makes a method that reads rows read them anew if another process overwrote some meanwhile."""

    @wraps(method)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_read(self._storage):
            return method(self, *args, **kwargs)
        with self._replay_lock, self._write_lock:
            return self._storage.read_intact(partial(method, self, *args, **kwargs))

    return read  # type: ignore[return-value]


def resume(parts: Parts, generator: torch.Generator | None) -> None:
    """Goes on where a directory was left.

    Raises:
        ValueError: its description is damaged.
    """
    storage, sampler = parts.storage, parts.sampler
    if not has_files(storage):
        return
    if (prioritized := prioritized_of(sampler)) is not None:
        prioritized.attach(storage)
    if isinstance(sampler, WrappingSampler):
        storage.on_new_rows = sampler.hear_of_rows
    if (directory := _directory_of(storage)) is None:
        return
    progress = directory.description.progress
    try:
        if generator is not None and "generator" in progress:
            state = bytearray(base64.b64decode(progress["generator"]))
            generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
        if isinstance(sampler, WrappingSampler):
            sampler.resume(progress.get("sampler", {}))
        # The environments of a writer that was killed later are gone, and those without rows unknown.
        is_last = progress.get("number") == directory.words.commits.number
        if is_last and len(storage) and "ended" in progress:
            parts.recorder.load_state_dict({"ended": torch.tensor(progress["ended"])})
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{directory.path} is damaged: its description says of generator, sampler or recorder "
            f"{error!r}. Bring it back from a copy; nothing was changed."
        ) from error


def flush(parts: Parts, generator: torch.Generator | None, *, is_clean: bool = False) -> None:
    """Writes rows through to the disk, with the state of generator, sampler and recorder.

    Args:
        parts: whose rows may be in a directory that this process writes.
        generator: of their draws.
        is_clean: whether nothing is written any more.
    """
    directory = _directory_of(parts.storage)
    if directory is None or not directory.is_writer:
        return
    progress: dict[str, Any] = {}
    if generator is not None:
        state = generator.get_state().numpy().tobytes()
        progress["generator"] = base64.b64encode(state).decode()
    if isinstance(parts.sampler, WrappingSampler):
        progress["sampler"] = parts.sampler.progress()
    progress["ended"] = parts.recorder.state_dict()["ended"].tolist()
    directory.flush(parts.storage.episodes, progress, is_clean=is_clean)


def close(parts: Parts, generator: torch.Generator | None, *, keep: bool) -> None:
    """Flushes rows and lets another writer in, or deletes their files."""
    if not keep:
        check_writable(parts.storage)
    directory = _directory_of(parts.storage)
    if directory is None or not directory.is_writer:
        return
    if not keep:
        directory.delete()
        return
    try:
        flush(parts, generator, is_clean=True)
    finally:
        directory.abandon()


def without_rows(sampler: Any) -> Sampler:
    """Returns a copy of a sampler that knows of no rows, and has no generator."""
    generator, sampler._rng = sampler._rng, None
    try:
        copied = copy.deepcopy(sampler)
    finally:
        sampler._rng = generator
    copied._empty()
    return copied


def check_rows(storage: Any, progress: bool) -> None:
    """Raises a RuntimeError if a row on disk does not match its checksum."""
    if not has_files(storage):
        return
    episodes, words = storage.episodes, storage.words
    slots = episodes.live_slots()
    pieces = slots.split(_PIECE)
    bad = [
        piece[~words.marked.check(piece)] for piece in tracker("checking rows", progress)(pieces)
    ]
    storage.note(slots)
    found = torch.cat([slots[:0], *bad])
    if len(found):
        raise RuntimeError(
            f"{len(found)} rows in {storage.scratch_dir} do not match their checksums, those in "
            f"the slots {found[:5].tolist()} among them: they were changed from outside, or lost "
            "with the power. Bring the directory back from a copy."
        )


#: The containers of this process whose rows are in a directory.
_ON_DISK: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_locks_of(container: Any) -> None:
    """Makes the locks of a container anew in a forked child, where another thread may have held them."""
    _ON_DISK.add(container)


def _renew_locks() -> None:
    for container in list(_ON_DISK):
        for name in ("_replay_lock", "_write_lock"):
            if isinstance(getattr(container, name), type(RLock())):
                setattr(container, name, RLock())


# A child reads on, whatever its parent was doing.
in_forked_child(_renew_locks)
