"""Rows are picked alike, whichever way is the fastest."""

import pytest
import torch

from trl_storages.storages.gather import Picker, quick_words, zero_rows

MANY = [slot % 7 for slot in range(1 << 15)]


@pytest.fixture(params=[1, 2])
def threads(request):
    """Lets torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def test_fresh_rows_are_zero():
    rows = zero_rows(5, 3, torch.device("cpu"))
    assert (rows.shape, rows.dtype) == ((5, 3), torch.int64)
    assert not rows.any()


@pytest.mark.parametrize("words", [None, range(1, 3), range(2, 3), range(5), range(6)])
@pytest.mark.parametrize(
    "slots", [[], [4], [0, 6, 6, 2], [[0, 6], [5, 5], [1, 2]], [[], []], MANY, [MANY, MANY[::-1]]]
)
@pytest.mark.usefixtures("threads")
def test_rows_come_in_the_order_of_the_slots_and_in_new_memory(words, slots):
    rows = torch.arange(42).view(7, 6)
    slots = torch.tensor(slots, dtype=torch.int64)
    taken = Picker(rows, words).pick(slots)
    part = slice(None) if words is None else slice(words.start, words.stop)
    assert torch.equal(taken, rows[slots][..., part])
    assert taken.view(torch.int32).shape == (*slots.shape, 2 * taken.shape[-1])
    taken.fill_(-1)
    assert (rows >= 0).all()


def test_rows_are_seen_as_they_are_now():
    rows = torch.zeros(3, 2, dtype=torch.int64)
    pickers = [Picker(rows), Picker(rows, range(1, 2))]
    rows += 5
    assert all(picker.pick(torch.tensor([2])).eq(5).all() for picker in pickers)


@pytest.mark.parametrize("words", [None, range(1)])
@pytest.mark.parametrize("slot", [3, -4])
@pytest.mark.parametrize("num_slots", [1, 1 << 15])
@pytest.mark.usefixtures("threads")
def test_a_slot_beyond_the_rows_raises(words, slot, num_slots):
    with pytest.raises(IndexError):
        Picker(torch.zeros(3, 2, dtype=torch.int64), words).pick(torch.full((num_slots,), slot))


@pytest.mark.parametrize("num_words", range(1, 9))
def test_words_are_widened_within_the_row_only(num_words):
    for start in range(num_words):
        for stop in range(start + 1, num_words + 1):
            quick = quick_words(range(start, stop), num_words)
            assert 0 <= quick.start <= start
            assert stop <= quick.stop <= num_words
            assert len(quick) <= max(stop - start, 4)
