"""One side of `compare.py`: fills storages of the checkout that it runs in, and times their calls.

It uses public names only and nothing else of its checkout, so that checkouts may differ in the rest.
"""

import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

import trl_storages

PARTS = {"observation": 25, "achieved_goal": 3, "desired_goal": 3}
LENGTH, LANES, BATCH = 50, 8, 256
SECONDS = 0.05  # of a turn

Measure = Callable[[], float]


def box(size: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (size,), np.float32)


SPACES = spaces.Dict({name: box(size) for name, size in PARTS.items()}), box(4)


def reward_fn(achieved: torch.Tensor, desired: torch.Tensor, _: Any) -> torch.Tensor:
    return ((achieved - desired).square().sum(-1) < 0.05**2).float() - 1


def episodes(number: int) -> TensorDict:
    """Returns `[number, LENGTH]` steps; half of the episodes end by termination."""
    rng = np.random.default_rng(0)
    shape = (number, LENGTH + 1)
    states = {n: torch.from_numpy(rng.random((*shape, k), np.float32)) for n, k in PARTS.items()}
    states["desired_goal"] = states["desired_goal"][:, :1].expand(*shape, 3)
    done = torch.zeros(number, LENGTH, 1, dtype=torch.bool)
    done[:, -1] = True
    terminated = done & (torch.arange(number) % 2 == 0)[:, None, None]
    after = {name: values[:, 1:] for name, values in states.items()}
    after |= {"reward": -torch.ones(number, LENGTH, 1), "done": done}
    after |= {"terminated": terminated, "truncated": done & ~terminated}
    steps: dict[str, Any] = {name: values[:, :-1] for name, values in states.items()}
    steps["action"] = torch.from_numpy(rng.random((number, LENGTH, 4), np.float32))
    return TensorDict({**steps, "next": after}, [number, LENGTH]).contiguous()


def steps_of(rows: TensorDict) -> Iterator[tuple]:
    """Gives the arguments of `record` for rows `[T]` or `[T, E]`, over and over."""
    following = rows["next"]
    names = ("reward", "terminated", "truncated")
    flags = [following[name].squeeze(-1).numpy() for name in names]
    before, after = ({n: part[n].numpy() for n in PARTS} for part in (rows, following))
    action = rows["action"].numpy()

    def step(t: int) -> tuple:
        seen, to_come = ({n: values[t] for n, values in part.items()} for part in (before, after))
        return (seen, action[t], *(flag[t] for flag in flags), {}, to_come)

    return itertools.cycle([step(t) for t in range(len(rows))])


def filled(recipe: str, stored: int, **options: Any) -> Any:
    """Returns a storage of that many rows, all of them written."""
    if recipe == "HERReplayStorage":
        options["reward_fn"] = reward_fn
    kind = getattr(trl_storages, recipe)
    storage = kind(*SPACES, storage_size=stored, batch_size=BATCH, seed=0, **options)
    lanes = options.get("num_envs", 1)
    block = episodes(20 * lanes)
    block = block.reshape(lanes, -1) if lanes > 1 else block.reshape(-1)
    for _ in range(-(-stored // block.numel())):
        storage.extend(block)
    return storage


def timed(call: Callable[[], Any], before: Callable[[], Any] | None = None, of: int = 1) -> Measure:
    """Returns what measures one turn: the median of its calls' processor times, in microseconds."""

    def turn() -> float:
        taken, end = [], time.monotonic() + SECONDS
        while len(taken) < 5 or time.monotonic() < end:
            if before is not None:
                before()
            begin = time.process_time()
            for _ in range(of):
                call()
            taken.append(time.process_time() - begin)
        return statistics.median(taken) / of * 1e6

    turn()
    return turn


def draws(stored: int, recipe: str, judge: bool = False, **options: Any) -> Measure:
    """Draws batches; a step is recorded before each, which is not timed."""
    storage = filled(recipe, stored, **options)
    steps = steps_of(episodes(20).reshape(-1))
    errors = torch.linspace(0.1, 1, BATCH)

    def call() -> None:
        batch = storage.sample()
        if judge:
            storage.update_tensordict_priority(batch.set("td_error", errors))

    return timed(call, lambda: storage.record(*next(steps)))


def records(stored: int, lanes: int) -> Measure:
    options = {"num_envs": lanes, "autoreset_mode": "Disabled"} if lanes > 1 else {}
    storage = filled("UniformReplayStorage", stored, **options)
    rows = episodes(20 * lanes)
    rows = rows.reshape(lanes, -1).transpose(0, 1).contiguous() if lanes > 1 else rows.reshape(-1)
    steps = steps_of(rows)
    return timed(lambda: storage.record(*next(steps)), of=20)


def extends(stored: int, rows: int) -> Measure:
    storage = filled("UniformReplayStorage", stored)
    blocks = itertools.cycle(episodes(20).reshape(-1).split(rows))
    return timed(lambda: storage.extend(next(blocks)), of=max(1, 20 // rows))


def row_bytes(stored: int) -> Measure:
    """Tells by how many bytes a row the process grows."""

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    filled("UniformReplayStorage", 1000)  # compiled loops are no rows
    before = resident()
    storage = filled("UniformReplayStorage", stored)
    grown = (resident() - before) / len(storage)
    return lambda: grown


HER, PER, FOLDED = "HERReplayStorage", "PrioritizedReplayStorage", {"n_step": 3, "discount": 0.99}
#: Bytes come first, before memory that was freed could be taken again.
ROWS: dict[str, Callable[[int], Measure]] = {
    "bytes": row_bytes,
    "uniform": lambda n: draws(n, "UniformReplayStorage"),
    "hindsight": lambda n: draws(n, HER),
    "3-step": lambda n: draws(n, "NStepReplayStorage", **FOLDED),
    "hindsight-3-step": lambda n: draws(n, HER, **FOLDED),
    "priorities": lambda n: draws(n, PER, judge=True),
    "all-four": lambda n: draws(n, HER, judge=True, alpha=0.6, eta=0.996, **FOLDED),
    "record": lambda n: records(n, 1),
    "record-8": lambda n: records(n, LANES),
    "extend-1": lambda n: extends(n, 1),
    "extend-50": lambda n: extends(n, 50),
    "extend-1000": lambda n: extends(n, 1000),
}


def serve(checkout: Path) -> None:
    """Answers lines of a name and a number, which make a row, and empty ones, which measure it."""
    answers, sys.stdout = sys.stdout, sys.stderr
    assert checkout in Path(trl_storages.__file__).parents, trl_storages.__file__
    torch.set_num_threads(1)
    turn: Measure | None = None
    for line in sys.stdin:
        try:
            if name := line.strip():
                turn = None
                turn = ROWS[name.split()[0]](int(name.split()[1]))
            found: object = turn and turn() if not name else "made"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        print(json.dumps(found), file=answers, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries tell of what they leak at the end


if __name__ == "__main__":
    serve(Path(sys.argv[1]).resolve())
