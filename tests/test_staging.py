"""Rows that are staged and put into a table are what field by field would write."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.kernels import backend
from trl_storages.rows import Layout, pairs_of, stage

CPU = torch.device("cpu")
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex128,
]
# Of one element, of several dimensions, of none, and a large one.
SHAPES = [(), (1,), (3,), (2, 2), (0,), (2000,)]
NUM_ROWS = 9


@st.composite
def writes(draw):
    """A layout, slots, a batch size, and entries that fit."""
    described = draw(
        st.lists(
            st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=6
        )
    )
    layout = Layout({f"field {number}": field for number, field in enumerate(described)})
    size, slots = draw(
        st.sampled_from([([], [4]), ([3], [2, 3, 4]), ([3], [7, 0, 3]), ([2, 2], [7, 0, 3, 8])])
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    entries = {
        field.key: torch.randint(0, 2, (*size, *field.shape), generator=generator).to(field.dtype)
        for field in layout.fields
    }
    return layout, torch.tensor(slots), torch.Size(size), entries


@given(writes())
def test_against_field_by_field(write):
    layout, slots, batch_size, entries = write
    rows = torch.full((NUM_ROWS, layout.num_words), -1)
    # What no field takes is zero, wherever a row is written.
    expected = rows.clone()
    expected[slots] = 0
    table = backend(CPU).RowTable(rows)
    table.put(slots, stage(layout, entries, batch_size, CPU))
    views = layout.views(expected)
    for field in layout.fields:
        views[field.key][slots] = entries[field.key].reshape(len(slots), *field.shape)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_needs_gradients_is_written_without(dtype):
    layout = Layout({"a": (dtype, (2,)), "b": (dtype, (2,))})
    entries = {key: torch.ones(1, 2, dtype=dtype, requires_grad=True) for key in "ab"}
    rows = stage(layout, entries, torch.Size([1]), CPU)
    assert layout.views(rows)["b"].tolist() == [[1, 1]]


def test_tensors_that_only_look_like_their_elements():
    """Conjugated, negated, expanded and transposed ones."""
    numbers = torch.arange(6).view(2, 3) * (1 + 2j)
    entries = {
        "conjugated": numbers.conj(),
        "negated": numbers.conj().imag,
        "expanded": torch.tensor([[1.5], [2.5]]).expand(2, 3),
        "transposed": torch.arange(6).view(3, 2).T,
    }
    layout = Layout.of(entries, 1)
    views = layout.views(stage(layout, entries, torch.Size([2]), CPU))
    assert all(torch.equal(views[key], entry) for key, entry in entries.items())


@given(st.data())
def test_rows_that_do_not_continue_the_row_before_them(data):
    num_lanes, num_steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    width = data.draw(st.sampled_from([1, 3, 9]))
    layout = Layout(
        {
            "seen": (torch.uint8, (width,)),
            ("next", "seen"): (torch.uint8, (width,)),
            "kept": (torch.float32, (1,)),
            ("next", "kept"): (torch.float32, (1,)),
        }
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def rows(number):
        entries = {
            field.key: torch.randint(0, 2, (number, *field.shape), generator=generator).to(
                field.dtype
            )
            for field in layout.fields
        }
        return stage(layout, entries, torch.Size([number]), CPU)

    stored, new = rows(5), rows(num_lanes * num_steps).view(num_lanes, num_steps, -1)
    slots = torch.randint(0, 5, (num_lanes,), generator=generator)
    found = backend(CPU).RowTable(stored).breaks(slots, new, pairs_of(layout, ["seen", "kept"]))
    found = torch.zeros(new.shape[:2], dtype=torch.bool) if found is None else found
    before, after = layout.views(stored), layout.views(new)
    for lane, step in np.ndindex(num_lanes, num_steps):
        led_to = {
            key: (
                before["next", key][slots[lane]]
                if step == 0
                else after["next", key][lane, step - 1]
            )
            for key in ("seen", "kept")
        }
        continues = all(torch.equal(after[key][lane, step], led_to[key]) for key in led_to)
        assert bool(found[lane, step]) == (not continues)


def test_twins_of_another_kind_are_not_compared():
    layout = Layout({"seen": (torch.uint8, (3,)), ("next", "seen"): (torch.float32, (3,))})
    assert pairs_of(layout, ["seen"]).shape == (0, 3)
