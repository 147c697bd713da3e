"""Rows on a GPU: no device mix-up, and nothing waits for the GPU."""

import pytest
import torch

from trl_storages.entries import DeviceEntries, FrameStack, Layout
from trl_storages.index import EpisodeIndex

KIND = (torch.float32, (3,))
STACK = (torch.uint8, (2, 4), FrameStack(2))
FIELDS = {"observation": KIND, ("next", "observation"): KIND, "reward": (torch.float32, (1,))}
STACKS = {"pixels": STACK, ("next", "pixels"): STACK}


@pytest.mark.requirement("devices")
@pytest.mark.parametrize("fields", [FIELDS, FIELDS | STACKS], ids=["plain", "stack"])
def test_rows_stay_on_the_device(gpu, fields):
    layout = Layout(fields)
    rows = DeviceEntries(layout, EpisodeIndex(8, stack=layout.frames), gpu)
    entry = torch.tensor([3, 9, 5], device=gpu)
    words = torch.zeros(3, layout.row_words, dtype=torch.int64, device=gpu)
    rows._copy_in(words, entry)
    assert rows.gather(entry, entry).device == gpu
    assert rows.gather(entry, entry).shape == words.shape
    for key, kind in fields.items():
        assert rows.take(key, entry).device == gpu
        assert rows.take(key, entry).shape == (3, *kind[1])
    rows.rewrite("reward", entry, torch.ones(3, 1, device=gpu))
