"""Times what it costs to keep rows on disk: `python -m tests.benchmarks.durability --help`.

Prints writes per second in memory (without the journal) and in a directory (with it), by turns in one
run, the time to open the directory again with its index rebuilt, and its size.
Absolute figures move between machines; the ratios are what to look at.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from tensordict import TensorDict

from tests.benchmarks.results import describe_machine
from tests.benchmarks.tables import format_machine
from trl_storages import EpisodeWriter, PackedStorage, ReplayStorage, UniformSampler

# The goal environment of the other benchmarks: 25 + 3 + 3 observation floats, 4 action floats.
FLOATS = {"observation": 25, "achieved_goal": 3, "desired_goal": 3}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.durability")
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each storage")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a turn")
    parser.add_argument("--path", type=Path, help="where to; a temporary directory otherwise")
    return parser.parse_args()


def transitions(lanes: int, steps: int) -> TensorDict:
    shape = (lanes, steps) if lanes > 1 else (steps,)
    observation = {key: torch.rand(*shape, size) for key, size in FLOATS.items()}
    flags = {key: torch.zeros(*shape, 1, dtype=torch.bool) for key in ("terminated", "truncated")}
    done = (torch.arange(steps) % 50 == 49).expand(shape)[..., None].clone()
    after = {**observation, **flags, "done": done, "reward": torch.rand(*shape, 1)}
    return TensorDict({**observation, "action": torch.rand(*shape, 4), "next": after}, shape)


def make(rows: int, lanes: int, directory: Path | None) -> ReplayStorage:
    return ReplayStorage(
        storage=PackedStorage(rows, scratch_dir=directory),
        writer=EpisodeWriter(lanes),
        sampler=UniformSampler(),
        batch_size=256,
    )


def rate(storage: ReplayStorage, data: TensorDict, seconds: float) -> float:
    """Returns calls per second."""
    calls, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        storage.extend(data)
        calls += 1
    return calls / passed


def sample_time(storage: ReplayStorage, seconds: float) -> float:
    """Returns microseconds of a sample."""
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        storage.sample()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    print(format_machine(describe_machine()))
    root = Path(tempfile.mkdtemp(dir=arguments.path))
    try:
        print(f"{'write':>24} {'in memory':>14} {'on disk':>14} {'ratio':>7}   calls a second")
        for lanes, steps in ((1, 1), (8, 1), (1, 50), (1, 1000)):
            data, path = transitions(lanes, steps), root / f"{lanes}x{steps}"
            storages = [make(arguments.rows, lanes, where) for where in (None, path)]
            rates: list[list[float]] = [[], []]
            for storage in storages:
                # Full, so that each write on disk keeps what it replaces.
                block = transitions(lanes, arguments.rows // lanes // 10)
                for _ in range(11):
                    storage.extend(block)
            for _ in range(arguments.rounds):
                for storage, taken in zip(storages, rates, strict=True):
                    taken.append(rate(storage, data, arguments.seconds))
            memory, disk = (statistics.median(taken) for taken in rates)
            name = f"{lanes} lanes x {steps} steps"
            print(f"{name:>24} {memory:>14,.0f} {disk:>14,.0f} {memory / disk:>6.1f}x", flush=True)
            if (lanes, steps) == (1, 1):
                times = [sample_time(storage, 1.0) for storage in storages]
                print(f"{'sample of 256':>24} {times[0]:>11,.0f} us {times[1]:>11,.0f} us")
            on_disk = storages[1]
            begin = time.perf_counter()
            on_disk.flush()
            flushed = time.perf_counter() - begin
            on_disk.storage.journal.close()
            size = sum(file.stat().st_blocks * 512 for file in path.iterdir())
            begin = time.perf_counter()
            opened = PackedStorage.open(path)
            took = time.perf_counter() - begin
            print(
                f"{'':>24} flush {flushed:.2f} s, reopened in {took:.2f} s, {size / arguments.rows:.1f} "
                f"bytes a row on disk for {opened.row_nbytes} in memory"
            )
            opened.journal.close()
            shutil.rmtree(path)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
