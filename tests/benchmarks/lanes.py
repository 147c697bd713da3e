"""Sections on environments in great numbers: `lanes`, beside a plain ring of tensors, and `growth`.

Letters: E lanes, T steps of each.
"""

import gc
import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tests.benchmarks import data
from tests.benchmarks.contest import Plan, adapter
from tests.benchmarks.measure import Turn, measure, take_time
from tests.benchmarks.peers import load_peer
from tests.benchmarks.results import Result

__all__ = ["growth", "lanes"]

NUM_ROWS = 1 << 20
NUM_LANES = (64, 4096, 16_384)
GROWING_LANES = (1, 8, 64, 512, 4096, 16_384)
DRAWS = (8192, 32_768)
#: Steps that are written over and over, and how often.
POOL, TIMES = 16, 12


def lanes(plan: Plan) -> Iterator[Result]:
    """Writes of `[E, 1]`, large draws, and a loop as in FastTD3: a write and two draws.

    The sides take turns of one call, which leaves caches as cold as an agent does. The rounds are
    single calls, so that the longest one is among them.
    """
    for num_lanes in NUM_LANES:
        with tempfile.TemporaryDirectory() as directory:
            yield from lanes_of(num_lanes, plan, directory)
        gc.collect()


def lanes_of(num_lanes: int, plan: Plan, directory: str) -> Iterator[Result]:
    """Measures one number of lanes."""
    pool = [*data.steps_of_lanes(num_lanes, POOL)]
    sides: dict[str, Any] = {}
    for name in ("ring", "ours", *(["ours_mapped"] if plan.device == "cpu" else []), "torchrl"):
        peer, is_mapped = name.removesuffix("_mapped"), name.endswith("_mapped")
        if peer in plan.peers and not isinstance(load_peer(peer), str):
            path = f"{directory}/rows" if is_mapped else None
            attributes = {"num_lanes": num_lanes, "device": plan.device, "directory": path}
            sides[name] = adapter(peer, "lanes", **attributes)(pool[0], NUM_ROWS)
    if not sides:
        return
    steps = [next(iter(sides.values())).prepare(columns).to(plan.device) for columns in pool]
    for number in range(1, NUM_ROWS // num_lanes + POOL):
        for side in sides.values():
            side.write(steps[number % POOL])

    works: list[tuple[str, int, Callable[[Any, Any], Any], list]] = [
        ("write", num_lanes, lambda side, step: side.write(step), steps * TIMES),
        *((f"draw {n:,}", n, lambda side, size: side.sample(size), [n] * POOL) for n in DRAWS),
        ("loop", num_lanes, write_and_draw_twice, steps * 2),
    ]
    for work, batch_size, call, values in works:
        rounds: dict[str, list[float]] = {name: [] for name in sides}
        gc.disable()
        for value in values:
            for name, side in sides.items():
                turn = Turn(call=partial(call, side, value))
                rounds[name].append(round(take_time(turn, plan.effort), 2))
        gc.enable()
        case = {"section": "lanes", "work": f"{num_lanes:,} lanes: {work}", "rows": NUM_ROWS}
        for name, taken in rounds.items():
            yield Result(**case, peer=name, batch_size=batch_size, rounds=taken)


def write_and_draw_twice(side: Any, step: Any) -> None:
    side.write(step)
    for _ in range(2):
        side.sample(DRAWS[0])


def growth(plan: Plan) -> Iterator[Result]:
    """Times that must grow with what is written, not with what is stored or faster than lanes."""
    for rows, num_lanes in itertools.product((NUM_ROWS // 8, NUM_ROWS), GROWING_LANES):
        case = {"peer": "ours", "rows": rows, "batch_size": num_lanes}
        for work, rounds in measure(growing_turns(rows, num_lanes), plan.effort).items():
            yield Result(section="growth", work=work, rounds=rounds, **case)


def growing_turns(rows: int, num_lanes: int) -> dict[str, Turn]:
    """Returns writes of `[E, 1]`, draws by priority after a write, and writes of new trajectories."""
    columns = data.goal_columns(rows)
    buffer: Any = adapter("ours", "prioritized_lanes", num_lanes=num_lanes)(columns, rows)
    steps = [buffer.prepare(it) for it in data.steps_of_lanes(num_lanes, POOL)]
    trajectories = []
    for number, step in enumerate(steps):
        ids = torch.arange(number * num_lanes, (number + 1) * num_lanes)
        trajectories.append(step[:, 0].clone().set(("collector", "traj_ids"), ids))
    pool, flat = itertools.cycle(steps), itertools.cycle(trajectories)
    return {
        "write": Turn(call=lambda: buffer.write(next(pool))),
        "update": Turn(call=lambda: buffer.sample(256), before=lambda: buffer.write(next(pool))),
        "route": Turn(call=lambda: buffer.write(next(flat))),
    }
