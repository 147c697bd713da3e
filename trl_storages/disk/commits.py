"""Which rows count: two tables, and a word that selects one of them.

Letters: E lanes (environments). All of it is int64 words.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from trl_storages.kernels import backend
from trl_storages.ring import EpisodeIndex

__all__ = ["Commits", "State"]

_WORDS, _COLUMNS = 2, 4  # of all lanes, and of each


class State(NamedTuple):
    """What one commit says."""

    history: int
    """Of the last write."""
    write_count: int
    """Rows written, as TorchRL's writers count them."""
    lanes: np.ndarray
    """`[4, E]`: cursors (steps written), tails (the first live step), whether the next row continues the
    last episode, and the collector's number of the last trajectory."""

    @property
    def cursors(self) -> np.ndarray:
        """`[E]` steps written to each lane."""
        return self.lanes[0]

    @property
    def tails(self) -> np.ndarray:
        """`[E]` the first live step of each lane."""
        return self.lanes[1]

    @property
    def open(self) -> np.ndarray:
        """`[E]` 0 or 1, whether the next row of the lane continues its last episode."""
        return self.lanes[2]

    @property
    def trajectories(self) -> np.ndarray:
        """`[E]` the collector's number of the last trajectory."""
        return self.lanes[3]


class Commits:
    """The words of a file of commits.

    Args:
        words: `num_words(E)`, in memory that is the file's.
    """

    def __init__(self, words: np.ndarray) -> None:
        self._words, self._tables = words, words[1:].reshape(2, -1)
        self._num_lanes = (self._tables.shape[1] - _WORDS - 1) // _COLUMNS
        tensors = torch.from_numpy(words[:1]), torch.from_numpy(self._tables)
        self._commits = backend("cpu").Commits(*tensors)

    @staticmethod
    def num_words(num_lanes: int) -> int:
        """Returns how many words there are for E lanes."""
        return 1 + 2 * (_WORDS + _COLUMNS * num_lanes + 1)

    @property
    def number(self) -> int:
        """How many commits there were."""
        return self._words.item(0)

    @property
    def cursors(self) -> np.ndarray:
        """`[E]` the committed cursors, in the memory of the file."""
        return self._tables[self.number & 1, _WORDS : _WORDS + self._num_lanes]

    @property
    def history(self) -> int:
        """The history of the last commit."""
        return self._tables.item(self.number & 1, 0)

    def read(self) -> State | None:
        """Returns the last commit; None if there is none, or it is damaged."""
        words = self._commits.read()
        if words is None or self.number < 0:
            return None
        array = words.numpy()
        state = State(int(array[0]), int(array[1]), array[_WORDS:].reshape(_COLUMNS, -1))
        is_right = (state.tails >= 0).all() and (state.tails <= state.cursors).all()
        return state if is_right else None

    def publish_lanes(
        self, index: EpisodeIndex, history: int, write_count: int, trajectories: np.ndarray
    ) -> None:
        """Makes what an index says the state that counts, as `publish` does."""
        self._commits.publish_lanes(index.ring, history, write_count, trajectories)

    def publish(self, state: State) -> None:
        """Makes a state the one that counts, with one store."""
        words = np.concatenate([state[:_WORDS], state.lanes.reshape(-1)])
        self._commits.publish(torch.from_numpy(words))
