"""Recipes fed by `record` and by compact batches: what is stored once is read as if it were stored whole.

Three storages of the same recipe live the same life: one of whole rows, one that stores observations
once, and one that is never told what comes next, as by a collector with `compact_obs=True`.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stored_once import assert_same, seeds

import trl_storages
from trl_storages import EpisodeSequence, FrameStack
from trl_storages.keys import next_key

pytestmark = [pytest.mark.requirement("share-next"), pytest.mark.requirement("frame-stack")]

GOALS = ("observation", "achieved_goal", "desired_goal")
RECIPES: dict[str, dict[str, Any]] = {
    "UniformReplayStorage": {},
    "NStepReplayStorage": {"n_step": 3},
    "PrioritizedReplayStorage": {"alpha": 0.7, "n_step": 2},
    "EREReplayStorage": {"eta": 0.9, "c_min": 3, "sample_unit": EpisodeSequence(3, burn_in=1)},
    "HERReplayStorage": {"reward_fn": lambda reached, goal, _: (reached == goal).all(-1).float()},
}


class Seen(gymnasium.Env):
    """Observations of few values, in episodes of 1 to 6 steps."""

    action_space = Discrete(3)

    def __init__(self, with_goals: bool, is_picture: bool) -> None:
        kind: tuple[Any, ...] = (0, 2, (2, 3), np.uint8) if is_picture else (-1, 1, (3,))
        self._keys = GOALS if with_goals else ()
        box = Box(*kind)
        goals = {key: Box(0, 2, (1,)) for key in GOALS[1:]}
        self.observation_space = (
            gymnasium.spaces.Dict({"observation": box, **goals}) if with_goals else box
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._left = int(self.np_random.integers(1, 7))
        return self.observation_space.sample(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        is_over, is_terminal = self._left == 0, bool(self.np_random.integers(2))
        after = self.observation_space.sample()
        return after, float(action), is_over and is_terminal, is_over and not is_terminal, {}


class Recorded(RuleBasedStateMachine):
    @initialize(luck=seeds)
    def make(self, luck: random.Random) -> None:
        recipe = luck.choice([*RECIPES])
        with_goals = recipe == "HERReplayStorage"
        frames = 0 if with_goals else luck.choice([0, 2, 4])
        padding = luck.choice(["same", "constant"])
        self.num_envs = luck.choice([1, 2, 3])
        mode = luck.choice([AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])

        def make_env() -> gymnasium.Env:
            env = Seen(with_goals, bool(frames))
            name = "reset" if padding == "same" else "zero"
            return FrameStackObservation(env, frames, padding_type=name) if frames else env

        self.env = SyncVectorEnv([make_env] * self.num_envs, autoreset_mode=mode)
        size = self.num_envs * luck.choice([1, 3, 8, 20])
        once: dict[str, Any] = {"share_next": True}
        if frames:
            once["frame_stack"] = {"observation": FrameStack(frames, padding=padding)}
        self.storages = [
            getattr(trl_storages, recipe)(
                self.env.single_observation_space,
                self.env.single_action_space,
                storage_size=size,
                num_envs=self.num_envs,
                batch_size=6,
                seed=5,
                autoreset_mode=mode,
                on_gap="ignore",
                **RECIPES[recipe],
                **options,
            )
            for options in ({}, once, once)
        ]
        self.shared, self.is_stacked = GOALS if with_goals else GOALS[:1], bool(frames)
        self.seen, _ = self.env.reset(seed=luck.randrange(1000))
        self.luck = luck
        self.live(2)

    @rule(num_steps=st.integers(1, 7))
    def live(self, num_steps: int) -> None:
        plain, once, compact = self.storages
        for _ in range(num_steps):
            actions = np.array([self.luck.randrange(3) for _ in range(self.num_envs)])
            after, *outcome = self.env.step(actions)
            slots = [it.record(self.seen, actions, *outcome, after) for it in (plain, once)]
            self.seen = after
            if slots[0] is None:
                # All environments were reset.
                assert slots[1] is None
                continue
            assert torch.equal(*slots)
            lanes = (slots[0] % self.num_envs).tolist()
            rows = plain.storage.get(slots[0]).exclude(*map(next_key, self.shared))
            with warnings.catch_warnings():
                # Once each storage.
                warnings.filterwarnings("ignore", "next observations are left out")
                compact.writer.extend(rows.unsqueeze(1), lanes=lanes)

    @rule(keep=st.sampled_from([0, 1, 4]))
    def clear(self, keep: int) -> None:
        for storage in self.storages:
            storage.empty(keep_steps=keep)
        if not keep:
            self.end()

    @rule()
    def end(self) -> None:
        for storage in self.storages:
            storage.end_episodes()
        self.seen, _ = self.env.reset()

    @rule()
    def save(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            for number, storage in enumerate(self.storages):
                storage.dumps(f"{directory}/{number}")
                storage.loads(f"{directory}/{number}")

    @invariant()
    def is_the_same(self) -> None:
        plain, once, compact = self.storages
        for storage in self.storages:
            storage.validate()
        assert_same(plain[:], once[:])
        if not plain.can_sample():
            return
        batches = [storage.sample() for storage in (plain, once)]
        assert_same(*batches)
        if "priority_weight" in batches[0]:
            for storage, batch in zip((plain, once), batches, strict=True):
                batch["td_error"] = batch["index"].float() / 7
                storage.update_tensordict_priority(batch)
        slots = plain.episodes.live_slots()
        expected, found = plain.storage.get(slots), compact.storage.get(slots)
        # Where nobody said what comes next, rows show their own, of stacks the newest frame once more.
        is_last = plain.episodes.ahead(slots) == 0
        for key in self.shared:
            own = expected[key][is_last]
            own = torch.cat([own[:, 1:], own[:, -1:]], 1) if self.is_stacked else own
            expected[next_key(key)][is_last] = own
        assert_same(expected, found)


TestRecorded = Recorded.TestCase
TestRecorded.settings = settings(max_examples=15, stateful_step_count=8)
