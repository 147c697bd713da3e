"""The adapters of the benchmark do the work that they are timed for."""

import numpy as np
import pytest

from tests.benchmarks.data import goal_columns, goal_reward, take_rows
from tests.benchmarks.peers import PEERS, load_peer

# The other libraries warn about each other and about what they will drop.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("unequal", [False, True])
def test_data_is_of_whole_episodes_whose_states_follow_one_another(unequal):
    columns = goal_columns(400, unequal=unequal)
    inside = ~columns["done"][:-1]

    for part in ("observation", "achieved_goal"):
        following = columns[f"next_{part}"][:-1] == columns[part][1:]
        np.testing.assert_array_equal(following.all(-1), inside)
    np.testing.assert_array_equal(columns["done"], columns["terminated"] | columns["truncated"])
    assert columns["terminated"].any()
    assert columns["truncated"].any()
    assert (np.diff(np.flatnonzero(columns["done"])) == 50).all() != unequal


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("work", ["uniform", "her"])
def test_batches_hold_rows_of_the_data(name, work):
    peer = load_peer(name)
    if isinstance(peer, str):
        pytest.skip(peer)
    if work not in peer.WORKS:
        pytest.skip(f"{name} has nothing for {work}")
    columns = goal_columns(250)
    buffer = peer.WORKS[work](take_rows(columns, 0, 200), 250)
    buffer.write(buffer.prepare(take_rows(columns, 200, 250)))

    batch = buffer.columns_of(buffer.sample(64))

    rows = np.array(
        [np.flatnonzero((columns["observation"] == o).all(-1)) for o in batch["observation"]]
    )[:, 0]
    assert (rows >= 200).any()
    relabelled = ("reward", "desired_goal", "next_desired_goal") if work == "her" else ()
    for part in batch.keys() & columns.keys() - set(relabelled):
        np.testing.assert_array_equal(batch[part], columns[part][rows], err_msg=part)
    if work == "her":
        reward = goal_reward(batch["next_achieved_goal"], batch["desired_goal"])
        np.testing.assert_array_equal(batch["reward"], reward)
        drawn = (batch["desired_goal"] != columns["desired_goal"][rows]).any(-1)
        assert 32 < drawn.sum() < 64
