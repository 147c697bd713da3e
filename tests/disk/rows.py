"""Rows that say of themselves which write they are of, and what a storage holds of them.

Every row has a serial number that no other row ever has. From it follow its noise and whether its episode
ends with it, so that two writes of the same step never look alike.

Rows of the kind "frames" have stacks besides. A frame says its step, its lane and the serial number of
the row that led to it or, where an episode begins with it, of its own row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from trl_storages import (
    EpisodeWriter,
    FrameStack,
    PackedStorage,
    PERSampler,
    ReplayStorage,
    UniformSampler,
)

__all__ = [
    "ALL_KINDS",
    "KINDS",
    "Found",
    "abandon",
    "count_from",
    "found",
    "is_torn",
    "kind",
    "make",
    "new_serials",
    "priority_of",
    "stored_as",
    "transitions",
    "with_frames",
    "write",
]

NOISE, NUM_FRAMES = 5, 4
#: Per lane the (step, serial number) of its rows, the oldest first, and the cursors.
Found = tuple[list[list[tuple[int, int]]], list[int]]

_STACK = FrameStack(NUM_FRAMES, dim=-1)
_STEP = (torch.bool, (1,))
_STACKED: dict[Any, Any] = {
    "observation": (torch.float64, (2,)),
    "serial": (torch.int64, ()),
    "noise": (torch.int64, (NOISE,)),
    "pixels": (torch.uint8, (NOISE,)),
    "stack": (torch.int64, (NOISE, NUM_FRAMES), _STACK),
    ("next", "stack"): (torch.int64, (NOISE, NUM_FRAMES), _STACK),
    ("next", "observation"): (torch.float64, (2,)),
    ("next", "reward"): (torch.float32, (1,)),
    ("next", "done"): _STEP,
    ("next", "terminated"): _STEP,
}
#: How rows may be stored, by name.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"share_next": True},
    "frames": {"share_next": True, "fields": _STACKED},
}
#: With those that are tried more rarely.
ALL_KINDS = {**KINDS, "stacks": {"fields": _STACKED}}
#: How they are, in this process; see `stored_as`.
kind = ["plain"]

_last = [0]


@contextmanager
def stored_as(name: str) -> Iterator[None]:
    """Makes storages whose rows are stored so, also in processes that are forked meanwhile."""
    before, kind[0] = kind[0], name
    try:
        yield
    finally:
        kind[0] = before


def count_from(first: int) -> None:
    """Makes the next serial number this one, which no other process may get."""
    _last[0] = first - 1


def new_serials(*shape: int) -> torch.Tensor:
    """Returns serial numbers that no row has."""
    number = torch.Size(shape).numel()
    _last[0] += number
    return torch.arange(_last[0] - number + 1, _last[0] + 1).view(shape)


def _noise(serial: torch.Tensor, step: torch.Tensor, lane: torch.Tensor) -> torch.Tensor:
    seed = serial * 7919 + step * 104_729 + lane * 1_299_709
    return (seed[..., None] + torch.arange(NOISE)) * 40_503


def _ends(serial: torch.Tensor) -> torch.Tensor:
    return serial * 2_654_435_761 % 4_294_967_296 // 65_536 % 6 == 0


def transitions(serial: torch.Tensor, step: torch.Tensor, lane: torch.Tensor) -> TensorDict:
    """Rows of these serial numbers, steps and lanes, int64 `[...]`."""
    noise, done = _noise(serial, step, lane), _ends(serial)[..., None]
    # After an end the environment is elsewhere.
    after = {
        "observation": torch.stack([step + 1, lane], -1).double() + done.double() / 2,
        "reward": step[..., None].float() / 8,
        "done": done,
        "terminated": done.clone(),
    }
    return TensorDict(
        {
            "observation": torch.stack([step, lane], -1).double(),
            "serial": serial.clone(),
            "noise": noise,
            "pixels": (noise % 251).to(torch.uint8),
            "next": after,
        },
        batch_size=serial.shape,
    )


def _frames(step: torch.Tensor, lane: torch.Tensor, serial: torch.Tensor) -> torch.Tensor:
    """Frames `[..., NOISE]` of steps, after rows of serial numbers; those below 0 begin an episode."""
    told = torch.stack([step, lane, serial], -1)
    return torch.cat([told, _noise(serial, step, lane)[..., 3:]], -1)


def with_frames(
    block: TensorDict, storage: ReplayStorage, lanes: list[int] | None = None
) -> TensorDict:
    """Returns the next steps of some lanes, `[L, S]` or `[S]`, with stacks if rows have some."""
    if "fields" not in ALL_KINDS[kind[0]]:
        return block.clone()
    one_lane = block.ndim == 1
    whole, episodes = block.unsqueeze(0) if one_lane else block, storage.episodes
    of = torch.arange(episodes.num_envs) if lanes is None else torch.tensor(lanes)
    goes_on = episodes.is_open.bool()[of]
    before = torch.zeros(len(of), NOISE, NUM_FRAMES, dtype=torch.int64)
    if goes_on.any():
        newest = episodes.newest_slots(of.tolist())
        before = storage.storage.get(newest)["next", "stack"]
    done, serial = whole["next", "done"].squeeze(-1), whole["serial"]
    seen, led_to = [], []
    for s in range(whole.shape[1]):
        step, lane = whole["observation"][:, s].long().unbind(-1)
        first = _frames(step, lane, -serial[:, s]).unsqueeze(-1).expand(-1, -1, NUM_FRAMES)
        stack = torch.where(goes_on[:, None, None], before, first)
        after = _frames(step + 1, lane, serial[:, s]).unsqueeze(-1)
        before = torch.cat([stack[..., 1:], after], -1)
        goes_on = ~done[:, s]
        seen.append(stack)
        led_to.append(before)
    framed = whole.clone()
    framed["stack"], framed["next", "stack"] = torch.stack(seen, 1), torch.stack(led_to, 1)
    return framed[0] if one_lane else framed


def _are_torn_stacks(rows: TensorDict) -> torch.Tensor:
    """Whether the stacks of rows `[B]` are others than those of one row and of the rows before it."""
    stack, after = (rows[key].movedim(-1, 1) for key in ("stack", ("next", "stack")))
    step, lane = rows["observation"].long().unbind(-1)
    torn = (stack != _frames(*stack[..., :3].unbind(-1))).flatten(1).any(1)
    torn |= (stack[..., 1] != lane[:, None]).any(1) | (stack[:, -1, 0] != step)
    older, newer = stack[:, :-1], stack[:, 1:]
    begins, is_repeated = older[..., 2] < 0, (older == newer).all(-1)
    follows = (older[..., 0] + 1 == newer[..., 0]) & (newer[..., 2] > 0)
    torn |= ~(follows | (begins & is_repeated)).all(1)
    begins = stack[:, -1, 2] < 0
    torn |= begins & (stack[:, -1, 2] != -rows["serial"])
    torn |= (after[:, :-1] != stack[:, 1:]).flatten(1).any(1)
    return torn | (after[:, -1] != _frames(step + 1, lane, rows["serial"])).any(1)


def write(storage: ReplayStorage, num_steps: int, lanes: list[int] | None = None) -> TensorDict:
    """Writes the next steps of some lanes, and returns them, `[L, S]`."""
    cursors = storage.episodes.num_steps_written.clone()
    of = torch.arange(len(cursors)) if lanes is None else torch.tensor(lanes)
    steps = cursors[of].unsqueeze(1) + torch.arange(num_steps)
    block = transitions(new_serials(*steps.shape), steps, of.unsqueeze(1).expand_as(steps))
    block = with_frames(block, storage, lanes)
    if lanes is not None:
        storage.writer.extend(block.clone(), lanes=of)
    else:
        storage.extend(block.clone() if len(cursors) > 1 else block[0].clone())
    return block


def is_torn(rows: TensorDict) -> torch.Tensor:
    """Whether each row `[B]` is anything else than one row that was written."""
    step, lane = rows["observation"].long().unbind(-1)
    whole = transitions(rows["serial"], step, lane)
    torn = torch.zeros(rows.batch_size, dtype=torch.bool)
    if "stack" in rows:
        torn |= _are_torn_stacks(rows)
    for key in whole.keys(True, True):
        torn |= (rows[key] != whole[key]).reshape(len(torn), -1).any(1)
    return torn


def priority_of(serial: torch.Tensor, update: int) -> torch.Tensor:
    """The priority that a row is given by its n-th update, from 0 to 3; no other row is given it.

    Rows that are new before any was given have 1.
    """
    return 2 + (serial * 4 + update).float() / 64


def make(
    path: Path | None,
    num_lanes: int = 1,
    size: int = 24,
    *,
    with_priorities: bool = True,
    batch_size: int | None = 8,
    **options: Any,
) -> ReplayStorage:
    """A storage of `size` rows in a directory, new or as it was left."""
    options = {**ALL_KINDS[kind[0]], **options}
    sampler = PERSampler(size) if with_priorities else UniformSampler()
    return ReplayStorage(
        storage=PackedStorage(size, scratch_dir=path, **options),
        writer=EpisodeWriter(num_lanes),
        sampler=sampler,
        batch_size=batch_size,
    )


def abandon(storage: ReplayStorage) -> None:
    """Leaves the directory as a killed writer does."""
    if storage.storage.directory is not None:
        storage.storage.directory.abandon()


def _check_neighbours(
    rows: TensorDict, before: torch.Tensor, is_there: torch.Tensor, slots: torch.Tensor
) -> None:
    """Asserts that stacks are those that the rows before led to, which lie in the slots `before`."""
    place = {slot: at for at, slot in enumerate(slots.tolist())}
    at = torch.tensor([place[slot] for slot in before[is_there].tolist()], dtype=torch.int64)
    same = rows["stack"][is_there] == rows["next", "stack"][at]
    assert same.all(), "stacks of others"


def found(storage: ReplayStorage) -> Found:
    """What a storage holds, after a look at all that it says of it.

    Raises:
        AssertionError: a row is not one that was written, or is not where it must be.
    """
    storage.validate()
    if not storage.storage.initialized:
        return [], []
    episodes, size = storage.episodes, len(storage)
    num_lanes = episodes.num_envs
    cursors = episodes.num_steps_written.tolist()
    lanes: list[list[tuple[int, int]]] = [[] for _ in range(num_lanes)]
    if not size:
        return lanes, cursors
    slots = episodes.slots_by_age(torch.arange(size))
    rows = storage.storage.get(slots)
    torn = is_torn(rows)
    assert not torn.any(), f"torn: {rows[torn]['observation'].tolist()}"
    if "stack" in rows:
        _check_neighbours(rows, episodes.shift(slots, -1), episodes.behind(slots) > 0, slots)
    steps, of_lane = rows["observation"].long().unbind(-1)
    assert torch.equal(steps, episodes.steps(slots)), "rows in the place of others"
    assert torch.equal(of_lane, slots % num_lanes), "rows in the lane of others"
    for step, lane, serial in zip(
        steps.tolist(), of_lane.tolist(), rows["serial"].tolist(), strict=True
    ):
        lanes[lane].append((step, serial))
    for lane, cursor in zip(lanes, cursors, strict=True):
        lane.sort()
        assert [step for step, _ in lane] == list(range(cursor - len(lane), cursor)), "gaps"
    done = rows["next", "done"].squeeze(-1)
    is_last = episodes.ahead(slots) == 0
    assert not (done & ~is_last).any(), "an episode goes on beyond its end"
    assert (episodes.is_finished(slots) & is_last)[done].all(), "an episode is not over"
    return lanes, cursors
