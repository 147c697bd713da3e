"""A load that is refused says why, and leaves rows, index, sampler, recorder, generator and files alone.

Every entry of every state and every file of every dump is damaged in every way that `damages` knows.
"""

import json
from functools import cache

import numpy as np
import pytest
import torch
from damages import damaged_states, files_in
from goal_data import distance_reward, goal_transitions
from gymnasium import spaces
from snapshots import assert_unchanged, files_of, snapshot
from torchrl.envs.transforms import Compose, RewardScaling

from trl_storages import (
    EREReplayStorage,
    HERReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    UniformReplayStorage,
)
from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage
from trl_storages.samplers import ERESampler, HERSampler, PERSampler, UniformSampler
from trl_storages.transforms import GoalRelabel, NStep
from trl_storages.writing import EpisodeWriter

pytestmark = pytest.mark.requirement("refused-is-unchanged")

SIZE, LANES = 12, 2
REFUSED = (KeyError, OSError, TypeError, ValueError)
GOALS = spaces.Dict(
    {
        "observation": spaces.Box(-np.inf, np.inf, (4,), np.float32),
        "achieved_goal": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "desired_goal": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    }
)


def recipe(kind, **defaults):
    if kind is HERReplayStorage:
        defaults["reward_fn"] = distance_reward

    def make(**options):
        options = {"storage_size": SIZE, "num_envs": LANES, "batch_size": 4, "seed": 1} | options
        return kind(GOALS, spaces.Discrete(999), **defaults, **options)

    return make


def over(rows, sampler, *, tracks=False, **given):
    """Storages that are put together by hand."""

    def make(**options):
        return ReplayStorage(
            storage=rows(SIZE),
            sampler=sampler(),
            writer=EpisodeWriter(LANES, track_generations=tracks),
            batch_size=4,
            generator=torch.Generator().manual_seed(1),
            **(given | options),
        )

    return make


def all_parts():
    return HERSampler(base=ERESampler(0.99, 4, base=PERSampler(SIZE)))


# Each part at least once, and each way to put samplers upon one another.
MAKERS = {
    "uniform": recipe(UniformReplayStorage, autoreset_mode="NextStep"),
    "n-step": recipe(NStepReplayStorage),
    "prioritized": recipe(PrioritizedReplayStorage),
    "recency": recipe(EREReplayStorage, c_min=4),
    "hindsight": recipe(HERReplayStorage),
    "all of them": recipe(HERReplayStorage, n_step=3, alpha=0.6, eta=0.99, c_min=4),
    "put together by hand": over(
        PackedStorage,
        all_parts,
        transform=Compose(GoalRelabel(distance_reward), NStep(2, 0.9)),
    ),
    "transforms of TorchRL's": over(
        PackedStorage,
        UniformSampler,
        transform=RewardScaling(0.5, 2.0, in_keys=[("next", "reward")]),
    ),
    "without replacement": over(
        PackedStorage,
        lambda: HERSampler(base=UniformSampler(without_replacement=True)),
        transform=GoalRelabel(distance_reward),
    ),
    "counting generations": over(PackedStorage, UniformSampler, tracks=True),
}
each_kind = pytest.mark.parametrize("kind", MAKERS)


def filled(make, num_steps, **options):
    """A storage in the middle of its work, after the ring has wrapped."""
    storage = make(**options)
    steps = torch.arange(num_steps).expand(storage.episodes.num_envs, -1)
    lanes = torch.arange(len(steps)).unsqueeze(1).expand_as(steps)
    done = (steps + 2 * lanes) % 5 == 4
    for step in range(num_steps):
        at = slice(step, step + 1)
        storage.extend(goal_transitions(lanes[:, at], steps[:, at], done[:, at]))
        if step == num_steps // 2:
            batch = storage.sample()
            batch["td_error"] = torch.arange(len(batch)).float() + 0.5
            storage.update_tensordict_priority(batch)
    return storage


class Walk:
    """Loads what is damaged into one storage after another, and keeps what went wrong."""

    def __init__(self, make):
        self._make, self.wrong, self.tried = make, [], 0
        self._renew()

    def _renew(self):
        self.storage = self._make()
        self.storage.synchronize()  # draws that are under way take numbers from the generator
        self._before = snapshot(self.storage)

    def load(self, name, load):
        self.tried += 1
        try:
            load(self.storage)
        except REFUSED as error:
            if len(str(error)) < 40:
                self.wrong.append(f"{name}: says only {error!r}")
        except Exception as error:  # the walk is to go on
            self.wrong.append(f"{name}: raises {type(error).__name__}: {error}")
        else:
            self.wrong.append(f"{name}: is loaded")
            self._renew()
            return
        try:
            assert_unchanged(self._before, self.storage)
        except AssertionError as error:
            self.wrong.append(f"{name}: {error}")
            self._renew()

    def close(self):
        self.storage.validate()
        self.storage.sample()
        assert not self.wrong, f"{len(self.wrong)} of {self.tried}:\n" + "\n".join(self.wrong)


# What may well be so: numbers that any row may hold, counters, and what was not there to be saved.
def is_harmless(name):
    entry, _, damage = name.partition(": ")
    inner = entry.rpartition(".")[2]
    return (
        damage == "None"
        or (
            damage in ("negative", "huge", "NaN")
            and entry.startswith(("_storage._storage", "_storage.fields."))
        )
        or (inner == "last_trajectory" and damage in ("negative", "huge"))
        or (entry.startswith("_transforms.") and damage in ("NaN", "negative"))
        or (inner == "_generation" and damage == "huge")
        or inner == "_schema_version"
        or entry.startswith("_rng")
        or (inner == "largest" and damage == "huge")
        or (inner in ("len_storage", "drop_last", "_ran_out") and damage in ("huge", "other flag"))
        or (inner == "_sample_list" and damage == "another shape")
        or (inner in ("_write_count", "write_count") and damage == "huge")
    )


# What each state or dump holds is damaged once.
WALKED_WHOLE = ("all of them", "put together by hand")


@cache
def damages_of_all_of_them():
    return {name for name, _ in damaged_states(filled(MAKERS["all of them"], 8).state_dict())}


@each_kind
def test_each_entry_of_a_state(kind):
    make = MAKERS[kind]
    known = () if kind in WALKED_WHOLE else damages_of_all_of_them()
    state, walk = filled(make, 8).state_dict(), Walk(lambda: filled(make, 3))
    for name, damaged in damaged_states(state, known):
        if not is_harmless(name):
            walk.load(name, lambda storage, damaged=damaged: storage.load_state_dict(damaged))
    walk.close()


@each_kind
def test_each_file_of_a_dump(kind, tmp_path):
    make, dump, known = MAKERS[kind], tmp_path / "dump", set()
    filled(make, 8).dumps(dump)
    if kind not in WALKED_WHOLE:
        filled(MAKERS["all of them"], 8).dumps(tmp_path / "known")
        known = {entry for _, entry, *_ in files_in(tmp_path / "known")}
    walk = Walk(lambda: filled(make, 3))
    for file, entry, how, damage in files_in(dump):
        if entry in known or is_harmless(f"{entry}: {how}"):
            continue
        name, data = f"{entry or file.name}: {how}", file.read_bytes()
        damage(file)
        before = files_of(dump)
        walk.load(name, lambda storage: storage.loads(dump))
        assert files_of(dump) == before, f"{name} changes the dump"
        for left in (file, file.with_name("elsewhere")):
            if left.is_dir():
                left.rmdir()
            left.unlink(missing_ok=True)
        file.write_bytes(data)
    walk.storage.loads(dump)
    walk.close()


NAMES = ("../../secret", "/etc/passwd", "..", "", "shape/x", "$", "a.b")


def test_a_field_of_any_name_stays_in_the_directory_of_its_dump(tmp_path):
    rows = goal_transitions(torch.zeros(2).long(), torch.arange(2), torch.zeros(2).bool())
    for name in NAMES[:3] + NAMES[4:]:
        rows[name] = torch.rand(2)
    saved, fresh = (ReplayStorage(storage=PackedStorage(4)) for _ in range(2))
    saved.extend(rows)
    saved.dumps(tmp_path / "dump")
    assert [file.name for file in tmp_path.iterdir()] == ["dump"]
    fresh.loads(tmp_path / "dump")
    assert (fresh[:] == saved[:]).all()


def test_a_number_of_a_file_can_not_leave_the_directory_of_a_dump(tmp_path):
    dump, storage = tmp_path / "dump", filled(MAKERS["uniform"], 8)
    storage.dumps(dump)
    (tmp_path / "secret.tensor").write_bytes((dump / "0.tensor").read_bytes())
    text = json.loads((dump / "state.json").read_text())
    assert text["_storage"]["_storage"]["file"] == 0
    for name in ("../secret", str(tmp_path / "secret"), "0/../../secret", True, 0.0, None, [0], -1):
        text["_storage"]["_storage"]["file"] = name
        (dump / "state.json").write_text(json.dumps(text))
        before = snapshot(storage)
        with pytest.raises((ValueError, FileNotFoundError), match=r"number of a file|is missing"):
            storage.loads(dump)
        assert_unchanged(before, storage)
