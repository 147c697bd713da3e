"""The agents in one file each run as readers run them, and the curves that are kept rise."""

import json
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[1] / "tutorials"
KEPT = [json.loads(line) for line in (TUTORIALS / "agent_curves.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_an_agent_trains_and_keeps_its_curve(name, tutorial, monkeypatch, tmp_path):
    script = tutorial(name)
    monkeypatch.setattr(script, "BATCH_SIZE", 16)
    monkeypatch.setattr(script, "FIRST_UPDATE", 100)
    options = ["--steps", "1000", "--seed", "3", "--results", str(tmp_path / "curves.jsonl")]

    curve = script.main(options)

    (line,) = (tmp_path / "curves.jsonl").read_text().splitlines()
    assert json.loads(line)["curve"] == [list(point) for point in curve]
    assert curve[-1][0] == 1000


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: f"{kept['agent']}-{kept['seed']}")
def test_kept_curves_rise(kept):
    returns = [value for _, value in kept["curve"]]
    least = {"DQN": 150, "SAC": -300}[kept["agent"]]
    assert returns[-1] > max(least, returns[0])


def test_the_page_shows_the_kept_curves():
    page = (TUTORIALS / "results.md").read_text()
    for kept in KEPT:
        shown = ", ".join(f"{value:,.0f}" for _, value in kept["curve"])
        steps = f"{kept['curve'][-1][0]:,}"
        assert f"| {kept['agent']}, {kept['env']} | {kept['seed']} | {steps} | {shown} |" in page


# Agents in a few lines. Without updates the greedy policy stays the one that acted.


def test_sac_samples_its_actions_in_a_vector_environment(tutorial):
    _, buffer, greedy = tutorial("vector_sac").train(steps=40)
    stored = buffer[:]
    differences = stored["action"] - greedy(stored["observation"])
    assert len(buffer) == 160
    assert differences.std() > 0.1


def test_a_network_with_stored_states_acts_greedily_and_explores(tutorial, monkeypatch):
    script = tutorial("stored_states")
    monkeypatch.setattr(script, "ANNEALED", 200)
    _, buffer, greedy = script.train(steps=500)
    late = buffer[-250:]
    assert 0.8 < (greedy(late) == late["action"]).float().mean() < 1
    assert late["state"].abs().sum(-1).gt(0).float().mean() > 0.8


def test_a_recurrent_policy_of_a_collector_acts_greedily_and_explores(tutorial, monkeypatch):
    script = tutorial("gru_collector")
    monkeypatch.setattr(script, "UPDATES", 0)
    monkeypatch.setattr(script, "ANNEALED", 200)
    _, buffer, greedy = script.train(steps=500)
    late = buffer[-250:]
    assert 0.8 < (greedy(late) == late["action"]).float().mean() < 1


def test_a_value_goal_and_an_actor_goal_teach_an_actor_to_walk(tutorial):
    two_goals = tutorial("two_goals")
    assert two_goals.train(600)[0] > two_goals.train(1)[0] + 0.2


def test_a_replay_buffer_on_disk_is_filled_and_resumed(tutorial, tmp_path):
    script = tutorial("pixels_on_disk")
    options = ["--path", str(tmp_path / "replay"), "--keep", "--workers", "0", "--steps", "600"]
    script.main(options)
    script.main(options)
    buffer = script.NStepReplayStorage.open(tmp_path / "replay", mode="r")
    assert len(buffer) == 1200
    assert len(buffer[:]["action"].unique()) == 3
