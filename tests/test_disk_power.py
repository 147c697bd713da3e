"""A loss of power at any moment leaves all that was flushed and is not evicted, and no wrong row.

The disk is simulated: of everything that was written since a sync, chance decides what is there.
"""

import pytest
from disk.power import cut_at_random
from disk.rows import KINDS, stored_as


@pytest.mark.requirement("persistence")
@pytest.mark.parametrize("seed", range(12))
def test_power_cut_twice(tmp_path, seed):
    with stored_as([*KINDS][seed % len(KINDS)]):
        assert cut_at_random(tmp_path, seed, num_acts=10, cuts=1) == 20


@pytest.mark.search
@pytest.mark.parametrize("stored", KINDS, indirect=True)
@pytest.mark.parametrize("seed", range(100, 120))
def test_power_cut_again_and_again(tmp_path, stored, seed):
    """Two thousand hybrids of each kind."""
    assert cut_at_random(tmp_path, seed, num_acts=25, cuts=2, depth=4) == 200
