"""The agents in one file each run as readers run them, and the curves that are kept rise."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

TUTORIALS = Path(__file__).parents[1] / "tutorials"
KEPT = [json.loads(line) for line in (TUTORIALS / "agent_curves.jsonl").read_text().splitlines()]


def module_of(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, TUTORIALS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # As when the script is run: its directory is searched first.
    monkeypatch.syspath_prepend(TUTORIALS)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(request, monkeypatch):
    """The module of a tutorial, with small batches and few steps before the first update."""
    module = module_of(request.param, monkeypatch)
    monkeypatch.setattr(module, "BATCH_SIZE", 16)
    monkeypatch.setattr(module, "FIRST_UPDATE", 100)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


@pytest.mark.parametrize("script", ["dqn", "sac"], indirect=True)
def test_an_agent_trains_and_keeps_its_curve(script, tmp_path):
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


def test_the_kept_curves_are_drawn(tmp_path, monkeypatch):
    module_of("agent_curves", monkeypatch).main(["--output", str(tmp_path / "new" / "curves.png")])
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
