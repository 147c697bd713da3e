"""What the README and the guides show runs, and the README's commands are there for `.ci/run` to take."""

import ast
import builtins
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from mktestdocs import check_md_file

from tests.benchmarks import durability
from tests.benchmarks.readme import PAGES, pages_of, update, written
from tests.benchmarks.results import Report
from trl_storages import EpisodeSequence, HERReplayStorage, gym_reward

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "tutorials").glob("*.md"))
#: These guides need more than a process of their own, which their tests give them.
ELSEWHERE = {"several_machines.md"}
KEPT = ROOT / "tests" / "benchmarks" / "results.json"
KEPT_ON_GPU = KEPT.with_name("cuda.json")


# Collectors and environments of the examples warn about options of their own that are to change.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "page",
    [README, *(guide for guide in GUIDES if guide.name not in ELSEWHERE)],
    ids=lambda page: page.stem,
)
def test_python_blocks_run_one_after_another(page, tmp_path, monkeypatch, start_processes_by):
    monkeypatch.chdir(tmp_path)
    start_processes_by("forkserver")
    check_md_file(page, memory=True)


def test_the_readme_is_short_and_names_every_guide():
    lines = README.read_text().splitlines()
    guides = [*GUIDES, *(ROOT / "tutorials").glob("*.ipynb")]
    assert len(lines) <= 115
    assert [
        guide.name for guide in guides if f"(tutorials/{guide.name})" not in README.read_text()
    ] == []


@pytest.mark.parametrize(
    "page",
    [README, ROOT / "CONTRIBUTING.md", ROOT / "tests/benchmarks/README.md", *GUIDES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_to_files_and_headings_that_are_there(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose):
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
            assert heading in anchors, link


def test_there_are_exactly_two_commands():
    commands = "".join(
        re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    )

    train, test = commands.strip().splitlines()

    assert train.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert train.endswith(".venv/bin/python tutorials/train_her.py")
    assert test.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert test.endswith(".venv/bin/python -m pytest -n 2 --dist worksteal")


@pytest.mark.parametrize("kept", [KEPT, KEPT_ON_GPU], ids=["results", "cuda"])
def test_speed_is_that_of_the_run_that_is_kept(kept):
    report = Report.load(kept)
    for name, format_page in pages_of(report).items():
        page = (ROOT / name).read_text()

        assert page == written(page, format_page(report)), (
            f"run python -m tests.benchmarks --readme {kept.relative_to(ROOT)}"
        )


def test_rows_on_disk_are_as_fast_as_in_the_run_that_is_kept():
    page = durability.PAGE.read_text()

    assert page == durability.written(page, durability.load(durability.KEPT)), (
        "run python -m tests.benchmarks.durability --page tests/benchmarks/durability.json"
    )


def test_other_runs_replace_the_tables_and_nothing_else(tmp_path):
    pages = {name: (ROOT / name).read_text() for name in PAGES}
    for name, page in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(page)
    empty, kept = Report(machine=Report.load(KEPT).machine), Report.load(KEPT)

    update(empty, tmp_path)
    assert all((tmp_path / name).read_text() != page for name, page in pages.items())
    update(kept, tmp_path)

    assert {name: (tmp_path / name).read_text() for name in PAGES} == pages


def test_what_is_promised_of_directories_is_what_tests_show():
    """Rows that were flushed, and nothing of those that were not."""
    text = " ".join((ROOT / "tutorials/what_to_know.md").read_text().split())
    assert "`flush()` has returned from is there after a loss of power at any later time" in text


def test_what_a_batch_holds_is_listed():
    env = gymnasium.make("BitFlipping-v0", n_bits=3)
    options = {"n_step": 2, "alpha": 0.5, "sample_unit": EpisodeSequence(2), "batch_size": 6}
    storage = HERReplayStorage.from_env(env, reward_fn=gym_reward(env), **options)
    observation, _ = env.reset(seed=0)
    after, *outcome = env.step(0)
    storage.record(observation, 0, *outcome, after)
    page = (ROOT / "tutorials/what_to_know.md").read_text()
    rows = re.findall(r"^\| (`.*`) \| `(\[.*\])` \|", page, re.MULTILINE)
    listed = {name: "1" in of for names, of in rows for name in re.findall("`(.*?)`", names)}
    batch, stored = storage.sample(), storage.storage.layout.described
    added = {
        key: batch[key].ndim == 2 for key in list(batch.keys()) if key not in {*stored, "next"}
    }
    assert listed == added


@pytest.mark.parametrize(
    ("page", "line", "at_most"),
    [
        ("parts.md", "loss = SACLoss(", 40),
        ("coming_from.md", "loss_module = SACLoss(", 40),
        ("parts.md", "offline = from_arrays(", 40),
        ("parts.md", "nn.GRU(", 35),
        ("on_disk.md", "FrameStackObservation(", 40),
        ("several_machines.md", "def play(replay", 35),
    ],
    ids=["SAC", "TorchRL's SAC", "offline", "recurrent", "pixels", "Ray"],
)
def test_programs_to_take_over_are_whole_and_short(page, line, at_most):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "tutorials" / page).read_text(), re.DOTALL)
    (program,) = [block for block in blocks if line in block]
    assert program.startswith(("import ", "from "))
    assert len([each for each in program.splitlines() if each.strip()]) <= at_most
    ruff = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length=100", "-"]
    formatted = subprocess.run(ruff, input=program, capture_output=True, text=True, check=True)
    assert formatted.stdout == program
    known = {*dir(builtins)}
    for node in ast.walk(ast.parse(program)):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name)
            ):
                known.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                known |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
    used = {node.id for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)}
    assert used <= known, "a program needs nothing from other blocks"
