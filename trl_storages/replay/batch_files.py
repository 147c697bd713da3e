"""Drawn batches in a directory, as raw tensors and JSON: reading them back runs no code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from trl_storages.saved import DumpFolder, SavedState

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


def load_batches(folder: DumpFolder) -> list[Batch]:
    """Returns the batches that `dump_batches` saved.

    Raises:
        ValueError: a file is missing, cut or damaged, or a batch was on a device that is not here.
    """
    what = str(folder.path / _INDEX_FILE)
    saved = SavedState(folder.json(_INDEX_FILE), what, ("devices",))
    if not isinstance(saved["devices"], list):
        raise saved.error("devices", "a list", saved["devices"])
    batches: list[Batch] = []
    for place, device in enumerate(saved["devices"]):
        try:
            batch, info = (
                folder.folder(f"{place}-{part}").tensordict().clone().to(device or "cpu")
                for part in ("batch", "info")
            )
        except (RuntimeError, TypeError) as error:
            raise saved.error("devices", "of devices that are here", repr(device)) from error
        entries = info.items(include_nested=True, leaves_only=True)
        batches.append((batch, dict(entries)))
    return batches
