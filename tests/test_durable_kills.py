"""What a killed writer leaves on disk, and what readers see while a writer is at work.

The processes fork from one that has imported everything, so that a kill takes milliseconds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def run(module, *args):
    """Runs a script in a process of its own, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"durable.{module}", *map(str, args)],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.requirement("persistence")
@pytest.mark.parametrize("lanes", [1, 4])
def test_killed_at_random_moments(tmp_path, lanes):
    result = run("killed", "random", tmp_path / "rows", lanes, 100)
    assert result["kills"] >= 100
    assert result["wraps"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 4])
def test_killed_inside_the_steps_of_a_commit(tmp_path, lanes):
    # Every so many lines of the code; a stride of 1 takes some minutes.
    result = run("killed", "inside", tmp_path / "rows", lanes, 13)
    assert result["kills"] > 60


@pytest.mark.slow
@pytest.mark.requirement("disk-workers")
def test_read_while_written(tmp_path):
    result = run("following", tmp_path / "rows")
    assert result["failed"] == [0] * 5
    assert sum(result["seen"]) >= 1_000_000
    assert result["wraps"] >= 2
    # They follow: what they saw last is from after they began.
    assert min(result["newest"]) > 500
