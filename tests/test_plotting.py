"""Plots: their marks are compared with the stored transitions and the sampled batches."""

import matplotlib as mpl
import pytest
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict

from trl_storages import (
    EpisodeSequence,
    HERReplayStorage,
    PrioritizedReplayStorage,
    UniformReplayStorage,
)
from trl_storages.plotting import plot_ages, plot_episode, plot_priorities, plot_ring

mpl.use("Agg")
from matplotlib import pyplot as plt

SPACES = Box(-1, 1, (2,)), Box(-1, 1, (1,))
GOALS = Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), SPACES[0]))


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def steps(num_steps, dones=(), names=("observation",)):
    seen = {key: torch.zeros(num_steps, 2) for key in names}
    done = torch.zeros(num_steps, 1, dtype=torch.bool)
    done[list(dones)] = True
    flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    after = {**seen, **flags, "reward": torch.zeros(num_steps, 1)}
    return TensorDict({**seen, "action": torch.zeros(num_steps, 1), "next": after}, [num_steps])


def hindsight(**options):
    options = {"reward_fn": lambda achieved, *_: achieved[:, 0], "storage_size": 20, **options}
    storage = HERReplayStorage(GOALS, SPACES[1], seed=0, **options)
    storage.extend(steps(12, [4, 11], GOALS))
    return storage


def marked(ax, label):
    """Returns the x positions of the vertical lines of a label."""
    collection = next(each for each in ax.collections if each.get_label() == label)
    return [(segment[0][0], *sorted(segment[:, 1])) for segment in collection.get_segments()]


def test_plot_ages_counts_ages():
    storage = UniformReplayStorage(*SPACES, storage_size=20, seed=0)
    storage.extend(steps(25))
    batch = storage.sample(3000)
    ax = plot_ages(storage, batch)
    ages = storage.explain(batch)["age"]
    expected = [int((ages == age).sum()) for age in range(20)]
    assert [bar.get_height() for bar in ax.patches] == expected
    assert ax.lines[0].get_ydata()[0] == 150
    assert ax.get_title(loc="left") == "3,000 samples of 20 transitions"


def test_plot_ages_shows_uniform_sampling_of_lanes_of_different_lengths():
    storage = UniformReplayStorage(*SPACES, storage_size=40, num_envs=2, seed=0)
    for lane, num_steps in enumerate([25, 5]):
        storage.extend(steps(num_steps), lanes=[lane])
    uniform = plot_ages(storage, storage.sample(500)).lines[0].get_ydata()
    assert uniform.tolist() == [40.0] * 5 + [20.0] * 16


@pytest.mark.parametrize(("size", "width"), [(20, 1), (1200, 3)])
def test_plot_priorities_shows_mean_and_maximum_by_slot(size, width):
    storage = PrioritizedReplayStorage(*SPACES, storage_size=size, eta=0.9, c_min=2)
    slots = storage.extend(steps(11))
    storage.update_priority(slots, torch.arange(1.0, 12))
    bars = [bar.get_height() for bar in plot_priorities(storage).patches if bar.get_height()]
    # Slots 0 to 2, 3 to 5, 6 to 8; the last three hold two transitions and an empty slot.
    assert bars == ([*range(1, 12)] if width == 1 else [3, 6, 9, 11, 2, 5, 8, 10.5])


def test_plot_ring_of_a_wrapped_lane():
    storage = UniformReplayStorage(*SPACES, storage_size=10)
    storage.extend(steps(14, [2, 6, 11]))
    ax = plot_ring(storage)
    # Rows 4 to 13 are left: an episode of three at 4, one of five at 7 and 0, one of two at 2.
    colours = [tuple(colour) for colour in ax.images[0].get_array()[0]]
    second, third, first = colours[0], colours[2], colours[4]
    assert colours == [second] * 2 + [third] * 2 + [first] * 3 + [second] * 3
    assert len({first, second, third}) == 3
    assert marked(ax, "ended") == [(7, -0.5, 0.5), (2, -0.5, 0.5)]
    assert marked(ax, "split or running") == [(4, -0.5, 0.5)]
    assert marked(ax, "write cursor") == [(4, -0.5, 0.5)]
    assert ax.get_title(loc="left") == "10 transitions, 1 lane, 3 episodes"


def test_plot_ring_of_lanes_of_unequal_fill():
    storage = UniformReplayStorage(*SPACES, storage_size=12, num_envs=2)
    storage.extend(steps(3, [1]), lanes=[1])
    storage.extend(steps(1), lanes=[0])
    ax = plot_ring(storage)
    colours = [[tuple(colour) for colour in lane] for lane in ax.images[0].get_array()]
    empty = colours[0][-1]
    filled = [[colour != empty for colour in lane] for lane in colours]
    assert filled == [[True] + [False] * 5, [True] * 3 + [False] * 3]
    assert marked(ax, "write cursor") == [(1, -0.5, 0.5), (3, 0.5, 1.5)]
    assert marked(ax, "ended") == [(2, 0.5, 1.5)]


def test_plot_episode_shows_samples_and_goals():
    storage = hindsight(n_step=2)
    batch = storage.sample(64)
    said = storage.explain(batch)
    which = (said["episode"] == said["episode"].mode().values).nonzero().flatten()
    length = int(said["length"][which[0]])
    ax = plot_episode(storage, batch, most=100)
    assert ax.get_title(loc="left") == f"{length} steps, {len(which)} of 64 samples"
    bars = next(each for each in ax.collections if each.get_label() == "sample").get_segments()
    begin, end = said["step"][which], (said["step"] + said["steps"])[which]
    expected = sorted(zip(begin.tolist(), end.tolist(), strict=True))
    assert [(bar[0][0], bar[1][0]) for bar in bars] == expected
    stars = next(line for line in ax.lines if line.get_label() == "new goal")
    relabelled = which[said["relabelled"][which]]
    goals = (said["step"] + said["goal_offset"] + 1)[relabelled]
    assert sorted(stars.get_xdata()) == sorted(goals.tolist())
    # Of more than are wanted some are left out.
    few = plot_episode(storage, batch, most=3)
    assert len(few.get_yticklabels()) == 3


def test_plot_episode_shows_a_sequence_as_one_bar():
    unit = EpisodeSequence(3, burn_in=1)
    storage = UniformReplayStorage(*SPACES, storage_size=20, sample_unit=unit, seed=0)
    storage.extend(steps(9))
    ax = plot_episode(storage, storage.sample(8))
    bars = next(each for each in ax.collections if each.get_label() == "sample").get_segments()
    assert len(bars) == 8
    assert max(bar[1][0] for bar in bars) == 9


def test_given_axes_are_used_and_missing_data_raise():
    storage = hindsight(alpha=0.5)
    figure, axes = plt.subplots(2, 2)
    assert plot_ages(storage, storage.sample(), ax=axes[0, 0]) is axes[0, 0]
    assert plot_priorities(storage, ax=axes[0, 1]) is axes[0, 1]
    assert plot_episode(storage, storage.sample(), ax=axes[1, 0]) is axes[1, 0]
    assert plot_ring(storage, ax=axes[1, 1]) is axes[1, 1]
    assert plt.get_fignums() == [figure.number]
    with pytest.raises(TypeError, match=r"must be a PERSampler"):
        plot_priorities(hindsight())
    with pytest.raises(RuntimeError, match="the replay buffer is empty"):
        plot_ring(UniformReplayStorage(*SPACES, storage_size=3))
