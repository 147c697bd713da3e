"""What pictures show is what is stored and drawn: their marks are compared with the rows."""

import builtins

import matplotlib as mpl
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from matplotlib.colors import to_rgb
from tensordict import TensorDict

from trl_storages import (
    EpisodeSequence,
    HERReplayStorage,
    PrioritizedReplayStorage,
    UniformReplayStorage,
    plotting,
)
from trl_storages.plotting import plot_ages, plot_episode, plot_priorities, plot_ring

mpl.use("Agg")
from matplotlib import pyplot as plt

SPACES = Box(-1, 1, (2,)), Box(-1, 1, (1,))


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def steps(num_steps, dones=(), goals=False):
    seen = {"observation": torch.zeros(num_steps, 2)}
    if goals:
        seen |= {key: torch.zeros(num_steps, 2) for key in ("achieved_goal", "desired_goal")}
    done = torch.zeros(num_steps, 1, dtype=torch.bool)
    done[list(dones)] = True
    flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    after = {**seen, **flags, "reward": torch.zeros(num_steps, 1)}
    return TensorDict({**seen, "action": torch.zeros(num_steps, 1), "next": after}, [num_steps])


def hindsight(**options):
    from gymnasium.spaces import Dict

    goals = Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), SPACES[0]))
    storage = HERReplayStorage(
        goals,
        SPACES[1],
        reward_fn=lambda achieved, desired, _: torch.zeros(len(achieved)),
        storage_size=20,
        seed=0,
        **options,
    )
    storage.extend(steps(12, [4, 11], goals=True))
    return storage


def marked(ax, label):
    """Returns the x positions of the vertical lines of a label."""
    collection = next(each for each in ax.collections if each.get_label() == label)
    return [(segment[0][0], *sorted(segment[:, 1])) for segment in collection.get_segments()]


def test_ages_are_counted():
    storage = UniformReplayStorage(*SPACES, storage_size=20, seed=0)
    storage.extend(steps(25))
    batch = storage.sample(3000)
    ax = plot_ages(storage, batch, bins=5)
    ages = storage.explain(batch)["age"]
    assert [bar.get_height() for bar in ax.patches] == [
        int(((ages >= low) & (ages < low + 4)).sum()) for low in range(0, 20, 4)
    ]
    assert ax.lines[0].get_ydata()[0] == 600
    assert ax.get_title(loc="left") == "3,000 samples of 20 rows"
    assert len(plot_ages(storage, batch, bins=100).patches) == 20


def test_priorities_by_slot():
    storage = PrioritizedReplayStorage(*SPACES, storage_size=20, eta=0.9, c_min=2)
    slots = storage.extend(steps(14))
    storage.update_priority(slots, torch.arange(1.0, 15))
    ax = plot_priorities(storage)
    assert [bar.get_height() for bar in ax.patches] == [*range(1, 15), *[0] * 6]
    assert ax.lines[0].get_xdata()[0] == 14


def test_many_priorities_are_shown_by_mean_and_largest(monkeypatch):
    monkeypatch.setattr(plotting, "_MOST_BARS", 5)
    storage = PrioritizedReplayStorage(*SPACES, storage_size=12)
    storage.update_priority(storage.extend(steps(11)), torch.arange(11.0))
    ax = plot_priorities(storage)
    # Slots 0 to 2, 3 to 5, 6 to 8; the last three are two rows and a slot without one.
    assert [bar.get_height() for bar in ax.patches] == [2, 5, 8, 10, 1, 4, 7, 9.5]


def test_the_ring_of_one_lane_that_has_wrapped():
    storage = UniformReplayStorage(*SPACES, storage_size=10)
    storage.extend(steps(14, [2, 6, 11]))
    ax = plot_ring(storage)
    # Rows 4 to 13 are left: an episode of three at 4, one of five at 7 and 0, one of two at 2.
    colours = [tuple(colour) for colour in ax.images[0].get_array()[0]]
    first, second, third = map(to_rgb, plotting._EPISODES[:3])
    assert colours == [second] * 2 + [third] * 2 + [first] * 3 + [second] * 3
    assert marked(ax, "ended") == [(7, -0.5, 0.5), (2, -0.5, 0.5)]
    assert marked(ax, "cut or running") == [(4, -0.5, 0.5)]
    assert marked(ax, "written next") == [(4, -0.5, 0.5)]
    assert ax.get_title(loc="left") == "10 rows, 1 lane, 3 episodes"


def test_the_ring_of_lanes_of_unequal_fill():
    storage = UniformReplayStorage(
        *SPACES, storage_size=12, num_envs=2, autoreset_mode="Disabled", on_gap="ignore"
    )
    storage.extend(steps(3, [1]), lanes=[1])
    storage.extend(steps(1), lanes=[0])
    ax = plot_ring(storage)
    empty = to_rgb(plotting._GREY)
    assert [[tuple(colour) != empty for colour in lane] for lane in ax.images[0].get_array()] == [
        [True] + [False] * 5,
        [True] * 3 + [False] * 3,
    ]
    assert marked(ax, "written next") == [(1, -0.5, 0.5), (3, 0.5, 1.5)]
    assert marked(ax, "ended") == [(2, 0.5, 1.5)]


def test_an_episode_with_samples_and_goals():
    storage = hindsight(n_step=2)
    batch = storage.sample(64)
    explained = storage.explain(batch)
    sample = int((explained["slot"] >= 5).nonzero()[0])
    ax = plot_episode(storage, batch, sample, most=100)
    which = (explained["slot"] >= 5).nonzero().flatten()
    assert ax.get_title(loc="left") == f"7 steps, {len(which)} of 64 samples"
    bars = next(each for each in ax.collections if each.get_label() == "sample").get_segments()
    begin, end = explained["step"][which], explained["step"][which] + explained["steps"][which]
    assert [(bar[0][0], bar[1][0]) for bar in bars] == sorted(
        zip(begin.tolist(), end.tolist(), strict=True)
    )
    stars = next(line for line in ax.lines if line.get_label() == "its goal")
    relabelled = which[explained["relabelled"][which]]
    goals = explained["step"] + explained["goal_offset"] + 1
    assert sorted(stars.get_xdata()) == sorted(goals[relabelled].tolist())
    assert [text.get_text() for text in ax.texts] == ["stored goal"] * (
        len(which) - len(relabelled)
    )
    # Of more than are wanted some are left out, never the one that was named.
    few = plot_episode(storage, batch, sample, most=3)
    labels = [label.get_text() for label in few.get_yticklabels()]
    assert len(labels) == 3
    assert str(sample) in labels
    assert few.get_title(loc="left").endswith(", 3 shown")


def test_goals_of_other_episodes_and_the_episode_with_most_samples():
    storage = hindsight(strategy="random", num_goals=float("inf"))
    batch = storage.sample(64)
    ax = plot_episode(storage, batch, most=100)
    explained = storage.explain(batch)
    in_second = explained["slot"] >= 5
    shown = in_second if in_second.sum() > 32 else ~in_second
    others = (~explained["goal_same_episode"][shown]).sum()
    assert [text.get_text() for text in ax.texts] == ["goal of another episode"] * int(others)


@pytest.mark.parametrize("reshaped", [False, True])
def test_sequences_are_one_bar_each(reshaped):
    unit = EpisodeSequence(3, burn_in=1)
    storage = UniformReplayStorage(*SPACES, storage_size=20, sample_unit=unit, seed=0)
    storage.extend(steps(9))
    batch = storage.sample(8)
    anchors = storage.explain(batch)["step"].reshape(8, -1)
    ax = plot_episode(storage, batch.reshape(-1, unit.num_steps) if reshaped else batch)
    bars = next(each for each in ax.collections if each.get_label() == "sample").get_segments()
    assert len(bars) == 8
    assert min(bar[0][0] for bar in bars) == anchors.min()
    assert max(bar[1][0] for bar in bars) == 9
    assert {line.get_label() for line in ax.lines} >= {"cut or running"}


def test_axes_that_are_given_are_used_and_returned():
    storage = hindsight(alpha=0.5)
    batch = storage.sample()
    figure, axes = plt.subplots(2, 2)
    (first, second), (third, fourth) = axes
    assert plot_ages(storage, batch, ax=first) is first
    assert plot_priorities(storage, ax=second) is second
    assert plot_episode(storage, batch, ax=third) is third
    assert plot_ring(storage, ax=fourth) is fourth
    figure.canvas.draw()
    assert plt.get_fignums() == [figure.number]


def test_what_is_not_there_to_be_shown(monkeypatch):
    storage = hindsight()
    with pytest.raises(TypeError, match=r"draw by priority, got one that draws by UniformSampler"):
        plot_priorities(storage)
    with pytest.raises(ValueError, match="sample must be an integer from 0 to 255, got 256"):
        plot_episode(storage, storage.sample(), 256)
    with pytest.raises(KeyError, match=r"the batch lacks .*index"):
        plot_ages(storage, steps(3))
    empty = UniformReplayStorage(*SPACES, storage_size=3)
    for plot in (plot_ring, plot_priorities, lambda each: plot_ages(each, steps(1))):
        with pytest.raises(RuntimeError, match="storage must hold rows to show"):
            plot(empty)
    really = builtins.__import__

    def missing(name, *args):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return really(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"plot_ring needs .* pip install 'trl-storages\[plot\]'"):
        plot_ring(storage)


def test_nothing_is_changed_by_looking():
    storage = hindsight(alpha=0.5)
    batch = storage.sample()
    before = {key: value.clone() for key, value in batch.items(True, True)}
    state = storage.sampler.base.priorities
    for plot in (plot_ages, plot_episode):
        plot(storage, batch)
    for plot in (plot_ring, plot_priorities):
        plot(storage)
    assert all(torch.equal(value, batch[key]) for key, value in before.items())
    assert np.array_equal(storage.sampler.base.priorities, state)
