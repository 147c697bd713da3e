"""Storages out of datasets: what lies where is worked out by hand, and compared bit for bit."""

import builtins
import math
import sys

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from trl_storages import (
    EpisodeReplayStorage,
    HERReplayStorage,
    PackedStorage,
    ReplayStorage,
    UniformReplayStorage,
)
from trl_storages.datasets import (
    filling,
    from_arrays,
    from_minari,
    to_minari,
)

pytestmark = pytest.mark.requirement("datasets")


def d4rl(num_rows=9, **entries):
    """Two episodes and a half: steps 0 to 3 end in a terminal state, 4 to 6 by the time limit."""
    rng = np.random.default_rng(0)
    at = np.arange(num_rows)
    return {
        "observations": rng.normal(size=(num_rows, 2)).astype(np.float32),
        "actions": rng.normal(size=(num_rows, 1)).astype(np.float32),
        "rewards": rng.normal(size=num_rows).astype(np.float32),
        "terminals": at == 3,
        "timeouts": at == 6,
        **entries,
    }


def observed(values):
    return np.asarray(values, np.float32)[:, None]


def seen(storage):
    """Returns first observations, next ones, terminated and truncated of the history, as lists."""
    rows = storage[:]
    return tuple(
        rows[key].flatten().tolist()
        for key in (
            "observation",
            ("next", "observation"),
            ("next", "terminated"),
            ("next", "truncated"),
        )
    )


def same(one, other):
    keys = {*one.keys(True, True)}
    assert keys == {*other.keys(True, True)}
    return all(
        one[key].dtype == other[key].dtype
        and one[key].numpy().tobytes() == other[key].numpy().tobytes()
        for key in keys
    )


# What each convention says


def test_d4rl_with_next_observations_infos_and_metadata():
    after = np.random.default_rng(1).normal(size=(9, 2)).astype(np.float32)
    data = d4rl(next_observations=after)
    data["infos/qpos"] = np.arange(27.0).reshape(9, 3)
    data["infos/goal"] = np.arange(9)
    data["metadata/algorithm"] = "SAC"
    data["metadata/policy/fc0/weight"] = np.zeros((4, 2))

    storage = from_arrays(data, on_gap="ignore")

    rows = storage[:]
    assert torch.equal(rows["next", "observation"], torch.tensor(after))
    for key in ("observation", "action"):
        assert torch.equal(rows[key], torch.tensor(data[key + "s"]))
    assert torch.equal(rows["infos", "qpos"], torch.arange(27.0).double().reshape(9, 3))
    assert rows["infos", "goal"].tolist() == [*range(9)]
    assert rows["next", "done"].flatten().nonzero().flatten().tolist() == [3, 6]
    assert storage.episodes.episodes()["length"].tolist() == [4, 3, 2]


@pytest.mark.parametrize(
    ("flags", "terminated", "truncated"),
    [
        ({"terminals": [0, 1, 0, 0]}, [1], []),
        ({"terminals": [0, 1, 0, 0], "timeouts": [0, 0, 0, 1]}, [1], [3]),
        ({"terminations": [0, 1, 0, 0], "truncations": [0, 1, 0, 1]}, [1], [1, 3]),
        # Stable-Baselines3: done is either.
        ({"dones": [0, 1, 0, 1], "timeouts": [0, 0, 0, 1]}, [1], [3]),
        ({"terminals": [0, 1, 0, 0], "dones": [0, 1, 0, 1]}, [1], [3]),
        ({"done": [0, 1, 0, 0]}, [1], []),
        # OGBench's tasks and jaxrl: masks say what is terminal, also within a trajectory.
        ({"masks": [1, 0, 1, 1], "terminals": [0, 0, 0, 1]}, [1], [3]),
        ({"masks": [1, 0, 1, 1], "dones_float": [0, 1, 0, 1]}, [1], [3]),
        ({"masks": [1, 0, 1, 1]}, [1], []),
        ({"terminal": np.array([[0], [1], [0], [0]])}, [1], []),
    ],
)
def test_flags_of_all_conventions(flags, terminated, truncated):
    data = {
        "observation": observed(range(4)),
        "next_observation": observed([1, 2, 3, 4]),
        "action": np.arange(4),
        "reward": np.zeros((4, 1), np.float32),
        **flags,
    }
    rows = from_arrays(data)[:]
    assert rows["next", "terminated"].flatten().nonzero().flatten().tolist() == terminated
    assert rows["next", "truncated"].flatten().nonzero().flatten().tolist() == truncated
    assert rows["next", "done"].flatten().nonzero().flatten().tolist() == sorted(
        {*terminated, *truncated}
    )
    assert rows["action"].tolist() == [0, 1, 2, 3]


def test_data_that_tell_no_ends_are_refused():
    data = {"observations": observed(range(6)), "actions": observed(range(6))}
    data |= {"rewards": np.zeros(6), "is_last": np.arange(6) % 3 == 2}
    with pytest.raises(ValueError, match=r"where episodes end.*ends=.*np.zeros\(N\)"):
        from_arrays(data)
    assert not from_arrays(data, np.zeros(6))[:]["next", "done"].any()
    assert from_arrays(data, "is_last").episodes.episodes()["length"].tolist() == [2, 2]


def test_a_goal_in_the_middle_of_a_trajectory_is_no_end_of_what_is_known():
    data = {
        "observations": observed(range(5)),
        "actions": observed(range(5)),
        "rewards": np.zeros(5),
        "masks": [1, 0, 1, 1, 1],
        "terminals": [0, 0, 0, 0, 1],
    }
    assert seen(from_arrays(data)) == (
        [0, 1, 2, 3],
        [1, 2, 3, 4],
        [False, True, False, False],
        [False, False, False, True],
    )


@pytest.mark.parametrize("between", "_/")
def test_flags_under_next_are_those_of_the_step(between):
    done = np.arange(9) % 3 == 2
    storage = from_arrays(d4rl() | {f"next{between}done": done}, on_gap="ignore")
    assert (
        storage.episodes.episodes()["length"].tolist()
        == from_arrays(d4rl() | {"dones": done}, on_gap="ignore")
        .episodes.episodes()["length"]
        .tolist()
    )
    name = f"next{between}terminated"
    with pytest.raises(ValueError, match=f"terminals once, got 'terminals' and '{name}'"):
        from_arrays(d4rl() | {name: done})


@pytest.mark.parametrize("ends", ["terminals", [0, 0, 0, 1, 0, 0], torch.arange(6) == 3])
def test_ends_that_are_named(ends):
    data = {
        "observations": observed(range(6)),
        "actions": observed(range(6)),
        "rewards": np.zeros(6),
    }
    if isinstance(ends, str):
        data["terminals"] = np.arange(6) == 3
    assert seen(from_arrays(data, ends)) == (
        [0, 1, 2, 4],
        [1, 2, 3, 5],
        [False] * 4,
        [False, False, True, False],
    )


def test_paths_of_garage_and_of_others():
    garage = [
        {
            "observations": observed([0, 1, 2]),
            "next_observations": observed([1, 2, 3]),
            "actions": observed([7, 7, 7]),
            "rewards": np.zeros(3, np.float32),
            "env_infos": {"force": np.arange(3.0)},
            "timeouts": [0, 0, 1],
            "terminals": [0, 0, 0],
        },
        {
            "observations": observed([5]),
            "next_observations": observed([6]),
            "actions": observed([8]),
            "rewards": np.ones(1, np.float32),
            "env_infos": {"force": np.array([9.0])},
            "timeouts": [0],
            "terminals": [1],
        },
    ]
    expected = ([0, 1, 2, 5], [1, 2, 3, 6], [False] * 3 + [True], [False, False, True, False])
    storage = from_arrays(garage)
    assert seen(storage) == expected
    assert storage[:]["env_infos", "force"].flatten().tolist() == [0, 1, 2, 9]
    # What the last step led to as one observation more, and nothing but the end of the list.
    longer = [
        {
            "obs": torch.tensor([[0.0], [1], [2], [3]]),
            "acts": torch.zeros(3, 1),
            "rews": torch.zeros(3),
        },
        {"obs": torch.tensor([[5.0], [6]]), "acts": torch.zeros(1, 1), "rews": torch.ones(1)},
    ]
    assert seen(from_arrays(longer)) == (*expected[:2], [False] * 4, [False, False, True, True])


def test_names_of_a_tianshou_batch():
    names = ("obs", "act", "rew", "terminated", "truncated", "obs_next")
    storage = from_arrays(dict(zip(names, np.arange(6.0)[:, None] % 2, strict=True)))
    assert set(storage[:].keys(True, True)) == {
        "observation",
        "action",
        *(("next", name) for name in ("observation", "reward", "done", "terminated", "truncated")),
    }


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    kinds=st.lists(st.sampled_from(["terminals", "timeouts"]), min_size=6, max_size=6),
    block=st.integers(1, 9),
)
def test_a_dataset_in_both_forms_against_a_loop(lengths, kinds, block):
    """Each episode of n steps has n + 1 observations, each a number of its own."""
    flat = {name: [] for name in ("observations", "next_observations", "actions", "rewards")}
    flat |= {"terminals": [], "timeouts": []}
    raw = {name: [] for name in flat if name != "next_observations"}
    expected, number = [], 0
    for length, kind in zip(lengths, kinds, strict=False):
        for step in range(length + 1):
            is_last, is_extra = step == length - 1, step == length
            flags = {name: is_last and name == kind for name in ("terminals", "timeouts")}
            row = {"observations": number, "actions": -number, "rewards": 2 * number}
            if not is_extra:
                for name, value in {**row, **flags, "next_observations": number + 1}.items():
                    flat[name].append(value)
                expected.append((number, number + 1, *flags.values()))
            # In the raw form the extra row is the one that ends the episode, by the time limit.
            for name, value in {**row, "terminals": False, "timeouts": is_extra}.items():
                raw[name].append(value)
            number += 1
    arrays = [
        {
            name: observed(values) if "observations" in name else np.array(values)
            for name, values in data.items()
        }
        for data in (flat, raw)
    ]
    before = filling._BLOCK
    filling._BLOCK = block
    try:
        storages = [from_arrays(data) for data in arrays]
    finally:
        filling._BLOCK = before
    assert [*zip(*seen(storages[0]), strict=True)] == expected
    assert [row[:2] for row in zip(*seen(storages[1]), strict=True)] == [
        row[:2] for row in expected
    ]
    for storage in storages:
        assert storage.episodes.episodes()["length"].tolist() == lengths
        assert storage.episodes.episodes()["finished"].all()
        storage.validate()


# What the storage is


def test_hindsight_over_goals_that_the_data_have():
    data = d4rl(
        observations={"observation": observed(range(9)), "achieved_goal": observed(range(9))},
        desired_goals=observed([5] * 9),
    )

    def distance(achieved, desired, transition):
        return -(achieved - desired).abs().sum(-1) + 0 * transition["speed"].sum(-1)

    storage = from_arrays(
        {**data, "speed": np.ones((9, 1))},
        recipe=HERReplayStorage,
        reward_fn=distance,
        info_keys=["speed"],
        batch_size=100,
        n_step=2,
    )
    rows, batch = storage[:], storage.sample()
    assert rows["next", "achieved_goal"].flatten().tolist() == [1, 2, 3, 3, 5, 6, 8]
    assert rows["next", "desired_goal"].flatten().tolist() == [5] * 7
    assert batch["her_mask"].sum() == 80
    assert storage.n_step == 2


def test_hindsight_over_data_without_goals_in_one_line():
    data = {key: value for key, value in d4rl().items() if key != "rewards"}
    reached = lambda achieved, desired, transition: (achieved == desired).all(-1).float() - 1  # noqa: E731
    storage = from_arrays(
        data,
        recipe=HERReplayStorage,
        reward_fn=reached,
        goal_fn=lambda observation: observation[:, :1],
        num_goals=math.inf,
    )
    batch = storage.sample()
    assert batch["desired_goal"].shape == (256, 1)
    assert {*batch["next", "reward"].flatten().tolist()} == {0.0, -1.0}


def test_missing_rewards_of_data_with_goals_are_computed():
    reached, wanted = np.arange(9.0)[:, None], np.full((9, 1), 5.0)
    data = without("rewards") | {"achieved_goals": reached, "desired_goals": wanted}

    def distance(achieved, desired, transition):
        return -(achieved - desired).abs().sum(-1)

    storage = from_arrays(data, recipe=HERReplayStorage, reward_fn=distance)
    rows = storage[:]
    due = -(rows["next", "achieved_goal"] - 5).abs()
    assert torch.equal(rows["next", "reward"], due.float())
    assert len(rows) == len(from_arrays({**data, "rewards": np.zeros(9)}))
    with pytest.raises(KeyError, match=r"'rewards'.*reward_fn=.*goal_fn"):
        from_arrays(data)


@pytest.mark.parametrize("n_step", [1, 3])
def test_rewards_that_are_missing_are_those_of_the_goal_that_was_reached_last(n_step):
    data = {key: value for key, value in d4rl(speeds=np.arange(9.0)).items() if key != "rewards"}

    def scaled(achieved, desired, transition):
        return (achieved - desired).abs().sum(-1) + 100 * transition["speeds"].squeeze(-1)

    storage = from_arrays(
        data,
        recipe=HERReplayStorage,
        reward_fn=scaled,
        info_keys=["speeds"],
        goal_fn=lambda observation: observation[:, :1],
        num_goals=1,
        n_step=n_step,
        batch_size=64,
    )

    rows, batch = storage[:], storage.sample()
    due = scaled(rows["next", "achieved_goal"], rows["next", "desired_goal"], rows).unsqueeze(-1)
    assert torch.equal(rows["next", "reward"], due.float())
    assert (~batch["her_mask"]).sum() == 32
    assert batch["next", "reward"].isfinite().all()


ARRAYS = {key: torch.as_tensor(np.asarray(value)) for key, value in d4rl().items()}


@pytest.mark.parametrize(
    "data",
    [
        TensorDict(ARRAYS, []),
        TensorDict(ARRAYS, [9]),
        TensorDict({**ARRAYS, "observations": TensorDict({"observation": ARRAYS["observations"]})}),
        [TensorDict(ARRAYS, [9])],
        [TensorDict(ARRAYS, [])],
    ],
)
def test_a_tensordict_of_arrays_is_a_dictionary_of_them(data):
    made, due = from_arrays(data), from_arrays(d4rl())
    if isinstance(data, list):
        due = from_arrays([d4rl()])
    assert same(made[:], due[:])


@pytest.mark.parametrize("form", [dict, list, TensorDict])
def test_transitions_of_torchrl_are_no_arrays_of_a_dataset(form):
    rows = from_arrays(d4rl())[:]
    data = rows if form is TensorDict else rows.to_dict() if form is dict else [rows]
    with pytest.raises(TypeError, match=r"under 'next', as TorchRL's transitions are.*extend\(\)"):
        from_arrays(data)


def test_dtypes_stay_unless_asked():
    data = d4rl(observations=np.arange(18.0).reshape(9, 2), rewards=np.arange(9) / 3)
    exact = from_arrays(data)[:]
    assert exact["observation"].dtype == exact["next", "reward"].dtype == torch.float64
    assert (
        exact["next", "reward"].flatten().tolist()
        == (data["rewards"][[0, 1, 2, 3, 4, 5, 7]]).tolist()
    )
    short = from_arrays(data, float_dtype=torch.float32)
    assert {short[:][key].dtype for key in ("observation", "action", ("next", "reward"))} == {
        torch.float32
    }
    integers = from_arrays(d4rl(observations=np.arange(9, dtype=np.uint8), actions=np.arange(9)))[:]
    assert (integers["observation"].dtype, integers["observation"].shape) == (torch.uint8, (7,))


def test_arrays_of_all_kinds_are_taken():
    data = d4rl(next_observations=np.ones((9, 2), np.float32))
    frozen = {key: value.copy() for key, value in data.items()}
    for value in frozen.values():
        value.flags.writeable = False
    others = {
        "tensors": {key: torch.from_numpy(value) for key, value in data.items()},
        "read-only": frozen,
        "big-endian": {
            key: value.astype(value.dtype.newbyteorder(">")) for key, value in data.items()
        },
        "backwards": {key: value[::-1].copy()[::-1] for key, value in data.items()},
        "lists": {**data, "terminals": data["terminals"].tolist()},
    }
    wanted = from_arrays(data, on_gap="ignore")[:]
    for name, other in others.items():
        assert same(from_arrays(other, on_gap="ignore")[:], wanted), name


def test_size_blocks_and_progress(monkeypatch, capsys):
    data = d4rl(3000, observations=observed(range(3000)))
    whole = from_arrays(data)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(filling, "_BLOCK", 700)
    parts = from_arrays(data, progress=True)
    assert "writing rows:   0%" in capsys.readouterr().err
    assert same(whole[:], parts[:])
    last = from_arrays(data, storage_size=2995)
    assert (
        last[:]["observation"].flatten().tolist()
        == [value for value in range(2, 2999) if value != 6][-2995:]
    )


def test_what_is_written_next_is_no_continuation():
    storage = from_arrays(d4rl())
    step = storage[-1:].clone()
    step["observation"] = step["next", "observation"]
    storage.extend(step)
    assert storage.episodes.episodes()["length"].tolist()[-2:] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_of_an_environment_go_on_in_the_dtypes_of_the_data(dtype):
    data = d4rl(observations=np.ones((9, 2)), actions=np.ones((9, 1)), rewards=np.ones(9))
    storage = from_arrays(
        data, float_dtype=None if dtype == torch.float64 else dtype, storage_size=9
    )
    numbers = np.zeros(2, str(dtype).removeprefix("torch."))
    slot = storage.record(numbers, numbers[:1], 1 / 3, False, False, {}, numbers)
    assert slot.tolist() == [7]
    assert storage[slot]["next", "reward"].item() == torch.tensor(1 / 3, dtype=dtype).item()


def test_rows_in_a_directory(tmp_path):
    storage = from_arrays(d4rl(), path=tmp_path / "rows")
    wanted = storage[:]
    storage.close()
    assert same(ReplayStorage.open(tmp_path / "rows")[:].cpu(), wanted)
    with pytest.raises(ValueError, match="holds 7 rows: go on with them"):
        from_arrays(d4rl(), path=tmp_path / "rows")
    # An info that is missing is found by the first write; no empty storage is left behind.
    with pytest.raises(KeyError, match="force"):
        from_arrays(d4rl(), path=tmp_path / "other", info_keys=["force"])
    assert not [*(tmp_path / "other").glob("*")] if (tmp_path / "other").exists() else True


# Writes of a dictionary


def test_a_dictionary_is_written_to_storages_of_all_kinds():
    data = d4rl()
    spaces = Box(-9, 9, (2,)), Box(-9, 9, (1,))
    wanted = from_arrays(data)[:]
    for storage in (
        UniformReplayStorage(*spaces, storage_size=20),
        EpisodeReplayStorage(*spaces, storage_size=20),
        ReplayStorage(storage=PackedStorage(20)),
    ):
        slots = storage.extend(data)
        assert slots.tolist() == [*range(7)]
        assert same(storage[:].exclude("index"), wanted)
    lanes = UniformReplayStorage(*spaces, storage_size=20, num_envs=2)
    lanes.extend({**data, "rewards": data["rewards"].astype(np.float64)}, lanes=[1])
    assert lanes.episodes.num_steps_written.tolist() == [0, 7]
    assert same(lanes[:], wanted)
    discrete = UniformReplayStorage(Discrete(9), Discrete(9), storage_size=20)
    discrete.extend(d4rl(observations=np.arange(9)[:, None], actions=np.arange(9)[:, None]))
    assert discrete[:]["action"].tolist() == [0, 1, 2, 3, 4, 5, 7]


# Bad input


def without(name):
    return {key: value for key, value in d4rl().items() if key != name}


WRONG = {
    "no observations": (without("observations"), KeyError, "observations.*there are.*'actions'"),
    "no actions": (without("actions"), KeyError, "actions.*there are.*'observations'"),
    "no rewards": (without("rewards"), KeyError, "rewards.*there are.*goal_fn"),
    "lengths": (d4rl(actions=np.zeros((8, 1))), ValueError, "'action': 8"),
    "lengths of infos": (d4rl(**{"infos/x": np.zeros(4)}), ValueError, "infos.*4.*leave out"),
    "two names": (d4rl(reward=np.zeros(9)), ValueError, "'rewards' and 'reward'"),
    "words": (d4rl(names=np.array(["a"] * 9)), TypeError, "names.*numbers.*U1"),
    "ragged": (d4rl(names=[[1], [1, 2]]), TypeError, "names.*unequal"),
    "a number": (d4rl(gravity=9.81), TypeError, "gravity.*one row for each step"),
    "flags": (d4rl(terminals=np.zeros((9, 2))), ValueError, r"terminals.*one flag.*\[9, 2\]"),
    "flags between": (d4rl(terminals=np.full(9, 0.5)), ValueError, "terminals.*flags, 0 or 1.*0.5"),
    "flags unknown": (
        d4rl(timeouts=np.full(9, np.nan)),
        ValueError,
        "timeouts.*flags, 0 or 1.*nan",
    ),
    "next of some": (
        d4rl(
            observations={"a": np.zeros((9, 1)), "b": np.zeros((9, 1))},
            next_observations={"a": np.zeros((9, 1))},
        ),
        KeyError,
        "'b'.*missing",
    ),
    "next of others": (d4rl(next_observations={"x": np.zeros(9)}), KeyError, "same observations"),
    "no rows": ({key: value[:0] for key, value in d4rl().items()}, ValueError, "a transition"),
    "one row": ({key: value[:1] for key, value in d4rl().items()}, ValueError, "a transition"),
    "no name": (d4rl(obs2={5: np.zeros(9)}), TypeError, "strings, got 5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_written(name):
    data, kind, message = WRONG[name]
    with pytest.raises(kind, match=rf"(?s)data.*{message}|{message}"):
        from_arrays(data, recipe=lambda *_, **__: pytest.fail("a storage was made"))
    storage = from_arrays(d4rl(), storage_size=20)
    before = storage[:].clone()
    with pytest.raises(kind, match=message):
        storage.extend(data)
    assert same(storage[:], before)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"ends": "nothing"}, KeyError, "'nothing'; there are.*'terminals'"),
        ({"ends": "actions"}, KeyError, "'actions'; there are.*'terminals'"),
        ({"ends": [True]}, ValueError, "ends must be one flag for each of 9 steps"),
        ({"ends": np.linspace(0, 1, 9)}, ValueError, "ends must be flags, 0 or 1, got 0.125"),
        ({"recipe": HERReplayStorage, "reward_fn": print}, KeyError, "goal_fn"),
        ({"storage_size": 3}, ValueError, "longest has 4 steps; got storage_size=3"),
        ({"num_envs": 2}, TypeError, "num_envs can't be chosen"),
        ({"float_dtype": torch.int64}, ValueError, "float_dtype.*torch.int64"),
        ({"goal_fn": lambda observation: 5}, ValueError, "goal_fn.*one goal for each observation"),
        (
            {"recipe": lambda *_, **__: 5},
            TypeError,
            "recipe must be what makes a ReplayStorage, got 5",
        ),
    ],
)
def test_arguments_that_do_not_fit(arguments, kind, message):
    with pytest.raises(kind, match=message):
        from_arrays(d4rl(), **arguments)


def test_a_column_with_a_name_that_sampling_sets_is_refused(tmp_path):
    for name in ("index", "her_mask", "collector/mask"):
        with pytest.raises(ValueError, match=r"sampling sets in batches.*rename it"):
            from_arrays(d4rl(**{name: np.arange(9)}), path=tmp_path / "rows")
    with pytest.raises(ValueError, match=r"\('index', 'a'\), where they have 'index'"):
        from_arrays(d4rl(**{"index/a": np.arange(9)}), path=tmp_path / "rows")
    assert not [*tmp_path.iterdir()]


def test_complex_numbers_are_refused_with_a_way_out():
    data = d4rl(observations=np.zeros((9, 2), np.complex64))
    with pytest.raises(TypeError, match=r"'observation' must be of real numbers.*view_as_real"):
        from_arrays(data)


def test_goals_twice():
    with pytest.raises(ValueError, match=r"without goals.*achieved_goal.*leave goal_fn out"):
        from_arrays(d4rl(achieved_goal=np.zeros((9, 1))), goal_fn=lambda observation: observation)


@pytest.mark.parametrize(
    ("paths", "kind", "message"),
    [
        ([], ValueError, "an episode at least"),
        ([5], TypeError, "got int as number 0"),
        ([{"observations": [[1.0]]}], KeyError, r"'actions'; number 0 has \['observations'\]"),
        ([d4rl(), without("rewards")], KeyError, "entries of the first.*number 1 has"),
        ([d4rl(rewards=np.zeros(3))], ValueError, "number 0 has 9 actions, and {'rewards': 3}"),
        ([{"obs": [[1.0]], "acts": [], "rews": []}], ValueError, "one at least"),
        ([d4rl(speed=5)], TypeError, "'speed' of each episode"),
        (
            [d4rl(), d4rl(actions=np.zeros((9, 2)))],
            ValueError,
            "'actions' must have the same shape",
        ),
    ],
)
def test_paths_that_do_not_fit(paths, kind, message):
    with pytest.raises(kind, match=message):
        from_arrays(paths)


# Minari


def minari_home(monkeypatch, tmp_path):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return pytest.importorskip("minari")


def goal_data(seed=0):
    """Three episodes of a goal environment in float64, of which the last is cut."""
    rng = np.random.default_rng(seed)
    paths = []
    for length in (7, 12, 5):
        goal = rng.normal(size=(1, 2)).repeat(length + 1, 0)
        observations = {
            "observation": rng.normal(size=(length + 1, 3)),
            "achieved_goal": rng.normal(size=(length + 1, 2)),
            "desired_goal": goal,
            "camera": {"pixels": rng.integers(0, 255, (length + 1, 4, 4, 3), np.uint8)},
        }
        paths.append(
            {
                "observations": observations,
                "actions": rng.normal(size=(length, 2)).astype(np.float32),
                "rewards": rng.normal(size=length),
                "terminals": np.arange(length) == (length - 1 if length == 12 else -1),
                "success": rng.normal(size=(length, 1)),
            }
        )
    return paths


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_and_back(monkeypatch, tmp_path, capsys):
    minari_home(monkeypatch, tmp_path)
    storage = from_arrays(goal_data())
    dataset = to_minari(storage, "mine/goals-v0", progress=True)
    assert "checking rows:   0%" in capsys.readouterr().err
    assert [len(episode) for episode in dataset] == [7, 12, 5]
    assert [bool(episode.terminations[-1]) for episode in dataset] == [False, True, False]
    assert dataset[0].infos["success"].shape == (8, 1)
    again = from_minari(dataset, info_keys=["success"])
    assert same(again[:], storage[:])
    assert again.episodes.episodes()["length"].tolist() == [7, 12, 5]
    # By its name, with hindsight, in the dtype of networks.
    hindsight = from_minari(
        "mine/goals-v0",
        recipe=HERReplayStorage,
        reward_fn=lambda achieved, desired, transition: -(achieved - desired).norm(dim=-1),
        float_dtype=torch.float32,
        progress=True,
    )
    assert "writing rows:   0%" in capsys.readouterr().err
    assert hindsight.sample()["desired_goal"].dtype == torch.float32
    with pytest.raises(KeyError, match=r"infos of info_keys, and 'force' is missing.*success"):
        from_minari(dataset, info_keys=["force"])
    with pytest.raises(ValueError, match="longest has 12 steps; got storage_size=11"):
        from_minari(dataset, storage_size=11)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_of_lanes_cuts_and_single_actions(monkeypatch, tmp_path):
    minari_home(monkeypatch, tmp_path)
    spaces = Box(-1, 1, (2,)), Discrete(3)
    storage = UniformReplayStorage(*spaces, storage_size=12, num_envs=2, autoreset_mode="Disabled")
    for step in range(8):
        done = np.array([step == 3, step == 6])
        after = np.full((2, 2), step + 1, np.float32)
        before = np.full((2, 2), step, np.float32)
        storage.record(before, [step % 3] * 2, [0.5, step], done, [False] * 2, {}, after)
    with pytest.raises(ValueError, match=r"action_space must be given.*torch.int64"):
        to_minari(storage, "lanes-v0")
    dataset = to_minari(storage, "lanes-v0", action_space=spaces[1])
    # The oldest two of each lane are overwritten; what runs on is truncated where it stands.
    assert [len(episode) for episode in dataset] == [2, 4, 5, 1]
    assert [episode.observations[:, 0].tolist() for episode in dataset] == [
        [2, 3, 4],
        [4, 5, 6, 7, 8],
        [2, 3, 4, 5, 6, 7],
        [7, 8],
    ]
    assert [bool(episode.truncations[-1]) for episode in dataset] == [False, True, False, True]
    again = from_minari(dataset)
    assert again[:]["action"].shape == (12,)
    assert again.episodes.episodes()["length"].tolist() == [2, 4, 5, 1]


def test_rows_that_minari_cannot_hold(monkeypatch, tmp_path):
    minari = minari_home(monkeypatch, tmp_path)
    storage = from_arrays(d4rl(next_observations=np.ones((9, 2), np.float32)), on_gap="ignore")
    with pytest.raises(ValueError, match=r"'observation'.*step 1 of episode 0 does not"):
        to_minari(storage, "gaps-v0")
    assert not minari.list_local_datasets()
    with pytest.raises(RuntimeError, match="is empty"):
        to_minari(UniformReplayStorage(Box(-1, 1), Box(-1, 1), storage_size=3), "empty-v0")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_of_a_reader_whose_episodes_are_replaced_while_they_are_written_out(
    monkeypatch, tmp_path
):
    minari = minari_home(monkeypatch, tmp_path)
    spaces = Box(0, 999, (1,)), Box(-1, 1, (1,))
    writer = UniformReplayStorage(*spaces, storage_size=10, path=tmp_path / "rows", on_gap="ignore")

    def act(first):
        for step in range(first, first + 5):
            before, after = (np.full(1, number, np.float32) for number in (step, step + 1))
            writer.record(before, np.zeros(1, "f"), 0.0, step == first + 4, False, {}, after)

    act(10)
    act(20)
    reader = ReplayStorage.open(tmp_path / "rows", mode="r")
    assert len(to_minari(reader, "whole-v0")) == 2
    module = sys.modules["trl_storages.datasets.minari_datasets"]
    read = module._Episodes.read
    # Nothing lies where the episodes were, or others do.
    for number, num_episodes in enumerate((3, 40)):

        def read_and_act(episodes, group, number=number, num_episodes=num_episodes):
            yield from read(episodes, group)
            for episode in range(num_episodes):
                act(30 + 5 * (number * 10 + episode))

        monkeypatch.setattr(module._Episodes, "read", read_and_act)
        with pytest.raises(RuntimeError, match="some were replaced meanwhile: pause what writes"):
            to_minari(reader, "replaced-v0")
    assert [*minari.list_local_datasets()] == ["whole-v0"]
    writer.close()


def test_minari_that_is_not_installed(monkeypatch):
    really = builtins.__import__

    def missing(name, *args):
        if name.startswith("minari"):
            raise ImportError(name)
        return really(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    for act in (
        lambda: from_minari("mine/goals-v0"),
        lambda: to_minari(from_arrays(d4rl()), "mine/goals-v0"),
    ):
        with pytest.raises(ImportError, match=r"pip install 'trl-storages\[minari\]'"):
            act()
    with pytest.raises(TypeError, match="dataset must be a MinariDataset"):
        from_minari(5)
