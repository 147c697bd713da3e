"""The commands of the benchmark measure, tell and keep what they say."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.benchmarks import __main__ as command
from tests.benchmarks import contest, gpu, lanes, network, sections
from tests.benchmarks.contest import Plan, adapter
from tests.benchmarks.data import goal_columns
from tests.benchmarks.measure import Effort, Turn, measure
from tests.benchmarks.peers import ON_CUDA, PEERS
from tests.benchmarks.readme import PAGES
from tests.benchmarks.results import Report
from tests.benchmarks.sections import SECTIONS, run_section
from tests.benchmarks.simulated_gpu import Counted, simulated_gpu
from tests.benchmarks.tables import format_all, format_lanes, format_missed

pytestmark = pytest.mark.filterwarnings("ignore")

TINY = Plan(
    rows=(200, 400),
    batch_sizes=(16, 32),
    peers=("ours", "torchrl", "ring", "raw"),
    effort=Effort(rounds=2, calls=2),
)


@pytest.fixture
def hurried(monkeypatch):
    """Writes fewer rows and updates the narrowest network."""
    # What other tests imported need not be walked whenever memory is measured.
    gc.freeze()
    monkeypatch.setattr(contest, "NEW_ROWS", 4)
    monkeypatch.setattr(sections, "EPISODE_LENGTH", 2)
    monkeypatch.setattr(network, "UPDATE_SECONDS", 0.0)
    for name, value in {"NUM_ROWS": 512, "NUM_LANES": (4,), "GROWING_LANES": (1, 8)}.items():
        monkeypatch.setattr(lanes, name, value)


def test_sides_take_turns_and_the_first_one_is_thrown_away():
    order = []
    turns = {
        name: Turn(call=lambda name=name: order.append(name), before=lambda: order.append("-"))
        for name in "ab"
    }
    rounds = measure(turns, Effort(rounds=2, calls=2, seconds=10))
    assert "".join(order) == "-b-b-a-a" + "-a-a-b-b" + "-b-b-a-a"
    assert [len(taken) for taken in rounds.values()] == [2, 2]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_can_be_told_and_kept(section, tmp_path):
    report = run_section(section, TINY)
    report.machine = {"processor": "x", "cores": 1, "architecture": "y", "system": "z"}
    lines = [*format_all(report), *format_missed(report), *format_lanes(report)]
    report.save(tmp_path / "results.json")
    assert Report.load(tmp_path / "results.json") == report
    words = "| trl_storages |", "from a directory", "| lanes |"
    assert any(word in "".join(lines) for word in words)
    assert all(np.isfinite(result.rounds).all() for result in report.results)


def test_the_command_line_prints_and_saves(tmp_path, capsys, monkeypatch):
    kept = tmp_path / "results.json"
    line = "--only sampling --rows 300 --batches 16 --threads 1 --rounds 1 --peers ours raw"
    arguments = [*line.split(), "--json", str(kept)]
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
    command.main()
    assert "raw gather" in capsys.readouterr().out
    for name in PAGES["speed"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Title\n\n<!-- speed: begin -->\n<!-- speed: end -->\n")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--readme", str(kept)])
    command.main()
    page = (tmp_path / "tutorials/results.md").read_text()
    assert "| sample from 300 transitions | batch | trl_storages | raw gather |" in page


@pytest.mark.gpu
@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("section", ["loop", "sampling", "writing", "sequences"])
def test_a_section_is_measured_on_a_gpu(section):
    plan = replace(TINY, peers=PEERS, effort=replace(TINY.effort, device="cuda"))
    results = run_section(section, plan).results
    assert {result.peer for result in results} <= {*ON_CUDA}
    assert all(np.isfinite(result.rounds).all() for result in results)


@pytest.mark.usefixtures("hurried")
def test_run_for_a_gpu_counts_operations_and_waits_on_the_cpu(tmp_path, capsys):
    kept = tmp_path / "gpu.json"
    gpu.main(f"--device cpu --rows 400 --batches 16 --rounds 1 --json {kept}".split())
    printed = capsys.readouterr().out
    assert "| uniform | 16 |" in printed
    assert "| write of [4096, 1], from the GPU |" in printed
    report = Report.load(kept)
    assert {"sampling", "writing", "lanes"} <= {result.section for result in report.results}
    launches, waits = report.counts["ours"]["uniform"]
    assert (launches > 0, waits) == (True, 0)
    assert report.counts["ours"]["extend"][1] == 1


def test_simulated_gpu_samples_what_the_cpu_samples():
    columns = goal_columns(300)
    batches = []
    for device in ("cpu", "cuda:0"):
        with simulated_gpu(), Counted():
            buffer = adapter("ours", "her_n_step", device=device)(columns, 400)
            buffer.buffer.set_rng(torch.Generator().manual_seed(0))
            batches.append(buffer.columns_of(buffer.sample(64)))
    for name, values in batches[0].items():
        np.testing.assert_allclose(batches[1][name], values, rtol=1e-6, err_msg=name)
