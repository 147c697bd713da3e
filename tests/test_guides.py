"""The guides run as readers run them, and end with agents that learn."""

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from trl_storages.datasets import from_arrays

TUTORIALS = Path(__file__).parents[1] / "tutorials"

pytestmark = [
    # TorchRL's collectors, trainers and losses warn of what is to change in them.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
]


@pytest.fixture
def results(tutorial):
    return tutorial("guide_results")


def test_each_drawn_picture_is_shown_in_a_guide(tutorial, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra 'tutorials'")
    tutorial("pictures").main(tmp_path)
    pages = "".join(page.read_text() for page in TUTORIALS.glob("*.md"))
    drawn = [path.name for path in tmp_path.iterdir()]
    assert drawn
    assert [name for name in drawn if f"](images/{name})" not in pages] == []


# Offline, with two goals a batch.


def test_a_batch_has_a_goal_for_the_value_and_one_for_the_actor(tutorial):
    offline_goals = tutorial("offline_goals")
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(600, 4)).cumsum(0)
    data = {
        "observations": observations,
        "actions": rng.uniform(-1, 1, (600, 2)),
        "timeouts": np.arange(1, 601) % 12 == 0,
    }
    storage = offline_goals.make_storage(data, "mixture", seed=0)
    batch = storage.sample(400)
    reached, goal = batch["next", "achieved_goal"], batch["desired_goal"]
    is_there = (reached - goal).norm(dim=-1, keepdim=True) <= offline_goals.NEAR
    assert torch.equal(batch["next", "terminated"], is_there)
    assert torch.equal(batch["next", "reward"], is_there.float() - 1)
    # A fifth of the value's goals are the transitions' own outcomes, and few others come so near.
    assert 80 <= (reached == goal).all(-1).sum() <= 160
    assert not torch.equal(goal, batch["actor_goal"])
    outcomes = storage[:]["next", "achieved_goal"].tolist()
    assert all(one in outcomes for one in batch["actor_goal"].tolist())


@pytest.mark.slow
def test_with_a_mixture_of_goals_values_rise_all_along_the_way_through_the_maze(tutorial):
    pytest.importorskip("gymnasium_robotics", reason="needs the extra 'tutorials'")
    offline_goals = tutorial("offline_goals")
    torch.manual_seed(0)
    data = offline_goals.roll_around(400, seed=0)
    storage, learner = offline_goals.make_storage(data, "mixture", seed=0), offline_goals.Learner()
    for _ in range(1_500):
        learner.update(storage.sample())
    # From the end of one arm around to that of the other; no episode has seen both.
    way = [(-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1)]
    standing = torch.tensor([[*place, 0, 0] for place in way]).float()
    goal = torch.tensor([way[-1]]).expand(len(way), 2)
    with torch.no_grad():
        values = learner.value(torch.cat([standing, goal], -1)).squeeze(-1)
    assert (values.diff() > 0).all(), values


# OGBench: files of the same form with unequal trajectories, in which a state is the number of its row.

ROWS, DISCOUNT = [9, 3, 14, 2], 0.8
ENDS = np.cumsum(ROWS) - 1


@pytest.fixture
def ogbench(tmp_path, monkeypatch):
    """The names that the section of the guide defines, and a file."""
    monkeypatch.chdir(tmp_path)
    page = (TUTORIALS / "datasets.md").read_text().partition("\n## OGBench\n")[2]
    names = {"np": np, "from_arrays": from_arrays}
    for block in re.findall(r"^```python\n(.*?)^```", page.partition("\n## ")[0], re.M | re.S):
        exec(block, names)
    rows = np.arange(sum(ROWS), dtype=np.float32)[:, None]
    np.savez("rows.npz", observations=rows, actions=rows, terminals=np.isin(rows[:, 0], ENDS))
    return SimpleNamespace(**names)


def rows_of(batch, *keys):
    return [batch[key].flatten().int().numpy() for key in keys]


def last_goals(is_last_a_goal):
    """Returns the rows that have a next row, and the last row of each that is a goal."""
    rows = np.setdiff1d(np.arange(sum(ROWS)), ENDS)
    return rows, ENDS[np.searchsorted(ENDS, rows)] - (not is_last_a_goal)


def goals_of_ogbench(size, p_current, p_random, is_geometric, is_last_a_goal):
    """Draws rows and their goals by the law of OGBench's GCDataset.

    A goal is the row itself with probability p_current, any row with probability p_random, or else a
    later row of the trajectory, if there is one: by a geometric number of steps that ends at the last
    goal, or by a uniform distance that is rounded.
    """
    rng, (rows, last) = np.random.default_rng(0), last_goals(is_last_a_goal)
    random, numbers = rng.choice(rows, size), rng.integers(len(rows), size=size)
    rows, last = rows[numbers], last[numbers]
    later = np.minimum(rows + rng.geometric(1 - DISCOUNT, size), last)
    if not is_geometric:
        share = rng.random(size)
        later = np.rint(share * np.minimum(rows + 1, last) + (1 - share) * last).astype(int)
    goals = np.where(rng.random(size) < p_random / (1 - p_current), random, later)
    return rows, np.where(rng.random(size) < p_current, rows, goals)


def assert_same_law(*draws):
    counts = [np.bincount(rows * sum(ROWS) + goals, minlength=900) for rows, goals in draws]
    counts = np.array(counts)[:, np.any(counts, 0)]
    assert (counts > 0).all()
    assert stats.chi2_contingency(counts).pvalue > 1e-4


def test_goals_of_the_value_follow_the_law_of_ogbench(ogbench):
    share = 0.5 / DISCOUNT
    mixture = {"geometric": share, "random": 0.3, "current": 0.7 - share}
    buffer = ogbench.load("rows.npz", seed=0)
    batch = ogbench.add_goals(buffer, mixture, ogbench.ValueGoals(), DISCOUNT).sample(200_000)
    rows, goals = rows_of(batch, "observation", "value_goal")
    others = goals_of_ogbench(200_000, 0.2, 0.3, is_geometric=True, is_last_a_goal=False)
    assert_same_law((rows, goals), others)
    assert ((rows == goals) == batch["next", "terminated"].flatten().numpy()).all()
    assert ((rows == goals) - 1 == batch["next", "reward"].flatten().numpy()).all()


def test_goals_of_the_actor_are_uniform_and_those_of_ogbench_are_rounded(ogbench):
    buffer = ogbench.load("rows.npz", seed=0)
    batch = ogbench.add_goals(buffer, "future", ogbench.ActorGoals()).sample(200_000)
    others = goals_of_ogbench(200_000, 0, 0, is_geometric=False, is_last_a_goal=True)
    for pairs, end in ((rows_of(batch, "observation", "actor_goal"), 1), (others, 0.5)):
        law = {}  # (row, goal) -> probability, where the nearest and the farthest goal weigh `end`
        for row, last in np.transpose(last_goals(True)).tolist():
            weights = np.ones(last - row)
            weights[[0, -1]] = end
            law |= {(row, row + 1 + n): w / weights.sum() for n, w in enumerate(weights)}
        counts = Counter(zip(*(it.tolist() for it in pairs), strict=True))
        assert counts.keys() == law.keys()
        expected = np.array([*law.values()]) * 200_000 / sum(law.values())
        assert stats.chisquare([counts[pair] for pair in law], expected).pvalue > 1e-4


def test_subgoals_are_k_steps_ahead_and_do_not_pass_the_goal(ogbench):
    mixture, subgoals = {"future": 0.5, "random": 0.5}, ogbench.Subgoals()
    buffer = ogbench.add_goals(ogbench.load("rows.npz", seed=0), mixture, ogbench.ActorGoals())
    buffer.append_transform(subgoals)
    for subgoals.k in (1, 4, 25):
        batch = buffer.sample(5_000)
        rows, goals = rows_of(batch, "observation", "actor_goal")
        low, target = rows_of(batch, "low_actor_goal", "high_actor_target")
        last = ENDS[np.searchsorted(ENDS, rows)]
        assert (low == np.minimum(rows + subgoals.k, last)).all()
        is_ahead = (rows < goals) & (goals <= last)
        assert (target == np.where(is_ahead, np.minimum(low, goals), low)).all()
        assert 2_500 < is_ahead.sum() < 4_000


# Recurrent.


@pytest.mark.slow
def test_what_follows_signs_more_often_than_half_the_time_has_a_memory(tutorial):
    recurrent = tutorial("recurrent")
    assert recurrent.train("memory", 0, recurrent.Budget(batches=48)) >= 0.75


def test_without_a_memory_exactly_half_of_the_signs_are_followed(tutorial):
    recurrent = tutorial("recurrent")
    assert recurrent.train("none", 0, recurrent.Budget(batches=3)) == 0.5


def test_targets_reach_n_steps_on_and_stop_where_nobody_has_been(tutorial):
    recurrent = tutorial("recurrent")
    storage = recurrent.PrioritizedReplayStorage(
        recurrent.Corridors.observation_space,
        recurrent.Corridors.action_space,
        storage_size=100,
        n_step=recurrent.N_STEP,
        discount=recurrent.DISCOUNT,
        sample_unit=recurrent.UNIT,
    )
    assert recurrent.STEPS == 6
    env = recurrent.Corridors(signs=[1, 0, 1, 1])
    observation, _ = env.reset()
    for _ in range(20):
        after, *outcome = env.step(1)
        storage.record(observation, 1, *outcome, after)
        observation = after
    rows = storage.sample(200).reshape(-1, recurrent.UNIT.num_steps)
    begin = recurrent.UNIT.burn_in
    # Of a row the value says when it was.
    when = rows["index"][:, begin:].float() + 1
    target, is_known = recurrent.UNIT.targets(rows, when, discount=recurrent.DISCOUNT)
    step = rows["index"][:, begin : begin + recurrent.UNIT.length]
    mask = rows["validity_mask"][:, begin : begin + recurrent.UNIT.length]
    n, gamma = recurrent.N_STEP, recurrent.DISCOUNT
    # Of the signs 1, 0, 1 of the first three junctions, the first and the third are followed.
    reward = sum(gamma**k * ((step + k == 5) | (step + k == 17)) for k in range(n))
    assert torch.equal(is_known[mask], (step + n < 20)[mask])
    expected = reward + gamma**n * (step + n + 1)
    assert torch.allclose(target[is_known], expected[is_known])


# A Trainer, and a plain script.


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["trainer", "script"])
def test_hindsight_learns_by_a_trainer_and_by_a_plain_script(tutorial, agent):
    torchrl_trainer = tutorial("torchrl_trainer")
    budget = torchrl_trainer.Budget(bits=5, steps=1_000)
    assert torchrl_trainer.train(agent, 0, budget) >= 0.90


def test_both_hand_over_the_same_rows(tutorial, monkeypatch):
    torchrl_trainer = tutorial("torchrl_trainer")
    monkeypatch.setattr(torchrl_trainer, "UPDATES", 0)
    storages = []

    def make_storage(*arguments, make=torchrl_trainer.make_storage):
        storages.append(make(*arguments))
        return storages[-1]

    monkeypatch.setattr(torchrl_trainer, "make_storage", make_storage)
    for agent in torchrl_trainer.AGENTS:
        torchrl_trainer.train(agent, 0, torchrl_trainer.Budget(bits=4, steps=256))
    by_trainer, by_script = storages
    for storage in storages:
        storage.validate()
    episodes = [storage.episodes.table() for storage in storages]
    assert sorted(episodes[0]["length"].tolist()) == sorted(episodes[1]["length"].tolist())
    assert (by_trainer[:] == by_script[:]).all()


# Half offline, half online.


@pytest.mark.slow
def test_half_of_each_batch_from_demonstrations_finds_what_chance_does_not(tutorial):
    rlpd = tutorial("rlpd")
    assert rlpd.train("rlpd", 0, rlpd.Budget(episodes=100, steps=1_000, tests=20)) >= 0.50


def test_data_and_steps_online_make_batches_of_both(tutorial):
    rlpd = tutorial("rlpd")
    paths = rlpd.demonstrate(3, seed=0)
    for path in paths:
        assert path["rewards"].sum() == path["terminals"].sum() == path["terminals"][-1]
        assert path["timeouts"][-1] != path["terminals"][-1]
        assert (np.abs(path["observations"]) <= 2).all()
    storages = rlpd.make_storages(paths, rlpd.Budget(steps=50), seed=0)
    assert len(storages[0]) == sum(len(path["actions"]) for path in paths)
    env = rlpd.Valley()
    observation, _ = env.reset(seed=0)
    for _ in range(20):
        action = env.action_space.sample()
        after, *outcome = env.step(action)
        storages[1].record(observation, action, *outcome, after)
        observation = after
    shares = {agent: rlpd.ensemble(storages, agent).sample()["buffer_ids"] for agent in rlpd.AGENTS}
    assert shares["rlpd"].float().mean() == 0.5
    assert shares["online"].float().mean() == 1


# Pixels, of which each frame is stored once.


def test_frames_stored_once_teach_what_plain_stacks_teach(tutorial):
    pixels = tutorial("pixels")
    budget = pixels.Budget(steps=120, before=60, every=6)
    found = {}
    for agent in pixels.STORED:
        torch.manual_seed(0)
        curve = []
        rate = pixels.train(agent, 3, budget, curve)
        found[agent] = rate, curve, torch.rand(3).tolist()
    assert found["frames"] == found["plain"]


@pytest.mark.slow
def test_balls_are_caught_from_pixels(tutorial, monkeypatch):
    pixels = tutorial("pixels")
    # Balls fall less deep, and chance catches 0.4.
    monkeypatch.setattr(pixels, "CELLS", 7)
    assert pixels.train("frames", 0, pixels.Budget(steps=1_800)) >= 0.70


# Results, at the whole budgets.


def test_the_results_that_are_kept_are_within_their_bounds(results):
    finished = results.read(results.RESULTS)
    runs = results.planned([*results.GUIDES], [0, 1, 2])
    records = [results.of_run(run, finished) for run in runs]
    assert None not in records
    assert all(map(results.meets, records))


def test_the_page_of_results_shows_the_table_of_the_guides_that_is_printed(results, capsys):
    assert results.main(["--table"]) == 0
    assert capsys.readouterr().out in (TUTORIALS / "results.md").read_text()


# What to switch on.


def test_parts_are_switched_on_one_by_one_and_together(tutorial, tmp_path, monkeypatch, capsys):
    script = tutorial("what_to_switch_on")
    task = {"env": "BitFlipping-v0", "algo": "dqn", "bits": 3, "steps": 576}
    monkeypatch.setattr(script, "TASKS", {"3 bits": task})
    monkeypatch.setattr(script, "TESTS", 2)
    names = "hindsight alone", "with all", "with all, in sequences"
    parts = {name: script.PARTS[name] for name in names}
    monkeypatch.setattr(script, "PARTS", parts)
    storages = []

    def make_storage(*arguments, make=script.train_her.make_storage, **further):
        storages.append(make(*arguments, **further))
        return storages[-1]

    monkeypatch.setattr(script.train_her, "make_storage", make_storage)
    path = tmp_path / "results.jsonl"
    options = ["--results", str(path), "--seeds", "0"]
    script.main(options)
    alone, *together = storages
    assert not hasattr(alone, "alpha")
    for storage in together:
        assert (storage.n_step, storage.alpha, storage.eta) == (3, 0.6, 0.996)
    single, sequences = (storage.sample() for storage in together)
    assert len(single) == len(sequences) == 256
    assert single.get("sequence_id", None) is None
    of_four = sequences.reshape(-1, 4)
    for key in ("sequence_id", "goal_index", "desired_goal"):
        assert (of_four[key] == of_four[key][:, :1]).all()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["part"] for line in lines] == [*parts]
    assert all(0 <= line["mean"] <= 1 and line["curve"][-1][0] >= 576 for line in lines)
    printed = capsys.readouterr().out
    script.main(options)
    assert len(storages) == 3
    assert capsys.readouterr().out == printed


def test_the_page_of_results_shows_what_was_switched_on(tutorial, capsys):
    tutorial("what_to_switch_on").main(["--table"])
    assert capsys.readouterr().out in (TUTORIALS / "results.md").read_text()
