"""Directories that earlier releases wrote: each later one reads them, and writes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from contract.make import library
from contract.steps import assert_same
from tensordict import TensorDict

#: Written by the release in which the format was fixed: after `close()`, and copied while it was open.
KEPT = Path(__file__).parent / "format_3"
LANES, STEPS, WRITTEN = 2, 8, 13

pytestmark = [
    pytest.mark.requirement("persistence"),
    pytest.mark.filterwarnings("ignore:.*was not closed:RuntimeWarning"),
]


def steps_of(first: int, end: int) -> TensorDict:
    """[2, end - first] steps of episodes of five, with a stack of two frames."""
    step = torch.arange(first, end).expand(LANES, -1) + 100 * torch.arange(LANES)[:, None]
    place = torch.arange(first, end).expand(LANES, -1) % 5

    def seen(at: torch.Tensor, place: torch.Tensor) -> dict[str, torch.Tensor]:
        newest = at.to(torch.uint8)
        older = torch.where(place > 0, newest - 1, newest)
        pixels = torch.stack([older, newest], 2)[..., None, None].expand(-1, -1, 2, 3, 3)
        return {"observation": at[..., None] + torch.tensor([0.25, 0.5]), "pixels": pixels.clone()}

    is_last = (place == 4)[..., None]
    outcome = {"reward": -step[..., None].float(), "done": is_last, "terminated": is_last}
    after = {**seen(step + 1, place + 1), **outcome}
    inner = {"log_prob": step.double() / 7}
    steps = {**seen(step, place), "action": step % 3, "policy": inner, "next": after}
    return TensorDict(steps, [LANES, end - first])


def opened(path: Path, **options):
    kinds = steps_of(0, 1)
    fields = {
        key: (value.dtype, value.shape[2:]) + (library.FrameStack(2),) * ("pixels" in key)
        for key, value in kinds.items(True, True)
    }
    rows = library.PackedStorage(LANES * STEPS, num_envs=LANES, fields=fields, path=path, **options)
    sampler = library.PERSampler(LANES * STEPS)
    generator = torch.Generator().manual_seed(3)
    return library.ReplayStorage(storage=rows, sampler=sampler, batch_size=16, generator=generator)


def rows_of(first: int, end: int) -> TensorDict:
    return steps_of(first, end).reshape(-1)


@pytest.mark.parametrize("kept", ["closed", "killed"])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_directory_of_an_earlier_release_is_read_and_written(tmp_path, kept, mode):
    shutil.copytree(KEPT / kept, path := tmp_path / "rows")
    storage = opened(path, mode=mode)
    storage.validate()
    slots = storage.episodes.live_slots()
    assert_same(storage[slots], rows_of(WRITTEN - STEPS, WRITTEN))
    assert storage.episodes.num_before(slots).view(LANES, -1)[0].tolist() == [
        0,
        1,
        2,
        3,
        4,
        0,
        1,
        2,
    ]
    assert len(storage.sample()) == 16
    if kept == "closed":
        every = storage.sampler.priorities[slots]
        assert every.tolist() == [5.0 if slot == 9 else 0.125 for slot in slots.tolist()]
    if mode == "r+":
        assert storage.write_count == LANES * WRITTEN
        storage.extend(steps_of(WRITTEN, WRITTEN + 3))
        assert_same(storage[slots := storage.episodes.live_slots()], rows_of(8, 16))
        storage.close()


if __name__ == "__main__":
    storage = opened(KEPT / "closed")
    storage.extend(steps_of(0, WRITTEN))
    slots = storage.episodes.live_slots()
    storage.update_priority(slots, torch.where(slots == 9, 5.0, 0.125))
    storage.sample()
    storage.flush()
    shutil.copytree(KEPT / "closed", KEPT / "killed")
    storage.close()
    for lock in KEPT.rglob("lock"):
        lock.unlink()
