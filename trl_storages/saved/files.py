"""Saves a state to a directory: one JSON file that describes it, and raw tensor files.

Loading runs no code: only `state.json` and the tensor files that it refers to are opened, which must be
regular files of exactly the described size.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase

from trl_storages import arguments
from trl_storages.arguments import tracker
from trl_storages.saved.durable import sync_file, write_text
from trl_storages.saved.untrusted import MOST_BYTES, NO_RESERVE, open_regular, parse_json

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "DTYPES",
    "NewState",
    "copy_in_pieces",
    "dtype_name",
    "read_state",
]

_PIECE = 1 << 26  # bytes copied at a time
_STATE = "state.json"
_LARGEST = 2**63 - 1
#: The key that marks a value JSON has no type for; its value is the kind.
_KIND = "$"
_PRIVATE = getattr(mmap, "MAP_PRIVATE", None)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in JSON and messages, such as `float32`."""
    return str(dtype).removeprefix("torch.")


#: Name -> dtype.
DTYPES = {dtype_name(it): it for it in vars(torch).values() if isinstance(it, torch.dtype)}


def _file_of(number: int) -> str:
    return f"{number}.tensor"


# Writing


class NewState:
    """A state that takes the place of an earlier one in a directory once it is complete.

    A context in which it is written, perhaps more than once. Then it is durable, and the earlier one is
    deleted; after an error the earlier one is left.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._text, self._num_tensors = path, "", 0
        others = [int(file.stem) for file in path.glob("*.tensor") if file.stem.isdecimal()]
        # Files of an earlier state are not touched before this one is complete.
        self._first = max(others, default=-1) + 1

    def write(self, state: Any, *, progress: bool = False) -> None:
        """Writes the state.

        Args:
            state: tensors, TensorDicts, plain values, and dicts and lists of them.
            progress: whether to show a progress bar.

        Raises:
            ImportError: `progress` is True, but tqdm is not installed. Nothing is written then.
            TypeError: the state holds something else. Nothing is written then.
        """
        track = tracker("saving rows", progress)
        tensors: list[torch.Tensor] = []
        self._text = json.dumps(_described(state, tensors, self._first), allow_nan=False)
        self._path.mkdir(parents=True, exist_ok=True)
        self._num_tensors = max(len(tensors), self._num_tensors)
        for path in self._files:
            path.unlink(missing_ok=True)
        pieces = [
            (path, piece)
            for path, tensor in zip(self._files, tensors, strict=False)
            for piece in _pieces_of(tensor)
        ]
        for path, piece in track(pieces):
            if piece.dtype is torch.bool:
                # Unwritten rows may hold any byte.
                piece = piece.view(torch.uint8) != 0
            with path.open("ab") as file:
                piece.cpu().contiguous().view(torch.uint8).numpy().tofile(file)

    @property
    def _files(self) -> list[Path]:
        numbers = range(self._first, self._first + self._num_tensors)
        return [self._path / _file_of(number) for number in numbers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        own, state = self._files, self._path / _STATE
        try:
            if kind is None:
                for path in filter(Path.exists, own):
                    with path.open("rb+") as file:
                        sync_file(file)
                write_text(state, self._text)
        finally:
            # An error may have come after the switch.
            if state.is_file() and state.read_bytes() == self._text.encode():
                own = [path for path in self._path.glob("*.tensor") if path not in own]
            for path in own:
                path.unlink(missing_ok=True)


def _pieces_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Splits a tensor along its first dimension; an empty tensor has no pieces."""
    if not tensor.numel():
        return ()
    rows = tensor.detach().reshape(1) if not tensor.ndim else tensor.detach()
    return rows.split(max(_PIECE * len(rows) // rows.nbytes, 1))  # type: ignore[no-untyped-call]


def copy_in_pieces(
    source: Mapping[Any, torch.Tensor],
    target: Mapping[Any, torch.Tensor],
    *,
    progress: bool = False,
) -> None:
    """Copies fields `[N, ...]` piece by piece, as the source may be memory-mapped.

    Args:
        source: key -> field to read.
        target: the same keys -> field to write.
        progress: whether to show a progress bar.
    """
    if not target:
        return
    num_rows = len(next(iter(target.values())))
    piece = max(_PIECE * num_rows // max(sum(field.nbytes for field in target.values()), 1), 1)
    for start in tracker("loading rows", progress)(range(0, num_rows, piece)):
        size = min(piece, num_rows - start)
        for key, place in target.items():
            place.narrow(0, start, size).copy_(source[key].narrow(0, start, size))


def _described(value: Any, tensors: list[torch.Tensor], first: int) -> Any:
    """Describes a value in JSON types, and appends its tensors to `tensors`, in files from `first` on."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_KIND: "float", "value": str(value)}
        case torch.Tensor() if value.layout is torch.strided:
            tensors.append(value)
            kind = {_KIND: "tensor", "dtype": dtype_name(value.dtype)}
            return {**kind, "shape": [*value.shape], "file": first + len(tensors) - 1}
        case TensorDictBase():
            device = None if value.device is None else str(value.device)
            entries = {key: value.get(key) for key in value.keys()}  # noqa: SIM118
            inner = _described(entries, tensors, first)
            sizes = [*value.batch_size]
            return {_KIND: "tensordict", "batch_size": sizes, "device": device, "entries": inner}
        case list() | tuple():
            items = [_described(item, tensors, first) for item in value]
            return items if isinstance(value, list) else {_KIND: "tuple", "value": items}
        case Mapping():
            if all(isinstance(key, str) and key != _KIND for key in value):
                return {key: _described(item, tensors, first) for key, item in value.items()}
            return {_KIND: "dict", "value": _described([*value.items()], tensors, first)}
    raise TypeError(
        f"a state that is saved must be of dense tensors and plain values, got {type(value).__name__}: "
        "save state_dict() by means of your own. Nothing was written."
    )


# Reading


def read_state(path: str | Path) -> Any:
    """Returns the state that a `NewState` saved. Tensors are memory-mapped, so they are read on access.

    Raises:
        FileNotFoundError: the directory, or a file in it, is missing.
        ValueError: a file is truncated or damaged, or a link, a pipe or a device.
    """
    directory = _SavedFiles(arguments.directory("path", path))
    return directory.value(directory.json(_STATE))


class _SavedFiles:
    """Reads a saved state from an untrusted directory, within bounds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_dir():
            raise FileNotFoundError(
                f"there must be a directory that dumps() wrote, got {path}. Nothing was changed."
            )

    def _refuse(
        self, reason: str, cause: BaseException | None = None, kind: type[Exception] = ValueError
    ) -> NoReturn:
        raise kind(
            f"{self._path} must be what dumps() wrote: {reason}. Bring it back from a copy, or dump "
            "anew. Nothing was changed."
        ) from cause

    @contextmanager
    def _open(self, name: str) -> Iterator[tuple[int, int]]:
        """Opens a file: yields its descriptor and its size in bytes."""
        try:
            descriptor, size = open_regular(self._path / name)
        except FileNotFoundError as error:
            self._refuse(f"the file {name!r} is missing", error, FileNotFoundError)
        except OSError as error:
            self._refuse(f"{name!r} can't be opened as a file: {error.strerror}", error)
        try:
            yield descriptor, size
        finally:
            os.close(descriptor)

    def json(self, name: str) -> Any:
        """Reads a JSON dict of bounded size, depth and count, with finite numbers."""
        with (
            self._open(name) as (descriptor, size),
            os.fdopen(descriptor, "rb", closefd=False) as file,
        ):
            if size > MOST_BYTES:
                self._refuse(f"{name!r} must have at most {MOST_BYTES} bytes, got {size}")
            text = file.read(MOST_BYTES)
        try:
            value = parse_json(text)
        except ValueError as error:
            self._refuse(f"{name!r} is cut or damaged ({error})", error)
        if not isinstance(value, dict):
            self._refuse(f"{name!r} must hold a dict, got {type(value).__name__}")
        return value

    def value(self, found: Any) -> Any:
        """Rebuilds a value from its description; the inverse of `_described`."""
        match found:
            case list():
                return [self.value(item) for item in found]
            case dict() if _KIND not in found:
                return {key: self.value(item) for key, item in found.items()}
            case dict():
                try:
                    return self._rebuilt(found)
                except (RuntimeError, TypeError, KeyError) as error:
                    self._refuse(f"{_STATE!r} describes {found} ({error})", error)
        return found

    def _rebuilt(self, found: dict[str, Any]) -> Any:
        """Rebuilds a value that JSON has no type for."""
        match found:
            case {"value": "inf" | "-inf" | "nan" as text} if _is(found, "float", 1):
                return float(text)
            case {"value": list(items)} if _is(found, "tuple", 1):
                return tuple(self.value(items))
            case {"value": list(items)} if _is(found, "dict", 1):
                return dict(self.value(items))
            case {
                "batch_size": list(sizes),
                "device": device,
                "entries": dict(entries),
            } if _is(found, "tensordict", 3):
                data = TensorDict(self.value(entries), _size(sizes))
                return data if device is None else data.clone().to(device)
            case {"dtype": str(name), "shape": list(shape), "file": int(file)} if (
                _is(found, "tensor", 3) and name in DTYPES and type(file) is int
            ):
                return self._tensor(DTYPES[name], _size(shape), _file_of(file))
        return self._refuse(
            f"{_STATE!r} must describe values of kinds that are known, tensors by their dtype, shape and "
            f"the number of a file; got {found}"
        )

    def _tensor(self, kind: torch.dtype, size: torch.Size, name: str) -> torch.Tensor:
        """Maps a tensor file copy-on-write: writes to the tensor never reach the file."""
        needed = math.prod(size) * kind.itemsize
        if not needed:
            return torch.empty(size, dtype=kind)
        with self._open(name) as (descriptor, there):
            if there != needed:
                self._refuse(f"{name!r} must have {needed} bytes, got {there}")
            if _PRIVATE is None:
                words = mmap.mmap(descriptor, needed, access=mmap.ACCESS_COPY)
            else:
                # Readable and writable by default.
                words = mmap.mmap(descriptor, needed, flags=_PRIVATE | NO_RESERVE)
        if kind is torch.bool and int(torch.frombuffer(words, dtype=torch.uint8).max()) > 1:
            self._refuse(f"{name!r} must hold the bytes 0 and 1 alone")
        return torch.frombuffer(words, dtype=torch.uint8).view(kind).view(size)


def _is(found: dict[str, Any], kind: str, num_keys: int) -> bool:
    """Whether a description is of a kind, and has exactly so many other keys."""
    return found[_KIND] == kind and len(found) == num_keys + 1


def _size(sizes: list[Any]) -> torch.Size:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise TypeError("must be a list of sizes")
    if math.prod(sizes) > _LARGEST:
        raise TypeError("must be sizes that memory has room for")
    return torch.Size(sizes)
