"""The invariants of an episode index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trl_storages.kernels.tables import BEGUN

if TYPE_CHECKING:
    from trl_storages.ring.index import EpisodeIndex

__all__ = ["check_invariants"]


def check_invariants(index: EpisodeIndex) -> None:
    """Recomputes the answers for all rows from their episode numbers, and compares them with the index.

    Raises:
        RuntimeError: an invariant is broken; the message names the lane and the step.
    """
    if not torch.equal(index.cursors.cpu(), index.num_steps_written):
        raise RuntimeError("the host's cursors differ from the device's.")
    if not torch.equal(index.tails.cpu(), torch.from_numpy(index.host_tails)):
        raise RuntimeError("the host's tails differ from the device's.")
    tails = index.host_tails.tolist()
    for lane, (tail, rows) in enumerate(zip(tails, index.host_fill.tolist(), strict=True)):
        if tail < 0 or not 0 <= rows <= index.steps_per_lane:
            raise RuntimeError(
                f"the oldest step of lane {lane} is {tail}, with {rows} rows from it on; it must be at "
                f"least 0, with 0 to {index.steps_per_lane} rows."
            )
    if int(index.num_rows) != len(index):
        raise RuntimeError(f"num_rows is {int(index.num_rows)} for {len(index)} live rows.")
    for lane, cursor in enumerate(index.num_steps_written.tolist()):
        steps = torch.arange(tails[lane], cursor, device=index.device)
        slots = index.ring.slots_at(steps, lane)
        entry, (behind, ahead) = index.episode_id(slots), index.extent(slots)
        begins = torch.ones_like(entry, dtype=torch.bool)
        begins[1:] = entry[1:] != entry[:-1]
        run = begins.cumsum(0) - 1
        lengths = torch.bincount(run, minlength=1)
        in_run = steps - steps[begins][run] if len(steps) else steps
        expected_ahead = lengths[run] - 1 - in_run if len(steps) else steps
        for name, got, expected in (
            ("behind", behind, in_run),
            ("ahead", ahead, expected_ahead),
            ("steps", index.steps(slots), steps),
            ("ages", index.slots_by_age(index.ages(slots)), slots),
        ):
            wrong = (got != expected).nonzero()
            if len(wrong):
                at = int(wrong[0])
                raise RuntimeError(
                    f"{name} of step {int(steps[at])} in lane {lane} is {int(got[at])}, must be "
                    f"{int(expected[at])}."
                )
        place = entry[begins] - lane * index.steps_per_lane
        in_turn = place[:1] + torch.arange(len(place), device=index.device)
        if not torch.equal(place, in_turn % index.steps_per_lane):
            raise RuntimeError(f"the episodes of lane {lane} do not have its entries in turn.")
        if not len(steps):
            if bool(index.is_open[lane]):
                raise RuntimeError(f"lane {lane} has an open episode without a row.")
            continue
        if bool(index.is_open[lane] & index.is_finished(slots[-1])):
            raise RuntimeError(f"the newest episode of lane {lane} is finished, yet goes on.")
        number = int(index.ring.lanes[lane, BEGUN]) - 1
        if int(entry[-1]) != lane * index.steps_per_lane + number % index.steps_per_lane:
            raise RuntimeError(
                f"the newest episode of lane {lane} has another number than its entry."
            )
