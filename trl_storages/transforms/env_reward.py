"""The reward function of a gymnasium goal environment, for `GoalRelabel`.

Letters: B batch, G goal shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from tensordict import NestedKey
from torchrl.envs import ParallelEnv, SerialEnv, TransformedEnv

__all__ = ["gym_reward"]


class gym_reward:  # noqa: N801  (it is used as a function)
    """Adapts the `compute_reward` of a gymnasium goal environment.

    Goals are converted to NumPy and rewards back, so on a GPU each batch synchronises with the host:
    write the reward with torch operations there.

    Args:
        env: a gymnasium environment, wrapped or not, or a TorchRL wrapper around one.

    Raises:
        TypeError: the environment has no `compute_reward`, or holds several environments.

    >>> import gymnasium, trl_storages
    >>> reward_fn = gym_reward(gymnasium.make("BitFlipping-v0", n_bits=2))
    >>> reward_fn(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.ones(2, 2), {})
    tensor([-1., 0.])
    """

    def __init__(self, env: Any) -> None:
        base = env.base_env if isinstance(env, TransformedEnv) else env
        if isinstance(base, (ParallelEnv, SerialEnv, VectorEnv)):
            raise TypeError(
                f"{type(base).__name__} holds several environments, maybe in other processes: give "
                "gym_reward one made alike."
            )
        unwrapped = getattr(env, "unwrapped", env)
        # TorchRL's wrappers hold gymnasium's environment as `_env`.
        while not hasattr(unwrapped, "compute_reward") and hasattr(unwrapped, "_env"):
            unwrapped = getattr(unwrapped._env, "unwrapped", unwrapped._env)
        if not callable(getattr(unwrapped, "compute_reward", None)):
            raise TypeError(
                f"{env} has no compute_reward(achieved_goal, desired_goal, info): give GoalRelabel a "
                "reward_fn of your own."
            )
        self.compute_reward = unwrapped.compute_reward

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.compute_reward, '__self__', self.compute_reward)})"

    def __call__(
        self,
        achieved_goal: torch.Tensor,
        desired_goal: torch.Tensor,
        transition: Mapping[NestedKey, torch.Tensor],
    ) -> torch.Tensor:
        """Returns the rewards `[B]` for goals `[B, *G]`."""
        info = {key: value.cpu().numpy() for key, value in transition.items()}
        reward = self.compute_reward(achieved_goal.cpu().numpy(), desired_goal.cpu().numpy(), info)
        return torch.as_tensor(reward, device=achieved_goal.device)
