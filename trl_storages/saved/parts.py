"""Parts whose state can be checked before it is loaded: ours, and as far as it goes TorchRL's."""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torchrl.data import PrioritizedSampler, SamplerWithoutReplacement

from trl_storages.saved.folder import DumpFolder
from trl_storages.saved.state import SavedState

__all__ = ["Savable", "check_part", "read_part"]

_META = "meta.json"  # of tensordict


@runtime_checkable
class Savable(Protocol):
    """A part that says beforehand whether it can take a state."""

    def check_state_dict(self, state_dict: Any) -> None:
        """Raises what is wrong with a state, and changes nothing."""

    def read_dump(self, folder: DumpFolder) -> dict[str, Any]:
        """Returns the state that a dump holds, unchecked."""


def check_part(part: Any, state: Any) -> None:
    """Checks that a sampler or a writer can take a state, without changing anything.

    One of TorchRL's own is compared with what it would save now, and tried on with a copy.

    Args:
        part: the sampler or writer.
        state: what was saved.

    Raises:
        KeyError, TypeError, ValueError: it can't. The message says what is wrong.
    """
    if isinstance(part, Savable):
        part.check_state_dict(state)
        return
    what, own = f"the saved {type(part).__name__}", part.state_dict() or {}
    # Samplers without a state save None.
    saved = SavedState({} if state is None else state, what, [*own])
    for key, value in own.items():
        _check_like(saved, key, saved[key], value)
    trial = _trial(part)
    try:
        trial.load_state_dict(copy.deepcopy(state))
        if isinstance(trial, PrioritizedSampler):
            _check_priorities(trial)
        elif isinstance(trial, SamplerWithoutReplacement):
            _check_slots(trial)
    except Exception as error:  # of code that is not ours
        raise ValueError(f"{what} can't be loaded: {error!r}. Nothing was changed.") from error


def read_part(part: Any, folder: DumpFolder, name: str) -> Any:
    """Returns the state that a dump holds of a sampler or a writer.

    One of TorchRL's own reads it from a copy, as it would lengthen files that were cut, and must have
    files of the sizes that it would write now.

    Args:
        part: the sampler or writer.
        folder: of the dump.
        name: of the directory in it.

    Raises:
        ValueError: a file is missing, cut or damaged.
    """
    if isinstance(part, Savable):
        return part.read_dump(folder.folder(name))
    trial = _trial(part)
    with tempfile.TemporaryDirectory() as place:
        files = Path(place) / "part"
        if folder.has(name):
            shutil.copytree(folder.folder(name).path, files)
        else:
            files.mkdir()
        copied = DumpFolder(files)
        for file in files.rglob("*.json"):
            copied.json(str(file.relative_to(files)))
        if copied.has(_META):
            copied.tensordict()
        before = _sizes(files)
        try:
            trial.loads(files)
            state = copy.deepcopy(trial.state_dict())
            trial.dumps(Path(place) / "again")
        except Exception as error:  # of code that is not ours
            raise ValueError(
                f"{folder.path / name} must be what {type(part).__name__} dumped: {error!r}. Nothing "
                "was changed."
            ) from error
        if (after := _sizes(Path(place) / "again")) != before:
            raise ValueError(
                f"{folder.path / name} must have files of these sizes: {after}, got {before}: one was "
                "cut, or is that of another part. Bring it back from a copy. Nothing was changed."
            )
    return state


def _trial(part: Any) -> Any:
    # Neither the rows nor the generator are a part of it.
    memo: dict[int, Any] = {}
    for name in ("_rng", "_storage"):
        if (kept := vars(part).get(name)) is not None:
            memo[id(kept)] = kept
    return copy.deepcopy(part, memo)


def _sizes(files: Path) -> dict[str, int]:
    return {
        str(path.relative_to(files)): path.stat().st_size
        for path in sorted(files.rglob("*"))
        if path.is_file() and path.suffix != ".json"
    }


def _check_like(saved: SavedState, key: str, value: Any, own: Any) -> None:
    """Compares an entry with the one that would be saved now."""
    if own is None or (value is None and isinstance(own, torch.Tensor)):
        return  # made when it is first needed
    numbers = all(isinstance(it, int | float) and not isinstance(it, bool) for it in (value, own))
    if not numbers and type(value) is not type(own):
        raise saved.error(key, f"of type {type(own).__name__}", type(value).__name__)
    if numbers and not 0 <= value < 2**63:
        raise saved.error(key, "finite and at least 0", value)
    if isinstance(value, torch.Tensor):
        if value.dtype is not own.dtype or value.ndim != own.ndim:
            must = f"{own.dtype} of {own.ndim} dimensions"
            raise saved.error(key, must, f"{value.dtype} {list(value.shape)}")
    elif isinstance(value, Mapping):
        inner = SavedState(value, f"{key!r}", [*own])
        for name, entry in own.items():
            _check_like(inner, name, inner[name], entry)
    elif isinstance(own, Sized) and not isinstance(own, str) and len(value) != len(own):
        raise saved.error(key, f"of size {len(own)}", len(value))


def _check_priorities(sampler: PrioritizedSampler) -> None:
    tree = sampler._sum_tree
    values = [tree[at] for at in range(len(tree))]
    if bad := [value for value in values if not (math.isfinite(value) and value >= 0)]:
        raise ValueError(f"priorities must be finite and at least 0, got {bad[0]}")


def _check_slots(sampler: SamplerWithoutReplacement) -> None:
    left = sampler._sample_list
    if left is not None and not bool(((left >= 0) & (left < sampler.len_storage)).all()):
        raise ValueError(f"slots must be at least 0 and below {sampler.len_storage}, got {left}")
