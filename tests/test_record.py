"""`record` leads to the same rows, answers and errors as to extend with its transitions."""

import copy
import pickle

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import RewardScaling

from trl_storages import (
    EpisodeWriter,
    PackedStorage,
    PERSampler,
    PrioritizedReplayStorage,
    ReplayStorage,
    UniformReplayStorage,
)

SPACES = {
    "dict": (
        spaces.Dict(
            {
                "observation": spaces.Box(-9, 9, (3,), np.float64),
                "picture": spaces.Box(0, 255, (2, 2), np.uint8),
            }
        ),
        spaces.Box(-1, 1, (2,), np.float32),
    ),
    "plain": (spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(3)),
    "nested": (
        spaces.Dict({"goals": spaces.Dict({"reached": spaces.Box(-9, 9, (2,), np.float32)})}),
        spaces.Discrete(3),
    ),
}
MODES = [None, "NextStep", "SameStep", "Disabled"]


def make(kind="dict", num_envs=1, mode=None, size=12, **options):
    """A storage for steps that are drawn at random, and do not begin where the one before ended."""
    return PrioritizedReplayStorage(
        *SPACES[kind],
        storage_size=size,
        num_envs=num_envs,
        autoreset_mode=mode,
        on_gap="ignore",
        **options,
    )


def seeded(space, seed):
    space = copy.deepcopy(space)
    space.seed(seed)
    return space.sample()


def step_of(kind, num_envs, seed, terminated, truncated, *, vector=True, told=True):
    """One step: everything in it follows from `seed` and the flags.

    `told` says whether the infos hold the last observations of the episodes that end.
    """
    observation_space, action_space = SPACES[kind]
    if vector:
        observation_space = gymnasium.vector.utils.batch_space(observation_space, num_envs)
        action_space = gymnasium.vector.utils.batch_space(action_space, num_envs)
    last = seeded(observation_space, seed + 2)
    ended = np.array(terminated) | np.array(truncated)
    infos = {}
    if not told:
        pass
    elif vector and ended.any():
        rows = [pick(last, lane) if ended[lane] else None for lane in range(num_envs)]
        final = np.empty(num_envs, object)
        final[:] = rows
        infos = {"final_obs": final, "_final_obs": ended}
    elif not vector and ended[0]:
        infos = {"final_obs": last}
    rewards = np.arange(num_envs) + seed / 8
    flags = np.array(terminated), np.array(truncated)
    if not vector:
        rewards, flags = float(rewards[0]), (bool(terminated[0]), np.bool_(truncated[0]))
    return (
        seeded(observation_space, seed),
        seeded(action_space, seed + 1),
        rewards,
        *flags,
        infos,
        # As the loop saw it, which is the true one only where the environments were not reset.
        last,
    )


def pick(value, lane):
    if isinstance(value, dict):
        return {name: pick(entry, lane) for name, entry in value.items()}
    return value[lane]


def assert_same(recorded, general):
    index = recorded.episodes
    assert len(recorded) == len(general)
    slots = index.slots_by_age(torch.arange(len(index)))
    assert torch.equal(recorded.storage.rows[slots], general.storage.rows[slots])
    assert torch.equal(index.cursors, general.episodes.cursors)
    assert torch.equal(index.is_open, general.episodes.is_open)
    assert (index.episodes() == general.episodes.episodes()).all()
    assert (
        recorded.writer.state_dict()["_write_count"] == general.writer.state_dict()["_write_count"]
    )
    assert recorded.writer._cursor == general.writer._cursor
    assert recorded.storage._last_cursor_index == general.storage._last_cursor_index
    assert recorded.storage._mutation_revision == general.storage._mutation_revision
    assert torch.equal(recorded.sampler.priorities, general.sampler.priorities)
    recorded.validate()


@given(st.data())
def test_any_stream_of_steps(data):
    num_envs = data.draw(st.integers(1, 3))
    kind = data.draw(st.sampled_from(list(SPACES)))
    mode = data.draw(st.sampled_from(MODES))
    recorded, general = (make(kind, num_envs, mode) for _ in range(2))
    flags = st.lists(st.sampled_from([False] * 5 + [True]), min_size=num_envs, max_size=num_envs)
    for seed in range(data.draw(st.integers(1, 20))):
        vector = num_envs > 1 or data.draw(st.booleans())
        told = mode == "SameStep" or data.draw(st.booleans())
        terminated, truncated = data.draw(flags), data.draw(flags)
        step = step_of(kind, num_envs, seed, terminated, truncated, vector=vector, told=told)
        if data.draw(st.sampled_from([False] * 9 + [True])):
            recorded.end_episodes()
            general.end_episodes()
        first, second = recorded.record(*step), by_hand(general, *step)
        assert (first is None) == (second is None)
        assert first is None or torch.equal(first, second)
        if first is not None:
            error = torch.rand(len(first), generator=torch.Generator().manual_seed(seed))
            for storage in (recorded, general):
                storage.update_priority(first, error)
        assert_same(recorded, general)


def by_hand(storage, *step):
    """What `record` does, with a TensorDict in between."""
    made = storage._recorder.rows(*step)
    return None if made is None else storage.extend(made[0], lanes=made[1])


WAYS = {"record": ReplayStorage.record, "by hand": by_hand}


def is_staged_once(storage, monkeypatch, *step):
    """Records a step, and returns whether its values went straight to where rows are written from."""
    again, really = [], PackedStorage.new_rows
    with monkeypatch.context() as patch:
        patch.setattr(
            PackedStorage,
            "new_rows",
            lambda *given, **options: again.append(1) or really(*given, **options),
        )
        assert storage.record(*step) is not None
    return not again


def outcome(way, storage, step):
    """The slots, or the error."""
    try:
        return way(storage, *step).tolist()
    except (TypeError, ValueError, KeyError) as error:
        return type(error), str(error)


ORDINARY = {"terminated": [False], "truncated": [False], "vector": False}


@pytest.fixture
def storage():
    storage = make()
    storage.record(*step_of("dict", 1, 0, **ORDINARY))
    return storage


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_ordinary_steps_are_staged_once(monkeypatch, kind, num_envs, mode):
    storage = make(kind, num_envs, mode)
    none = [False] * num_envs
    storage.record(*step_of(kind, num_envs, 0, none, none))
    for seed in range(1, 20):
        vector = num_envs > 1 or seed % 2 == 0
        step = step_of(kind, num_envs, seed, none, none, vector=vector)
        assert is_staged_once(storage, monkeypatch, *step)


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("mode", [None, "Disabled", "NextStep"])
def test_steps_that_end_episodes_are_staged_once(monkeypatch, kind, num_envs, mode):
    storage = make(kind, num_envs, mode)
    none = [False] * num_envs
    storage.record(*step_of(kind, num_envs, 0, none, none))
    for seed in range(1, 20):
        ended = [seed % 4 == 1, *none[1:]]
        flags = (ended, none) if seed % 8 == 1 else (none, ended)
        vector = num_envs > 1 or seed % 2 == 0
        step = step_of(kind, num_envs, seed, *flags, vector=vector, told=False)
        if mode == "NextStep" and num_envs == 1 and seed % 4 == 2:
            assert storage.record(*step) is None
        else:
            assert is_staged_once(storage, monkeypatch, *step)
    if num_envs == 3 and mode == "NextStep":
        # The first environment was only reset in five of the steps.
        assert storage.episodes.cursors.tolist() == [15, 20, 20]
    storage.validate()


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_so_do_those_whose_infos_tell_of_last_observations(monkeypatch, kind, num_envs, mode):
    storage = make(kind, num_envs, mode)
    none = [False] * num_envs
    storage.record(*step_of(kind, num_envs, 0, none, none))
    step = step_of(kind, num_envs, 1, [True, *none[1:]], none, vector=num_envs > 1)
    assert is_staged_once(storage, monkeypatch, *step)


@pytest.mark.parametrize("way", WAYS)
def test_a_last_observation_that_may_be_another_one_is_refused(storage, way):
    step = step_of("dict", 1, 1, [True], [False], vector=False)
    step[5]["final_obs"] = seeded(SPACES["dict"][0], 9)
    with pytest.raises(ValueError, match="must hold the last observation of environment 0"):
        WAYS[way](storage, *step)
    # Nothing was written, and nothing of it is seen later.
    assert len(storage) == 1
    storage.record(*step_of("dict", 1, 2, **ORDINARY))
    assert storage.episodes.episodes()["length"].tolist() == [2]
    storage.validate()


@pytest.mark.parametrize("way", WAYS)
def test_a_last_observation_that_is_missing_is_asked_for(way):
    storage = make(mode="SameStep")
    storage.record(*step_of("dict", 1, 0, **ORDINARY))
    with pytest.raises(ValueError, match="final_obs"):
        WAYS[way](storage, *step_of("dict", 1, 1, [True], [False], vector=False, told=False))
    assert len(storage) == 1


def test_arrays_in_several_pieces_are_ordinary(storage, monkeypatch):
    step = step_of("dict", 1, 1, **ORDINARY)
    spread = [
        {name: np.stack([value, value], -1)[..., 0] for name, value in seen.items()}
        for seen in (step[0], step[-1])
    ]
    assert not spread[0]["observation"].flags.contiguous
    assert is_staged_once(storage, monkeypatch, spread[0], *step[1:-1], spread[1])
    row = storage[1]
    assert row["observation"].tolist() == step[0]["observation"].tolist()
    assert row["next", "picture"].tolist() == step[-1]["picture"].tolist()


@pytest.mark.parametrize("way", WAYS)
def test_environments_that_seem_to_reset_themselves_are_noticed(storage, way):
    end = step_of("dict", 1, 1, [True], [False], vector=False, told=False)
    step = [*step_of("dict", 1, 2, **ORDINARY)]
    step[0] = end[6]
    if way == "by hand":
        end[5]["final_obs"] = end[6]
        step[2] = torch.tensor(step[2])
    WAYS[way](storage, *end)
    with pytest.warns(UserWarning, match="its next step begins with the observation") as warned:
        WAYS[way](storage, *step)
    # It points at the loop.
    assert warned[0].filename == __file__


def test_plain_numbers_and_lists_of_infos_are_ordinary(monkeypatch):
    storage = make("plain")
    seen = np.zeros(2, np.float32)
    storage.record(seen, 1, 1, False, False, {}, seen)
    assert is_staged_once(storage, monkeypatch, seen, 2, -1, False, False, {}, seen)
    assert storage[:]["action"].tolist() == [1, 2]
    assert storage[:]["next", "reward"].tolist() == [[1], [-1]]
    storage = make("plain", 2)
    none = [False, False]
    step = [*step_of("plain", 2, 0, none, none)]
    storage.record(*step)
    step[5] = [{}, {}]
    assert is_staged_once(storage, monkeypatch, *step)


class TestOtherSteps:
    """Values of other kinds are converted, or refused."""

    CHANGES = {
        "end": (3, True),
        "cut short": (4, True),
        "list": (1, [0.5, -0.5]),
        "tensor": (1, torch.tensor([0.5, -0.5])),
        "other dtype": (1, np.zeros(2, np.float64)),
        "other shape": (1, np.zeros(3, np.float32)),
        "too few dimensions": (1, np.float32(0.5)),
        "reward of a vector": (2, np.zeros(1)),
        "no number": (2, "1.5"),
        "flag as a number": (2, True),
        "number as a flag": (3, 0),
        "missing entry": (0, {"observation": np.zeros(3)}),
        "further entry": (6, seeded(SPACES["dict"][0], 0) | {"speed": 1.0}),
        "array for a dict": (0, np.zeros(3)),
        "array for the next dict": (6, np.zeros((2, 2))),
        "infos of a vector": (5, [{}]),
        "no infos": (5, None),
    }

    @pytest.mark.parametrize("change", CHANGES)
    def test_one_change(self, storage, change):
        at, value = self.CHANGES[change]
        step = [*step_of("dict", 1, 1, **ORDINARY)]
        step[at] = value
        general = make()
        general.record(*step_of("dict", 1, 0, **ORDINARY))
        assert outcome(ReplayStorage.record, storage, step) == outcome(by_hand, general, step)
        assert_same(storage, general)

    def test_nothing_of_a_step_that_fails_is_seen_later(self, storage):
        step = [*step_of("dict", 1, 1, **ORDINARY)]
        step[6] = step[6] | {"picture": np.zeros(3)}
        with pytest.raises((TypeError, ValueError)):
            storage.record(*step)
        good = step_of("dict", 1, 2, **ORDINARY)
        storage.record(*good)
        row = storage[1]
        assert row["observation"].tolist() == good[0]["observation"].tolist()
        assert row["next", "picture"].tolist() == good[6]["picture"].tolist()

    def test_the_caller_may_use_its_arrays_again(self, storage):
        step = step_of("dict", 1, 1, **ORDINARY)
        expected = step[0]["observation"].tolist()
        storage.record(*step)
        step[0]["observation"][:] = 7
        assert storage[1]["observation"].tolist() == expected


class TestOtherStorages:
    """All packed rows are written from where the step is gathered."""

    def check(self, storage, monkeypatch):
        storage.record(*step_of("dict", 1, 0, **ORDINARY))
        assert is_staged_once(storage, monkeypatch, *step_of("dict", 1, 1, **ORDINARY))
        storage.validate()

    def test_a_directory(self, monkeypatch, tmp_path):
        self.check(make(path=tmp_path), monkeypatch)

    def test_infos_that_are_kept(self, monkeypatch):
        storage = make(info_keys=["force"])
        step = [*step_of("dict", 1, 0, **ORDINARY)]
        step[5] = {"force": 1.0}
        storage.record(*step)
        assert is_staged_once(storage, monkeypatch, *step)
        assert storage[:]["force"].tolist() == [1.0, 1.0]

    def test_generations(self, monkeypatch):
        writer = EpisodeWriter(track_generations=True, on_gap="ignore")
        self.check(ReplayStorage(storage=PackedStorage(12), writer=writer), monkeypatch)

    def test_other_processes(self, monkeypatch):
        storage = UniformReplayStorage(*SPACES["dict"], storage_size=12, on_gap="ignore")
        storage.record(*step_of("dict", 1, 0, **ORDINARY))
        storage.share()
        self.check(storage, monkeypatch)

    def test_a_transform_with_an_inverse(self, monkeypatch):
        storage = make("plain")
        step = step_of("plain", 1, 0, **ORDINARY)
        storage.record(*step)
        assert is_staged_once(storage, monkeypatch, *step)
        storage.append_transform(RewardScaling(0.0, 1.0))
        assert not is_staged_once(storage, monkeypatch, *step)


def test_a_write_that_is_heard_of_once(storage):
    heard = []

    class Listener(PERSampler):
        def mark_update(self, index, *, storage=None):
            heard.append(index.tolist())
            super().mark_update(index, storage=storage)

    storage.set_sampler(Listener(12))
    other = TensorDictReplayBuffer(storage=storage.storage, sampler=Listener(12))
    storage.record(*step_of("dict", 1, 1, **ORDINARY))
    assert heard == [[1], [1]]
    assert other.sampler.priorities[:3].isfinite().tolist() == [True, True, False]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_have_rows_of_their_own(storage, copied):
    storage.record(*step_of("dict", 1, 1, **ORDINARY))
    other = copied(storage)
    for seed in (2, 3):
        other.record(*step_of("dict", 1, seed, **ORDINARY))
    assert (len(storage), len(other)) == (2, 4)
    storage.validate()
    other.validate()
    assert not storage.storage.rows[2:].any()


def test_after_other_rows_were_loaded(storage):
    state = storage.state_dict()
    storage.record(*step_of("dict", 1, 1, **ORDINARY))
    other = make()
    other.record(*step_of("dict", 1, 5, **ORDINARY))
    other.load_state_dict(state)
    other.record(*step_of("dict", 1, 1, **ORDINARY))
    assert torch.equal(other.storage.rows, storage.storage.rows)
    other.validate()


def test_after_it_was_emptied(storage, monkeypatch):
    storage.empty()
    step = step_of("dict", 1, 1, **ORDINARY)
    assert is_staged_once(storage, monkeypatch, *step)
    assert storage[:]["observation"].tolist() == [step[0]["observation"].tolist()]
    storage.validate()


@pytest.mark.parametrize("options", [{}, {"share_next": True}, {"info_keys": ["extra"]}])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_the_values_of_a_single_environment(is_contiguous, options):
    kinds = {"a": np.uint8, "b": np.float64, "c": np.float32}
    space = spaces.Dict({key: spaces.Box(0, 99, (3, 2), dtype) for key, dtype in kinds.items()})
    storage = UniformReplayStorage(space, spaces.Discrete(99), storage_size=30, **options)
    steps, seen = [], space.sample()
    for number in range(10):
        after = space.sample()
        flags = number % 3 == 1, number % 4 == 3
        kept = {key: value if is_contiguous else value.T.copy().T for key, value in after.items()}
        step = seen, number, number / 4, *flags, {"extra": number}, kept
        storage.record(*step)
        steps.append((*step[:5], after))
        seen = kept if not any(flags) else space.sample()
    rows = storage[:]
    assert rows["action"].tolist() == list(range(10))
    assert rows["next", "reward"].flatten().tolist() == [step[2] for step in steps]
    for place, key in ((3, "terminated"), (4, "truncated")):
        assert rows["next", key].flatten().tolist() == [step[place] for step in steps]
    assert rows["next", "done"].flatten().tolist() == [step[3] or step[4] for step in steps]
    for name in kinds:
        assert np.array_equal(rows[name], np.stack([step[0][name] for step in steps]))
        assert np.array_equal(rows["next", name], np.stack([step[5][name] for step in steps]))
    if "info_keys" in options:
        assert rows["extra"].tolist() == list(range(10))
    storage.validate()


@pytest.mark.parametrize("num_envs", [1, 3, 300])
def test_large_and_small_values_of_one_step(num_envs):
    """Large ones are copied one by one, and small ones at once, whatever their strides."""
    kinds = {
        "image": spaces.Box(0, 255, (40, 40), np.uint8),
        "odd": spaces.Box(0, 255, (3,), np.uint8),
        "speed": spaces.Box(-9, 9, (2,), np.float64),
    }
    storage = UniformReplayStorage(
        spaces.Dict(kinds),
        spaces.Discrete(5),
        storage_size=2 * num_envs,
        num_envs=num_envs,
    )
    random, seen = np.random.default_rng(0), []
    lead = (num_envs,) if num_envs > 1 else ()

    def observation():
        return {
            "image": random.integers(0, 255, (*lead, 40, 40), np.uint8).swapaxes(-1, -2),
            "odd": random.integers(0, 255, (*lead, 3), np.uint8)[..., ::-1],
            "speed": random.normal(size=(*lead, 4))[..., ::2],
        }

    flags = (np.zeros(lead, bool), np.ones(lead, bool))
    for _ in range(2):
        before, after = observation(), observation()
        action, reward = random.integers(0, 5, lead), random.normal(size=lead)
        slots = storage.record(before, action, reward, *flags, {}, after)
        seen.append((slots, before, action, reward, after))
    for slots, before, action, reward, after in seen:
        rows = storage[slots] if lead else storage[slots][0]
        for key in kinds:
            assert np.array_equal(rows[key].numpy(), before[key])
            assert np.array_equal(rows["next", key].numpy(), after[key])
        assert np.array_equal(rows["action"].numpy(), action)
        assert np.array_equal(rows["next", "reward"].numpy()[..., 0], np.float32(reward))
        assert rows["next", "done"].all()
        assert not rows["next", "terminated"].any()
