"""Rows and folds of both backends, against NumPy and against each other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_storages.kernels import device, host

BACKENDS = pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def random_rows(seed, num_rows, num_words):
    noise = torch.empty(num_rows, num_words, dtype=torch.int64)
    return noise.random_(generator=torch.Generator().manual_seed(seed))


def random_slots(seed, shape, num_rows):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-num_rows, num_rows, shape, generator=generator)


@BACKENDS
@pytest.mark.parametrize("shape", [(), (0,), (40,), (3, 5)])
@pytest.mark.parametrize("num_words", [1, 34, 300])
def test_whole_rows(kernels, shape, num_words):
    rows = random_rows(0, 20, num_words)
    slots = random_slots(1, shape, 20)
    picked = kernels.RowTable(rows).pick(slots)
    np.testing.assert_array_equal(picked.numpy(), rows.numpy()[slots.numpy()])
    assert picked.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()


@BACKENDS
def test_slots_of_other_dtypes_and_strides(kernels):
    rows, slots = random_rows(0, 20, 3), random_slots(1, (4, 6), 20)
    table = kernels.RowTable(rows)
    assert torch.equal(table.pick(slots.int()), rows[slots])
    assert torch.equal(table.pick(slots.T), rows[slots.T])
    assert torch.equal(table.pick(slots[:, 1::2]), rows[slots[:, 1::2]])


@BACKENDS
@pytest.mark.parametrize("num_rows", [0, 40])
@pytest.mark.parametrize("spans", [[], [(0, 8, 8)], [(3, 9, 1), (8, 1200, 30), (8, 40, 30)]])
@pytest.mark.parametrize("everywhere", [True, False])
def test_rows_that_others_lend_some_bytes(kernels, num_rows, spans, everywhere):
    rows, slots = random_rows(0, 20, 300), random_slots(1, (num_rows,), 20)
    out = random_rows(2, num_rows, 200)
    before = bits(out).numpy().copy()
    spans = np.array([(*span, 1600) for span in spans], np.int64).reshape(-1, 4)
    where = None if everywhere else random_slots(3, (num_rows,), 20) < 0
    kernels.RowTable(rows).copy_into(out, slots, spans, where)
    for row in range(num_rows):
        expected = before[row]
        for start, to, size, _ in spans if everywhere or where[row] else []:
            expected[to : to + size] = bits(rows)[slots[row], start : start + size]
        np.testing.assert_array_equal(bits(out)[row].numpy(), expected)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex128])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (0,), (2, 0)])
def test_a_field(kernels, dtype, shape):
    rows = random_rows(0, 20, 16) & 0x0101010101010101  # bytes that are bool as well
    slots, start = random_slots(1, (4, 2), 20), 16
    shape = torch.Size(shape)
    fields = [(8, torch.int64, torch.Size([1])), (start, dtype, shape)]
    words, picked = kernels.RowTable(rows).pick_fields(slots, fields)
    assert torch.equal(words, rows[slots][..., 1:2])
    size = shape.numel() * dtype.itemsize
    expected = rows.numpy().view(np.uint8)[slots.numpy(), start : start + size]
    assert (picked.dtype, picked.shape) == (dtype, (4, 2, *shape))
    np.testing.assert_array_equal(bits(picked).reshape(4, 2, size).numpy(), expected)


@BACKENDS
@pytest.mark.parametrize("slot", [20, -21, 2**40])
def test_a_slot_beyond_the_rows(kernels, slot):
    table = kernels.RowTable(random_rows(0, 20, 3))
    with pytest.raises(IndexError):
        table.pick(torch.tensor([0, slot]))
    with pytest.raises(IndexError):
        table.pick_fields(torch.tensor([slot]), [(0, torch.int64, torch.Size([1]))])


@BACKENDS
def test_rows_are_put_where_they_belong(kernels):
    rows, block = torch.zeros(20, 5, dtype=torch.int64), random_rows(0, 3, 5)
    new = kernels.NewRows([block], np.array([[0, 40]]), 3, 5, None, torch.device("cpu"))
    kernels.RowTable(rows).put(torch.tensor([19, 0, 7]), new)
    expected = torch.zeros(20, 5, dtype=torch.int64)
    expected[[19, 0, 7]] = block
    assert torch.equal(rows, expected)


@BACKENDS
def test_a_fold_by_hand(kernels):
    rewards = torch.tensor([[1.0, 1.0], [2.0, float("inf")], [4.0, float("nan")]]).double()
    weights = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    length = torch.tensor([3, 1])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        folded = kernels.fold(rewards.to(dtype), length, weights, dtype)
        assert folded.dtype is dtype
        assert folded.tolist() == [3.0, 1.0]


@settings(max_examples=50)
@given(
    rewards=st.lists(st.lists(st.floats(), min_size=4, max_size=4), min_size=1, max_size=6).map(
        lambda rows: torch.tensor(rows, dtype=torch.float64)
    ),
    gamma=st.floats(0, 1),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16]),
)
def test_folds_are_the_same_bit_for_bit(rewards, gamma, seed, dtype):
    rewards = rewards.to(dtype)
    num_steps, generator = len(rewards), torch.Generator().manual_seed(seed)
    length = torch.randint(1, num_steps + 1, (4,), generator=generator)
    weights = torch.tensor(gamma, dtype=torch.float64) ** torch.arange(num_steps)
    compiled, tensors = (it.fold(rewards, length, weights, dtype) for it in (host, device))
    # Of a NaN only that it is one is promised.
    assert torch.equal(compiled.isnan(), tensors.isnan())
    compiled, tensors = compiled.double(), tensors.double()
    assert torch.equal(bits(compiled.nan_to_num(0.0)), bits(tensors.nan_to_num(0.0)))
    for sample in range(4):
        total = 0.0
        for step in range(int(length[sample])):
            total += float(weights[step] * rewards[step, sample])
        rounded = torch.tensor(total, dtype=torch.float64).to(dtype)
        np.testing.assert_equal(float(compiled[sample]), float(rounded))


def test_on_a_gpu(gpu):
    table = device.RowTable(torch.zeros(20, 5, dtype=torch.int64, device=gpu))
    slots = torch.zeros(4, dtype=torch.int64, device=gpu)
    places, words = np.array([[0, 40]]), table.pick(slots)
    table.put(slots, device.NewRows([words], places, 4, 5, None, gpu))
    [field] = table.pick_fields(slots, [(8, torch.float32, torch.Size([3]))])
    assert field.shape == (4, 3)
    weights = torch.ones(2, dtype=torch.float64, device=gpu)
    rewards = torch.ones(2, 4, device=gpu)
    assert device.fold(rewards, slots + 1, weights, torch.float32).shape == (4,)
