"""How long it takes to import the package, and to draw a first batch of hindsight.

`measure_cold_start` runs this file in new processes, first with an empty cache of compiled loops, as
after an installation, then with what the first process left there.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["measure_cold_start"]

ROOT = Path(__file__).parents[2]
STEPS = 200


def measure_cold_start(device: str) -> dict[tuple[str, str], float]:
    """Starts two processes, one after the other.

    Args:
        device: where batches arrive, as torch names it.

    Returns:
        microseconds, for "import" of "torchrl" alone and of "ours" (TorchRL included) in the later
        process, and for "first_batch" of a "new" installation and of a "later" process.
    """
    command = [sys.executable, "-m", "tests.benchmarks.cold_start", device]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        new, later = (
            json.loads(
                subprocess.run(
                    command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
                ).stdout.splitlines()[-1]
            )
            for _ in range(2)
        )
    return {
        ("torchrl", "import"): later["torchrl"],
        ("ours", "import"): later["torchrl"] + later["ours"],
        ("new", "first_batch"): new["first_batch"],
        ("later", "first_batch"): later["first_batch"],
    }


def main() -> None:
    """Prints the microseconds of the imports and of a first batch in this process."""
    begin = time.perf_counter()
    import torchrl.data  # noqa: F401

    imported = time.perf_counter()
    import trl_storages  # noqa: F401

    taken = {"torchrl": imported - begin, "ours": time.perf_counter() - imported}
    from tests.benchmarks.data import ACTION_SPACE, GOAL_SPACE, goal_columns
    from tests.benchmarks.peers.ours import Record, goal_reward
    from trl_storages import HERReplayStorage

    steps = Record.prepare(goal_columns(STEPS))
    begin = time.perf_counter()
    storage = HERReplayStorage(
        GOAL_SPACE, ACTION_SPACE, reward_fn=goal_reward, storage_size=10_000, device=sys.argv[1]
    )
    for step in steps:
        storage.record(*step)
    storage.sample()
    taken["first_batch"] = time.perf_counter() - begin
    print(json.dumps({name: 1e6 * seconds for name, seconds in taken.items()}))


if __name__ == "__main__":
    main()
