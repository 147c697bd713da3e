"""Memory for batches: that of a batch which is gone serves the next one, and no other."""

import gc

import pytest
import torch

from trl_storages.kernels import memory
from trl_storages.kernels.memory import new_batch

LARGE = (1 << 19) + 3  # words, from about where on the C library may not keep it


@pytest.mark.parametrize("size", [3, 1 << 20, LARGE])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int64, torch.complex128])
def test_memory_is_of_the_shape_and_dtype(size, dtype):
    found = new_batch((size // dtype.itemsize, 1), dtype)
    assert found.shape == (size // dtype.itemsize, 1)
    assert found.dtype is dtype
    assert found.is_contiguous()
    assert found.data_ptr() % 64 == 0


def test_memory_is_lent_again_once_nobody_uses_it():
    first = new_batch((LARGE,))
    place, view = first.data_ptr(), first[5:7]
    view.fill_(1)
    del first
    # A view keeps the batch.
    second = new_batch((LARGE,))
    assert second.data_ptr() != place
    second.fill_(2)
    assert view.tolist() == [1, 1]
    array = view.numpy()
    del view, second
    third, fourth = new_batch((LARGE,)), new_batch((LARGE,))
    assert place not in (third.data_ptr(), fourth.data_ptr())
    del array
    gc.collect()
    assert new_batch((LARGE,)).data_ptr() == place


def test_little_memory_is_kept():
    for size in range(LARGE, LARGE + 5):
        batches = [new_batch((size,)) for _ in range(4)]
        del batches
    assert len(memory._spare) <= 2
    assert all(len(spare) <= 2 for spare in memory._spare.values())
