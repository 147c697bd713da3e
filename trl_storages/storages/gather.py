"""Picks rows out of a long table, which is what most of a sample's time goes to.

Letters: N rows, W words of 8 bytes a row, B any shape of slots.
"""

import numpy as np
import torch

__all__ = ["Picker", "quick_words", "zero_rows"]

_WORD = 8  # bytes
# NumPy copies items of so many bytes with an instruction or two, all others by a call.
_FAST_WORDS = (1, 2, 4)
# From so many words on, torch's threads take less time together than NumPy alone.
_MANY = 1 << 15


def zero_rows(num_rows: int, num_words: int, device: torch.device) -> torch.Tensor:
    """Returns `[N, W]` int64 zeros, in memory whose random access is cheap."""
    if device.type != "cpu":
        return torch.zeros(num_rows, num_words, dtype=torch.int64, device=device)
    # NumPy asks the kernel for huge pages, torch does not: a seventh of a gather's time is the
    # look-up of small ones.
    return torch.from_numpy(np.zeros((num_rows, num_words), np.int64))


def quick_words(words: range, num_words: int) -> range:
    """Widens a stretch of a row's words to one that is fetched faster, if the row has room.

    >>> quick_words(range(3, 6), 6), quick_words(range(0, 3), 9), quick_words(range(0, 5), 6)
    (range(2, 6), range(0, 4), range(0, 5))
    """
    size = next((size for size in _FAST_WORDS if len(words) <= size <= num_words), len(words))
    start = min(words.start, num_words - size)
    return range(start, start + size)


class Picker:
    """Gathers some neighbouring words of rows.

    On the CPU, NumPy picks them as items of one array, in half the time that one of torch's threads
    needs where they are few. Large batches are shared among torch's threads, if it has several.

    Args:
        rows: `[N, W]` int64, contiguous; read whenever it is asked for rows.
        words: the words w of a row; None picks all of them.
    """

    def __init__(self, rows: torch.Tensor, words: range | None = None) -> None:
        num_rows, num_words = rows.shape
        self._width = num_words if words is None else len(words)
        self._part = rows if words is None else rows[:, words.start : words.stop]
        self._array = rows.numpy() if words is None and rows.device.type == "cpu" else None
        self._items: np.ndarray | None = None
        if words is not None and rows.device.type == "cpu":
            self._items = np.ndarray(
                (num_rows,),
                np.dtype((np.void, len(words) * _WORD)),
                buffer=rows.numpy(),
                offset=words.start * _WORD,
                strides=(num_words * _WORD,),
            )

    def pick(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns `[*B, w]` int64 in new memory.

        Args:
            slots: `[*B]` int64 on the device of the rows.

        Raises:
            IndexError: a slot lies beyond the rows.
        """
        if slots.device.type == "cpu" and slots.ndim and self._is_for_numpy(slots.numel()):
            if self._array is not None:
                return torch.from_numpy(self._array.take(slots.numpy(), 0))
            if self._items is not None:
                picked = self._items[slots.numpy()]
                return torch.from_numpy(picked.view(np.int64).reshape(*slots.shape, self._width))
        return self._part.index_select(0, slots.reshape(-1)).view(*slots.shape, self._width)

    def _is_for_numpy(self, num_slots: int) -> bool:
        if not num_slots:
            return False  # NumPy would make a tensor whose words cannot be seen as other dtypes.
        return num_slots * self._width < _MANY or torch.get_num_threads() == 1
