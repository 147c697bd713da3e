"""Thousands of environments: writes of one step of each, and large draws, in one process by turns.

`python -m tests.benchmarks.lanes [LANES ...]` prints a table in milliseconds of processor time: median,
mean and longest call, and in brackets the ratio to a plain ring of tensors. "loop" is a write and then
two draws of 8,192, as in FastTD3. `--rows` and `--writes` make it shorter.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.benchmarks.data import ACTION_SIZE, PARTS
from tests.benchmarks.results import describe_machine
from tests.benchmarks.tables import format_machine
from trl_storages import EpisodeWriter, PackedStorage, ReplayStorage

__all__ = ["main"]

LANES = (64, 4096, 16_384)
POOL = 16
DRAWS = (8192, 32_768)


class Ring:
    """A tensor `[E, T, ...]` a field."""

    def __init__(self, num_lanes: int, steps: int, one: TensorDict):
        items = one.items(True, True)
        self.fields = {
            k: torch.zeros(num_lanes, steps, *v.shape[2:], dtype=v.dtype) for k, v in items
        }
        self.size, self.steps, self.cursor = num_lanes * steps, steps, 0

    def extend(self, data: TensorDict) -> None:
        for key, ring in self.fields.items():
            ring[:, self.cursor % self.steps] = data[key][:, 0]
        self.cursor += 1

    def sample(self, batch_size: int) -> dict[Any, torch.Tensor]:
        at = torch.randint(self.size, (batch_size,))
        return {key: ring.flatten(0, 1).index_select(0, at) for key, ring in self.fields.items()}


class OfTorchRL:
    """Its storage of two dimensions has time first."""

    def __init__(self, rows: int):
        self.buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows, ndim=2))
        self.sample = self.buffer.sample

    def extend(self, data: TensorDict) -> None:
        self.buffer.extend(data.view(1, -1))


def steps(num_lanes: int) -> list[TensorDict]:
    """Returns steps `[E, 1]` each of which goes on from the one before, also the first from the last."""
    seen = [{part: torch.randn(num_lanes, 1, n) for part, n in PARTS.items()} for _ in range(POOL)]
    made = []
    for now, after in zip(seen, [*seen[1:], seen[0]], strict=True):
        done = torch.rand(num_lanes, 1, 1) < 0.02
        flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
        entries = {**after, "reward": torch.randn(num_lanes, 1, 1), **flags}
        action = torch.randn(num_lanes, 1, ACTION_SIZE)
        made.append(TensorDict({**now, "action": action, "next": entries}, [num_lanes, 1], "cpu"))
    return made


def measured(calls: dict[str, Callable[[Any], Any]], values: Sequence[Any]) -> Iterator[str]:
    """Lets all take turns with the same values; gives a cell for each."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    for value in values:
        for name, call in calls.items():
            begin = time.process_time()
            call(value)
            taken[name].append(1e3 * (time.process_time() - begin))
    gc.enable()
    ring = taken["ring"]
    for found in taken.values():
        told = [
            f"{of(found):.2f} ({of(found) / of(ring):.2f})"
            for of in (statistics.median, statistics.mean)
        ]
        yield ", ".join([*told, f"{max(found):.1f}"])


def compare(num_lanes: int, rows: int, writes: int) -> Iterator[str]:
    """Gives the lines of the table for one number of lanes."""
    pool, per_lane = steps(num_lanes), rows // num_lanes
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[str, Any] = {"ring": Ring(num_lanes, per_lane, pool[0])}
        for name, path in (("here", None), ("directory", f"{folder}/rows")):
            storage = PackedStorage(rows, num_envs=num_lanes, path=path)
            sides[name] = ReplayStorage(storage=storage, writer=EpisodeWriter(num_lanes))
        sides["torchrl"] = OfTorchRL(rows)
        for number in range(per_lane + POOL):
            for side in sides.values():
                side.extend(pool[number % POOL])
        write = {name: side.extend for name, side in sides.items()}
        sample = {name: side.sample for name, side in sides.items()}

        def loop(name: str) -> Callable[[TensorDict], None]:
            def call(data: TensorDict) -> None:
                write[name](data)
                for _ in range(2):
                    sample[name](DRAWS[0])

            return call

        turns: list[tuple[str, Any, Sequence[Any]]] = [("write", write, pool * (writes // POOL))]
        turns += [(f"draw {size:,}", sample, [size] * 10) for size in DRAWS]
        turns.append(("loop", {name: loop(name) for name in sides}, pool))
        for work, calls, values in turns:
            yield f"| {num_lanes:,} | {work} | " + " | ".join(measured(calls, values)) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lanes", nargs="*", type=int, help="else 64, 4096 and 16384")
    parser.add_argument("--rows", type=int, default=1 << 20)
    parser.add_argument("--writes", type=int, default=192, help="a multiple of 16")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(format_machine(describe_machine()), end="\n\n")
    print("| lanes | work | ring | here | here, in a directory | TorchRL |\n" + "|---" * 6 + "|")
    for num_lanes in chosen.lanes or LANES:
        for line in compare(num_lanes, chosen.rows, chosen.writes):
            print(line, flush=True)


if __name__ == "__main__":
    main()
