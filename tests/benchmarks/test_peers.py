"""The adapters of the benchmark do the work that they are timed for."""

import numpy as np
import pytest

from tests.benchmarks.data import (
    DISCOUNT,
    N_STEPS,
    flat_columns,
    goal_columns,
    goal_reward,
    take_rows,
)
from tests.benchmarks.peers import PEERS, load_peer
from tests.benchmarks.sampling import FLAT

# The other libraries warn about each other and about what they will drop.
pytestmark = pytest.mark.filterwarnings("ignore")

LIBRARIES = [name for name in PEERS if name != "raw"]
AT_ROOT = {"observation", "achieved_goal", "action"}
GOALS = {"desired_goal", "next_desired_goal"}


def draw(name, work, batch_size=64):
    """Returns a batch, the data it is drawn from, and the rows of the data that it holds."""
    peer = load_peer(name)
    if isinstance(peer, str):
        pytest.skip(peer)
    if work not in peer.WORKS:
        pytest.skip(f"{name} has nothing for {work}")
    columns = goal_columns(250)
    columns = flat_columns(columns) if work in FLAT else columns
    buffer = peer.WORKS[work](take_rows(columns, 0, 200), 250)
    buffer.write(buffer.prepare(take_rows(columns, 200, 250)))
    buffer.sample(batch_size)
    batch = buffer.columns_of(buffer.sample(batch_size))
    found = [(columns["observation"] == drawn).all(-1) for drawn in batch["observation"]]
    assert np.any(found, axis=1).all()
    return batch, columns, np.argmax(found, axis=1)


def assert_as_stored(batch, columns, rows, parts):
    for part in parts & batch.keys() & columns.keys():
        np.testing.assert_array_equal(batch[part], columns[part][rows], err_msg=part)


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
@pytest.mark.parametrize("work", ["uniform", "priorities", "recent"])
def test_drawn_rows_are_as_stored(name, work):
    batch, columns, rows = draw(name, work)

    assert_as_stored(batch, columns, rows, columns.keys())


@pytest.mark.parametrize("name", LIBRARIES)
def test_four_of_five_rows_have_another_goal_and_its_reward(name):
    batch, columns, rows = draw(name, "her")

    assert_as_stored(batch, columns, rows, columns.keys() - GOALS - {"reward"})
    reward = goal_reward(batch["next_achieved_goal"], batch["desired_goal"])
    np.testing.assert_array_equal(batch["reward"], reward)
    drawn = (batch["desired_goal"] != columns["desired_goal"][rows]).any(-1)
    assert 32 < drawn.sum() < 64


@pytest.mark.parametrize("name", LIBRARIES)
def test_rewards_of_three_steps_are_folded(name):
    batch, columns, rows = draw(name, "n_step")
    # Within three steps of the end nothing is folded yet where that is done on writing.
    whole = rows < 247

    assert_as_stored(batch, columns, rows, AT_ROOT)
    for reward, following, row in zip(
        batch["reward"][whole], batch["next_observation"][whole], rows[whole], strict=True
    ):
        ends = columns["done"][row : row + N_STEPS]
        steps = int(np.argmax(ends)) + 1 if ends.any() else N_STEPS
        expected = sum(DISCOUNT**step * columns["reward"][row + step] for step in range(steps))
        assert reward == pytest.approx(expected, rel=1e-6)
        # cpprb has no next observation for windows that the end of an episode cuts short.
        if steps == N_STEPS:
            np.testing.assert_array_equal(following, columns["next_observation"][row + steps - 1])


def test_everything_at_once_relabels_and_folds():
    batch, columns, rows = draw("ours", "everything")

    assert_as_stored(batch, columns, rows, AT_ROOT)
    np.testing.assert_array_equal(batch["desired_goal"], batch["next_desired_goal"])
    assert (batch["steps_to_next_obs"] > 1).any()
    assert {"priority_weight", "goal_index", "her_mask"} <= batch.keys()
