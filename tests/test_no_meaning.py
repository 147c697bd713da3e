"""Arguments that are right one by one and mean nothing together: an error with a way out."""

import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.transforms import Compose

from trl_storages import (
    ERESampler,
    GoalRelabel,
    HERSampler,
    NStep,
    PackedStorage,
    PERSampler,
    ReplayStorage,
)


def distance(achieved, desired, _):
    return -(achieved - desired).norm(dim=-1)


def reached(achieved, desired, _):
    return (achieved == desired).all(-1)


def filled(sampler=None, *transforms):
    storage = ReplayStorage(
        storage=PackedStorage(10),
        sampler=sampler,
        transform=Compose(*transforms) if transforms else None,
        batch_size=6,
    )
    goal = {"achieved_goal": torch.arange(7.0).view(7, 1), "desired_goal": torch.zeros(7, 1)}
    done = torch.zeros(7, 1, dtype=torch.bool)
    flags = {"done": done, "terminated": done, "truncated": done}
    after = {"reward": torch.ones(7, 1), "achieved_goal": goal["achieved_goal"] + 1, **flags}
    after["desired_goal"] = goal["desired_goal"]
    storage.extend(TensorDict({**goal, "next": after}, [7]))
    return storage


def actor(**options):
    return GoalRelabel(None, goal_key="actor", **options)


VALUE, TWO = GoalRelabel(distance), lambda: HERSampler(goal_key="actor", base=HERSampler())
#: What is made or sampled, and the error that says what to do.
PAIRS = {
    "one goal from two samplers": (
        lambda: HERSampler(base=HERSampler("final", base=ERESampler(base=PERSampler(10)))),
        (ValueError, "base must draw no goals under 'goal_index'.*another goal_key.*mixture"),
    ),
    "one goal from two samplers with a key": (
        lambda: HERSampler(goal_key="actor", base=HERSampler(base=HERSampler(goal_key="actor"))),
        (ValueError, "base must draw no goals under 'actor_index'.*another goal_key"),
    ),
    "two goals whose entries have one name": (
        lambda: HERSampler(goal_key="goal", base=HERSampler()),
        (
            ValueError,
            "base must draw no goals under 'goal_index'.*got one of goal_key='desired_goal'",
        ),
    ),
    "a base that is exchanged for one of the same goal": (
        lambda: setattr(HERSampler(), "base", HERSampler()),
        (ValueError, "another goal_key"),
    ),
    "a base that is exchanged for one without windows": (
        lambda: setattr(ERESampler(), "base", HERSampler()),
        (TypeError, "base must be able to draw within a window"),
    ),
    "a goal under next": (
        lambda: HERSampler(goal_key=("next", "desired_goal")),
        (ValueError, "goal_key must be the key of an entry now, not under 'next'"),
    ),
    **{
        f"a {name} under next": (
            lambda name=name: GoalRelabel(distance, **{name: ("next", "goal")}),
            (ValueError, f"{name} must be the key of an entry now, not under 'next'"),
        )
        for name in ("goal_key", "achieved_goal_key", "desired_goal_key")
    },
    "flags without rewards": (
        lambda: actor(terminated_fn=reached),
        (ValueError, "reward_fn must be given with terminated_fn.*leave terminated_fn out"),
    ),
    "infos for nobody": (
        lambda: actor(info_keys=["force"]),
        (ValueError, "reward_fn must be given with info_keys.*leave info_keys out"),
    ),
    "a goal written over what was achieved": (
        lambda: GoalRelabel(distance, goal_key="achieved_goal"),
        (ValueError, "achieved_goal_key must be another entry than the goal"),
    ),
    "one goal written twice": (
        lambda: filled(HERSampler(), VALUE, GoalRelabel(distance)).sample(),
        (RuntimeError, "'desired_goal' must be written by one transform, got 2"),
    ),
    "rewards for two goals": (
        lambda: filled(TWO(), VALUE, GoalRelabel(distance, goal_key="actor")).sample(),
        (
            RuntimeError,
            r"\('next', 'reward'\) must be written by one.*GoalRelabel\(None, goal_key=",
        ),
    ),
    "flags for two goals": (
        lambda: filled(
            TWO(),
            GoalRelabel(distance, terminated_fn=reached),
            GoalRelabel(
                distance,
                terminated_fn=reached,
                goal_key="actor",
                reward_key=("next", "achieved_goal"),
            ),
        ).sample(),
        (RuntimeError, r"\('next', 'terminated'\) must be written by one transform"),
    ),
    "folded twice": (
        lambda: filled(None, NStep(2), NStep(3)).sample(),
        (ValueError, "a transform has set 'steps_to_next_obs' already: use one NStep"),
    ),
    "folded before it is relabelled": (
        lambda: filled(HERSampler(), NStep(2), VALUE).sample(),
        (RuntimeError, r"Compose\(GoalRelabel\(...\), NStep\(...\)\)"),
    ),
    "relabelled by nothing drawn": (
        lambda: filled(None, VALUE).sample(),
        (KeyError, "pass sampler=HERSampler"),
    ),
    "drawn and not written": (
        lambda: filled(TWO(), VALUE).sample(),
        (RuntimeError, r"GoalRelabel\(None, goal_key='actor'\)"),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_what_means_nothing_is_refused(pair):
    make, (kind, message) = PAIRS[pair]
    with pytest.raises(kind, match=message):
        make()


def test_what_means_something_is_not():
    storage = filled(
        HERSampler("final", math.inf, goal_key="actor", base=HERSampler("current", math.inf)),
        VALUE,
        actor(),
        NStep(2, 1.0),
    )
    batch = storage.sample()
    assert (batch["actor"] == 7).all()
    assert torch.equal(batch["desired_goal"], batch["index"].unsqueeze(-1) + 1.0)
