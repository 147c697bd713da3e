"""The command of the benchmark measures, tells, keeps and draws what it says."""

import itertools

import numpy as np
import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks import contest, sections
from tests.benchmarks.contest import Plan
from tests.benchmarks.measure import Effort, Turn, measure
from tests.benchmarks.readme import format_readme
from tests.benchmarks.results import Report, Result, pick, ratio
from tests.benchmarks.sections import SECTIONS, run_section
from tests.benchmarks.tables import format_report
from tests.benchmarks.targets import TARGETS, outcomes

pytestmark = pytest.mark.filterwarnings("ignore")

TINY = Plan(
    rows=(200, 400),
    batch_sizes=(16, 32),
    peers=("ours", "columns", "raw"),
    effort=Effort(rounds=2, calls=2),
)


def result(peer, *rounds, work="uniform", batch_size=256, section="sampling", rows=1000):
    return Result(
        section=section,
        work=work,
        peer=peer,
        rows=rows,
        batch_size=batch_size,
        rounds=[float(taken) for taken in rounds],
    )


def test_sides_take_turns_and_the_first_one_is_thrown_away():
    order = []
    turns = {
        name: Turn(call=lambda name=name: order.append(name), before=lambda: order.append("-"))
        for name in "ab"
    }

    rounds = measure(turns, Effort(rounds=2, calls=2, seconds=10))

    assert "".join(order) == "-b-b-a-a" + "-a-a-b-b" + "-b-b-a-a"
    assert [len(taken) for taken in rounds.values()] == [2, 2]


@pytest.mark.parametrize("processor_time", [False, True])
def test_calls_that_are_timed_together_count_as_one_each(processor_time):
    calls = itertools.count()
    turn = Turn(call=lambda: sum(range(10**4)) + next(calls), repeat=7)

    rounds = measure(
        {"": turn}, Effort(rounds=1, calls=3, seconds=10, processor_time=processor_time)
    )

    assert next(calls) == 2 * 3 * 7
    assert 1 < rounds[""][0] < 10**5


def test_a_slow_side_has_one_call_a_turn():
    calls = itertools.count()
    turn = Turn(call=lambda: next(calls))

    measure({"": turn}, Effort(rounds=3, calls=100, seconds=0.0))

    assert next(calls) == 4


def test_ratios_are_of_the_same_rounds():
    ours, theirs = result("ours", 10, 100, 20), result("torchrl", 20, 300, 40)

    assert ratio(theirs, ours) == 2
    assert theirs.median == 40


@pytest.mark.parametrize("section", [*SECTIONS, "profile"])
def test_a_section_can_be_told_and_kept(section, tmp_path, monkeypatch):
    monkeypatch.setattr(contest, "NEW_ROWS", 4)
    monkeypatch.setattr(sections, "OF_OURS", ("uniform", "n_step"))
    report = run_section(section, TINY)
    report.machine = {"processor": "x", "cores": 1, "architecture": "y", "system": "z"}

    lines = list(format_report(report))
    report.save(tmp_path / "results.json")

    assert Report.load(tmp_path / "results.json") == report
    assert any("here" in line or "whole" in line for line in lines)
    assert all(np.isfinite(result.rounds).all() for result in report.results)
    assert list(format_readme(report))


def test_every_target_is_measured_where_all_libraries_are():
    rows = {"growth": (10, 1000)}
    sides = {("sampling", p, w) for p in ("ours", "torchrl", "sb3", "cpprb", "flashbax") for w in
             ("uniform", "her", "her_n_step", "n_step", "priorities", "everything")}  # fmt: skip
    sides |= {(s, p, s) for s in ("sequences", "pixels", "pixels_n_step")
              for p in ("ours", "torchrl", "sb3")}  # fmt: skip
    sides |= {("writing", p, w) for p in ("ours", "torchrl", "sb3", "cpprb")
              for w in ("record", "record_lanes", "extend")}  # fmt: skip
    sides |= {("mapped", p, w) for p in ("ours", "ours_mapped") for w in ("uniform", "her")}
    sides |= {("growth", p, "uniform") for p in ("ours", "raw")}
    report = Report(
        results=[
            result(peer, 2, 2, work=work, section=section, batch_size=batch_size, rows=size)
            for section, peer, work in sides
            for batch_size in (1, 8, 50, 256, 512, 1000, 4096)
            for size in rows.get(section, (1000,))
        ]
    )

    found = list(outcomes(report, threads=1))

    assert [outcome.ratio for outcome in found] == [1.0] * len(found)
    assert {outcome.target.work for outcome in found} == {target.work for target in TARGETS}
    assert all(outcome.is_met == outcome.target.at_most or outcome.limit <= 1 for outcome in found)
    assert all(outcome.ratio is None for outcome in outcomes(report, threads=2))


def test_growth_is_that_of_the_work_which_grows_most():
    results = [
        result(peer, taken, work=work, section="growth", rows=rows)
        for peer, work, rows, taken in [
            ("ours", "uniform", 10, 10), ("ours", "uniform", 99, 20),
            ("raw", "uniform", 10, 5), ("raw", "uniform", 99, 10),
            ("ours", "her", 10, 20), ("ours", "her", 99, 60),
            ("raw", "her", 10, 5), ("raw", "her", 99, 10),
        ]
    ]  # fmt: skip

    (found,) = (o for o in outcomes(Report(results=results), 1) if o.ratio is not None)

    assert found.ratio == 1.5
    assert "hindsight" in found.note


def test_the_command_line_prints_saves_and_draws(tmp_path, capsys, monkeypatch):
    kept, drawn = tmp_path / "results.json", tmp_path / "plot.png"
    line = "--only sampling --rows 300 --batches 16 --threads 1 --rounds 1 --peers ours raw"
    arguments = [*line.split(), "--json", str(kept), "--plot", str(drawn)]
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])

    command.main()

    assert "raw gather" in capsys.readouterr().out
    assert pick(Report.load(kept).results, work="everything", peer="ours")
    assert drawn.stat().st_size > 1000
    monkeypatch.setattr("sys.argv", ["benchmarks", "--readme", str(kept)])
    command.main()
    assert "| draw from 300 rows | batch | here | raw gather |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    ["--rows 100 --batches 256", "--batches 0", "--only cold --plot x.png", "--only nothing"],
)
def test_what_cannot_be_done_is_refused_before_anything_is_measured(line, capsys):
    with pytest.raises(SystemExit):
        command.parse_arguments(line.split())

    assert "error" in capsys.readouterr().err
