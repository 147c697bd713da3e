"""RowWriter: what is joined and written at once is what field by field would write."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.storages import Layout
from trl_storages.storages.row_writer import RowWriter

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex128,
]
# Of one element, of several dimensions, and too large to be joined.
SHAPES = [(), (1,), (3,), (2, 2), (2000,)]
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
    kind = draw(st.sampled_from(["int", "slice", "block", "slots", "grid"]))
    size, slots = {
        "int": ([], 4),
        "slice": ([3], slice(2, 5)),
        "block": ([3, 2], slice(1, 7)),
        "slots": ([3], torch.tensor([7, 0, 3])),
        "grid": ([2, 2], torch.tensor([[7, 0], [3, 8]])),
    }[kind]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    entries = [
        torch.randint(0, 2, (*size, *field.shape), generator=generator).to(field.dtype)
        for field in layout.fields
    ]
    return layout, slots, torch.Size(size), entries


@given(writes())
def test_against_field_by_field(write):
    layout, slots, batch_size, entries = write
    rows = torch.full((NUM_ROWS, layout.num_words), -1)
    expected = rows.clone()
    RowWriter(layout, rows).write(slots, entries, batch_size)
    views = layout.views(expected)
    flat = slots if isinstance(slots, int | slice) else slots.reshape(-1)
    for field, entry in zip(layout.fields, entries, strict=True):
        views[field.key][flat] = entry.reshape(-1, *field.shape) if batch_size else entry
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_needs_gradients_is_written_without(dtype):
    layout = Layout({"a": (dtype, (2,)), "b": (dtype, (2,))})
    rows = torch.zeros(3, layout.num_words, dtype=torch.int64)
    entries = [torch.ones(1, 2, dtype=dtype, requires_grad=True) for _ in "ab"]
    RowWriter(layout, rows).write(slice(1, 2), entries, torch.Size([1]))
    assert layout.views(rows)["b"].tolist() == [[0, 0], [1, 1], [0, 0]]
