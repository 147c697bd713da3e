"""The offsets of hindsight goals, against every integer that the noise may stand for."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.functional.goals import episode_offset, final_offset, future_offset

pytestmark = [pytest.mark.requirement("her-future"), pytest.mark.requirement("her-episode")]

lengths = st.integers(0, 12)


@given(behind=lengths, ahead=lengths)
def test_each_row_is_reached_equally_often(behind, ahead):
    """Noise that runs through whole multiples of the number of rows hits each as often."""
    behinds = torch.full((6 * (behind + ahead + 1),), behind)
    noise = torch.arange(behinds.shape[0])
    offsets = episode_offset(noise, behinds, torch.full_like(behinds, ahead))
    assert Counter(offsets.tolist()) == dict.fromkeys(range(-behind, ahead + 1), 6)
    aheads = torch.full((6 * (ahead + 1),), ahead)
    offsets = future_offset(torch.arange(aheads.shape[0]), aheads)
    assert Counter(offsets.tolist()) == dict.fromkeys(range(ahead + 1), 6)
    assert set(final_offset(aheads).tolist()) == {ahead}


def test_golden_values():
    noise, behind, ahead = torch.tensor([[0, 7, 9], [2**62, 5, 5], [3, 0, 4]]).unbind(-1)
    assert future_offset(noise, ahead).tolist() == [0, 2**62 % 6, 3]
    assert episode_offset(noise, behind, ahead).tolist() == [-7, 2**62 % 11 - 5, 3]
    assert final_offset(ahead).tolist() == [9, 5, 4]
