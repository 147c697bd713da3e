"""Frames that are stored once: what users see are the stacks that were written, whatever is done.

A storage whose fields are `FrameStack`s, one that holds whole stacks and a list of rows live the same
life; see `stored_once`. The stacks are put together by hand here, as gymnasium's `FrameStackObservation`
and TorchRL's `CatFrames` put them together.
"""

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import rule
from stored_once import (
    COMBINATIONS,
    FURTHER,
    ONE_STEP,
    WITH_GOALS,
    BesidePlain,
    Kind,
    Stream,
    as_bits,
)
from tensordict import TensorDict

from trl_storages import FrameStack, PackedStorage, ReplayStorage
from trl_storages.keys import next_key

pytestmark = pytest.mark.requirement("frame-stack")

FRAMES = [(), (1,), (3,), (2, 3), (1, 2, 2)]
DTYPES = [torch.uint8, torch.uint8, torch.float32, torch.float16, torch.int64, torch.bool]


class Frames(Stream):
    """Stacks of frames, of which there are few."""

    def __init__(self, dtype, shape, stack, luck):
        super().__init__(dtype, stack.frame_shape(shape), luck)
        self.stack, self.dim = stack, stack.dim % len(shape)
        self.channels = shape[self.dim] != stack.num_frames

    def put_together(self, frames):
        if self.channels:
            return torch.cat(frames, 0)
        return torch.stack(frames, self.dim)

    def begun(self, frame):
        padding = frame if self.stack.padding == "same" else torch.zeros_like(frame)
        return self.put_together([padding] * (self.stack.num_frames - 1) + [frame])

    def frames(self, seen):
        count = self.stack.num_frames
        return seen.chunk(count, 0) if self.channels else seen.unbind(self.dim)

    def first(self, luck):
        return self.begun(super().first(luck))

    def again(self, seen):
        return self.begun(self.frames(seen)[-1])

    def after(self, seen, luck):
        frames = self.frames(seen)
        new = frames[-1] if luck.random() < 0.2 else Stream.first(self, luck)
        return self.put_together([*frames[1:], new])


def stack_kind(luck):
    """Rows of stacked pixels, alone or beside other observations."""
    frame = luck.choice(FRAMES)
    num_frames = luck.choice([2, 3, 4])
    dims = [0, -1, luck.randrange(len(frame) + 1)]
    stack = FrameStack(num_frames, luck.choice(dims), luck.choice(["same", "constant"]))
    if frame and luck.random() < 0.4:
        # Several channels a frame, one behind the other.
        frame = (luck.choice([2, 3]), *frame[1:])
        stack = FrameStack(num_frames, 0, stack.padding)
        shape = (num_frames * frame[0], *frame[1:])
    else:
        shape = list(frame)
        shape.insert(stack.dim % (len(frame) + 1), num_frames)
    observations = {"pixels": (luck.choice(DTYPES), tuple(shape))}
    goal = (luck.choice([torch.float32, torch.float64]), (2,))
    more = luck.choice(
        [{}, {"observation": (torch.float32, (3,))}, {"achieved_goal": goal, "desired_goal": goal}]
    )
    names = [*COMBINATIONS, *(WITH_GOALS if "desired_goal" in more else ())]
    kind = Kind(observations | more, ONE_STEP | luck.choice(FURTHER), names)
    return kind, {"pixels": stack}


class StacksBesidePlain(BesidePlain):
    loads_crosswise = False

    @staticmethod
    def kind(luck):
        kind, StacksBesidePlain.chosen = stack_kind(luck)
        StacksBesidePlain.shares = luck.random() < 0.5
        return kind

    def new_stream(self, key, dtype, shape, luck):
        if key not in self.chosen:
            return Stream(dtype, shape, luck)
        return Frames(dtype, shape, self.chosen[key], luck)

    def new_storage(self, capacity, *, once):
        kind = self.kind_of_rows
        fields = dict(kind.observations) | kind.others
        fields |= {next_key(key): field for key, field in kind.observations.items()}
        if not once:
            return PackedStorage(capacity, fields=fields)
        for key, stack in self.chosen.items():
            fields[key] = (*fields[key], stack)
        return PackedStorage(capacity, fields=fields, share_next=self.shares)

    def after_gap(self, seen, luck):
        anew = super().after_gap(seen, luck)
        if self.on_gap != "cut":
            # A stack that does not continue the one before it is refused.
            return anew | {key: seen[key] for key in self.chosen}
        anew = {key: stream.first(luck) for key, stream in self.streams.items()}
        is_gap = any(as_bits(anew[key]) != as_bits(seen[key]) for key in self.compared())
        return anew if is_gap else seen

    @rule()
    def overwrite(self):
        """A frame is that of several rows, so that none of them can be changed alone."""
        once = self.both[1]
        if len(once):
            with pytest.raises(RuntimeError, match="written once"):
                once[:1] = once[:1]


class StacksInTensorOperations(StacksBesidePlain):
    backend = "torch"


TestStacks = StacksBesidePlain.TestCase
TestStacks.settings = settings(max_examples=25, stateful_step_count=12)
TestStacksInTensorOperations = StacksInTensorOperations.TestCase
TestStacksInTensorOperations.settings = settings(max_examples=8, stateful_step_count=12)


@pytest.mark.parametrize("shape", [(0,), (1, 0), (1,), (2, 3)])
def test_rows_of_any_number_are_read(shape):
    fields = {
        "pixels": (torch.uint8, (4, 3), FrameStack(4)),
        ("next", "pixels"): (torch.uint8, (4, 3)),
        ("next", "done"): (torch.bool, (1,)),
    }
    storage = ReplayStorage(storage=PackedStorage(8, fields=fields))
    frames = torch.arange(6, dtype=torch.uint8).repeat_interleave(3).view(6, 3)
    stack, following = frames[[0, 0, 0, 0]], frames[[0, 0, 0, 1]]
    done = torch.zeros(1, 1, dtype=torch.bool)
    after = {"pixels": following.unsqueeze(0), "done": done}
    storage.extend(TensorDict({"pixels": stack.unsqueeze(0), "next": after}, [1]))
    found = storage.storage.get(torch.zeros(shape, dtype=torch.int64))
    assert found["pixels"].shape == (*shape, 4, 3)
    assert torch.equal(found["next", "pixels"], following.expand(*shape, 4, 3))
