"""Rows are picked alike, whichever way is the fastest."""

import pytest
import torch

from trl_storages.storages.gather import take_rows, zero_rows


def test_fresh_rows_are_zero():
    rows = zero_rows(5, 3, torch.device("cpu"))
    assert (rows.shape, rows.dtype) == ((5, 3), torch.int64)
    assert not rows.any()


@pytest.mark.parametrize("words", [slice(None), slice(1, 3), slice(2, 3)])
@pytest.mark.parametrize("slots", [[], [4], [0, 6, 6, 2]])
def test_rows_come_in_the_order_of_the_slots_and_in_new_memory(words, slots):
    rows = torch.arange(28).view(7, 4)
    taken = take_rows(rows[:, words], torch.tensor(slots, dtype=torch.int64))
    assert taken.tolist() == [rows[slot, words].tolist() for slot in slots]
    assert taken.view(torch.int32).shape == (len(slots), 2 * taken.shape[1])
    taken.fill_(-1)
    assert (rows >= 0).all()


def test_a_slot_beyond_the_rows_raises():
    with pytest.raises(IndexError):
        take_rows(torch.zeros(3, 2, dtype=torch.int64), torch.tensor([3]))
