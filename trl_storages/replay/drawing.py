"""Draws the rows of a batch: sampler, sample unit, rows, transforms.

Letters: B batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl.envs.transforms import Transform

from trl_storages import keys
from trl_storages._torchrl import dispatch_td_nn_modules
from trl_storages.kernels.memory import on_device
from trl_storages.rows import RowView, stored_fields
from trl_storages.samplers import check_live, layers_of, prioritized_of
from trl_storages.transforms import ReplayTransform, parts_of

__all__ = ["draw_rows"]


def draw_rows(storage: Any, batch_size: int) -> tuple[RowView, dict[str, Any]]:
    """Draws rows and applies the transforms, under the locks of the storage.

    Args:
        storage: a `ReplayStorage`.
        batch_size: B.

    Returns:
        the rows as the transforms left them, and the entries of sampler and sample unit.

    Raises:
        RuntimeError: the storage is empty, or a sampler draws goals that no transform writes.
    """
    if storage.shared:
        storage._known_rows.tell(storage._sampler, storage.episodes)
    layers, parts = layers_of(storage._sampler), parts_of(storage._transform)
    if (layers, parts) != storage._fitting:
        storage._fitting = (layers, parts) if _check_goals(layers, parts) else None
    rows, sampler = storage._storage, storage._sampler
    if layers != storage._drawn_by:
        # Rows may have been written while a wrapping sampler had another base.
        if storage._drawn_by is not None and (known := prioritized_of(sampler)) is not None:
            known.catch_up(rows)
        storage._drawn_by = layers
    if sampler._rng is not storage._rng:
        # Another storage shares this sampler.
        sampler._rng = storage._rng
    index, info = sampler.sample(rows, batch_size)
    check_live(sampler, index, batch_size, rows)
    if (unit := storage._sample_unit) is not None:
        index, info = unit.expand(index, info, rows)
        check_live(unit, index, len(index), rows)
    info[keys.INDEX] = index
    if storage._writer._track_generations:
        info["index_generation"] = storage._writer.generations_of(index)
    fields = stored_fields(rows, index, storage._collate_fn if storage._collates else None)
    if fields.device != index.device:
        info = {key: on_device(value, fields.device) for key, value in info.items()}
    drawn = RowView(fields, info)
    for part in parts:
        if isinstance(part, ReplayTransform):
            part.replay(drawn)
        else:
            with dispatch_td_nn_modules(True):
                drawn.transform(part)
    return drawn, info


def _check_goals(layers: Sequence[Any], parts: Sequence[Transform]) -> bool:
    """Checks that each goal that the samplers draw, and each entry, is written by one transform.

    Returns:
        whether that also holds once all of these samplers draw goals.

    Raises:
        RuntimeError: it does not hold.
    """
    fits = True
    writers = [part for part in parts if getattr(part, "uses_goals", False)]
    if len(writers) > 1:
        written = [key for part in writers for key in getattr(part, "written_keys", ())]
        if twice := [key for key in written if written.count(key) > 1]:
            raise RuntimeError(
                f"{twice[0]!r} must be written by one transform, got {len(writers)} that relabel it: "
                "use one GoalRelabel for each goal_key that is drawn, and GoalRelabel(None, "
                "goal_key=...) for goals beside the one that rewards and flags are of."
            )
    for layer in layers:
        key = getattr(layer, "goal_key", None)
        # A custom transform may write any goal.
        goals = [getattr(part, "goal_key", key) or keys.DESIRED_GOAL for part in writers]
        if key is None or key in goals:
            continue
        fits = False
        if not getattr(layer, "draws_goals", False):
            continue
        # Only one GoalRelabel may compute rewards.
        made = "None" if writers else "reward_fn"
        named = made if key == keys.DESIRED_GOAL else f"{made}, goal_key={key!r}"
        found = [
            f"{type(part).__name__} of {(getattr(part, 'goal_key', None) or keys.DESIRED_GOAL)!r}"
            if part in writers
            else type(part).__name__
            for part in parts
        ]
        raise RuntimeError(
            f"the goals {key!r} that HERSampler draws must be written by a transform, got "
            f"{', '.join(found) or 'none'}: pass transform=GoalRelabel({named}), or append_transform() "
            "it; set num_goals=0 to draw none. A transform of your own that reads goal_index declares it "
            "by uses_goals = True."
        )
    return fits
