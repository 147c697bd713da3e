"""All that a storage is, as it can be compared: what is refused must leave every bit of it.

before = snapshot(storage)
with pytest.raises(ValueError):
    storage.extend(nonsense)
assert_unchanged(before, storage)
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from trl_storages.samplers import PERSampler, WrappingSampler

__all__ = ["assert_unchanged", "files_of", "snapshot"]

# What the kernel's lock is held by.
_LOCK = "lock"


def snapshot(storage: Any) -> dict[str, Any]:
    """Copies the rows, index, writer, samplers, transforms, recorder, generator and files of a storage.

    Args:
        storage: a `ReplayStorage` over any storage, or another replay buffer.
    """
    rows, writer, recorder = storage._storage, storage._writer, getattr(storage, "_recorder", None)
    index, generator = getattr(rows, "episodes", None), storage._rng
    scratch_dir = getattr(rows, "scratch_dir", None)
    return _plain(
        {
            "rows": _leaves(getattr(rows, "_storage", None)),
            "layout": getattr(rows, "layout", None) and rows.layout.to_json(),
            "num_rows": len(rows),
            "last_cursor": getattr(rows, "_last_cursor", None),
            "initialized": getattr(rows, "initialized", None),
            "index": None if index is None else {**index.state_dict(), "host": index.host_steps},
            "writer": {**writer.state_dict(), "plain": _scalars(writer)},
            "sampler": _sampler(storage._sampler),
            "transforms": [
                {"plain": _scalars(transform), "state": dict(transform.state_dict())}
                for transform in storage._transform
            ],
            "recorder": None if recorder is None else recorder.state_dict(),
            "generator": None if generator is None else generator.get_state(),
            "default generator": torch.get_rng_state(),
            "batch_size": storage._batch_size,
            "drawn ahead": [*map(id, storage._prefetch_queue)] if storage._prefetch else [],
            "files": {} if scratch_dir is None else files_of(scratch_dir),
        }
    )


def assert_unchanged(before: dict[str, Any], storage: Any) -> None:
    """Asserts that a storage is what it was, bit for bit; the message names what is not."""
    assert (changed := _differences(before, snapshot(storage))) == [], f"changed: {changed}"


def files_of(directory: str | Path) -> dict[str, bytes]:
    """Returns what is in each file below a directory, by its path there, but for locks."""
    directory = Path(directory)
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != _LOCK
    }


def _sampler(sampler: Any) -> dict[str, Any]:
    seen = {"kind": type(sampler).__name__, "plain": _scalars(sampler)}
    if isinstance(sampler, WrappingSampler):
        return {**seen, "counts": sampler._counts, "base": _sampler(sampler.base)}
    if isinstance(sampler, PERSampler):
        table = sampler._table
        return {**seen, "state": sampler.state_dict(), "stamps": table.stamps}
    return {**seen, "state": dict(sampler.state_dict() or {})}


def _scalars(part: Any) -> dict[str, Any]:
    """Returns what a part holds in plain numbers and words."""
    return {
        name: value
        for name, value in vars(part).items()
        if isinstance(value, bool | int | float | str | None)
    }


def _leaves(rows: Any) -> Any:
    return dict(rows.items(True, True)) if isinstance(rows, TensorDictBase) else rows


def _plain(value: Any) -> Any:
    """Copies dicts and lists of tensors; a tensor becomes its dtype, shape and bytes."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), data
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return value


def _differences(before: Any, after: Any, at: str = "") -> list[str]:
    """Returns the names of all entries that differ."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        parts = ((f"{at}.{key}".lstrip("."), before[key], after[key]) for key in before)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        parts = ((f"{at}[{i}]", *pair) for i, pair in enumerate(zip(before, after, strict=True)))
    else:
        # NaN is itself, whatever it says.
        return [] if before is after or before == after else [at]
    return [name for part in parts for name in _differences(part[1], part[2], part[0])]
