"""Goals and rewards made anew, as one vector, compared with those that are stored."""

import multiprocessing
import re
from collections import Counter
from functools import partial
from itertools import product

import gymnasium
import numpy as np
import pytest
import torch
from contract.lanes import HISTORIES, Lanes, ends
from contract.make import assemble, library, make_for
from contract.steps import assert_batches, assert_same, reward_fn
from scipy import stats
from tensordict import TensorDict
from torchrl.envs import GymEnv, GymWrapper, SerialEnv, TransformedEnv
from torchrl.envs.utils import check_env_specs

GoalRelabel, HERSampler, NStep = library.GoalRelabel, library.HERSampler, library.NStep


def no_reward(achieved_goal, desired_goal, infos):
    return torch.zeros(len(achieved_goal))


@pytest.mark.requirement("her-rewrite")
class TestRelabel:
    def filled(self, function, ends_fn=None):
        relabel = GoalRelabel(function, terminated_fn=ends_fn)
        storage, lanes = assemble(20, sampler=HERSampler(), transform=relabel), Lanes(20)
        lanes.write(storage, [ends([6, 6, 6], 2)])
        return storage, relabel

    @pytest.mark.parametrize(
        "form",
        [
            lambda reward: reward.unsqueeze(-1),
            lambda reward: reward.double(),
            lambda reward: reward.numpy(),
            lambda reward: reward.clone().requires_grad_(),
        ],
    )
    def test_rewards_of_every_shape_and_type_are_accepted(self, form):
        def reward(achieved, desired, _):
            assert achieved.shape == desired.shape == (len(achieved), 2)
            return -(achieved - desired)[:, 0] / 4

        batches = [
            self.filled(f)[0].sample(30) for f in (reward, lambda *goals: form(reward(*goals)))
        ]
        assert_batches(*batches)

    @pytest.mark.parametrize("is_set_later", [False, True])
    def test_functions_may_be_networks(self, is_set_later):
        """Which stay functions: they are neither saved nor moved with the storage."""

        class Network(torch.nn.Module):
            def __init__(self, act):
                super().__init__()
                self.weight, self.act = torch.nn.Parameter(torch.ones(())), act

            def forward(self, achieved, desired, _):
                return self.act(self.weight * (achieved - desired)[:, 0])

        networks = Network(lambda it: it), Network(lambda it: it > 0)
        functions = [lambda a, d, _, act=it.act: act((a - d)[:, 0]) for it in networks]
        expected, _ = self.filled(*functions)
        storage, relabel = self.filled(*(functions if is_set_later else networks))
        if is_set_later:
            relabel.reward_fn, relabel.terminated_fn = networks
        assert (relabel.reward_fn, relabel.terminated_fn) == networks
        assert_batches(storage.sample(30), expected.sample(30))
        assert not storage.sample(30)["next", "reward"].requires_grad
        assert not [*relabel.parameters()]
        expected.load_state_dict(storage.state_dict())

    @pytest.mark.parametrize("n_step", [1, 3])
    def test_stored_transitions_are_unchanged(self, n_step):
        storage, _ = self.filled(
            lambda achieved, *_: torch.ones(len(achieved)), lambda a, d, _: a[:, 0] > 4
        )
        storage.append_transform(NStep(n_step))
        before = storage[:]
        for _ in range(200):
            for leaf in storage.sample(30).values(True, True):
                leaf.zero_()
        assert_same(storage[:], before)

    WRONG = {
        "a number": lambda *_: 0.0,
        "one for all": lambda *_: torch.zeros(1),
        "one each of three": lambda *_: torch.zeros(3),
        "two for each": lambda achieved, *_: torch.zeros(len(achieved), 2),
        "each for each": lambda achieved, *_: torch.zeros(len(achieved), len(achieved)),
        "nothing": lambda *_: None,
        "a word": lambda *_: "much",
        "an error": lambda *_: [][0],
    }

    @pytest.mark.parametrize("name", ["reward_fn", "terminated_fn"])
    @pytest.mark.parametrize("returns", [torch.clone, torch.Tensor.numpy], ids=["torch", "numpy"])
    def test_functions_of_single_goals_raise_and_name_batches(self, name, returns):
        def reached(achieved, desired, _):
            return bool(returns(achieved) == returns(desired))

        storage, relabel = self.filled(no_reward)
        setattr(relabel, name, reached)
        with pytest.raises((RuntimeError, ValueError), match=f"{name} is called with batches"):
            storage.sample(30)

    @pytest.mark.requirement("refused-is-unchanged")
    @pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
    @pytest.mark.parametrize("name", ["reward_fn", "terminated_fn"])
    def test_functions_with_wrong_results_raise(self, name, wrong):
        storage, relabel = self.filled(no_reward)
        before = storage[:]
        setattr(relabel, name, wrong)
        with pytest.raises((TypeError, ValueError, IndexError)):
            storage.sample(15)
        setattr(relabel, name, no_reward if name == "reward_fn" else None)
        assert len(storage.sample(15)) == 15
        assert_same(storage[:], before)

    @pytest.mark.parametrize(
        ("achieved", "desired", "fits"),
        [
            (torch.float64, torch.float32, True),
            (torch.int64, torch.float32, True),
            (torch.float32, torch.int64, False),
        ],
    )
    def test_goals_keep_the_dtype_of_the_desired_goal(self, achieved, desired, fits):
        def change(data):
            for part in (data, data["next"]):
                part["achieved_goal"] = part["achieved_goal"].to(achieved)
                part["desired_goal"] = part["desired_goal"].to(desired)
            return data

        sampler = HERSampler("final", float("inf"))
        storage, lanes = assemble(20, sampler=sampler, transform=GoalRelabel(no_reward)), Lanes(20)
        lanes.write(storage, [ends([6, 6])], change=change)
        if not fits:
            with pytest.raises(TypeError, match="float"):
                storage.sample(8)
            return
        batch = storage.sample(8)
        assert batch["desired_goal"].dtype is batch["next", "desired_goal"].dtype is desired
        assert lanes.reaching(batch["desired_goal"]) == [
            lanes.onward(step)[-1] for step in lanes.of(batch)
        ]

    @pytest.mark.parametrize(
        ("parts", "answer"),
        [
            ({"sampler": HERSampler()}, "written by a transform"),
            ({"transform": GoalRelabel(no_reward)}, r"HERSampler\(\)"),
            ({"transform": GoalRelabel(no_reward, goal_key="other")}, r"HERSampler\(.*'other'"),
            ({"transform": NStep(3, steps_to_next_obs_key=("next", "effort"))}, "n-step"),
            ({"sampler": HERSampler(), "transform": [NStep(3), GoalRelabel(no_reward)]}, "precede"),
            ({"sampler": HERSampler(goal_key="to"), "transform": GoalRelabel(no_reward)}, "'to'"),
            (
                {"sampler": HERSampler(), "transform": GoalRelabel(no_reward, info_keys=["force"])},
                "'force'",
            ),
        ],
    )
    def test_components_that_do_not_fit_together_raise(self, parts, answer):
        storage = assemble(20, **parts)
        Lanes(20).write(storage, [ends([6, 6])])
        with pytest.raises((KeyError, RuntimeError, ValueError), match=answer):
            storage.sample(8)


@pytest.mark.requirement("goal-wrapper")
class TestFlattenGoal:
    PARTS = ["observation", "achieved_goal", "desired_goal"]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
    @pytest.mark.parametrize("with_space", [False, True])
    def test_flatten_then_unflatten_returns_the_parts(self, dtype, with_space):
        parts = TensorDict(
            {
                "desired_goal": torch.arange(5, 7).to(dtype).expand(4, 2),
                "achieved_goal": torch.arange(3, 5).to(dtype).expand(4, 2),
                "observation": torch.arange(0, 3).to(dtype).expand(4, 3),
            },
            [4],
        )
        space = gymnasium.spaces.Dict(
            {key: gymnasium.spaces.Box(0, 9, parts[key].shape[1:]) for key in self.PARTS}
        )
        flat = torch.arange(7).to(dtype).expand(4, 7)
        for given, whole in ((parts.clone(), flat), ({**parts}, flat), ({**parts[0]}, flat[0])):
            assert torch.equal(library.FlattenGoal().flatten(given), whole)
        transform = library.FlattenGoal(space if with_space else None)
        if not with_space:
            with pytest.raises(RuntimeError):
                transform.unflatten(flat)
            transform.flatten(parts.clone())
        assert_same(TensorDict(transform.unflatten(flat), [4]), parts)
        for wrong in (flat[:, :6], flat[0, 6]):
            with pytest.raises(ValueError, match="the vector must"):
                transform.unflatten(wrong)
        with pytest.raises(TypeError, match="flat"):
            transform.unflatten(flat.tolist())
        with pytest.raises(TypeError, match="parts"):
            transform.flatten(flat)

    @pytest.mark.parametrize("del_keys", [False, True])
    def test_vector_of_a_batch_contains_the_drawn_goals(self, del_keys):
        relabel = GoalRelabel(reward_fn, info_keys=["effort"])
        flatten = library.FlattenGoal(del_keys=del_keys)
        batches = []
        for transform in ([relabel], [relabel, flatten]):
            storage = assemble(20, sampler=HERSampler(), transform=transform)
            Lanes(20).write(storage, [ends([6, 6])])
            batches.append(storage.sample(20))
        plain, flat = batches
        for before, after in ((plain, flat), (plain["next"], flat["next"])):
            wanted = torch.cat([before[key] for key in self.PARTS], -1)
            torch.testing.assert_close(after["observation_vector"], wanted, equal_nan=True)
            assert ("desired_goal" in [*after.keys()]) is not del_keys

    @pytest.mark.parametrize("num_after", [2, 3])
    def test_scalars_become_vectors_of_size_one(self, num_after):
        """Nested ones too. And a desired goal that there is not under `next` stays."""
        names = {f"{key}_key": ("it", key) for key in self.PARTS}
        parts, after = (
            {key: torch.rand(4) for key in [*names.values()][:n]} for n in (3, num_after)
        )
        flatten = library.FlattenGoal(**names)
        batch = flatten(TensorDict({**parts, "next": after}, [4]))
        for branch, wanted in ((batch, parts), (batch["next"], {**parts, **after})):
            flat = branch["observation_vector"]
            assert torch.equal(flat, torch.stack([*wanted.values()], 1))
            assert_same(TensorDict(flatten.unflatten(flat), [4]), TensorDict(wanted, [4]))
        one = flatten.flatten({key: part[-1] for key, part in wanted.items()})
        assert torch.equal(one, flat[-1])
        # As a storage holds them.
        space = gymnasium.spaces.Dict(dict.fromkeys(self.PARTS, gymnasium.spaces.Box(0, 9, ())))
        assert library.FlattenGoal(space).unflatten(flat)["observation"].shape == (4, 1)

    @pytest.mark.parametrize("del_keys", [False, True])
    def test_environment_transform_adds_the_vector(self, del_keys):
        make = partial(GymEnv, "BitFlipping-v0", n_bits=4, categorical_action_encoding=True)
        base = make() if del_keys else SerialEnv(2, make)
        env = TransformedEnv(base, library.FlattenGoal(del_keys=del_keys))
        check_env_specs(env)
        rollout = env.rollout(3)
        for branch in (rollout, rollout["next"]):
            assert branch["observation_vector"].shape[-1] == 12
            assert ("desired_goal" in [*branch.keys()]) is not del_keys
            if not del_keys:
                wanted = torch.cat([branch[key] for key in self.PARTS], -1)
                assert torch.equal(branch["observation_vector"], wanted)

    @pytest.mark.parametrize(
        "changes",
        [
            {"observation": torch.zeros(4, 3).double()},
            {"desired_goal": torch.zeros(4, 5)},
            {"observation": torch.zeros(4, 3, 3)},
            {"achieved_goal": None},
        ],
        ids=["another kind", "goals of two shapes", "an image", "no goal"],
    )
    def test_parts_that_form_no_vector_raise(self, changes):
        parts = {key: torch.zeros(4, 2) for key in self.PARTS} | changes
        parts = {key: value for key, value in parts.items() if value is not None}
        with pytest.raises((KeyError, TypeError, ValueError)):
            library.FlattenGoal()(TensorDict(parts, [4]))


@pytest.mark.requirement("her-rewrite")
class TestRandomCrop:
    KEYS = ["observation", ("next", "observation"), "goal"]

    def storage(self, *transforms, place="memory", shape=(5, 7), **parts):
        """Random images; the goal of a transition is the first observation of its episode."""

        class Goal(library.ReplayTransform):
            def replay(self, rows):
                first = rows.episodes.shift(rows.slots, -rows.episodes.num_before(rows.slots))
                rows["goal"] = rows.at(first)["observation"]

        images = np.random.default_rng(0).integers(0, 256, (2, 12, *shape), np.uint8)
        images, done = torch.from_numpy(images), torch.arange(12).view(-1, 1) % 4 == 3
        flags = {"done": done, "terminated": done, "truncated": done & ~done}
        steps = {"observation": images[0], "next": {"observation": images[1], **flags}}
        parts = {"place": place, "on_gap": "ignore", "transform": [Goal(), *transforms], **parts}
        storage = assemble(12, **parts)
        storage.extend(TensorDict(steps, [12]))
        return storage

    def shifts(self, batch, plain, padding, channels_last=False):
        """The shift of each sample: the only one of NumPy's that all of its images have."""
        images, shifted = (
            torch.stack([it[key] for key in self.KEYS], 1).numpy() for it in (plain, batch)
        )
        if not channels_last:  # [B, 3, ..., H, W] becomes [B, 3, H, W, ...]
            images, shifted = (np.moveaxis(it, (-2, -1), (2, 3)) for it in (images, shifted))
        height, width = images.shape[2:4]
        pads = [(0, 0), (0, 0), (padding, padding), (padding, padding)]
        pads += [(0, 0)] * (images.ndim - 4)
        padded, shifts = np.pad(images, pads, mode="edge"), {}
        for y, x in product(range(2 * padding + 1), repeat=2):
            is_same = padded[:, :, y : y + height, x : x + width] == shifted
            shifts |= dict.fromkeys(np.flatnonzero(is_same.reshape(len(batch), -1).all(1)), (y, x))
        return [shifts[number] for number in range(len(batch))]

    @pytest.mark.parametrize(
        ("shape", "channels_last"),
        [((5, 7), False), ((3, 5, 7), False), ((2, 3, 5, 7), False), ((5, 7, 3), True)],
    )
    def test_all_images_of_a_transition_are_shifted_alike(self, place, shape, channels_last):
        crop = library.RandomCrop(self.KEYS, 2, channels_last=channels_last)
        plain, batch = (
            self.storage(*transforms, place=place, shape=shape).sample(400)
            for transforms in ((), (crop,))
        )
        assert torch.equal(batch["index"], plain["index"])
        shifts = Counter(self.shifts(batch, plain, 2, channels_last))
        assert len(shifts) == 25
        assert stats.chisquare([*shifts.values()]).pvalue > 1e-4

    def test_transitions_of_a_sequence_share_the_shift(self):
        unit, crop = {"sample_unit": library.EpisodeSequence(3)}, library.RandomCrop(self.KEYS)
        plain, batch = (self.storage(*it, **unit).sample(300) for it in ((), (crop,)))
        shifts = self.shifts(batch, plain, 4)
        assert shifts[::3] == shifts[1::3] == shifts[2::3]
        assert len({*shifts}) > 40

    def test_probability_is_that_of_a_batch(self):
        crop = library.RandomCrop(self.KEYS, 2)
        storage = self.storage(crop)
        images, num_cropped = storage[:]["observation"], 0
        for crop.probability in (0, 1, *[0.25] * 400):
            batch = storage.sample(20)
            is_cropped = (batch["observation"] != images[batch["index"]]).flatten(1).any(1)
            assert is_cropped.any() <= (crop.probability > 0)
            assert is_cropped.any() >= (crop.probability == 1)
            num_cropped += bool(is_cropped.any()) and crop.probability == 0.25
        assert stats.binomtest(num_cropped, 400, 0.25).pvalue > 1e-4

    def test_a_seed_samples_the_same_crops(self, place):
        crops = [library.RandomCrop(self.KEYS) for _ in range(2)]
        storages = [self.storage(crop, place=place) for crop in crops]
        for size in (5, 9):
            assert_batches(*(storage.sample(size) for storage in storages))
        storages[0].load_state_dict(storages[1].state_dict())
        assert_batches(*(storage.sample(9) for storage in storages))

    def test_a_missing_image_is_named(self):
        with pytest.raises(KeyError, match="camera"):
            self.storage(library.RandomCrop(["camera"])).sample(4)


class TestAudit:
    def audited(self, function):
        relabel = GoalRelabel(function, info_keys=["effort"])
        storage, lanes = assemble(20, transform=relabel, sampler=HERSampler()), Lanes(20)
        lanes.write(storage, [ends([6, 6, 6], 2)])
        return relabel.audit(storage), lanes

    def test_audit_of_an_equal_function_passes(self):
        audit, _ = self.audited(reward_fn)
        assert audit.passed
        assert audit.num_rows == 20

    def test_audit_of_a_different_function_names_slots(self):
        def wrong(achieved, desired, infos):
            reward, which = reward_fn(achieved, desired, infos), achieved[..., 0]
            return torch.where(which == 12, -reward, reward + 0.25 * (which == 9))

        audit, _ = self.audited(wrong)
        assert not audit.passed
        assert len(audit.slots) == 2
        # The worst first.
        said = re.findall(r"stored (-?[\d.]+), computed (-?[\d.]+)", str(audit))
        (one, minus_one), (other, more) = [map(float, pair) for pair in said]
        assert minus_one == -one
        assert abs(one) > 1
        assert more == other + 0.25

    def test_audit_compares_the_newest_transitions(self):
        key = ("next", "reward")
        relabel = GoalRelabel(lambda achieved, *_: torch.full((len(achieved),), 999))
        storage = assemble(24, 2, transform=relabel, sampler=HERSampler())
        lanes = HISTORIES["unequal fill"].write(
            storage, change=lambda d: d.set(key, d[key].long()).exclude(("next", "desired_goal"))
        )
        assert relabel.audit(storage, 1).num_rows == 1
        audit = relabel.audit(storage, 6)
        assert {*lanes.of(storage[audit.slots])} == {*lanes.newest(6)}
        assert str(audit).count("computed") == 5


class Paid(gymnasium.Wrapper):
    """Pays other rewards than compute_reward returns."""

    def step(self, action):
        seen, reward, *rest = self.env.step(action)
        return seen, 10 * reward + 10, *rest


def played(num_steps, *, wrap=lambda env: env, **options):
    env = wrap(gymnasium.make("BitFlipping-v0", n_bits=4))
    options = {"terminated_fn": library.gym_terminated(env), **options}
    storage = make_for(env, "hindsight", reward_fn=library.gym_reward(env), size=1200, **options)
    play(storage, env, num_steps)
    return storage


def play(storage, env, num_steps):
    seen, _ = env.reset(seed=0)
    for step in range(num_steps):
        after, reward, terminated, truncated, info = env.step(step % 4)
        storage.record(seen, step % 4, reward, terminated, truncated, info, after)
        seen = env.reset()[0] if terminated or truncated else after
    storage.end_episodes()


class TestAutomaticAudit:
    def test_different_rewards_warn_once_after_1000_transitions(self):
        storage = played(999, wrap=Paid)
        unaudited = played(999, wrap=Paid, audit=False)
        for each in (storage, unaudited):
            each.sample()
            play(each, Paid(gymnasium.make("BitFlipping-v0", n_bits=4)), 1)
        said = r"1,000 of 1,000 .* slot \d+: stored 10, computed 0"
        with pytest.warns(UserWarning, match=said) as caught:
            batches = [storage.sample() for _ in range(3)]
        assert [warning.filename for warning in caught] == [__file__]
        for batch in batches:
            assert_batches(batch, unaudited.sample())

    def test_random_reward_function_does_not_change_batches(self):
        def noisy(achieved, desired, _):
            return torch.rand(len(achieved)) * 0 - 1.0 * (achieved != desired).any(-1)

        rngs = []
        for audit in (True, False):
            storage = played(1000, audit=audit)
            storage.transform[0].reward_fn = noisy
            torch.manual_seed(0)
            storage.sample()
            rngs.append(torch.rand(()))
        assert rngs[0] == rngs[1]

    def test_warning_as_error_samples_nothing(self):
        storage, unaudited = (played(1000, wrap=Paid, audit=audit) for audit in (True, False))
        with pytest.raises(UserWarning, match="differs"):
            storage.sample()
        assert_batches(storage.sample(), unaudited.sample())

    @pytest.mark.parametrize("n_step", [1, 3])
    def test_episodes_that_end_at_success_warn_without_terminated_fn(self, n_step):
        storage = played(1000, terminated_fn=None, n_step=n_step)
        with pytest.warns(UserWarning, match=r"terminated_fn.*gym_terminated") as caught:
            storage.sample()
        assert len(caught) == 1
        storage.sample()

    def test_late_first_success_warns_without_terminated_fn(self):
        env = gymnasium.make("BitFlipping-v0", n_bits=24)
        options = {"terminated_fn": None, "reward_fn": library.gym_reward(env), "size": 2000}
        storage = make_for(env, "hindsight", batch_size=2, **options)
        play(storage, env, 1000)
        storage.sample()
        seen, _ = env.reset(seed=0)
        goal = {**seen, "achieved_goal": seen["desired_goal"]}
        storage.record(seen, 0, 0.0, True, False, {}, goal)
        with pytest.warns(UserWarning, match=r"ends? at success.*gym_terminated") as caught:
            _ = [storage.sample() for _ in range(1000)]
        assert len(caught) == 1

    @pytest.mark.parametrize(
        "options",
        [{}, {"num_goals": 0, "terminated_fn": None}, {"num_goals": float("inf"), "wrap": Paid}],
        ids=["agree", "no goals", "goals only"],
    )
    def test_storages_without_the_mistake_are_silent(self, options):
        played(1000, **options).sample()

    def test_readers_are_silent(self, tmp_path):
        storage = played(1000, wrap=Paid, audit=False, path=tmp_path / "rows")
        reader = make_for(
            gymnasium.make("BitFlipping-v0", n_bits=4),
            "hindsight",
            reward_fn=no_reward,
            size=1200,
            path=tmp_path / "rows",
            mode="r",
        )
        reader.sample()
        storage.close()

    def test_forks_are_silent(self):
        storage = played(1000, wrap=Paid)
        process = multiprocessing.get_context("fork").Process(target=storage.sample)
        process.start()
        process.join()
        assert process.exitcode == 0


class Negated(gymnasium.Wrapper):
    """Shows goals negated, and has the methods that fit."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return self.compute_terminated(achieved_goal, 1 - desired_goal, info) - 1.0

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return (achieved_goal == desired_goal).all(-1)


class Steps(gymnasium.vector.VectorWrapper):
    """A wrapper that has neither method."""


class TestGymReward:
    ACHIEVED = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    DESIRED = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])

    @pytest.mark.parametrize("of", [gymnasium.make, GymEnv], ids=["gymnasium", "TorchRL"])
    def test_gym_reward_returns_rewards_of_the_environment(self, of):
        more = {"categorical_action_encoding": True} if of is GymEnv else {}
        env = of("BitFlipping-v0", n_bits=2, **more)
        assert library.gym_reward(env)(self.ACHIEVED, self.DESIRED, {}).tolist() == [0, -1, 0]
        storage = make_for(env, "hindsight", reward_fn=library.gym_reward(env))
        assert storage.num_goals == 4

    def test_infos_arrive_as_arrays(self):
        class Env:
            def compute_reward(self, achieved_goal, desired_goal, info):
                assert isinstance(info["weight"], np.ndarray)
                return info["weight"] * (achieved_goal == desired_goal).all(-1)

        weight = torch.tensor([2.0, 3.0, 4.0])
        reward = library.gym_reward(Env())(self.ACHIEVED, self.DESIRED, {"weight": weight})
        assert reward.tolist() == [2.0, 0.0, 4.0]

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda make: make(),
            lambda make: gymnasium.wrappers.TimeLimit(make(), 9),
            lambda make: GymWrapper(make(), categorical_action_encoding=True),
            lambda make: TransformedEnv(GymWrapper(make(), categorical_action_encoding=True)),
            lambda make: gymnasium.vector.SyncVectorEnv([make, make]),
            lambda make: gymnasium.vector.AsyncVectorEnv([make]),
            lambda make: GymWrapper(
                gymnasium.vector.SyncVectorEnv([make, make], autoreset_mode="Disabled")
            ),
            lambda make: Steps(gymnasium.vector.SyncVectorEnv([make])),
        ],
        ids=[
            "env",
            "wrapper",
            "TorchRL",
            "transformed",
            "vector",
            "async",
            "both",
            "vector wrapper",
        ],
    )
    def test_outermost_wrapper_defines_the_method(self, wrap):
        env = wrap(lambda: Negated(gymnasium.make("BitFlipping-v0", n_bits=2)))
        # The goals are equal where all bits differ.
        assert library.gym_reward(env)(self.ACHIEVED, 1 - self.DESIRED, {}).tolist() == [0, -1, 0]
        ends = library.gym_terminated(env)(self.ACHIEVED, self.DESIRED, {})
        assert ends.tolist() == [True, False, True]
        env.close()

    def test_method_of_a_wrapper_only_is_called(self):
        env = gymnasium.wrappers.TimeLimit(Negated(gymnasium.make("CartPole-v1")), 9)
        reward = library.gym_reward(env)(self.ACHIEVED, 1 - self.DESIRED, {})
        assert reward.tolist() == [0, -1, 0]

    def test_reward_wrappers_apply_to_relabelled_rewards(self):
        def scaled(env):
            return gymnasium.wrappers.TransformReward(env, lambda reward: 10 * reward + 10)

        env = gymnasium.wrappers.ClipReward(scaled(gymnasium.make("BitFlipping-v0")), 1, 5)
        assert library.gym_reward(env)(self.ACHIEVED, self.DESIRED, {}).tolist() == [5, 1, 5]
        envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("BitFlipping-v0")])
        envs = gymnasium.wrappers.vector.TransformReward(envs, lambda reward: reward - 1)
        assert library.gym_reward(envs)(self.ACHIEVED, self.DESIRED, {}).tolist() == [-1, -2, -1]

    def test_gym_terminated_calls_methods_of_single_goals_once_per_transition(self):
        class Env(gymnasium.Env):
            def compute_terminated(self, achieved_goal, desired_goal, info):
                return bool(np.linalg.norm(achieved_goal - desired_goal) < 0.5)

        ends = library.gym_terminated(Env())(self.ACHIEVED, self.DESIRED, {"x": torch.ones(3)})
        assert ends.tolist() == [True, False, True]

    def test_batched_environments_and_those_without_goals_raise(self):
        several = SerialEnv(2, lambda: GymEnv("BitFlipping-v0", n_bits=2))
        for env in (gymnasium.make("CartPole-v1"), several, TransformedEnv(several)):
            for adapt in (library.gym_reward, library.gym_terminated):
                with pytest.raises(TypeError):
                    adapt(env)
