"""Times what calls of a storage in a Ray actor cost: `python -m tests.benchmarks.over_ray --help`.

Prints the bytes of the message and the milliseconds of the call, of this package's storage and of
TorchRL's prioritised buffer by turns, on a Ray of this machine alone: between machines the network
comes on top.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import torch
from ray import cloudpickle
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RayReplayBuffer,
    TensorDictReplayBuffer,
)

from tests.benchmarks.durability import transitions
from tests.benchmarks.results import describe_machine
from tests.benchmarks.tables import format_machine
from trl_storages import EpisodeWriter, PackedStorage, PERSampler, ReplayStorage
from trl_storages.replay.remote import in_actor

ROWS = 100_000


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.over_ray")
    parser.add_argument("--calls", type=int, default=200, help="of each kind, of each storage")
    parser.add_argument("--batch-size", type=int, default=256)
    return parser.parse_args()


def ours(batch_size: int) -> tuple[type, dict[str, Any]]:
    options = {
        "storage": partial(PackedStorage, ROWS),
        "writer": EpisodeWriter,
        "sampler": partial(PERSampler, ROWS),
    }
    return ReplayStorage, {**options, "batch_size": batch_size}


def theirs(batch_size: int) -> tuple[type, dict[str, Any]]:
    options = {
        "storage": partial(LazyTensorStorage, ROWS),
        "sampler": partial(PrioritizedSampler, ROWS, 0.6, 0.4),
    }
    return TensorDictReplayBuffer, {**options, "batch_size": batch_size}


def num_bytes(value: Any) -> int:
    """Of a message, as Ray pickles it."""
    buffers: list[Any] = []
    head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(head) + sum(len(buffer.raw()) for buffer in buffers)


def milliseconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def num_bytes_of_a_batch(kind: type, options: dict[str, Any]) -> int:
    """What an actor sends for `sample()`."""
    kind = in_actor(kind) if issubclass(kind, ReplayStorage) else kind
    replay = kind(**options)
    replay.extend(transitions(1, 1000))
    return num_bytes(replay.sample())


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    print(f"{format_machine(describe_machine())}, ray {ray.__version__}")
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    kinds = [make(arguments.batch_size) for make in (ours, theirs)]
    replays = [
        RayReplayBuffer(replay_buffer_cls=kind, remote_config={"num_cpus": 0}, **options)
        for kind, options in kinds
    ]
    batches = []
    for replay in replays:
        replay.extend(transitions(1, 1000))
        batches.append(replay.sample())
        batches[-1]["td_error"] = torch.rand(arguments.batch_size)
    names = [["index", "priority_stamp", "td_error"], ["index", "td_error"]]
    few = [batch.select(*keys) for batch, keys in zip(batches, names, strict=True)]
    sizes, calls = {}, {}
    sizes["sample"] = [num_bytes_of_a_batch(*kind) for kind in kinds]
    calls["sample"] = [replay.sample for replay in replays]
    for name, sent in (("priorities, whole batch", batches), ("priorities, selected", few)):
        sizes[name] = [num_bytes(batch) for batch in sent]
        calls[name] = [
            partial(replay.update_tensordict_priority, batch)
            for replay, batch in zip(replays, sent, strict=True)
        ]
    for steps in (1, 50, 1000):
        data, name = transitions(1, steps), f"extend, {steps} steps"
        sizes[name] = [num_bytes(data)] * 2
        calls[name] = [partial(replay.extend, data) for replay in replays]
    print(f"{'call':>24} {'here':>24} {'TorchRL':>24}   median, least")
    for name, both in calls.items():
        times: list[list[float]] = [[], []]
        for _ in range(arguments.calls):
            for call, taken in zip(both, times, strict=True):
                taken.append(milliseconds(call))
        cells = [
            f"{size:>9,} B {statistics.median(taken):>5.2f} {min(taken):>5.2f} ms"
            for size, taken in zip(sizes[name], times, strict=True)
        ]
        print(f"{name:>24}" + "".join(f"{cell:>28}" for cell in cells), flush=True)
    for replay in replays:
        replay.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
