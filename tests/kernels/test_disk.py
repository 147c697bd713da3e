"""Checksums, against plain Python integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.kernels import host

ALL = 2**64 - 1
words = st.integers(-(2**63), 2**63 - 1)


def ints(values):
    return torch.tensor(values, dtype=torch.int64)


def splitmix(state):
    """The last steps of the generator, on an integer of 64 bits."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & ALL
    state = (state ^ state >> 27) * 0x94D049BB133111EB & ALL
    return state ^ state >> 31


def factor(position):
    return splitmix((position + 1) * 0x9E3779B97F4A7C15 & ALL) | 1


def checksum(row, mark, slot):
    total = 0x9E3779B97F4A7C15
    for position, word in enumerate([mark, slot, *row]):
        total += factor(position) * ((word & ALL) ^ (word & ALL) >> 31)
    total = splitmix(total & ALL)
    return total - 2**64 if total >> 63 else total


def test_the_first_constants_are_those_of_splitmix64():
    """The generator's published numbers from state 0."""
    assert [factor(i) for i in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1]


@given(st.integers(0, 9), st.integers(0, 5), st.data())
def test_checksums_are_the_sums_they_say(num_words, num_rows, data):
    rows = [
        data.draw(st.lists(words, min_size=num_words, max_size=num_words)) for _ in range(num_rows)
    ]
    marks, slots = (data.draw(st.lists(words, min_size=num_rows, max_size=num_rows)) for _ in "ab")
    block = ints(rows).reshape(num_rows, num_words)
    found = host.checksums(block, ints(marks), ints(slots))
    assert found.tolist() == [*map(checksum, rows, marks, slots)]


@pytest.mark.parametrize("flipped", [2**63 - 2**64, 2**62, 2**31, 2**62 + 2**30, 1])
def test_changes_of_the_same_bits_do_not_cancel(flipped):
    """Signs, or the doubling of equal numbers: in any one, two or three words of a row."""
    row = torch.arange(24) * 0x0123456789ABCDEF
    places = torch.arange(24)
    chosen = [places[:, None], torch.combinations(places, 2), torch.combinations(places, 3)]
    changed = [row.repeat(len(some), 1) for some in chosen]
    for rows, some in zip(changed, chosen, strict=True):
        rows.scatter_(1, some, rows.gather(1, some) ^ flipped)
    changed = torch.cat([row[None], *changed])
    zero = torch.zeros(len(changed), dtype=torch.int64)
    assert len(host.checksums(changed, zero, zero).unique()) == len(changed)


def test_every_bit_of_a_row_its_mark_and_slot_counts():
    bits = torch.ones(64, dtype=torch.int64) << torch.arange(64)
    plain = torch.zeros(64, 1, dtype=torch.int64)
    zero = torch.zeros(64, dtype=torch.int64)
    sums = [
        host.checksums(plain, zero, zero)[:1],
        host.checksums(bits[:, None], zero, zero),
        host.checksums(plain, bits, zero),
        host.checksums(plain, zero, bits),
    ]
    assert len(torch.cat(sums).unique()) == 3 * 64 + 1
