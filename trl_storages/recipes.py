"""Ready-made storages: choose one, give it the spaces of an environment, write and sample.

Each is a `ReplayStorage` over packed rows. They differ in their defaults only: every option works in
each of them, alone and together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.utils import pin_memory_output
from torchrl.envs.transforms import Compose, Transform

from trl_storages import keys
from trl_storages.episodes import Lanes
from trl_storages.gym import GymRecorder, transition_fields
from trl_storages.gym.fields import InfoKeys, info_key_names
from trl_storages.priority_tree import Normalization
from trl_storages.replay import ReplayStorage
from trl_storages.samplers import (
    ERESampler,
    GoalStrategy,
    HERSampler,
    PERSampler,
    UniformSampler,
)
from trl_storages.storages import PackedStorage
from trl_storages.transforms import GoalRelabel, NStep
from trl_storages.transforms.relabel import GoalFunction
from trl_storages.writers import EpisodeWriter

__all__ = [
    "EREReplayStorage",
    "EpisodeReplayStorage",
    "HERReplayStorage",
    "NStepReplayStorage",
    "PrioritizedReplayStorage",
    "UniformReplayStorage",
]


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
        path: directory of memory-mapped rows, which outlive the process; if it holds some, writing
            and sampling go on where they were. None keeps them in memory.
        n_step: n of the n-step returns; 1 shows transitions as they are.
        discount: gamma of the n-step returns.
        alpha: how strongly priorities count; 0 draws without priorities.
        beta: how far importance weights correct for priorities.
        normalize: whose largest importance weight is 1: "batch", "storage" or "none"; see `PERSampler`.
        eta: recency strength in (0, 1]; 1 draws from the whole storage.
        c_min: the smallest window of recent rows.
        prefetch: batches that are drawn ahead, in threads.
        seed: seed of the draws; None follows torch's default generator.
        info_keys: entries of gymnasium's infos to store as well, under the key given: keys, whose
            first write fixes dtype and shape, or a mapping from key to space. `("next", "force")` is
            the infos' `force`, stored where TorchRL's info readers put it.
        autoreset_mode: gymnasium's, `env.metadata["autoreset_mode"]`, for `record`; None is for loops
            that reset their environments by themselves.

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
        n_step: int = 1,
        discount: float = 0.99,
        alpha: float = 0.0,
        beta: float = 0.4,
        normalize: Normalization = "batch",
        eta: float = 1.0,
        c_min: int = 5000,
        prefetch: int = 0,
        seed: int | None = None,
        info_keys: InfoKeys = (),
        autoreset_mode: Any = None,
    ) -> None:
        for name, size, least in (
            ("num_envs", num_envs, 1),
            ("storage_size", storage_size, 0),
            ("batch_size", batch_size, 1),
            ("prefetch", prefetch, 0),
        ):
            if not isinstance(size, int | np.integer) or size < least:
                raise ValueError(f"{name} must be a whole number, {least} or more; got {size!r}.")
        if storage_size < num_envs:
            raise ValueError(
                "storage_size counts transitions over all environments, so it must be at least "
                f"num_envs={num_envs}; got {storage_size}."
            )
        fields = transition_fields(observation_space, action_space, info_keys)
        # Of infos without a space the first write says more.
        stored = {**dict.fromkeys(info_key_names(info_keys)), **fields}
        capacity = storage_size // num_envs * num_envs
        # All are made, so that an option out of its range is an error, and used where they do something.
        prioritized = PERSampler(
            capacity if alpha else 1, alpha=alpha, beta=beta, normalize=normalize
        )
        sampler: Sampler = prioritized if alpha else UniformSampler()
        recency = ERESampler(eta, c_min, base=sampler)
        sampler = recency if eta != 1 else sampler
        n_steps = NStep(n_step, discount)
        transforms: list[Transform] = [n_steps] if n_step != 1 else []
        sampler, transforms = self._with_goals(sampler, transforms)
        storage = PackedStorage(
            capacity,
            fields=stored,
            device=device if path is None else "cpu",
            scratch_dir=path,
            out_device=device,
        )
        generator = None
        if seed is not None:
            generator = torch.Generator(device=storage.device).manual_seed(seed)
        with storage.released_on_error():
            super().__init__(
                storage=storage,
                writer=EpisodeWriter(num_envs, keys=list(stored)),
                sampler=sampler,
                transform=Compose(*transforms) if transforms else None,
                batch_size=batch_size,
                prefetch=prefetch or None,
                generator=generator,
                recorder=GymRecorder(
                    num_envs, fields=fields, autoreset_mode=autoreset_mode, info_keys=info_keys
                ),
            )

    @classmethod
    def open(cls, path: str | Path, **options: Any) -> NoReturn:
        """Raises a TypeError: the spaces and options of a ready-made storage are not on disk."""
        raise TypeError(
            f"{cls.__name__} needs its spaces and options again: construct it with "
            f"path={str(path)!r}, and it goes on where it was. ReplayStorage.open(path, sampler=..., "
            "transform=...) opens the rows without them."
        )

    def _with_goals(
        self, sampler: Sampler, transforms: list[Transform]
    ) -> tuple[Sampler, list[Transform]]:
        """Lets a subclass add to what draws and what shows."""
        return sampler, transforms


class NStepReplayStorage(UniformReplayStorage):
    """Shows transitions over n steps, 3 unless said otherwise.

    Args:
        observation_space: as in `UniformReplayStorage`.
        action_space: as in `UniformReplayStorage`.
        n_step: n of the n-step returns.
        **options: as in `UniformReplayStorage`.
    """

    def __init__(
        self, observation_space: Any, action_space: Any, *, n_step: int = 3, **options: Any
    ) -> None:
        super().__init__(observation_space, action_space, n_step=n_step, **options)


class PrioritizedReplayStorage(UniformReplayStorage):
    """Draws transitions by priority; `update_tensordict_priority(batch)` sets them from `td_error`.

    Args:
        observation_space: as in `UniformReplayStorage`.
        action_space: as in `UniformReplayStorage`.
        alpha: how strongly priorities count.
        **options: as in `UniformReplayStorage`.

    Reference: Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952.
    """

    def __init__(
        self, observation_space: Any, action_space: Any, *, alpha: float = 0.6, **options: Any
    ) -> None:
        super().__init__(observation_space, action_space, alpha=alpha, **options)


class EREReplayStorage(UniformReplayStorage):
    """Emphasises recent experience, within phases of updates.

    Args:
        observation_space: as in `UniformReplayStorage`.
        action_space: as in `UniformReplayStorage`.
        eta: recency strength in (0, 1].
        **options: as in `UniformReplayStorage`.

    Reference: Wang & Ross 2019, arXiv:1906.04009.
    """

    def __init__(
        self, observation_space: Any, action_space: Any, *, eta: float = 0.996, **options: Any
    ) -> None:
        super().__init__(observation_space, action_space, eta=eta, **options)


class EpisodeReplayStorage(UniformReplayStorage):
    """Samples whole episodes: `sample(n)` is `sample_episodes(n)`.

    Episodes are drawn uniformly and shown as they are stored, so `alpha`, `eta` and `n_step` have no
    effect here.

    Args:
        observation_space: as in `UniformReplayStorage`.
        action_space: as in `UniformReplayStorage`.
        batch_size: episodes a sample.
        **options: as in `UniformReplayStorage`.
    """

    def __init__(
        self, observation_space: Any, action_space: Any, *, batch_size: int = 16, **options: Any
    ) -> None:
        super().__init__(observation_space, action_space, batch_size=batch_size, **options)

    def extend(
        self,
        tensordicts: TensorDictBase,
        *,
        lanes: Lanes = None,
        update_priority: bool | None = None,
    ) -> torch.Tensor:
        """Writes steps, such as a whole episode.

        Raises:
            ValueError: there are more steps than a lane has room for, so that no episode among them
                could stay whole. Nothing is written then.
        """
        steps, room = tensordicts.batch_size[-1:].numel(), self.episodes.steps_per_lane
        if steps > room:
            raise ValueError(
                f"an episode must fit into the storage, whose lanes hold {room} steps; got {steps}. "
                "Make storage_size larger."
            )
        return super().extend(tensordicts, lanes=lanes, update_priority=update_priority)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether an episode is there to be sampled: finished, and stored whole."""
        if not super().can_sample(batch_size):
            return False
        with self._replay_lock, self._write_lock:
            return self.episodes.has_whole_episode()

    @pin_memory_output
    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        batch = self.sample_episodes(batch_size)
        return batch, {"index": batch.get(keys.INDEX)}


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
        there = list(observation_space.keys()) if hasattr(observation_space, "keys") else []
        missing = [key for key in (keys.ACHIEVED_GOAL, keys.DESIRED_GOAL) if key not in there]
        if missing:
            raise KeyError(
                f"hindsight needs a dict observation space with {missing}; this one has {there}."
            )
        self._hindsight = HERSampler(goal_selection_strategy, num_goals)
        self._relabel = GoalRelabel(
            reward_fn, terminated_fn=terminated_fn, info_keys=tuple(info_keys)
        )
        super().__init__(observation_space, action_space, info_keys=info_keys, **options)

    def _with_goals(
        self, sampler: Sampler, transforms: list[Transform]
    ) -> tuple[Sampler, list[Transform]]:
        self._hindsight.base = sampler
        return self._hindsight, [self._relabel, *transforms]
