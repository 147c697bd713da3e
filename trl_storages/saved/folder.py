"""The one reader of dumps: bounded, and never through links, pipes, devices or pickles."""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, NoReturn

import torch
from tensordict import NestedKey, TensorDict

from trl_storages import arguments

__all__ = ["DumpFolder", "check_names"]

_MOST_BYTES = 1 << 24  # of a JSON file
_MOST_VALUES = 1 << 20  # in it
_MOST_DEPTH = 32
_MOST_FILES = 100_000
_LARGEST = 2**63 - 1
_META = "meta.json"
# What `meta.json` says of the whole stands beside the names of the entries.
_OF_THE_WHOLE = ("shape", "device", "_type")
_PRIVATE = getattr(mmap, "MAP_PRIVATE", None)
# Without it the kernel would set memory aside for a copy of the whole file.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for somebody to write to it
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class DumpFolder:
    """A directory that `dumps` wrote, or one within it, from which no code is ever run.

    Everything below the directory is a file or a directory, nothing leads out of it, and each file has
    the size that what describes it asks for. Nothing is ever written to it.

    Args:
        path: the directory.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: something in it is a link, a pipe, a device, a pickle, or there is too much of it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = arguments.directory("path", path)
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"there must be a directory that dumps() wrote, got {self.path}. Nothing was changed."
            )
        for number, entry in enumerate(_entries_below(self.path)):
            self._check(entry, number)

    def _check(self, entry: os.DirEntry, number: int) -> None:
        if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
            self._refuse(
                f"{entry.path} must be a file or a directory, got "
                f"{'a link' if entry.is_symlink() else 'a pipe, a socket or a device'}"
            )
        if entry.name.endswith(".pickle"):
            self._refuse(f"{entry.path} may be a pickle, whose loading runs code")
        if number >= _MOST_FILES:
            self._refuse(f"there must be at most {_MOST_FILES} files, got more")
        if entry.path.count(os.sep) - str(self.path).count(os.sep) > _MOST_DEPTH:
            self._refuse(f"directories must lie at most {_MOST_DEPTH} deep, got {entry.path}")

    def _refuse(
        self,
        reason: str,
        cause: BaseException | None = None,
        kind: type[Exception] = ValueError,
    ) -> NoReturn:
        raise kind(
            f"{self.path} must be what dumps() wrote: {reason}. Bring it back from a copy, or dump "
            "anew. Nothing was changed."
        ) from cause

    def folder(self, name: str) -> DumpFolder:
        """Returns a directory within this one.

        Raises:
            FileNotFoundError: there is none.
        """
        inner = DumpFolder.__new__(DumpFolder)  # what is in it was looked at
        inner.path = self.path / name
        if inner.path.is_symlink() or not inner.path.is_dir():
            self._refuse(f"the directory {name!r} is missing", kind=FileNotFoundError)
        return inner

    def has(self, name: str) -> bool:
        """Returns whether there is something of this name."""
        return os.path.lexists(self.path / name)

    @contextmanager
    def _open(self, name: str) -> Iterator[tuple[int, int]]:
        """Opens a file: yields its descriptor and its size in bytes."""
        try:
            descriptor = os.open(self.path / name, _FLAGS)
        except FileNotFoundError as error:
            self._refuse(f"the file {name!r} is missing", error, FileNotFoundError)
        except OSError as error:
            self._refuse(f"{name!r} can't be opened as a file: {error.strerror}", error)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                self._refuse(f"{name!r} is no file")
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)

    @contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a file for reading."""
        with (
            self._open(name) as (descriptor, _),
            os.fdopen(descriptor, "rb", closefd=False) as file,
        ):
            yield file

    # JSON

    def json(self, name: str) -> dict[str, Any]:
        """Reads a JSON file that holds a dict: of bounded size, depth and count, with finite numbers.

        Raises:
            FileNotFoundError: it is missing.
            ValueError: it is cut or damaged, or exceeds a bound.
        """
        with self._open(name) as (_, size), self.opened(name) as file:
            if size > _MOST_BYTES:
                self._refuse(f"{name!r} must have at most {_MOST_BYTES} bytes, got {size}")
            text = file.read(_MOST_BYTES)
        try:
            value = json.loads(
                text,
                parse_constant=_no_number,
                parse_float=_finite,
                parse_int=_bounded,
                object_pairs_hook=_without_twins,
            )
            _check_size(value)
        except (ValueError, RecursionError) as error:
            self._refuse(f"{name!r} is cut or damaged ({error})", error)
        if not isinstance(value, dict):
            self._refuse(f"{name!r} must hold a dict, got {type(value).__name__}")
        return value

    def weights(self, name: str) -> Any:
        """Reads what `torch.save` wrote of tensors and plain values."""
        with self.opened(name) as file:
            try:
                return torch.load(file, map_location="cpu", weights_only=True)
            except (RuntimeError, UnpicklingError, EOFError, ValueError, KeyError) as error:
                self._refuse(f"{name!r} is cut or damaged ({error})", error)

    # Tensors

    def tensor(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Maps a file of raw numbers, to be read: what is written to the tensor goes nowhere.

        Args:
            name: the file.
            dtype: of its numbers.
            shape: that they are seen in.

        Raises:
            FileNotFoundError: it is missing.
            ValueError: it is not of the size that they need.
        """
        needed = math.prod(shape) * dtype.itemsize
        if not needed:
            return torch.empty(torch.Size(shape), dtype=dtype)
        with self._open(name) as (descriptor, size):
            if size != needed:
                self._refuse(f"{name!r} must have {needed} bytes, got {size}")
            if _PRIVATE is None:
                words = mmap.mmap(descriptor, needed, access=mmap.ACCESS_COPY)
            else:
                # To read and to write, as it is unless told otherwise.
                words = mmap.mmap(descriptor, needed, flags=_PRIVATE | _NO_RESERVE)
        if dtype is torch.bool and int(torch.frombuffer(words, dtype=torch.uint8).max()) > 1:
            self._refuse(f"{name!r} must hold the bytes 0 and 1 alone")
        return torch.frombuffer(words, dtype=dtype).view(torch.Size(shape))

    def tensordict(self) -> TensorDict:
        """Maps the tensors of this directory, as tensordict's `memmap` laid them out.

        Raises:
            FileNotFoundError: the description or a file is missing.
            ValueError: one is cut or damaged, or an entry is no tensor.
        """
        meta = self.json(_META)
        batch_size = self._shape(meta.get("shape"), "the whole")
        whole = {key: meta.get(key, "nothing") for key in _OF_THE_WHOLE}
        on_host = whole["device"] in (None, "cpu")
        if not (on_host and str(whole["_type"]).endswith(".TensorDict'>")):
            self._refuse(f"{_META!r} must describe a TensorDict on the CPU, got {whole}")
        data = TensorDict({}, batch_size)
        for name, found in meta.items():
            if name in _OF_THE_WHOLE:
                continue
            self._check_name(name)
            if not isinstance(found, dict):
                self._refuse(f"{name!r} must be described by a dict, got {found!r}")
            if found == {"type": "TensorDict"}:
                entry = self.folder(name).tensordict()
            else:
                entry = self._leaf(name, found)
            if entry.shape[: len(batch_size)] != batch_size:
                self._refuse(f"{name!r} must begin with {list(batch_size)}, is {list(entry.shape)}")
            data.set(name, entry)
        return data

    def _leaf(self, name: str, found: Mapping[str, Any]) -> torch.Tensor:
        dtype, shape = found.get("dtype"), found.get("shape")
        plain = {"device": "cpu", "shape": shape, "dtype": dtype, "is_nested": False}
        if found != plain or str(dtype) not in _DTYPES or found["is_nested"] is not False:
            self._refuse(f"{name!r} must be a dense tensor on the CPU, got {dict(found)}")
        shape = self._shape(shape, repr(name))
        return self.tensor(f"{name}.memmap", _DTYPES[str(dtype)], shape)

    def _shape(self, shape: Any, what: str) -> torch.Size:
        if not isinstance(shape, list) or not all(
            type(size) is int and size >= 0 for size in shape
        ):
            self._refuse(f"the shape of {what} must be a list of sizes, got {shape!r}")
        if math.prod(shape) > _LARGEST:
            self._refuse(f"the shape of {what} must be one that memory has room for, got {shape}")
        return torch.Size(shape)

    def _check_name(self, name: str) -> None:
        try:
            check_names([name])
        except ValueError as error:
            self._refuse(str(error), error)


def check_names(keys: Sequence[NestedKey]) -> None:
    """Checks that each entry can have a file of its own within the directory of a dump.

    Raises:
        ValueError: a name leads out of it, or is one of those that describe the directory.
    """
    for key in keys:
        for name in (key,) if isinstance(key, str) else key:
            if name in ("", ".", "..", _META, *_OF_THE_WHOLE) or not {*name}.isdisjoint("/\\\0"):
                raise ValueError(
                    f"a field whose name is {name!r} can't be dumped to a file of its own: a name must "
                    f"not lead elsewhere, nor be one of {list(_OF_THE_WHOLE)}; rename the field, or "
                    "save state_dict()."
                )


def _entries_below(directory: Path) -> Iterator[os.DirEntry]:
    folders = [str(directory)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"numbers must be finite, got {text}")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _bounded(text: str) -> int:
    # Of very many digits Python makes no number, or takes very long.
    if len(text) > 20 or not -_LARGEST <= int(text) <= _LARGEST:
        raise ValueError(f"whole numbers must be below 2^63, got {text[:25]}")
    return int(text)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an entry occurs twice")
    return value


def _check_size(value: Any) -> None:
    level, depth, count = [value], 0, 1
    while level:
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth, count = depth + 1, count + len(level)
        if depth > _MOST_DEPTH or count > _MOST_VALUES:
            raise ValueError(f"at most {_MOST_VALUES} values, {_MOST_DEPTH} deep, are read")
