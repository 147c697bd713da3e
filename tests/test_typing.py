"""What type checkers see of the public names: a file that uses them, and one that uses them wrongly."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADER = """
from math import inf
from pathlib import Path
from typing import Any

import gymnasium
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDictBase
from typing_extensions import assert_type
from trl_storages import (
    EpisodeReplayStorage, EpisodeWriter, EREReplayStorage, ERESampler, FrameStack, HERReplayStorage,
    HERSampler, NStep, NStepReplayStorage, PackedStorage, PERSampler, ReplayStorage, UniformReplayStorage,
    UniformSampler,
)

observations, actions = Box(0, 1, (3,)), Discrete(2)


class FirstSteps(UniformSampler):
    def sample(self, storage, batch_size):  # type: ignore[no-untyped-def]
        slots, info = super().sample(storage, batch_size)
        return storage.episodes.shift(slots, -1), info


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
storage.sampler.alpha = 0.5
rows_there: int = storage.storage.episodes.capacity
storage.close(keep=False)
HERReplayStorage(observations, actions, reward_fn=reward_fn, num_goals=4, n_step=3, alpha=0.6)
NStepReplayStorage(observations, actions, n_step=5, device=torch.device("cpu"))
EREReplayStorage(observations, actions, eta=0.99, extra_fields={"state": (torch.float32, [3])})
state = {"state": (torch.float32, (3,))}
UniformReplayStorage(observations, actions, extra_fields=state, info_keys={"lives": torch.int64})
mixture, stacks = {"future": 0.5, "random": 0.5}, {"observation": FrameStack(4)}
HERReplayStorage(observations, actions, reward_fn=reward_fn, strategy=mixture)
env = gymnasium.make("CartPole-v1")
HERReplayStorage.from_env(env, reward_fn=reward_fn, num_goals=inf, n_step=3, num_envs=1)
HERSampler(mixture)
UniformReplayStorage(observations, actions, frame_stack=stacks)
PackedStorage(9, fields={"pixels": (torch.uint8, (4, 8, 8), FrameStack(4)), "action": state["state"]})
ReplayStorage(
    storage=PackedStorage(10, fields={"action": (torch.int64, (1,))}),
    writer=EpisodeWriter(2),
    sampler=HERSampler("future", base=ERESampler(base=PERSampler(10))),
    transform=NStep(3, discount=0.9),
    batch_size=4,
)
"""
#: Lines of which each has an error.
WRONG = """
UniformReplayStorage(observations, actions, buffer_size=100)
UniformReplayStorage(observations, actions, storage_size="100")
NStepReplayStorage(observations, actions, n_step="3")
EpisodeReplayStorage(observations, actions, n_step=3)
HERReplayStorage(observations, actions)
HERReplayStorage(observations, actions, reward_fn=reward_fn, strategy="last")
UniformReplayStorage.from_env(env, buffer_size=100)
HERReplayStorage.from_env(env, reward_fn=reward_fn, num_goals="4")
storage.n_step = "5"
storage.sample(return_info=True)["next"]
storage.sample("4")
"""


#: What pyright says of code that is right, mostly for want of annotations in TorchRL and tensordict.
THEIRS = re.compile(
    "|".join(
        [
            r'to parameter "(modules|in_keys|shape|collector_class)" of type .* in function "__init__"',
            # An entry of rows of a TensorDict, or of its entry.
            r'to parameter "indices" of type .* in function "__(get|set)item__"',
            # Of specs, each of which has its own.
            'Cannot access attribute "n" for class "TensorSpec"',
            r'attribute "(low|high)" for class "Box"',
            r'"(low|high)" is not a known attribute of "None"',
            # Compose takes any number.
            "Expected 1 positional argument",
            # Of an entry of an entry.
            '"float" is not a known attribute of "None"',
            # The rows of a TensorDict.
            r'"Unknown \| Tensor \| Any" cannot .* "TensorDictBase"',
            # The sum of no losses is 0.
            r'attribute "backward" for class "(int|Literal\[0\])"',
            # What a loop sets that runs at least once.
            "is possibly unbound",
        ]
    )
)


#: What takes long to read, and tells nothing of the types here.
UNSEEN = """
IPython matplotlib numba PIL pydantic ray rich gymnasium.wrappers torch._decomp torch._dynamo
torch._export torch._functorch torch._higher_order_ops torch._inductor torch._meta_registrations
torch._prims torch._refs torch._subclasses torch.ao torch.distributed torch.distributions
torch.export torch.fx torch.jit torch.onnx torch.testing
"""


STRICT_COPY = Path("right_and_wrong_strictly.py")
#: Users need not annotate their code. One file is read with what `mypy --strict` switches on.
MYPY = f"""
[mypy]
cache_dir = {os.devnull}
error_summary = False
ignore_missing_imports = True
follow_imports = silent
check_untyped_defs = True
allow_redefinition = True
warn_redundant_casts = True
[mypy-trl_storages.*]
implicit_reexport = False
[mypy-{STRICT_COPY.stem}]
disallow_any_generics = True
disallow_subclassing_any = True
disallow_untyped_calls = True
disallow_untyped_defs = True
disallow_incomplete_defs = True
disallow_untyped_decorators = True
warn_unused_ignores = True
strict_equality = True
extra_checks = True
[mypy-{",".join(f"{name},{name}.*" for name in UNSEEN.split())}]
follow_imports = skip
"""


def by_mypy(*files: Path) -> list[str]:
    """With the strict options for a copy of the first file."""
    strict, config = (files[0].with_name(name) for name in (STRICT_COPY.name, "mypy.ini"))
    strict.write_text(files[0].read_text())
    config.write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--config-file", str(config)]
    return told([*command, str(strict), *map(str, files)])


def by_pyright(*files: Path) -> list[str]:
    if find_spec("pyright") is None:
        pytest.skip("pyright is not installed: pip install 'pyright[nodejs]'")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *map(str, files)]
    return [line for line in told(command) if not THEIRS.search(line)]


def code_of_users(directory: Path) -> list[Path]:
    """Writes the blocks of README and guides into a file each."""
    guides = [ROOT / "README.md", *sorted((ROOT / "tutorials").glob("*.md"))]
    written = []
    for guide in guides:
        blocks = re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE)
        if blocks:
            written.append(directory / f"{guide.stem.lower()}_blocks.py")
            written[-1].write_text("\n".join(blocks))
    return written


def told(command: list[str]) -> list[str]:
    """Returns the lines with errors that a type checker writes."""
    # Without this pyright asks the network for a newer one.
    env = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if " error: " in line]


def right_and_wrong(directory: Path) -> tuple[Path, set[int]]:
    """Writes a file, and returns it with its lines that have errors."""
    right, wrong = HEADER + RIGHT, WRONG.strip().splitlines()
    file = directory / "right_and_wrong.py"
    file.write_text("\n".join([right, *wrong, ""]))
    first = len(right.splitlines()) + 2
    return file, {*range(first, first + len(wrong))}


def lines_of(errors: list[str]) -> set[int]:
    return {int(line.split(".py:")[1].split(":")[0]) for line in errors}


@pytest.mark.slow
@pytest.mark.parametrize("checker", [by_mypy, by_pyright])
def test_code_of_readme_guides_and_tutorials_passes_and_what_is_wrong_does_not(checker, tmp_path):
    """At once, as a checker reads torch for longer than all of it."""
    file, wrong = right_and_wrong(tmp_path)
    tutorials = sorted((ROOT / "tutorials").glob("*.py"))
    errors = checker(file, *code_of_users(tmp_path), *tutorials)
    files = {line.split(".py:")[0] for line in errors}
    assert {Path(name).name for name in files} <= {file.stem, STRICT_COPY.stem}, errors
    for name in files:
        assert lines_of([line for line in errors if line.startswith(f"{name}.py")]) == wrong, errors
    assert len(files) == (2 if checker is by_mypy else 1), errors
