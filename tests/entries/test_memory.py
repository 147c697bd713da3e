"""Memory of evicted rows is released to the system."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from entries import fill

from trl_storages.entries import Arena, Block, HostEntries, Layout, arena_sizes
from trl_storages.entries.arena import CAN_RELEASE
from trl_storages.index import EpisodeIndex

LANES, STEPS, BLOCK = 2, 10_000, 500
KIND = (torch.float64, (60,))
FIELDS = {"observation": KIND, ("next", "observation"): KIND, ("next", "done"): (torch.bool, (1,))}


def resident(array):
    """Returns the bytes of the mappings around an array that are in memory."""
    begin, end, total, counts = array.ctypes.data, array.ctypes.data + array.nbytes, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            counts = int(found[1], 16) < end and begin < int(found[2], 16)
        elif counts and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.requirement("stored-once")
@pytest.mark.skipif(not CAN_RELEASE, reason="this system can't release memory")
@pytest.mark.parametrize("is_shared", [False, True])
def test_memory_of_evicted_rows_is_released(is_shared):
    # One more lane is never written.
    layout, index = Layout(FIELDS), EpisodeIndex((LANES + 1) * STEPS, LANES + 1)
    room = arena_sizes(layout, index)
    arena = Arena.shared(**room) if is_shared else Arena(**room)
    rows = HostEntries(layout, index, arena)
    block = torch.zeros(LANES * BLOCK, layout.row_words, dtype=torch.int64)
    done = np.arange(LANES * BLOCK) % 50 == 49
    offsets, cut = np.arange(LANES + 1) * BLOCK, np.zeros(LANES * BLOCK, bool)
    most = 0
    while index.cursors[0] < 8 * STEPS:  # several times around the entries of a lane
        values = torch.arange(len(block) + 1).double()[:, None] + float(index.cursors[0])
        fill(layout, "observation", block, values[:-1].expand(-1, 60))
        fill(layout, ("next", "observation"), block, values[1:].expand(-1, 60))
        rows.append(Block(np.arange(LANES), offsets, block.numpy(), done, cut), cuts_gaps=True)
        if index.cursors[0] % (STEPS // 2) == 0:
            most = max(most, resident(arena.arrays["entries"]))
    live = LANES * STEPS * layout.entry_words * 8
    assert LANES * room["lane_bytes"] > 2 * live
    assert most < 1.2 * live
    entry = rows.entries_of(index.live_slots())
    steps = rows.take(("next", "observation"), entry) - rows.take("observation", entry)
    assert (steps == 1).all()
