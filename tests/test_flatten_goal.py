"""A goal observation as one vector, and back."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Categorical, Composite, Unbounded
from torchrl.envs import GymEnv, SerialEnv, TransformedEnv
from torchrl.envs.utils import check_env_specs

from trl_storages import FlattenGoal, HERReplayStorage, gym_reward

PARTS = ["observation", "achieved_goal", "desired_goal"]


def bit_flipping(n_bits: int = 4, **options) -> GymEnv:
    return GymEnv("BitFlipping-v0", n_bits=n_bits, categorical_action_encoding=True, **options)


def parts(shapes, dtype=torch.float32, batch=()) -> TensorDict:
    """Numbers that are all different, so that no two orders look alike."""
    start, entries = 0, {}
    for key, shape in zip(PARTS, shapes, strict=True):
        size = torch.Size((*batch, *shape))
        entries[key] = torch.arange(start, start + size.numel()).reshape(size).to(dtype)
        start += size.numel()
    return TensorDict(entries, batch_size=batch)


@pytest.mark.requirement("goal-wrapper")
class TestVector:
    def test_the_order_is_observation_achieved_desired(self):
        flat = FlattenGoal().flatten(parts([(2,), (3,), (3,)]))

        assert flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]

    @pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
    @pytest.mark.parametrize("shapes", [[(4,), (3,), (3,)], [(), (), ()], [(2,), (), ()]])
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float64, torch.int64, torch.int8, torch.bool]
    )
    def test_the_inverse_is_exact(self, batch, shapes, dtype):
        there = parts(shapes, dtype, batch)
        transform = FlattenGoal(del_keys=True)

        flat = transform(there.clone())
        back = transform.inv(flat.clone())

        assert set(flat.keys()) == {"observation_vector"}
        assert flat["observation_vector"].dtype is dtype
        assert set(back.keys()) == set(PARTS)
        for key in PARTS:
            assert back[key].dtype is dtype
            assert torch.equal(back[key], there[key])

    def test_values_beyond_float32_survive(self):
        huge = 2**53 + 1
        there = parts([(1,), (1,), (1,)], torch.int64) + huge

        back = (transform := FlattenGoal()).unflatten(transform.flatten(there))

        assert [back[key].item() for key in PARTS] == [huge, huge + 1, huge + 2]

    def test_the_vector_may_take_the_observation_s_name(self):
        there = parts([(2,), (1,), (1,)])
        transform = FlattenGoal(out_key="observation", del_keys=True)

        flat = transform(there.clone())

        assert flat["observation"].tolist() == [0, 1, 2, 3]
        assert list(flat.keys()) == ["observation"]
        assert (transform.inv(flat) == there).all()


@pytest.mark.requirement("goal-wrapper")
class TestSpaces:
    @pytest.mark.parametrize(
        "part",
        [Box(-1, 1, (3,)), Discrete(4), MultiBinary(3), MultiDiscrete([2, 3]), Box(-1, 1, ())],
    )
    def test_a_space_says_how_to_split(self, part):
        transform = FlattenGoal(Dict(dict.fromkeys(PARTS, part)))
        size = 3 * max(1, int(np.prod(part.shape)))

        back = transform.unflatten(torch.arange(size))

        assert back["observation"].flatten()[0] == 0
        assert back["desired_goal"].flatten()[-1] == size - 1

    @pytest.mark.parametrize(
        "goal",
        [Box(0, 1, (3,), np.float64), Discrete(3), MultiBinary(3), Box(0, 9, (3,), np.int64)],
    )
    def test_spaces_must_be_of_one_kind(self, goal):
        space = Dict({"observation": Box(0, 1, (3,)), "achieved_goal": goal, "desired_goal": goal})

        with pytest.raises(TypeError, match="of one kind"):
            FlattenGoal(space)

    def test_so_must_tensors(self):
        there = parts([(2,), (1,), (1,)])
        transform = FlattenGoal()
        transform.flatten(there)
        there["observation"] = there["observation"].double()

        with pytest.raises(TypeError, match=r"of one kind.*float64"):
            transform.flatten(there)

    def test_goals_must_have_one_shape(self):
        with pytest.raises(ValueError, match="both goals must have one shape"):
            FlattenGoal().flatten(parts([(2,), (1,), (2,)]))

    def test_images_are_not_flattened(self):
        with pytest.raises(ValueError, match="FlattenObservation"):
            FlattenGoal().flatten(parts([(2, 2), (1,), (1,)]), batch_dims=0)

    def test_a_missing_part_is_named(self):
        with pytest.raises(KeyError, match="desired_goal"):
            FlattenGoal()(parts([(2,), (1,), (1,)]).exclude("desired_goal"))
        with pytest.raises(KeyError, match="achieved_goal"):
            FlattenGoal(Dict(observation=Box(0, 1)))
        with pytest.raises(TypeError, match="must be a gymnasium Dict"):
            FlattenGoal(Box(0, 1))

    def test_splitting_needs_to_know_how(self):
        transform = FlattenGoal()
        with pytest.raises(RuntimeError, match="pass observation_space"):
            transform.unflatten(torch.zeros(4))
        transform.flatten(parts([(2,), (1,), (1,)]))
        with pytest.raises(ValueError, match=r"2 \+ 1 \+ 1"):
            transform.unflatten(torch.zeros(5))

    @pytest.mark.parametrize("batch", [(), (2,)])
    @pytest.mark.parametrize(
        ("make", "joined"),
        [
            (lambda shape: Bounded(0, 1, shape), Bounded),
            (lambda shape: Unbounded(shape), Unbounded),
            (lambda shape: Binary(shape=shape), Binary),
            (lambda shape: Categorical(3, shape=shape), Unbounded),
        ],
    )
    def test_the_spec_of_the_vector(self, make, joined, batch):
        scalar = isinstance(make((2,)), Categorical)
        shapes = [(), (), ()] if scalar else [(2,), (3,), (3,)]
        spec = Composite(
            {key: make((*batch, *shape)) for key, shape in zip(PARTS, shapes, strict=True)},
            shape=batch,
        )

        vector = FlattenGoal().transform_observation_spec(spec)["observation_vector"]

        assert isinstance(vector, joined)
        assert vector.shape == (*batch, 3 if scalar else 8)


@pytest.mark.requirement("goal-wrapper")
class TestInEnvironments:
    @pytest.mark.parametrize("del_keys", [False, True])
    @pytest.mark.parametrize("num_envs", [1, 2])
    def test_observations_are_vectors(self, del_keys, num_envs):
        base = bit_flipping() if num_envs == 1 else SerialEnv(num_envs, bit_flipping)
        env = TransformedEnv(base, FlattenGoal(del_keys=del_keys))

        check_env_specs(env)
        rollout = env.rollout(3)

        for branch in (rollout, rollout["next"]):
            assert branch["observation_vector"].shape[-1] == 12
            assert ("desired_goal" in branch) is not del_keys
            if not del_keys:
                wanted = torch.cat([branch[key] for key in PARTS], -1)
                assert torch.equal(branch["observation_vector"], wanted)

    def test_a_storage_splits_the_vectors_of_an_environment(self):
        env = TransformedEnv(bit_flipping(), FlattenGoal(del_keys=True))
        plain = gymnasium.make("BitFlipping-v0", n_bits=4)
        storage = HERReplayStorage(
            plain.observation_space,
            plain.action_space,
            reward_fn=gym_reward(plain),
            storage_size=50,
            batch_size=40,
            seed=0,
        )
        storage.append_transform(FlattenGoal(plain.observation_space))

        torch.manual_seed(5)  # A lucky first action would leave nothing but its own goal to draw.
        env.set_seed(5)
        written = env.rollout(4)
        storage.extend(written)
        batch = storage.sample()

        stored = storage[:]
        flat = torch.cat([stored[key] for key in PARTS], -1)
        assert torch.equal(flat, written["observation_vector"])
        # The vector holds the drawn goal, not the stored one.
        for branch in (batch, batch["next"]):
            wanted = torch.cat([branch[key] for key in PARTS], -1)
            assert torch.equal(branch["observation_vector"], wanted)
        assert not torch.equal(batch["desired_goal"], stored["desired_goal"][batch["index"]])

    def test_rows_without_a_next_desired_goal(self):
        batch = parts([(2,), (1,), (1,)], batch=(3,))
        batch["next"] = (parts([(2,), (1,), (1,)], batch=(3,)) + 100).exclude("desired_goal")

        FlattenGoal()(batch)

        assert torch.equal(batch["next", "observation_vector"][:, 3:], batch["desired_goal"])
