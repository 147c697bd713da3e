"""The adapters of the benchmark do the work that they are timed for."""

import numpy as np
import pytest

from tests.benchmarks.contest import FLAT
from tests.benchmarks.data import (
    DISCOUNT,
    LANES,
    N_STEPS,
    SEQUENCE_STEPS,
    flat_columns,
    goal_columns,
    goal_reward,
    stacked_columns,
    take_rows,
)
from tests.benchmarks.peers import PEERS, load_peer

# The other libraries warn about each other and about what they will drop.
pytestmark = pytest.mark.filterwarnings("ignore")

LIBRARIES = [name for name in PEERS if name != "raw"]
AT_ROOT = {"observation", "achieved_goal", "action"}
GOALS = {"desired_goal", "next_desired_goal"}


def adapter(name, work):
    """Returns an adapter, or skips the test where the library is missing or does other things."""
    peer = load_peer(name)
    if isinstance(peer, str):
        pytest.skip(peer)
    if work not in peer.WORKS:
        pytest.skip(f"{name} has nothing for {work}")
    return peer.WORKS[work]


def draw(name, work, batch_size=64, columns=None):
    """Returns a batch, the data it is drawn from, and the rows of the data that it holds."""
    kind = adapter(name, work)
    if columns is None:
        columns = goal_columns(250)
        columns = flat_columns(columns) if work in FLAT else columns
    buffer = kind(take_rows(columns, 0, 200), 250)
    buffer.write(buffer.prepare(take_rows(columns, 200, 250)))
    buffer.sample(batch_size)
    batch = buffer.columns_of(buffer.sample(batch_size))
    assert len(batch["observation"]) == batch_size
    return batch, columns, rows_of(batch, columns)


def rows_of(batch, columns):
    """Finds the rows of the data by their observations, which are all different."""
    row_of = {values.tobytes(): row for row, values in enumerate(columns["observation"])}
    return np.array([row_of[values.tobytes()] for values in np.asarray(batch["observation"])])


def assert_as_stored(batch, columns, rows, parts):
    for part in parts & batch.keys() & columns.keys():
        np.testing.assert_array_equal(batch[part], columns[part][rows], err_msg=part)


def test_data_is_of_whole_episodes_whose_states_follow_one_another():
    columns = goal_columns(400)
    inside = ~columns["done"][:-1]

    for part in ("observation", "achieved_goal"):
        following = columns[f"next_{part}"][:-1] == columns[part][1:]
        np.testing.assert_array_equal(following.all(-1), inside)
    np.testing.assert_array_equal(columns["done"], columns["terminated"] | columns["truncated"])
    assert columns["terminated"].any()
    assert columns["truncated"].any()
    assert (np.diff(np.flatnonzero(columns["done"])) == 50).all()


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("work", ["uniform", "priorities", "recent"])
def test_drawn_rows_are_as_stored(name, work):
    batch, columns, rows = draw(name, work)

    assert_as_stored(batch, columns, rows, columns.keys())


@pytest.mark.parametrize(
    ("name", "work"), [*((name, "her") for name in LIBRARIES), ("ours", "record_her")]
)
def test_four_of_five_rows_have_another_goal_and_its_reward(name, work):
    batch, columns, rows = draw(name, work)

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


@pytest.mark.parametrize("name", PEERS)
def test_sequences_are_steps_in_time_order(name):
    batch, columns, rows = draw(name, "sequences", batch_size=4 * SEQUENCE_STEPS)
    rows = rows.reshape(4, SEQUENCE_STEPS)

    # Ours repeat the last row of an episode that ends within; the others' stay whole, or go on.
    following = np.diff(rows, axis=1)
    assert np.isin(following, (0, 1) if name == "ours" else 1).all()
    if name in ("ours", "torchrl"):
        assert (rows[:, 0] // 50 == rows[:, -1] // 50).all()
    assert_as_stored(batch, columns, rows.ravel(), AT_ROOT)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("work", ["flat", "stacks"])
def test_what_is_stored_once_is_drawn_as_it_was_written(name, work):
    columns = stacked_columns(250) if work == "stacks" else flat_columns(goal_columns(250))
    batch, columns, rows = draw(name, work, columns=columns, batch_size=512)

    assert columns["done"][rows].any()
    assert_as_stored(batch, columns, rows, {"observation", "next_observation", "action"})


@pytest.mark.gpu
@pytest.mark.parametrize(
    "work", ["uniform", "her", "her_n_step", "everything", "n_step", "priorities", "recent"]
)
def test_batches_of_ours_arrive_where_they_are_wanted(work):
    columns = goal_columns(250)
    columns = flat_columns(columns) if work in FLAT else columns
    buffer = adapter("ours", work).configured(device="cuda")(take_rows(columns, 0, 200), 250)
    buffer.write(buffer.prepare(take_rows(columns, 200, 204)))
    assert {leaf.device.type for leaf in buffer.sample(64).values(True, True)} == {"cuda"}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("work", ["extend", "record", "record_lanes"])
def test_written_rows_replace_the_oldest(name, work):
    kind = adapter(name, work)
    columns = goal_columns(400)
    old, new = take_rows(columns, 0, 200), take_rows(columns, 200, 200 + 8 * LANES)
    buffer = kind(old, 200)
    for start in range(0, 8 * LANES, LANES):
        buffer.write(buffer.prepare(take_rows(new, start, start + LANES)))
    sampled = buffer.columns_of(buffer.sample(190))

    rows = rows_of(sampled, columns)
    # Of 200 rows the first 64 are gone, and 64 others are there.
    assert rows.min() >= 8 * LANES
    assert ((rows >= 200) & (rows < 200 + 8 * LANES)).any()
    kept = sampled.keys() & columns.keys() - {"terminated"}
    assert_as_stored(sampled, columns, rows, kept)


@pytest.mark.parametrize("work", ["her_n_step", "everything"])
def test_goals_and_folds_at_once(work):
    batch, columns, rows = draw("ours", work)

    assert_as_stored(batch, columns, rows, AT_ROOT)
    np.testing.assert_array_equal(batch["desired_goal"], batch["next_desired_goal"])
    led_to = (batch["next_observation"] != columns["next_observation"][rows]).any(-1)
    assert led_to.mean() > 0.8
    assert ("priority_weight" in batch) == (work == "everything")
    assert {"steps_to_next_obs", "goal_index", "her_mask"} <= batch.keys()
    for i, row in enumerate(rows):
        steps = int(np.argmax(np.append(columns["done"][row : row + N_STEPS], True))) + 1
        reached = columns["next_achieved_goal"][row : min(row + steps, row + N_STEPS)]
        expected = goal_reward(reached, batch["desired_goal"][i])
        assert batch["reward"][i] == pytest.approx(expected @ DISCOUNT ** np.arange(len(expected)))
