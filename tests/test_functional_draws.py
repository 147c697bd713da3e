"""Random integers below a bound on the device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from trl_storages.functional.draws import random_below, random_integers


@given(
    bound=st.integers(1, 2**62),
    size=st.integers(0, 20) | st.tuples(st.integers(0, 4), st.integers(0, 4)),
    as_tensor=st.booleans(),
)
def test_below_the_bound(bound, size, as_tensor):
    drawn = random_below(torch.tensor(bound) if as_tensor else bound, size)
    assert drawn.dtype == torch.int64
    assert drawn.shape == ((size,) if isinstance(size, int) else size)
    assert ((drawn >= 0) & (drawn < bound)).all()


@pytest.mark.parametrize("bound", [2, 3, 10, 100])
def test_uniform(bound, generator):
    drawn = random_below(bound, 50_000, generator=generator)
    assert stats.chisquare(torch.bincount(drawn, minlength=bound)).pvalue > 1e-4


def test_every_integer_above_2_to_the_24(generator):
    """A float32 draw times the bound would reach even integers only."""
    drawn = random_below(torch.tensor(2**25), 50_000, generator=generator)
    large = drawn[drawn >= 2**24]
    assert stats.binomtest(int((large % 2).sum()), len(large), 0.5).pvalue > 1e-4


def test_a_bound_for_each_draw(generator):
    bounds = torch.tensor([[1], [2], [5]])
    drawn = random_below(bounds, (3, 2000), generator=generator)
    assert [sorted(set(row)) for row in drawn.tolist()] == [[0], [0, 1], [0, 1, 2, 3, 4]]


def test_the_generator_decides():
    first, second = (random_integers(8, generator=torch.Generator().manual_seed(4)) for _ in "ab")
    assert torch.equal(first, second)
    assert (first > 2**32).any()  # 63 bits, not 32
