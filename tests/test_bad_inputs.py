"""Every argument of every public callable, given what it must not be.

Each call must raise an error of this package that names the argument and shows what came, and must leave
the storage as it was. The table fails where a public callable or a parameter is missing from it.
"""

import inspect
import math
import re
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from goal_data import distance_reward
from snapshots import assert_unchanged, snapshot
from tensordict import TensorDict
from test_recipes import ACTIONS, OBSERVATIONS, make, rows
from torchrl.data import LazyTensorStorage

import trl_storages
from trl_storages import datasets, plotting
from trl_storages.replay.batches import BatchSource
from trl_storages.saved.parts import SavedPart

#: Name -> what users pick up.
PUBLIC = {
    name: getattr(module, name)
    for module in (trl_storages, datasets, plotting)
    for name in module.__all__
}
PACKAGE = str(Path(trl_storages.__file__).parent)
ERRORS = (ValueError, TypeError, KeyError, IndexError, RuntimeError, OSError)
THING = object()

# Kind of argument -> what it must not be; "?" behind a kind allows None.
NO_NUMBER = [
    "three",
    b"3",
    THING,
    [],
    (3,),
    {},
    torch.zeros(2),
    np.zeros((1, 2)),
    1j,
    True,
    np.True_,
]
NO_COUNT = [*NO_NUMBER, math.nan, math.inf, -math.inf, 1.5, 2.0, -1, 2**63, -(2**70)]
BAD: dict[str, list[Any]] = {
    "count": NO_COUNT,
    "count from 1": [*NO_COUNT, 0, np.int64(0)],
    "count from 2": [*NO_COUNT, 0, 1],
    "stacks": [
        *("x", math.nan, THING, [], True, torch.zeros(2), 0, 1, -4, 1.5, 99),
        *({"pixels": 4}, {5: trl_storages.FrameStack(2)}, {"x": trl_storages.FrameStack(2)}),
    ],
    "dimension": [*NO_NUMBER, math.nan, math.inf, 1.5, 2**63, -(2**70)],
    "count or inf": [*NO_NUMBER, math.nan, -math.inf, 1.5, -1],
    "share": [*NO_NUMBER, math.nan, math.inf, -0.1, 1.1, np.float32(2)],
    "share above 0": [*NO_NUMBER, math.nan, math.inf, -0.1, 1.1, 0, torch.tensor(0.0)],
    "exponent": [*NO_NUMBER, math.nan, math.inf, -0.1, 4.1],
    "choice": ["none of them", "", 5, True, THING, [], math.nan],
    "goals": [
        *("none of them", "", 5, True, THING, [], math.nan),
        *(
            {},
            {"none of them": 1},
            {"future": 0.5},
            {"future": 0.7, "random": 0.4},
            {"future": "x"},
        ),
        *({"future": 1.5, "random": -0.5}, {"future": math.nan}, {5: 1.0}),
    ],
    "flag": ["yes", 5, 0, math.nan, THING, [], torch.zeros(2)],
    "key": [5, math.nan, THING, "", (), ("a", 5), [], True, torch.zeros(2)],
    "keys": [5, math.nan, THING, "word", [5], [""], True],
    "device": [5, math.nan, THING, "nowhere", "", [], True],
    "path": [5, math.nan, THING, "", "a\0b", [], True, b"rows", __file__, f"{__file__}/below"],
    "function": [5, math.nan, THING, "x", [], True],
    "object": [5, math.nan, THING, "x", [], {}, True, torch.zeros(2)],
    "steps": [5, math.nan, THING, "x", [], {}, True, torch.zeros(2), [5]],
    "lanes": [
        7,
        "x",
        math.nan,
        THING,
        [],
        [7],
        [-1],
        [0.5],
        [[0]],
        [{}],
        [0, [1]],
        [True] * 5,
        True,
    ],
    "shares": [5, "x", math.nan, THING, [], [0.5], [0.6, 0.6], [-1, 2], [math.nan], ["x"], True],
    "slots": [5, "x", math.nan, THING, [1], torch.zeros(2), torch.ones(2) > 0, np.zeros(2), True],
    "flags": [
        5,
        "x",
        math.nan,
        THING,
        [True],
        torch.zeros(1),
        np.ones(1, bool),
        torch.ones(9, 9) > 0,
    ],
    "mapping": [5, "x", math.nan, THING, [], True, torch.zeros(2)],
    "tensor": [5, "x", math.nan, THING, [1.0], {}, True],
    "space": [5, "x", THING, [], True, gymnasium.spaces.Text(3), gymnasium.spaces.Dict({})],
    "values": ["x", THING, {}],
    "dataset": [5, math.nan, THING, [], {}, True, torch.zeros(2)],
    "name": [5, math.nan, THING, [], True],
    "returns": ["x", THING, {}, [math.nan], math.inf, ["x"]],
}
#: Classes that can be saved each by itself.
SAVED_PARTS = [
    name
    for name in trl_storages.__all__
    if SavedPart in getattr(getattr(trl_storages, name), "__mro__", ())
]


OF_SINGLE_ROWS = {
    "n_step",
    "discount",
    "alpha",
    "beta",
    "normalize",
    "eps",
    "eta",
    "c_min",
    "sample_unit",
}
RECIPE = {
    "observation_space": "space",
    "action_space": "space",
    "storage_size": "count from 1",
    "num_envs": "count from 1",
    "batch_size": "count from 1",
    "device": "device",
    "path": "path?",
    "mode": "choice",
    "n_step": "count from 1",
    "discount": "share",
    "alpha": "exponent",
    "beta": "share",
    "normalize": "choice",
    "eps": "share above 0",
    "eta": "share above 0",
    "c_min": "count from 1",
    "prefetch": "count",
    "seed": "count?",
    "info_keys": "keys",
    "extra_fields": "mapping",
    "frame_stack": "stacks?",
    "share_next": "flag",
    "sample_unit": "object?",
    "autoreset_mode": "choice?",
    "on_gap": "choice",
}
HINDSIGHT = {
    "reward_fn": "function",
    "terminated_fn": "function?",
    "strategy": "goals",
    "num_goals": "count or inf",
}
PICTURE = {"storage": "object", "ax": "object?"}
FILLING = {
    "recipe": "function",
    "float_dtype": "object?",
    "progress": "flag",
    "options": "any",
}
#: Callable -> parameter -> kind of argument; "any" takes everything there is.
TABLE: dict[str, dict[str, str]] = {
    "UniformReplayStorage": RECIPE,
    "NStepReplayStorage": RECIPE,
    "PrioritizedReplayStorage": RECIPE,
    "EREReplayStorage": RECIPE,
    "EpisodeReplayStorage": {
        key: kind for key, kind in RECIPE.items() if key not in OF_SINGLE_ROWS
    },
    "HERReplayStorage": {**RECIPE, **HINDSIGHT},
    "ReplayStorage": {
        "storage": "object",
        "sampler": "object?",
        "writer": "object?",
        "transform": "object?",
        "recorder": "object?",
        "kwargs": "any",
        # Of TorchRL's, by `kwargs`.
        "batch_size": "count from 1?",
        "prefetch": "count?",
        "generator": "object?",
        "sample_unit": "object?",
        "priority_key": "key",
        "collate_fn": "function?",
        "pin_memory": "flag",
    },
    "ReplayStorage.add": {"data": "steps"},
    "ReplayStorage.batches": {
        "num_batches": "count",
        "batch_size": "count from 1?",
        "epochs": "count",
    },
    "ReplayStorage.empty": {"empty_write_count": "flag", "keep_steps": "count"},
    "ReplayStorage.end_episodes": {"lanes": "lanes?"},
    "ReplayStorage.explain": {"batch": "steps"},
    "ReplayStorage.extend": {
        "tensordicts": "steps",
        "lanes": "lanes?",
        "update_priority": "flag?",
    },
    "ReplayStorage.open": {
        "path": "path",
        "mode": "choice",
        "sampler": "object?",
        "transform": "object?",
        "device": "device?",
        "fetch_every": "count from 1",
        "check": "flag?",
        "progress": "flag",
        "options": "any",
    },
    "ReplayStorage.record": {
        "observations": "object",
        "actions": "values",
        "rewards": "values",
        "terminateds": "values",
        "truncateds": "values",
        "infos": "any",
        "next_observations": "object",
    },
    "ReplayStorage.sample": {"batch_size": "count from 1?", "return_info": "flag"},
    "ReplayStorage.sample_episodes": {"n": "count from 1"},
    "ReplayStorage.can_sample": {"batch_size": "count from 1?"},
    "ReplayStorage.set_sampler": {"sampler": "object"},
    "ReplayStorage.append_transform": {"transform": "object", "invert": "flag"},
    "ReplayStorage.insert_transform": {"index": "count", "transform": "object", "invert": "flag"},
    "ReplayStorage.share": {"shared": "flag"},
    "ReplayStorage.update_tensordict_priority": {"data": "steps", "priority": "values?"},
    "ReplayStorage.update_priority": {"index": "values", "priority": "values"},
    "ReplayStorage.validate": {"progress": "flag"},
    "ReplayStorageEnsemble": {
        "storages": "object",
        "shares": "shares?",
        "batch_size": "count from 1?",
        "generator": "object?",
    },
    "ReplayStorageEnsemble.batches": {
        "num_batches": "count",
        "batch_size": "count from 1?",
        "epochs": "count",
    },
    "ReplayStorageEnsemble.can_sample": {"batch_size": "count from 1?"},
    "ReplayStorageEnsemble.explain": {"batch": "steps"},
    "ReplayStorageEnsemble.sample": {"batch_size": "count from 1?", "return_info": "flag"},
    "ReplayStorageEnsemble.shares": {"value": "shares"},
    "ReplayStorageEnsemble.update_priority": {
        "index": "slots",
        "priority": "values",
        "buffer_ids": "slots",
    },
    "ReplayStorageEnsemble.update_tensordict_priority": {"data": "steps", "priority": "values?"},
    "ReplayStorage.as_remote": {"remote_config": "mapping?"},
    "ReplayStorage.close": {"keep": "flag"},
    "ReplayStorage.flush": {},
    "ReplayStorage.load_state_dict": {"state_dict": "mapping"},
    "ReplayStorage.loads": {"path": "path", "progress": "flag"},
    "ReplayStorage.loader": {
        "num_workers": "count",
        "batch_size": "count from 1?",
        "fetch_every": "count from 1",
        "pin_memory": "flag",
        "seed": "count?",
        "options": "any",
    },
    "ReplayStorage.dumps": {"path": "path", "progress": "flag"},
    "ReplayStorage.state_dict": {},
    "ReplayStorage.query": {"predicate": "function?", "trajectory_key": "key?"},
    "ReplayStorage.set_": {"key": "any", "value": "any"},
    "ReplayStorage.set_at_": {"key": "any", "value": "any", "index": "any"},
    "ReplayStorage.update_": {"value": "any"},
    "ReplayStorage.n_step": {"value": "count from 1"},
    "ReplayStorage.discount": {"value": "share"},
    "ReplayStorage.alpha": {"value": "exponent"},
    "ReplayStorage.beta": {"value": "share"},
    "ReplayStorage.normalize": {"value": "choice"},
    "ReplayStorage.eps": {"value": "share above 0"},
    "ReplayStorage.eta": {"value": "share above 0"},
    "ReplayStorage.c_min": {"value": "count from 1"},
    "ReplayStorage.num_goals": {"value": "count or inf"},
    "ReplayStorage.strategy": {"value": "choice"},
    "UniformReplayStorage.from_env": {"env": "object", "options": "any"},
    "UniformReplayStorage.open": {"path": "any", "options": "any"},
    "EpisodeReplayStorage.extend": {
        "tensordicts": "steps",
        "lanes": "lanes?",
        "update_priority": "flag?",
    },
    "EpisodeReplayStorage.can_sample": {"batch_size": "count from 1?"},
    "FrameStack": {"num_frames": "count from 2", "dim": "dimension", "padding": "choice"},
    "PackedStorage": {
        "max_size": "count from 1",
        "device": "device",
        "scratch_dir": "path?",
        "existsok": "flag",
        "fields": "mapping?",
        "out_device": "device?",
        "share_next": "flag",
        "mode": "choice",
        "check": "flag?",
        "progress": "flag",
    },
    "PackedStorage.open": {
        "directory": "path",
        "mode": "choice",
        "out_device": "device?",
        "check": "flag?",
        "fetch_every": "count from 1",
        "progress": "flag",
    },
    "PackedStorage.set": {
        "cursor": "any",
        "data": "steps",
        "set_cursor": "any",
        "strict": "any",
        "steps": "any",
    },
    "PackedStorage.get": {"index": "any"},
    "PackedStorage.read": {"index": "slots", "keys": "any", "following": "slots?"},
    "EpisodeWriter": {
        "num_envs": "count from 1",
        "done_key": "key",
        "traj_key": "key",
        "keys": "keys?",
        "track_generations": "flag",
        "on_gap": "choice",
        "observation_keys": "keys?",
    },
    "EpisodeWriter.add": {"data": "steps", "then": "any"},
    "EpisodeWriter.extend": {"data": "steps", "lanes": "lanes?", "then": "any"},
    "EpisodeWriter.register_storage": {"storage": "object"},
    "EpisodeIndex": {
        "capacity": "count from 1",
        "num_envs": "count from 1",
        "device": "device",
        "spare_steps": "count",
    },
    "EpisodeIndex.append": {"done": "flags", "cut": "flags?", "lanes": "lanes?"},
    "EpisodeIndex.clear": {"keep_steps": "count"},
    "EpisodeIndex.end_episodes": {"lanes": "lanes?"},
    "EpisodeIndex.random_episodes": {"n": "count", "generator": "object?"},
    "EpisodeIndex.windows": {"slots": "slots", "num_rows": "count from 1"},
    "EpisodeIndex.lane_ids": {"lanes": "lanes?"},
    "EpisodeIndex.named_lanes": {"lanes": "lanes?"},
    "EpisodeIndex.newest_slot": {"lanes": "lanes?"},
    "EpisodeIndex.next_slots": {"num_steps": "count", "lanes": "lanes?"},
    "EpisodeIndex.random_slots": {"n": "count", "generator": "object?"},
    "EpisodeIndex.shift": {"slots": "slots", "steps": "any"},
    "EpisodeIndex.slots_by_age": {"ranks": "slots"},
    **{f"EpisodeIndex.{name}": {"slots": "slots"} for name in ("ages", "is_live", "steps")},
    **{
        f"EpisodeIndex.{name}": {"slots": "slots"}
        for name in ("ahead", "behind", "extent", "episode_id", "is_end", "is_finished", "is_whole")
    },
    "EpisodeSequence": {
        "length": "count from 1",
        "burn_in": "count",
        "bootstrap": "count",
        "boundary": "choice",
    },
    "EpisodeSequence.expand": {"index": "slots", "info": "mapping", "storage": "object"},
    "EpisodeSequence.targets": {"batch": "steps", "values": "tensor", "discount": "share"},
    "UniformSampler": {},
    "UniformSampler.sample": {"storage": "object", "batch_size": "count from 1"},
    "UniformSampler.sample_window": {
        "storage": "object",
        "batch_size": "count from 1",
        "window": "any",
    },
    "PERSampler": {
        "max_capacity": "count from 1",
        "alpha": "exponent",
        "beta": "share",
        "eps": "share above 0",
        "normalize": "choice",
        "reduction": "choice",
        "device": "device",
    },
    "PERSampler.alpha": {"value": "exponent"},
    "PERSampler.beta": {"value": "share"},
    "PERSampler.eps": {"value": "share above 0"},
    "PERSampler.normalize": {"value": "choice"},
    "PERSampler.sample": {"storage": "object", "batch_size": "count from 1"},
    "PERSampler.sample_window": {
        "storage": "object",
        "batch_size": "count from 1",
        "window": "any",
    },
    "PERSampler.validate": {"live": "slots?"},
    "PERSampler.update_priority": {
        "index": "values",
        "priority": "values",
        "storage": "object?",
        "stamp": "tensor?",
    },
    "ERESampler": {
        "eta": "share above 0",
        "c_min": "count from 1",
        "updates_per_phase": "count from 1?",
        "base": "object?",
        "reference": "choice",
    },
    "ERESampler.eta": {"value": "share above 0"},
    "ERESampler.c_min": {"value": "count from 1"},
    "ERESampler.updates_per_phase": {"value": "count from 1?"},
    "ERESampler.reference": {"value": "choice"},
    "ERESampler.begin_phase": {"num_updates": "count from 1"},
    "ERESampler.window": {"episodes": "object"},
    "HERSampler": {
        "strategy": "goals",
        "num_goals": "count or inf",
        "discount": "share",
        "goal_key": "key",
        "base": "object?",
    },
    "WrappingSampler.base": {"value": "object"},
    "HERSampler.discount": {"value": "share"},
    "HERSampler.strategy": {"value": "goals"},
    "HERSampler.num_goals": {"value": "count or inf"},
    "ERESampler.sample": {"storage": "object", "batch_size": "count from 1"},
    "HERSampler.sample": {"storage": "object", "batch_size": "count from 1"},
    **{f"{part}.load_state_dict": {"state_dict": "mapping"} for part in SAVED_PARTS},
    **{
        f"{part}.{method}": {"path": "path"}
        for part in SAVED_PARTS
        for method in ("dumps", "loads")
    },
    "ReturnImprovementEta": {
        "obj": "object",
        "num_returns": "count from 2",
        "decay": "share above 0",
    },
    "ReturnImprovementEta.num_returns": {"value": "count from 2"},
    "ReturnImprovementEta.decay": {"value": "share above 0"},
    "ReturnImprovementEta.step": {"episode_returns": "returns"},
    "NStep": {
        "n_step": "count from 1",
        "discount": "share",
        "reward_key": "key",
        "terminated_key": "key",
        "steps_to_next_obs_key": "key",
        "agent_done_key": "key?",
    },
    "NStep.n_step": {"value": "count from 1"},
    "NStep.discount": {"value": "share"},
    "GoalRelabel": {
        "reward_fn": "function",
        "terminated_fn": "function?",
        "goal_key": "key?",
        "info_keys": "keys",
        **{
            f"{name}_key": "key"
            for name in (
                "achieved_goal",
                "desired_goal",
                "reward",
                "done",
                "terminated",
                "truncated",
            )
        },
    },
    "GoalRelabel.audit": {"storage": "object", "num_rows": "count from 1"},
    "FlattenGoal": {
        "observation_space": "space?",
        "observation_key": "key",
        "achieved_goal_key": "key",
        "desired_goal_key": "key",
        "out_key": "key",
        "del_keys": "flag",
    },
    "FlattenGoal.flatten": {"parts": "mapping", "batch_dims": "count?"},
    "FlattenGoal.unflatten": {"flat": "tensor"},
    "FlattenGoal.forward": {"tensordict": "steps"},
    # TorchRL's constructor of a base that others build on.
    "ReplayTransform": dict.fromkeys(("in_keys", "out_keys", "in_keys_inv", "out_keys_inv"), "any"),
    "ReplayTransform.forward": {"tensordict": "any"},
    "ReplayTransform.set_extra_state": {"state": "mapping"},
    "gym_reward": {"env": "object"},
    "returns_to_go": {"reward": "tensor", "mask": "flags", "discount": "share"},
    "from_arrays": {
        "data": "mapping",
        "ends": "flags?",
        "goal_fn": "function?",
        **FILLING,
    },
    "from_minari": {"dataset": "dataset", **FILLING},
    "plot_ages": {**PICTURE, "batch": "steps", "bins": "count from 1"},
    "plot_episode": {**PICTURE, "batch": "steps", "sample": "count?", "most": "count from 1"},
    "plot_priorities": PICTURE,
    "plot_ring": PICTURE,
    "to_minari": {
        "storage": "object",
        "dataset_id": "name",
        "observation_space": "object?",
        "action_space": "object?",
        "progress": "flag",
        "metadata": "any",
    },
    "sequence_priority": {"td_error": "tensor", "eta": "share", "mask": "flags?"},
}
#: What messages call an argument, where not by its name.
OTHER_WORDS = {
    "observation_space": "observation space|space of 'observation",
    "action_space": "space of 'action",
    "storage": "episode index",
    "env": "no compute_reward",
    "state_dict": "saved",
    "state": "saved",
}
#: Classes that are one part of another, in a file of their own.
WRITTEN_IN = {"EpisodeAnswers": "EpisodeIndex"}
#: What parts are asked for when a storage is saved or loaded.
STATES = {"check_state", "read_state", "take_state"}
#: What parts say to one another, or TorchRL's containers to them, about what was checked before.
BETWEEN_PARTS = {
    "EpisodeIndex": {
        *("draw", "evict", "goals", "newest"),
        *(
            "newest_slots",
            "moved",
            "rejoin",
            "restart",
            "sequences",
            "slots_since",
            "write",
        ),
    },
    "EpisodeWriter": {"append", "restart", "takes"},
    "FrameStack": {"as_seen", "frame_shape", "frames_first"},
    "PackedStorage": {
        *("check_mutable", "check_writable", "forget_links", "gather", "get_root"),
        *(
            "keep_episodes",
            "lay_out",
            "lay_out_anew",
            "finds_gaps",
            "make_room",
            "mover",
            "note",
        ),
        *("fit", "new_rows", "refresh", "write"),
    },
    "PERSampler": {
        "inconsistent_slots",
        "add",
        "attach",
        "catch_up",
        "check_priorities",
        "extend",
        "leave",
        "mark_update",
        "plain_weights",
    },
    "ERESampler": {"add", "extend", "mark_update"},
    "WrappingSampler": {
        "add",
        "extend",
        "mark_update",
        "can_sample",
        "default_priority",
        "ran_out",
        "update_priority",
    },
    "ReplayTransform": {"hides_next", "replaces", "replay", "show"},
    "NStep": {"hides_next", "replaces", "replay", "show"},
    "GoalRelabel": {"hides_next", "replay", "show"},
    "FlattenGoal": {"transform_observation_spec"},
}


def public_callables() -> dict[str, list[str]]:
    """Lists `Class`, `Class.method`, `Class.attribute` that can be set, and functions -> parameters."""
    found: dict[str, list[str]] = {}
    for name, public in PUBLIC.items():
        found[name] = parameters_of(public)
        if not inspect.isclass(public):
            continue
        for member in dir(public):
            owner = next((base for base in public.__mro__ if member in vars(base)), object)
            if member.startswith("_") or not owner.__module__.startswith("trl_storages"):
                continue
            owner_name = WRITTEN_IN.get(owner.__name__, owner.__name__)
            if owner is SavedPart:
                owner_name = name
            if owner is BatchSource:
                owner_name = (
                    "ReplayStorage" if issubclass(public, trl_storages.ReplayStorage) else name
                )
            if member in STATES or member in BETWEEN_PARTS.get(owner_name, ()):
                continue
            static = inspect.getattr_static(public, member)
            if isinstance(static, property):
                if static.fset is not None and member != "ran_out":
                    found[f"{owner_name}.{member}"] = ["value"]
            elif hasattr(type(static), "__set__"):
                found[f"{owner_name}.{member}"] = ["value"]
            elif callable(getattr(public, member)):
                bound = inspect.ismethod(getattr(public, member))
                named = parameters_of(getattr(public, member))
                found[f"{owner_name}.{member}"] = named if bound else named[1:]
    return found


def parameters_of(function: Any) -> list[str]:
    # Ray gives methods a parameter of its own where it makes an actor of their class.
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]


def test_every_public_callable_is_in_the_table():
    found = public_callables()
    without = {name for name, parameters in found.items() if not parameters} - {*TABLE}
    assert {*found} - without == {*TABLE} - {name for name in TABLE if name not in found}
    assert not {*TABLE} - {*found}
    for name, parameters in found.items():
        missing = {*parameters} - {*TABLE.get(name, ())}
        assert not missing, f"{name} has parameters that the table lacks: {missing}"


class World:
    """What the callables belong to: a storage with all parts, and what goes with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        options = {"n_step": 2, "alpha": 0.5, "eta": 0.9, "batch_size": 4, "seed": 0, "c_min": 2}
        self.storage = make(num_envs=2, storage_size=20, **options)
        self.storage.extend(rows(2, 8))
        self.whole = make("EpisodeReplayStorage", batch_size=2, seed=0)
        self.whole.extend(rows(8))
        self.ensemble = trl_storages.ReplayStorageEnsemble(
            self.storage, make(n_step=2), batch_size=4
        )
        self.ensemble.storages[1].extend(rows(8))
        self.flatten = trl_storages.FlattenGoal(OBSERVATIONS)
        self.eta = trl_storages.ReturnImprovementEta(self.storage)
        self.sequences = trl_storages.EpisodeSequence(3)
        self.uniform = trl_storages.UniformSampler()

    def on_disk(self) -> Path:
        path = self.directory / "rows"
        if not path.exists():
            storage = make(path=path)
            storage.extend(rows(4))
            storage.close()
        return path

    def target(self, owner: str) -> Any:
        storage = self.storage
        sampler, transform = storage._sampler, storage._transform
        return {
            "EpisodeIndex": storage.episodes,
            "EpisodeWriter": storage._writer,
            "PackedStorage": storage._storage,
            "WrappingSampler": sampler,
            "HERSampler": sampler,
            "ERESampler": sampler.base,
            "PERSampler": sampler.base.base,
            "UniformSampler": self.uniform,
            "EpisodeSequence": self.sequences,
            "GoalRelabel": transform[0],
            "NStep": transform[1],
            "ReplayTransform": transform[0],
            "FlattenGoal": self.flatten,
            "ReturnImprovementEta": self.eta,
            "EpisodeReplayStorage": self.whole,
            "ReplayStorageEnsemble": self.ensemble,
        }.get(owner, storage)

    def good(self, name: str) -> dict[str, Any]:
        """Returns arguments that are right, as far as they must be given."""
        if [*TABLE[name]] == ["value"]:
            return {}
        slots = torch.tensor([0, 1])
        batch = self.storage.sample()
        batch["td_error"] = torch.rand(4)
        owner, _, method = name.partition(".")
        if method == "open":
            path = self.on_disk()
            return {"directory": path} if owner == "PackedStorage" else {"path": path}
        if name == "ReplayStorage.record":
            observation = {key: np.zeros((2, *of.shape), "f") for key, of in OBSERVATIONS.items()}
            zeros, flags = np.zeros(2), np.zeros(2, bool)
            names = TABLE[name]
            given = (observation, np.zeros(2, np.int64), zeros, flags, flags, {}, observation)
            return dict(zip(names, given, strict=True))
        if owner == "ReplayStorageEnsemble":
            batch = self.ensemble.sample().set("td_error", torch.rand(4))
        if method in ("update_tensordict_priority", "explain"):
            return {next(iter(TABLE[name])): batch}
        if method == "targets":
            batch = self.storage.sample(3).set("is_init", torch.zeros(3, 1, dtype=torch.bool))
            batch["validity_mask"] = torch.ones(3, dtype=torch.bool)
            return {"batch": batch, "values": torch.zeros(1, 3), "discount": 0.5}
        common = {
            "observation_space": OBSERVATIONS,
            "action_space": ACTIONS,
            "env": gymnasium.make("BitFlipping-v0", n_bits=2),
            "reward_fn": distance_reward,
            "storage": self.storage._storage,
            "max_size": 10,
            "capacity": 10,
            "max_capacity": 10,
            "length": 3,
            "obj": self.storage,
            "batch_size": 3,
            "slots": slots,
            "ranks": slots,
            "index": slots,
            "cursor": slots,
            "priority": torch.rand(2),
            "buffer_ids": slots,
            "stamp": torch.zeros(2, dtype=torch.int32),
            "steps": 1,
            "keys": ["action"],
            "data": rows(2, 1) if owner != "PackedStorage" else rows(2),
            "tensordicts": rows(4) if owner == "EpisodeReplayStorage" else rows(2, 3),
            "done": torch.zeros(2, 1, dtype=torch.bool),
            "n": 2,
            "num_batches": 2,
            "num_steps": 2,
            "num_rows": 2,
            "num_frames": 2,
            "num_updates": 2,
            "sampler": self.uniform,
            "window": torch.tensor(3),
            "episodes": self.storage.episodes,
            "info": {},
            "parts": {key: torch.zeros(of.shape) for key, of in OBSERVATIONS.items()},
            "flat": torch.zeros(10),
            "tensordict": rows(2),
            "td_error": torch.rand(2, 3),
            "reward": torch.rand(2, 3, 1),
            "mask": torch.ones(2, 3, dtype=torch.bool),
            "path": self.directory / "dump",
        }
        if not method:
            common.pop("steps")
            common.pop("keys")
            if name not in ("ReplayStorage",):
                common.pop("storage")
            if name != "ReplayStorage":
                common.pop("sampler")
            if name in plotting.__all__:
                return {
                    key: value
                    for key, value in {"storage": self.storage, "batch": batch}.items()
                    if key in TABLE[name]
                }
            if name in datasets.__all__:
                return datasets_of(self.storage)[name]
            common.pop("path")
            common["storage"] = LazyTensorStorage(10)
        if method.endswith("_transform"):
            common |= {"transform": trl_storages.NStep(), "index": 0}
        if method == "audit":
            common["storage"] = self.storage
        target = PUBLIC.get(name) or getattr(self.target(owner), method)
        needed = parameters_of(target)
        return {key: value for key, value in common.items() if key in needed}

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        owner, _, method = name.partition(".")
        if owner == "ReplayStorageEnsemble" and not method:
            # They are named one after another.
            storages = [self.storage]
            if "storages" in arguments:
                storages.append(arguments.pop("storages"))
            return trl_storages.ReplayStorageEnsemble(*storages, **arguments)
        if not method:
            return PUBLIC[owner](**arguments)
        if method in ("from_env", "open"):
            return getattr(getattr(trl_storages, owner), method)(**arguments)
        target = self.target(owner)
        if [*TABLE[name]] == ["value"]:
            return setattr(target, method, arguments["value"])
        return getattr(target, method)(**arguments)


def datasets_of(storage: trl_storages.ReplayStorage) -> dict[str, dict[str, Any]]:
    """Arguments that are right for functions of datasets."""
    flat = {name: np.zeros((4, 2), "f") for name in ("observations", "actions")}
    zeros = np.zeros((4, 1), "f")
    dataset = SimpleNamespace(
        iterate_episodes=lambda _: [
            SimpleNamespace(
                observations=flat["observations"],
                actions=flat["actions"][1:],
                **dict.fromkeys(("rewards", "terminations", "truncations"), zeros[1:]),
                infos={},
            )
        ],
        episode_indices=[0],
        storage=SimpleNamespace(get_episode_metadata=lambda _: [{"total_steps": 3}]),
        observation_space=gymnasium.spaces.Box(-1, 1, (2,)),
        action_space=gymnasium.spaces.Box(-1, 1, (2,)),
    )
    return {
        "from_arrays": {"data": {**flat, "rewards": zeros, "timeouts": zeros}},
        "from_minari": {"dataset": dataset},
        # What is right there, Minari itself is asked about, in tests of its own.
        "to_minari": {"storage": storage, "dataset_id": "mine-v0"},
    }


CASES = [
    (name, parameter, kind)
    for name, parameters in TABLE.items()
    for parameter, kind in parameters.items()
    if kind != "any"
]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.requirement("refused-is-unchanged")
@pytest.mark.parametrize(("name", "parameter", "kind"), CASES)
def test_nonsense_is_refused_by_name_and_changes_nothing(
    world, name, parameter, kind, tmp_path, monkeypatch
):
    # What is taken by mistake must not lie about.
    monkeypatch.chdir(tmp_path)
    good = world.good(name)
    before = [(snapshot(each), each) for each in (world.storage, world.whole)]
    # None where it is not allowed is as bad as anything else.
    bad = [*BAD[kind.rstrip("?")]] + ([] if kind.endswith("?") else [None])
    wrong = [line for value in bad for line in tried(world, name, good, parameter, value)]
    for was, storage in before:
        assert_unchanged(was, storage)
    assert not wrong, f"{name}({parameter}=...):\n" + "\n".join(wrong)


def tried(world: World, name: str, good: dict[str, Any], parameter: str, value: Any) -> list[str]:
    """Says what is wrong with how a bad argument is refused."""
    try:
        made = world.call(name, {**good, parameter: value})
    except Exception as error:
        return complaints(error, parameter, value)
    return [f"{value!r} was taken: {made!r:.60}"]


def complaints(error: Exception, parameter: str, value: Any) -> list[str]:
    """Says what is wrong with an error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error.args[0]) if error.args else ""
    told = f"{value!r}: {type(error).__name__}: {message:.150}"
    if not isinstance(error, ERRORS) or not frame.filename.startswith(PACKAGE):
        return [f"{told} (raised in {frame.filename}:{frame.lineno})"]
    named = OTHER_WORDS.get(parameter, parameter)
    if not re.search(rf"\b({parameter}|{named})\b", message) and parameter != "value":
        return [f"{told} (does not name {parameter})"]
    return []


def test_what_is_right_is_taken(world):
    """Or an argument of the walk that is wrong by itself would hide what it is about."""
    assert world.call("EpisodeIndex.shift", world.good("EpisodeIndex.shift")).tolist() == [2, 3]
    world.storage.validate()
    for name in ("ReplayStorage.sample", "ReplayStorage.explain", "ReplayStorage.batches"):
        assert world.call(name, world.good(name)) is not None
    for name in PUBLIC:
        if name not in ("ReplayTransform", "gym_reward", "to_minari"):
            assert world.call(name, world.good(name)) is not None
    assert isinstance(world.storage.sample(), TensorDict)


#: Methods of parts that containers call, with arguments by position.
CALLED_BY_CONTAINERS = re.compile(
    r"(EpisodeIndex|EpisodeWriter|PackedStorage|UniformSampler|PERSampler|ERESampler|HERSampler"
    r"|ReplayTransform)\.(?!open|begin_phase)|\.(load_state_dict|dumps|loads|forward)$"
)
#: What takes no argument of its own, passes all on, or says something else first.
ANSWERS_OTHERWISE = {
    *("UniformSampler", "ReplayTransform", "UniformReplayStorage.open", "to_minari"),
    "ReplayStorage.loader",
}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, parameters in TABLE.items()
        if [*parameters] != ["value"]
        and name not in ANSWERS_OTHERWISE
        and (not CALLED_BY_CONTAINERS.search(name) or name.startswith("ReplayStorage."))
    ],
)
def test_an_unknown_argument_is_answered_with_those_there_are(world, name):
    with pytest.raises(TypeError) as told:
        world.call(name, {**world.good(name), "its_colour": 1})
    answer = "do you mean|there are|takes none|in this order|one TensorDict"
    assert re.search(answer, str(told.value))
