"""The guide for users of other libraries maps every name of those libraries, and to names that exist.

`other_libraries.json` lists the public classes, methods and arguments of the buffers of each library:
`Class` or `Class.method` -> arguments.
"""

import ast
import builtins
import functools
import inspect
import json
import re
from pathlib import Path

import gymnasium
import pytest
import torch
import torchrl.data
import torchrl.data.replay_buffers.scheduler
import torchrl.envs
import torchrl.modules
import torchrl.objectives
import torchrl.trainers
from gymnasium.vector import AutoresetMode

import trl_storages
import trl_storages.datasets

GUIDE = Path(__file__).parents[1] / "tutorials" / "coming_from.md"
LIBRARIES = json.loads((Path(__file__).parent / "other_libraries.json").read_text())
SECTIONS = {section.split("\n", 1)[0]: section for section in GUIDE.read_text().split("\n## ")[1:]}
ROWS = [
    (library, *(cell.strip() for cell in line.strip("| ").split(" | ")))
    for library, section in SECTIONS.items()
    for line in section.splitlines()
    if line.startswith("| ") and line.count(" | ") == 1 and not line.endswith("| trl_storages |")
]


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def words(text: str) -> set[str]:
    return {word for span in spans(text) for word in re.findall(r"[A-Za-z_]\w*", span)}


def names_of(library: str) -> set[str]:
    entries = LIBRARIES[library]
    return {part for name in entries for part in [*name.split("."), *entries[name]]}


def test_each_library_has_a_linked_section():
    assert {*SECTIONS} == {*LIBRARIES}
    for library in LIBRARIES:
        assert f"[{library}](#{library.lower().replace(' ', '-')})" in GUIDE.read_text()


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_of_a_library_is_mapped(library):
    mapped = set().union(*(words(names) for section, names, _ in ROWS if section == library))
    public = {part for name in names_of(library) for part in name.split(".")}
    assert public - mapped == set()
    assert mapped - public == set(), "not in other_libraries.json"


@pytest.mark.parametrize("kind", ["TensorDictReplayBuffer", "HERReplayBuffer", "ReplayBuffer"])
def test_listed_names_include_those_of_the_installed_torchrl(kind):
    kind = getattr(torchrl.data, kind)
    public = {name for name in dir(kind) if not name.startswith("_")}
    arguments = {*inspect.signature(kind.__init__).parameters} - {"self", "kwargs"}
    assert public | arguments <= names_of("TorchRL")


@functools.cache
def known() -> dict:
    """Returns the names for the right column: a buffer with all components, a batch, and imports."""
    env = gymnasium.make("BitFlipping-v0", n_bits=3)
    buffer = trl_storages.HERReplayStorage(
        env.observation_space,
        env.action_space,
        reward_fn=trl_storages.gym_reward(env),
        batch_size=4,
        storage_size=50,
        alpha=0.6,
        eta=0.99,
        n_step=3,
    )
    obs, _ = env.reset(seed=0)
    next_obs, *outcome = env.step(0)
    buffer.record(obs, 0, *outcome, next_obs)
    names = {"buffer": buffer, "batch": buffer.sample(), "datasets": trl_storages.datasets}
    for module in (
        *(trl_storages, torch, torchrl.data, torchrl.envs, torchrl.modules, torchrl.objectives),
        *(torchrl.trainers, torchrl.data.replay_buffers.scheduler, functools, builtins),
    ):
        names = {**vars(module), **names}
    return names


def resolve(node: ast.AST):
    """Returns the value of an expression; None if the expression must be run to know it."""
    options = inspect.signature(trl_storages.HERReplayStorage).parameters
    match node:
        case ast.Expression(body=body):
            return resolve(body)
        case ast.Name(id=name):
            assert name in known() or name in options, f"no {name}"
            return known().get(name)
        case ast.Attribute(value=value, attr=attr):
            owner = resolve(value)
            return None if owner is None else getattr(owner, attr)
        case ast.Call(func=func, keywords=keywords):
            called = resolve(func)
            if keywords and called is not None:
                parameters = inspect.signature(called).parameters
                assert {keyword.arg for keyword in keywords} <= {*parameters}, called
            return None
        case ast.Subscript(value=value, slice=ast.Constant() | ast.Tuple() as key):
            owner = resolve(value)
            return None if owner is None else owner[ast.literal_eval(key)]
        case ast.Subscript(value=value):
            resolve(value)
            return None
        case ast.Assign(targets=[target]):
            return resolve(target)
    raise AssertionError(f"cannot resolve {ast.unparse(node)}")


@pytest.mark.parametrize(("library", "names", "equivalent"), ROWS)
def test_names_of_the_right_column_exist(library, names, equivalent):
    del library, names
    strings = {"future", "final", "episode", "random", *(mode.value for mode in AutoresetMode)}
    named = spans(equivalent)
    # Without a name the cell gives a reason, which takes more than a word.
    assert named or len(equivalent) > 30, equivalent
    for span in named:
        if span in strings or span in ("done", "terminated", "truncated", "[num_envs, T]", "dones"):
            continue
        (statement,) = ast.parse(span).body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            options = inspect.signature(trl_storages.HERReplayStorage).parameters
            assert statement.targets[0].id in options, span
            assert ast.literal_eval(statement.value) in strings, span
            continue
        resolve(statement.value if isinstance(statement, ast.Expr) else statement)
