"""How long calls take, by turns."""

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

__all__ = ["Effort", "Turn", "measure", "nothing", "take_time", "take_turn"]

Key = TypeVar("Key", bound=Hashable)


def nothing() -> None:
    """Comes before a call that needs no preparation."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one side does when it is its turn.

    Attributes:
        call: what is timed.
        before: what comes before each call and is not timed.
        repeat: how many calls are timed together, for those that are as quick as the clock.
    """

    call: Callable[[], Any]
    before: Callable[[], Any] = nothing
    repeat: int = 1


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: how many turns each side gets, after one that is thrown away.
        calls: how many times a turn has.
        seconds: after which a turn ends, however many calls it has had. Who takes that long needs no
            more of them for a median.
        processor_time: whether to count the time of the processor instead of the clock on the wall.
            On a machine that does other things, those interrupt long calls more often than short
            ones. Of no use with several threads, whose times it adds up.
        device: which is waited for before and after what is timed, as torch names it.
    """

    rounds: int = 10
    calls: int = 20
    seconds: float = 0.1
    processor_time: bool = False
    device: str = "cpu"

    @property
    def clock(self) -> Callable[[], float]:
        """Returns the seconds that have passed."""
        return time.process_time if self.processor_time else time.perf_counter

    @property
    def wait(self) -> Callable[[], Any]:
        """What returns once the device has done all that it was asked for."""
        return nothing if self.device == "cpu" else torch.cuda.synchronize


def take_time(turn: Turn, effort: Effort) -> float:
    """Returns the time of a call, in microseconds."""
    call, wait, clock = turn.call, effort.wait, effort.clock
    turn.before()
    wait()
    begin = clock()
    for _ in range(turn.repeat):
        call()
    wait()
    return 1e6 * (clock() - begin) / turn.repeat


def take_turn(turn: Turn, effort: Effort) -> float:
    """Returns the median time of a call, in microseconds."""
    taken: list[float] = []
    end = effort.clock() + effort.seconds
    while len(taken) < effort.calls and (not taken or effort.clock() < end):
        taken.append(take_time(turn, effort))
    return round(statistics.median(taken), 2)


def measure(turns: Mapping[Key, Turn], effort: Effort) -> dict[Key, list[float]]:
    """Lets the sides take turns of a few calls each, and returns the median of each turn.

    Whatever else the machine does meets all of them, while the caches stay as warm as they are within
    a loop of one side. Every other round goes backwards, so that nobody always follows the same one.

    Args:
        turns: the sides.
        effort: how many rounds and calls.

    Returns:
        for each side one number a round, in microseconds a call.
    """
    rounds: dict[Key, list[float]] = {key: [] for key in turns}
    gc.disable()
    try:
        for number in range(effort.rounds + 1):
            for key in list(turns)[:: 1 if number % 2 else -1]:
                taken = take_turn(turns[key], effort)
                if number:
                    rounds[key].append(taken)
            gc.collect(1)  # What the turns left behind; not all the objects of the libraries.
    finally:
        gc.enable()
    return rounds
