"""The table of learning results: no run is made twice, and the guide shows what was measured."""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

FLIPPING = "BitFlipping-v0"


@pytest.fixture
def script(tutorial):
    return tutorial("learning_results")


@pytest.fixture
def small(script, monkeypatch):
    """Two rows with a budget of one batch of steps past the random ones."""
    task = script.train_her.Task(576, steps_per_update=4, bits=3, at_least=0.0, at_most=1.0)
    tasks = {(FLIPPING, algo): task for algo in ("dqn", "td3")}
    monkeypatch.setattr(script.train_her, "TASKS", tasks)
    return tasks


@pytest.fixture
def trained(script, small, monkeypatch):
    """The algorithms, seeds and names of the agents that were trained, without the training."""
    agents = []

    def train(args, storage, name):
        assert storage.sampler.num_goals == (4 if name == script.train_her.WITH else 0)
        agents.append((args.algo, args.seed, name))
        return script.train_her.Curve(name, [64, args.steps], [0.0, 0.5])

    monkeypatch.setattr(script.train_her, "train", train)
    return agents


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_finished_run_is_a_line_and_is_never_made_again(script, trained, tmp_path, capsys):
    path = tmp_path / "new" / "results.jsonl"
    options = ["--only", "*:dqn", "--seeds", "0", "--results", str(path)]
    assert script.main(options) == 0
    first, second = lines(path)
    assert [first["hindsight"], second["hindsight"]] == [True, False]
    assert first["curve"] == [[64, 0.0], [576, 0.5]]
    assert first["success"] == 0.5
    assert first["versions"]["torch"] == torch.__version__
    printed = capsys.readouterr()
    assert "2/2: BitFlipping-v0, dqn, without hindsight, seed 0: success 0.50" in printed.err
    assert printed.out.count("\n") == 3

    trained.clear()
    assert script.main(options) == 0
    assert trained == []
    assert capsys.readouterr().out == printed.out

    path.write_text(json.dumps(first) + "\n")
    script.main(options)
    assert trained == [("dqn", 0, "without hindsight")]
    assert lines(path)[0] == first


# What was measured, at its full budgets; the tutorial's own tests train on smaller ones.


@pytest.fixture
def measured(script):
    """Every run of the table that lies beside the script, with its success rate."""
    finished = script.read(script.RESULTS)
    runs = script.planned(script.rows_named(["*"]), [0, 1, 2])
    return {run: finished[run]["success"] for run in runs}


@pytest.mark.requirement("bit-flip")
@pytest.mark.parametrize("algo", ["dqn", "ddpg", "td3", "sac"])
def test_only_with_hindsight_bits_are_flipped_on_each_seed(measured, algo):
    rates = {True: [], False: []}
    for run, success in measured.items():
        if (run.env, run.algo) == (FLIPPING, algo):
            rates[run.hindsight].append(success)
    assert len(rates[True]) == len(rates[False]) == 3
    assert min(rates[True]) >= (0.95 if algo == "dqn" else 0.90)
    assert max(rates[False]) <= (0.10 if algo == "dqn" else 0.20)


def test_the_guide_shows_the_table_that_is_printed(script, capsys):
    assert script.main(["--table"]) == 0
    assert capsys.readouterr().out in (ROOT / "tutorials/results.md").read_text()
