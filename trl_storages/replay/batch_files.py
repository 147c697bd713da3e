"""Drawn batches in a directory, as raw tensors and JSON: reading them back runs no code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

__all__ = ["dump_batches", "load_batches"]

_INDEX_FILE = "batches.json"

Batch = tuple[TensorDictBase, dict[Any, torch.Tensor]]


def dump_batches(directory: Path, batches: Sequence[Batch]) -> None:
    """Saves batches, each with its sampler's entries.

    Args:
        directory: where to; it may hold others, which are forgotten.
        batches: TensorDict `[B]`, and a dict of tensors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    index = directory / _INDEX_FILE
    # Without an index there are no batches, should this be interrupted.
    index.unlink(missing_ok=True)
    devices = []
    for place, (batch, info) in enumerate(batches):
        devices.append(None if batch.device is None else str(batch.device))
        batch.detach().cpu().memmap(directory / f"{place}-batch")
        TensorDict(info, []).detach().cpu().memmap(directory / f"{place}-info")
    index.write_text(json.dumps({"devices": devices}))


def load_batches(directory: Path) -> list[Batch]:
    """Returns the batches that `dump_batches` saved, none if the directory holds none."""
    index = directory / _INDEX_FILE
    if not index.exists():
        return []
    batches: list[Batch] = []
    for place, device in enumerate(json.loads(index.read_text())["devices"]):
        batch, info = (
            TensorDict.load_memmap(directory / f"{place}-{part}", allow_pickle=False)
            .clone()
            .to(device or "cpu")
            for part in ("batch", "info")
        )
        entries = info.items(include_nested=True, leaves_only=True)
        batches.append((batch, dict(entries)))
    return batches
