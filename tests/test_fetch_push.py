"""The robot arm that pushes a block goes on after a kill as if nothing had been; its curves are kept."""

import itertools
import json
from pathlib import Path

import pytest
import torch

TUTORIALS = Path(__file__).parents[1] / "tutorials"
KEPT = [json.loads(line) for line in (TUTORIALS / "fetch_push.jsonl").read_text().splitlines()]
SHORT = {"NUM_ENVS": 2, "EPISODE_STEPS": 10, "UPDATES_PER_ROUND": 5, "BATCH_SIZE": 16}
TESTS = {"ROUNDS_PER_TEST": 2, "TEST_ROUNDS": 1, "LAST_TEST_ROUNDS": 1}


class Killed(BaseException):
    """As a signal, nothing catches it."""


@pytest.fixture
def script(tutorial, monkeypatch):
    pytest.importorskip("gymnasium_robotics", reason="needs the extra 'tutorials'")
    fetch_push = tutorial("fetch_push")
    for name, value in {**SHORT, **TESTS}.items():
        monkeypatch.setattr(fetch_push, name, value)
    return fetch_push


def agent_of(path):
    """Returns the numbers of the agent that is saved there."""
    agent, *_ = torch.load(path / "seed_3" / "agent.pt")
    return torch.cat([part.flatten().double() for part in agent.values()])


def test_a_run_that_is_killed_ends_like_one_that_is_not(script, tmp_path, monkeypatch):
    def run(name):
        kept = ["--results", str(tmp_path / f"{name}.jsonl"), "--output", str(tmp_path / "a.png")]
        script.main(["--seeds=3", "--steps=60", "--path", str(tmp_path / name), *kept])
        (line,) = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        return {key: value for key, value in json.loads(line).items() if key != "seconds"}

    def counted(method):
        def call(storage, *args):
            if next(calls) in at:
                raise Killed
            return method(storage, *args)

        return call

    calls, at = itertools.count(1), set()
    for name in ("record", "sample", "update_priority", "flush"):
        method = counted(getattr(script.HERReplayStorage, name))
        monkeypatch.setattr(script.HERReplayStorage, name, method)
    whole = run("whole")
    # A round makes 18 calls: killed while it is played, before priorities, while it learns, and saves.
    calls, at = itertools.count(1), {5, 17, 21, 29, 41, 62}
    times = 0
    while True:
        try:
            killed = run("killed")
            break
        except Killed:
            times += 1  # nobody holds the storage any more

    assert times == len(at)
    assert killed == whole
    assert [step for step, _ in whole["curve"]] == [40, 60]
    assert torch.equal(agent_of(tmp_path / "killed"), agent_of(tmp_path / "whole"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: f"seed {kept['seed']}")
def test_the_page_shows_the_kept_curves(kept):
    page = (TUTORIALS / "results.md").read_text()
    shown = ", ".join(f"{rate:.2f}" for _, rate in kept["curve"])
    assert f"| {kept['seed']} | {kept['curve'][-1][0]:,} | {shown} |" in page
