"""Plots of stored transitions and sampled batches.

Each function draws into the given Axes, or into a new figure, and returns the Axes.
Letters: E lanes (environments), T steps of a lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from trl_storages import keys, validation
from trl_storages.buffer import ReplayStorage
from trl_storages.samplers import PERSampler, layers_of
from trl_storages.validation import counted

try:
    from matplotlib import pyplot
    from matplotlib.axes import Axes
    from matplotlib.colors import to_rgb
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("plots need matplotlib: pip install 'trl-storages[plot]'.") from error

__all__ = ["plot_ages", "plot_episode", "plot_priorities", "plot_ring"]

_BLUE, _LIGHT, _ORANGE = "#3b6ea5", "#b9d0e8", "#e08a1e"
_RED, _GREY, _DARK = "#c23b3b", "#e9e9e9", "#333333"
# Neighbouring episodes get different colours, all light enough for dark marks.
_EPISODE_COLOURS = ("#9ecae1", "#c7e9c0", "#fdd0a2", "#dadaeb", "#fcc5c0", "#d9c8ae")
# More bars or marks can't be distinguished in a plot.
_MAX_AGE_BINS, _MAX_BARS, _MAX_MARKS = 40, 400, 150


def plot_ages(storage: ReplayStorage, batch: TensorDictBase, *, ax: Axes | None = None) -> Axes:
    """Plots a histogram of the ages of a batch's transitions, compared with uniform sampling.

    Args:
        storage: the replay buffer that the batch was sampled from.
        batch: one batch, or several joined by `torch.cat`; more samples give a smoother plot.
        ax: the Axes to draw into; None creates a figure.

    Raises:
        KeyError, IndexError: as in `storage.explain`.

    >>> from gymnasium.spaces import Box
    >>> from trl_storages import UniformReplayStorage
    >>> buffer = UniformReplayStorage(*[Box(-1, 1, (2,))] * 2, storage_size=50, seed=0)
    >>> for step in range(30):
    ...     _ = buffer.record([0, 0], [0, 0], 1.0, False, step % 10 == 9, {}, [0, 0])
    >>> plot_ages(buffer, buffer.sample()).get_xlabel()
    'age in steps of its lane'
    """
    ax = _axes(storage, ax, (5, 2.6))
    ages = storage.explain(batch)["age"].numpy()
    fill, num_rows = storage.episodes.fill, len(storage)
    num_steps = int(fill.max())
    counts, edges = np.histogram(ages, min(_MAX_AGE_BINS, num_steps), (0, num_steps))
    ax.bar(edges[:-1], counts, np.diff(edges), align="edge", color=_BLUE, ec="white", lw=0.4)
    num_stored, _ = np.histogram(np.concatenate([*map(np.arange, fill)]), edges)
    uniform = num_stored * (len(ages) / num_rows)
    heights = [*uniform, uniform[-1]]
    ax.step(edges, heights, _ORANGE, where="post", ls="--", lw=1.2, label="uniform")
    ax.set(xlim=(0, num_steps), xlabel="age in steps of its lane", ylabel="samples")
    return _titled(ax, f"{len(ages):,} samples of {num_rows:,} transitions")


def plot_priorities(storage: ReplayStorage, *, ax: Axes | None = None) -> Axes:
    """Plots the priorities of all transitions by slot, lane by lane, and each lane's write cursor.

    If there are many slots, each bar shows the mean and maximum of several neighbouring slots.

    Args:
        storage: a replay buffer with a `PERSampler`.
        ax: the Axes to draw into; None creates a figure.

    Raises:
        TypeError: the replay buffer has no `PERSampler`.
        RuntimeError: the replay buffer is empty.

    >>> from gymnasium.spaces import Box
    >>> from trl_storages import PrioritizedReplayStorage
    >>> buffer = PrioritizedReplayStorage(*[Box(-1, 1, (2,))] * 2, storage_size=50, seed=0)
    >>> for step in range(30):
    ...     _ = buffer.record([0, 0], [0, 0], 1.0, False, step % 10 == 9, {}, [0, 0])
    >>> plot_priorities(buffer).get_ylabel()
    'priority'
    """
    ax = _axes(storage, ax, (6, 2.6))
    sampler = layers_of(storage.sampler)[-1]
    expected = "a PERSampler, alpha=0.6"
    validation.instance("the sampler of storage", sampler, PERSampler, what=expected)
    priorities = sampler.update_priorities_from(storage.storage.view()).by_slot().astype(np.float64)
    num_slots = len(priorities)
    width = -(-num_slots // _MAX_BARS)
    # Empty slots have an infinite priority.
    padded = np.pad(priorities, (0, -num_slots % width), constant_values=np.inf)
    bars = np.ma.masked_invalid(padded.reshape(-1, width))
    first_slots = np.arange(len(bars)) * width
    if width > 1:
        maxima = bars.max(1).filled(0)
        ax.bar(first_slots, maxima, width, align="edge", color=_LIGHT, label=f"largest of {width}")
    means, label = bars.mean(1).filled(0), "mean" if width > 1 else None
    ax.bar(first_slots, means, width, align="edge", color=_BLUE, label=label)
    index = storage.episodes
    cursors = index.slots_of(np.arange(index.num_envs), index.cursors)
    full_height = ax.get_xaxis_transform()
    ax.vlines(cursors, 0, 1, _RED, lw=1.4, label="write cursor", transform=full_height)
    ax.set(xlim=(0, num_slots), xlabel="slot", ylabel="priority")
    return _titled(ax, f"{bars.count():,} transitions, alpha {sampler.alpha:g}")


def plot_ring(storage: ReplayStorage, *, ax: Axes | None = None) -> Axes:
    """Plots the ring of slots: its lanes, their episodes, and each lane's write cursor.

    Neighbouring episodes have different colours. Unless there are too many episodes, the end of each is
    marked: a solid line if the episode ended, a dotted line if it was split or is running.

    Args:
        storage: a replay buffer.
        ax: the Axes to draw into; None creates a figure.

    Raises:
        RuntimeError: the replay buffer is empty.

    >>> from gymnasium.spaces import Box
    >>> from trl_storages import UniformReplayStorage
    >>> buffer = UniformReplayStorage(*[Box(-1, 1, (2,))] * 2, storage_size=50, seed=0)
    >>> for step in range(30):
    ...     _ = buffer.record([0, 0], [0, 0], 1.0, False, step % 10 == 9, {}, [0, 0])
    >>> plot_ring(buffer).get_title(loc="left")
    '30 transitions, 1 lane, 3 episodes'
    """
    episodes = storage.episodes
    num_lanes, T = episodes.num_envs, episodes.steps_per_lane
    ax = _axes(storage, ax, (7, 0.9 + 0.35 * min(num_lanes, 8)))
    table = episodes.table()
    names = "first", "length", "lane", "finished"
    first, length, lane, is_finished = (table[name].numpy() for name in names)
    # The episode and the step of each transition.
    episode = np.arange(len(length)).repeat(length)
    step = first[episode] + np.arange(len(episode)) - (length.cumsum() - length)[episode]
    colours = np.array([to_rgb(colour) for colour in _EPISODE_COLOURS])
    picture = np.full((num_lanes * T, 3), to_rgb(_GREY))
    picture[episodes.slots_of(lane[episode], step)] = colours[episode % len(colours)]
    extent = 0, T, num_lanes - 0.5, -0.5
    ax.imshow(
        picture.reshape(num_lanes, T, 3), aspect="auto", interpolation="nearest", extent=extent
    )

    def mark(lane: np.ndarray, step: np.ndarray, *style: Any, **options: Any) -> None:
        ax.vlines(step, lane - 0.5, lane + 0.5, *style, **options)

    if len(first) <= _MAX_MARKS * num_lanes:
        end = (first + length - 1) % T + 1
        mark(lane[is_finished], end[is_finished], _DARK, "-", lw=1.2, label="ended")
        mark(lane[~is_finished], end[~is_finished], _DARK, ":", lw=1.2, label="split or running")
    mark(np.arange(num_lanes), episodes.cursors % T, _RED, lw=2.5, label="write cursor")
    ax.set_yticks(range(0, num_lanes, -(-num_lanes // 16)))
    ax.set(xlim=(0, T), ylim=(num_lanes - 0.5, -0.5), xlabel="slot of the lane", ylabel="lane")
    counts = (len(episode), "transition"), (num_lanes, "lane"), (len(first), "episode")
    return _titled(ax, ", ".join(counted(*count) for count in counts))


def plot_episode(
    storage: ReplayStorage, batch: TensorDictBase, *, most: int = 12, ax: Axes | None = None
) -> Axes:
    """Plots one episode, the samples of a batch from it, and their goals.

    The plot shows the episode that most samples come from. Each line of the plot is a sample: a bar from
    its first state to the state it leads to, over n steps or the steps of a sequence, and a star at the
    state that supplies its goal.

    Args:
        storage: the replay buffer that the batch was sampled from.
        batch: the samples; a sequence is one sample.
        most: maximum number of samples to plot.
        ax: the Axes to draw into; None creates a figure.

    Raises:
        KeyError, IndexError: as in `storage.explain`.

    >>> from gymnasium.spaces import Box
    >>> from trl_storages import UniformReplayStorage
    >>> buffer = UniformReplayStorage(*[Box(-1, 1, (2,))] * 2, storage_size=50, seed=0)
    >>> for step in range(30):
    ...     _ = buffer.record([0, 0], [0, 0], 1.0, False, step % 10 == 9, {}, [0, 0])
    >>> plot_episode(buffer, buffer.sample()).get_xlabel()
    'step of the episode'
    """
    limit = validation.integer("most", most, at_least=1)
    ax = _axes(storage, ax, (6.5, 1.2 + 0.22 * limit))
    num_samples = batch.shape[0]
    step_in_sequence = batch.get(keys.STEP_IN_SEQUENCE, None)
    if batch.ndim == 1 and step_in_sequence is not None:
        # The transitions of a sequence are consecutive.
        num_samples //= int(step_in_sequence.max()) + 1
    columns = {
        name: column.numpy().reshape(num_samples, -1)
        for name, column in storage.explain(batch).columns.items()
    }
    begin, end = _bars(columns)
    episode = columns["episode"][:, 0]
    samples = np.flatnonzero(episode == np.bincount(episode).argmax())
    num_in_episode, num_shown = len(samples), min(len(samples), limit)
    samples = samples[np.lexsort((end[samples], begin[samples]))]
    samples = samples[np.linspace(0, num_in_episode - 1, num_shown).round().astype(np.int64)]
    shown = {name: column[samples] for name, column in columns.items()}
    begin, end = begin[samples], end[samples]
    lines = np.arange(num_shown)
    ax.hlines(lines, begin, end, _BLUE, lw=5, label="sample")
    ax.plot(begin, lines, "o", color=_DARK, ms=3.5)
    if "relabelled" in shown:
        _mark_goals(ax, shown, end)
    length = int(shown["length"][0, 0])
    slot = torch.from_numpy(shown["slot"][:1, 0])
    last = storage.episodes.shift(slot, storage.episodes.num_after(slot))
    style, label = ("-", "ended") if storage.episodes.is_done(last) else (":", "split or running")
    ax.axvline(length, color=_DARK, ls=style, lw=1.4, label=label)
    ax.set_yticks(lines, samples.tolist(), fontsize=7)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlim=(-0.4, length + 0.4), ylim=(num_shown - 0.4, -0.6))
    ax.set(xlabel="step of the episode", ylabel="sample")
    suffix = f", {num_shown} shown" if num_shown < num_in_episode else ""
    return _titled(ax, f"{length} steps, {num_in_episode} of {num_samples} samples{suffix}")


def _bars(columns: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps at which each sample begins and ends."""
    step, episode = columns["step"], columns["episode"]
    steps = columns.get("steps", np.ones_like(step))
    # Transitions of other episodes are ignored: sequences may span episodes.
    is_shown = columns.get("valid", True) & (episode == episode[:, :1])
    begin = np.where(is_shown, step, step.max() + 1).min(1)
    return begin, np.where(is_shown, step + steps, -1).max(1)


def _mark_goals(ax: Axes, shown: dict[str, np.ndarray], end: np.ndarray) -> None:
    """Marks the origin of each sample's goal.

    Args:
        ax: the Axes.
        shown: columns of `explain` for the samples.
        end: `[num_shown]` step at which the bar of each sample ends.
    """
    is_relabelled, is_same_episode = shown["relabelled"][:, 0], shown["goal_same_episode"][:, 0]
    goal = (shown["step"] + shown["goal_offset"])[:, 0] + 1
    lines, is_own_goal = np.arange(len(end)), is_relabelled & is_same_episode
    ax.hlines(lines[is_own_goal], end[is_own_goal], goal[is_own_goal], _ORANGE, ":", lw=1.2)
    for mask, steps, marker, label in (
        (is_own_goal, goal, "*", "new goal"),
        (is_relabelled & ~is_same_episode, end, "x", "goal of another episode"),
        (~is_relabelled, end, "|", "stored goal"),
    ):
        if mask.any():
            ax.plot(steps[mask], lines[mask], marker, color=_ORANGE, ms=9, label=label, ls="none")


def _axes(storage: ReplayStorage, ax: Any, size: tuple[float, float]) -> Axes:
    """Returns the given Axes, or those of a new figure.

    Raises:
        RuntimeError: the replay buffer is empty.
    """
    if not len(storage):
        raise RuntimeError("the replay buffer is empty: write transitions before you plot them.")
    return pyplot.subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def _titled(ax: Axes, title: str) -> Axes:
    """Adds a title above the plot and a legend to its right, outside of the plot."""
    ax.set_title(title, loc="left", fontsize=9)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7, frameon=False, handlelength=1.4)
    return ax
