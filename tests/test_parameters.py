"""Parameters of the parts, read and set on the storage; and nothing else is set by a slip."""

import copy
import math
import pickle
import re

import pytest
import torch
from test_recipes import make, rows
from torchrl.data import LazyTensorStorage
from torchrl.envs.transforms import Compose

import trl_storages
from trl_storages import EpisodeWriter, ERESampler, HERSampler, NStep, PERSampler, ReplayStorage
from trl_storages.replay.options import Parameter

ALL = {
    "n_step": 3,
    "discount": 0.9,
    "alpha": 0.6,
    "beta": 0.5,
    "normalize": "storage",
    "eps": 0.01,
    "eta": 0.9,
    "c_min": 4,
}
HINDSIGHT = {"strategy": "final", "num_goals": 3}
# Name -> another value, and one that is refused.
OTHERS = {
    "n_step": (5, 0),
    "discount": (0.5, None),
    "alpha": (1.0, -1),
    "beta": (1.0, 2),
    "normalize": ("none", "all"),
    "eps": (0.5, 0),
    "eta": (0.5, math.nan),
    "c_min": (7, 1.5),
    "strategy": ("random", "last"),
    "num_goals": (math.inf, -1),
}
NAMES = [name for name, value in vars(ReplayStorage).items() if isinstance(value, Parameter)]


def everything() -> ReplayStorage:
    return make(**ALL, strategy="final", num_goals=3, batch_size=8)


def test_every_parameter_is_walked_here():
    assert {*NAMES} == {*OTHERS} == {*ALL, *HINDSIGHT}


@pytest.mark.requirement("live-parameters")
@pytest.mark.parametrize("name", OTHERS)
class TestEach:
    def test_is_read_and_set_on_the_storage(self, name):
        storage = everything()
        assert getattr(storage, name) == {**ALL, **HINDSIGHT}[name]
        value, wrong = OTHERS[name]
        setattr(storage, name, value)
        assert getattr(storage, name) == value
        with pytest.raises((TypeError, ValueError), match=f"^{name} must"):
            setattr(storage, name, wrong)
        assert getattr(storage, name) == value

    def test_is_refused_where_no_part_has_it(self, name):
        storage = make("UniformReplayStorage")
        with pytest.raises(AttributeError, match=f"no part with {name}.*make it with "):
            getattr(storage, name)
        with pytest.raises(AttributeError, match=f"no part with {name}"):
            setattr(storage, name, OTHERS[name][0])
        assert not hasattr(storage, name)

    def test_is_found_in_a_storage_made_as_the_message_says(self, name):
        with pytest.raises(AttributeError) as raised:
            getattr(make("UniformReplayStorage"), name)
        if (said := re.search(r"make it with (\w+)=([\d.]+)", str(raised.value))) is not None:
            number = float(said[2]) if "." in said[2] else int(said[2])
            storage = make("UniformReplayStorage", **{said[1]: number})
        else:
            assert "HERReplayStorage" in str(raised.value)
            storage = make()
        value = OTHERS[name][0]
        setattr(storage, name, value)
        assert getattr(storage, name) == value

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
    def test_of_a_copy(self, name, copied):
        storage = everything()
        setattr(storage, name, OTHERS[name][0])
        assert getattr(copied(storage), name) == OTHERS[name][0]


@pytest.mark.requirement("live-parameters")
def test_a_new_value_holds_for_the_next_batch():
    storage = everything()
    storage.extend(rows(12))
    storage.n_step = 1
    assert (storage.sample()["steps_to_next_obs"] == 1).all()
    storage.num_goals = 0
    assert not storage.sample()["her_mask"].any()
    storage.n_step, storage.num_goals, storage.eta, storage.c_min = 4, math.inf, 1e-9, 2
    batch = storage.sample(100)
    assert batch["her_mask"].all()
    assert {*batch["index"].tolist()} == {10, 11}


def test_parts_put_together_by_hand():
    parts = {"writer": EpisodeWriter(), "batch_size": 4}
    sampler = HERSampler(base=ERESampler(base=PERSampler(10)))
    storage = ReplayStorage(
        storage=LazyTensorStorage(10), sampler=sampler, transform=Compose(NStep(2)), **parts
    )
    storage.alpha, storage.n_step = 0.25, 7
    assert sampler.base.base.alpha == 0.25
    assert storage.transform[0].n_step == 7


def test_the_discount_is_that_of_returns_and_of_geometric_goals():
    storage = make(strategy="geometric", num_goals=math.inf, batch_size=64)
    storage.extend(rows(20))
    assert storage.discount == storage.sampler.discount == 0.99
    storage.discount = 0
    batch = storage.sample()
    assert torch.equal(batch["goal_index"], batch["index"])

    returns = make(strategy="geometric", discount=0.9, n_step=2)
    returns.discount = 0.5
    assert returns.transform[1].discount == returns.sampler.discount == 0.5
    # Parts by hand may have two; the losses are of the returns'.
    returns.sampler.discount = 0.7
    assert returns.discount == 0.5


@pytest.mark.parametrize("name", ["strategy", "num_goals", "discount"])
def test_of_two_goals_with_unlike_values_each_is_set_on_its_own(name):
    storage = make()
    values = storage.sampler
    actors = HERSampler(goal_key="actor_goal", base=values)
    storage.set_sampler(actors)
    value = OTHERS[name][0]
    setattr(storage, name, value)
    assert getattr(values, name) == getattr(actors, name) == getattr(storage, name) == value
    setattr(actors, name, {**ALL, **HINDSIGHT}[name])
    with pytest.raises(AttributeError, match=f"2 HERSamplers whose {name} differ.*storage.sampler"):
        getattr(storage, name)
    with pytest.raises(AttributeError, match=f"2 HERSamplers whose {name} differ"):
        setattr(storage, name, value)
    assert getattr(values, name) == value


@pytest.mark.parametrize(
    ("slip", "hint"),
    [
        ("n_steps", "it is called n_step here"),
        ("gamma", "it is called discount here"),
        ("goal_selection_strategy", r"it is called strategy here\.$"),
        ("num_goal", r"do you mean num_goals\?$"),
        ("batchsize", r"do you mean batch_size\?$"),
        ("colour", "there are alpha, batch_size, beta, "),
    ],
)
@pytest.mark.parametrize("made", [everything, lambda: ReplayStorage(storage=LazyTensorStorage(3))])
def test_an_attribute_that_is_not_there_can_not_be_set(made, slip, hint, tmp_path):
    storage = made()
    with pytest.raises(AttributeError, match=f"no attribute {slip!r}; {hint}"):
        setattr(storage, slip, 3)
    assert slip not in vars(storage)


def test_nor_on_a_storage_that_was_opened(tmp_path):
    storage = make(path=tmp_path)
    storage.extend(rows(4))
    storage.close()
    opened = ReplayStorage.open(tmp_path, batch_size=2)
    with pytest.raises(AttributeError, match="do you mean"):
        opened.batchsize = 3
    opened.close()


@pytest.mark.parametrize(
    ("part", "slip", "hint"),
    [
        (lambda storage: storage.sampler, "num_goal", "do you mean num_goals"),
        (lambda storage: storage.sampler.base, "etta", "do you mean eta"),
        (lambda storage: storage.sampler.base.base, "bata", "do you mean beta"),
        (lambda storage: make("UniformReplayStorage").sampler, "eta", "there are"),
        (lambda storage: storage.writer, "done_keys", "do you mean done_key"),
    ],
)
@pytest.mark.parametrize("copied", [lambda it: it, copy.deepcopy])
def test_nor_on_a_sampler_or_a_writer(part, slip, hint, copied):
    part = part(copied(everything()))
    with pytest.raises(
        AttributeError, match=f"{type(part).__name__} has no attribute {slip!r}; {hint}"
    ):
        setattr(part, slip, 3)
    assert slip not in vars(part)


def test_what_is_there_can_be_set():
    storage = everything()
    storage.priority_key = "error"
    storage.extend(rows(12))
    batch = storage.sample()
    batch["error"] = torch.rand(8)
    storage.update_tensordict_priority(batch)


def test_names_elsewhere_are_no_names_here():
    """Or one library's name would be taken for another's."""
    here = trl_storages.recipe_options.OPTIONS
    assert not {*here} & {*trl_storages.other_names.OTHER_NAMES}
