"""Collectors write from processes of their own while the learner samples, for as long as is asked.

It is seconds here; `SOAK_SECONDS=300 pytest tests/test_collectors_soak.py -s` goes on for five minutes
each.
"""

import os

import pytest
from tally_env import check_rows, goal_storage, learn, tally
from torchrl.collectors import MultiAsyncCollector

SECONDS = float(os.environ.get("SOAK_SECONDS", "1"))

# Collectors warn about options of their own that are to change, and about sharing a storage.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(("trajs_per_batch", "start"), [(2, "forkserver"), (None, "fork")])
def test_no_trajectory_is_ever_mixed(trajs_per_batch, start, start_processes_by):
    start_processes_by(start)
    storage = goal_storage(storage_size=150, n_step=3, discount=0.9, alpha=0.6, eta=0.99, c_min=10)
    collector = MultiAsyncCollector(
        [tally, tally],
        None,
        frames_per_batch=20,
        total_frames=-1,
        replay_buffer=storage,
        trajs_per_batch=trajs_per_batch,
    )

    collector.start()
    try:
        num_batches = learn(storage, wraps=8, seconds=SECONDS)
    finally:
        collector.async_shutdown()

    check_rows(storage)
    assert len(storage[:]["observation"][:, 0].unique()) == 2
    if trajs_per_batch:
        # Only the oldest episode may have been cut, by overwriting.
        assert storage.episodes.episodes()["finished"].all()
    wraps = storage.write_count // storage.episodes.capacity
    print(f"{num_batches} batches sampled while the ring was written {wraps} times, nothing mixed")
