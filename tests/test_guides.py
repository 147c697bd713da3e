"""The guides run as readers run them, and end with agents that learn."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

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
