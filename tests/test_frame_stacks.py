"""Stacks of frames, of which rows hold the newest one: what is read is as if they held all."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NestedKey, TensorDict, TensorDictBase

from trl_storages import (
    EpisodeWriter,
    FrameStack,
    PackedStorage,
    ReplayStorage,
    UniformSampler,
)

# How stacks are laid out: the shape of a frame, that of the stack, and the dimension.
SHAPES: dict[str, tuple[tuple[int, ...], int, int]] = {
    "first": ((2, 3), 0, 4),
    "last": ((2, 3), -1, 3),
    "middle": ((2, 3), 1, 2),
    "channels": ((6,), 0, 3),
}


def stacked(frames: Sequence[torch.Tensor], stack: FrameStack, *, joined: bool) -> torch.Tensor:
    """Stacks the newest frames of an episode the slow way."""
    count = stack.num_frames
    first = torch.zeros_like(frames[0]) if stack.padding == "constant" else frames[0]
    newest = [first] * count + list(frames)
    newest = newest[-count:]
    return torch.cat(newest, 0) if joined else torch.stack(newest, stack.dim)


class Stream:
    """Steps of one lane: episodes of random lengths, whose frames differ."""

    def __init__(
        self, seed: int, lane: int, stack: FrameStack, shape: tuple[int, ...], joined: bool
    ):
        self._rng = np.random.default_rng([seed, lane])
        self._stack, self._shape, self._joined = stack, shape, joined
        self._frames: list[torch.Tensor] = []
        self._number = lane * 1000

    def _frame(self) -> torch.Tensor:
        return torch.from_numpy(self._rng.integers(0, 255, self._shape, np.uint8))

    def steps(self, num_steps: int) -> TensorDictBase:
        rows = []
        for _ in range(num_steps):
            if not self._frames:
                self._frames = [self._frame()]
            before = stacked(self._frames, self._stack, joined=self._joined)
            self._frames.append(self._frame())
            after = stacked(self._frames, self._stack, joined=self._joined)
            done = bool(self._rng.random() < 0.25)
            self._number += 1
            ended = torch.tensor([done])
            rows.append(
                TensorDict(
                    {
                        "pixels": before,
                        "achieved_goal": torch.tensor([self._number]).float(),
                        "desired_goal": torch.tensor([self._number]).float(),
                        "action": torch.tensor(self._number),
                        "next": {
                            "pixels": after,
                            "achieved_goal": torch.tensor([self._number + 1]).float(),
                            "desired_goal": torch.tensor([self._number]).float(),
                            "reward": torch.tensor([float(self._number)]),
                            "done": ended,
                            "terminated": ended.clone(),
                            "truncated": torch.zeros(1, dtype=torch.bool),
                        },
                    },
                    [],
                )
            )
            if done:
                self._frames = []
        return torch.stack(rows)


def both(
    stack: FrameStack,
    shape: Sequence[int],
    size: int,
    num_envs: int = 1,
    parts: Callable[[], dict[str, Any]] = dict,
    *,
    share_next: bool = False,
) -> list[ReplayStorage]:
    """Returns a storage that holds stacks, and one that holds single frames, perhaps each once."""
    pixels = (torch.uint8, tuple(shape))
    found = []
    for field in (pixels, (*pixels, stack)):
        fields: dict[NestedKey, Any] = {
            "pixels": field,
            "achieved_goal": (torch.float32, (1,)),
            "desired_goal": (torch.float32, (1,)),
            "action": (torch.int64, ()),
            ("next", "pixels"): pixels,
            ("next", "achieved_goal"): (torch.float32, (1,)),
            ("next", "desired_goal"): (torch.float32, (1,)),
            ("next", "reward"): (torch.float32, (1,)),
            ("next", "done"): (torch.bool, (1,)),
            ("next", "terminated"): (torch.bool, (1,)),
            ("next", "truncated"): (torch.bool, (1,)),
        }
        options = {"sampler": UniformSampler(), "batch_size": 32, **parts()}
        found.append(
            ReplayStorage(
                storage=PackedStorage(
                    size, fields=fields, share_next=share_next and len(field) > 2
                ),
                writer=EpisodeWriter(num_envs, on_gap="ignore"),
                generator=torch.Generator().manual_seed(7),
                **options,
            )
        )
    return found


def assert_same(one: TensorDictBase, other: TensorDictBase) -> None:
    keys = {*one.keys(True, True)}
    assert keys == {*other.keys(True, True)}
    for key in keys:
        assert one[key].dtype is other[key].dtype
        assert torch.equal(one[key], other[key]), key


def assert_same_storages(plain: ReplayStorage, framed: ReplayStorage) -> None:
    plain.validate()
    framed.validate()
    assert_same(plain[:], framed[:])
    for _ in range(3):
        assert_same(plain.sample(), framed.sample())


def streams(stack: FrameStack, kind: str, num_envs: int, seed: int = 0) -> list[Stream]:
    frame = SHAPES[kind][0]
    return [Stream(seed, lane, stack, frame, kind == "channels") for lane in range(num_envs)]


def of_kind(kind: str, num_frames: int, padding: str) -> tuple[FrameStack, tuple[int, ...]]:
    frame, dim, _ = SHAPES[kind]
    stack = FrameStack(num_frames, dim, padding)  # type: ignore[arg-type]
    if kind == "channels":
        return stack, (num_frames * frame[0],)
    shape = list(frame)
    shape.insert(dim % (len(frame) + 1), num_frames)
    return stack, tuple(shape)


@given(
    kind=st.sampled_from(sorted(SHAPES)),
    num_frames=st.integers(2, 5),
    padding=st.sampled_from(["same", "constant"]),
    num_envs=st.integers(1, 3),
    steps_per_lane=st.integers(1, 9),
    writes=st.lists(st.integers(1, 14), min_size=1, max_size=6),
    seed=st.integers(0, 100),
    share_next=st.booleans(),
)
def test_reads_what_a_storage_of_stacks_reads(
    kind: str,
    num_frames: int,
    padding: str,
    num_envs: int,
    steps_per_lane: int,
    writes: list[int],
    seed: int,
    share_next: bool,
) -> None:
    stack, shape = of_kind(kind, num_frames, padding)
    size = steps_per_lane * num_envs
    plain, framed = both(stack, shape, size, num_envs, share_next=share_next)
    lanes = streams(stack, kind, num_envs, seed)
    rng = np.random.default_rng(seed)
    for number, num_steps in enumerate(writes):
        if number % 2 and num_envs > 1:
            which = sorted(
                rng.choice(num_envs, rng.integers(1, num_envs + 1), replace=False).tolist()
            )
        else:
            which = list(range(num_envs))
        data = torch.stack([lanes[lane].steps(num_steps) for lane in which])
        data = data[0] if len(which) == 1 else data
        for storage in (plain, framed):
            storage.extend(data, lanes=which)
        assert_same_storages(plain, framed)
    keep = int(rng.integers(0, steps_per_lane + 1))
    for storage in (plain, framed):
        storage.empty(keep_steps=keep)
    if len(plain):
        assert_same_storages(plain, framed)
    data = torch.stack([lane.steps(3) for lane in lanes])
    if keep:
        for storage in (plain, framed):
            storage.extend(data if num_envs > 1 else data[0])
        assert_same_storages(plain, framed)
