"""The guide for users of other libraries answers every name of theirs, and names what there is.

`other_libraries.json` lists the public classes, methods and arguments of their buffers, as their sources
have them: `Class` or `Class.method` -> arguments.
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
    if line.startswith("| ") and line != "| theirs | ours |"
]


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def words(text: str) -> set[str]:
    return {word for span in spans(text) for word in re.findall(r"[A-Za-z_]\w*", span)}


def names_of(library: str) -> set[str]:
    entries = LIBRARIES[library]
    return {part for name in entries for part in [*name.split("."), *entries[name]]}


def test_each_library_has_a_section_that_is_linked():
    assert {*SECTIONS} == {*LIBRARIES}
    for library in LIBRARIES:
        assert f"[{library}](#{library.lower().replace(' ', '-')})" in GUIDE.read_text()


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_of_theirs_is_answered(library):
    answered = set().union(*(words(theirs) for section, theirs, _ in ROWS if section == library))
    asked = {part for name in names_of(library) for part in name.split(".")}
    assert asked - answered == set()
    assert answered - asked == set(), "not in other_libraries.json"


@pytest.mark.parametrize("kind", ["TensorDictReplayBuffer", "HERReplayBuffer", "ReplayBuffer"])
def test_the_list_is_that_of_the_installed_torchrl(kind):
    kind = getattr(torchrl.data, kind)
    public = {name for name in dir(kind) if not name.startswith("_")}
    arguments = {*inspect.signature(kind.__init__).parameters} - {"self", "kwargs"}
    assert public | arguments <= names_of("TorchRL")


@functools.cache
def known() -> dict:
    """What may be named on the right: a storage with all parts, its batch, and what can be imported."""
    env = gymnasium.make("BitFlipping-v0", n_bits=3)
    storage = trl_storages.HERReplayStorage(
        env.observation_space,
        env.action_space,
        reward_fn=trl_storages.gym_reward(env),
        batch_size=4,
        storage_size=50,
        alpha=0.6,
        eta=0.99,
        n_step=3,
    )
    seen, _ = env.reset(seed=0)
    after, *rest = env.step(0)
    storage.record(seen, 0, *rest, after)
    names = {"storage": storage, "batch": storage.sample(), "datasets": trl_storages.datasets}
    for module in (
        *(trl_storages, torch, torchrl.data, torchrl.envs, torchrl.modules, torchrl.objectives),
        *(torchrl.trainers, torchrl.data.replay_buffers.scheduler, functools, builtins),
    ):
        names = {**vars(module), **names}
    return names


def resolve(node: ast.AST):
    """Returns what an expression names; None where only running it would tell."""
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
    raise AssertionError(f"what is {ast.unparse(node)}?")


@pytest.mark.parametrize(("library", "theirs", "ours"), ROWS)
def test_what_is_named_on_the_right_is_there(library, theirs, ours):
    del library, theirs
    strings = {"future", "final", "episode", "random", *(mode.value for mode in AutoresetMode)}
    named = spans(ours)
    # A reason takes more than a word.
    assert named or len(ours) > 30, ours
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
