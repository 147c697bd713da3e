"""After a resume, the next steps are taken for what they are, of the same environments or of new ones.

Without a warning, as new environments are no mistake.
"""

import os
import pickle

import numpy as np
import pytest
import torch
from contract.in_pairs import in_pairs
from contract.make import library, make_of
from gymnasium import spaces
from tensordict import TensorDict

FRAMES = 3
LENGTHS = (2, 3, 5)
STEPS_BEFORE = (2, 3, 4, 6)


class Loop:
    """A loop over environments whose observations are stacks of frames that tell episode and step."""

    def __init__(self, num_envs, mode, number):
        self.num_envs, self.mode = num_envs, mode
        self.frames = [self.reset(number, 0) for _ in range(num_envs)]
        self.number = [number] * num_envs
        self.step_of = [0] * num_envs
        self.is_over = [False] * num_envs
        #: For each environment the transitions: observation, next observation, and whether one begins.
        self.made = [[] for _ in range(num_envs)]

    def reset(self, number, lane):
        return np.full((FRAMES, 1), 100 * number, np.float32)

    def begin(self, lane):
        self.number[lane] += 1
        self.step_of[lane], self.is_over[lane] = 0, False
        self.frames[lane] = self.reset(self.number[lane], lane)

    def step(self, storage):
        before = np.stack(self.frames)
        rewards, ends = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        final = np.empty(self.num_envs, object)
        for lane in range(self.num_envs):
            if self.is_over[lane]:
                # The next-step autoreset of gymnasium.
                self.begin(lane)
                continue
            self.step_of[lane] += 1
            newest = self.frames[lane][-1:] + 1
            after = np.concatenate([self.frames[lane][1:], newest])
            self.made[lane].append((before[lane], after, self.step_of[lane] == 1))
            self.frames[lane], rewards[lane] = after, 1
            ends[lane] = self.step_of[lane] == LENGTHS[lane]
            if ends[lane] and self.mode == "SameStep":
                final[lane] = after
                self.begin(lane)
            self.is_over[lane] = bool(ends[lane]) and self.mode == "NextStep"
        infos = {"final_obs": final, "_final_obs": ends} if self.mode == "SameStep" else {}
        step = before, np.zeros(self.num_envs, np.int64), rewards, ends, ends & False
        after = np.stack(self.frames)
        if self.num_envs == 1 and self.mode != "SameStep":
            step, after = tuple(it[0] for it in step), after[0]
        storage.record(*step, infos, after)
        if self.mode in ("Disabled", None):
            for lane in np.flatnonzero(ends):
                self.begin(lane)


def make(num_envs, mode, path=None, **options):
    box = spaces.Box(-np.inf, np.inf, (FRAMES, 1), np.float32)
    sizes = {"storage_size": 50 * num_envs, "num_envs": num_envs, "path": path}
    return make_of(box, spaces.Discrete(2), autoreset_mode=mode, **sizes, **options)


def dumped(storage, again, tmp_path):
    storage.dumps(tmp_path / "dump")
    other = again(None)
    other.loads(tmp_path / "dump")
    return other


def loaded(storage, again, _):
    other = again(None)
    other.load_state_dict(storage.state_dict())
    return other


def pickled(storage, again, _):
    return pickle.loads(pickle.dumps(storage))


def reopened(storage, again, tmp_path):
    storage.close()
    return again(tmp_path / "rows")


WAYS = {"dump": dumped, "state dict": loaded, "pickle": pickled, "disk": reopened}


def check(storage, before, loop):
    """Checks that a storage holds the transitions of the loops, and that episodes begin where they do."""
    storage.validate()
    index, rows = storage.episodes, storage[:]
    slots = index.slots_by_age()
    begins = index.num_before(slots) == 0
    for lane in range(index.num_envs):
        made = before[lane] + (loop.made[lane] if loop.made is not before else [])
        its = index.lanes_of(slots) == lane
        for place, key in enumerate(("observation", ("next", "observation"))):
            assert rows[key][its].tolist() == [transition[place].tolist() for transition in made]
        assert begins[its].tolist() == [transition[2] for transition in made]


@in_pairs(
    way=[*WAYS],
    frame_stack=[None, FRAMES],
    num_envs=[1, 3],
    mode=["NextStep", "SameStep", "Disabled"],
    is_new=[True, False],
)
def test_the_next_steps_after_a_resume(way, frame_stack, num_envs, mode, is_new, tmp_path):
    # The step after an end is skipped with NextStep, whoever made it.
    is_new = is_new and mode != "NextStep"
    for number, num_steps in enumerate(STEPS_BEFORE):
        place = tmp_path / str(number)

        def again(path):
            return make(num_envs, mode, path, frame_stack=frame_stack)

        storage = again(place / "rows" if way == "disk" else None)
        loop = Loop(num_envs, mode, number=1)
        for _ in range(num_steps):
            loop.step(storage)
        storage = WAYS[way](storage, again, place)
        before = loop.made
        if is_new:
            loop = Loop(num_envs, mode, number=50)
        for _ in range(7):
            loop.step(storage)
        check(storage, before, loop)
        storage.close()


def collected(number, num_steps, num_envs, done=False):
    """What a collector sends: the trajectories of each begin with 0."""
    seen = torch.arange(num_steps + 1.0).add(100 * number).expand(num_envs, -1).unsqueeze(-1)
    flags = torch.full((num_envs, num_steps, 1), False)
    flags[:, -1] = done
    ids = torch.arange(num_envs).unsqueeze(1).expand(-1, num_steps)
    following = {"observation": seen[:, 1:], "done": flags, "terminated": flags}
    entries = {"observation": seen[:, :-1], "next": following, "collector": {"traj_ids": ids}}
    return TensorDict(entries, [num_envs, num_steps])


@in_pairs(
    way=[*WAYS],
    num_envs=[1, 3],
    is_flat=[False, True],
    is_new=[True, False],
    on_gap=["cut", "ignore"],
)
def test_a_collector_after_a_resume(way, num_envs, is_flat, is_new, on_gap, tmp_path):
    def again(path):
        storage = library.PackedStorage(60, path=path)
        writer = library.EpisodeWriter(num_envs, on_gap=on_gap)
        return library.ReplayStorage(storage=storage, writer=writer)

    storage = again(tmp_path / "rows" if way == "disk" else None)
    steps = collected(1, 8, num_envs)
    first, second = steps[:, :5], steps[:, 5:]
    if is_new:
        second = collected(2, 3, num_envs)
    for number, steps in enumerate((first, second)):
        if number:
            storage = WAYS[way](storage, again, tmp_path)
        if num_envs == 1:
            steps = steps[0]
        storage.extend(steps.reshape(-1) if is_flat else steps)
    lengths = storage.episodes.table()["length"].tolist()
    assert lengths == ([5, 3] if is_new and on_gap == "cut" else [8]) * num_envs
    storage.validate()
    storage.storage.close() if way == "disk" else None


def test_new_environments_go_on_after_a_kill(tmp_path):
    if not (child := os.fork()):
        Loop(1, "Disabled", 1).step(make(1, "Disabled", tmp_path / "rows"))
        os._exit(0)
    os.waitpid(child, 0)
    storage = make(1, "Disabled", tmp_path / "rows")
    Loop(1, "Disabled", 3).step(storage)
    assert storage.episodes.table()["length"].tolist() == [1, 1]
    storage.close()


@pytest.mark.parametrize("way", WAYS)
def test_later_gaps_are_warned_of(way, tmp_path):
    storage = make(2, "Disabled", tmp_path / "rows" if way == "disk" else None)
    loop = Loop(2, "Disabled", 1)
    loop.step(storage)
    storage = WAYS[way](storage, lambda path: make(2, "Disabled", path), tmp_path)
    loop = Loop(2, "Disabled", 3)
    loop.step(storage)
    with pytest.warns(UserWarning, match="end_episodes"):
        Loop(2, "Disabled", 5).step(storage)
    assert storage.episodes.table()["length"].tolist() == [1, 1, 1] * 2
