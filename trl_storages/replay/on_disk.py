"""What a container does with rows that lie in a directory: flush, close, resume, share.

Letters: B batch, E lanes (environments).
"""

from __future__ import annotations

import base64
import copy
import weakref
from collections.abc import Callable
from functools import partial, wraps
from threading import RLock
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch.utils.data import DataLoader

from trl_storages import arguments
from trl_storages.disk import Directory
from trl_storages.disk.files import in_forked_child
from trl_storages.progress_bar import tracker
from trl_storages.replay.loader import make_loader
from trl_storages.rows import PackedStorage
from trl_storages.samplers import PERSampler, WrappingSampler, layers_of
from trl_storages.stock_parts import take_in_rows

__all__ = ["OnDisk", "intact"]

Method = TypeVar("Method", bound=Callable[..., Any])

_PIECE = 1 << 16  # rows that are checked at a time


def intact(method: Method) -> Method:
    """Makes a method that reads rows read them anew if another process overwrote some meanwhile."""

    @wraps(method)
    def read(self: OnDisk, *args: Any, **kwargs: Any) -> Any:
        if not self._reads:
            return method(self, *args, **kwargs)
        with self._replay_lock, self._write_lock:
            return self._storage.read_intact(partial(method, self, *args, **kwargs))

    return read  # type: ignore[return-value]


class OnDisk:
    """The part of `ReplayStorage` that knows of files. In memory it does nothing."""

    # Of TorchRL's ReplayBuffer.
    _storage: Any
    _sampler: Any
    _transform: Any
    _recorder: Any
    _rng: torch.Generator | None
    _replay_lock: Any
    _write_lock: Any
    _batch_size: int | None

    @property
    def _directory(self) -> Directory | None:
        """The files of the rows; None in memory, and where they are only read."""
        return getattr(self._storage, "directory", None)

    @property
    def _reads(self) -> bool:
        """Whether another process may write the rows."""
        return getattr(self._storage, "reader", None) is not None

    def _resume(self) -> None:
        """Goes on where the directory was left."""
        directory = self._directory
        if getattr(self._storage, "scratch_dir", None) is not None:
            _ON_DISK.add(self)
        if directory is None and not self._reads:
            return
        sampler = layers_of(self._sampler)[-1]
        if isinstance(sampler, PERSampler):
            sampler.attach(self._storage)
        if isinstance(self._sampler, WrappingSampler):
            self._storage.on_new_rows = self._sampler.hear_of_rows
        if directory is None:
            return
        try:
            self._resume_from(directory.description.progress)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{directory.path} is damaged: its description says of generator, sampler or recorder "
                f"{error!r}. Bring it back from a copy; nothing was changed."
            ) from error

    def _resume_from(self, progress: dict[str, Any]) -> None:
        if self._rng is not None and "generator" in progress:
            state = bytearray(base64.b64decode(progress["generator"]))
            self._rng.set_state(torch.frombuffer(state, dtype=torch.uint8))
        if isinstance(self._sampler, WrappingSampler):
            self._sampler.resume(progress.get("sampler", {}))
        # The environments of a writer that was killed later are gone, and those without rows unknown.
        is_last = progress.get("number") == self._directory.words.commits.number  # type: ignore
        if is_last and len(self._storage) and "ended" in progress:
            self._recorder.load_state_dict({"ended": torch.tensor(progress["ended"])})

    def _initialize_prioritized_sampler(self) -> None:
        # TorchRL would give rows that are there already new priorities, where these have their own.
        # And rows that come are told to the sampler alone, which must be where they are by then.
        innermost = layers_of(self._sampler)[-1]
        if isinstance(innermost, PERSampler):
            innermost.attach(self._storage)
        elif not take_in_rows(innermost, self._storage):
            super()._initialize_prioritized_sampler()  # type: ignore[misc]

    def _check_writable(self) -> None:
        """Raises a RuntimeError if the rows are in a directory that this process may not write."""
        if isinstance(self._storage, PackedStorage):
            self._storage.check_writable()

    def flush(self) -> None:
        """Waits until all rows are on disk, and keeps the state of generator and samplers with them.

        A killed process loses nothing that was written. A machine that loses its power, at whatever
        time later, loses nothing that was flushed and is not evicted since. Rows in memory are left
        alone.

        Raises:
            OSError: the disk is full. What was written is there all the same.
        """
        self._flush(is_clean=False)

    def _flush(self, *, is_clean: bool) -> None:
        with self._replay_lock, self._write_lock:
            directory = self._directory
            if directory is None or not directory.is_writer:
                return
            progress: dict[str, Any] = {}
            if self._rng is not None:
                state = self._rng.get_state().numpy().tobytes()
                progress["generator"] = base64.b64encode(state).decode()
            if isinstance(self._sampler, WrappingSampler):
                progress["sampler"] = self._sampler.progress()
            progress["ended"] = self._recorder.state_dict()["ended"].tolist()
            directory.flush(self._storage.episodes, progress, is_clean=is_clean)

    def close(self, *, keep: bool = True) -> None:
        """Flushes the rows of a directory, and lets another writer in. Batches can still be drawn.

        Args:
            keep: whether the files stay; they are deleted otherwise.

        Raises:
            RuntimeError: files shall be deleted that this process may not write.
            OSError: the disk is full. The rows are there all the same.
        """
        keep = arguments.flag("keep", keep)
        with self._replay_lock, self._write_lock:
            if not keep:
                self._check_writable()
            directory = self._directory
            if directory is None or not directory.is_writer:
                return
            if not keep:
                directory.delete()
                return
            try:
                self._flush(is_clean=True)
            finally:
                directory.abandon()

    def loader(
        self,
        num_workers: int = 0,
        *,
        batch_size: int | None = None,
        fetch_every: int = 1,
        pin_memory: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> DataLoader[TensorDictBase]:
        """Returns a `DataLoader` whose workers draw batches from the directory while this writes.

        Each worker has a seed of its own and reads what is committed; sampler and transforms are copies
        of this storage's as they are now. Priorities are those that this storage sets: rows are drawn
        by what they were when a worker looked last.

        Workers are started as `torch.multiprocessing` is set. TorchRL sets "spawn": a script then needs
        its `if __name__ == "__main__":`, and reward functions must be importable;
        `multiprocessing_context="fork"` asks for neither.

        Args:
            num_workers: processes that draw; 0 draws in this one.
            batch_size: B; None is the one given to the constructor.
            fetch_every: batches that a worker draws before it looks at new rows and priorities.
            pin_memory: whether batches arrive in pinned memory.
            seed: of the workers; None follows torch's default generator.
            **options: as in `torch.utils.data.DataLoader`: prefetch_factor, persistent_workers, ...

        Raises:
            RuntimeError: the rows are not in a directory, or none was made yet.
            ValueError: a number is too small, or no batch size is known.
        """
        num_workers = arguments.integer("num_workers", num_workers)
        fetch_every = arguments.integer("fetch_every", fetch_every, at_least=1)
        batch_size = arguments.optional(arguments.integer, "batch_size", batch_size, at_least=1)
        pin_memory = arguments.flag("pin_memory", pin_memory)
        seed = arguments.optional(arguments.integer, "seed", seed)
        if self._directory is None and not self._reads:
            raise RuntimeError(
                "workers read rows from a directory, and these are in memory (or none was written yet): "
                "make the storage with path=, or scratch_dir= and fields=."
            )
        if batch_size is None and self._batch_size is None:
            raise ValueError(
                "batch_size must be known: pass it here, or where the storage is made."
            )
        open_reader = partial(
            _open_reader,
            type(self),
            self._storage.scratch_dir,
            sampler=self._sampler_without_rows(),
            transform=self._transform if len(self._transform) else None,
            batch_size=batch_size or self._batch_size,
            fetch_every=fetch_every,
        )
        return make_loader(
            open_reader, num_workers=num_workers, pin_memory=pin_memory, seed=seed, **options
        )

    def _sampler_without_rows(self) -> Any:
        with self._replay_lock, self._write_lock:
            sampler, self._sampler._rng = self._sampler, None
            try:
                sampler = copy.deepcopy(sampler)
            finally:
                self._sampler._rng = self._rng
        sampler._empty()
        return sampler

    def _check_rows(self, progress: bool) -> None:
        """Raises a RuntimeError if a row on disk does not match its checksum."""
        storage = self._storage
        if self._directory is None and not self._reads:
            return
        episodes, words = storage.episodes, storage.words
        slots = episodes.slots_by_age(torch.arange(len(episodes)))
        pieces = slots.split(_PIECE)
        bad = [
            piece[~words.marked.check(piece)]
            for piece in tracker("checking rows", progress)(pieces)
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
_ON_DISK: weakref.WeakSet[OnDisk] = weakref.WeakSet()


def _renew_locks() -> None:
    """Makes the locks anew that another thread may have held when this process was forked."""
    for container in list(_ON_DISK):
        for name in ("_replay_lock", "_write_lock"):
            if isinstance(getattr(container, name), type(RLock())):
                setattr(container, name, RLock())


# A child reads on, whatever its parent was doing.
in_forked_child(_renew_locks)


def _open_reader(kind: Any, path: Any, generator: torch.Generator, **options: Any) -> Any:
    # One loader may be iterated several times at once.
    return kind._open(path, mode="r", generator=generator, **copy.deepcopy(options))
