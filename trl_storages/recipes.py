"""Ready-made storages: choose one, give it the spaces of an environment, write and sample.

Each is a `ReplayStorage` over packed rows. Those that draw single rows differ only in their defaults:
each supports every option, in any combination. The one that draws whole episodes has fewer options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec

import gymnasium
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import NestedKey, TensorDictBase
from torchrl.data import TensorSpec
from torchrl.data.replay_buffers.sample_units import SampleUnit
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.utils import pin_memory_output
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Compose, Transform

from trl_storages import arguments, keys
from trl_storages.gym import GymRecorder, choices_of, transition_fields
from trl_storages.gym.fields import Field, InfoKeys
from trl_storages.replay import ReplayStorage
from trl_storages.ring import Lanes
from trl_storages.rows import FrameStack, PackedStorage, stacked_observations
from trl_storages.samplers import (
    ERESampler,
    GoalMixture,
    GoalStrategy,
    HERSampler,
    PERSampler,
    UniformSampler,
)
from trl_storages.transforms import GoalRelabel, NStep
from trl_storages.transforms.relabel import GoalFunction
from trl_storages.writing import EpisodeWriter, OnGap

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "EREReplayStorage",
    "EpisodeReplayStorage",
    "HERReplayStorage",
    "NStepReplayStorage",
    "PrioritizedReplayStorage",
    "UniformReplayStorage",
]

Options = ParamSpec("Options")

#: Key -> dtype and shape. Keys are `Any`, as type checkers do not accept a `dict[str, ...]` as
#: `Mapping[NestedKey, ...]`.
Fields = Mapping[Any, tuple[torch.dtype, Sequence[int]]]

#: Keyword -> what other libraries call it.
_SYNONYMS = {
    "alpha": "prioritized_replay_alpha priority_exponent",
    "batch_size": "sample_batch_size",
    "beta": "importance_sampling_exponent prioritized_replay_beta",
    "discount": "gamma",
    "frame_stack": "stack_compress stack_num stack_size",
    "info_keys": "copy_info_dict",
    "n_step": "Nstep estimation_step n_steps nstep num_steps update_horizon",
    "num_envs": "add_batch_size buffer_num n_env n_envs",
    "num_goals": "additional_goals future_k her_ratio n_goals n_sampled_goal num_sampled_goals replay_k",
    "path": "replay_dir scratch_dir storage_dir",
    "reward_fn": "compute_reward compute_reward_fn her_function reward_func",
    "sample_unit": "batch_length sample_sequence_length seq_len sequence_length slice_len",
    "seed": "random_seed",
    "share_next": "ignore_obs_next next_of optimize_memory_usage",
    "storage_size": "buffer_size capacity max_capacity max_length max_size replay_capacity size",
    "strategy": "goal_selection_strategy",
}


def _without_synonyms(make: Callable[Options, None]) -> Callable[Options, None]:
    """Wraps a constructor, so that other libraries' names raise with the name to use."""
    names = _SYNONYMS.keys() & signature(make).parameters
    ours = {theirs: name for name in names for theirs in _SYNONYMS[name].split()}

    @wraps(make)
    def made(*args: Options.args, **options: Options.kwargs) -> None:
        if known := [name for name in options if name in ours]:
            raise TypeError(f"there is no keyword {known[0]!r}: use {ours[known[0]]}=.")
        make(*args, **options)

    return made


class UniformReplayStorage(ReplayStorage):
    """Stores transitions of an environment and draws them uniformly.

    The spaces fix the layout of the rows, so even a first write that does not fit raises. Stored are
    the observation (the entries of a dict space under their own names, any other space as
    `observation`) at the root and under `next`, `action`, and `reward`, `done`, `terminated` and
    `truncated` under `next`. Further entries added by a collector or policy are dropped.

    Args:
        observation_space: gymnasium's, or a TorchRL spec such as `env.observation_spec`.
        action_space: gymnasium's, or a TorchRL spec such as `env.action_spec`.
        storage_size: total number of transitions, over all environments, equally many of each.
        num_envs: E, number of environments recorded in parallel, over all workers; of one worker where
            a collector's workers write by themselves (`replay_buffer=`) and play several each.
        batch_size: B, transitions per batch.
        device: device of the batches. The rows are there too, unless `path` is given.
        path: directory of memory-mapped rows, which outlive the process; if it holds rows, writing and
            sampling continue from them, which TorchRL's logger reports; `empty()` removes them. None
            keeps rows in memory.
        mode: "r+" writes to `path`; "r" reads what it holds, while another process may be writing.
        n_step: n of the n-step returns; 1 leaves transitions unchanged.
        discount: gamma of the n-step returns, and of geometric goals; a loss has its own.
        alpha: priority exponent; 0 draws without priorities, and batches have no `priority_weight`.
        beta: exponent of the importance weights.
        eta: recency strength in (0, 1]; 1 draws from the whole storage.
        c_min: the smallest window of recent rows.
        sample_unit: expands a drawn row, such as `EpisodeSequence`; None draws single rows.
        transform: applied to each batch, after hindsight and n-step returns.
        info_keys: entries of gymnasium's infos to store as well, under the key given: keys, whose
            first write fixes dtype and shape, or a mapping from key to space. `("next", "force")` is
            the infos' `force`, stored where TorchRL's info readers put it.
        extra_fields: key -> (dtype, shape) of further entries, such as hidden states or
            log-probabilities. `record` takes them from the infos, so hand `{**info, "state": state}` to
            it. That of `("next", "reward")` is in the place of (float32, [1]).
        frame_stack: k, if observations are stacks of the k newest frames along their first or last
            dimension: each frame is stored once, and batches contain the stacks. A mapping from key to
            `FrameStack` selects the entries and how an episode begins (by default, its first frame is
            repeated).
        share_next: whether to store next observations only as the observations of the following rows:
            little more than half the memory, for identical batches.
        autoreset_mode: gymnasium's, `env.metadata["autoreset_mode"]`, for `record`; "Disabled" is for
            loops that reset themselves. `record` of several environments needs it.
        on_gap: what to do if a step's observation is not the next observation of the previous step in
            its lane: "cut" the episode there, with one warning, or "ignore" it, as in `EpisodeWriter`.
        prefetch: number of batches to draw ahead in a background thread.
        seed: seed of the draws, unless `path` holds a generator; None uses torch's default one.
        service_backend: "ray" makes the storage in an actor of Ray, and returns a handle of it.
        service_backend_options: `remote_config` and `ray_init_config` of that actor.

    `storage.n_step`, `discount`, `alpha`, `beta`, `normalize`, `eps`, `eta`, `c_min`, and with hindsight
    `num_goals` and `strategy`, read and set the parameters of its parts, from the next draw on; batches
    already prefetched keep the old values.

    Raises:
        ValueError: `storage_size` is smaller than `num_envs`; an option is out of range; or a field has
            a name that sampling sets in batches, such as `index`.
        TypeError: a space is not supported, or an option has the wrong type.

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

    @_without_synonyms
    def __init__(
        self,
        observation_space: Space[Any] | TensorSpec,
        action_space: Space[Any] | TensorSpec,
        *,
        storage_size: int = 1_000_000,
        num_envs: int = 1,
        batch_size: int = 256,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: Literal["r+", "r"] = "r+",
        n_step: int = 1,
        discount: float = 0.99,
        alpha: float = 0.0,
        beta: float = 0.4,
        eta: float = 1.0,
        c_min: int = 5000,
        sample_unit: SampleUnit | None = None,
        transform: Transform | Callable[..., Any] | None = None,
        frame_stack: int | Mapping[Any, FrameStack] | None = None,
        share_next: bool = False,
        extra_fields: Fields | None = None,
        info_keys: InfoKeys = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: OnGap = "cut",
        prefetch: int = 0,
        seed: int | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._build(locals())

    def _build(
        self, given: dict[str, Any], goals: tuple[HERSampler, GoalRelabel] | None = None
    ) -> None:
        """Puts the parts together.

        Args:
            given: the arguments of the constructor.
            goals: the sampler that draws goals and the transform that writes them; None keeps stored
                goals.
        """
        num_envs = arguments.integer("num_envs", given["num_envs"], at_least=1)
        capacity = arguments.integer("storage_size", given["storage_size"], at_least=1)
        if capacity < num_envs:
            raise ValueError(
                "storage_size counts transitions over all environments, so it must be at least "
                f"num_envs={num_envs}; got {capacity}."
            )
        capacity -= capacity % num_envs
        spaces, info_keys = (given["observation_space"], given["action_space"]), given["info_keys"]
        fields: dict[NestedKey, Any] = {**transition_fields(*spaces, info_keys)}
        infos = arguments.keys("info_keys", info_keys)
        # Infos are no observations: stored at the root and under `next`, they have the same value.
        observations = keys.continued_keys([key for key in fields if key not in infos])
        stacks = stacked_observations(given["frame_stack"], fields, infos)
        further = _extra_fields(given["extra_fields"])
        if taken := {*further} & ({*fields, *infos} - {keys.REWARD}):
            raise ValueError(f"extra_fields must be others than those of the spaces, got {taken}.")
        fields |= further
        # The layout of infos without a space is fixed by the first write.
        stored = {**dict.fromkeys(infos), **fields}
        stored |= {key: (*fields[key], stack) for key, stack in stacks.items()}
        writer = EpisodeWriter(
            num_envs, keys=list(stored), on_gap=given["on_gap"], observation_keys=observations
        )
        recorder = GymRecorder(
            num_envs,
            fields=fields,
            choices=choices_of(given["action_space"]),
            autoreset_mode=given["autoreset_mode"],
            info_keys=[*infos, *(key for key in further if key != keys.REWARD)],
        )
        sampler, transforms = _drawing(capacity, goals, **given)
        path = arguments.optional(arguments.directory, "path", given["path"])
        seed = arguments.optional(arguments.integer, "seed", given["seed"])
        device = given["device"]
        storage = PackedStorage(
            capacity,
            fields=stored,
            device=device if path is None else "cpu",
            scratch_dir=path,
            out_device=device,
            share_next=given["share_next"],
            mode=given["mode"],
        )
        generator = None
        if seed is not None:
            generator = torch.Generator(device=storage.device).manual_seed(seed)
        with storage.released_on_error():
            ReplayStorage.__init__(
                self,
                storage=storage,
                sampler=sampler,
                writer=writer,
                recorder=recorder,
                transform=Compose(*transforms) if transforms else None,
                batch_size=given["batch_size"],
                sample_unit=given.get("sample_unit"),
                prefetch=given["prefetch"],
                generator=generator,
            )

    @classmethod
    def from_env(cls, env: gymnasium.Env[Any, Any] | VectorEnv | EnvBase, **options: Any) -> Self:
        """Makes a storage for an environment, from its spaces and number of environments.

        Args:
            env: a gymnasium environment or vector environment, whose `autoreset_mode` is used as well;
                or a TorchRL environment, batched or not.
            **options: as in the constructor. `reward_fn` for hindsight must be passed, as it may be a
                custom function.

        Raises:
            TypeError: it is not an environment, or an option is unknown.
            ValueError: as in the constructor.

        >>> env = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
        >>> storage = UniformReplayStorage.from_env(env, storage_size=100, batch_size=32)
        >>> storage.episodes.num_envs
        2
        """
        known: dict[str, Any] = {}
        match env:
            case VectorEnv():
                spaces = env.single_observation_space, env.single_action_space
                mode = env.metadata.get("autoreset_mode")
                known = {"num_envs": env.num_envs, "autoreset_mode": mode}
            case EnvBase():
                spaces = env.observation_spec_unbatched, env.action_spec_unbatched
                known = {"num_envs": env.batch_size.numel()}
            case _:
                what = "an environment of gymnasium or TorchRL, such as gymnasium.make(name)"
                arguments.instance("env", env, gymnasium.Env, what=what)
                spaces = env.observation_space, env.action_space
        return cls(*spaces, **{**known, **options})

    @classmethod
    def open(cls, path: str | Path, **options: Any) -> NoReturn:
        """Raises a TypeError: the spaces and options of a ready-made storage are not on disk."""
        raise TypeError(
            f"{cls.__name__} needs its spaces and options again: construct it with path={str(path)!r} "
            "(and mode='r' to read while another process writes). ReplayStorage.open(path, sampler=..., "
            "transform=...) opens the rows without them."
        )


class NStepReplayStorage(UniformReplayStorage):
    """Samples n-step transitions, with n = 3 by default.

    Args:
        observation_space: as in `UniformReplayStorage`.
        action_space: as in `UniformReplayStorage`.
        n_step: n of the n-step returns.
        **options: as in `UniformReplayStorage`.

    >>> from gymnasium.spaces import Box, Discrete
    >>> storage = NStepReplayStorage(Box(-1, 1, (3,)), Discrete(2), n_step=5, discount=0.9)
    >>> storage.n_step, storage.discount
    (5, 0.9)
    """

    @_without_synonyms
    def __init__(
        self,
        observation_space: Space[Any] | TensorSpec,
        action_space: Space[Any] | TensorSpec,
        *,
        storage_size: int = 1_000_000,
        num_envs: int = 1,
        batch_size: int = 256,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: Literal["r+", "r"] = "r+",
        n_step: int = 3,
        discount: float = 0.99,
        alpha: float = 0.0,
        beta: float = 0.4,
        eta: float = 1.0,
        c_min: int = 5000,
        sample_unit: SampleUnit | None = None,
        transform: Transform | Callable[..., Any] | None = None,
        frame_stack: int | Mapping[Any, FrameStack] | None = None,
        share_next: bool = False,
        extra_fields: Fields | None = None,
        info_keys: InfoKeys = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: OnGap = "cut",
        prefetch: int = 0,
        seed: int | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._build(locals())


class PrioritizedReplayStorage(UniformReplayStorage):
    """Draws transitions by priority; `update_tensordict_priority(batch)` sets them from `td_error`.

    Args:
        observation_space: as in `UniformReplayStorage`.
        action_space: as in `UniformReplayStorage`.
        alpha: priority exponent.
        **options: as in `UniformReplayStorage`.

    Reference: Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952.

    >>> from gymnasium.spaces import Box, Discrete
    >>> storage = PrioritizedReplayStorage(Box(-1, 1, (1,)), Discrete(2), batch_size=4)
    >>> for step in range(3):
    ...     _ = storage.record([0.0], 1, 0.5, False, step == 2, {}, [0.0])
    >>> batch = storage.sample()
    >>> batch["td_error"] = torch.ones(4)  # a loss writes it
    >>> storage.update_tensordict_priority(batch)
    """

    @_without_synonyms
    def __init__(
        self,
        observation_space: Space[Any] | TensorSpec,
        action_space: Space[Any] | TensorSpec,
        *,
        storage_size: int = 1_000_000,
        num_envs: int = 1,
        batch_size: int = 256,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: Literal["r+", "r"] = "r+",
        n_step: int = 1,
        discount: float = 0.99,
        alpha: float = 0.6,
        beta: float = 0.4,
        eta: float = 1.0,
        c_min: int = 5000,
        sample_unit: SampleUnit | None = None,
        transform: Transform | Callable[..., Any] | None = None,
        frame_stack: int | Mapping[Any, FrameStack] | None = None,
        share_next: bool = False,
        extra_fields: Fields | None = None,
        info_keys: InfoKeys = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: OnGap = "cut",
        prefetch: int = 0,
        seed: int | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._build(locals())


class EREReplayStorage(UniformReplayStorage):
    """Emphasises recent experience within phases of updates; see `ERESampler`.

    Args:
        observation_space: as in `UniformReplayStorage`.
        action_space: as in `UniformReplayStorage`.
        eta: recency strength in (0, 1].
        **options: as in `UniformReplayStorage`.

    Reference: Wang & Ross 2019, arXiv:1906.04009.

    >>> from gymnasium.spaces import Box, Discrete
    >>> storage = EREReplayStorage(Box(-1, 1, (3,)), Discrete(2), eta=0.99, c_min=100)
    >>> storage.eta, storage.c_min
    (0.99, 100)
    """

    @_without_synonyms
    def __init__(
        self,
        observation_space: Space[Any] | TensorSpec,
        action_space: Space[Any] | TensorSpec,
        *,
        storage_size: int = 1_000_000,
        num_envs: int = 1,
        batch_size: int = 256,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: Literal["r+", "r"] = "r+",
        n_step: int = 1,
        discount: float = 0.99,
        alpha: float = 0.0,
        beta: float = 0.4,
        eta: float = 0.996,
        c_min: int = 5000,
        sample_unit: SampleUnit | None = None,
        transform: Transform | Callable[..., Any] | None = None,
        frame_stack: int | Mapping[Any, FrameStack] | None = None,
        share_next: bool = False,
        extra_fields: Fields | None = None,
        info_keys: InfoKeys = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: OnGap = "cut",
        prefetch: int = 0,
        seed: int | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._build(locals())


class EpisodeReplayStorage(UniformReplayStorage):
    """Samples whole episodes: `sample(n)` is `sample_episodes(n)`.

    Episodes are drawn uniformly and returned as stored, so the options for single rows do not apply:
    `n_step`, `discount`, `alpha`, `beta`, `eta`, `c_min` and `sample_unit`.

    Args:
        observation_space: as in `UniformReplayStorage`.
        action_space: as in `UniformReplayStorage`.
        batch_size: episodes per batch.
        **options: those of `UniformReplayStorage` that are not listed above.

    >>> from gymnasium.spaces import Box, Discrete
    >>> storage = EpisodeReplayStorage(Box(-1, 1, (1,)), Discrete(2))
    >>> for step in range(3):
    ...     _ = storage.record([0.0], 1, 0.5, False, step == 2, {}, [0.0])
    >>> storage.sample(2)["action"].shape
    torch.Size([2, 3])
    """

    @_without_synonyms
    def __init__(
        self,
        observation_space: Space[Any] | TensorSpec,
        action_space: Space[Any] | TensorSpec,
        *,
        storage_size: int = 1_000_000,
        num_envs: int = 1,
        batch_size: int = 16,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: Literal["r+", "r"] = "r+",
        transform: Transform | Callable[..., Any] | None = None,
        frame_stack: int | Mapping[Any, FrameStack] | None = None,
        share_next: bool = False,
        extra_fields: Fields | None = None,
        info_keys: InfoKeys = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: OnGap = "cut",
        prefetch: int = 0,
        seed: int | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._build(locals())

    def extend(
        self,
        tensordicts: TensorDictBase | Mapping[str, Any],
        *,
        lanes: Lanes = None,
        update_priority: bool | None = None,
    ) -> torch.Tensor:
        """Writes steps, such as a whole episode.

        Raises:
            ValueError: there are more steps than a lane can hold, so an episode among them might not
                stay whole. Nothing is written then.
        """
        tensordicts = self._steps(tensordicts)
        steps, room = tensordicts.batch_size[-1:].numel(), self.episodes.steps_per_lane
        if len(tensordicts.batch_size) == 1 and lanes is None:
            # One step per lane, or trajectories that are distributed among the lanes.
            steps = -(-steps // self.episodes.num_envs)
        if steps > room:
            raise ValueError(
                f"an episode must fit into the storage, whose lanes hold {room} steps; got {steps}. "
                "Make storage_size larger."
            )
        return super().extend(tensordicts, lanes=lanes, update_priority=update_priority)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether a finished episode is stored whole."""
        if not super().can_sample(batch_size):
            return False
        with self._replay_lock, self._write_lock:
            return self.episodes.has_whole_episode()

    @pin_memory_output  # type: ignore[untyped-decorator]
    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        batch = super().sample_episodes(batch_size)
        return batch, {"index": batch.get(keys.INDEX)}

    def _sample_part(self, batch_size: int) -> NoReturn:
        raise ValueError(
            f"the storages of an ensemble must give rows, {type(self).__name__} gives whole episodes: "
            "pass others, with sample_unit=EpisodeSequence(...) for parts of episodes."
        )


class HERReplayStorage(UniformReplayStorage):
    """Hindsight experience replay: relabels most sampled transitions with an achieved goal.

    Args:
        observation_space: a dict space or spec with `achieved_goal` and `desired_goal`.
        action_space: as in `UniformReplayStorage`.
        reward_fn: `(achieved_goal [B, *G], desired_goal [B, *G], transition) -> [B]` or `[B, 1]`, as in
            `GoalRelabel`; `gym_reward(env)` for the environment's own.
        terminated_fn: the same, returning bool; None leaves the flags as stored.
        strategy: "future", "final", "episode", "random", "geometric" or "current", or a
            mixture such as `{"future": 0.7, "random": 0.3}`, as in `HERSampler`; geometric goals are
            discounted by `discount`.
        num_goals: k, relabelled transitions per one left as stored.
        **options: as in `UniformReplayStorage`; `transition` holds `info_keys` under the same keys.

    Raises:
        KeyError: the observation space has no `achieved_goal` or `desired_goal`.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495.

    >>> import gymnasium
    >>> from trl_storages import gym_reward
    >>> env = gymnasium.make("BitFlipping-v0", n_bits=4)
    >>> spaces = env.observation_space, env.action_space
    >>> storage = HERReplayStorage(*spaces, reward_fn=gym_reward(env), num_goals=4, batch_size=10)
    >>> seen, _ = env.reset(seed=0)
    >>> after, *outcome = env.step(1)
    >>> _ = storage.record(seen, 1, *outcome, after)
    >>> storage.sample()["her_mask"].sum()
    tensor(8)
    """

    @_without_synonyms
    def __init__(
        self,
        observation_space: Space[Any] | TensorSpec,
        action_space: Space[Any] | TensorSpec,
        *,
        reward_fn: GoalFunction,
        terminated_fn: GoalFunction | None = None,
        strategy: GoalStrategy | GoalMixture = "future",
        num_goals: float = 4,
        storage_size: int = 1_000_000,
        num_envs: int = 1,
        batch_size: int = 256,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: Literal["r+", "r"] = "r+",
        n_step: int = 1,
        discount: float = 0.99,
        alpha: float = 0.0,
        beta: float = 0.4,
        eta: float = 1.0,
        c_min: int = 5000,
        sample_unit: SampleUnit | None = None,
        transform: Transform | Callable[..., Any] | None = None,
        frame_stack: int | Mapping[Any, FrameStack] | None = None,
        share_next: bool = False,
        extra_fields: Fields | None = None,
        info_keys: InfoKeys = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: OnGap = "cut",
        prefetch: int = 0,
        seed: int | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        there = list(observation_space.keys()) if hasattr(observation_space, "keys") else []
        missing = [key for key in (keys.ACHIEVED_GOAL, keys.DESIRED_GOAL) if key not in there]
        if missing:
            raise KeyError(
                f"observation_space must be a dict with {missing} for hindsight; it has {there}. Of a "
                "dataset, from_arrays(..., goal_fn=...) works goals out."
            )
        sampler = HERSampler(strategy, num_goals)
        sampler.discount = discount
        infos = arguments.keys("info_keys", info_keys)
        relabel = GoalRelabel(reward_fn, terminated_fn=terminated_fn, info_keys=infos)
        self._build(locals(), (sampler, relabel))


def _drawing(
    capacity: int,
    goals: tuple[HERSampler, GoalRelabel] | None,
    *,
    n_step: int = 1,
    discount: float = 0.99,
    alpha: float = 0.0,
    beta: float = 0.4,
    eta: float = 1.0,
    c_min: int = 5000,
    transform: Transform | Callable[..., Any] | None = None,
    **_: Any,
) -> tuple[Sampler, list[Any]]:
    """Returns the sampler and the transforms."""
    # Made in any case, so that values that have no effect are checked as well.
    fold = NStep(n_step, discount)
    weigh = PERSampler(capacity if alpha else 1, alpha, beta)
    narrow = ERESampler(eta, c_min)
    sampler: Sampler = weigh if weigh.alpha else UniformSampler()
    if narrow.eta != 1:
        narrow.base, sampler = sampler, narrow
    transforms: list[Any] = [fold] if fold.n_step != 1 else []
    if goals is not None:
        goals[0].base = sampler
        sampler, transforms = goals[0], [goals[1], *transforms]
    return sampler, transforms if transform is None else [*transforms, transform]


def _extra_fields(given: Fields | None) -> dict[NestedKey, Field]:
    what = "a mapping from key to (dtype, shape), such as {'state': (torch.float32, [8])}"
    fields: dict[NestedKey, Field] = {}
    for name, field in arguments.mapping("extra_fields", given or {}, what).items():
        match field:
            case (torch.dtype() as dtype, tuple() | list() as shape) if isinstance(field, tuple):
                sizes = [arguments.integer(f"extra_fields[{name!r}]", size) for size in shape]
                fields[arguments.key("extra_fields", name)] = (dtype, torch.Size(sizes))
            case _:
                raise TypeError(f"extra_fields must be {what}; got {field!r} for {name!r}.")
    return fields
