"""Mistakes of the first hour raise an error that says what to do."""

import gc
import math
import os
import resource
from contextlib import suppress

import gymnasium
import numpy as np
import pytest
import torch
from contract.make import library, make, new_folder
from contract.steps import Player, rows
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDict
from torchrl.data import ReplayBufferEnsemble, SamplerWithoutReplacement

BOX, NUMBERS = Box(-9, 9, (3,)), np.zeros(3, np.float32)


def update(priority):
    storage = make("prioritized")
    storage.update_priority(storage.extend(rows(Player().play([2]))), torch.tensor(priority))


def extend_with(name):
    done = torch.zeros(3, 1, dtype=torch.bool)
    data = TensorDict({name: torch.ones(3, 2), "x": done, "next": {"x": done, "done": done}}, [3])
    library.ReplayStorage(storage=library.PackedStorage(9)).extend(data)


def record_vector(num_envs):
    """Records a step of four environments, of which the spaces are passed as they are."""
    env = gymnasium.make_vec("Pendulum-v1", num_envs=4, vectorization_mode="sync")
    spaces = env.observation_space, env.action_space
    storage = library.UniformReplayStorage(*spaces, num_envs=num_envs, autoreset_mode="NextStep")
    (seen, _), action = env.reset(), env.action_space.sample()
    after, *outcome = env.step(action)
    storage.record(seen, action, *outcome, after)


def record(**seen):
    storage = library.ReplayStorage(storage=library.PackedStorage(9))
    storage.record(seen, 1, 0.0, False, False, {}, seen)


def packed(max_size=9, **options):
    return library.PackedStorage(max_size, **options)


MESSAGES = {
    "negative priority": (lambda: update([-1.0, math.nan]), r"got -1: pass td_error\.abs\(\)"),
    "NaN as priority": (lambda: update([1.0, math.nan]), "got nan: the loss or the network"),
    "infinite priority": (lambda: update([1.0, math.inf]), "got inf: the loss or the network"),
    "open nowhere": (lambda: library.ReplayStorage.open("/nowhere"), "does not contain a replay"),
    "no size nor directory": (lambda: packed(None), "max_size must be an integer"),
    "scratch_dir": (lambda: packed(scratch_dir="rows"), r"path=, and fresh=True"),
    "scratch_dir of a preset": (lambda: make(scratch_dir="rows"), r"path=, and fresh=True"),
    **{
        f"{name} of a preset": (
            lambda name=name: make("all", **{name: None}),
            rf"HERReplayStorage got an unexpected .* '{name}': use .*{advice}",
        )
        for name, advice in {
            "generator": "seed=",
            **dict.fromkeys(
                ["storage", "sampler", "writer", "priority_key", "pin_memory"],
                r"ReplayStorage\(storage=PackedStorage\(size\)",
            ),
        }.items()
    },
    "unknown option of a preset": (
        lambda: make("prioritized", lanes_per_env=1),
        "^PrioritizedReplayStorage got an unexpected keyword argument 'lanes_per_env'",
    ),
    "buffer_size": (lambda: library.ReplayStorage(buffer_size=9), r"PackedStorage\(max_size\)"),
    "storage_size": (lambda: packed(storage_size=9), "use max_size="),
    "words as size": (lambda: packed("x"), "max_size must be an integer"),
    "words as num_envs": (lambda: packed(num_envs="x"), "num_envs must be an integer"),
    "NaN as max_entries": (lambda: packed(max_entries=math.nan), "max_entries must be an integer"),
    "words as nested": (lambda: packed(nested="x"), "nested must hold pairs"),
    "words as fields": (lambda: packed(fields="x"), "fields must be a mapping"),
    "add of SB3": (lambda: make().add(NUMBERS, NUMBERS, [0], [1.0], [False], [{}]), "use record"),
    "vector spaces": (lambda: record_vector(4), "single_observation_space"),
    "vector spaces, one environment": (lambda: record_vector(1), "num_envs=4 and the spaces of a"),
    "TorchRL's ensemble": (lambda: ReplayBufferEnsemble(make(), make()), "ReplayStorageEnsemble"),
    "space without name": (
        lambda: library.UniformReplayStorage(Dict({"": BOX}), Discrete(2)),
        "must have a name",
    ),
    "field without name": (lambda: packed(fields={"": (torch.bool, [])}), "must have a name"),
    "entry without name": (lambda: extend_with(""), "must have a name"),
    "nested entry without name": (lambda: extend_with(("a", "")), "must have a name"),
    "observation without name": (lambda: record(**{"": NUMBERS}), "must have a name"),
    "empty space": (
        lambda: library.UniformReplayStorage(Dict({"x": BOX, "y": Dict({})}), Discrete(2)),
        r"space of 'y' must be .* got Dict\(\)",
    ),
    "alpha without priorities": (
        lambda: setattr(make(), "alpha", 0.5),
        r"pass alpha > 0 to a preset, or sampler=PERSampler\(",
    ),
    "num_goals without HER": (
        lambda: setattr(make(), "num_goals", 4),
        "pass reward_fn to HERReplayStorage",
    ),
    "eta of a base without ERE": (
        lambda: setattr(library.HERSampler(), "eta", 0.5),
        r"pass base=ERESampler\(",
    ),
    "negative refresh_ms": (
        lambda: setattr(library.PERSampler(9), "refresh_ms", -1),
        "refresh_ms must be",
    ),
    "incomplete batches dropped": (
        lambda: library.HERSampler(base=SamplerWithoutReplacement(drop_last=True)),
        "drop_last must be False",
    ),
    "empty observation": (lambda: record(x=NUMBERS, y={}), "'y' must be numbers"),
}

ERRORS = ValueError, TypeError, AttributeError, FileNotFoundError


@pytest.mark.parametrize(("call", "message"), MESSAGES.values(), ids=MESSAGES)
def test_mistakes_raise_and_say_what_to_pass(call, message):
    with pytest.raises(ERRORS, match=f"(?i){message}"):
        call()


def test_errors_of_the_system_are_not_reported_as_damage():
    path = new_folder() / "rows"
    make(place="directory", path=path).close()
    library.ReplayStorage.open(path, mode="r").close()
    gc.collect()  # storages of other tests hold files
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(path, os.O_RDONLY))
        for _ in range(2):  # that of the description, and that of the rows
            with pytest.raises(OSError, match="Too many open files"):
                library.ReplayStorage.open(path, mode="r")
            os.close(taken.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in taken:
            os.close(file)
    library.ReplayStorage.open(path)


def test_repr_of_a_reopened_directory_shows_its_number_of_transitions():
    path = new_folder() / "rows"
    for is_reopened in (False, True):
        storage = make(place="directory", path=path)
        storage.extend(rows(Player(is_reopened).play([4])))
        assert ("reopened with 4 transitions" in repr(storage)) == is_reopened
        storage.close()
