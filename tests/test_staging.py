"""Rows that are staged and put into a table are what field by field would write."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.kernels import backend, device, host
from trl_storages.kernels.tables import Block
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
    rows = stage(layout, entries, torch.Size([1]), CPU).words()
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
    views = layout.views(stage(layout, entries, torch.Size([2]), CPU).words())
    assert all(torch.equal(views[key], entry) for key, entry in entries.items())


def test_what_windows_take_from_other_rows_lies_together():
    """Of elements of one size, whatever the order in which the fields are named."""
    reward, seen = ("next", "reward"), ("next", "seen")
    floats = dict.fromkeys((reward, "seen", seen, "action"), (torch.float32, (2,)))
    layout = Layout({**floats, ("next", "done"): (torch.bool, (1,)), "mark": (torch.bool, (1,))})
    assert layout.keys == ("seen", "action", reward, seen, "mark", ("next", "done"))
    assert layout.parts[1].tolist() == [[16, 16, 16, 40], [33, 33, 7, 40]]


LAYOUT = Layout(
    {
        "seen": (torch.uint8, (3,)),
        ("next", "seen"): (torch.uint8, (3,)),
        "kept": (torch.float32, (1,)),
        ("next", "kept"): (torch.float32, (1,)),
    }
)


def drawn_rows(number, generator):
    """Entries of rows that are often alike, and which of them end an episode."""
    entries = {
        field.key: torch.randint(0, 2, (number, *field.shape), generator=generator).to(field.dtype)
        for field in LAYOUT.fields
    }
    return entries, torch.randint(0, 4, (number,), generator=generator) == 0


@pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])
@given(data=st.data())
def test_rows_that_do_not_continue_the_row_before_them(kernels, data):
    num_lanes, num_steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    before, room = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    ring = kernels.Ring(3 * room, 3, CPU)
    rows = torch.zeros(3 * room, LAYOUT.num_words, dtype=torch.int64)
    table = kernels.RowTable(rows)

    def new(number):
        entries, done = drawn_rows(number, generator)
        fields = [entries[key] for key in LAYOUT.keys]
        made = kernels.NewRows(fields, LAYOUT.places, number, LAYOUT.num_words, done, CPU)
        return entries, done, made

    last = {}
    for _ in range(before):
        entries, done, made = new(3)
        slots = ring.append(made, Block(1), table)
        last = {"slots": slots, "done": done}
    lanes = torch.randperm(3, generator=generator)[:num_lanes]
    entries, done, made = new(num_lanes * num_steps)
    order = torch.randperm(len(done), generator=generator).view(num_lanes, num_steps)
    if data.draw(st.booleans()):
        order = None
    cut = torch.randint(0, 4, (num_lanes, num_steps), generator=generator) == 0
    pairs = pairs_of(LAYOUT, ["seen", "kept"])
    there = table if last else None
    found = ring.find_gaps(made, Block(num_steps, lanes.tolist(), order, cut), pairs, there)
    found = torch.zeros_like(cut) if found is None else found
    places = torch.arange(len(done)).view(cut.shape) if order is None else order
    stored = LAYOUT.views(rows)
    for lane, step in np.ndindex(num_lanes, num_steps):
        row, number = places[lane, step], lanes[lane]
        if step == 0:
            goes_on = bool(last) and not last["done"][number]
            led_to = {
                key: stored["next", key][last["slots"][number]] if last else None
                for key in ("seen", "kept")
            }
        else:
            goes_on = not done[places[lane, step - 1]]
            led_to = {key: entries["next", key][places[lane, step - 1]] for key in ("seen", "kept")}
        is_gap = (
            goes_on
            and not cut[lane, step]
            and any(not torch.equal(entries[key][row], led_to[key]) for key in led_to)
        )
        assert bool(found[lane, step]) == is_gap


@pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])
def test_rows_that_lie_in_the_table_themselves(kernels):
    """As they were before any of them was overwritten."""
    rows = torch.arange(12).view(6, 2)
    expected = rows.clone()
    expected[[1, 2]] = rows[[0, 1]]
    moved = kernels.NewRows([rows[:2]], np.array([[0, 16]]), 2, 2, None, CPU)
    kernels.RowTable(rows).put(torch.tensor([1, 2]), moved)
    assert torch.equal(rows, expected)


def test_twins_of_another_kind_are_not_compared():
    layout = Layout({"seen": (torch.uint8, (3,)), ("next", "seen"): (torch.float32, (3,))})
    assert pairs_of(layout, ["seen"]).shape == (0, 2)
