"""Priority formulas against values worked out by hand, naive loops and their properties."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.functional.priorities import (
    draw_weight,
    importance_weight,
    sequence_priority,
)

exponents = st.floats(0, 1)
priorities = st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=20)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.requirement("per-draws")
def test_draw_weights_by_hand():
    # Square roots of 1, 4, 9, 16.
    weight = draw_weight(doubles([0.0, 3.0, 8.0, 15.0]), alpha=0.5, eps=1.0)
    assert weight.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert draw_weight(doubles([0.0, 7.0]), alpha=0.0, eps=1e-6).tolist() == [1.0, 1.0]


@pytest.mark.requirement("per-draws")
def test_importance_weights_by_hand():
    # (1/w)^0.5 is 1, 0.707107, 0.577350, 0.5.
    weight = importance_weight(1.0 / doubles([1.0, 2.0, 3.0, 4.0]), beta=0.5)
    assert weight.tolist() == pytest.approx([1.0, 0.7071067812, 0.5773502692, 0.5], abs=1e-9)
    # The mean of 1, 2, 3, 4 is 2.5: without normalising (2.5/w)^1.
    assert importance_weight(2.5 / doubles([1.0, 4.0]), beta=1.0).tolist() == [2.5, 0.625]


@pytest.mark.requirement("per-draws")
@given(priorities, exponents, exponents)
def test_importance_weights_follow_from_the_probabilities(values, alpha, beta):
    weights = [(value + 1e-3) ** alpha for value in values]
    raw = [(len(values) * weight / sum(weights)) ** -beta for weight in weights]
    for reference, scale in ((min(weights), max(raw)), (sum(weights) / len(weights), 1.0)):
        got = importance_weight(reference / doubles(weights), beta=beta)
        assert got.tolist() == pytest.approx([each / scale for each in raw], rel=1e-9)


@given(priorities, exponents)
def test_numpy_arrays_give_the_same_numbers(values, alpha):
    tensor = draw_weight(doubles(values), alpha=alpha, eps=1e-6)
    array = draw_weight(np.array(values), alpha=alpha, eps=1e-6)
    np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-12)


@pytest.mark.requirement("per-sequence")
def test_sequence_priority_by_hand():
    # 0.9 * 1 + 0.1 * 1/4, and with alpha 0.5 after it sqrt(0.925).
    priority = sequence_priority(torch.tensor([0.0, 0.0, 0.0, -1.0]), eta=0.9)
    assert priority.item() == pytest.approx(0.925)
    assert draw_weight(priority, alpha=0.5, eps=0.0).item() == pytest.approx(0.9617692, abs=1e-6)


@pytest.mark.requirement("per-sequence")
@given(
    st.lists(st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4), min_size=1),
    st.floats(0, 1),
)
def test_sequence_priority_is_the_loop(errors, eta):
    expected = [
        eta * max(abs(e) for e in row) + (1 - eta) * sum(abs(e) for e in row) / 4 for row in errors
    ]
    got = sequence_priority(doubles(errors), eta)
    assert got.tolist() == pytest.approx(expected, abs=1e-9)
    assert sequence_priority(doubles(errors).unsqueeze(0), eta).shape == (1, len(errors))


@pytest.mark.requirement("per-sequence")
def test_masked_steps_of_a_sequence_count_for_nothing():
    errors = torch.tensor([[2.0, -4.0, float("nan")], [float("nan"), 1.0, 0.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert sequence_priority(errors, 0.5, mask).tolist() == [0.5 * 4 + 0.5 * 3, 0.0]


def test_sequence_priority_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"eta must be in \[0, 1\], got 1.5"):
        sequence_priority(torch.zeros(3), 1.5)
    with pytest.raises(ValueError, match=r"td_error's shape \[3\], got \[2\]"):
        sequence_priority(torch.zeros(3), mask=torch.ones(2, dtype=torch.bool))
