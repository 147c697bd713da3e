"""The transitions that every library of a benchmark is filled with.

Letters: N rows, E episodes, G goal size.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

OBSERVATION_SIZE = 25
GOAL_SIZE = 3
ACTION_SIZE = 4
EPISODE_LENGTH = 50
FLAT_SIZE = OBSERVATION_SIZE + 2 * GOAL_SIZE
DISCOUNT = 0.99
N_STEPS = 3
SEQUENCE_STEPS = 16
LANES = 8
PIXEL_SHAPE = (4, 84, 84)
PRIORITY_ALPHA, PRIORITY_BETA = 0.6, 0.4
# Relabelled rows for each one left as it was: 4 of 5, the ratio of the paper and of every library.
HINDSIGHT_GOALS = 4

#: Of an observation of the goal environment, and their sizes.
PARTS = {"observation": OBSERVATION_SIZE, "achieved_goal": GOAL_SIZE, "desired_goal": GOAL_SIZE}
GOAL_SPACE = spaces.Dict(
    {name: spaces.Box(-np.inf, np.inf, (size,), np.float32) for name, size in PARTS.items()}
)

Columns = dict[str, np.ndarray]


def goal_reward(achieved_goal: np.ndarray, desired_goal: np.ndarray) -> np.ndarray:
    """Gives 0 where the goal is reached and -1 elsewhere: `[..., G]` twice to `[...]` float32."""
    distance = ((achieved_goal - desired_goal) ** 2).sum(-1)
    return (distance < 0.05**2).astype(np.float32) - 1


def goal_columns(num_rows: int, *, seed: int = 0) -> Columns:
    """Makes transitions of a goal environment, in time order.

    The next observation of a row is the observation of the row after it, up to the end of the
    episode. Every other episode ends by termination, the others by truncation.

    Args:
        num_rows: how many transitions, N; the last episode may be cut off.
        seed: of the generator.

    Returns:
        Arrays `[N, ...]`: float32 `observation`, `achieved_goal`, `desired_goal`, the same three
        with `next_` before the name, `action`, `reward` `[N]`, and bool `[N]` `terminated`,
        `truncated`, `done`.
    """
    rng = np.random.default_rng(seed)
    lengths = np.full(num_rows // EPISODE_LENGTH + 1, EPISODE_LENGTH)
    ends = np.cumsum(lengths) - 1  # [E] the last row of each episode
    rows = np.arange(num_rows)
    episodes = np.searchsorted(ends, rows)
    # An episode of L rows has L + 1 states, so each episode before this one shifts its states by 1.
    states = rows + episodes
    state_size = OBSERVATION_SIZE + GOAL_SIZE
    values = rng.standard_normal((num_rows + len(lengths) + 1, state_size), dtype=np.float32)
    observations, achieved_goals = values[:, :OBSERVATION_SIZE], values[:, OBSERVATION_SIZE:]
    desired_goals = rng.standard_normal((len(lengths), GOAL_SIZE), dtype=np.float32)[episodes]
    done = rows == ends[episodes]
    return {
        "observation": observations[states],
        "achieved_goal": achieved_goals[states],
        "desired_goal": desired_goals,
        "action": rng.uniform(-1, 1, (num_rows, ACTION_SIZE)).astype(np.float32),
        "next_observation": observations[states + 1],
        "next_achieved_goal": achieved_goals[states + 1],
        "next_desired_goal": desired_goals.copy(),
        "reward": goal_reward(achieved_goals[states + 1], desired_goals),
        "terminated": done & (episodes % 2 == 0),
        "truncated": done & (episodes % 2 == 1),
        "done": done,
    }


def flat_columns(columns: Columns) -> Columns:
    """Joins the three parts of an observation, for work that not every library does on dicts."""
    flat = {name: it for name, it in columns.items() if not name.endswith("_goal")}
    for before in ("", "next_"):
        parts = [*observation_of(columns, before).values()]
        flat[f"{before}observation"] = np.concatenate(parts, -1)
    return flat


def split_columns(flat: Columns) -> Columns:
    """Splits joined observations into their parts, the first ones where fewer were joined."""
    columns = dict(flat)
    for before in ("", "next_"):
        start, joined = 0, columns.pop(f"{before}observation")
        for part, size in PARTS.items():
            if start < joined.shape[-1]:
                columns[before + part] = joined[:, start : start + size]
            start += size
    return columns


def spaces_of(columns: Columns) -> tuple[spaces.Space, spaces.Space]:
    """Returns the spaces of observations and actions."""
    observations = columns["observation"]
    low, high = (0, 255) if observations.dtype == np.uint8 else (-np.inf, np.inf)
    space = spaces.Box(low, high, observations.shape[1:], observations.dtype.type)
    actions = spaces.Box(-1, 1, columns["action"].shape[1:], np.float32)
    return GOAL_SPACE if "achieved_goal" in columns else space, actions


def observation_of(rows: Columns, before: str = "") -> Any:
    """Returns observations as environments give them: an array, or a dict of the three parts."""
    if "achieved_goal" not in rows:
        return rows[f"{before}observation"]
    return {part: rows[before + part] for part in PARTS}


def stacked_columns(num_rows: int, *, seed: int = 0) -> Columns:
    """Makes transitions of a game seen as its four newest frames, in time order.

    Within an episode a stack is the one before it with a new frame; the first one is of one frame.

    Args:
        num_rows: how many transitions, N.
        seed: of the generator.

    Returns:
        What `flat_columns` returns, with uint8 observations `[N, 4, 84, 84]` and one action.
    """
    rng = np.random.default_rng(seed)
    flat = flat_columns(goal_columns(num_rows, seed=seed))
    rows = np.arange(num_rows)
    # An episode has one frame more than steps, and each has as many steps.
    first = rows // EPISODE_LENGTH * (EPISODE_LENGTH + 1)
    newest = rows + rows // EPISODE_LENGTH
    frames = rng.integers(0, 256, (newest[-1] + 2, *PIXEL_SHAPE[1:]), np.uint8)
    back = np.arange(1 - PIXEL_SHAPE[0], 1)
    return flat | {
        "observation": frames[np.maximum(newest[:, None] + back, first[:, None])],
        "next_observation": frames[np.maximum(newest[:, None] + 1 + back, first[:, None])],
        "action": flat["action"][:, :1].copy(),
    }


def take_rows(columns: Columns, start: int, stop: int | None) -> Columns:
    """Returns views of the rows `start` to `stop`."""
    return {name: column[start:stop] for name, column in columns.items()}


def single_rows(columns: Columns) -> Iterator[Columns]:
    """Goes through the rows one by one, each still with a leading dimension of 1."""
    for row in range(len(columns["done"])):
        yield take_rows(columns, row, row + 1)


def lane_steps(columns: Columns) -> Iterator[tuple[int, int]]:
    """Goes through the rows `[start, stop)` of each step of `LANES` environments."""
    for start in range(0, len(columns["done"]) - LANES + 1, LANES):
        yield start, start + LANES


def to_tensordict(columns: Columns) -> TensorDict:
    """Lays columns out as TorchRL's environments do; reward and flags get a trailing 1."""
    num_rows = len(columns["done"])
    root, following = {}, {}
    for name, column in columns.items():
        tensor = torch.from_numpy(column)
        if name in ("reward", "terminated", "truncated", "done"):
            following[name] = tensor.unsqueeze(-1)
        elif name.startswith("next_"):
            following[name.removeprefix("next_")] = tensor
        else:
            root[name] = tensor
    return TensorDict(
        root | {"next": TensorDict(following, [num_rows], device="cpu")}, [num_rows], device="cpu"
    )


def steps_of_lanes(num_lanes: int, num_steps: int) -> Iterator[Columns]:
    """Gives steps `[E, ...]`, each of which continues the one before; the first continues the last."""
    rng = np.random.default_rng(0)

    def normal(size: int) -> np.ndarray:
        return rng.standard_normal((num_lanes, size), dtype=np.float32)

    seen = [{part: normal(size) for part, size in PARTS.items()} for _ in range(num_steps)]
    for now, after in zip(seen, [*seen[1:], seen[0]], strict=True):
        done = rng.random(num_lanes) < 0.02
        flags = {"terminated": done, "truncated": np.zeros_like(done), "done": done}
        following = {f"next_{part}": values for part, values in after.items()}
        yield {
            **now,
            **following,
            **flags,
            "action": normal(ACTION_SIZE),
            "reward": normal(1)[:, 0],
        }
