"""What may be wrong with a saved state or a dump, entry by entry and file by file."""

import copy
import json
import os
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

__all__ = ["FILE_DAMAGES", "damaged_states", "files_in", "json_damages"]

MISSING = object()
NAN, HUGE = float("nan"), 2**70


def _tensor_damages(value: torch.Tensor) -> dict[str, Any]:
    damages = {
        "another dtype": value.to(torch.int8 if value.dtype is not torch.int8 else torch.int16),
        "another shape": torch.cat(
            [value.reshape(-1), value.reshape(-1)[:1], value.reshape(-1)[:1]]
        ),
        "a list": value.tolist(),
    }
    if value.dtype.is_floating_point:
        damages |= {"NaN": value * NAN, "negative": torch.full_like(value, -1)}
    elif value.dtype in (torch.int32, torch.int64):
        damages["negative"] = torch.full_like(value, -(2**31))
        damages["huge"] = torch.full_like(value, 2**31 - 1)
    return damages


def _damages(value: Any) -> dict[str, Any]:
    """Returns what may stand in the place of an entry."""
    damages: dict[str, Any] = {"missing": MISSING, "another type": object()}
    if isinstance(value, torch.Tensor):
        return damages | _tensor_damages(value)
    if isinstance(value, dict):
        return damages | {"one more": {**value, "unheard of": 1}, "None": None}
    if isinstance(value, bool):
        return damages | {"other flag": not value, "number": 7}
    if isinstance(value, int | float):
        return damages | {"NaN": NAN, "negative": -1, "huge": HUGE, "a flag": True}
    if isinstance(value, str):
        return damages | {"another word": "unheard of", "number": 7}
    if isinstance(value, list | tuple):
        return damages | {"shorter": value[:-1], "a dict": {}}
    return damages


def _changes(value: Any) -> dict[str, Any]:
    """Returns the damages that change a value: the shorter one of an empty list does not."""
    damages = _damages(value)
    is_list = isinstance(value, list | tuple)
    return {
        name: it
        for name, it in damages.items()
        if not (is_list and it is not MISSING and it == value)
    }


def _entries(state: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    for key, value in state.items():
        yield (*path, key), value
        if isinstance(value, dict) and not isinstance(value, TensorDictBase):
            yield from _entries(value, (*path, key))


def damaged_states(
    state: dict[str, Any], known: Container[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a copy of a state for each way in which one entry of it may be wrong, with its name.

    Those whose names are known are left out.
    """
    for path, value in [*_entries(state)]:
        for how, damage in _changes(value).items():
            name = f"{'.'.join(path)}: {how}"
            if name in known:
                continue
            yield name, _damaged(state, path, damage)


def _damaged(state: Any, path: Sequence[Any], damage: Any) -> Any:
    """Returns a copy of a state in which one entry is missing, or another."""
    damaged = copy.deepcopy(state)
    inner = damaged
    for key in path[:-1]:
        inner = inner[key]
    if damage is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = damage
    return damaged


def _replaced(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)


def _linked(file: Path) -> None:
    moved = file.with_name("elsewhere")
    shutil.copy(file, moved)
    file.unlink()
    file.symlink_to(moved)


def _made(file: Path, make: Callable[[Path], Any]) -> None:
    file.unlink()
    make(file)


#: Name -> what is done to a file of a dump; each must make it unfit to be loaded.
FILE_DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: _replaced(file, b""),
    "cut": lambda file: _replaced(file, file.read_bytes()[: file.stat().st_size // 2]),
    "cut by a byte": lambda file: _replaced(file, file.read_bytes()[:-1]),
    "longer": lambda file: _replaced(file, file.read_bytes() + b"[1, 2]"),
    "foreign": lambda file: _replaced(file, bytes(range(256)) * 5),
    "a link": _linked,
    "a pipe": lambda file: _made(file, os.mkfifo),
    "a directory": lambda file: _made(file, Path.mkdir),
}

_DEEP: Any = []
for _ in range(40):
    _DEEP = [_DEEP]
# What JSON may hold and must not.
_JSON = {
    "NaN": "NaN",
    "infinite": "-Infinity",
    "huge": "1" * 400,
    "too large": "1e999",
    "deep": json.dumps(_DEEP),
    "very deep": "[" * 100_000 + "]" * 100_000,
}


def json_damages(file: Path) -> dict[str, Callable[[Path], None]]:
    """Returns what may be wrong within a JSON file, each as a function of the file."""
    whole = json.loads(file.read_text())
    texts = {name: json.dumps(whole)[:-1] + f', "more": {bad}}}' for name, bad in _JSON.items()}
    texts["no dict"] = "[]"
    found = {name: partial(Path.write_text, data=text) for name, text in texts.items()}
    for path, value in _entries(whole):
        for name, damage in _changes(value).items():
            found[f"{'.'.join(path)}: {name}"] = partial(_write, whole, path, damage)
    return found


def _write(state: Any, path: Sequence[Any], damage: Any, file: Path) -> None:
    file.write_text(json.dumps(_damaged(state, path, damage), default=str))


def _tensors_in(state: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yields the entries of a described state that are tensors, and the numbers of their files."""
    if isinstance(state, list):
        state = {str(place): value for place, value in enumerate(state)}
    if not isinstance(state, dict):
        return
    if state.get("$") == "tensor":
        yield path, state["file"]
    for key, value in state.items():
        yield from _tensors_in(value, f"{path}.{key}".lstrip("."))


def files_in(dump: Path) -> Iterator[tuple[Path, str, str, Callable[[Path], None]]]:
    """Yields each file of a dump, the entry that is damaged, what is wrong with it, and what does it."""
    state = dump / "state.json"
    for name, damage in {**FILE_DAMAGES, **json_damages(state)}.items():
        entry, _, how = name.rpartition(": ")
        yield state, entry, how, damage
    for place, (entry, number) in enumerate(_tensors_in(json.loads(state.read_text()))):
        file = dump / f"{number}.tensor"
        # The first has all damages, each other one of them.
        some = list(FILE_DAMAGES.items())
        for how, damage in some if not place else [some[place % len(some)]]:
            if file.exists():
                yield file, entry, how, damage
