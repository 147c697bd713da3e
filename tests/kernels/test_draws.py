"""Random numbers as ranks, exactly."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_storages.index import EpisodeIndex
from trl_storages.kernels import draws


@settings(max_examples=50)
@given(st.integers(1, 5000), st.integers(0, 2**32))
def test_a_draw_is_a_part_of_the_noise(num_rows, seed):
    """floor(noise · n / 2^63), also where the next rank begins."""
    index = EpisodeIndex(5000)
    index.cursors[:] = num_rows
    rng = np.random.default_rng(seed)
    begins = [(int(rank) << 63) // num_rows for rank in rng.integers(num_rows, size=50)]
    edges = [(begin + more) % (1 << 63) for begin in begins for more in (-1, 0, 1)]
    noise = np.array([*rng.integers(1 << 63, size=50), *edges], np.int64)
    slots = draws.draw(index.tables, 5000, noise)
    assert slots.tolist() == [number * num_rows >> 63 for number in noise.tolist()]
