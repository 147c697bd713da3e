"""Infos belong to what a step led to: where they are stored, and who reads them."""

import gymnasium
import numpy as np
import pytest
import torch
from contract.make import assemble, library, make_of, new_folder
from contract.steps import Player, rows
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import GymWrapper, default_info_dict_reader

SPACES = Box(-np.inf, np.inf, (1,), np.float32), Discrete(5)


class MaskedEnv(gymnasium.Env):
    """Counts its steps, seven an episode; the mask of the allowed actions depends on the count."""

    observation_space, action_space = SPACES

    def _seen(self):
        mask = np.float32((self.count + np.arange(5)) % 3 > 0)
        return np.float32([self.count]), {"action_mask": mask, "robot": {"cost": self.count / 2}}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._seen()

    def step(self, action):
        self.count += 1
        after, info = self._seen()
        return after, float(self.count), self.count == 7, False, info


def masks_of(observations):
    return ((observations + torch.arange(5)) % 3 > 0).float()


@pytest.mark.requirement("n-step")
@pytest.mark.parametrize("mode", [None, *AutoresetMode])
@pytest.mark.parametrize("info_keys", [["action_mask"], {"action_mask": Box(0, 1, (5,))}])
def test_infos_are_of_the_observation_that_an_n_step_transition_leads_to(place, mode, info_keys):
    is_vector = mode is not None
    envs = SyncVectorEnv([MaskedEnv] * 2, autoreset_mode=mode) if is_vector else MaskedEnv()
    options = {"num_envs": 2, "autoreset_mode": mode} if is_vector else {}
    storage = make_of(*SPACES, "n-step", place=place, info_keys=info_keys, **options)
    before, _ = envs.reset()
    for _ in range(25):
        after, reward, terminated, truncated, infos = envs.step([0, 0] if is_vector else 0)
        storage.record(
            before, [0, 0] if is_vector else 0, reward, terminated, truncated, infos, after
        )
        over = np.asarray(terminated)
        if mode is AutoresetMode.DISABLED and over.any():
            after, _ = envs.reset(options={"reset_mask": over})
        elif mode is None and terminated:
            after, _ = envs.reset()
        before = after
    batch = storage.sample(64)
    assert batch["steps_to_next_obs"].max() == 3
    assert torch.equal(batch["next", "action_mask"], masks_of(batch["next", "observation"]))
    assert "action_mask" not in batch


def test_nested_infos_and_extra_fields_are_stored_where_they_are_named():
    env, fields = MaskedEnv(), {"state": (torch.float32, (1,))}
    storage = library.UniformReplayStorage(
        *SPACES, storage_size=20, info_keys=[("robot", "cost")], extra_fields=fields
    )
    before, _ = env.reset()
    after, *outcome, info = env.step(0)
    storage.record(before, 0, *outcome, {**info, "state": np.ones(1, np.float32)}, after)
    assert storage[0]["robot", "cost"] == 0.5
    assert storage[0]["state"] == 1


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("is_observed", [True, False])
def test_infos_of_torchrls_readers_are_stored(place, is_observed):
    """Also if the specs of the environment count them among the observations."""
    env = GymWrapper(MaskedEnv(), categorical_action_encoding=True)
    env.set_info_dict_reader(default_info_dict_reader(["action_mask"]))
    observed, action_spec = env.observation_spec.clone(), env.action_spec
    if is_observed:
        observed["action_mask"] = Unbounded((5,))
    else:
        del observed["action_mask"]
    options = {"storage_size": 60, "info_keys": ["action_mask"], "batch_size": 30}
    storage = make_of(observed, action_spec, "n-step", place=place, **options)
    for data in Collector(env, env.rand_action, frames_per_batch=40, total_frames=40):
        storage.extend(data)
    assert torch.equal(storage[:]["next", "action_mask"], data["next", "action_mask"])
    batch = storage.sample()
    assert torch.equal(batch["next", "action_mask"], masks_of(batch["next", "observation"]))


def test_reward_functions_read_infos_under_next_and_other_entries_at_the_root():
    seen = []

    def reward_fn(achieved, desired, infos):
        seen.append(infos)
        return achieved.sum(-1)

    relabel = library.GoalRelabel(reward_fn, info_keys=["effort", "action", ("next", "reward")])
    storage = assemble(20, sampler=library.HERSampler(), transform=relabel)
    storage.extend(rows(Player().play([9])))
    batch = storage.sample()
    stored = storage[batch["index"]]
    assert [*seen[0]] == ["effort", "action", ("next", "reward")]
    assert torch.equal(seen[0]["effort"], stored["next", "effort"])
    assert torch.equal(seen[0]["action"], stored["action"])
    assert torch.equal(seen[0]["next", "reward"], stored["next", "reward"])


@pytest.mark.requirement("refused-is-unchanged")
@pytest.mark.parametrize("info_keys", [["cost"], {"cost": Box(0, 1, (1,), np.float32)}])
def test_rows_with_infos_at_the_root_name_extend_from(info_keys):
    path, dump = new_folder() / "rows", new_folder() / "dump"
    step = np.ones(1, np.float32), 0, 1.0, False, False, {"cost": np.ones(1, np.float32)}
    # As rows were stored before.
    old = {"extra_fields": {"cost": (torch.float32, (1,))}, "storage_size": 20}
    for options in ({}, {"path": path}):
        storage = library.UniformReplayStorage(*SPACES, **old, **options)
        storage.record(*step, np.zeros(1, np.float32))
        state = storage.state_dict()
        if not options:
            storage.dumps(dump)
        storage.close()
    new = {"info_keys": info_keys, "storage_size": 20}
    with pytest.raises(ValueError, match=r"new\.extend_from\(old\)"):
        library.UniformReplayStorage(*SPACES, path=path, **new)
    storage = library.UniformReplayStorage(*SPACES, **new)
    for load, what in ((storage.loads, dump), (storage.load_state_dict, state)):
        with pytest.raises((ValueError, KeyError), match=r"new\.extend_from\(old\)"):
            load(what)
    storage.record(*step, np.zeros(1, np.float32))
    with pytest.raises(ValueError, match=r"new\.extend_from\(old\)"):
        storage.loads(dump)
    assert len(storage) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"info_keys": ["action"]},
        {"info_keys": ["reward"]},
        {"info_keys": [("next", "action")]},
        {"info_keys": ["cost", ("next", "cost")]},
        {"info_keys": ["cost"], "extra_fields": {"cost": (torch.float32, (1,))}},
    ],
)
def test_infos_with_the_key_of_another_field_raise(options):
    with pytest.raises(ValueError, match=r"must differ|extra_fields"):
        library.UniformReplayStorage(*SPACES, **options)
