"""Kills writers and looks at what they leave: `python -m durable.killed random DIRECTORY LANES KILLS`,
or `inside` or `forgetting` with `DIRECTORY LANES STRIDE`.

Runs in a process of its own, which forks a writer that is imported already, kills it, and opens what
it left. Prints a line of JSON.
"""

import json
import mmap
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from durable.rows import check, is_torn, make, priority_of, write

from trl_storages import disk, rows

torch.set_num_threads(1)

SIZE = 24
FOLDERS = tuple(str(Path(package.__file__).parent) for package in (disk, rows))


def work(storage, rng, acknowledge):
    """Writes one block of steps, at times to some lanes only, and sets some priorities."""
    lanes = storage.episodes.num_envs
    some = None
    if lanes > 1 and rng.random() < 0.3:
        some = torch.tensor(sorted(rng.sample(range(lanes), rng.randint(1, lanes))))
    write(storage, rng.choice([1, 1, 1, 2, 5]), some)
    acknowledge(storage)
    if rng.random() < 0.3:
        prioritise(storage)
    if rng.random() < 0.1:
        storage.flush()


def prioritise(storage):
    batch = storage.sample()
    batch["td_error"] = priority_of(batch["index"], storage)
    storage.update_tensordict_priority(batch)


def fork_writer(path, lanes, seed, shared, body):
    """Starts a process that opens the storage and works; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        body_of_writer(path, lanes, seed, shared, body)
    finally:
        os._exit(0)


def body_of_writer(path, lanes, seed, shared, body):
    def acknowledge(storage):
        tell(shared, storage.episodes.num_steps_written.tolist())

    body(make(path, lanes, SIZE), random.Random(seed), acknowledge)


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
    begin(path, lanes, shared, 0)
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
    begin(path, lanes, shared, SIZE // lanes)

    def overwrite(storage):
        slots = storage.episodes.slots_by_age(torch.arange(5))
        storage.storage.set(slots, storage.storage.get(slots), set_cursor=False)

    kinds = {
        "write": lambda storage: write(storage, 3),
        "overwrite": overwrite,
        "prioritise": prioritise,
        "flush": lambda storage: storage.flush(),
    }
    kills = {}
    for name, kind in kinds.items():

        def body(storage, _rng, acknowledge, kind=kind):
            acknowledge(storage)
            kind(storage)
            acknowledge(storage)

        kills[name] = 0
        for killed in each_line(stride, sum(kills.values()), path, lanes, shared, body):
            inspect(path, lanes, shared)
            kills[name] += killed
    return {"kills": kills}


def each_line(stride, start, path, lanes, shared, body):
    """Kills a writer at every so many lines; yields after each whether it was, and last False."""
    line = -start % stride
    while True:
        line += stride
        killed = fork_killed(line, lambda: body_of_writer(path, lanes, 0, shared, body))
        yield killed
        if not killed:
            return


def fork_killed(line, body):
    """Runs `body` in a process that is killed at the n-th line of the storages' code.

    Returns:
        whether it got there.
    """
    pid = os.fork()
    if not pid:
        left = line

        def trace(frame, event, _arg):
            nonlocal left
            if not frame.f_code.co_filename.startswith(FOLDERS):
                return None
            if event == "line":
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        status = 1
        try:
            sys.settrace(trace)
            body()
            sys.settrace(None)
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0, "the writer failed"
    return os.WIFSIGNALED(status)


def forgetting(path, lanes, stride, _shared):
    """Kills writers that forget rows, load others, make a directory or delete it.

    Each leaves what there was, what there should be, or nothing where everything is replaced.
    """

    built = path.with_name("built")
    storage = make(built, lanes, SIZE)
    write(storage, SIZE // lanes + 5)
    prioritise(storage)
    storage.storage.journal.close()
    source = make(path.with_name("source"), lanes, SIZE)
    write(source, SIZE // lanes + 1)
    source.dumps(path.with_name("dump"))
    saved = source.state_dict()
    per_lane = SIZE // lanes
    before, loaded = per_lane + 5, per_lane + 1
    kinds = {
        # What it does, and which steps of a lane may be there afterwards, the oldest first.
        "empty": (lambda storage: storage.empty(), [(5, before), (0, 0)]),
        "keep": (lambda storage: storage.empty(keep_steps=3), [(5, before), (before - 3, before)]),
        "state": (lambda s: s.load_state_dict(saved), [(5, before), (0, 0), (1, loaded)]),
        "dump": (
            lambda s: s.loads(path.with_name("dump")),
            [(5, before), (0, 0), (1, loaded)],
        ),
        "delete": (lambda storage: storage.close(keep=False), [(5, before), (0, 0)]),
        "anew": (None, [(5, before), (0, 0), (0, 1)]),
        "make": (None, [(0, 0), (0, 1)]),
    }
    kills = {}
    for name, (act, allowed) in kinds.items():
        kills[name], line, killed = 0, -sum(kills.values()) % stride, True
        while killed:
            line += stride
            shutil.rmtree(path, ignore_errors=True)
            if name != "make":
                shutil.copytree(built, path)

            def body(name=name, act=act):
                if act is None:
                    write(make(path, lanes, SIZE, existsok=name == "anew"), 1)
                else:
                    act(make(path, lanes, SIZE))

            killed = fork_killed(line, body)
            kills[name] += killed
            if killed:
                look_at_history(path, lanes, allowed)
    return {"kills": kills}


def look_at_history(path, lanes, allowed):
    """Checks that a storage opens with one of the histories that are allowed, and goes on."""
    storage = make(path, lanes, SIZE)
    if storage.storage.initialized:
        storage.validate()
        rows = storage[:]
        steps = rows["observation"][:, 0].long().reshape(-1, lanes)
        found = (int(steps[0, 0]), int(steps[-1, 0]) + 1) if len(steps) else (0, 0)
        assert found in allowed, (found, allowed)
        assert torch.equal(steps, torch.arange(*found)[:, None].expand_as(steps))
        assert not is_torn(rows).any() if len(rows) else True
        storage.sampler.validate()
        write(storage, 3)
        storage.validate()
    storage.storage.close()


def begin(path, lanes, shared, num_steps):
    """Makes a storage of so many steps."""
    storage = make(path, lanes, SIZE)
    write(storage, 1 + num_steps)
    tell(shared, storage.episodes.num_steps_written.tolist())
    storage.storage.journal.close()


def main():
    mode, path, lanes, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    modes = {"random": at_random, "inside": inside, "forgetting": forgetting}
    print(json.dumps(modes[mode](path, lanes, kills, mmap.mmap(-1, 4096))))


if __name__ == "__main__":
    main()
