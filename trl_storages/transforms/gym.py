"""Goal functions that call the methods of gymnasium's goal environments.

Letters: B batch, G goal shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorRewardWrapper, VectorWrapper
from tensordict import NestedKey
from torchrl.envs import GymWrapper, ParallelEnv, SerialEnv, TransformedEnv

__all__ = ["gym_reward", "gym_terminated", "outermost"]


def outermost(env: Any, name: str) -> tuple[Callable[..., Any], list[Any]]:
    """Finds a method of an environment, or of the outermost wrapper that has the method.

    Args:
        env: a gymnasium environment or vector environment, wrapped or not, or a TorchRL wrapper around
            an environment. If a vector environment does not have the method, its first environment is
            searched; if the environments are in other processes, a new one is made in this process.
        name: the name of the method.

    Returns:
        the method, and the wrappers outside of the object that has the method, outermost first.

    Raises:
        TypeError: no object has the method, or `env` is a batched environment of TorchRL.
    """
    while isinstance(env, TransformedEnv):
        env = env.base_env
    # Checked before any attribute is read, because reading one starts the processes of a ParallelEnv.
    if isinstance(env, ParallelEnv | SerialEnv):
        raise TypeError(
            f"{name} cannot be read from a {type(env).__name__}, whose environments may be in other "
            "processes. Pass a single environment of the same kind."
        )
    inner, outside = env, []
    while not callable(method := getattr(inner, name, None)):
        outside.append(inner)
        match inner:
            case GymWrapper():
                inner = inner._env
            case gymnasium.Wrapper() | VectorWrapper():
                inner = inner.env
            case SyncVectorEnv():
                inner = inner.envs[0]
            case AsyncVectorEnv():
                inner = inner.env_fns[0]()
            case _:
                raise TypeError(
                    f"{env} has no {name}(achieved_goal, desired_goal, info): pass a custom function."
                )
    return method, outside


class _GoalMethod:
    """Calls a method of an environment with goals as arrays, and converts the result to a tensor."""

    _name: str

    def __init__(self, env: Any) -> None:
        self._method, self._outside = outermost(env, self._name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self._method, '__self__', self._method)})"

    def __call__(
        self,
        achieved_goal: torch.Tensor,
        desired_goal: torch.Tensor,
        transition: Mapping[NestedKey, torch.Tensor],
    ) -> torch.Tensor:
        """Returns one value per transition, `[B]`, for goals `[B, *G]`."""
        info = {key: value.cpu().numpy() for key, value in transition.items()}
        values = self._values(achieved_goal.cpu().numpy(), desired_goal.cpu().numpy(), info)
        return torch.as_tensor(values, device=achieved_goal.device)

    def _values(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
        return self._method(achieved, desired, info)


class gym_reward(_GoalMethod):  # noqa: N801  (it is used as a function)
    """Adapts the `compute_reward` of a gymnasium goal environment.

    The outermost wrapper that has `compute_reward` is called, because a wrapper that changes goals
    defines their rewards. Reward wrappers of gymnasium outside of that wrapper are applied to the result:
    their `reward` gets all rewards of a batch as one array.

    Goals are converted to NumPy and rewards to tensors, so on a GPU each batch synchronises with the
    host: write the reward with torch operations for a GPU.

    Args:
        env: a gymnasium environment or vector environment, wrapped or not, or a TorchRL wrapper around
            an environment.

    Raises:
        TypeError: the environment has no `compute_reward`, or is a batched environment of TorchRL.

    >>> import gymnasium, trl_storages
    >>> reward_fn = gym_reward(gymnasium.make("BitFlipping-v0", n_bits=2))
    >>> reward_fn(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.ones(2, 2), {})
    tensor([-1., 0.])
    """

    _name = "compute_reward"

    def _values(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
        rewards = self._method(achieved, desired, info)
        for wrapper in reversed(self._outside):
            match wrapper:
                case gymnasium.RewardWrapper():
                    rewards = wrapper.reward(rewards)
                case VectorRewardWrapper():
                    rewards = wrapper.rewards(rewards)
        return rewards


class gym_terminated(_GoalMethod):  # noqa: N801  (it is used as a function)
    """Adapts the `compute_terminated` of a gymnasium goal environment, as gymnasium-robotics names it.

    Pass it as `terminated_fn` if reaching a goal ends an episode. Without `terminated_fn`, transitions
    whose new goal is reached keep `terminated=False`, and their targets bootstrap beyond the end.

    The methods of gymnasium-robotics compare single goals. A method that returns one value for a batch
    is therefore called once per transition.

    Args:
        env: as in `gym_reward`.

    Raises:
        TypeError: the environment has no `compute_terminated`, or is a batched environment of TorchRL.

    >>> import gymnasium, trl_storages
    >>> terminated_fn = gym_terminated(gymnasium.make("BitFlipping-v0", n_bits=2))
    >>> terminated_fn(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.ones(2, 2), {})
    tensor([False,  True])
    """

    _name = "compute_terminated"

    def _values(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
        ends = self._method(achieved, desired, info)
        if np.ndim(ends):
            return ends
        batch = range(len(achieved))
        infos = [{key: value[i] for key, value in info.items()} for i in batch]
        return np.array([self._method(achieved[i], desired[i], infos[i]) for i in batch])
