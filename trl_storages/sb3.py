"""Replay buffers for Stable-Baselines3 (SB3): its own names, passed as `replay_buffer_class`.

Letters: B batch, E environments, G goal shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import NestedKey, TensorDictBase

from trl_storages import keys
from trl_storages.presets import HERReplayStorage, UniformReplayStorage
from trl_storages.storage import BatchRows
from trl_storages.transforms import ReplayTransform
from trl_storages.validation import renamed

try:
    from stable_baselines3.common import buffers, type_aliases
    from stable_baselines3.common.vec_env import CloudpickleWrapper, VecEnv, VecNormalize
    from stable_baselines3.her import her_replay_buffer
except ImportError as error:
    message = "trl_storages.sb3 needs Stable-Baselines3: pip install 'trl-storages[sb3]'."
    raise ImportError(message) from error

__all__ = ["DictReplayBufferSamples", "HerReplayBuffer", "ReplayBuffer", "ReplayBufferSamples"]

#: Keyword of SB3 -> keywords of the presets.
_SYNONYMS = {
    "buffer_size=": "storage_size",
    "gamma=": "discount",
    "goal_selection_strategy=": "strategy",
    "n_envs=": "num_envs",
    "n_sampled_goal=": "num_goals",
    "n_steps=": "n_step",
}


class ReplayBufferSamples(type_aliases.ReplayBufferSamples):
    """A batch as SB3's algorithms read it.

    Attributes:
        batch: the batch as `ReplayStorage.sample` returns it, with `index` and `priority_weight`.
    """

    batch: TensorDictBase


class DictReplayBufferSamples(type_aliases.DictReplayBufferSamples):
    """The same as `ReplayBufferSamples`, with dictionaries of observations."""

    batch: TensorDictBase


class ReplayBuffer(buffers.ReplayBuffer):
    """A replay buffer for the algorithms of SB3: DQN, DDPG, TD3, SAC, and those of sb3-contrib.

    The transitions are in `storage`, a `UniformReplayStorage`, whose methods and settings may be used at
    any time. Observations may be dictionaries. Each observation is stored once.

    A transition that does not begin with the next observation of the previous one starts another episode,
    because SB3 resets the environments at each `learn()`, and does not report it.

    Args:
        buffer_size: number of transitions over all environments.
        observation_space: of one environment.
        action_space: of one environment.
        device: device of the batches. Transitions are stored on the CPU.
        n_envs: E.
        optimize_memory_usage: must be False, because each observation is stored once in any case.
        handle_timeout_termination: whether `dones` of batches are 0 at time limits.
        n_steps: n of the n-step returns, here rather than in the algorithm.
        gamma: discount of the n-step returns; must be that of the algorithm.
        **options: further keywords of `UniformReplayStorage`, such as `path`, `compress`, `frame_stack`,
            `alpha` and `eta`. Values of `info_keys` and `extra_fields` are read from the infos.

    Raises:
        ValueError: `optimize_memory_usage` is True, an option is out of range, or `service_backend` is
            given.
        TypeError: an option is unknown, or has the wrong type.

    >>> from stable_baselines3 import DQN
    >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=ReplayBuffer, learning_starts=50,
    ...             replay_buffer_kwargs={"n_steps": 3, "gamma": 0.99}, device="cpu")
    >>> model.learn(100).replay_buffer.size()
    100
    """

    _preset: type[UniformReplayStorage] = UniformReplayStorage

    @renamed(_SYNONYMS)
    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        **options: Any,
    ) -> None:
        if optimize_memory_usage:
            raise ValueError(
                "optimize_memory_usage must be False, got True: each observation is stored once in any "
                "case, and last observations are kept."
            )
        if options.get("service_backend", "direct") not in (None, "direct"):
            raise ValueError(
                "service_backend must be left out: SB3 needs the buffer in its process."
            )
        # That of SB3's ReplayBuffer allocates arrays.
        buffers.BaseBuffer.__init__(
            self, buffer_size, observation_space, action_space, device, n_envs
        )
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        # In SB3's shapes and dtypes: numbers have a dimension, and actions are not float64.
        self._observations_space = _as_boxes(observation_space, self.obs_shape)
        action_dtype: Any = np.float32 if action_space.dtype == np.float64 else action_space.dtype
        self._action_space = spaces.Box(0, 1, (self.action_dim,), action_dtype)
        self.storage = self._preset(
            self._observations_space,
            self._action_space,
            storage_size=self.buffer_size * n_envs,
            num_envs=n_envs,
            n_step=n_steps,
            discount=gamma,
            autoreset_mode="Disabled",
            **{"on_gap": "cut_silently", **options},
        )
        self._normalized_reward = _NormalizedReward()
        # Between GoalRelabel and NStep.
        position = int(isinstance(self.storage, HERReplayStorage))
        self.storage.insert_transform(position, self._normalized_reward)
        fields = [*options.get("info_keys", ()), *(options.get("extra_fields") or ())]
        self._info_names = {next(x for x in keys.key_path(key) if x != "next") for key in fields}
        self._count()

    def _count(self) -> None:
        """Sets the counters of SB3: the position of the next write, and whether the ring has wrapped."""
        num_steps = self.storage.write_count // self.n_envs
        self.pos, self.full = num_steps % self.buffer_size, num_steps >= self.buffer_size

    def size(self) -> int:
        """Returns the number of stored transitions per environment."""
        return len(self.storage) // self.n_envs

    def reset(self) -> None:
        """Evicts all transitions."""
        self.storage.empty()
        self._count()

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Writes one step of each environment.

        Args:
            obs: `[E, ...]`, or a dictionary.
            next_obs: the same; the last observation of its episode where `done` is true.
            action: `[E, ...]`.
            reward: `[E]`.
            done: `[E]` bool, whether the episode ended for any reason.
            infos: `[E]`; `TimeLimit.truncated` says that the episode ended by a time limit.

        Raises:
            KeyError, TypeError, ValueError: a value does not fit. Nothing was written.
        """
        timeouts = np.array([info.get("TimeLimit.truncated", False) for info in infos], bool)
        truncateds = timeouts & self.handle_timeout_termination
        columns = {
            name: np.stack([info[name] for info in infos])
            for name in self._info_names
            if all(name in info for info in infos)
        }
        self.storage.record(
            _as_stored(obs, self._observations_space, self.n_envs),
            _as_stored(action, self._action_space, self.n_envs),
            np.asarray(reward),
            np.asarray(done, bool) & ~truncateds,
            truncateds,
            columns,
            _as_stored(next_obs, self._observations_space, self.n_envs),
        )
        self._count()

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None
    ) -> ReplayBufferSamples | DictReplayBufferSamples:
        """Samples a batch.

        Args:
            batch_size: B.
            env: normalises observations, and each reward before it is summed in an n-step return; None
                leaves them as stored.

        Returns:
            tensors on `device`: observations `[B, ...]` in the dtype of their space, or float32 if they
            are normalised; actions `[B, A]`; next observations; dones `[B, 1]` float32, 1 at terminal
            states; rewards `[B, 1]` float32; and if `n_steps` is above 1 discounts `[B, 1]` float32 of
            the next values, else None.

        Raises:
            RuntimeError: the buffer is empty.
        """
        self._normalized_reward.env = env
        batch = self.storage.sample(batch_size)
        num_steps, discounts = batch.get(keys.STEPS_TO_NEXT_OBS, None), None
        if num_steps is not None:
            discounts = self._on_device(self.storage.discount ** num_steps.float())
        is_dict = isinstance(self.observation_space, spaces.Dict)
        samples = (DictReplayBufferSamples if is_dict else ReplayBufferSamples)(
            self._observations(batch, env),
            self._on_device(batch[keys.ACTION]),
            self._observations(batch["next"], env),
            self._on_device(batch[keys.TERMINATED].float()),
            self._on_device(batch[keys.REWARD]),
            discounts,
        )
        samples.batch = batch
        return samples

    def _observations(self, steps: TensorDictBase, env: VecNormalize | None) -> Any:
        """Returns the observations of a batch, or its next observations."""
        values: Any
        if isinstance(self.observation_space, spaces.Dict):
            values = {key: steps[key] for key in self.observation_space.spaces}
        else:
            values = steps[keys.OBSERVATION]
        if env is not None:
            values = env.normalize_obs(_mapped(torch.Tensor.numpy, values))
        return _mapped(self._on_device, values)

    def _on_device(self, values: Any) -> torch.Tensor:
        return self.to_torch(values, copy=False)


class HerReplayBuffer(ReplayBuffer, her_replay_buffer.HerReplayBuffer):  # type: ignore[misc]
    """Hindsight experience replay (HER) for the algorithms of SB3.

    The rewards of new goals are computed by the `compute_reward` of the first environment. The buffer
    does not store the environment when it is pickled. `storage` is a `HERReplayStorage`.

    Transitions of running episodes are sampled, too, with goals that were achieved so far. The relabelled
    transitions are spread evenly through a batch.

    Args:
        buffer_size: number of transitions over all environments.
        observation_space: a `Dict` with `observation`, `achieved_goal` and `desired_goal`.
        action_space: of one environment.
        env: has the reward function.
        device: as in `ReplayBuffer`.
        n_envs: E.
        optimize_memory_usage: as in `ReplayBuffer`.
        handle_timeout_termination: as in `ReplayBuffer`.
        n_sampled_goal: relabelled transitions per transition left as stored.
        goal_selection_strategy: SB3's enumeration, or a strategy or mixture of `HERReplayStorage`.
        copy_info_dict: whether `compute_reward` reads infos; then name them in `info_keys`, because only
            these are stored.
        **options: as in `ReplayBuffer`, and further keywords of `HERReplayStorage`; a `reward_fn`
            replaces `compute_reward`.

    Raises:
        ValueError: `copy_info_dict` is True without `info_keys`; and as in `ReplayBuffer`.
        KeyError: the observation space lacks the goals.

    >>> from stable_baselines3 import DQN
    >>> import gymnasium, trl_storages
    >>> env = gymnasium.make("BitFlipping-v0", n_bits=4)
    >>> options = {"goal_selection_strategy": "final", "n_steps": 3}
    >>> model = DQN("MultiInputPolicy", env, replay_buffer_class=HerReplayBuffer, learning_starts=50,
    ...             replay_buffer_kwargs=options, device="cpu")
    >>> model.learn(100).replay_buffer.sample(2).discounts.shape
    torch.Size([2, 1])
    """

    _preset = HERReplayStorage

    @renamed(_SYNONYMS)
    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: Any = "future",
        copy_info_dict: bool = False,
        **options: Any,
    ) -> None:
        if copy_info_dict and not options.get("info_keys"):
            raise ValueError(
                "copy_info_dict=True needs info_keys, the names of the infos that compute_reward reads, "
                "such as info_keys=['is_success']: only these are stored."
            )
        self._env_reward = _EnvReward()
        for name in {"reward_fn", "terminated_fn"} & options.keys():
            if callable(options[name]):
                options[name] = _GoalFunction(options[name])
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            num_goals=n_sampled_goal,
            strategy=goal_selection_strategy,
            **{"reward_fn": self._env_reward, **options},
        )
        self.env = None
        self.set_env(env)

    def set_env(self, env: VecEnv) -> None:
        """Sets the environment that computes rewards, after the buffer was loaded.

        Raises:
            ValueError: the buffer has an environment.
        """
        super().set_env(env)
        self._env_reward.env = env

    def truncate_last_trajectory(self) -> None:
        """Ends the running episodes, so that the next transitions begin new ones."""
        self.storage.end_episodes()


class _GoalFunction(CloudpickleWrapper):
    """A function of goals that is pickled by its code, because it may be a lambda."""

    def __call__(self, *arguments: Any) -> Any:
        return self.var(*arguments)


class _EnvReward:
    """Computes the rewards of new goals by the `compute_reward` of an environment."""

    def __init__(self) -> None:
        self.env: VecEnv | None = None

    def __call__(
        self,
        achieved_goal: torch.Tensor,
        desired_goal: torch.Tensor,
        infos: Mapping[NestedKey, torch.Tensor],
    ) -> np.ndarray:
        """Returns the rewards `[B]` for goals `[B, *G]`.

        Raises:
            RuntimeError: there is no environment.
        """
        if self.env is None:
            raise RuntimeError("rewards of new goals need the environment: call set_env(env).")
        columns = {key: values.numpy() for key, values in infos.items()}
        rows = [
            {key: values[i] for key, values in columns.items()} for i in range(len(achieved_goal))
        ]
        goals = achieved_goal.numpy(), desired_goal.numpy()
        (rewards,) = self.env.env_method("compute_reward", *goals, rows, indices=[0])
        return np.asarray(rewards, np.float32)

    def __getstate__(self) -> dict[str, Any]:
        return {"env": None}


class _NormalizedReward(ReplayTransform):
    """Normalises rewards by the statistics of `env`, before they are summed."""

    env: VecNormalize | None = None

    def replay(self, rows: BatchRows) -> None:
        """Normalises the rewards of a batch, or of its n-step windows."""
        if self.env is not None:
            rewards = rows.steps[keys.REWARD].numpy()
            rows.steps[keys.REWARD] = torch.from_numpy(self.env.normalize_reward(rewards))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "env": None}


def _as_boxes(space: spaces.Space[Any], shape: Any) -> spaces.Space[Any]:
    """Returns the space of stored observations, of SB3's shapes."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _as_boxes(space[key], shape[key]) for key in space})
    dtype: Any = space.dtype
    return spaces.Box(0, 1, shape, dtype)


def _as_stored(values: Any, space: spaces.Space[Any], num_envs: int) -> Any:
    """Returns the values of a step in the dtype of a space, `[E, *shape]`."""
    if isinstance(space, spaces.Dict):
        return {key: _as_stored(values[key], space[key], num_envs) for key in space}
    return np.asarray(values, space.dtype).reshape(num_envs, *space.shape or ())


def _mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """Applies a function to an array, or to each array of a dictionary."""
    if isinstance(values, dict):
        return {key: function(value) for key, value in values.items()}
    return function(values)
