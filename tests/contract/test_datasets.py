"""Storages out of datasets: what lies where is worked out by hand."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from contract.make import library
from contract.steps import assert_same
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

datasets = import_module(f"{library.__name__}.datasets")

pytestmark = pytest.mark.requirement("datasets")


def column(values):
    return np.asarray(values, np.float32)[:, None]


def seen(storage):
    """First observations, next ones, terminated and truncated of the history."""
    rows = storage[:]
    assert torch.equal(rows["next", "done"], rows["next", "terminated"] | rows["next", "truncated"])
    keys = ["observation", *(("next", name) for name in ("observation", "terminated", "truncated"))]
    return tuple(rows[key].flatten().tolist() for key in keys)


OGBENCH = {
    "raw": {"observations": range(8), "terminals": [0, 0, 0, 1, 0, 0, 0, 1]},
    "regular": {
        "observations": [0, 1, 2, 4, 5, 6],
        "next_observations": [1, 2, 3, 5, 6, 7],
        "terminals": [0, 0, 1, 0, 0, 1],
    },
}


@pytest.mark.parametrize("form", OGBENCH)
def test_both_forms_of_ogbench_are_the_same_transitions(form):
    data = {
        key: column(value) if "observations" in key else np.array(value, np.float32)
        for key, value in OGBENCH[form].items()
    }
    data["actions"] = data["observations"] * 10
    storage = datasets.from_arrays(data, goal_fn=lambda observation: observation)
    assert storage.is_full
    assert seen(storage) == (
        [0, 1, 2, 4, 5, 6],
        [1, 2, 3, 5, 6, 7],
        [False] * 6,
        [False, False, True] * 2,
    )
    rows = storage[:]
    assert rows["action"].flatten().tolist() == [0, 10, 20, 40, 50, 60]
    assert rows["next", "achieved_goal"].flatten().tolist() == [1, 2, 3, 5, 6, 7]
    assert rows["desired_goal"].flatten().tolist() == [3, 3, 3, 7, 7, 7]
    plain = datasets.from_arrays(data)  # goals may also be read from the observations
    assert seen(plain) == seen(storage)
    assert plain[:]["next", "reward"].isnan().all()


def d4rl(num_rows=9, **entries):
    """Steps 0 to 3 end in a terminal state, 4 to 6 by the time limit; more follow."""
    random, at = np.random.default_rng(0), np.arange(num_rows)
    return {
        "observations": column(at),
        "actions": random.normal(size=(num_rows, 1)).astype(np.float32),
        "rewards": random.normal(size=num_rows).astype(np.float32),
        "terminals": at == 3,
        "timeouts": at == 6,
        **entries,
    }


def without(name):
    return {key: value for key, value in d4rl().items() if key != name}


def test_d4rl_without_next_observations():
    storage = datasets.from_arrays(d4rl())
    # Where row 3 led to is unknown, but it is terminal; so is it of row 6 and the last one.
    assert seen(storage) == (
        [0, 1, 2, 3, 4, 5, 7],
        [1, 2, 3, 3, 5, 6, 8],
        [False] * 3 + [True] + [False] * 3,
        [False] * 5 + [True, False],
    )
    expected = torch.tensor(d4rl()["rewards"][[0, 1, 2, 3, 4, 5, 7]])
    assert torch.equal(storage[:]["next", "reward"].flatten(), expected)


def test_paths_of_garage():
    paths = [
        {
            "observations": column([0, 1, 2]),
            "next_observations": column([1, 2, 3]),
            "actions": column([7, 7, 7]),
            "rewards": np.zeros(3, np.float32),
            "env_infos": {"force": np.arange(3.0)},
            "timeouts": [0, 0, 1],
            "terminals": [0, 0, 0],
        },
        {
            "observations": column([5]),
            "next_observations": column([6]),
            "actions": column([8]),
            "rewards": np.ones(1, np.float32),
            "env_infos": {"force": np.array([9.0])},
            "timeouts": [0],
            "terminals": [1],
        },
    ]
    storage = datasets.from_arrays(paths)
    ends = [False] * 3 + [True], [False, False, True, False]
    assert seen(storage) == ([0, 1, 2, 5], [1, 2, 3, 6], *ends)
    assert storage[:]["env_infos", "force"].flatten().tolist() == [0, 1, 2, 9]


def goal_paths():
    """Episodes of 7, 12 and 5 steps with goals, pixels, infos and a last observation more."""
    random, paths = np.random.default_rng(0), []
    for length in (7, 12, 5):
        observations = {
            "observation": random.normal(size=(length + 1, 3)).astype(np.float32),
            "achieved_goal": random.normal(size=(length + 1, 2)),
            "desired_goal": random.normal(size=(1, 2)).repeat(length + 1, 0),
            "camera": {"pixels": random.integers(0, 255, (length + 1, 4, 4, 3), np.uint8)},
        }
        paths.append(
            {
                "observations": observations,
                "actions": random.normal(size=(length, 2)).astype(np.float32),
                "rewards": random.normal(size=length),
                "terminals": np.arange(length) == (length - 1 if length == 12 else -1),
                "success": random.normal(size=(length, 1)),
            }
        )
    return paths


def test_infos_are_stored_and_metadata_are_not():
    data = d4rl(**{"infos/qpos": np.arange(27.0).reshape(9, 3), "metadata/algorithm": "SAC"})
    rows = datasets.from_arrays(data)[:]
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
        ({"termination": [0, 1, 0, 0], "truncation": [0, 0, 0, 1]}, [1], [3]),
        # RLDS: flags of the transition, as next observations are there.
        ({"is_terminal": [0, 1, 0, 0], "is_last": [0, 1, 0, 1]}, [1], [3]),
        ({"is_terminal": [0, 1, 0, 0], "is_first": [1, 0, 1, 0]}, [1], []),
        ({"is_first": [1, 0, 1, 0]}, [], [1]),
        ({"is_last": [0, 1, 0, 0]}, [], [1]),
    ],
)
def test_flags_of_all_conventions(flags, terminated, truncated):
    data = {
        "observation": column(range(4)),
        "next_observation": column([1, 2, 3, 4]),
        "action": np.arange(4),
        "reward": np.zeros((4, 1), np.float32),
        **flags,
    }
    storage = datasets.from_arrays(data)
    *_, is_terminal, is_cut = seen(storage)
    assert [np.flatnonzero(flags).tolist() for flags in (is_terminal, is_cut)] == [
        terminated,
        truncated,
    ]
    assert storage[:]["action"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("flags", "kept", "terminated", "truncated"),
    [
        ({"is_first": [1, 0, 0, 1, 0, 0]}, [0, 1, 3, 4], [], [1]),
        ({"is_last": [0, 0, 1, 0, 0, 1]}, [0, 1, 3, 4], [], [1, 4]),
        (
            {"is_last": [0, 0, 1, 0, 0, 1], "is_terminal": [0, 0, 1, 0, 0, 0]},
            [0, 1, 3, 4],
            [1],
            [4],
        ),
        (
            {"is_first": [1, 0, 0, 1, 0, 0], "is_terminal": [0, 0, 0, 0, 0, 1]},
            [0, 1, 3, 4],
            [4],
            [1],
        ),
        # An episode of a single observation has no transition.
        ({"is_last": [0, 0, 1, 1, 0, 1], "is_terminal": [0, 0, 0, 1, 0, 1]}, [0, 1, 4], [4], [1]),
    ],
)
def test_flags_of_rlds_mark_observations(flags, kept, terminated, truncated):
    """The last step of an episode holds an observation; its action and reward mean nothing."""
    data = {"observation": column(range(6)), "action": np.arange(6), "reward": np.arange(6.0)}
    flags = {name: np.array(flag, bool) for name, flag in flags.items()}
    storage = datasets.from_arrays({**data, "discount": np.ones(6), **flags})
    now, after, is_terminal, is_cut = seen(storage)
    assert (now, after) == (kept, [row + 1 for row in kept])
    assert storage[:]["next", "reward"].flatten().tolist() == kept
    assert [row for row, flag in zip(kept, is_terminal, strict=True) if flag] == terminated
    assert [row for row, flag in zip(kept, is_cut, strict=True) if flag] == truncated


FLAG = np.arange(9) == 3


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("episode_end", "episode_end"),
        ("info/last", ("info", "last")),
        ("life.done", "life.done"),
        ("Timeouts_all", "Timeouts_all"),
        ("next_terminals", ("next", "terminals")),
    ],
)
def test_flags_with_names_of_ends_must_be_explained(name, key):
    data = d4rl(**{name: FLAG})
    with pytest.raises(ValueError, match=r"end of an episode.*ends=.*info_keys=.*extra_fields="):
        datasets.from_arrays(data)
    rows = datasets.from_arrays(data, extra_fields={key: (torch.bool, (1,))})[:]
    assert rows[key].flatten().tolist() == FLAG[[0, 1, 2, 3, 4, 5, 7]].tolist()
    plain = without("terminals") | {name: FLAG}
    for ends in (FLAG, name) if isinstance(key, str) else (FLAG,):
        lengths = datasets.from_arrays(plain, ends).episodes.table()["length"]
        assert lengths.tolist() == [3, 2, 1]


def test_flags_named_as_infos_are_stored_under_next():
    rows = datasets.from_arrays(d4rl(episode_end=FLAG), info_keys=["episode_end"])[:]
    assert rows["next", "episode_end"].tolist() == FLAG[[0, 1, 2, 3, 4, 5, 7]].tolist()
    rows = datasets.from_arrays(d4rl(is_last=FLAG), info_keys=["is_last"])[:]
    assert rows["next", "is_last"].any()
    assert not rows["next", "truncated"][0:3].any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bended", FLAG),
        ("is_success", FLAG),
        ("end", np.arange(9.0)),
        ("ends_of", np.zeros((9, 2), bool)),
        ("observations", {"observation": column(range(9)), "last": FLAG}),
    ],
)
def test_other_entries_are_stored_unasked(name, value):
    assert len(datasets.from_arrays(d4rl(**{name: value}))) == 7


def test_an_end_that_is_no_entry_is_refused():
    with pytest.raises(KeyError, match=r"ends.*'nothing'"):
        datasets.from_arrays(d4rl(), "nothing")


@pytest.mark.parametrize(
    ("observations", "kind", "answer"),
    [
        ((np.zeros((9, 2)), np.zeros((9, 2))), TypeError, "Tuple space: name its items"),
        (
            {"x": (np.zeros((9, 2)), np.zeros((9, 3)))},
            TypeError,
            "Tuple space: name its items",
        ),
        (np.array([None] * 9), TypeError, "must be numbers"),
        ([[1.0], [1.0, 2.0]], ValueError, "the same shape at all steps"),
    ],
)
def test_observations_that_are_no_array_are_named(observations, kind, answer):
    for data in (d4rl(observations=observations), [d4rl(observations=observations)]):
        with pytest.raises(kind, match=answer):
            datasets.from_arrays(data)


def test_data_that_tell_no_ends_are_refused():
    data = {"observations": column(range(6)), "actions": column(range(6))}
    data |= {"rewards": np.zeros(6), "is_over": np.arange(6) % 3 == 2}
    with pytest.raises(ValueError, match=r"where episodes end.*ends="):
        datasets.from_arrays(data)
    assert not datasets.from_arrays(data, np.zeros(6))[:]["next", "done"].any()
    ends = data.pop("is_over")
    assert datasets.from_arrays(data, ends).episodes.table()["length"].tolist() == [2, 2]


@pytest.mark.parametrize("n_step", [1, 3])
def test_missing_rewards_are_those_of_the_goal(n_step):
    """Of the data's own goals, and of those that were reached last."""

    def scaled(achieved, desired, infos):
        return (achieved - desired).abs().sum(-1) + 100 * infos["speeds"].squeeze(-1)

    own = {"achieved_goals": np.arange(9.0)[:, None], "desired_goals": np.full((9, 1), 5.0)}
    for goals, goal_fn in ((own, None), ({}, lambda observation: observation[:, :1])):
        storage = datasets.from_arrays(
            without("rewards") | {"speeds": np.arange(9.0)} | goals,
            preset=library.HERReplayStorage,
            reward_fn=scaled,
            info_keys=["speeds"],
            goal_fn=goal_fn,
            num_goals=1,
            n_step=n_step,
            batch_size=64,
        )
        rows, batch = storage[:], storage.sample()
        due = scaled(rows["next", "achieved_goal"], rows["next", "desired_goal"], rows["next"])
        assert torch.equal(rows["next", "reward"], due.unsqueeze(-1).float())
        assert (~batch["her_mask"]).sum() == 32
        assert batch["next", "reward"].isfinite().all()
    with pytest.raises(KeyError, match="rewards"):
        datasets.from_arrays(without("rewards") | own)


def test_dtypes_stay_unless_asked():
    data = d4rl(observations=np.arange(18.0).reshape(9, 2), rewards=np.arange(9) / 3)
    exact = datasets.from_arrays(data)[:]
    assert exact["observation"].dtype == exact["next", "reward"].dtype == torch.float64
    expected = data["rewards"][[0, 1, 2, 3, 4, 5, 7]].tolist()
    assert exact["next", "reward"].flatten().tolist() == expected
    short = datasets.from_arrays(data, float_dtype=torch.float32)[:]
    assert {short["observation"].dtype, short["next", "reward"].dtype} == {torch.float32}
    integers = datasets.from_arrays(d4rl(observations=np.arange(9, dtype=np.uint8)))[:]
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
    wanted = datasets.from_arrays(data)[:]
    for other in others:
        assert_same(datasets.from_arrays(other)[:], wanted)


def test_more_rows_than_are_written_at_once(capsys):
    data = d4rl(70_000)
    rows = datasets.from_arrays(data, progress=True, storage_size=69_995)[:]
    assert "writing transitions:   0%" in capsys.readouterr().err
    expected = [value for value in range(69_999) if value != 6][-69_995:]
    assert rows["observation"].flatten().tolist() == expected


def test_what_is_written_next_is_no_continuation():
    storage = datasets.from_arrays(d4rl(observations=np.ones((9, 1), np.float32)), storage_size=9)
    numbers = np.ones(1, np.float32)
    storage.record(numbers, numbers, 0.0, False, False, {}, numbers)
    assert storage.episodes.table()["length"].tolist()[-2:] == [1, 1]


def test_rows_in_a_directory(tmp_path):
    storage = datasets.from_arrays(d4rl(), path=tmp_path / "rows")
    wanted = storage[:]
    storage.close()
    again = library.ReplayStorage.open(tmp_path / "rows")
    assert_same(again[:], wanted)
    again.close()
    with pytest.raises(ValueError, match="holds 7 transitions"):
        datasets.from_arrays(d4rl(), path=tmp_path / "rows")
    # No empty storage is left behind by what the first write finds.
    with pytest.raises(KeyError, match="force"):
        datasets.from_arrays(d4rl(), path=tmp_path / "other", info_keys=["force"])
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
    "a name of a file": ("maze.npz", TypeError),
    "a file": (Path("maze.npz"), TypeError),
    "paths of other entries": ([PATH, {**PATH, "speed": [1]}], KeyError),
    "paths of other shapes": ([PATH, {**PATH, "acts": [[1, 2]]}], ValueError),
    "paths of rewards of other lengths": ([PATH, {**PATH, "rews": [1, 2]}], ValueError),
    "rows of next observations alone": ({**d4rl(), "valids": np.ones(9)}, ValueError),
    "an empty path": ([{"obs": [[1.0]], "acts": [], "rews": []}], ValueError),
    "observations of other lengths": ([{"obs": {"x": [1, 2], "y": [1]}, "acts": [1]}], KeyError),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name):
    data, kind = WRONG[name]
    with pytest.raises(kind):
        datasets.from_arrays(data)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"ends": [True]}, ValueError),
        ({"preset": library.HERReplayStorage, "reward_fn": print}, KeyError),
        ({"num_envs": 2}, ValueError),
        ({"goal_fn": lambda observation: 5}, TypeError),
        ({"preset": lambda *_, **__: 5}, TypeError),
    ],
)
def test_arguments_that_do_not_fit(arguments, kind):
    with pytest.raises(kind):
        datasets.from_arrays(d4rl(), **arguments)


def test_recipe_is_a_deprecated_name_of_preset():
    with pytest.warns(DeprecationWarning, match=r"recipe= is deprecated.* use preset="):
        storage = datasets.from_arrays(d4rl(), recipe=library.EREReplayStorage)
    assert type(storage) is library.EREReplayStorage


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_and_back(monkeypatch, tmp_path):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    storage = datasets.from_arrays(goal_paths(), info_keys=["success"])
    dataset = datasets.to_minari(storage, "mine/goals-v0")
    assert [len(episode) for episode in dataset] == [7, 12, 5]
    assert [bool(episode.terminations[-1]) for episode in dataset] == [False, True, False]
    again = datasets.from_minari(dataset, info_keys=["success"])
    assert_same(again[:], storage[:])
    with pytest.raises(KeyError, match="force"):
        datasets.from_minari(dataset, info_keys=["force"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.uint16, torch.float8_e5m2])
def test_minari_holds_fields_of_dtypes_that_numpy_lacks(monkeypatch, tmp_path, dtype):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    storage = library.ReplayStorage(storage=library.PackedStorage(20))
    seen, done = torch.arange(8).reshape(4, 2).to(dtype), torch.tensor([[False], [False], [True]])
    flags = {"done": done, "terminated": done, "truncated": done & False}
    next_values = {"observation": seen[1:], "reward": seen[:3, 1:], **flags}
    data = {"observation": seen[:3], "action": seen[:3], "mask": seen[:3], "next": next_values}
    storage.extend(TensorDict(data, [3]))
    (episode,) = datasets.to_minari(storage, f"{str(dtype)[6:].replace('_', '')}-v0")
    kept = getattr(torch, str(episode.actions.dtype))
    assert kept is (torch.float32 if dtype.is_floating_point else dtype)
    expected = seen.to(kept).numpy()
    assert (episode.observations == expected).all()
    assert (episode.actions == expected[:3]).all()
    assert (episode.rewards == expected[:3, 1]).all()
    assert episode.infos["mask"].dtype == expected.dtype
    assert (episode.infos["mask"][1:] == expected[:3]).all()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_of_lanes_and_cuts(monkeypatch, tmp_path):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    spaces = Box(-1, 1, (2,)), Discrete(3)
    storage = library.UniformReplayStorage(
        *spaces, storage_size=12, num_envs=2, autoreset_mode="Disabled", info_keys=["cost"]
    )
    for step in range(8):
        done = np.array([step == 3, step == 6])
        before, after = (np.full((2, 2), at, np.float32) for at in (step, step + 1))
        infos = {"cost": np.array([0.5, step])}
        storage.record(before, [step % 3] * 2, [0.5, step], done, [False] * 2, infos, after)
    dataset = datasets.to_minari(storage, "lanes-v0", action_space=Discrete(3))
    # The oldest two of each lane are overwritten; what runs on is truncated where it stands.
    assert [episode.observations[:, 0].tolist() for episode in dataset] == [
        [2, 3, 4],
        [4, 5, 6, 7, 8],
        [2, 3, 4, 5, 6, 7],
        [7, 8],
    ]
    assert [bool(episode.truncations[-1]) for episode in dataset] == [False, True, False, True]
    again = datasets.from_minari("lanes-v0", float_dtype=torch.float32, info_keys=["cost"])
    assert again[:]["next", "cost"].tolist() == again[:]["next", "reward"].flatten().tolist()
    assert again.episodes.table()["length"].tolist() == [2, 4, 5, 1]
    gaps = datasets.from_arrays(
        d4rl(next_observations=np.ones((9, 1), np.float32)), on_gap="ignore"
    )
    with pytest.raises(ValueError, match="'observation'"):
        datasets.to_minari(gaps, "gaps-v0")
