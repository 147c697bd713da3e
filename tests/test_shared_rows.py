"""Rows that share their next observations are read like rows that store them, bit for bit."""

from __future__ import annotations

import copy
import pickle
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import RoundRobinWriter, TensorDictReplayBuffer
from torchrl.envs import GymEnv, SerialEnv

from trl_storages import (
    EpisodeWriter,
    NStepReplayStorage,
    PackedStorage,
    ReplayStorage,
    UniformReplayStorage,
)
from trl_storages.kernels import sharing
from trl_storages.kernels.sharing import ENTRY_BIT, NUM_TIPS, header_dtype
from trl_storages.rows import Layout

KINDS = (torch.complex128, torch.float64, torch.float32, torch.bfloat16, torch.uint8)


def make(size: int, num_envs: int, *, share_next: bool) -> ReplayStorage:
    return ReplayStorage(
        storage=PackedStorage(size, share_next=share_next),
        writer=EpisodeWriter(num_envs, on_gap="ignore"),
        batch_size=8,
    )


class Stream:
    """Steps of lanes whose next observations mostly come back, and sometimes do not."""

    def __init__(self, num_envs: int, seed: int, nan: float = 0.0) -> None:
        self.generator, self.nan = torch.Generator().manual_seed(seed), nan
        self.last = self.noise(num_envs, 4)

    def noise(self, *shape: int) -> torch.Tensor:
        noise = torch.randn(*shape, generator=self.generator)
        return noise.masked_fill(torch.rand(shape, generator=self.generator) < self.nan, torch.nan)

    def chance(self, *shape: int, of: float) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) < of

    def steps(self, lanes: list[int], num_steps: int) -> TensorDict:
        """`[L, T]`."""
        shape = len(lanes), num_steps
        states = self.noise(*shape, 4)
        done = self.chance(*shape, 1, of=0.2)
        is_gap = done | self.chance(*shape, 1, of=0.1)
        after = torch.where(is_gap, self.noise(*shape, 4), states)
        before = torch.cat([self.last[lanes].unsqueeze(1), states[:, :-1]], 1)
        self.last[lanes] = states[:, -1]
        return TensorDict(
            {
                "observation": before[..., :3].contiguous(),
                "achieved_goal": before[..., 3:].double(),
                "action": self.noise(*shape, 2),
                "next": {
                    "observation": after[..., :3].contiguous(),
                    "achieved_goal": after[..., 3:].double(),
                    "reward": self.noise(*shape, 1),
                    "done": done,
                },
            },
            shape,
        )


def bits(data: Any) -> dict[Any, torch.Tensor]:
    return {key: data[key].contiguous().view(torch.uint8) for key in data.keys(True, True)}


def assert_same(one: Any, other: Any) -> None:
    one, other = bits(one), bits(other)
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def check_side(storage: ReplayStorage) -> None:
    """No entry is lost or named twice, and only rows that need one have one."""
    packed, live = storage._storage, storage.episodes.slots_by_age(torch.arange(len(storage)))
    entries = packed.layout.framed.sharing.headers(packed.rows) >> ENTRY_BIT
    named, num_tips = entries[entries > 0].tolist(), NUM_TIPS * storage.episodes.num_envs
    assert len(set(named)) == len(named) == packed._side.num_used - num_tips
    assert all(entry > num_tips for entry in named)
    assert {*entries.nonzero().flatten().tolist()} <= {*live.tolist()}


@given(
    num_envs=st.integers(1, 3),
    steps_per_lane=st.integers(1, 7),
    seed=st.integers(0, 2**30),
    acts=st.lists(st.integers(0, 99), min_size=1, max_size=20),
)
def test_what_is_read_is_what_was_written(
    num_envs: int, steps_per_lane: int, seed: int, acts: list[int]
) -> None:
    size, stream = num_envs * steps_per_lane + 1, Stream(num_envs, seed, nan=0.05)
    plain, shared = (make(size, num_envs, share_next=share) for share in (False, True))
    for act in acts:
        if act < 10:
            for storage in (plain, shared):
                storage.empty()
            continue
        lanes = [*range(num_envs)] if act % 3 else [act % num_envs]
        data = stream.steps(lanes, 1 + act % 10)
        for storage in (plain, shared):
            storage.writer.extend(data if num_envs > 1 else data[0], lanes=lanes)
        slots, others = plain.episodes.random_slots(10, stream.generator).view(2, 5)
        assert_same(plain[:], shared[:])
        assert_same(plain._storage.get(slots), shared._storage.get(slots))
        keys = plain._storage.layout.keys
        one, other = (it._storage.read(slots.view(1, 5), keys) for it in (plain, shared))
        assert_same(TensorDict(one, [1, 5]), TensorDict(other, [1, 5]))
        one, other = (
            it._storage.layout.tensordict(it._storage.gather(slots, others))
            for it in (plain, shared)
        )
        assert_same(one, other)
        check_side(shared)


@pytest.mark.parametrize("index", [0, -1, slice(2, None), [1, 2], torch.tensor([True, False] * 3)])
def test_any_index_reads_whole_rows(index: Any) -> None:
    data = Stream(1, 0).steps([0], 6)[0]
    storages = [make(6, 1, share_next=share) for share in (False, True)]
    for storage in storages:
        storage.extend(data)
    assert_same(*(storage._storage.get(index) for storage in storages))
    assert_same(*(storage._storage[index] for storage in storages))


def test_a_continuous_stream_needs_the_tips_of_its_lanes_only() -> None:
    stream, storage = Stream(2, 0), make(100, 2, share_next=True)
    data = stream.steps([0, 1], 60)
    data["next", "observation"][:, :-1] = data["observation"][:, 1:]
    data["next", "achieved_goal"][:, :-1] = data["achieved_goal"][:, 1:]
    for step in range(60):
        storage.extend(data[:, step : step + 1])
    assert storage._storage._side.num_used == 2 * NUM_TIPS
    assert storage._storage._side.counts[1] == 2 * NUM_TIPS
    assert "sharing the next ['achieved_goal', 'observation']" in repr(storage._storage)
    assert storage._storage.side_nbytes == 2 * NUM_TIPS * 24


def test_rows_take_little_more_than_half() -> None:
    fields: dict[Any, Any] = {"action": (torch.float32, (4,))}
    for key, size in (("observation", 25), ("achieved_goal", 3), ("desired_goal", 3)):
        fields[key] = fields["next", key] = torch.float32, (size,)
    fields["next", "reward"] = torch.float32, (1,)
    for flag in ("done", "terminated", "truncated"):
        fields["next", flag] = torch.bool, (1,)
    plain, shared = Layout(fields), Layout(fields, header=header_dtype(10**6))
    assert shared.described == plain.described
    # 147 bytes of values, and 4 of a header.
    assert shared.stored_nbytes == 152
    assert shared.stored_nbytes <= 0.56 * plain.stored_nbytes
    assert Layout.from_json(shared.to_json()) == shared != plain


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.booleans()), min_size=1),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_headers_lie_between_fields(described, header) -> None:
    fields: dict[Any, Any] = {}
    for number, (dtype, size, is_shared) in enumerate([(torch.uint8, 3, True), *described]):
        fields[f"{number}"] = dtype, (size,)
        if is_shared:
            fields["next", f"{number}"] = dtype, (size,)
    layout = Layout(fields, header=header)
    assert Layout.from_json(layout.to_json()) == layout
    sharing, moved = layout.sharing, layout.row_nbytes - layout.stored_nbytes
    assert moved == 8 * sharing.shared_words >= sharing.shared_bytes
    start = sharing.header_start * header.itemsize
    taken = [*range(start, start + header.itemsize)]
    for field in layout.fields:
        assert field.start_byte % field.dtype.itemsize == moved % field.dtype.itemsize == 0
        if field.key in [twin.key for twin in layout.fields[: sharing.num_shared]]:
            own = layout.stored_start(field.key[1])
            assert own == field.start_byte
            assert own + field.num_bytes <= sharing.shared_bytes
        else:
            own = layout.stored_start(field.key)
            taken += range(own, own + field.num_bytes)
    assert len(set(taken)) == len(taken)
    assert all(0 <= byte < layout.stored_nbytes for byte in taken)


def test_many_rows_have_long_headers() -> None:
    storages = [make(2**25 + 1, 1, share_next=share) for share in (False, True)]
    for storage in storages:
        storage.extend(Stream(1, 4).steps([0], 30))
    assert storages[1]._storage.layout.sharing.header_dtype is torch.int64
    assert_same(*(storage[:] for storage in storages))


@pytest.mark.parametrize("kind", [torch.complex128, torch.float64, torch.uint8, torch.float32])
def test_fields_of_any_kind_lie_where_they_are_looked_for(kind: torch.dtype) -> None:
    data = TensorDict(
        {
            "a": torch.arange(12).view(4, 3).to(kind),
            "pixels": torch.arange(20, dtype=torch.uint8).view(4, 5),
            "number": torch.arange(4),
            "next": {"done": torch.zeros(4, 1, dtype=torch.bool)},
        },
        [4],
    )
    data["next", "a"], data["next", "pixels"] = data["a"] + 3, data["pixels"] + 5
    storages = [make(4, 1, share_next=share) for share in (False, True)]
    for storage in storages:
        storage.extend(data[:3])
        storage.extend(data[3:])
    assert_same(*(storage[:] for storage in storages))
    assert storages[1]._storage._side.num_used == NUM_TIPS
    assert_same(
        storages[1]._storage._storage[:3].select("a", "number"), data[:3].select("a", "number")
    )


def test_entries_find_room_where_memory_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_STORAGES_BACKEND", "torch")
    monkeypatch.setattr(sharing, "_is_lazy", lambda device: False)
    monkeypatch.setattr(sharing, "_FIRST_ROOM", 2)
    plain, shared = (make(60, 2, share_next=share) for share in (False, True))
    stream, rooms = Stream(2, 1), []
    for _ in range(30):
        data = stream.steps([0, 1], 4)
        for storage in (plain, shared):
            storage.extend(data)
        assert_same(plain[:], shared[:])
        check_side(shared)
        rooms.append(len(shared._storage._side.values))
    # It holds little more than what is used, and twice that at most.
    assert rooms[0] <= 2 * (8 + 2 * NUM_TIPS)
    assert rooms == sorted(rooms)
    assert rooms[-1] <= 61 + 2 * NUM_TIPS


def test_other_writers_are_refused() -> None:
    buffer = TensorDictReplayBuffer(
        storage=PackedStorage(8, share_next=True), writer=RoundRobinWriter(), batch_size=2
    )
    with pytest.raises(RuntimeError, match=r"writer=EpisodeWriter\(num_envs\)"):
        buffer.extend(Stream(1, 0).steps([0], 3)[0])


def on_disk(path: Any, size: int, num_envs: int, *, share_next: bool) -> ReplayStorage:
    return ReplayStorage(
        storage=PackedStorage(size, scratch_dir=path, share_next=share_next),
        writer=EpisodeWriter(num_envs, on_gap="ignore"),
        batch_size=8,
    )


@pytest.mark.parametrize("backend", ["numba", "torch"])
@settings(max_examples=15)
@given(
    num_envs=st.integers(1, 3),
    steps_per_lane=st.integers(1, 7),
    seed=st.integers(0, 2**30),
    acts=st.lists(st.integers(0, 99), min_size=1, max_size=20),
)
def test_a_directory_is_read_as_one_that_shares_nothing(
    backend: str, num_envs: int, steps_per_lane: int, seed: int, acts: list[int]
) -> None:
    size, stream = num_envs * steps_per_lane + 1, Stream(num_envs, seed, nan=0.05)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("TRL_STORAGES_BACKEND", backend)
        paths = {share: Path(folder) / f"{share}" for share in (False, True)}

        def opened() -> list[ReplayStorage]:
            return [
                on_disk(path, size, num_envs, share_next=share) for share, path in paths.items()
            ]

        storages, num_steps = opened(), 0
        for act in acts:
            lanes = [*range(num_envs)] if act % 3 else [act % num_envs]
            data = stream.steps(lanes, 1 + act % 10)
            for storage in storages:
                if act < 15 and num_steps:
                    storage.empty(keep_steps=act % 5)
                elif act < 25 and num_steps:
                    storage.flush()
                elif act < 35 and num_steps:
                    # Closed, or killed.
                    storage.close() if act % 2 else storage.storage.directory.abandon()
                elif act < 40 and num_steps:
                    storage.load_state_dict(storage.state_dict())
                else:
                    storage.writer.extend(data if num_envs > 1 else data[0], lanes=lanes)
            num_steps += 1
            if not storages[0].storage.directory:
                continue
            if not storages[0].storage.directory.is_writer:
                storages = opened()
            plain, shared = storages
            shared.validate()
            readers = [ReplayStorage.open(path, mode="r") for path in paths.values()]
            if not len(plain):
                assert not len(shared)
                continue
            for one, other in (storages, readers):
                assert_same(one[:], other[:])
                slots, others = one.episodes.random_slots(10, stream.generator).view(2, 5)
                found = [it.storage.gather(slots, others) for it in (one, other)]
                assert_same(
                    *(
                        it.storage.layout.tensordict(rows)
                        for it, rows in zip((one, other), found, strict=True)
                    )
                )
            copied = on_disk(None, size, num_envs, share_next=bool(act % 2))
            copied.load_state_dict(copy.deepcopy((shared, readers[1])[act % 3 == 0].state_dict()))
            assert_same(copied[:], plain[:])
        for storage in storages:
            if storage.storage.directory:
                storage.storage.directory.abandon()


def test_the_files_of_a_continuous_stream_hold_each_observation_once(tmp_path: Any) -> None:
    size, shape = 400, (64, 64)
    storages = [
        on_disk(tmp_path / f"{share}", size, 2, share_next=share) for share in (False, True)
    ]
    frames = torch.arange(1 + 2 * size, dtype=torch.uint8)[:, None, None].expand(-1, *shape)
    for step in range(2 * size):
        data = TensorDict(
            {
                "pixels": frames[[step, step]],
                "next": {
                    "pixels": frames[[step + 1, step + 1]],
                    "done": torch.full((2, 1), step % 50 == 49),
                },
            },
            [2],
        )
        for storage in storages:
            storage.extend(data)
    assert_same(*(storage[:] for storage in storages))
    taken = [
        sum(file.stat().st_blocks * 512 for file in (tmp_path / f"{share}").iterdir())
        for share in (False, True)
    ]
    side = storages[1].storage.side_nbytes
    # None but those that end episodes: nobody called flush().
    assert side <= (2 * (size // 2 // 50 + 3) + 2 * NUM_TIPS) * (64 * 64 + 8)
    assert taken[1] < 0.65 * taken[0]
    storages[1].close()
    again = on_disk(tmp_path / "True", size, 2, share_next=True)
    assert again.storage.side_nbytes <= side
    assert_same(again[:], storages[0][:])


def test_a_directory_is_opened_as_it_was_made(tmp_path: Any) -> None:
    storage = on_disk(tmp_path, 8, 1, share_next=True)
    storage.extend(Stream(1, 0).steps([0], 5)[0])
    storage.close()
    with pytest.raises(ValueError, match="made with share_next=True, got False"):
        on_disk(tmp_path, 8, 1, share_next=False)
    again = ReplayStorage.open(tmp_path)
    assert again.storage.share_next
    assert_same(again[:], storage[:])


def test_rows_without_next_observations_are_refused() -> None:
    storage = make(8, 1, share_next=True)
    data = Stream(1, 0).steps([0], 3)[0].exclude(("next", "observation"), ("next", "achieved_goal"))
    with pytest.raises(ValueError, match="Leave share_next out"):
        storage.extend(data)


def written(size: int, num_envs: int, num_steps: int, **options: Any) -> ReplayStorage:
    storage = make(size, num_envs, **options)
    data = Stream(num_envs, 3).steps([*range(num_envs)], num_steps)
    for step in range(0, num_steps, 3):
        storage.extend(data[:, step : step + 3] if num_envs > 1 else data[0, step : step + 3])
    return storage


@pytest.mark.parametrize("keep_steps", [1, 4, 50])
def test_rows_that_are_kept_share_as_before(keep_steps: int) -> None:
    plain, shared = (written(20, 2, 30, share_next=share) for share in (False, True))
    for storage in (plain, shared):
        storage.empty(keep_steps=keep_steps)
    assert_same(plain[:], shared[:])
    check_side(shared)
    data = Stream(2, 9).steps([0, 1], 5)
    for storage in (plain, shared):
        storage.extend(data)
    assert_same(plain[:], shared[:])
    check_side(shared)


@pytest.mark.parametrize("from_shared", [False, True])
@pytest.mark.parametrize("to", ["plain", "shared", "directory"])
@pytest.mark.parametrize("num_steps", [7, 30])
def test_dumps_are_loaded_whatever_shares(
    from_shared: bool, to: str, num_steps: int, tmp_path: Any
) -> None:
    saved = written(21, 2, num_steps, share_next=from_shared)
    saved.dumps(tmp_path / "dump")
    if to == "directory":
        loaded = ReplayStorage(
            storage=PackedStorage(21, scratch_dir=tmp_path / "rows"),
            writer=EpisodeWriter(2, on_gap="ignore"),
            batch_size=8,
        )
    else:
        loaded = written(21, 2, 12, share_next=to == "shared")
    loaded.loads(tmp_path / "dump")
    data = Stream(2, 9).steps([0, 1], 5)
    for _ in range(2):
        assert_same(loaded[:], saved[:])
        for storage in (saved, loaded):
            storage.extend(data)
    if to == "shared":
        check_side(loaded)
    loaded.close()


def test_a_state_of_the_storage_itself_is_taken_back() -> None:
    storage = written(21, 2, 30, share_next=True)
    expected = storage[:]
    storage.load_state_dict(storage.state_dict())
    assert_same(storage[:], expected)
    check_side(storage)


def test_damaged_states_are_refused() -> None:
    storage = written(21, 2, 30, share_next=True)
    expected = storage[:]
    for change in ("side", "rows", "shape"):
        state = copy.deepcopy(storage.state_dict())
        rows = state["_storage"]
        if change == "side":
            del rows["side"]
        elif change == "rows":
            sharing = storage._storage.layout.sharing
            sharing.headers(rows["_storage"])[3] = len(rows["side"]) << ENTRY_BIT
        else:
            rows["side"] = rows["side"][:, 1:]
        with pytest.raises((KeyError, ValueError), match=r"side|entries"):
            storage.load_state_dict(state)
        assert_same(storage[:], expected)
    with pytest.raises(RuntimeError, match="together with their episodes"):
        storage._storage.load_state_dict(storage._storage.state_dict())


def test_copies_and_processes_read_the_same() -> None:
    storage = written(21, 2, 30, share_next=True)
    expected = storage[:]
    assert_same(pickle.loads(pickle.dumps(storage))[:], expected)
    storage.share()
    assert_same(storage[:], expected)
    assert storage._storage._side.values.is_shared()
    process = torch.multiprocessing.get_context("fork").Process(
        target=storage.extend, args=(Stream(2, 4).steps([0, 1], 3),)
    )
    process.start()
    process.join()
    check_side(storage)
    assert_same(storage[:-6], expected[6:])
    assert_same(storage[-6:], Stream(2, 4).steps([0, 1], 3).transpose(0, 1).reshape(-1))


def test_processes_write_side_by_side() -> None:
    """Each goes on in a lane of its own, while a third one draws."""
    storage = make(60, 2, share_next=True)
    storage.extend(Stream(2, 0).steps([0, 1], 3))
    storage.share()
    streams = [Stream(2, lane) for lane in range(2)]
    data = [[stream.steps([lane], 5) for _ in range(12)] for lane, stream in enumerate(streams)]

    def write(lane: int) -> None:
        for steps in data[lane]:
            storage.extend(steps, lanes=[lane])

    context = torch.multiprocessing.get_context("fork")
    processes = [context.Process(target=write, args=(lane,)) for lane in range(2)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        storage.sample()
    assert [process.exitcode for process in processes] == [0, 0]
    storage.validate()
    check_side(storage)
    for lane in range(2):
        assert_same(storage[:][lane::2], torch.cat(data[lane], 1)[0, -30:])


def test_ready_made_storages_share() -> None:
    env = gymnasium.make("CartPole-v1")
    plain, shared = (
        NStepReplayStorage(
            env.observation_space, env.action_space, storage_size=50, seed=1, share_next=share
        )
        for share in (False, True)
    )
    observation, _ = env.reset(seed=0)
    for step in range(120):
        after, reward, terminated, truncated, info = env.step(step % 2)
        for storage in (plain, shared):
            storage.record(observation, step % 2, reward, terminated, truncated, info, after)
        observation = env.reset()[0] if terminated or truncated else after
    assert_same(plain.sample(), shared.sample())
    assert shared._storage.row_nbytes < plain._storage.row_nbytes


def without_next(data: TensorDict) -> TensorDict:
    return data.exclude(("next", "observation"), ("next", "achieved_goal"))


@given(
    num_envs=st.integers(1, 3),
    seed=st.integers(0, 2**30),
    acts=st.lists(st.integers(0, 99), min_size=1, max_size=15),
)
def test_rows_without_next_observations_go_on_until_their_episodes_end(
    num_envs: int, seed: int, acts: list[int]
) -> None:
    storage, stream = make(7 * num_envs, num_envs, share_next=True), Stream(num_envs, seed)
    first = stream.steps([*range(num_envs)], 1)
    storage.extend(first if num_envs > 1 else first[0])
    storage.empty()
    for number, act in enumerate(acts):
        lanes = [*range(num_envs)] if act % 3 else [act % num_envs]
        if act % 7 == 0:
            storage.episodes.end_episodes(lanes)
        data = without_next(stream.steps(lanes, 1 + act % 10))
        warned = nullcontext() if number else pytest.warns(UserWarning, match="its own observation")
        with warned:
            storage.writer.extend(data if num_envs > 1 else data[0], lanes=lanes)
        check_side(storage)
        slots = storage.episodes.live_slots()
        rows, episodes = storage._storage.get(slots), storage.episodes
        after = episodes.shift(slots, (episodes.ahead(slots) > 0).long())
        expected = storage._storage.get(after)
        assert torch.equal(rows["next", "observation"], expected["observation"])
        assert torch.equal(rows["next", "achieved_goal"], expected["achieved_goal"])


def test_compact_batches_are_refused_where_next_observations_are_stored() -> None:
    storage = written(21, 2, 12, share_next=False)
    with pytest.raises(KeyError, match="make the storage with share_next=True"):
        storage.extend(without_next(Stream(2, 1).steps([0, 1], 3)))


@pytest.mark.filterwarnings("ignore:next observations are left out:UserWarning")
@pytest.mark.parametrize("form", ["batches", "rows", "steps"])
def test_collectors_write_compact_observations(form: str) -> None:
    env, frames = SerialEnv(2, lambda: GymEnv("CartPole-v1")), 40
    storages = [
        UniformReplayStorage(
            env.observation_spec["observation"][0],
            env.action_spec[0],
            num_envs=2,
            storage_size=1000,
            share_next=share,
        )
        for share in (False, True)
    ]
    for storage, compact in zip(storages, (False, True), strict=True):
        env.set_seed(0)
        torch.manual_seed(0)
        collector = Collector(
            env,
            frames_per_batch=frames,
            total_frames=5 * frames,
            compact_obs=compact,
            replay_buffer=storage if form == "steps" else None,
        )
        for data in collector:
            if form == "batches":
                storage.extend(data)
            elif form == "rows":
                storage.extend(data.reshape(-1))
        collector.shutdown(close_env=False)
    one, other = (storage[:] for storage in storages)
    known = ~one["next", "done"][:, 0]
    known[-2:] = False
    assert known.sum() > 150
    assert_same(one[known], other[known])
    for key in ("observation", "action", ("next", "done")):
        assert torch.equal(one[key], other[key])
    env.close(raise_if_closed=False)
