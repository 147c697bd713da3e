"""Frames that are stored once: what users see are the stacks that were written, whatever is done.

A storage whose fields are `FrameStack`s, one that holds whole stacks and a list of rows live the same
life; see `stored_once`. The stacks are put together by hand here, as gymnasium's `FrameStackObservation`
and TorchRL's `CatFrames` put them together.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from stored_once import (
    ALL,
    COMBINATIONS,
    FURTHER,
    ONE_STEP,
    WITH_GOALS,
    BesidePlain,
    Kind,
    Stream,
    as_bits,
    assert_same,
    seeds,
)
from tensordict import TensorDict, TensorDictBase

from trl_storages import FrameStack, PackedStorage, ReplayStorage
from trl_storages.keys import next_key
from trl_storages.samplers import prioritized_of

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
        return PackedStorage(capacity, fields=fields, share_next=self.shares, **self.where())

    def where(self):
        """Returns where frames are stored."""
        return {}

    def after_gap(self, lane, seen, luck):
        anew = super().after_gap(lane, seen, luck)
        if not self.begins_at_gap(lane):
            # A stack that does not continue the one before it is refused.
            return anew | {key: seen[key] for key in self.chosen}
        anew = {key: stream.first(luck) for key, stream in self.streams.items()}
        is_gap = any(as_bits(anew[key]) != as_bits(seen[key]) for key in self.compared())
        return anew if is_gap else seen


class StacksInTensorOperations(StacksBesidePlain):
    backend = "torch"


def ranked(storage, answer):
    """What a storage answers, with the ages of rows in the place of their slots."""
    if isinstance(answer, TensorDictBase):
        answer = answer.clone()
        for key in [*answer.keys()]:
            if key.endswith("index"):
                answer[key] = ranked(storage, answer[key])["answer"]
        # Says which row it was by its slot, too.
        return answer.exclude("priority_stamp")
    if isinstance(answer, torch.Tensor) and answer.dtype is torch.int64:
        answer = torch.where(answer < 0, -1, storage.episodes.ages(answer.clamp(min=0)))
    return TensorDict({"answer": answer})


class StacksOnDisk(StacksBesidePlain):
    """Frames in a directory, beside whole stacks in memory. Rows have other slots there."""

    folder = None

    @staticmethod
    def kind(luck):
        found = StacksBesidePlain.kind(luck)
        StacksOnDisk.chosen, StacksOnDisk.shares = (
            StacksBesidePlain.chosen,
            StacksBesidePlain.shares,
        )
        # TorchRL's samplers know of no spare slots, and draws by priority are in the order of slots.
        alike = [
            name
            for name in found.combinations
            if name != "TorchRL's" and prioritized_of(ALL[name](1)[0]) is None
        ]
        return found._replace(combinations=alike)

    def where(self):
        if self.folder is None:
            self.folder, self.number = tempfile.mkdtemp(), 0
        return {"scratch_dir": Path(self.folder) / f"{self.number}"}

    def teardown(self):
        if hasattr(self, "both"):
            self.both[1].close()
        if self.folder is not None:
            shutil.rmtree(self.folder)
        super().teardown()

    def assert_alike(self, question):
        answers = self.ask(question)
        if answers:
            assert_same(*map(ranked, self.both, answers))
        return answers

    @rule(luck=seeds)
    def sample(self, luck):
        size = luck.choice([1, 2, 9, 16])
        self.assert_alike(lambda buffer: buffer.sample(size))

    @rule(luck=seeds)
    def read(self, luck):
        live = len(self.both[0])
        if not live:
            return
        shape = luck.choice([(1,), (2, 3), (5,), (0,), (2, 1, 2)])
        ranks = torch.tensor([luck.randrange(live) for _ in range(torch.Size(shape).numel())])
        ranks = ranks.long().view(shape)
        keys = luck.sample([*self.transitions[-1]], 3)

        def slots(buffer):
            return buffer.episodes.slots_by_age(ranks.reshape(-1)).view(shape)

        self.assert_alike(lambda buffer: buffer.storage.get(slots(buffer)))
        # Values, which are no slots, whatever their dtype.
        self.assert_alike(lambda buffer: TensorDict({"value": buffer[keys[0]]}))
        for key in keys:
            self.assert_alike(
                lambda buffer, key=key: TensorDict(
                    {"value": buffer.storage.read(slots(buffer), [key])[key]}
                )
            )

    @rule(way=st.sampled_from(["dumps", "state_dict"]), into_memory=st.booleans())
    def save_and_load(self, way, into_memory):
        """From a directory into another one, by way of memory or not."""
        with tempfile.TemporaryDirectory() as folder:
            self.number += 1
            plain, once = self.both
            if into_memory:
                self.where, where = dict, self.where
                once = self.loaded(once, way, 1, Path(folder) / "between")
                self.where = where
            self.both[1].close()
            again = self.loaded(once, way, 1, Path(folder) / "once")
            self.both = [self.loaded(plain, way, 0, Path(folder) / "plain"), again]
        self.loaded_lanes = {*range(self.num_envs)}

    @rule(luck=seeds)
    def open_anew(self, luck):
        self.end_episodes(luck)
        still_open = self.both[0].episodes.is_open.nonzero().squeeze(1).tolist()
        self.ask(lambda buffer: buffer.end_episodes())
        for lane in still_open:
            self.ended.add(lane)
            self.begins[lane] = True
        before = self.both[1]
        before.close()
        self.both[1] = self.new_buffer(once=True)
        self.both[1].writer.gaps.has_warned = before.writer.gaps.has_warned

    @invariant()
    @precondition(lambda self: hasattr(self, "both"))
    def holds_what_was_written(self):
        live = self.oracle.by_age()
        for buffer in self.both:
            buffer.validate()
            assert len(buffer) == len(live)
        if live:
            once = self.both[1]
            self.assert_rows(once.storage.get(once.episodes.live_slots()), live)
            reader = ReplayStorage.open(once.storage.scratch_dir, mode="r")
            self.assert_rows(reader[:], live[::-1])


class StacksOnDiskInTensorOperations(StacksOnDisk):
    backend = "torch"


TestStacks = StacksBesidePlain.TestCase
TestStacks.settings = settings(max_examples=25, stateful_step_count=12)
TestStacksInTensorOperations = StacksInTensorOperations.TestCase
TestStacksInTensorOperations.settings = settings(max_examples=8, stateful_step_count=12)
TestStacksOnDisk = StacksOnDisk.TestCase
TestStacksOnDisk.settings = settings(max_examples=20, stateful_step_count=12)
TestStacksOnDiskInTensorOperations = StacksOnDiskInTensorOperations.TestCase
TestStacksOnDiskInTensorOperations.settings = settings(max_examples=6, stateful_step_count=12)


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
