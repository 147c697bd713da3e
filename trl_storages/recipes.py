"""Ready-made storages: choose one, give it the spaces of an environment, write and sample.

Those that draw single rows differ only in their defaults: each takes every keyword, in any combination.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import NestedKey, TensorDictBase
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Compose, Transform

from trl_storages import arguments, keys
from trl_storages.callers import warn_caller
from trl_storages.packed.storage import PackedStorage
from trl_storages.replay import history
from trl_storages.replay.storage import ReplayStorage
from trl_storages.samplers import ERESampler, HERSampler, PERSampler, UniformSampler
from trl_storages.streams.frames import FrameStack, stacked_observations
from trl_storages.transforms import GoalFunction, GoalRelabel, NStep
from trl_storages.writing import choices_of, transition_fields
from trl_storages.writing.recorder import Recorder
from trl_storages.writing.writer import EpisodeWriter

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, Self

    Options = ParamSpec("Options")

__all__ = [
    "EREReplayStorage",
    "EpisodeReplayStorage",
    "HERReplayStorage",
    "NStepReplayStorage",
    "PrioritizedReplayStorage",
    "UniformReplayStorage",
]

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
    def made(*args: Any, **options: Any) -> None:
        if known := [name for name in options if name in ours]:
            raise TypeError(f"there is no keyword {known[0]!r}: use {ours[known[0]]}=.")
        make(*args, **options)

    return made


_DEFAULT_SIZE = 1_000_000
AnySpace: TypeAlias = "Space[Any] | TensorSpec"


def _given(scope: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a constructor, of its local names."""
    return {name: value for name, value in scope.items() if name != "self"}


class UniformReplayStorage(ReplayStorage):
    """Stores transitions of an environment and draws them uniformly.

    The spaces fix the layout of the rows, so even a first write that does not fit raises. Further
    entries added by a collector or policy are dropped.

    Args:
        observation_space: gymnasium's, or a TorchRL spec such as `env.observation_spec`.
        action_space: gymnasium's, or a TorchRL spec such as `env.action_spec`.
        storage_size: total number of transitions, over all environments.
        num_envs: E, number of environments that are played side by side.
        batch_size: B, transitions per batch.
        device: where the rows and batches are.
        n_step: n of the n-step returns; 1 leaves transitions unchanged.
        discount: gamma of the n-step returns, and of geometric goals; a loss has its own.
        alpha: priority exponent; 0 draws without priorities.
        beta: exponent of the importance weights.
        eta: recency strength in (0, 1]; 1 draws from the whole storage.
        c_min: the smallest window of recent rows.
        sample_unit: expands a drawn row, such as `EpisodeSequence`; None draws single rows.
        transform: applied to batches last.
        frame_stack: k, if observations are stacks of the k newest frames along their first or last
            dimension; or the `FrameStack` of each by key.
        extra_fields: key -> (dtype, shape) of further entries, such as hidden states. `record` takes them
            from the infos.
        info_keys: entries of gymnasium's infos to store as well: keys, whose first write fixes dtype and
            shape, or a mapping from key to space.
        autoreset_mode: `env.metadata["autoreset_mode"]`, for `record`; "Disabled" is for loops that reset
            themselves. Several environments need it.
        on_gap: "cut" ends an episode where the next row does not continue it, and warns once; "ignore"
            takes rows as they come.
        max_entries: room for observations; see `PackedStorage`.
        prefetch: number of batches to draw ahead in a background thread.
        seed: of the draws; None uses torch's default generator.

    >>> import gymnasium
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
        observation_space: AnySpace,
        action_space: AnySpace,
        *,
        storage_size: int = _DEFAULT_SIZE,
        num_envs: int = 1,
        batch_size: int = 256,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: str = "r+",
        n_step: int = 1,
        discount: float = 0.99,
        alpha: float = 0.0,
        beta: float = 0.4,
        eta: float = 1.0,
        c_min: int = 5000,
        sample_unit: Any = None,
        transform: Transform | None = None,
        frame_stack: int | Mapping[NestedKey, FrameStack] | None = None,
        extra_fields: Mapping[Any, tuple[torch.dtype, Sequence[int]]] | None = None,
        info_keys: Sequence[NestedKey] | Mapping[Any, Any] = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: str = "cut",
        max_entries: int | None = None,
        prefetch: int = 0,
        seed: int | None = None,
    ) -> None:
        self._build(**_given(locals()))

    def _build(
        self,
        observation_space: AnySpace,
        action_space: AnySpace,
        *,
        storage_size: int,
        num_envs: int,
        batch_size: int,
        device: torch.device | str,
        path: str | Path | None,
        mode: str,
        n_step: int = 1,
        discount: float = 0.99,
        alpha: float = 0.0,
        beta: float = 0.4,
        eta: float = 1.0,
        c_min: int = 5000,
        sample_unit: Any = None,
        transform: Transform | None,
        frame_stack: int | Mapping[NestedKey, FrameStack] | None,
        extra_fields: Mapping[Any, tuple[torch.dtype, Sequence[int]]] | None,
        info_keys: Sequence[NestedKey] | Mapping[Any, Any],
        autoreset_mode: AutoresetMode | str | None,
        on_gap: str,
        max_entries: int | None,
        prefetch: int,
        seed: int | None,
        goals: tuple[HERSampler, GoalRelabel] | None = None,
    ) -> None:
        """Makes the parts of what the constructor of a recipe was given."""
        if mode != "r+" and path is None:
            raise ValueError(f"mode={mode!r} must be of a directory, got path=None.")
        if path is not None:
            raise NotImplementedError("rows are not kept in directories yet: leave path out.")
        num_envs = arguments.integer("num_envs", num_envs, at_least=1)
        size = arguments.integer("storage_size", storage_size, at_least=2 * num_envs)
        if (rest := size % num_envs) and size != _DEFAULT_SIZE:
            warn_caller(
                f"storage_size={size} is not a multiple of num_envs={num_envs}: {size - rest} "
                "transitions are kept, equally many of each environment."
            )
        fields, stored, infos = _fields(
            observation_space, action_space, frame_stack, extra_fields or {}, info_keys
        )
        sampler: Any = PERSampler(size, alpha, beta) if alpha else UniformSampler()
        if eta != 1:
            sampler = ERESampler(eta, c_min, base=sampler)
        transforms = [NStep(n_step, discount)] if n_step != 1 else []
        if goals is not None:
            goals[0].base = sampler
            sampler, transforms = goals[0], [goals[1], *transforms]
        transforms += [] if transform is None else [transform]
        ReplayStorage.__init__(
            self,
            storage=PackedStorage(
                size, num_envs=num_envs, device=device, fields=stored, max_entries=max_entries
            ),
            sampler=sampler,
            writer=EpisodeWriter(num_envs, keys=[*stored], on_gap=on_gap),
            transform=Compose(*transforms) if transforms else None,
            batch_size=arguments.integer("batch_size", batch_size, at_least=1),
            sample_unit=sample_unit,
            recorder=Recorder(
                num_envs,
                fields=fields,
                choices=choices_of(action_space),
                autoreset_mode=autoreset_mode,
                info_keys=infos,
            ),
            prefetch=arguments.integer("prefetch", prefetch) or None,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
        )

    @classmethod
    def from_env(cls, env: gymnasium.Env[Any, Any] | VectorEnv | EnvBase, **options: Any) -> Self:
        """Makes a storage for an environment, from its spaces and number of environments.

        Args:
            env: a gymnasium environment or vector environment, whose `autoreset_mode` is used as well;
                or a TorchRL environment, batched or not.
            **options: as in the constructor.

        Raises:
            TypeError: it is not an environment.
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


def _fields(
    observation_space: AnySpace,
    action_space: AnySpace,
    frame_stack: Any,
    extra_fields: Mapping[Any, Any],
    info_keys: Any,
) -> tuple[dict[Any, Any], dict[Any, Any], list[NestedKey]]:
    """Returns the fields that `record` knows, all that are stored (None is yet unknown), and infos."""
    fields = transition_fields(observation_space, action_space, info_keys)
    infos = arguments.keys("info_keys", info_keys)
    stored = {**dict.fromkeys(infos), **fields}
    further = {
        arguments.key("extra_fields", key): (dtype, torch.Size(shape))
        for key, (dtype, shape) in extra_fields.items()
    }
    if taken := {*further} & {*stored} - {keys.REWARD}:
        raise ValueError(f"extra_fields must be others than those of the spaces, got {taken}.")
    stored |= further
    for key in stored:
        keys.check_storable(key)
    for key, stack in _stacks(frame_stack, fields, infos).items():
        stored[key] = stored[keys.next_key(key)] = (*fields[key], stack)
    infos += [key for key in further if key != keys.REWARD]
    return {**fields, **further}, stored, infos


def _stacks(
    frame_stack: Any, fields: Mapping[Any, Any], infos: list[NestedKey]
) -> Mapping[NestedKey, FrameStack]:
    """Returns which observations are stacks.

    Raises:
        KeyError, TypeError, ValueError: `frame_stack` names no observations, or is not that of theirs.
    """
    if not isinstance(frame_stack, Mapping):
        found = stacked_observations(frame_stack, fields, infos)
        return {key: FrameStack(stack.num_frames, stack.dim) for key, stack in found.items()}
    for key, stack in frame_stack.items():
        arguments.instance("frame_stack", stack, FrameStack)
        if key in infos or key not in fields or keys.next_key(key) not in fields:
            raise KeyError(f"frame_stack must name observations, got {key!r}.")
        stack.frame_shape(fields[key][1])
    return frame_stack


class NStepReplayStorage(UniformReplayStorage):
    """Draws n-step transitions, with n = 3 by default; keywords as in `UniformReplayStorage`.

    >>> from gymnasium.spaces import Box, Discrete
    >>> storage = NStepReplayStorage(Box(-1, 1, (3,)), Discrete(2), n_step=5, discount=0.9)
    >>> storage.n_step, storage.discount
    (5, 0.9)
    """

    @_without_synonyms
    def __init__(
        self,
        observation_space: AnySpace,
        action_space: AnySpace,
        *,
        storage_size: int = _DEFAULT_SIZE,
        num_envs: int = 1,
        batch_size: int = 256,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: str = "r+",
        n_step: int = 3,
        discount: float = 0.99,
        alpha: float = 0.0,
        beta: float = 0.4,
        eta: float = 1.0,
        c_min: int = 5000,
        sample_unit: Any = None,
        transform: Transform | None = None,
        frame_stack: int | Mapping[NestedKey, FrameStack] | None = None,
        extra_fields: Mapping[Any, tuple[torch.dtype, Sequence[int]]] | None = None,
        info_keys: Sequence[NestedKey] | Mapping[Any, Any] = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: str = "cut",
        max_entries: int | None = None,
        prefetch: int = 0,
        seed: int | None = None,
    ) -> None:
        self._build(**_given(locals()))


class PrioritizedReplayStorage(UniformReplayStorage):
    """Draws transitions by priority; `update_tensordict_priority(batch)` sets them from `td_error`.

    Keywords as in `UniformReplayStorage`.

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
        observation_space: AnySpace,
        action_space: AnySpace,
        *,
        storage_size: int = _DEFAULT_SIZE,
        num_envs: int = 1,
        batch_size: int = 256,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: str = "r+",
        n_step: int = 1,
        discount: float = 0.99,
        alpha: float = 0.6,
        beta: float = 0.4,
        eta: float = 1.0,
        c_min: int = 5000,
        sample_unit: Any = None,
        transform: Transform | None = None,
        frame_stack: int | Mapping[NestedKey, FrameStack] | None = None,
        extra_fields: Mapping[Any, tuple[torch.dtype, Sequence[int]]] | None = None,
        info_keys: Sequence[NestedKey] | Mapping[Any, Any] = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: str = "cut",
        max_entries: int | None = None,
        prefetch: int = 0,
        seed: int | None = None,
    ) -> None:
        self._build(**_given(locals()))


class EREReplayStorage(UniformReplayStorage):
    """Emphasises recent experience within phases of updates; keywords as in `UniformReplayStorage`.

    Reference: Wang & Ross 2019, arXiv:1906.04009.

    >>> from gymnasium.spaces import Box, Discrete
    >>> storage = EREReplayStorage(Box(-1, 1, (3,)), Discrete(2), eta=0.99, c_min=100)
    >>> storage.eta, storage.c_min
    (0.99, 100)
    """

    @_without_synonyms
    def __init__(
        self,
        observation_space: AnySpace,
        action_space: AnySpace,
        *,
        storage_size: int = _DEFAULT_SIZE,
        num_envs: int = 1,
        batch_size: int = 256,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: str = "r+",
        n_step: int = 1,
        discount: float = 0.99,
        alpha: float = 0.0,
        beta: float = 0.4,
        eta: float = 0.996,
        c_min: int = 5000,
        sample_unit: Any = None,
        transform: Transform | None = None,
        frame_stack: int | Mapping[NestedKey, FrameStack] | None = None,
        extra_fields: Mapping[Any, tuple[torch.dtype, Sequence[int]]] | None = None,
        info_keys: Sequence[NestedKey] | Mapping[Any, Any] = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: str = "cut",
        max_entries: int | None = None,
        prefetch: int = 0,
        seed: int | None = None,
    ) -> None:
        self._build(**_given(locals()))


class HERReplayStorage(UniformReplayStorage):
    """Hindsight experience replay: relabels most drawn transitions with an achieved goal.

    Args:
        observation_space: a dict space or spec with `achieved_goal` and `desired_goal`.
        action_space: as in `UniformReplayStorage`.
        reward_fn: `(achieved_goal [B, *G], desired_goal [B, *G], infos) -> [B]` or `[B, 1]`, as in
            `GoalRelabel`; `gym_reward(env)` for the environment's own.
        terminated_fn: the same, returning bool; None leaves the flags as stored.
        strategy: "future", "final", "episode", "random", "geometric" or "current", or a mixture such as
            `{"future": 0.7, "random": 0.3}`; geometric goals are discounted by `discount`.
        num_goals: k, relabelled transitions per one left as stored.
        **options: as in `UniformReplayStorage`.

    Raises:
        KeyError: the observation space has no `achieved_goal` or `desired_goal`.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495.
    """

    @_without_synonyms
    def __init__(
        self,
        observation_space: AnySpace,
        action_space: AnySpace,
        *,
        reward_fn: GoalFunction,
        terminated_fn: GoalFunction | None = None,
        strategy: Any = "future",
        num_goals: float = 4,
        storage_size: int = _DEFAULT_SIZE,
        num_envs: int = 1,
        batch_size: int = 256,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: str = "r+",
        n_step: int = 1,
        discount: float = 0.99,
        alpha: float = 0.0,
        beta: float = 0.4,
        eta: float = 1.0,
        c_min: int = 5000,
        sample_unit: Any = None,
        transform: Transform | None = None,
        frame_stack: int | Mapping[NestedKey, FrameStack] | None = None,
        extra_fields: Mapping[Any, tuple[torch.dtype, Sequence[int]]] | None = None,
        info_keys: Sequence[NestedKey] | Mapping[Any, Any] = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: str = "cut",
        max_entries: int | None = None,
        prefetch: int = 0,
        seed: int | None = None,
    ) -> None:
        given = _given(locals())
        there = list(observation_space.keys()) if hasattr(observation_space, "keys") else []
        missing = [key for key in (keys.ACHIEVED_GOAL, keys.DESIRED_GOAL) if key not in there]
        if missing:
            raise KeyError(
                f"observation_space must be a dict with {missing} for hindsight; it has {there}."
            )
        sampler = HERSampler(strategy, num_goals)
        sampler.discount = discount
        relabel = GoalRelabel(
            reward_fn,
            terminated_fn=terminated_fn,
            info_keys=arguments.keys("info_keys", info_keys),
        )
        for name in ("reward_fn", "terminated_fn", "strategy", "num_goals"):
            del given[name]
        self._build(**given, goals=(sampler, relabel))


class EpisodeReplayStorage(UniformReplayStorage):
    """Draws whole episodes: `sample(n)` is `sample_episodes(n)`.

    Keywords as in `UniformReplayStorage`, but for those of single rows.

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
        observation_space: AnySpace,
        action_space: AnySpace,
        *,
        storage_size: int = _DEFAULT_SIZE,
        num_envs: int = 1,
        batch_size: int = 16,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: str = "r+",
        transform: Transform | None = None,
        frame_stack: int | Mapping[NestedKey, FrameStack] | None = None,
        extra_fields: Mapping[Any, tuple[torch.dtype, Sequence[int]]] | None = None,
        info_keys: Sequence[NestedKey] | Mapping[Any, Any] = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: str = "cut",
        max_entries: int | None = None,
        prefetch: int = 0,
        seed: int | None = None,
    ) -> None:
        self._build(**_given(locals()))

    def extend(self, tensordicts: TensorDictBase, **options: Any) -> torch.Tensor:
        """Writes steps, such as a whole episode.

        Raises:
            ValueError: there are more steps than a lane can hold. Nothing is written then.
        """
        shape, room = tensordicts.batch_size, self.episodes.steps_per_lane
        steps = shape[-1:].numel()
        if len(shape) == 1 and options.get("lanes") is None:
            steps = -(-steps // self.episodes.num_envs)
        if steps > room:
            raise ValueError(
                f"an episode must fit into the storage, whose lanes hold {room} steps; got {steps}. "
                "Make storage_size larger."
            )
        return super().extend(tensordicts, **options)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether a finished episode is stored whole."""
        if not super().can_sample(batch_size):
            return False
        with self._replay_lock, self._write_lock:
            listed = self.episodes.episodes()
        return bool((listed["finished"] & listed["whole"]).any())

    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        batch = self._with_transforms(history.draw_episodes(self._storage, batch_size, self._rng))
        return batch, {keys.INDEX: batch[keys.INDEX]}
