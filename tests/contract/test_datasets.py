"""Storages out of datasets: what lies where is worked out by hand."""

from importlib import import_module

import numpy as np
import pytest
import torch
from contract.make import library
from contract.steps import assert_same

datasets = import_module(f"{library.__name__}.datasets")

pytestmark = pytest.mark.requirement("datasets")


def column(values):
    return np.asarray(values, np.float32)[:, None]


def seen(storage):
    """First observations, next ones, terminated and truncated of the history."""
    keys = ["observation", *(("next", name) for name in ("observation", "terminated", "truncated"))]
    return tuple(storage[:][key].flatten().tolist() for key in keys)


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


def d4rl(**entries):
    """Steps 0 to 3 end in a terminal state, 4 to 6 by the time limit; two more follow."""
    random = np.random.default_rng(0)
    return {
        "observations": column(range(9)),
        "actions": random.normal(size=(9, 1)).astype(np.float32),
        "rewards": random.normal(size=9).astype(np.float32),
        "terminals": np.arange(9) == 3,
        "timeouts": np.arange(9) == 6,
        **entries,
    }


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


def test_d4rl_with_next_observations():
    storage = datasets.from_arrays(d4rl(next_observations=column(range(1, 10))))
    found = seen(storage)
    assert found[:2] == ([*range(9)], [*range(1, 10)])
    assert [found[2].index(True), found[3].index(True)] == [3, 6]


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


def test_hindsight_over_a_dataset():
    storage = datasets.from_arrays(
        goal_paths(),
        recipe=library.HERReplayStorage,
        reward_fn=lambda achieved, desired, _: -(achieved - desired).norm(dim=-1),
        n_step=3,
    )
    assert len(storage) == 24
    batch = storage.sample(60)
    assert int(batch["her_mask"].sum()) == 48
    assert batch["desired_goal"].dtype is torch.float64
    assert batch["camera", "pixels"].dtype is torch.uint8


@pytest.mark.parametrize("form", ["flat", "paths"])
def test_what_does_not_fit_is_refused(form):
    data = d4rl() if form == "flat" else goal_paths()
    bad = data if form == "flat" else data[1]
    for name in ("actions", "rewards"):
        kept = bad[name]
        bad[name] = kept[:-2]
        with pytest.raises((KeyError, TypeError, ValueError)):
            datasets.from_arrays(data)
        bad[name] = kept
    assert len(datasets.from_arrays(data)) in (7, 24)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_and_back(monkeypatch, tmp_path):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    storage = datasets.from_arrays(goal_paths())
    dataset = datasets.to_minari(storage, "mine/goals-v0")
    assert [len(episode) for episode in dataset] == [7, 12, 5]
    assert [bool(episode.terminations[-1]) for episode in dataset] == [False, True, False]
    again = datasets.from_minari(dataset, info_keys=["success"])
    assert_same(again[:], storage[:])
    with pytest.raises(KeyError, match="force"):
        datasets.from_minari(dataset, info_keys=["force"])
