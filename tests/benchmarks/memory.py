"""How much memory a full storage takes, for the operating system.

Two fresh processes fill a storage, row block after row block, and draw from it: one with few rows, one
with many. What the second one takes more at its peak is what the further rows cost; interpreter,
libraries and their warm-up are in both. The peak is what `/usr/bin/time -v` prints as "Maximum
resident set size".
"""

import ctypes
import gc
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.benchmarks.data import goal_columns, take_rows, to_tensordict
from trl_storages import PackedStorage, ReplayStorage

__all__ = ["measure_memory", "resident_bytes"]

BLOCK = 1000


def peak_of_filling(num_rows: int) -> tuple[int, int]:
    """Fills a storage in this process; returns its peak and what the fields of all rows add up to."""
    torch.set_num_threads(1)
    block = to_tensordict(take_rows(goal_columns(BLOCK), 0, BLOCK))
    storage = ReplayStorage(storage=PackedStorage(num_rows), batch_size=256)
    for _ in range(num_rows // BLOCK):
        storage.extend(block)
    for _ in range(10):
        storage.sample()
    fields = sum(leaf.nbytes for leaf in block.values(True, True)) // BLOCK
    return peak_of_process(), fields * num_rows


def peak_of_process() -> int:
    """Returns the most bytes that this process has had in memory."""
    status = Path("/proc/self/status")
    if status.exists():
        # On Linux `getrusage` of a new process begins with the peak of the one that started it.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def resident_bytes() -> int:
    """Returns the bytes that this process has in memory now; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    if status.exists():
        gc.collect()
        with suppress(OSError, AttributeError):
            # The C library keeps what was freed; others than glibc have no such function.
            ctypes.CDLL(None).malloc_trim(0)
        for line in status.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return 1024 * int(line.split()[1])
    return 0


def measure_memory(num_rows: int) -> dict[str, float]:
    """Measures what rows cost.

    Args:
        num_rows: of the large storage, a multiple of 1000; the small one holds a hundredth.

    Returns:
        `rows`, the further rows; `bytes`, what they take at the peak; `fields`, what their fields add
        up to; and `ratio` of the two.
    """
    few, many = (BLOCK * max(size // BLOCK, 1) for size in (num_rows // 100, num_rows))
    measured = {}
    for size in (few, many):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            measured[size] = pool.submit(peak_of_filling, size).result()
    taken, fields = (measured[many][i] - measured[few][i] for i in range(2))
    return {
        "rows": many - few,
        "baseline": measured[few][0],
        "bytes": taken,
        "fields": fields,
        "ratio": taken / fields,
    }
