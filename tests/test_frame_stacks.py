"""Stacks of frames, of which rows hold the newest one: what is read is as if they held all."""

import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import FrameStackObservation
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import CatFrames, Compose, GymWrapper, TransformedEnv

import trl_storages
from trl_storages import (
    EpisodeSequence,
    EpisodeWriter,
    ERESampler,
    FrameStack,
    GoalRelabel,
    HERSampler,
    NStep,
    PackedStorage,
    PERSampler,
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
        self,
        seed: int,
        lane: int,
        stack: FrameStack,
        shape: tuple[int, ...],
        joined: bool,
        share_done: float = 0.25,
    ) -> None:
        self._share_done = share_done
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
            done = bool(self._rng.random() < self._share_done)
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


def reached(goal: torch.Tensor, wanted: torch.Tensor, _: Any) -> torch.Tensor:
    return (goal == wanted).float()


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "hindsight, recency, n steps": lambda: {
        "sampler": HERSampler("future", base=ERESampler(0.9, 4)),
        "transform": Compose(GoalRelabel(reached), NStep(3, 0.9)),
    },
    "hindsight, priorities": lambda: {
        "sampler": HERSampler("episode", base=PERSampler(24)),
        "transform": GoalRelabel(reached),
    },
    "recency of priorities, sequences": lambda: {
        "sampler": ERESampler(0.9, 4, base=PERSampler(24)),
        "sample_unit": EpisodeSequence(5, burn_in=2, boundary="cross"),
    },
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("share_next", [False, True])
def test_every_sampler_and_transform_sees_stacks(name: str, share_next: bool) -> None:
    stack, shape = of_kind("last", 3, "same")
    plain, framed = both(stack, shape, 24, 2, PARTS[name], share_next=share_next)
    lanes = streams(stack, "last", 2, 4)
    for num_steps in (4, 9, 13, 1, 5):
        data = torch.stack([lane.steps(num_steps) for lane in lanes])
        for storage in (plain, framed):
            storage.extend(data)
        assert_same_storages(plain, framed)
        if "priorities" in name:
            batches = [storage.sample() for storage in (plain, framed)]
            for storage, batch in zip((plain, framed), batches, strict=True):
                batch["td_error"] = batch["index"].float() / 10
                storage.update_tensordict_priority(batch)


class Frames(gymnasium.Env):
    """Frames that all differ; episodes of 2 to 6 steps."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, channels: tuple[int, ...] = ()) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (*channels, 3, 5), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(2, 7))
        return self.observation_space.sample(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        over = self._left == 0
        is_terminal = over and bool(self.np_random.integers(2))
        return self.observation_space.sample(), float(self._left), is_terminal, over, {}


RECIPES: dict[str, dict[str, Any]] = {
    "UniformReplayStorage": {},
    "NStepReplayStorage": {"n_step": 3},
    "PrioritizedReplayStorage": {"alpha": 0.7, "n_step": 2},
    "EREReplayStorage": {"eta": 0.9, "c_min": 5, "sample_unit": EpisodeSequence(4, burn_in=1)},
    "EpisodeReplayStorage": {},
}


@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize("name", RECIPES)
def test_records_wrapped_environments(name: str, padding: str) -> None:
    modes = list(gymnasium.vector.AutoresetMode)
    mode = modes[len(name) % 2]
    envs = gymnasium.vector.SyncVectorEnv(
        [lambda: FrameStackObservation(Frames(), 4, padding_type=padding)] * 3,
        autoreset_mode=mode,
    )
    stack = FrameStack(4, padding="same" if padding == "reset" else "constant")
    spaces = envs.single_observation_space, envs.single_action_space
    storages = [
        getattr(trl_storages, name)(
            *spaces,
            storage_size=45,
            num_envs=3,
            batch_size=4,
            seed=3,
            autoreset_mode=mode,
            **options,
            **RECIPES[name],
        )
        for options in (
            {},
            {"frame_stack": {"observation": stack}},
            {"frame_stack": {"observation": stack}, "share_next": True},
        )
    ]
    observations, _ = envs.reset(seed=0)
    envs.single_observation_space.seed(0)
    for step in range(60):
        actions = envs.action_space.sample()
        after, *outcome = envs.step(actions)
        for storage in storages:
            storage.record(observations, actions, *outcome, after)
        observations = after
        if step % 6 == 5 and storages[0].can_sample():
            batches = [storage.sample() for storage in storages]
            for batch in batches[1:]:
                assert_same(batches[0], batch)
            episodes = [storage.sample_episodes(2) for storage in storages]
            for batch in episodes[1:]:
                assert_same(episodes[0], batch)
    for storage in storages[1:]:
        assert_same(storages[0][:], storage[:])
        assert storage._storage.row_nbytes < storages[0]._storage.row_nbytes / 2
        assert "stacks" in repr(storage._storage)


def test_a_number_of_frames_finds_the_stacks() -> None:
    box = gymnasium.spaces.Box
    spaces = gymnasium.spaces.Dict(
        first=box(0, 255, (4, 8, 6), np.uint8),
        last=box(0, 255, (8, 6, 4), np.uint8),
        vector=box(-1, 1, (4,)),
        other=box(-1, 1, (3, 2)),
    )
    storage = trl_storages.UniformReplayStorage(spaces, gymnasium.spaces.Discrete(2), frame_stack=4)
    stacks = storage._storage.layout.stacks
    assert stacks == {
        "first": FrameStack(4),
        ("next", "first"): FrameStack(4),
        "last": FrameStack(4, -1),
        ("next", "last"): FrameStack(4, -1),
    }
    ambiguous = box(0, 255, (4, 8, 4), np.uint8)
    with pytest.raises(ValueError, match="along which dimension"):
        trl_storages.UniformReplayStorage(ambiguous, gymnasium.spaces.Discrete(2), frame_stack=4)
    with pytest.raises(ValueError, match="first or last of the dimensions"):
        trl_storages.UniformReplayStorage(
            spaces["vector"], gymnasium.spaces.Discrete(2), frame_stack=4
        )


@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.parametrize("share_next", [False, True])
def test_takes_what_collectors_with_stacks_send(padding: str, share_next: bool) -> None:
    def make_env() -> TransformedEnv:
        env = GymWrapper(Frames((1,)), categorical_action_encoding=True)
        stack = CatFrames(3, -3, in_keys=["observation"], padding=padding)
        return TransformedEnv(env, Compose(stack))

    env = make_env()
    storages = [
        trl_storages.NStepReplayStorage(
            env.observation_spec, env.action_spec, storage_size=50, batch_size=16, seed=2, **options
        )
        for options in (
            {},
            {
                "frame_stack": {"observation": FrameStack(3, padding=padding)},
                "share_next": share_next,
            },
        )
    ]
    collector = Collector(make_env, None, frames_per_batch=20, total_frames=100)
    for data in collector:
        for storage in storages:
            storage.extend(data)
        assert_same_storages(*storages)
    collector.shutdown()


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("share_next", [False, True])
def test_stacks_that_do_not_continue_one_another_are_refused(
    num_before: int, share_next: bool
) -> None:
    stack = FrameStack(3)
    _, storage = both(stack, (3, 2, 3), 20, share_next=share_next)
    stream = Stream(3, 0, stack, (2, 3), False, share_done=0)
    data = stream.steps(6)
    if num_before:
        storage.extend(data[:num_before])
    before = storage[:] if num_before else None
    good = data[num_before:]
    for key, where, message in (
        ("pixels", (0, 0), "must continue" if num_before else "must begin with"),
        ("pixels", (2, 1), "must continue"),
        (("next", "pixels"), (3, 0), "under 'next'"),
    ):
        bad = good.clone()
        bad[key][where] += 1
        with pytest.raises(ValueError, match=message):
            storage.extend(bad)
        assert len(storage) == num_before
        storage.validate()
        if before is not None:
            assert_same(before, storage[:])
    storage.extend(good)
    assert_same(data.exclude("x"), storage[:].exclude("index"))
    # In the middle of an episode there is nothing to begin with.
    storage.end_episodes()
    with pytest.raises(ValueError, match="must begin with"):
        storage.extend(stream.steps(2))


@pytest.mark.parametrize("share_next", [False, True])
def test_dumps_and_copies_go_on_where_they_were(share_next: bool, tmp_path: Path) -> None:
    stack, shape = of_kind("last", 4, "same")
    plain, framed = both(stack, shape, 24, 2, share_next=share_next)
    _, other = both(stack, shape, 24, 2, share_next=share_next)
    lanes = streams(stack, "last", 2, 5)
    for num_steps in (9, 7):
        data = torch.stack([lane.steps(num_steps) for lane in lanes])
        plain.extend(data)
        framed.extend(data)
    framed.dumps(tmp_path / "dump")
    other.loads(tmp_path / "dump")
    assert_same(plain[:], other[:])
    copied = pickle.loads(pickle.dumps(framed._storage))
    slots = framed.episodes.live_slots()
    assert_same(plain._storage.get(slots), copied.get(slots))
    data = torch.stack([lane.steps(5) for lane in lanes])
    for storage in (plain, other):
        storage.extend(data)
    assert_same(plain[:], other[:])


@pytest.mark.parametrize("share_next", [False, True])
def test_directories_take_dumps_and_give_them(share_next: bool, tmp_path: Path) -> None:
    stack, shape = of_kind("last", 4, "same")
    _, framed = both(stack, shape, 24, 2)
    fields = framed._storage.layout.declared
    storage = ReplayStorage(
        storage=PackedStorage(24, scratch_dir=tmp_path, fields=fields, share_next=share_next),
        writer=EpisodeWriter(2, on_gap="ignore"),
    )
    lanes = streams(stack, "last", 2, 5)
    for num_steps in (9, 7):
        framed.extend(torch.stack([lane.steps(num_steps) for lane in lanes]))
    before = framed[:]
    storage.load_state_dict(framed.state_dict())
    assert_same(before, storage[:])
    storage.validate()
    data = torch.stack([lane.steps(5) for lane in lanes])
    storage.extend(data)
    framed.load_state_dict(storage.state_dict())
    assert_same(framed[:], storage[:])
    framed.validate()
    storage.close()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (FrameStack(2), "num_frames=2"),
        (FrameStack(4, padding="constant"), "padding='constant'"),
    ],
)
def test_dumps_of_other_stacks_are_refused(other: FrameStack, said: str) -> None:
    _, framed = both(FrameStack(4), (4, 2, 3), 24)
    plain, unlike = both(other, (4, 2, 3), 24)
    framed.extend(streams(FrameStack(4), "first", 1, 5)[0].steps(5))
    for storage in (plain, unlike):
        with pytest.raises(ValueError, match="of other fields"):
            storage.load_state_dict(framed.state_dict())
        assert len(storage) == 0
    with pytest.raises(ValueError, match=rf"got uint8.*{re.escape(said)}"):
        unlike.load_state_dict(framed.state_dict())


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ((torch.uint8, (4, 3), FrameStack(3)), "num_frames=3"),
        ((torch.uint8, (4, 6), FrameStack(3, -1)), "just num_frames"),
        ((torch.uint8, (4, 6), FrameStack(4, 2)), "dim must be"),
        ((torch.uint8, (4, 6), 4), "FrameStack"),
    ],
)
def test_fields_that_are_no_stacks_are_refused(field: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        PackedStorage(4, fields={"pixels": field})


def test_a_stack_under_next_alone_is_refused() -> None:
    kind = (torch.uint8, (4, 6))
    stacked_alone = {"pixels": kind, ("next", "pixels"): (*kind, FrameStack(4))}
    with pytest.raises(ValueError, match="alone"):
        PackedStorage(4, fields=stacked_alone)
    others = {"pixels": (*kind, FrameStack(4)), ("next", "pixels"): (torch.uint8, (4, 5))}
    with pytest.raises(ValueError, match="must be the same stack"):
        PackedStorage(4, fields=others)
