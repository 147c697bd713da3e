"""What always holds in an episode index.

An `index` is that of `kernels`. Another process may write meanwhile: nothing is wrong of steps that
have given way in the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import CONTINUES, CURSOR, SPLIT, TAIL, draws

__all__ = ["check", "check_bounds", "kept", "require"]


def kept(index: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns lane, step and slot `[N]` of all live steps, and of the newest of a lane that has none.

    The stream goes on from the newest step, though it may not be live.

    Raises:
        RuntimeError: the words of a lane contradict one another.
    """
    lanes, (cursors, tails) = index[4], _bounds_of_lanes(index)
    firsts = np.minimum(tails, np.maximum(cursors - 1, 0))
    counts = cursors - firsts
    slot = draws.slots_between(index, firsts, cursors)
    step = np.arange(len(slot)) + (cursors - counts.cumsum()).repeat(counts)
    return np.arange(len(lanes)).repeat(counts), step, slot


def _bounds_of_lanes(index: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the cursors and the tails `[E]`, which another process may move meanwhile."""
    lanes, T = index[4:6]
    cursors = lanes[:, CURSOR].copy()
    tails = lanes[:, TAIL].copy()
    fits = (tails >= 0) & (tails <= lanes[:, CURSOR]) & (cursors - tails <= T)
    if not fits.all():
        raise RuntimeError(
            f"the index is damaged: its tails are not at most {T} behind its cursors."
        )
    return cursors, tails


def require(what: str, holds: np.ndarray, index: Any, lane: np.ndarray, step: np.ndarray) -> None:
    """Raises a RuntimeError where something does not hold `[N]` of steps that are still there."""
    wrong = np.flatnonzero(~holds)
    lanes = index[4][lane[wrong]]
    if (step[wrong] >= np.minimum(lanes[:, TAIL], lanes[:, CURSOR] - 1)).any():
        raise RuntimeError(f"the index is damaged: it does not hold that {what}.")


def check_bounds(index: Any) -> None:
    """Raises a RuntimeError if reading a slot could leave the tables or the entries."""
    where, episode, _, _, lanes, T, M, k, _, _ = index
    _bounds_of_lanes(index)
    fits = ((where == 0) | (where >= k - 1)) & (where < len(lanes) * M - 1)
    if not (fits & (episode >= 0) & (episode <= T)).all():
        raise RuntimeError("the index is damaged: a slot leads out of it.")


def check(index: Any) -> None:
    """Raises a RuntimeError if the tables of an index contradict one another."""
    check_bounds(index)
    where, episode, ends, spans, _, T, M, k, _, depth = index
    lane, step, slot = kept(index)
    place, number, end = where[slot] - lane * M, episode[slot], ends[slot]
    fits = (place >= k - 1) & (place < M - 1) & (end <= SPLIT)
    require("entries lie within their lanes", fits, index, lane, step)
    first, last = spans[lane, number].T
    fits = (first >= 0) & (first <= step) & (step <= last)
    require("each step is one of its episode", fits, index, lane, step)
    # Each step and the one behind it in its lane.
    is_pair, begins = lane[1:] == lane[:-1], (first == step)[1:]
    goes_on = (number[1:] == number[:-1]) & (end[:-1] == CONTINUES)
    is_next = ((number[1:] - number[:-1]) % (T + 1) == 1) & (last == step)[:-1]
    fits = ~is_pair | np.where(begins, is_next, goes_on)
    require("one episode follows another where it ends", fits, index, lane, step)
    moved, is_first = np.diff(place), place[1:] == k - 1
    fits = ~is_pair | (moved == 1) | (moved == k + 1) | is_first
    require("entries lie one behind another", fits, index, lane, step)
    # They return to the beginning of their lane once at most, and end before the oldest.
    turns = np.append(0, (is_pair & is_first).cumsum())
    oldest = np.flatnonzero(np.append(True, ~is_pair)[: len(lane)])
    newest = np.append(oldest[1:], len(lane))[: len(oldest)] - 1
    turned = turns[newest] - turns[oldest]
    fits = (turned == 0) | (place[newest] - place[oldest] + turned * M + depth < M)
    require("no two steps share an entry", fits, index, lane[oldest], step[oldest])
