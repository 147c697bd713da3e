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
