"""The priority of a sequence against values worked out by hand, a naive loop and its properties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.functional import sequence_priority


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.requirement("per-sequence")
@given(
    st.lists(st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4), min_size=1),
    st.floats(0, 1),
)
def test_sequence_priority_equals_a_loop(errors, eta):
    expected = [
        eta * max(abs(e) for e in row) + (1 - eta) * sum(abs(e) for e in row) / 4 for row in errors
    ]
    got = sequence_priority(doubles(errors), eta)
    assert got.tolist() == pytest.approx(expected, abs=1e-9)
    assert sequence_priority(doubles(errors).unsqueeze(0), eta).shape == (1, len(errors))


@pytest.mark.requirement("per-sequence")
def test_masked_steps_are_ignored():
    errors = torch.tensor([[2.0, -4.0, float("nan")], [float("nan"), 1.0, 0.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert sequence_priority(errors, 0.5, mask).tolist() == [0.5 * 4 + 0.5 * 3, 0.0]


def test_sequence_priority_rejects_other_shapes():
    with pytest.raises(ValueError, match=r"eta must be in \[0, 1\], got 1.5"):
        sequence_priority(torch.zeros(3), 1.5)
    with pytest.raises(ValueError, match=r"td_error's shape \[3\], got \[2\]"):
        sequence_priority(torch.zeros(3), mask=torch.ones(2, dtype=torch.bool))
