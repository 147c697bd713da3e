"""Draws pictures of the guides: relabelled goals, the ring of a lane, priorities and memory.

    python tutorials/pictures.py                  # draws tutorials/images/*.png

A replay buffer samples the goals. The bytes are those of `compressed_frames.jsonl` and `results.json`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from options import need

from trl_storages import HERReplayStorage
from trl_storages.datasets import from_arrays

FOLDER = Path(__file__).parent
BLUE, LIGHT, ORANGE, GREY, DARK = "#3b6ea5", "#b9d0e8", "#e08a1e", "#d0d0d0", "#333333"
ARROW = {"arrowstyle": "->", "color": DARK}


def relabelled_goals(figure: Any) -> None:
    """Draws an episode on a plane, and the goals of transitions that a batch has sampled from it."""
    angle = 0.9 * np.sin(np.arange(31) / 4.5)
    path = np.stack([np.cos(angle), np.sin(angle)], 1).cumsum(0).astype("float32")
    episode = {"observations": path, "actions": path, "timeouts": np.arange(31) == 30}
    goals = {"goal_fn": torch.clone, "reward_fn": lambda achieved, *_: achieved[:, 0]}
    buffer = from_arrays(episode, preset=HERReplayStorage, seed=105, **goals)
    batch = buffer.sample(4)
    batch = batch[batch["her_mask"]]
    begin, end = path[batch["index"]], path[batch["goal_index"] + 1]
    axes = figure.subplots()
    axes.plot(*path.T, "o-", color=LIGHT, label="states of an episode")
    axes.plot(26, 8, "*", color=GREY, mec=DARK, ms=14, label="stored goal, never reached")
    axes.plot(*begin.T, "o", color=BLUE, ms=9, label="sampled transition")
    axes.plot(*end.T, "*", color=ORANGE, ms=14, label="its new goal")
    for pair in zip(end, begin, strict=True):
        bow = {**ARROW, "color": ORANGE, "connectionstyle": "arc3,rad=0.4"}
        axes.annotate("", *pair, arrowprops=bow)
    axes.set(xticks=[], yticks=[], aspect="equal", xlim=(-2, 29), ylim=(-3, 12))
    axes.legend(fontsize=8, loc="upper left", ncols=2)


def ring(figure: Any) -> None:
    """Draws the entries of a lane, and the entries that a window and a sequence read."""
    # The step that begins at each entry; at "end" an episode ends, with an observation alone.
    entries = [3, 4, 5, 6, "end", 7, 8, 9, 10, 11, "end", 12, 13, "last", "", "", "", ""]
    colours = [BLUE] * 5 + [ORANGE] * 6 + ["#5a9e6f"] * 3 + [GREY] * 4
    axes = figure.subplots(subplot_kw={"projection": "polar"})
    axes.set(theta_zero_location="N", theta_direction=-1, ylim=(0, 2.2))
    axes.axis("off")
    turn = 2 * np.pi / len(entries)
    style = {"ha": "center", "va": "center", "fontsize": 9}
    for place, (text, colour) in enumerate(zip(entries, colours, strict=True)):
        alpha = 0.75 if isinstance(text, int) else 0.35
        axes.bar(place * turn, 0.7, turn, 1.1, color=colour, alpha=alpha, ec="white", lw=2)
        axes.text(place * turn, 1.45, text, **style)
    for first, last, text in (
        (0, 4, "a sequence of 4 steps\nreads 5 observations"),
        (5, 8, "a 3-step window reads\nrewards 7, 8 and 9,\nobservations 7 and 10"),
    ):
        axes.plot(np.linspace(first - 0.4, last + 0.4) * turn, [1.95] * 50, color=DARK, lw=2)
        axes.text((first + last) / 2 * turn, 2.15, text, va="center", fontsize=9, clip_on=False)
    for place, text in ((0, "oldest step,\nthe tail"), (12, "newest step"), (14, "next entry")):
        axes.annotate(text, (place * turn, 1.1), (place * turn, 0.5), arrowprops=ARROW, **style)


def priorities(figure: Any) -> None:
    """Draws raw priorities, the probabilities by alpha, and the weights by beta."""
    raw = np.array([0.05, 0.1, 0.2, 0.4, 0.8, 1.6])
    panels = figure.subplots(1, 3)
    panels[0].bar(range(6), raw, color=DARK, label="absolute error")
    for offset, alpha, colour in ((-0.27, 0, LIGHT), (0, 0.6, BLUE), (0.27, 1, ORANGE)):
        share, x = raw**alpha / (raw**alpha).sum(), np.arange(6) + offset
        panels[1].bar(x, share, 0.27, color=colour, label=f"alpha {alpha}")
    for beta, colour in ((0, LIGHT), (0.4, BLUE), (1, ORANGE)):
        weight = (raw.min() / raw) ** (0.6 * beta)
        panels[2].plot(weight, "o-", color=colour, label=f"beta {beta}")
    titles = "priorities", "probabilities by alpha", "weights by beta, alpha 0.6"
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=9)
        axes.set(xlabel="transition", xticks=range(6))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def memory(figure: Any) -> None:
    """Draws the bytes per transition of several libraries."""
    names = {"ours": "trl_storages", "torchrl": "TorchRL", "sb3": "Stable-Baselines3"}
    names |= {text: f"trl_storages, {text}" for text in ("frames once", "compress=True")}
    run = json.loads((FOLDER.parent / "tests/benchmarks/results.json").read_text())["results"]
    flat = {record["peer"]: record["row_nbytes"] for record in run if record["section"] == "flat"}
    lines = map(json.loads, (FOLDER / "compressed_frames.jsonl").read_text().splitlines())
    atari = {line["storage"]: line["bytes"] for line in lines if line["env"] == "MsPacman"}
    panels = figure.subplots(2, 1, height_ratios=(5, 6))
    titles = "25 + 3 + 3 floats, 4 actions", "stacks of four frames, MsPacman"
    for axes, title, sizes in zip(panels, titles, (flat, atari), strict=True):
        labels = [names.get(name, name) for name in sizes]
        colours = [ORANGE if label.startswith("trl") else BLUE for label in labels]
        bars = axes.barh(labels, [*sizes.values()], color=colours)
        axes.bar_label(bars, [f"{size:,.0f}" for size in sizes.values()], padding=3, fontsize=8)
        axes.set_title(f"bytes per transition: {title}", fontsize=9)
        axes.set(xticks=[], xlim=(0, 1.2 * max(sizes.values())))
        axes.invert_yaxis()


def main(folder: Path = FOLDER / "images") -> None:
    pyplot = need("matplotlib.pyplot")
    for draw, height in ((relabelled_goals, 3.4), (ring, 4.2), (priorities, 2.6), (memory, 3.8)):
        figure = pyplot.figure(figsize=(7.2, height), layout="constrained")
        draw(figure)
        figure.savefig(folder / f"{draw.__name__}.png", dpi=110)
        pyplot.close(figure)


if __name__ == "__main__":
    main()
