"""Compressed frames are byte by byte as documented, and decode to the frames that were written."""

# Letters as in the package.
# ruff: noqa: N803, N806

import os
import subprocess
import sys

import numpy as np
import pytest

from trl_storages.kernels import SEPARATE, SHARED, frames

#: Bytes of a row of pixels.
WIDTH = 4


class Stream:
    """Frames `[N, 8 C]` written one after another, as next observations of single frames."""

    def __init__(self, images, K=4, ring=100_000):
        N, size = images.shape
        C = size // 8
        words = images.view(np.int64)
        block = np.concatenate([words[:-1], np.arange(N - 1)[:, None], words[1:]], 1)
        entries, self.records = np.zeros((N + 5, 2), np.int64), np.zeros((1, ring), np.uint8)
        sizes = (0, C, 0, C, C), 1, C, K, WIDTH
        continuity = np.array([SEPARATE] + [SHARED] * (N - 2), np.uint8)
        tips, states = np.zeros((1, C), np.int64), np.zeros((1, 3), np.int64)
        self.store = entries, self.records, tips, states, np.zeros(1, np.int64), *sizes
        lanes, offsets, entry = np.zeros(1, np.int64), np.array([0, N - 1]), np.arange(N - 1)
        checksum_tables = np.zeros((0, 3), np.int64), np.zeros(0, np.int64)
        frames.copy_in(self.store, lanes, offsets, block, continuity, entry, checksum_tables)
        self.block, self.positions = block, entries[:N, 0] >> 8
        self.backs = (entries[:N, 0] & frames.BACK).tolist()

    def record(self, n):
        at = int(self.positions[n])
        size = int.from_bytes(self.records[0, at : at + 4].tobytes(), "little")
        return self.records[0, at + 4 : at + 4 + size].tolist()

    def read(self, at, last):
        out = np.empty((len(at), self.block.shape[1]), np.int64)
        frames.gather(self.store, np.array(at), np.array(last), out)
        return out


def image(size=16, **values):
    made = np.zeros(size, np.uint8)
    for at, value in values.items():
        made[int(at[1:])] = value
    return made


def test_records_by_hand():
    first = image(_0=5, _1=5, _4=7, _5=5, _8=7, _9=5)
    second = first.copy()
    second[[2, 3, 6, 15]] = 1, 2, 3, 4
    third = np.append(second[:15], np.uint8(9))
    stream = Stream(np.stack([first, second, second, third]))
    # Of a keyframe what it differs in from the row above: 5 5 0 0 | 2 0 0 0 | 0 ... | -7 -5 0 0
    assert stream.record(0) == [0, 5, 5, 5, 0, 0, 2, 7, 2, 249, 251]
    # Two equal bytes within a run are copied; three begin another run.
    assert stream.record(1) == [2, 5, 1, 2, 7, 5, 3, 8, 1, 4]
    assert stream.record(2) == []
    assert stream.record(3) == [15, 1, 9]
    assert stream.backs == [0, 1, 2, 3]
    assert stream.positions.tolist() == [0, 15, 29, 33]


def test_long_skips_and_runs():
    images = np.zeros((2, 800), np.uint8)
    images[1, 300:] = np.arange(500) % 7 + 1
    images[1, 799] = 0
    stream = Stream(images)
    skip, changed = [255, 45], images[1, 300:799].tolist()
    assert stream.record(1) == [*skip, 255, *changed[:255], 0, 244, *changed[255:]]


def test_every_kth_frame_is_a_keyframe():
    images = np.zeros((10, 16), np.uint8)
    images[:, 3] = np.arange(10)
    assert Stream(images, K=4).backs == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_a_frame_that_changes_much_is_a_keyframe_where_that_is_shorter():
    images = np.zeros((3, 160), np.uint8)
    images[1, :100] = 200  # of equal rows, which a keyframe stores in a few bytes
    images[2] = images[1]
    assert Stream(images).backs == [0, 0, 1]


def test_incompressible_frames_take_two_percent_more_at_most():
    images = np.random.default_rng(0).integers(0, 256, (50, 7056)).astype(np.uint8)
    stream = Stream(images, K=16, ring=1_000_000)
    assert stream.positions[-1] / 49 + 8 < 1.02 * 7056
    assert frames.most_bytes(7056) + 8 < 1.02 * 7056


@pytest.mark.parametrize("K", [1, 2, 16])
def test_whatever_is_written_reads_back(K):
    rng, total = np.random.default_rng(0), 0
    for size, ring in ((8, 120), (24, 400), (600, 9000)):
        for noise in (2, 256):
            images = rng.integers(0, noise, (40, size)).astype(np.uint8)
            for n in range(1, 40):
                kept = rng.random(size) < rng.choice([0.3, 0.95, 1])
                images[n, kept] = images[n - 1, kept]
            # A ring that wraps holds the last ones.
            stream = Stream(images, K=K, ring=ring)
            end = stream.positions[-1] + frames.most_bytes(size)
            live = np.flatnonzero(stream.positions > end - ring)
            first = next(n for n in live if not stream.backs[n])
            at = rng.permutation(np.arange(first, 39))
            last = rng.permutation(at)
            C, found = size // 8, stream.read(at, last)
            assert (found[:, :C] == stream.block[at, :C]).all()
            assert (found[:, C:] == stream.block[last, C:]).all()
            taken = np.empty((len(at), 2, 3), np.uint8)
            frames.take(stream.store, at + 1, 0, 4, taken)
            assert (taken[:, 1] == images[at + 1, 4:7]).all()
            assert (taken[:, 0] == images[at, 4:7]).all()
            total += len(at)
    assert total > 60


FUZZ = """
import numpy as np
from trl_storages.kernels import frames
rng = np.random.default_rng(0)
for trial in range(60):
    entries = rng.integers(-2**63, 2**63 - 1, (2 * 20, 3))
    records = rng.integers(0, 256, (2, 150)).astype(np.uint8)
    if trial % 2:
        records[:, 0:4], records[:, 1:] = (60, 0, 0, 0), records[:, 1:] % 9
        entries[:, 0] = rng.integers(0, 150, 40) << 8 | rng.integers(0, 20, 40)
    tips, known = np.zeros((2, 6), np.int64), np.zeros((2, 3), np.int64)
    reset_count, at = np.zeros(1, np.int64), rng.permutation(38) + 1
    store = entries, records, tips, known, reset_count, (2, 4, 0, 4, 4), 2, 3, 4, 5
    out = np.empty((38, 2 * 2 + 3 + 3 + 2), np.int64)
    frames.gather(store, at, rng.permutation(at), out)
    frames.take(store, at, 1, 4, np.empty((38, 2, 3), np.uint8))
    known = frames.are_records(entries[:, 0], int(entries[0, 0] >> 8), records[0], 4, 3)
"""


def test_damaged_records_are_decoded_within_bounds():
    """Loops run as Python raise if they read outside of an array."""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", FUZZ], check=True, env=environment)
