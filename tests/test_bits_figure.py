"""The figure of the hindsight paper: runs are made once, and the kept ones are those that are planned."""

import pytest


@pytest.fixture
def script(tutorial, monkeypatch):
    module = tutorial("bits_figure")
    monkeypatch.setattr(module, "STEPS_PER_BIT", 320)
    return module


def test_runs_are_made_once_and_drawn(script, tmp_path, capsys):
    kept, picture = tmp_path / "runs.jsonl", tmp_path / "new" / "figure.png"
    options = ["--bits", "2", "--seeds", "5", "--results", str(kept), "--output", str(picture)]

    script.main(options)
    lines = kept.read_text()
    script.main(options)

    assert kept.read_text() == lines
    assert lines.count("\n") == 2
    assert capsys.readouterr().err.count("with hindsight, seed 5") == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_only_with_hindsight_many_bits_are_flipped(script, monkeypatch):
    monkeypatch.setattr(script, "STEPS_PER_BIT", 1024)
    finished = script.learning_results.read(script.RESULTS)

    assert {*finished} <= {*script.planned(script.BITS, script.SEEDS)}
    assert {run.bits for run in finished} == {*script.BITS}
    for run, record in finished.items():
        if run.bits >= 20:
            assert (record["success"] >= 0.5) == run.hindsight
