"""Ready-made storages: what each one is, of environments and options."""

import gc
import inspect

import gymnasium
import numpy as np
import pytest
import torch
from contract.lanes import Lanes, ends
from contract.make import library, make, make_for, make_of, new_folder, spaces
from contract.steps import Player, assert_same, reward_fn, rows
from torchrl.data import Categorical, Composite, MultiCategorical, NonTensor, Unbounded
from torchrl.envs import DTypeCastTransform, EnvBase, GymEnv, SerialEnv
from torchrl.envs.transforms import RewardScaling

RECIPES = ["uniform", "n-step", "prioritized", "recency", "hindsight", "all"]
FIELDS = {*rows([]).keys(True, True)}
SPECS = Composite(
    observation=Unbounded((3,)), achieved_goal=Unbounded((2,)), desired_goal=Unbounded((2,))
)
ACTIONS, TWO = Unbounded((2,)), gymnasium.spaces.Discrete(2)


def filled(kind, **options):
    storage, lanes = make(kind, **{"size": 40, "batch_size": 20, **options}), Lanes(40)
    lanes.write(storage, [ends([5, 9, 3, 6], 4)])
    return storage, lanes


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        ("uniform", set()),
        ("n-step", {"steps_to_next_obs"}),
        ("prioritized", {"priority_weight"}),
        ("recency", {"priority_weight"}),
        ("hindsight", {"her_mask", "goal_index"}),
        ("all", {"steps_to_next_obs", "priority_weight", "her_mask", "goal_index"}),
    ],
)
def test_what_batches_hold(place, kind, entries):
    """The fields of a transition, where it is from, and what each part adds."""
    storage, lanes = filled(kind, place=place)
    batch = storage.sample()
    assert batch.batch_size == batch["next"].batch_size == (20,)
    always = {*rows(lanes.live()).keys(True, True), "index", "index_generation"}
    found = {*batch.keys(True, True)}
    if kind == "recency":
        found.add("priority_weight")
    assert found == always | entries
    assert_same(storage[batch["index"]], rows(lanes.of(batch)))


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("of", [spaces(), (SPECS, ACTIONS), (spaces()[0], ACTIONS)])
def test_fields_are_those_of_spaces_or_specs(kind, of):
    """Before the first write; further entries of a collector are dropped."""
    infos = {"effort": Unbounded((1,), dtype=torch.float64)}
    storage, data = make_of(*of, kind, info_keys=infos), rows(Player().play([4]))
    assert storage.storage.initialized
    data["logits"] = torch.zeros(4, 7)
    data["step_count"] = data["next", "step_count"] = torch.ones(4, 1, dtype=torch.int64)
    data["is_init"] = data["next", "is_init"] = torch.zeros(4, 1, dtype=torch.bool)
    data["collector", "traj_ids"] = torch.zeros(4, dtype=torch.int64)
    storage.extend(data)
    assert {*storage[:].keys(True, True)} == FIELDS
    assert_same(storage[:], data.select(*FIELDS))


def test_a_box_without_dimensions_has_values_of_one():
    two = {("next", "reward"): (torch.float32, (2,))}
    storage = make_of(*2 * [gymnasium.spaces.Box(-1, 1, ())], extra_fields=two)
    storage.record(0.5, -0.5, [1.0, 2.0], False, True, {}, 0.25)
    with pytest.raises(ValueError, match="rewards"):
        storage.record(0.5, -0.5, 1.0, False, True, {}, 0.25)
    batch = storage[:]
    found = batch["observation"], batch["action"], batch["next", "observation"]
    assert [it.tolist() for it in found] == [[[0.5]], [[-0.5]], [[0.25]]]


@pytest.mark.parametrize(
    "space",
    [
        NonTensor((2,)),
        Unbounded((2, -1)),
        Unbounded(()),
        gymnasium.spaces.Text(5),
        gymnasium.spaces.Box(-1, 1, (2,), np.longdouble),
        gymnasium.spaces.Tuple([TWO]),
        gymnasium.spaces.Sequence(TWO),
        gymnasium.spaces.Graph(TWO, TWO),
        gymnasium.spaces.OneOf([TWO, TWO]),
        gymnasium.spaces.Dict({"a": gymnasium.spaces.Text(3)}),
        gymnasium.spaces.Dict({}),
        object(),
    ],
    ids=lambda space: type(space).__name__,
)
def test_spaces_without_a_field_are_refused(space):
    with pytest.raises(TypeError, match="must be"):
        make_of(SPECS.expand(2), space)
    if space != Unbounded(()):  # an observation of one value
        with pytest.raises((TypeError, ValueError), match="must"):
            make_of(space, ACTIONS)


@pytest.mark.requirement("refused-is-unchanged")
@pytest.mark.parametrize(
    ("space", "lows", "ends"),
    [
        (gymnasium.spaces.Discrete(3, start=-1), -1, 2),
        (gymnasium.spaces.MultiDiscrete([3, 2], start=[0, 5]), [0, 5], [3, 7]),
        (Categorical(3), 0, 3),
        (MultiCategorical([3, 2]), [0, 0], [3, 2]),
    ],
    ids=["Discrete", "MultiDiscrete", "Categorical", "MultiCategorical"],
)
def test_actions_are_those_of_their_space(space, lows, ends):
    seen = {"deep": {"seen": np.zeros(1, np.float32), "none": np.zeros(0, np.float32)}}
    deep = Composite(seen=Unbounded((1,)), none=Unbounded((0,)))
    storage = make_of(Composite(deep=deep), space, "uniform")
    lows, ends = np.array(lows, np.int64), np.array(ends, np.int64)
    for action in (lows, ends - 1):
        storage.record(seen, action, 0.0, False, False, {}, seen)
    for action in (lows - 1, ends):
        with pytest.raises(ValueError, match="action"):
            storage.record(seen, action, 0.0, False, False, {}, seen)
    assert storage[:]["action"].reshape(2, -1).tolist() == [
        np.atleast_1d(action).tolist() for action in (lows, ends - 1)
    ]


def test_transform_of_a_preset_follows_hindsight_and_n_step_returns():
    def transform(batch):
        return batch.set("seen", batch["her_mask"] & (batch["steps_to_next_obs"] > 0)[:, 0])

    batch = filled("all", transform=transform)[0].sample()
    assert torch.equal(batch["seen"], batch["her_mask"])


@pytest.mark.parametrize("kind", [gymnasium.spaces.Dict, Composite], ids=["space", "spec"])
def test_goals_that_are_dictionaries_raise_with_the_way_out(kind):
    part = gymnasium.spaces.Box(-1, 1, (3,)) if kind is gymnasium.spaces.Dict else Unbounded((3,))
    goal = kind({"kettle": part, "door": part})
    space = kind({"observation": part, "achieved_goal": goal, "desired_goal": goal})
    with pytest.raises(TypeError, match=r"achieved_goal.*'kettle'.*[Ff]latten"):
        make_of(space, part, "hindsight")


class TestFromEnv:
    @pytest.mark.parametrize("shape", [(), (2,)])
    def test_rewards_per_agent_raise_and_name_the_components(self, shape):
        class Team(EnvBase):
            def __init__(self):
                super().__init__(batch_size=shape)
                spec = Unbounded((*shape, 3, 1))
                self.observation_spec = Composite({("agents", "observation"): spec}, shape=shape)
                self.action_spec = Composite({("agents", "action"): spec}, shape=shape)
                self.reward_spec = Composite({("agents", "reward"): spec}, shape=shape)

            _reset = _step = _set_seed = None

        with pytest.raises(ValueError, match=r"'agents', 'reward'.*ReplayStorage.*reward_key"):
            make_for(Team())
        reward = {("next", "reward"): (torch.float32, [3])}
        assert make_for(Team(), extra_fields=reward).storage.initialized

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_an_environment_of_torchrl(self, num_envs):
        def make_env():
            return GymEnv("CartPole-v1", categorical_action_encoding=True)

        env = make_env() if num_envs == 1 else SerialEnv(num_envs, make_env)
        storage = make_for(env, "n-step", size=90)
        storage.extend(env.rollout(5, break_when_any_done=False))
        assert len(storage) == 5 * num_envs
        assert storage.sample(4)["observation"].shape == (4, 4)

    def test_something_else_raises(self):
        for wrong in (5, "CartPole-v1", None):
            with pytest.raises(TypeError):
                make_for(wrong)


class TestTransforms:
    """Transforms of TorchRL take part, in batches and in what is written."""

    def test_of_a_batch(self):
        storage, lanes = filled("hindsight")
        storage.append_transform(RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]))
        storage.append_transform(
            DTypeCastTransform(
                torch.float64, torch.float32, in_keys=[("next", "effort")], in_keys_inv=[]
            )
        )
        batch = storage.sample()
        new = batch["her_mask"]
        reward = reward_fn(batch["next", "achieved_goal"], batch["desired_goal"], batch["next"])
        assert torch.equal(batch["next", "reward"][new, 0], 2 * reward[new])
        assert batch["next", "effort"].dtype is torch.float32
        assert_same(storage[batch["index"]], rows(lanes.of(batch)))


@pytest.mark.requirement("persistence")
def test_a_reader_draws_as_the_writer_does():
    path = new_folder() / "rows"
    options = {"place": "directory", "path": path, "size": 20, "batch_size": 5, "seed": 1}
    with pytest.raises(FileNotFoundError):
        make("n-step", mode="r", **options)
    storage, lanes = make("n-step", **options), Lanes(20)
    lanes.write(storage, [ends([4], 3)])
    reader = make("n-step", mode="r", **options)
    for _ in range(3):
        assert_same(storage.sample(), reader.sample())
    lanes.write(storage, [ends([5])])
    reader.sample()
    assert len(reader) == len(storage) == 12
    with pytest.raises(RuntimeError, match="read"):
        lanes.write(reader, [ends([1])])
    with pytest.raises(ValueError, match="path"):
        make("n-step", mode="r")


# Names


def test_names_that_sampling_sets_are_refused():
    storage, _ = filled("all", sample_unit=library.EpisodeSequence(2))
    both = library.ReplayStorageEnsemble(storage, batch_size=4)
    batches = storage.sample(), storage.sample_episodes(2), both.sample()
    added = {key for batch in batches for key in batch.keys(True, True)} - FIELDS
    assert len(added) > 12
    box = gymnasium.spaces.Box(-1, 1, (2,))
    for key in added - {"is_init", "steps_to_next_obs"}:
        with pytest.raises(ValueError, match=key if isinstance(key, str) else key[-1]):
            make(extra_fields={key: (torch.float32, (2,))})
        if isinstance(key, tuple):  # an info with a plain name is under "next"
            with pytest.raises(ValueError, match=key[-1]):
                make(info_keys={key: box})


@pytest.mark.parametrize("key", ["is_init", "steps_to_next_obs", ("next", "index")])
def test_names_that_torchrl_writes_too_may_be_stored(key):
    storage, data = make(extra_fields={key: (torch.int64, (1,))}), rows(Player().play([6]))
    storage.extend(data.set(key, torch.arange(6).unsqueeze(1)))
    batch = storage.sample(9)
    assert torch.equal(batch[key].squeeze(1), batch["index"])


def test_sampled_batches_are_written_again():
    storage, other = filled("all")[0], make("all", on_gap="ignore")
    with pytest.raises(ValueError, match="steps_to_next_obs"):
        other.extend(storage.sample(5))  # sums of several rewards
    other.extend(storage.sample(5).exclude("steps_to_next_obs"))
    assert len(other) == 5
    assert {*other[:].keys(True, True)} == FIELDS


def test_every_option_is_explained():
    explained = inspect.cleandoc(library.UniformReplayStorage.__doc__)
    for option in inspect.signature(library.UniformReplayStorage).parameters:
        assert f"    {option}: " in explained, option


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("NStepReplayStorage", {"n_step": 3}),
        ("PrioritizedReplayStorage", {"alpha": 0.6}),
        ("EREReplayStorage", {"eta": 0.996}),
    ],
)
def test_recipes_differ_in_their_defaults(name, other):
    of_uniform, of_recipe = (
        inspect.signature(getattr(library, it)).parameters for it in ("UniformReplayStorage", name)
    )
    different = {
        key: it.default for key, it in of_recipe.items() if it.default != of_uniform[key].default
    }
    assert different == other


@pytest.mark.parametrize("kind", RECIPES)
def test_keywords_are_explicit(kind):
    shown = inspect.signature(type(make(kind))).parameters
    assert {"observation_space", "storage_size", "path", "transform"} <= {*shown}
    assert not [it for it in shown.values() if it.kind in (it.VAR_KEYWORD, it.VAR_POSITIONAL)]
    with pytest.raises(TypeError, match="use storage_size="):
        make(kind, buffer_size=40)
    # Of hindsight alone.
    answer = "use strategy=" if kind in ("hindsight", "all") else "unexpected keyword"
    with pytest.raises(TypeError, match=answer):
        make(kind, goal_selection_strategy="final")
    with pytest.raises(TypeError, match="colour"):
        make(kind, colour="red")


@pytest.mark.parametrize("kind", ["uniform", "all"])
def test_batches_need_no_garbage_collection(kind):
    storage, _ = filled(kind)
    storage.sample()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            storage.sample()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_misspelt_parameters_raise():
    storage, _ = filled("all")
    sampler = storage.sampler
    for owner in (storage, storage.transform[1], sampler, sampler.base, sampler.base.base):
        with pytest.raises(AttributeError, match="n_steps"):
            owner.n_steps = 4
    plain, _ = filled("uniform")
    for owner in (plain, plain.sampler):
        with pytest.raises(AttributeError, match="alpha"):
            owner.alpha = 0.5


def test_subclasses_add_attributes():
    class Named(library.UniformReplayStorage):
        def __init__(self, *spaces, label, **options):
            super().__init__(*spaces, **options)
            self.label = label

    storage = Named(gymnasium.spaces.Box(-1, 1), gymnasium.spaces.Discrete(2), label="first")
    storage.label = "second"
    assert storage.label == "second"
