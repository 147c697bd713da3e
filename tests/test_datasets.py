"""Storages out of datasets: what lies where is worked out by hand, and compared bit for bit."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

from trl_storages import HERReplayStorage, ReplayStorage, UniformReplayStorage
from trl_storages.datasets import from_arrays, from_minari, to_minari

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


def without(name):
    return {key: value for key, value in d4rl().items() if key != name}


def observed(values):
    return np.asarray(values, np.float32)[:, None]


def ends(storage):
    """The rows that are terminated, and those that are truncated."""
    rows = storage[:]["next"]
    assert torch.equal(rows["done"], rows["terminated"] | rows["truncated"])
    return tuple(
        rows[name].flatten().nonzero().flatten().tolist() for name in ("terminated", "truncated")
    )


def same(one, other):
    keys = {*one.keys(True, True)}
    assert keys == {*other.keys(True, True)}
    return all(
        one[key].dtype == other[key].dtype
        and one[key].numpy().tobytes() == other[key].numpy().tobytes()
        for key in keys
    )


def test_infos_are_stored_and_metadata_are_not():
    data = d4rl(**{"infos/qpos": np.arange(27.0).reshape(9, 3), "metadata/algorithm": "SAC"})
    rows = from_arrays(data)[:]
    expected = torch.arange(27.0).double().reshape(9, 3)[[0, 1, 2, 3, 4, 5, 7]]
    assert torch.equal(rows["infos", "qpos"], expected)
    assert "metadata" not in [*rows.keys()]


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
    storage = from_arrays(data)
    assert ends(storage) == (terminated, truncated)
    assert storage[:]["action"].tolist() == [0, 1, 2, 3]


def test_data_that_tell_no_ends_are_refused():
    data = {"observations": observed(range(6)), "actions": observed(range(6))}
    data |= {"rewards": np.zeros(6), "is_last": np.arange(6) % 3 == 2}
    with pytest.raises(ValueError, match=r"where episodes end.*ends="):
        from_arrays(data)
    assert not from_arrays(data, np.zeros(6))[:]["next", "done"].any()
    ends = data.pop("is_last")
    assert from_arrays(data, ends).episodes.episodes()["length"].tolist() == [2, 2]


@pytest.mark.parametrize("n_step", [1, 3])
def test_missing_rewards_are_those_of_the_goal(n_step):
    """Of the data's own goals, and of those that were reached last."""

    def scaled(achieved, desired, infos):
        return (achieved - desired).abs().sum(-1) + 100 * infos["speeds"].squeeze(-1)

    own = {"achieved_goals": np.arange(9.0)[:, None], "desired_goals": np.full((9, 1), 5.0)}
    for goals, goal_fn in ((own, None), ({}, lambda observation: observation[:, :1])):
        storage = from_arrays(
            without("rewards") | {"speeds": np.arange(9.0)} | goals,
            recipe=HERReplayStorage,
            reward_fn=scaled,
            info_keys=["speeds"],
            goal_fn=goal_fn,
            num_goals=1,
            n_step=n_step,
            batch_size=64,
        )
        rows, batch = storage[:], storage.sample()
        due = scaled(rows["next", "achieved_goal"], rows["next", "desired_goal"], rows)
        assert torch.equal(rows["next", "reward"], due.unsqueeze(-1).float())
        assert (~batch["her_mask"]).sum() == 32
        assert batch["next", "reward"].isfinite().all()
    with pytest.raises(KeyError, match="rewards"):
        from_arrays(without("rewards") | own)


def test_dtypes_stay_unless_asked():
    data = d4rl(observations=np.arange(18.0).reshape(9, 2), rewards=np.arange(9) / 3)
    exact = from_arrays(data)[:]
    assert exact["observation"].dtype == exact["next", "reward"].dtype == torch.float64
    expected = data["rewards"][[0, 1, 2, 3, 4, 5, 7]].tolist()
    assert exact["next", "reward"].flatten().tolist() == expected
    short = from_arrays(data, float_dtype=torch.float32)[:]
    assert {short["observation"].dtype, short["next", "reward"].dtype} == {torch.float32}
    integers = from_arrays(d4rl(observations=np.arange(9, dtype=np.uint8)))[:]
    assert (integers["observation"].dtype, integers["observation"].shape) == (torch.uint8, (7,))


def test_arrays_of_all_kinds_are_taken():
    data = d4rl()
    tensors = {key: torch.from_numpy(value) for key, value in data.items()}
    frozen = {key: value.copy() for key, value in data.items()}
    for value in frozen.values():
        value.flags.writeable = False
    others = [
        tensors,
        TensorDict(tensors, [9]),
        frozen,
        {key: value.astype(value.dtype.newbyteorder(">")) for key, value in data.items()},
        {key: value[::-1].copy()[::-1] for key, value in data.items()},
        {**data, "terminals": data["terminals"].tolist()},
    ]
    wanted = from_arrays(data)[:]
    for other in others:
        assert same(from_arrays(other)[:], wanted)


def test_more_rows_than_are_written_at_once(capsys):
    data = d4rl(70_000, observations=observed(range(70_000)))
    rows = from_arrays(data, progress=True, storage_size=69_995)[:]
    assert "writing rows:   0%" in capsys.readouterr().err
    expected = [value for value in range(69_999) if value != 6][-69_995:]
    assert rows["observation"].flatten().tolist() == expected


def test_what_is_written_next_is_no_continuation():
    storage = from_arrays(d4rl(observations=np.ones((9, 2), np.float32)), storage_size=9)
    numbers = np.ones(2, np.float32)
    storage.record(numbers, numbers[:1], 0.0, False, False, {}, numbers)
    assert storage.episodes.episodes()["length"].tolist()[-2:] == [1, 1]


def test_a_smaller_storage_keeps_the_last_transitions():
    storage = from_arrays(d4rl(observations=observed(range(9))), storage_size=3)
    assert storage[:]["observation"].flatten().tolist() == [4, 5, 7]


def test_rows_in_a_directory(tmp_path):
    storage = from_arrays(d4rl(), path=tmp_path / "rows")
    wanted = storage[:]
    storage.close()
    again = ReplayStorage.open(tmp_path / "rows")
    assert same(again[:], wanted)
    again.close()
    with pytest.raises(ValueError, match="holds 7 rows"):
        from_arrays(d4rl(), path=tmp_path / "rows")
    # No empty storage is left behind by what the first write finds.
    with pytest.raises(KeyError, match="force"):
        from_arrays(d4rl(), path=tmp_path / "other", info_keys=["force"])
    assert not [*tmp_path.glob("other/*")]


PATH = {"obs": [[1.0], [2.0]], "acts": [1], "rews": [0.5]}
WRONG = {
    "no observations": (without("observations"), KeyError),
    "no actions": (without("actions"), KeyError),
    "lengths": (d4rl(actions=np.zeros((8, 1))), ValueError),
    "lengths of infos": (d4rl(**{"infos/x": np.zeros(4)}), ValueError),
    "two names": (d4rl(reward=np.zeros(9)), ValueError),
    "words": (d4rl(names=np.array(["a"] * 9)), TypeError),
    "ragged": (d4rl(names=[[1], [1, 2]]), ValueError),
    "a number": (d4rl(gravity=9.81), TypeError),
    "flags of pairs": (d4rl(terminals=np.zeros((9, 2))), ValueError),
    "flags between": (d4rl(terminals=np.full(9, 0.5)), ValueError),
    "flags unknown": (d4rl(timeouts=np.full(9, np.nan)), ValueError),
    "flags under next": (d4rl(**{"next/done": np.zeros(9, bool)}), ValueError),
    "next of others": (d4rl(next_observations={"x": np.zeros(9)}), KeyError),
    "no rows": ({key: value[:0] for key, value in d4rl().items()}, ValueError),
    "one row": ({key: value[:1] for key, value in d4rl().items()}, ValueError),
    "no name": (d4rl(obs2={5: np.zeros(9)}), TypeError),
    "complex numbers": (d4rl(observations=np.zeros((9, 2), np.complex64)), TypeError),
    "no episodes": ([], ValueError),
    "no path": ([5], TypeError),
    "paths of other entries": ([PATH, {**PATH, "speed": [1]}], KeyError),
    "paths of other shapes": ([PATH, {**PATH, "acts": [[1, 2]]}], ValueError),
    "an empty path": ([{"obs": [[1.0]], "acts": [], "rews": []}], ValueError),
    "observations of other lengths": ([{"obs": {"x": [1, 2], "y": [1]}, "acts": [1]}], KeyError),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name):
    data, kind = WRONG[name]
    with pytest.raises(kind):
        from_arrays(data)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"ends": [True]}, ValueError),
        ({"recipe": HERReplayStorage, "reward_fn": print}, KeyError),
        ({"num_envs": 2}, ValueError),
        ({"goal_fn": lambda observation: 5}, TypeError),
        ({"recipe": lambda *_, **__: 5}, TypeError),
    ],
)
def test_arguments_that_do_not_fit(arguments, kind):
    with pytest.raises(kind):
        from_arrays(d4rl(), **arguments)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_of_lanes_and_cuts(monkeypatch, tmp_path):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    storage = UniformReplayStorage(
        Box(-1, 1, (2,)), Discrete(3), storage_size=12, num_envs=2, autoreset_mode="Disabled"
    )
    for step in range(8):
        done = np.array([step == 3, step == 6])
        before, after = (np.full((2, 2), at, np.float32) for at in (step, step + 1))
        storage.record(before, [step % 3] * 2, [0.5, step], done, [False] * 2, {}, after)
    dataset = to_minari(storage, "lanes-v0", action_space=Discrete(3))
    # The oldest two of each lane are overwritten; what runs on is truncated where it stands.
    assert [episode.observations[:, 0].tolist() for episode in dataset] == [
        [2, 3, 4],
        [4, 5, 6, 7, 8],
        [2, 3, 4, 5, 6, 7],
        [7, 8],
    ]
    assert [bool(episode.truncations[-1]) for episode in dataset] == [False, True, False, True]
    again = from_minari("lanes-v0", float_dtype=torch.float32)
    assert again.episodes.episodes()["length"].tolist() == [2, 4, 5, 1]
    gaps = from_arrays(d4rl(next_observations=np.ones((9, 2), np.float32)), on_gap="ignore")
    with pytest.raises(ValueError, match="'observation'"):
        to_minari(gaps, "gaps-v0")
