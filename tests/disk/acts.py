"""What may be done to a storage in a directory, together with what it must come to.

An act is made for a storage and its history; `do` is done to the storage, `then` to the history.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from disk.history import History
from disk.rows import Found, make, priority_of, with_frames

from trl_storages import PERSampler, ReplayStorage

__all__ = [
    "ACTS",
    "Act",
    "end_episodes",
    "flush",
    "keep",
    "load",
    "prioritise",
    "random_act",
    "write",
]


@dataclass
class Act:
    """One thing that is done to a storage.

    Attributes:
        name: of it.
        do: does it to a storage.
        before: the history until it is done.
        after: the history once it was done.
        given_up: `[E]` the steps before which nothing need be there while it is done; None for none.
        or_nothing: whether it may be stopped where nothing is left.
    """

    name: str
    do: Callable[[ReplayStorage], Any]
    before: History
    after: History
    given_up: list[int] | None = None
    or_nothing: bool = False

    def may_leave(self, got: Found) -> bool:
        """Whether it may have been killed where this is found."""
        lanes, cursors = got
        if not lanes:
            return not any(self.before.cursors) or self.or_nothing
        if got in (self.before.live, self.after.live):
            return True
        if self.or_nothing and not any(lanes):
            return True
        if self.given_up is None or cursors != self.before.cursors:
            return False
        return all(
            rows == whole[len(whole) - len(rows) :]
            and {step for step, _ in whole if step >= given_up} <= {step for step, _ in rows}
            for rows, whole, given_up in zip(lanes, self.before.live[0], self.given_up, strict=True)
        )


def write(history: History, num_steps: int, lanes: list[int] | None = None) -> Act:
    """`extend` or `add` of the next steps of some lanes."""
    chosen = list(range(history.num_lanes)) if lanes is None else lanes
    block = history.block(num_steps, chosen)
    after = history.copy()
    after.write(block, chosen)

    def do(storage: ReplayStorage) -> None:
        framed = with_frames(block, storage, lanes)
        if lanes is not None:
            storage.writer.extend(framed, lanes=torch.tensor(lanes))
        elif history.num_lanes > 1:
            storage.extend(framed)
        else:
            storage.extend(framed[0])

    # A write that is larger than the spare steps gives up what it replaces before it begins.
    given_up = list(history.tails)
    for lane in chosen:
        needed = after.cursors[lane] - history.per_lane - history.spare
        given_up[lane] = min(max(given_up[lane], needed), history.cursors[lane])
    return Act("write", do, history, after, given_up)


def keep(history: History, num_steps: int) -> Act:
    """`empty`, of all or all but the newest steps."""
    after = history.copy()
    after.keep(num_steps)
    return Act("empty", lambda storage: storage.empty(keep_steps=num_steps), history, after)


def prioritise(history: History, rng: random.Random) -> Act:
    """Gives priorities to the rows of a batch."""
    update = rng.randrange(4)

    def do(storage: ReplayStorage) -> None:
        if len(storage) and isinstance(storage.sampler, PERSampler):
            batch = storage.sample()
            batch["td_error"] = priority_of(batch["serial"], update)
            storage.update_tensordict_priority(batch)

    return Act("prioritise", do, history, history)


def flush(history: History) -> Act:
    after = history.copy()
    after.flush()
    return Act("flush", lambda storage: storage.flush(), history, after)


def end_episodes(history: History) -> Act:
    return Act("end", lambda storage: storage.end_episodes(), history, history)


def load(history: History, num_steps: int, size: int | None = None) -> Act:
    """Loads the state of another storage of `size` rows, of rows of its own."""
    size = history.per_lane * history.num_lanes if size is None else size
    other = History(history.num_lanes, size)
    source = make(None, history.num_lanes, size)
    act = write(other, num_steps)
    act.do(source)
    state, after = source.state_dict(), history.copy()
    after.load(act.after)

    def do(storage: ReplayStorage) -> None:
        storage.load_state_dict(state)

    return Act("load", do, history, after)


def _some_lanes(history: History, rng: random.Random) -> list[int] | None:
    if history.num_lanes == 1 or rng.random() < 0.6:
        return None
    return sorted(rng.sample(range(history.num_lanes), rng.randint(1, history.num_lanes)))


#: Name -> makes an act of this kind, and how often it is chosen.
ACTS: dict[str, tuple[Callable[[History, random.Random], Act], int]] = {
    "step": (lambda history, rng: write(history, 1, _some_lanes(history, rng)), 30),
    "steps": (
        lambda history, rng: write(history, rng.randint(2, 9), _some_lanes(history, rng)),
        15,
    ),
    "many steps": (lambda history, rng: write(history, rng.randint(1, 2 * history.per_lane)), 3),
    "flush": (lambda history, _: flush(history), 8),
    "prioritise": (prioritise, 12),
    "end episodes": (lambda history, _: end_episodes(history), 3),
    "empty": (lambda history, _: keep(history, 0), 2),
    "keep": (lambda history, rng: keep(history, rng.randint(1, history.per_lane)), 4),
    "load": (lambda history, rng: load(history, rng.randint(1, history.per_lane + 5)), 1),
}


def random_act(history: History, rng: random.Random) -> Act:
    """One of all acts, the usual ones more often."""
    name = rng.choices(list(ACTS), [often for _, often in ACTS.values()])[0]
    return ACTS[name][0](history, rng)
