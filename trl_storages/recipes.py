"""Ready-made storages: choose one, give it the spaces of an environment, write and sample.

Each is a `ReplayStorage` over packed rows. They differ in their defaults only; every option works in
each of them, alone and together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Compose, Transform

from trl_storages import keys
from trl_storages.gym import GymRecorder, transition_fields
from trl_storages.gym.fields import InfoKeys
from trl_storages.replay import ReplayStorage
from trl_storages.samplers import GoalStrategy, HERSampler, UniformSampler
from trl_storages.storages import PackedStorage
from trl_storages.transforms import GoalRelabel
from trl_storages.transforms.relabel import GoalFunction
from trl_storages.writers import EpisodeWriter

__all__ = ["HERReplayStorage", "UniformReplayStorage"]


class UniformReplayStorage(ReplayStorage):
    """Stores transitions of an environment and draws them uniformly.

    The spaces fix the layout of the rows, so that a first write that does not fit is an error. Stored
    are the observation (the entries of a dict space under their own names, any other space as
    `observation`) at the root and under `next`, `action`, and `reward`, `done`, `terminated` and
    `truncated` under `next`. Further entries that a collector or a policy adds are left out.

    Args:
        observation_space: gymnasium's, or a TorchRL spec such as `env.observation_spec`.
        action_space: gymnasium's, or a TorchRL spec such as `env.action_spec`.
        storage_size: transitions in total, over all environments.
        num_envs: E, environments that are recorded side by side.
        batch_size: B, transitions a sample.
        device: where batches arrive. The rows live there too, unless `path` is given.
        path: directory of memory-mapped rows; None keeps them in memory.
        prefetch: batches that are drawn ahead, in threads.
        seed: seed of the draws; None follows torch's default generator.
        info_keys: entries of gymnasium's infos to store as well, under the key given: keys, whose
            first write fixes dtype and shape, or a mapping from key to space. `("next", "force")` is
            the infos' `force`, stored where TorchRL's info readers put it.
        autoreset_mode: gymnasium's, `env.metadata["autoreset_mode"]`, for `record`.

    Raises:
        ValueError: `storage_size` is smaller than `num_envs`, or an option is out of its range.
        TypeError: a space is of a kind that rows cannot hold.

    >>> import gymnasium, trl_storages
    >>> env = gymnasium.make("CartPole-v1")
    >>> storage = UniformReplayStorage(env.observation_space, env.action_space, batch_size=2)
    >>> obs, info = env.reset(seed=0)
    >>> next_obs, reward, terminated, truncated, info = env.step(0)
    >>> storage.record(obs, 0, reward, terminated, truncated, info, next_obs).tolist()
    [0]
    >>> storage.sample()["observation"].shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        *,
        storage_size: int = 1_000_000,
        num_envs: int = 1,
        batch_size: int = 256,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        prefetch: int = 0,
        seed: int | None = None,
        info_keys: InfoKeys = (),
        autoreset_mode: Any = None,
        _draw: Callable[[Sampler], Sampler] = lambda sampler: sampler,
        _see: Sequence[Transform] = (),
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}.")
        if storage_size < num_envs:
            raise ValueError(
                f"storage_size counts transitions over all environments, so it must be at least "
                f"num_envs={num_envs}; got {storage_size}."
            )
        fields = transition_fields(observation_space, action_space, info_keys)
        device = torch.device(device)
        storage = PackedStorage(
            storage_size // num_envs * num_envs,
            fields=fields,
            device=device if path is None else "cpu",
            scratch_dir=path,
            out_device=device,
        )
        generator = None
        if seed is not None:
            generator = torch.Generator(device=storage.device).manual_seed(seed)
        super().__init__(
            storage=storage,
            writer=EpisodeWriter(num_envs, keys=list(fields)),
            sampler=_draw(UniformSampler()),
            transform=Compose(*_see) if _see else None,
            batch_size=batch_size,
            prefetch=prefetch or None,
            generator=generator,
            recorder=GymRecorder(
                num_envs, fields=fields, autoreset_mode=autoreset_mode, info_keys=info_keys
            ),
        )


class HERReplayStorage(UniformReplayStorage):
    """Stores transitions of a goal environment and shows most of them with a goal that was reached.

    Args:
        observation_space: a dict space with `achieved_goal` and `desired_goal`, or such a spec.
        action_space: as in `UniformReplayStorage`.
        reward_fn: `(achieved_goal [B, *G], desired_goal [B, *G], transition) -> [B]` or `[B, 1]`, as in
            `GoalRelabel`; `gym_reward(env)` for the environment's own.
        terminated_fn: the same, returning bool; None leaves the flags as stored.
        goal_selection_strategy: "future", "final", "episode" or "random", as in `HERSampler`.
        num_goals: k, relabelled transitions for each one as stored.
        info_keys: as in `UniformReplayStorage`; `transition` holds them under the same keys.
        **options: as in `UniformReplayStorage`.

    Raises:
        KeyError: the observation space has no `achieved_goal` or `desired_goal`.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        *,
        reward_fn: GoalFunction,
        terminated_fn: GoalFunction | None = None,
        goal_selection_strategy: GoalStrategy = "future",
        num_goals: float = 4,
        info_keys: InfoKeys = (),
        **options: Any,
    ) -> None:
        names = (
            sorted(map(str, observation_space.keys())) if hasattr(observation_space, "keys") else []
        )
        missing = {keys.ACHIEVED_GOAL, keys.DESIRED_GOAL}.difference(names)
        if missing:
            raise KeyError(
                f"hindsight needs a dict observation space with {sorted(missing)}; this one has {names}."
            )
        super().__init__(
            observation_space,
            action_space,
            info_keys=info_keys,
            _draw=lambda base: HERSampler(goal_selection_strategy, num_goals, base=base),
            _see=[
                GoalRelabel(
                    reward_fn,
                    terminated_fn=terminated_fn,
                    info_keys=tuple(info_keys),
                )
            ],
            **options,
        )
