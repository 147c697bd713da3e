"""The command of the benchmark measures, tells, keeps and draws what it says."""

import gc
import itertools
import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.benchmarks import __main__ as command
from tests.benchmarks import cold_start, contest, network, sections
from tests.benchmarks.contest import Plan
from tests.benchmarks.measure import Effort, Turn, measure
from tests.benchmarks.peers import ON_CUDA, PEERS
from tests.benchmarks.readme import BEGIN, END, PAGES, format_all, format_short, format_targets
from tests.benchmarks.results import Report, Result, pick, ratio
from tests.benchmarks.sections import SECTIONS, run_section
from tests.benchmarks.tables import format_report
from tests.benchmarks.targets import TARGETS, outcomes

pytestmark = pytest.mark.filterwarnings("ignore")

TINY = Plan(
    rows=(200, 400),
    batch_sizes=(16, 32),
    peers=("ours", "compiled", "columns", "raw"),
    effort=Effort(rounds=2, calls=2),
)
COLD_START = {
    ("torchrl", "import"): 3e6,
    ("ours", "import"): 4e6,
    ("new", "first_batch"): 5e6,
    ("later", "first_batch"): 1e6,
}


@pytest.fixture
def hurried(monkeypatch):
    """Writes fewer rows, updates the narrowest network, and starts no processes."""
    # What other tests imported need not be walked whenever memory is measured.
    gc.freeze()
    monkeypatch.setattr(contest, "NEW_ROWS", 4)
    monkeypatch.setattr(sections, "LOOP_STEPS", 2)
    monkeypatch.setattr(sections, "EPISODE_LENGTH", 2)
    monkeypatch.setattr(network, "UPDATE_SECONDS", 0.0)
    monkeypatch.setattr(sections, "OF_OURS", ("uniform", "n_step"))
    monkeypatch.setattr(sections, "measure_cold_start", lambda device: COLD_START)


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


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_can_be_told_and_kept(section, tmp_path):
    report = run_section(section, TINY)
    report.machine = {"processor": "x", "cores": 1, "architecture": "y", "system": "z"}

    lines = list(format_report(report))
    report.save(tmp_path / "results.json")

    assert Report.load(tmp_path / "results.json") == report
    assert any("here" in line for line in lines) or "Cold start" in "".join(lines)
    assert all(np.isfinite(result.rounds).all() for result in report.results)
    assert list(format_all(report))
    assert section not in ("loop", "sampling") or list(format_short(report))


def test_a_loop_comes_first_and_says_what_it_loses():
    loop = [
        result(peer, taken, work="her", section=section)
        for section, ours, theirs in [("loop", 250, 1000), ("alone", 200, 800)]
        for peer, taken in [("ours", ours), ("sb3", theirs)]
    ]
    samples = [result("ours", 50), result("sb3", 100)]
    prefetch = [
        result(peer, taken, work="her", section="prefetch")
        for peer, taken in [("ours", 3060), ("free", 3000)]
    ]

    report = Report(
        machine={
            "processor": "x",
            "cores": 1,
            "architecture": "y",
            "system": "z",
            "torchrl": "0.1",
        },
        results=[*samples, *loop, *prefetch],
    )

    assert list(format_short(report)) == [
        "| draw 256 from 1,000 rows | here | SB3 |",
        "|---|---|---|",
        "| hindsight, `future` | **250** | 1,000 (4.0x) |",
        "",
        "Between two updates of a network: microseconds, medians of one thread, in brackets how many "
        "times as long as",
        "here. Versions: TorchRL 0.1.",
    ]
    assert list(format_all(report))[2:12] == [
        "| draw 256 from 1,000 rows | | here | SB3 |",
        "|---|---|---|---|",
        "| hindsight, `future` | between updates | **250** | 1,000 (4.0x) |",
        "|  | alone | **200** | 800 (4.0x) |",
        "",
        "With `prefetch=1` a loop of 3.0 ms a step takes longer than one that is given its batches by "
        "+2 % (hindsight, `future`).",
        "",
        "| draw from 1,000 rows | batch | here | SB3 |",
        "|---|---|---|---|",
        "| uniform | 256 | **50** | 100 (2.00x) |",
    ]


def test_an_update_comes_between_the_write_and_the_draw():
    order = []

    class Traced:
        def write(self, step):
            order.append("write")

        def sample(self, batch_size):
            order.append("draw")

    turn = contest.sample_turn(Traced(), itertools.repeat(None), 1, lambda: order.append("update"))
    turn.before()
    turn.call()

    assert order == ["write", "update", "draw"]


def test_the_network_takes_at_least_as_long_as_it_shall(monkeypatch):
    monkeypatch.setattr(network, "UPDATE_SECONDS", 1e-3)
    found = network.Network.as_slow_as_wanted(256, Effort())
    before = found.layers[0].weight.clone()

    found.update()

    assert found.layers[0].out_features >= network.NARROWEST
    assert not torch.equal(found.layers[0].weight, before)


def test_a_first_batch_is_timed_in_its_own_process(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["cold_start", "cpu"])

    cold_start.main()

    taken = json.loads(capsys.readouterr().out)
    assert set(taken) == {"torchrl", "ours", "first_batch"}
    assert min(taken.values()) >= 0


def test_every_target_is_measured_where_all_libraries_are():
    rows = {"growth": (10, 1000)}
    works = ("uniform", "her", "her_n_step", "n_step", "priorities", "everything")
    peers = ("ours", "compiled", "torchrl", "sb3", "cpprb", "tianshou", "flashbax")
    sides = {(s, p, w) for s in ("sampling", "loop") for p in peers for w in works}
    sides |= {("prefetch", p, w) for p in ("ours", "free") for w in works}
    sides |= {("write_and_draw", p, "her") for p in ("ours", "cpprb")}
    sides |= {(s, p, s) for s in ("sequences", "pixels", "pixels_n_step")
              for p in ("ours", "torchrl", "sb3")}  # fmt: skip
    sides |= {("writing", p, w) for p in ("ours", "torchrl", "sb3", "cpprb")
              for w in ("record", "record_lanes", "extend")}  # fmt: skip
    sides |= {("mapped", p, w) for p in ("ours", "ours_mapped") for w in ("uniform", "her")}
    sides |= {("growth", p, "uniform") for p in ("ours", "raw")}
    sides |= {(s, p, f"{s}{plain}") for p in peers for s in ("flat", "stacks")
              for plain in ("", "_plain")}  # fmt: skip
    report = Report(
        results=[
            replace(
                result(peer, 2, 2, work=work, section=section, batch_size=batch_size, rows=size),
                threads=threads,
                row_nbytes=8,
            )
            for threads in (1, 2)
            for section, peer, work in sides
            for batch_size in (1, 8, 50, 256, 512, 1000, 4096)
            for size in rows.get(section, (1000,))
        ]
    )

    found = list(outcomes(report, threads=2))

    assert [outcome.found.ratio for outcome in found] == [1.0] * len(found)
    assert {outcome.target.work for outcome in found} == {target.work for target in TARGETS}
    assert all(outcome.is_met == outcome.target.at_most or outcome.limit <= 1 for outcome in found)
    assert all(outcome.found is None for outcome in outcomes(report, threads=3))


def test_a_missed_target_says_what_a_plain_function_takes():
    report = Report(
        machine={"processor": "x", "cores": 1, "architecture": "y", "system": "z"},
        results=[
            result("ours", 20, work="her_n_step"),
            result("ours", 10, work="her"),
            result("compiled", 7, work="her_n_step"),
            result("torchrl", 400, work="her"),
        ],
    )

    (missed,) = (o for o in outcomes(report, 1) if o.found is not None and not o.is_met)
    lines = list(format_targets(report))

    assert (missed.found.ours, missed.found.compiled) == (20, 7)
    assert "20 here, a plain compiled function takes 7" in "\n".join(format_report(report))
    assert [line for line in lines if line.startswith("- ")] == [
        "- hindsight x 3-step / our hindsight at 256: 2.00 (at most 1.4); "
        "20 here, a plain compiled function takes 7."
    ]
    assert not any("compiled" in line for line in [*format_all(report), *format_short(report)])


def test_what_loses_most_by_threads_counts():
    taken = {("her", 1): 10, ("her", 2): 12, ("uniform", 1): 10, ("uniform", 2): 9}
    results = [
        replace(result("ours", microseconds, work=work), threads=threads)
        for (work, threads), microseconds in taken.items()
    ]

    found = [
        o.found for o in outcomes(Report(results=results), 2) if o.target.against == "with one"
    ]

    assert found[0].ratio == pytest.approx(1.2)
    assert "hindsight" in found[0].note
    assert not any(found[1:])


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

    (found,) = (o.found for o in outcomes(Report(results=results), 1) if o.found is not None)

    assert found.ratio == 1.5
    assert "hindsight" in found.note


def test_the_command_line_prints_saves_and_draws(tmp_path, capsys, monkeypatch):
    kept, drawn = tmp_path / "results.json", tmp_path / "plot.png"
    line = "--only sampling --rows 300 --batches 16 --threads 1 --rounds 1 --peers ours raw"
    arguments = [*line.split(), "--json", str(kept), "--plot", str(drawn), "--backend", "torch"]
    monkeypatch.setenv("TRL_STORAGES_BACKEND", "numba")
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])

    command.main()

    assert "raw gather" in capsys.readouterr().out
    report = Report.load(kept)
    assert pick(report.results, work="everything", peer="ours")
    assert report.machine["backend"] == os.environ["TRL_STORAGES_BACKEND"] == "torch"
    assert report.machine["device"] == "cpu"
    assert drawn.stat().st_size > 1000
    for name in PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"Title\n\n{BEGIN}{END}")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--readme", str(kept)])
    command.main()
    page = (tmp_path / "tutorials/speed.md").read_text()
    assert "| draw from 300 rows | batch | here | raw gather |" in page


@pytest.mark.parametrize(
    "line",
    [
        "--rows 100 --batches 256",
        "--batches 0",
        "--only cold --plot x.png",
        "--only nothing",
        "--only memory --device cuda",
        "--backend jax",
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_measured(line, capsys):
    with pytest.raises(SystemExit):
        command.parse_arguments(line.split())

    assert "error" in capsys.readouterr().err


def test_where_there_is_no_gpu_nothing_more_is_said(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--device", "cuda"])

    command.main()

    said = capsys.readouterr()
    assert (said.out, said.err) == ("There is no CUDA device.\n", "")


@pytest.mark.gpu
@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("section", ["loop", "sampling", "writing", "sequences", "pixels"])
def test_a_section_is_measured_on_a_gpu(section):
    plan = replace(TINY, peers=PEERS, effort=replace(TINY.effort, device="cuda"))

    results = run_section(section, plan).results

    assert {result.peer for result in results} <= {*ON_CUDA, "free"}
    assert all(np.isfinite(result.rounds).all() for result in results)
