"""Random numbers of 63 bits."""

import pytest
import torch
from scipy import stats

from trl_storages.functional.draws import random_noise


@pytest.mark.parametrize("size", [0, 7, (2, 5)])
def test_shapes(size):
    drawn = random_noise(size)
    assert drawn.dtype == torch.int64
    assert drawn.shape == ((size,) if isinstance(size, int) else size)
    assert (drawn >= 0).all()


def test_all_63_bits_are_random(generator):
    drawn = random_noise(20_000, generator=generator)
    for bit in range(63):
        assert stats.binomtest(int((drawn >> bit & 1).sum()), len(drawn), 0.5).pvalue > 1e-6


def test_the_generator_decides():
    first, second = (random_noise(8, generator=torch.Generator().manual_seed(4)) for _ in "ab")
    assert torch.equal(first, second)
