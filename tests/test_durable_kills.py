"""What a killed writer leaves on disk, and what readers see while a writer is at work.

The processes fork from one that has imported everything, so that a kill takes milliseconds. How many
there are is set by the environment: TRL_STORAGES_KILLS=200 kills so many writers of each number of
lanes at random moments (50 otherwise), TRL_STORAGES_STRIDE=1 kills at every line of the code.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Lines of the code from one kill to the next.
STRIDE = int(os.environ.get("TRL_STORAGES_STRIDE", 127))


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
    kills = int(os.environ.get("TRL_STORAGES_KILLS", 50))
    result = run("killed", "random", tmp_path / "rows", lanes, kills)
    assert result["kills"] >= kills
    assert result["wraps"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 4])
def test_killed_inside_the_steps_of_a_commit(tmp_path, lanes):
    result = run("killed", "inside", tmp_path / "rows", lanes, STRIDE)
    assert min(result["kills"].values()) > 0
    assert sum(result["kills"].values()) > 1000 // STRIDE


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 4])
def test_killed_while_rows_are_forgotten_loaded_made_or_deleted(tmp_path, lanes):
    result = run("killed", "forgetting", tmp_path / "rows", lanes, STRIDE)
    assert min(result["kills"].values()) > 0


@pytest.mark.slow
@pytest.mark.requirement("disk-workers")
def test_read_while_written(tmp_path):
    result = run("following", tmp_path / "rows", 1_000_000, 0)
    assert result["failed"] == [0] * 5
    assert sum(result["seen"]) >= 1_000_000
    assert result["wraps"] >= 2
    # They follow: what they saw last is from after they began.
    assert min(result["newest"]) > 500


@pytest.mark.slow
@pytest.mark.requirement("disk-workers")
def test_read_while_writers_are_killed_and_replaced(tmp_path):
    result = run("following", tmp_path / "rows", 100_000, 10)
    assert result["failed"] == [0] * 5
    assert sum(result["seen"]) >= 100_000
    assert min(result["newest"]) > 500
