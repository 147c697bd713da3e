"""Reads what another process writes: `python -m durable.following DIRECTORY ROWS KILLS`.

Forks a writer whose ring wraps every second and 4 readers, and prints what the readers saw as JSON. The
writer is killed so many times meanwhile, and another one takes its place.
"""

import json
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from durable.rows import is_torn, make, write
from goal_data import AsDrawn

from trl_storages import HERSampler, ReplayStorage, UniformSampler

torch.set_num_threads(1)

SIZE, LANES, STEPS = 2000, 4, 5
READERS, BATCH, SECONDS = 4, 512, 4


def writer(path, shared):
    storage = make(path, LANES, SIZE, sampler=UniformSampler())
    begin, before = time.perf_counter(), int(storage.episodes.num_steps_written[0])
    written = before
    while shared[0] == 0:
        write(storage, STEPS)
        written = int(storage.episodes.num_steps_written[0])
        wait = begin + (written - before) * LANES / SIZE - time.perf_counter()
        time.sleep(max(wait, 0))
    shared[8:16] = (written * LANES // SIZE).to_bytes(8, "little")


def reader(path, number, shared, rows):
    sampler = HERSampler() if number % 2 else UniformSampler()
    generator = torch.Generator().manual_seed(number)
    storage = ReplayStorage.open(
        path,
        mode="r",
        sampler=sampler,
        transform=AsDrawn(),
        batch_size=BATCH,
        generator=generator,
    )
    newest = seen = 0
    end = time.monotonic() + SECONDS
    # Until the ring has been written anew more than twice, and the last writer was killed, however busy
    # the machine is.
    while (
        seen < rows // READERS
        or newest <= 2 * SIZE // LANES
        or time.monotonic() < end
        or not shared[1]
    ):
        batch = storage.sample()
        torn = is_torn(batch)
        if torn.any():
            raise AssertionError(batch[torn])
        seen += BATCH
        newest = max(newest, int(batch["observation"][:, 0].max()))
    at = 16 * (number + 1)
    shared[at : at + 16] = seen.to_bytes(8, "little") + newest.to_bytes(8, "little")


def fork(body, *args):
    pid = os.fork()
    if not pid:
        status = 1
        try:
            body(*args)
            status = 0
        finally:
            os._exit(status)
    return pid


def main():
    path, rows, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    shared = mmap.mmap(-1, 4096)
    storage = make(path, LANES, SIZE, sampler=UniformSampler())
    write(storage, SIZE // LANES)
    storage.close()
    del storage
    writing = fork(writer, path, shared)
    reading = [fork(reader, path, number, shared, rows) for number in range(READERS)]
    rng = random.Random(0)
    for _ in range(kills):
        time.sleep(0.1 + rng.random() * 0.1)
        os.kill(writing, signal.SIGKILL)
        os.waitpid(writing, 0)
        writing = fork(writer, path, shared)
    shared[1] = 1
    failed = [os.waitpid(pid, 0)[1] for pid in reading]
    shared[0] = 1
    failed.append(os.waitpid(writing, 0)[1])
    words = [int.from_bytes(shared[at : at + 8], "little") for at in range(8, 16 * READERS + 16, 8)]
    print(
        json.dumps(
            {"failed": failed, "wraps": words[0], "seen": words[1::2], "newest": words[2::2]}
        )
    )


if __name__ == "__main__":
    main()
