"""What type checkers see of the public names: a file that uses them, and one that uses them wrongly."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADER = """
from pathlib import Path
from typing import Any

import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDictBase
from typing_extensions import assert_type
from trl_storages import (
    EpisodeWriter, EREReplayStorage, ERESampler, HERReplayStorage, HERSampler, NStep,
    NStepReplayStorage, PackedStorage, PERSampler, ReplayStorage, UniformReplayStorage,
)

observations, actions = Box(0, 1, (3,)), Discrete(2)


def reward_fn(achieved: torch.Tensor, desired: torch.Tensor, transition: Any) -> torch.Tensor:
    return achieved


storage = UniformReplayStorage(observations, actions, storage_size=100, seed=0, path=Path("rows"))
"""
RIGHT = """
reward = storage.sample()["next"]
assert_type(storage.sample(), TensorDictBase)
assert_type(storage.sample(3, return_info=False), TensorDictBase)
assert_type(storage.sample(return_info=True), tuple[TensorDictBase, dict[str, Any]])
assert_type(storage.sample(3, True), tuple[TensorDictBase, dict[str, Any]])
batch, info = storage.sample(3, return_info=True)
index = storage.extend(batch, lanes=[0])
assert_type(index, torch.Tensor)
for each in storage.batches(3, epochs=2):
    assert_type(each, TensorDictBase)
storage.n_step = 5
assert_type(storage.discount, float)
storage.close(keep=False)
HERReplayStorage(observations, actions, reward_fn=reward_fn, num_goals=4, n_step=3, alpha=0.6)
NStepReplayStorage(observations, actions, n_step=5, device=torch.device("cpu"))
EREReplayStorage(observations, actions, eta=0.99, extra_fields={"state": (torch.float32, [3])})
ReplayStorage(
    storage=PackedStorage(10),
    writer=EpisodeWriter(2),
    sampler=HERSampler("future", base=ERESampler(base=PERSampler(10))),
    transform=NStep(3, gamma=0.9),
    batch_size=4,
)
"""
#: Lines of which each has an error.
WRONG = """
UniformReplayStorage(observations, actions, buffer_size=100)
UniformReplayStorage(observations, actions, storage_size="100")
NStepReplayStorage(observations, actions, n_step="3")
HERReplayStorage(observations, actions)
HERReplayStorage(observations, actions, reward_fn=reward_fn, goal_selection_strategy="last")
storage.n_step = "5"
storage.sample(return_info=True)["next"]
storage.sample("4")
"""


def by_mypy(file: Path) -> list[str]:
    options = ["--config-file", str(Path(__file__).parents[1] / "pyproject.toml")]
    options.append("--no-error-summary")
    return told([sys.executable, "-m", "mypy", *options, str(file)])


def by_pyright(file: Path) -> list[str]:
    if shutil.which("pyright") is None:
        pytest.skip("pyright is not installed")
    return told(["pyright", "--pythonpath", sys.executable, str(file)])


def code_of_users(directory: Path) -> list[str]:
    """Writes the blocks of README and guides into a file each."""
    guides = [ROOT / "README.md", *sorted((ROOT / "tutorials").glob("*.md"))]
    written = []
    for guide in guides:
        blocks = re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE)
        file = directory / f"{guide.stem.lower()}.py"
        file.write_text("\n".join(blocks))
        written += [file] if blocks else []
    return [str(file) for file in written]


# As users check theirs: they need not annotate it.
OF_USERS = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
OF_USERS += ["--check-untyped-defs", "--allow-redefinition", "--no-error-summary"]


@pytest.mark.slow
def test_code_of_readme_and_guides_passes(tmp_path):
    assert told([sys.executable, "-m", "mypy", *OF_USERS, *code_of_users(tmp_path)]) == []


@pytest.mark.slow
def test_tutorials_pass():
    tutorials = [str(file) for file in sorted((ROOT / "tutorials").glob("*.py"))]
    assert told([sys.executable, "-m", "mypy", *OF_USERS, *tutorials]) == []


def told(command: list[str]) -> list[str]:
    """Returns the lines with errors that a type checker writes."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if " error: " in line]


@pytest.mark.slow
@pytest.mark.parametrize("checker", [by_mypy, by_pyright])
def test_what_is_right_passes_and_what_is_wrong_does_not(checker, tmp_path):
    right = HEADER + RIGHT
    first = len(right.splitlines()) + 1
    wrong = [line for line in WRONG.splitlines() if line]
    file = tmp_path / "snippet.py"
    file.write_text(right + "\n".join(wrong) + "\n")
    errors = checker(file)
    lines = {int(line.split(".py:")[1].split(":")[0]) for line in errors}
    assert lines == {*range(first, first + len(wrong))}, errors
