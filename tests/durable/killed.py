"""Kills writers and looks at what they leave: `python -m durable.killed random DIRECTORY LANES KILLS`,
or `inside DIRECTORY LANES STRIDE`.

Runs in a process of its own, which forks a writer that is imported already, kills it, and opens what
it left. Prints a line of JSON.
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
from durable.rows import check, make, priority_of, write

from trl_storages import storages

torch.set_num_threads(1)

SIZE = 24


def work(storage, rng, acknowledge):
    """Writes one block of steps, at times to some lanes only, and sets some priorities."""
    lanes = storage.episodes.num_envs
    some = None
    if lanes > 1 and rng.random() < 0.3:
        some = torch.tensor(sorted(rng.sample(range(lanes), rng.randint(1, lanes))))
    write(storage, rng.choice([1, 1, 1, 2, 5]), some)
    acknowledge(storage)
    if rng.random() < 0.3:
        batch = storage.sample()
        batch["td_error"] = priority_of(batch["index"], storage)
        storage.update_tensordict_priority(batch)
    if rng.random() < 0.1:
        storage.flush()


def fork_writer(path, lanes, seed, shared, body):
    """Starts a process that opens the storage and works; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        storage = make(path, lanes, SIZE)

        def acknowledge(storage):
            tell(shared, storage.episodes.num_steps_written.tolist())

        body(storage, random.Random(seed), acknowledge)
    finally:
        os._exit(0)


def tell(shared, cursors):
    shared[: 8 * len(cursors)] = b"".join(cursor.to_bytes(8, "little") for cursor in cursors)


def acknowledged(shared, lanes):
    return [int.from_bytes(shared[8 * lane : 8 * lane + 8], "little") for lane in range(lanes)]


def inspect(path, lanes, shared):
    """Opens what a killed writer left. Returns the steps written to each lane."""
    storage = make(path, lanes, SIZE)
    check(storage)
    cursors = storage.episodes.num_steps_written.tolist()
    told = acknowledged(shared, lanes)
    ahead = [there - known for there, known in zip(cursors, told, strict=True)]
    # What was acknowledged is there, and at most the one write that was going on.
    assert all(0 <= extra <= 5 for extra in ahead), (cursors, told)
    assert len({extra for extra in ahead if extra}) <= 1, (cursors, told)
    assert len(storage) == sum(min(cursor, SIZE // lanes) for cursor in cursors)
    if len(storage):
        storage.sample()
    storage.storage.journal.close()
    tell(shared, cursors)
    return cursors


def at_random(path, lanes, kills, shared):
    """Kills writers after a few milliseconds, each of which goes on where the last was killed."""
    rng = random.Random(lanes)

    def forever(storage, rng, acknowledge):
        shared[-8:] = b"ready   "
        while True:
            work(storage, rng, acknowledge)

    cursors, kill = [0] * lanes, 0
    # On a busy machine a writer may be killed before it has written: then more are.
    while kill < kills or (min(cursors) * lanes <= 2 * SIZE and kill < 20 * kills):
        kill += 1
        shared[-8:] = bytes(8)
        pid = fork_writer(path, lanes, kill, shared, forever)
        end = time.monotonic() + 60
        while shared[-8:] != b"ready   " and time.monotonic() < end:
            time.sleep(1e-3)
        time.sleep(rng.random() * 6e-3)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        cursors = inspect(path, lanes, shared)
    return {"kills": kill, "wraps": min(cursors) * lanes / SIZE}


def inside(path, lanes, stride, shared):
    """Kills writers at every so many lines of the journal's code, in a write of each kind."""
    folder = str(Path(storages.__file__).parent)

    def overwrite(storage):
        slots = storage.episodes.slots_by_age(torch.arange(5))
        storage.storage.set(slots, storage.storage.get(slots), set_cursor=False)

    def prioritise(storage):
        batch = storage.sample()
        batch["td_error"] = priority_of(batch["index"], storage)
        storage.update_tensordict_priority(batch)

    kinds = {
        "write": lambda storage: write(storage, 3),
        "overwrite": overwrite,
        "prioritise": prioritise,
        "flush": lambda storage: storage.flush(),
    }
    done = 0
    for kind in kinds.values():
        line, ended = -done % stride, False
        while not ended:
            line += stride

            def until(storage, _rng, acknowledge, line=line, kind=kind):
                acknowledge(storage)
                left = line

                def trace(frame, event, _arg):
                    nonlocal left
                    if not frame.f_code.co_filename.startswith(folder):
                        return None
                    if event == "line":
                        left -= 1
                        if not left:
                            os.kill(os.getpid(), signal.SIGKILL)
                    return trace

                sys.settrace(trace)
                kind(storage)
                sys.settrace(None)
                acknowledge(storage)

            status = os.waitpid(fork_writer(path, lanes, 0, shared, until), 0)[1]
            ended = not os.WIFSIGNALED(status)
            inspect(path, lanes, shared)
            done += not ended
    return {"kills": done, "kinds": len(kinds)}


def main():
    mode, path, lanes, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    shared = mmap.mmap(-1, 4096)
    storage = make(path, lanes, SIZE)
    write(storage, 1)  # the layout
    if mode == "inside":
        write(storage, SIZE // lanes)
    tell(shared, storage.episodes.num_steps_written.tolist())
    storage.storage.journal.close()
    del storage
    result = {"random": at_random, "inside": inside}[mode](path, lanes, kills, shared)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
