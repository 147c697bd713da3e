"""What rows hold: every dtype, further fields, stacks of frames."""

import math
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from contract.make import assemble, library, make, make_for, make_of, new_folder
from contract.steps import Player, as_bits, assert_same, ids_of, rows
from tensordict import TensorDict

#: One field of each dtype that rows may hold.
DTYPES = [
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.complex32, torch.complex64, torch.complex128),
]


def of_dtype(dtype, *shape):
    number = torch.arange(math.prod(shape)).reshape(shape) % 50
    return number % 3 == 1 if dtype is torch.bool else (number.float() + 1).to(dtype)


@pytest.mark.requirement("nested-dtypes")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fields_of_every_dtype_survive_every_operation(place, dtype):
    values = partial(of_dtype, dtype)
    data, seen = rows(Player().play([4, 5], 2)), values(12, 2, 3)
    data["deep", "seen"], data["next", "deep", "seen"] = seen[:-1], seen[1:]
    data["scalar"], data["next", "only"] = values(11), values(11, 5)
    data["agents"] = TensorDict({"seen": values(11, 2, 4)}, [11, 2])
    if not dtype.is_complex:
        data["next", "reward"] = values(11, 1)

    def make_one(path=None, **parts):
        path = new_folder() / "rows" if path is None else path
        packed = {"storage": library.PackedStorage(20, path=path)} if place == "directory" else {}
        return assemble(20, place=place, on_gap="ignore", **packed, **parts)

    def places(batch):
        numbers = ids_of(data).tolist()
        return torch.tensor([numbers.index(number) for number in ids_of(batch).tolist()])

    path = new_folder() / "rows"
    storage = make_one(path)
    index = storage.extend(data)
    assert_same(storage[index], data)
    assert_same(storage[:], data)
    assert_same(storage[3:7], data[3:7])
    batch = storage.sample(40)
    assert_same(batch, data[places(batch)])
    episodes = storage.sample_episodes(6)
    mask = episodes["collector", "mask"]
    assert_same(episodes[mask], data[places(episodes[mask])])
    padding = episodes.exclude("index", "index_generation")[~mask]
    assert not any(as_bits(value).any() for value in padding.values(True, True))

    dump = new_folder() / "dump"
    storage.dumps(dump)
    by_dump, by_state, other = make_one(), make_one(), make_one()
    by_dump.loads(dump)
    by_state.load_state_dict(storage.state_dict())
    other.extend(storage[:])
    for copied in (by_dump, by_state, other):
        assert_same(copied[:], data)
    batch = library.ReplayStorageEnsemble(storage, other, batch_size=20).sample()
    assert_same(batch, data[places(batch)])

    n_step = make_one(transform=library.NStep(3, 0.5), sample_unit=library.EpisodeSequence(2))
    n_step.extend(data)
    batch = n_step.sample(20)
    row = places(batch)
    assert_same(batch.exclude("next"), data[row].exclude("next"))
    # The last rows of the two episodes, and the newest row.
    ahead, end = row[:, None] + torch.arange(3), torch.tensor([3] * 4 + [8] * 5 + [10] * 2)[row]
    last = ahead[:, 2].minimum(end)
    assert torch.equal(as_bits(batch["next", "only"]), as_bits(data["next", "only"][last]))
    rewards = data["next", "reward"].double()[ahead.clamp(max=10), 0]
    total = torch.where(ahead <= end[:, None], rewards, 0) @ torch.tensor([1, 0.5, 0.25]).double()
    reward = batch["next", "reward"].squeeze(1)
    assert torch.equal(as_bits(reward), as_bits(total.to(reward.dtype)))

    if place != "directory":
        by_state.rewrite(index[:2], {"scalar": values(3)[1:]})
        assert torch.equal(as_bits(by_state[:2]["scalar"]), as_bits(values(3)[1:]))
    recorded = make_one()
    for step in range(2):
        recorded.record(seen[step], values(2), 1.0, False, False, {}, seen[step + 1])
    assert torch.equal(as_bits(recorded[:]["observation"]), as_bits(seen[:2]))
    assert torch.equal(as_bits(recorded[1]["action"]), as_bits(values(2)))
    if place == "directory":
        batch = next(iter(storage.loader(seed=0)))
        assert_same(batch, data[places(batch)])
        storage.close()
        reopened = library.ReplayStorage.open(path)
        assert_same(reopened[:], data)
        assert reopened[:]["agents"].batch_size == (11, 2)


@pytest.mark.requirement("her-info")
def test_infos_and_further_fields_reach_the_reward_function(place):
    env = gymnasium.make("BitFlipping-v0", n_bits=3)
    seen = []

    def reward(achieved, desired, infos):
        seen.append({key: value.shape for key, value in infos.items()})
        assert (infos["weight"][:, 0] == achieved.sum(-1) * 2).all()
        return infos["weight"] * 3

    storage = make_for(
        env,
        "hindsight",
        place=place,
        reward_fn=reward,
        info_keys=("weight",),
        extra_fields={"state": (torch.bfloat16, (2, 2)), ("next", "reward"): (torch.float64, (1,))},
        num_goals=math.inf,
    )
    before, _ = env.reset(seed=0)
    for number in range(20):
        after, *outcome, info = env.step(number % 3)
        weight = np.float32([after["achieved_goal"].sum() * 2])
        info = {**info, "weight": weight, "state": torch.full((2, 2), number, dtype=torch.bfloat16)}
        storage.record(before, number % 3, *outcome, info, after)
        before = env.reset()[0] if outcome[1] or outcome[2] else after
    batch = storage.sample(30)
    assert seen == [{"weight": torch.Size([30, 1])}]
    assert batch["state"].dtype is torch.bfloat16
    assert batch["next", "reward"].dtype is torch.float64
    assert batch["state"].shape == (30, 2, 2)
    assert torch.equal(batch["next", "reward"], 3 * batch["next", "weight"].double())


class TestFrameStacks:
    """Stacks of three frames [3, 2], of which each frame is stored once."""

    def play(self, lengths):
        """[N] rows of episodes whose first frame is repeated."""
        number, blocks = 0, []
        for length in lengths:
            frames = torch.arange(number, number + length + 1).float()
            frames = torch.cat([frames[:1].expand(2), frames]).unsqueeze(1).expand(-1, 2)
            stacks = frames.unfold(0, 3, 1).transpose(1, 2)
            done = torch.arange(length).unsqueeze(1) == length - 1
            block = {
                "observation": stacks[:-1],
                "action": torch.zeros(length, 2),
                "next": {
                    "effort": torch.zeros(length, 1, dtype=torch.float64),
                    "observation": stacks[1:],
                    "reward": torch.ones(length, 1),
                    "done": done,
                    "terminated": done.clone(),
                    "truncated": torch.zeros_like(done),
                },
            }
            blocks.append(TensorDict(block, [length]).clone())
            number += length + 1
        return torch.cat(blocks)

    def test_they_stay_whole_where_memory_is_given_back(self, place):
        box = gymnasium.spaces.Box(-np.inf, np.inf, (3, 512))
        options = {"place": place, "storage_size": 16, "frame_stack": 3}
        storage = make_of(box, gymnasium.spaces.Discrete(2), **options)
        frames = np.ones((3, 512), np.float32) * np.arange(3, dtype=np.float32)[:, None]
        for step in range(300):
            storage.record(frames + step, 0, 0.0, False, False, {}, frames + step + 1)
            first = torch.arange(max(step - 15, 0), step + 1)[:, None, None]
            assert (storage[:]["observation"] == torch.from_numpy(frames) + first).all()

    LAYOUTS = {
        # Several channels a frame, as DrQ-v2 and CatFrames join them.
        "first": ((6, 3, 2), 0, lambda frames: np.concatenate(frames[-3:], 0)),
        "a new first": ((3, 3, 2), -3, lambda frames: np.stack([f[0] for f in frames[-3:]], 0)),
        "last": ((3, 2, 3), -1, lambda frames: np.stack([f[0] for f in frames[-3:]], -1)),
        "middle": ((3, 3, 2), 1, lambda frames: np.stack([f[0] for f in frames[-3:]], 1)),
    }

    def loop(self, lane, stacked):
        """Yields the steps of one environment: (observation, done, next observation)."""
        random, number = np.random.default_rng(lane), lane * 1000
        while True:
            frames = [random.integers(0, 255, (2, 3, 2), np.uint8)] * 3
            for _ in range(length := int(random.integers(1, 8))):
                before = {"pixels": stacked(frames), "number": np.array([number])}
                frames = [*frames, random.integers(0, 255, (2, 3, 2), np.uint8)]
                number += 1
                after = {"pixels": stacked(frames), "number": np.array([number])}
                yield before, len(frames) == length + 3, after
            number += 1

    @pytest.mark.requirement("stored-once")
    @pytest.mark.parametrize("name", LAYOUTS)
    @pytest.mark.parametrize("num_envs", [1, 2])
    def test_stacks_of_a_loop_along_any_dimension(self, place, name, num_envs):
        """Also over n steps, and where the storage wraps."""
        shape, dim, stacked = self.LAYOUTS[name]
        pixels = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        number = gymnasium.spaces.Box(0, 9999, (1,), np.int64)
        storage = make_of(
            gymnasium.spaces.Dict({"pixels": pixels, "number": number}),
            gymnasium.spaces.Discrete(3),
            "n-step",
            place=place,
            storage_size=30,
            num_envs=num_envs,
            frame_stack={"pixels": library.FrameStack(3, dim)},
            autoreset_mode="Disabled",
        )
        loops, written = [self.loop(lane, stacked) for lane in range(num_envs)], {}
        for turn in range(45):
            steps = [next(loop) for loop in loops]
            for before, _, after in steps:
                written |= {int(seen["number"][0]): seen["pixels"] for seen in (before, after)}
            before, after = (
                {key: np.stack([step[at][key] for step in steps]) for key in ("pixels", "number")}
                for at in (0, 2)
            )
            done = np.array([step[1] for step in steps])
            zeros = np.zeros(num_envs, np.int64)
            values = [before, zeros, zeros * 1.0, done, done & False, {}, after]
            if num_envs == 1 and turn % 2:
                before, after = ({key: seen[key][0] for key in seen} for seen in (before, after))
                values = [before, 0, 0.0, bool(done[0]), False, {}, after]
            storage.record(*values)
        assert len(storage) == 30
        batch = storage.sample(100)
        for branch in (batch, batch["next"], storage[:], storage[:]["next"]):
            wanted = [written[int(number)] for number in branch["number"]]
            assert torch.equal(branch["pixels"], torch.from_numpy(np.stack(wanted)))
        ahead = batch["next", "number"] - batch["number"]
        assert torch.equal(ahead, batch["steps_to_next_obs"])

    @pytest.mark.requirement("nothing-crosses")
    @pytest.mark.parametrize("jump", [0, 9])
    def test_a_reset_that_nobody_told_of(self, place, jump):
        """Also if the frame after it is the newest one before it."""
        storage = make(place=place, layout="frames", size=24)
        data, later = self.play([4]), self.play([3])
        for branch in (later, later["next"]):
            branch["observation"] += data["next", "observation"].max() + jump
        data["next", "done"] = data["next", "terminated"] = torch.zeros(4, 1, dtype=torch.bool)
        with pytest.warns(UserWarning, match="end_episodes"):
            storage.extend(torch.cat([data, later]))
        assert storage.episodes.table()["length"].tolist() == [4, 3]
        assert_same(storage[:], torch.cat([data, later]).exclude(("next", "effort")))

    @pytest.mark.requirement("refused-is-unchanged")
    def test_a_next_stack_that_is_not_moved_by_one_frame_is_refused(self):
        storage = make(layout="frames", size=24)
        data = self.play([4])
        data["next", "observation"][2, 0] += 9
        with pytest.raises(ValueError, match="observation"):
            storage.extend(data)
        assert len(storage) == 0
        # Where the first write tells the fields, one that is refused tells nothing.
        stack = (torch.float32, (3, 2), library.FrameStack(3))
        fields = {"observation": stack, ("next", "observation"): stack, ("next", "done"): None}
        storage = library.ReplayStorage(storage=library.PackedStorage(24, fields=fields))
        with pytest.raises(ValueError, match="moved by one frame"):
            storage.extend(data.select("observation", ("next", "observation"), ("next", "done")))
        assert not storage.storage.initialized
