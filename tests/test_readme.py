"""What the README shows runs, and its commands are there for `.ci/run` to take."""

import re
from pathlib import Path

import pytest
from mktestdocs import check_md_file

from tests.benchmarks.readme import format_readme, format_speed
from tests.benchmarks.results import Report

README = Path(__file__).parents[1] / "README.md"
BENCHMARKS = Path(__file__).parent / "benchmarks"


# The example's collector warns about options of its own that are to change.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_python_blocks_run_one_after_another():
    check_md_file(README, memory=True)


def test_there_are_exactly_two_commands():
    commands = "".join(
        re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    )

    train, test = commands.strip().splitlines()

    assert train.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert train.endswith(".venv/bin/python tutorials/train_her.py")
    assert test.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert test.endswith(".venv/bin/python -m pytest -n 2 --dist worksteal")


def test_speed_is_that_of_the_run_that_is_kept():
    report = Report.load(BENCHMARKS / "results.json")

    assert "\n".join(format_speed(report)) in README.read_text()
    assert "\n".join(format_readme(report)) in (BENCHMARKS / "README.md").read_text()


def test_what_is_promised_of_directories_is_what_tests_show():
    """Rows that were flushed, and nothing of those that were not."""
    text = " ".join(README.read_text().split())
    assert "`flush()` has returned from is there after a loss of power at any later time" in text
