"""Makes every storage of the contract tests: alone in knowing which inside is tested, and where rows are.

CONTRACT_INSIDE=package.of.the.same.names pytest tests/contract
CONTRACT_PLACES=memory,device pytest tests/contract
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contract.steps import reward_fn
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode
from torchrl.envs.transforms import Compose

from trl_storages.storage import memory as packed

__all__ = [
    "DISCOUNT",
    "KINDS",
    "LAYOUTS",
    "PLACES",
    "assemble",
    "library",
    "make",
    "make_for",
    "make_of",
    "new_folder",
    "spaces",
]

#: The module with the public names.
library: Any = import_module(os.environ.get("CONTRACT_INSIDE", "trl_storages"))

#: Where rows are. "device" is any device but the host: the rows of GPUs, on the CPU.
PLACES = os.environ.get("CONTRACT_PLACES", "memory,directory,device").split(",")

DISCOUNT = 0.9

#: Kind -> recipe and its keywords.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "uniform": ("UniformReplayStorage", {}),
    "n-step": ("NStepReplayStorage", {"n_step": 3, "discount": DISCOUNT}),
    "prioritized": ("PrioritizedReplayStorage", {}),
    "recency": ("EREReplayStorage", {"eta": 0.99, "c_min": 3}),
    "hindsight": ("HERReplayStorage", {"reward_fn": reward_fn}),
    # All at once.
    "all": (
        "HERReplayStorage",
        {
            "reward_fn": reward_fn,
            "n_step": 3,
            "discount": DISCOUNT,
            "alpha": 0.6,
            "eta": 0.99,
            "c_min": 3,
        },
    ),
}


def _box(dtype: Any, *shape: int) -> Box:
    low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
    return Box(low, high, shape, dtype)


_GOALS = {
    "observation": _box(np.float32, 3),
    "achieved_goal": _box(np.float32, 2),
    "desired_goal": _box(np.float32, 2),
}

_MIXED = Dict(
    {
        **_GOALS,
        "pixels": _box(np.uint8, 2, 2, 3),
        "deep": Dict({"x": _box(np.float64, 2), "n": Discrete(1 << 30)}),
    }
)

#: Layout -> observation space and further keywords; `steps.rows` fills each.
LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "vector": (_box(np.float32, 3), {}),
    "goals": (Dict(_GOALS), {}),
    "mixed": (_MIXED, {}),
    "frames": (_box(np.float32, 3, 2), {"frame_stack": 3}),
    "compressed": (_MIXED, {"compress": True}),
    "compressed frames": (_box(np.float32, 3, 2), {"frame_stack": 3, "compress": True}),
}


def spaces(layout: str = "goals") -> tuple[Any, Any]:
    """Returns the observation and action space of a layout."""
    return LAYOUTS[layout][0], _box(np.float32, 2)


def make(
    kind: str = "uniform",
    *,
    place: str = "memory",
    layout: str = "goals",
    lanes: int = 1,
    size: int = 64,
    path: Path | str | None = None,
    **options: Any,
) -> Any:
    """Makes a storage by its recipe.

    Only storages of one place are used at a time: see `_choose`.

    Args:
        kind: one of `KINDS`.
        place: one of `PLACES`.
        layout: one of `LAYOUTS`.
        lanes: number of environments.
        size: transitions, over all lanes.
        path: of the directory, with place "directory"; None makes a new one.
        **options: further keywords of the recipe.
    """
    if lanes > 1:
        options.setdefault("autoreset_mode", AutoresetMode.DISABLED)
    if place == "directory" and path is not None:
        options["path"] = path
    options = {"storage_size": size, "num_envs": lanes, **LAYOUTS[layout][1], **options}
    options = {"info_keys": {"effort": _box(np.float64, 1)}, **options}
    return make_of(*spaces(layout), kind, place=place, **options)


def _choose(place: str) -> dict[str, Any]:
    """Makes storages from now on keep rows on the CPU as on any device, for "device".

    Returns:
        the path of a new directory as a keyword, for "directory".
    """
    packed.HOSTS = () if place == "device" else ("cpu",)
    return {"path": new_folder() / "rows"} if place == "directory" else {}


def new_folder() -> Path:
    """Returns an empty folder that is removed with the process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def assemble(
    size: int = 64,
    lanes: int = 1,
    *,
    place: str = "memory",
    seed: int = 0,
    buffer: Any = library.ReplayStorage,
    **parts: Any,
) -> Any:
    """Makes a storage of parts.

    Args:
        size: transitions, over all lanes.
        lanes: number of environments.
        place: one of `PLACES`.
        seed: of the generator.
        buffer: the class that puts them together.
        **parts: sampler, transform (several as a list), sample_unit, ...; also storage and writer.
    """
    path = _choose(place)
    if isinstance(transforms := parts.get("transform"), list):
        parts["transform"] = Compose(*transforms)
    writer = {key: parts.pop(key) for key in ("on_gap", "keys") if key in parts}
    return buffer(
        **{
            "storage": library.PackedStorage(size, **path),
            "writer": library.EpisodeWriter(lanes, **writer),
            "generator": torch.Generator().manual_seed(seed),
            "batch_size": 32,
            **parts,
        }
    )


def make_of(
    observation_space: Any,
    action_space: Any,
    kind: str = "uniform",
    *,
    place: str = "memory",
    **options: Any,
) -> Any:
    """Makes a storage of other spaces by its recipe."""
    recipe, options = _recipe(kind, place, options)
    return recipe(observation_space, action_space, **options)


def make_for(
    env: Any, kind: str = "uniform", *, place: str = "memory", size: int = 64, **options: Any
) -> Any:
    """Makes a storage by its recipe for an environment; otherwise as `make`."""
    recipe, options = _recipe(kind, place, {"storage_size": size, **options})
    return recipe.from_env(env, **options)


def _recipe(kind: str, place: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    recipe, keywords = KINDS[kind]
    options = {"storage_size": 64, "seed": 0, **_choose(place), **keywords, **options}
    return getattr(library, recipe), options
