"""The header of a storage on disk: which rows are there, and what is being written.

Letters: E lanes (environments), N rows, W words a row. All of it is int64 words.

The counters are kept twice. A commit fills the copy that is not in use, with a checksum, and then
names it in one word: whoever looks sees either all of a commit or nothing of it.
"""

from __future__ import annotations

import zlib
from threading import Lock

import numpy as np

__all__ = ["VERSION", "Header", "Identity", "State", "fence"]

#: Of the format. Another one is refused.
VERSION = 1

_MAGIC = int.from_bytes(b"TRLSTORE", "little")
_IDENTITY_WORDS = 8
_CHECK_BITS = 24


def fence() -> None:
    """Keeps memory operations from moving across, on processors that reorder them."""
    # What comes before a release and what comes after the next acquire do not change places. The lock
    # is a new one, so that nobody can be kept waiting for it.
    lock = Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def _seal(number: int) -> int:
    """Adds a checksum to a number below 2^39, so that it is written and checked as one word."""
    check = zlib.crc32(number.to_bytes(8, "little")) & ((1 << _CHECK_BITS) - 1)
    return number << _CHECK_BITS | check


def _unseal(word: int, name: str) -> int:
    number = word >> _CHECK_BITS
    if word < 0 or _seal(number) != word:
        raise ValueError(
            f"the header is damaged: {name} does not match its checksum. Bring header.bin back from "
            "a copy; nothing was changed."
        )
    return number


class Identity:
    """What a storage is, for good: the first words of the header.

    Args:
        num_rows: N.
        num_words: W.
        num_lanes: E.
        has_episodes: whether an `EpisodeWriter` writes the rows.
        description: checksum of the file that describes the layout.
    """

    def __init__(
        self,
        num_rows: int,
        num_words: int,
        num_lanes: int,
        has_episodes: bool,
        description: int,
    ) -> None:
        self.num_rows, self.num_words, self.num_lanes = num_rows, num_words, num_lanes
        self.has_episodes, self.description = has_episodes, description

    def to_words(self) -> np.ndarray:
        """Returns the words, checksum last."""
        words = [_MAGIC, VERSION, self.num_rows, self.num_words, self.num_lanes]
        words += [int(self.has_episodes), self.description]
        return np.array([*words, zlib.crc32(np.array(words, np.int64).tobytes())], np.int64)

    @classmethod
    def from_words(cls, words: np.ndarray) -> Identity:
        """Reads what `to_words` wrote.

        Raises:
            ValueError: it is no header, or one of another version, or damaged.
        """
        magic, version, *fields, check = (int(word) for word in words[:_IDENTITY_WORDS])
        intact = check == zlib.crc32(words[: _IDENTITY_WORDS - 1].tobytes())
        if magic != _MAGIC or (version == VERSION and not intact):
            raise ValueError(
                "the header is damaged: its first bytes are not those of a storage. Bring header.bin "
                "back from a copy; nothing was changed."
            )
        if version != VERSION:
            raise ValueError(
                f"the storage must be of version {VERSION} of the format, got version {version}: open "
                "it with the release that wrote it; nothing was changed."
            )
        num_rows, num_words, num_lanes, has_episodes, description = fields
        return cls(num_rows, num_words, num_lanes, bool(has_episodes), description)


class State:
    """The counters that one commit changes together.

    Args:
        num_lanes: E.

    Attributes:
        cursors: `[E]` steps written to each lane.
        open: `[E]` whether the next row of the lane continues its last episode.
        trajectories: `[E]` the collector's number of the last trajectory.
    """

    def __init__(self, num_lanes: int) -> None:
        self.words = np.zeros(4 + 3 * num_lanes, np.int64)
        lanes = self.words[4:].reshape(3, num_lanes)
        self.cursors, self.open, self.trajectories = lanes

    def copy(self) -> State:
        """Returns a state of its own."""
        other = State(len(self.cursors))
        other.words[:] = self.words
        return other

    @property
    def sequence(self) -> int:
        """How many commits there were."""
        return int(self.words[0])

    @property
    def epoch(self) -> int:
        """How often the rows were forgotten and counted anew."""
        return int(self.words[1])

    @epoch.setter
    def epoch(self, value: int) -> None:
        self.words[1] = value

    @property
    def write_count(self) -> int:
        """Rows written, as TorchRL's writers count them."""
        return int(self.words[2])

    @write_count.setter
    def write_count(self, value: int) -> None:
        self.words[2] = value

    @property
    def num_rows(self) -> int:
        """Rows that are live."""
        return int(self.words[3])

    @num_rows.setter
    def num_rows(self, value: int) -> None:
        self.words[3] = value


class Header:
    """The words of a header, and how they are read and changed.

    Args:
        words: all of them, `num_words(E)`, in memory that is the file's.

    Attributes:
        identity: what the storage is.
        reserved: `[E]` the steps of each lane up to which rows are written or being written.

    Raises:
        ValueError: the identity is damaged, or of another version.
    """

    def __init__(self, words: np.ndarray) -> None:
        self.identity = Identity.from_words(words)
        lanes = self.identity.num_lanes
        self._size = len(State(lanes).words) + 1  # with its checksum
        self._control = words[_IDENTITY_WORDS : _IDENTITY_WORDS + 3]
        start = _IDENTITY_WORDS + 3
        self.reserved = words[start : start + lanes]
        self._copies = words[start + lanes : start + lanes + 2 * self._size].reshape(2, -1)

    @staticmethod
    def num_words(num_lanes: int) -> int:
        """Returns how many words a header has."""
        return _IDENTITY_WORDS + 3 + num_lanes + 2 * (5 + 3 * num_lanes)

    @classmethod
    def create(cls, identity: Identity) -> np.ndarray:
        """Returns the words of a new header, with nothing stored."""
        words = np.zeros(cls.num_words(identity.num_lanes), np.int64)
        words[:_IDENTITY_WORDS] = identity.to_words()
        header = cls(words)
        header._control[:] = _seal(0)
        header.publish(State(identity.num_lanes))
        return words

    # Committed state

    def publish(self, state: State) -> None:
        """Makes `state` the one that is seen from now on, as the next in sequence."""
        state.words[0] += 1
        copy = self._copies[state.sequence % 2]
        copy[:-1] = state.words
        copy[-1] = zlib.crc32(state.words.tobytes())
        fence()
        self._control[0] = _seal(state.sequence)
        fence()

    def read(self) -> State:
        """Returns the last committed state, also while another process commits.

        Raises:
            ValueError: the header is damaged.
        """
        while True:
            word = int(self._control[0])
            sequence = _unseal(word, "the number of the last commit")
            words = self._copies[sequence % 2].copy()
            fence()
            # Only after the next commit may this copy be filled again.
            if word == int(self._control[0]):
                break
        state = State(self.identity.num_lanes)
        state.words[:] = words[:-1]
        if words[-1] != zlib.crc32(state.words.tobytes()) or state.sequence != sequence:
            raise ValueError(
                "the header is damaged: the counters of the last commit do not match their checksum. "
                "Bring header.bin back from a copy; nothing was changed."
            )
        return state

    # What is going on

    @property
    def pending(self) -> int:
        """The sequence number of the commit that is being prepared; 0 if none is."""
        return _unseal(int(self._control[1]), "the commit being prepared")

    @pending.setter
    def pending(self, sequence: int) -> None:
        fence()
        self._control[1] = _seal(sequence)
        fence()

    @property
    def rewrites(self) -> int:
        """Counts when rows begin and end to change other than by new ones; odd in between."""
        return _unseal(int(self._control[2]), "the count of rewrites")

    @rewrites.setter
    def rewrites(self, value: int) -> None:
        fence()
        self._control[2] = _seal(value)
        fence()

    def check(self) -> None:
        """Checks what is not covered by a checksum, while no writer is at work.

        Raises:
            ValueError: it does not fit together.
        """
        state, idle = self.read(), not self.pending
        if idle and (self.rewrites % 2 or not np.array_equal(self.reserved, state.cursors)):
            raise ValueError(
                "the header is damaged: its steps in preparation do not fit what is committed. Bring "
                "header.bin back from a copy; nothing was changed."
            )
