"""Exact counts, spread evenly."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from trl_storages.functional import even_order, num_of_each


def test_num_of_each_by_hand():
    assert num_of_each(10, [0.5, 0.3, 0.2]) == [5, 3, 2]
    assert num_of_each(7, [0.5, 0.3, 0.2]) == [4, 2, 1]  # 3.5, 2.1, 1.4
    assert num_of_each(2, [1 / 3, 1 / 3, 1 / 3]) == [1, 1, 0]
    assert num_of_each(1, (0.3, 0.7)) == [0, 1]


@given(
    total=st.integers(0, 300),
    parts=st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
)
def test_largest_remainders_are_rounded_up(total, parts):
    due = [Fraction(total * part, sum(parts)) for part in parts]
    counts = num_of_each(total, [part / sum(parts) for part in parts])
    assert sum(counts) == total
    extra = [count - int(each) for count, each in zip(counts, due, strict=True)]
    assert set(extra) <= {0, 1}
    left = [each - int(each) for each in due]
    got, not_got = (
        [part for part, one in zip(left, extra, strict=True) if one == n] for n in (1, 0)
    )
    assert not got or not not_got or min(got) >= max(not_got)


@given(counts=st.tuples(st.integers(0, 40), st.integers(0, 40)).filter(any))
def test_every_stretch_contains_the_fraction_of_each_group(counts):
    order = even_order(counts)
    assert sorted(order.tolist()) == list(range(sum(counts)))
    sums = [0, *(order < counts[0]).long().cumsum(0).tolist()]
    for start in range(len(sums)):
        for stop in range(start, len(sums)):
            due = Fraction((stop - start) * counts[0], sum(counts))
            assert abs(sums[stop] - sums[start] - due) <= 1
