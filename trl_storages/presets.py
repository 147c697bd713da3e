"""Presets: replay buffers that are created from an environment or its spaces.

All presets accept every keyword, in any combination, and differ in their defaults. `UniformReplayStorage`
documents the keywords and builds the components.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partialmethod
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import gymnasium
import torch
from gymnasium import Space
from gymnasium.spaces import Dict
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import NestedKey
from torchrl.data import Composite, TensorSpec
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Compose, Transform

from trl_storages import keys, validation
from trl_storages.buffer.replay_storage import ReplayStorage
from trl_storages.entries import FrameStack
from trl_storages.entries.layout import Nested, nested_sizes
from trl_storages.samplers import ERESampler, HERSampler, PERSampler, UniformSampler
from trl_storages.storage.packed_storage import PackedStorage
from trl_storages.transforms import GoalFunction, GoalRelabel, NStep
from trl_storages.validation import renamed
from trl_storages.writing import EpisodeWriter, Recorder, choices_of, transition_fields
from trl_storages.writing.spaces import InfoKeys

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, Self

    Options = ParamSpec("Options")

__all__ = [
    "EREReplayStorage",
    "HERReplayStorage",
    "NStepReplayStorage",
    "PrioritizedReplayStorage",
    "UniformReplayStorage",
]

_COMPONENTS = "ReplayStorage(storage=PackedStorage(size), ...)"
#: Our keyword, with its value -> keywords of other libraries and of `ReplayStorage`.
_SYNONYMS = {
    "alpha=": "prioritized_replay_alpha priority_exponent",
    "batch_size=": "sample_batch_size",
    "beta=": "importance_sampling_exponent prioritized_replay_beta",
    "discount=": "gamma",
    "frame_stack=": "stack_compress stack_num stack_size",
    "info_keys=": "copy_info_dict",
    "n_step=": "Nstep estimation_step n_steps nstep num_steps update_horizon",
    "num_envs=": "add_batch_size buffer_num n_env n_envs",
    "num_goals=": "additional_goals future_k her_ratio n_goals n_sampled_goal num_sampled_goals replay_k",
    "path=": "replay_dir storage_dir",
    "path=, and fresh=True to discard what the directory holds": "scratch_dir",
    "reward_fn=": "compute_reward compute_reward_fn her_function reward_func",
    "sample_unit=": "batch_length sample_sequence_length seq_len sequence_length slice_len",
    "seed=": "generator random_seed",
    "storage_size=": "buffer_size capacity max_capacity max_length max_size replay_capacity size",
    "strategy=": "goal_selection_strategy",
    f"alpha= and eta=, or {_COMPONENTS}": "sampler",
    f"alpha= with priorities in 'td_error', or {_COMPONENTS}": "priority_key",
    f"on_gap= and num_envs=, or {_COMPONENTS}": "writer",
    f"prefetch=, or {_COMPONENTS}": "pin_memory",
    f"storage_size= and path=, or {_COMPONENTS}": "storage",
}

Constructor = TypeVar("Constructor", bound=Callable[..., None])
AnySpace: TypeAlias = "Space[Any] | TensorSpec"
#: Key -> (dtype, shape). Keys are `Any`, as a `dict[str, ...]` is no `Mapping[NestedKey, ...]`.
Fields = Mapping[Any, tuple[torch.dtype, Sequence[int]]]


def _with(make: Callable[Options, None], **defaults: Any) -> Callable[Options, None]:
    """Returns a constructor with other defaults."""
    return partialmethod(make, **defaults)  # type: ignore[return-value]


def _with_keywords_of(base: Callable[..., None]) -> Callable[[Constructor], Constructor]:
    """Decorates a constructor, whose `**options` are shown as the keywords of the `base`."""

    def decorate(construct: Constructor) -> Constructor:
        *parameters, _ = signature(construct).parameters.values()
        names = {parameter.name for parameter in parameters}
        parameters += [it for it in signature(base).parameters.values() if it.name not in names]
        construct.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return construct

    return decorate


class UniformReplayStorage(ReplayStorage):
    """A replay buffer that samples uniformly.

    The spaces fix the fields of a transition, so even a first write that does not fit raises. The fields
    are the observation (each key of a dict space under its own name, any other space as
    `observation`) at the root and under `next`, `action`, and `reward`, `done`, `terminated` and
    `truncated` under `next`. Other fields of a collector or policy are not stored.

    Args:
        observation_space: gymnasium's, or a TorchRL spec such as `env.observation_spec`.
        action_space: gymnasium's, or a TorchRL spec such as `env.action_spec`.
        storage_size: number of transitions over all environments, rounded up to a multiple of `num_envs`.
        num_envs: E, number of environments over all workers. If each worker of a collector writes by
            itself (`replay_buffer=`), the number of environments of one worker.
        batch_size: B, transitions per batch.
        device: device of the transitions and batches, "cpu" or "cuda".
        path: directory of the transitions, which outlive the process. If it contains transitions, the
            buffer continues from them. None keeps transitions in memory.
        mode: "r+" writes to `path`; "r" reads `path` while another process may write.
        n_step: n of the n-step returns; 1 leaves transitions unchanged.
        discount: gamma of the n-step returns, and of geometric goals; a loss has its own.
        reward_key: field that n-step returns sum, or a list of several: `[("next", "reward"), ("next",
            "cost")]` with `info_keys=["cost"]`.
        alpha: priority exponent; 0 samples without priorities, and batches have no `priority_weight`.
        beta: exponent of the importance weights.
        eta: recency strength in (0, 1]; 1 samples from the whole buffer.
        c_min: the smallest recency window, in transitions.
        sample_unit: expands each sampled transition, as `EpisodeSequence` does; None leaves it.
        transform: is applied to each batch, after HER and n-step returns.
        frame_stack: k, if observations are stacks of the k newest frames along their first or last
            dimension. Each frame is stored once, and batches contain the stacks. A mapping from key to
            `FrameStack` selects the fields.
        compress: whether to store stacks of frames, and observations that are uint8 with two dimensions
            or more, losslessly as what changed since the step before. Batches are the same, and frames of
            Atari take 15 to 26 times less memory. `device` must be the CPU: see the guide on pixels.
        extra_fields: key -> (dtype, shape) of further fields, such as recurrent states or
            log-probabilities. `record` takes them from the infos: pass `{**info, "state": state}`, or
            `{**info, "state": state, "next": {"state": next_state}}` if both are fields.
            `("next", "reward")` replaces the field of the reward, (float32, [1]). For one reward per
            agent build the buffer from components.
        info_keys: fields of gymnasium's infos to store: keys, whose first write fixes dtype and shape,
            or a mapping from key to space. `force` is stored as `("next", "force")`, where TorchRL's info
            readers write it, because an info describes the next state: n-step returns take it from the
            last step. A nested key is stored as it is. Use `extra_fields` for infos that describe the
            observation, such as a recurrent state before the step.
        autoreset_mode: gymnasium's `env.metadata["autoreset_mode"]`, for `record`; "Disabled" is for
            loops that reset environments themselves. `record` of several environments needs it.
        on_gap: what to do if a step's observation is not the next observation of the previous step in
            its lane: "cut" splits the episode there, with one warning; "cut_silently" splits without the
            warning; "ignore" continues it.
        max_entries: room for observations, over all environments; see `PackedStorage`.
        fresh: whether to discard the contents of `path`.
        cold: whether `path` is larger than the memory; see `PackedStorage`.
        prefetch: number of batches to prefetch in a background thread.
        seed: seed of sampling, unless `path` contains a generator; None uses torch's default generator.
        service_backend: "ray" creates the buffer in a Ray actor, and returns a handle.
        service_backend_options: `remote_config` and `ray_init_config` of that actor.

    `n_step`, `discount`, `alpha`, `beta`, `normalize`, `eps`, `eta`, `c_min`, and with HER `num_goals`
    and `strategy`, are attributes of the buffer that may be set at any time. A new value applies from the
    next batch on; prefetched batches keep the old value.

    Raises:
        ValueError: `storage_size` is smaller than `2 * num_envs`; an option is out of range; or a field
            has a name that sampling sets in batches, such as `index`.
        TypeError: a space is not supported, or an option has the wrong type.

    >>> import gymnasium
    >>> env = gymnasium.make("CartPole-v1")
    >>> buffer = UniformReplayStorage(env.observation_space, env.action_space, batch_size=2)
    >>> obs, info = env.reset(seed=0)
    >>> next_obs, reward, terminated, truncated, info = env.step(0)
    >>> buffer.record(obs, 0, reward, terminated, truncated, info, next_obs).tolist()
    [0]
    >>> buffer.sample()["observation"].shape
    torch.Size([2, 4])
    """

    @renamed(_SYNONYMS)
    def __init__(
        self,
        observation_space: AnySpace,
        action_space: AnySpace,
        *,
        storage_size: int = 1_000_000,
        num_envs: int = 1,
        batch_size: int = 256,
        device: torch.device | str = "cpu",
        path: str | Path | None = None,
        mode: str = "r+",
        n_step: int = 1,
        discount: float = 0.99,
        reward_key: NestedKey | list[NestedKey] = keys.REWARD,
        alpha: float = 0.0,
        beta: float = 0.4,
        eta: float = 1.0,
        c_min: int = 5000,
        sample_unit: Any = None,
        transform: Transform | Callable[..., Any] | None = None,
        frame_stack: int | Mapping[Any, FrameStack] | None = None,
        compress: bool = False,
        extra_fields: Fields | None = None,
        info_keys: InfoKeys = (),
        autoreset_mode: AutoresetMode | str | None = None,
        on_gap: str = "cut",
        max_entries: int | None = None,
        fresh: bool = False,
        cold: bool | None = None,
        prefetch: int = 0,
        seed: int | None = None,
        service_backend: str | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        # TorchRL's metaclass handles service_backend.
        num_envs = validation.integer("num_envs", num_envs, at_least=1)
        size = validation.integer("storage_size", storage_size, at_least=2 * num_envs)
        size = -(-size // num_envs) * num_envs
        seed = validation.optional(validation.integer, "seed", seed)
        stored, infos = _fields(
            observation_space, action_space, frame_stack, extra_fields or {}, info_keys
        )
        # Created in any case, so that all options are checked.
        by_priority, recent = PERSampler(size, alpha, beta), ERESampler(eta, c_min)
        sampler: Any = by_priority if alpha else UniformSampler()
        if eta != 1:
            recent.base, sampler = sampler, recent
        transforms: list[Any] = [NStep(n_step, discount, reward_key=reward_key)]
        transforms += [] if transform is None else [transform]
        packed = PackedStorage(
            size,
            num_envs=num_envs,
            device=device,
            fields=stored,
            nested=_nested(observation_space, action_space),
            compress=compress,
            max_entries=max_entries,
            path=path,
            mode=mode,
            fresh=fresh,
            cold=cold,
        )
        try:
            super().__init__(
                storage=packed,
                sampler=sampler,
                writer=EpisodeWriter(num_envs, keys=[*stored], on_gap=on_gap),
                transform=Compose(*transforms),
                batch_size=batch_size,
                sample_unit=sample_unit,
                recorder=Recorder(
                    num_envs,
                    choices=choices_of(action_space),
                    autoreset_mode=autoreset_mode,
                    info_keys=infos,
                ),
                prefetch=prefetch,
                generator=None if seed is None else torch.Generator().manual_seed(seed),
            )
        except BaseException:
            packed.close()  # for the next attempt
            raise

    @classmethod
    def from_env(cls, env: gymnasium.Env[Any, Any] | VectorEnv | EnvBase, **options: Any) -> Self:
        """Creates a buffer for an environment, from its spaces and number of environments.

        Args:
            env: a gymnasium environment or vector environment, from which `autoreset_mode` is read, too;
                or a TorchRL environment, batched or not.
            **options: as in the constructor. HER needs `reward_fn`, such as `gym_reward(env)`.

        Raises:
            TypeError: it is not an environment, or an option is unknown.
            ValueError: as in the constructor; or the environment has one reward per agent.

        >>> env = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
        >>> buffer = UniformReplayStorage.from_env(env, storage_size=100, batch_size=32)
        >>> buffer.episodes.num_envs
        2
        """
        defaults: dict[str, Any] = {}
        match env:
            case VectorEnv():
                spaces = env.single_observation_space, env.single_action_space
                mode = env.metadata.get("autoreset_mode")
                defaults = {"num_envs": env.num_envs, "autoreset_mode": mode}
            case EnvBase():
                if keys.REWARD not in (options.get("extra_fields") or {}):
                    _check_reward(env)
                spaces = env.observation_spec_unbatched, env.action_spec_unbatched
                defaults = {"num_envs": env.batch_size.numel()}
            case _:
                what = "an environment of gymnasium or TorchRL, such as gymnasium.make(name)"
                validation.instance("env", env, gymnasium.Env, what=what)
                spaces = env.observation_space, env.action_space
                if env.has_wrapper_attr("autoreset"):  # gymnasium.wrappers.Autoreset
                    defaults = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        return cls(*spaces, **{**defaults, **options})


def _check_reward(env: EnvBase) -> None:
    """Raises a ValueError unless the environment has one reward per transition."""
    rewards = env.full_reward_spec_unbatched
    spec = rewards.get("reward", None)
    if spec is None or spec.shape.numel() != 1:
        got = {key: [*leaf.shape] for key, leaf in rewards.items(True, True)}
        raise ValueError(
            f"the environment must have one reward per transition, 'reward' [1], got {got}. For rewards "
            "per agent build the storage from components: ReplayStorage(storage=PackedStorage(size), "
            "writer=EpisodeWriter(num_envs), transform=NStep(n_step, reward_key=('next', 'agents', "
            "'reward'))). Or append a transform to the environment that writes the sum as 'reward'."
        )


def _fields(
    observation_space: AnySpace,
    action_space: AnySpace,
    frame_stack: int | Mapping[Any, FrameStack] | None,
    extra_fields: Fields,
    info_keys: InfoKeys,
) -> tuple[dict[Any, Any], list[NestedKey]]:
    """Returns the fields, with None for infos whose dtype and shape are unknown yet, and the infos."""
    fields = transition_fields(observation_space, action_space, info_keys)
    names = validation.keys("info_keys", info_keys)
    infos = [*map(keys.info_key, names)]
    stacks = _stacks(frame_stack, fields, infos)
    what = "a mapping from key to (dtype, shape)"
    further = {
        validation.key("extra_fields", key): (dtype, torch.Size(shape))
        for key, (dtype, shape) in validation.mapping("extra_fields", extra_fields, what).items()
    }
    if taken := {*further} & {*names, *infos, *fields} - {keys.REWARD}:
        raise ValueError(f"extra_fields must differ from the fields of the spaces, got {taken}.")
    fields |= further
    # The first write fixes the layout of infos without a space.
    stored: dict[Any, Any] = {**dict.fromkeys(infos), **fields}
    for key, stack in stacks.items():
        stored[key] = stored[keys.next_key(key)] = (*fields[key], stack)
    return stored, [*infos, *(key for key in further if key != keys.REWARD)]


def _nested(*spaces: AnySpace) -> Nested:
    """Returns which nested TensorDicts have further batch sizes, also under `next`."""
    sizes: dict[Any, torch.Size] = {}
    for spec in spaces:
        if isinstance(spec, Composite):
            sizes |= nested_sizes(spec.zero(), spec.ndim)
    return (*sizes.items(), *((("next", *path), size) for path, size in sizes.items()))


def _stacks(
    frame_stack: int | Mapping[Any, FrameStack] | None,
    fields: Mapping[NestedKey, Any],
    infos: Collection[NestedKey],
) -> Mapping[NestedKey, FrameStack]:
    """Returns the observations that are frame stacks: as named, or all whose first or last size is k.

    Raises:
        KeyError: no such observation; the message lists the existing ones.
        ValueError: no observation has k frames, or one has size k in both its first and last dimension.
    """
    if frame_stack is None:
        return {}
    shapes = {key: [*fields[key][1]] for key in keys.shared_keys(fields) if key not in infos}
    if isinstance(frame_stack, Mapping):
        if missing := [key for key in frame_stack if key not in shapes]:
            raise KeyError(f"frame_stack must name observations of {[*shapes]}, got {missing}.")
        for key, stack in frame_stack.items():
            validation.instance("frame_stack", stack, FrameStack).frame_shape(shapes[key])
        return frame_stack
    k = validation.integer("frame_stack", frame_stack, at_least=2)
    dims = {
        key: [dim for dim in (0, -1) if len(shape) > 1 and shape[dim] == k]
        for key, shape in shapes.items()
    }
    if not any(dims.values()) or any(len(it) > 1 for it in dims.values()):
        raise ValueError(
            f"frame_stack={k} must be the first or the last dimension of an observation, got {shapes}: "
            f"pass {{key: FrameStack({k}, dim=...)}} for both or several channels a frame; an "
            "environment of single frames needs gymnasium.wrappers.FrameStackObservation."
        )
    return {key: FrameStack(k, it[0]) for key, it in dims.items() if it}


class NStepReplayStorage(UniformReplayStorage):
    """A replay buffer with n-step returns, n = 3 by default; keywords as in `UniformReplayStorage`.

    >>> from gymnasium.spaces import Box, Discrete
    >>> buffer = NStepReplayStorage(Box(-1, 1, (3,)), Discrete(2), n_step=5, discount=0.9)
    >>> buffer.n_step, buffer.discount
    (5, 0.9)
    """

    __init__ = _with(UniformReplayStorage.__init__, n_step=3)


class PrioritizedReplayStorage(UniformReplayStorage):
    """Prioritized replay: call `update_tensordict_priority(batch)` after the loss has set `td_error`.

    Keywords as in `UniformReplayStorage`, with alpha = 0.6 by default.

    Reference: Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952.

    >>> from gymnasium.spaces import Box, Discrete
    >>> buffer = PrioritizedReplayStorage(Box(-1, 1, (1,)), Discrete(2), batch_size=4)
    >>> for step in range(3):
    ...     _ = buffer.record([0.0], 1, 0.5, False, step == 2, {}, [0.0])
    >>> batch = buffer.sample()
    >>> batch["td_error"] = torch.ones(4)  # a loss writes it
    >>> buffer.update_tensordict_priority(batch)
    """

    __init__ = _with(UniformReplayStorage.__init__, alpha=0.6)


class EREReplayStorage(UniformReplayStorage):
    """Samples recent experience more often; see `ERESampler`.

    Keywords as in `UniformReplayStorage`, with eta = 0.996 by default.

    Reference: Wang & Ross 2019, arXiv:1906.04009.

    >>> from gymnasium.spaces import Box, Discrete
    >>> buffer = EREReplayStorage(Box(-1, 1, (3,)), Discrete(2), eta=0.99, c_min=100)
    >>> buffer.eta, buffer.c_min
    (0.99, 100)
    """

    __init__ = _with(UniformReplayStorage.__init__, eta=0.996)


class HERReplayStorage(UniformReplayStorage):
    """Hindsight experience replay: relabels most sampled transitions with an achieved goal.

    All other keywords as in `UniformReplayStorage`.

    Args:
        observation_space: a dict space or spec with `achieved_goal` and `desired_goal`.
        action_space: as in `UniformReplayStorage`.
        reward_fn: `(achieved_goal [B, *G], desired_goal [B, *G], infos) -> [B]` or `[B, 1]`, as in
            `GoalRelabel`; `gym_reward(env)` for the environment's own. `infos` holds `info_keys`.
        terminated_fn: the same, returning bool, such as `gym_terminated(env)`; None leaves the flags as
            stored.
        strategy: "future", "final", "episode", "random", "geometric" or "current", or a mixture such as
            `{"future": 0.7, "random": 0.3}`, as in `HERSampler`; geometric goals are discounted by
            `discount`.
        num_goals: k, relabelled transitions per one left as stored.
        audit: whether the first batch after 1,000 stored transitions compares `reward_fn` with the stored
            rewards, and warns once if they differ, or if episodes end at success and `terminated_fn` is
            None; see `GoalRelabel`.

    Raises:
        TypeError: a goal is a dictionary, and not one array.
        KeyError: the observation space has no `achieved_goal` or `desired_goal`.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495.

    >>> import gymnasium
    >>> from trl_storages import gym_reward
    >>> env = gymnasium.make("BitFlipping-v0", n_bits=4)
    >>> spaces = env.observation_space, env.action_space
    >>> buffer = HERReplayStorage(*spaces, reward_fn=gym_reward(env), num_goals=4, batch_size=10)
    >>> seen, _ = env.reset(seed=0)
    >>> after, *outcome = env.step(1)
    >>> _ = buffer.record(seen, 1, *outcome, after)
    >>> buffer.sample()["her_mask"].sum()
    tensor(8)
    """

    @renamed(_SYNONYMS)
    @_with_keywords_of(UniformReplayStorage.__init__)
    def __init__(
        self,
        observation_space: AnySpace,
        action_space: AnySpace,
        *,
        reward_fn: GoalFunction,
        terminated_fn: GoalFunction | None = None,
        strategy: Any = "future",
        num_goals: float = 4,
        audit: bool = True,
        **options: Any,
    ) -> None:
        _check_goals(observation_space)
        infos = validation.keys("info_keys", options.get("info_keys", ()))
        relabel = GoalRelabel(reward_fn, terminated_fn=terminated_fn, info_keys=infos, audit=audit)
        sampler = HERSampler(strategy, num_goals)
        super().__init__(observation_space, action_space, **options)
        sampler.base, sampler.discount = self._sampler, self.discount
        self.set_sampler(sampler)
        self.insert_transform(0, relabel)


def _check_goals(observation_space: AnySpace) -> None:
    """Raises an error unless the space has two goals, each of them one array."""
    space: Any = observation_space if isinstance(observation_space, Dict | Composite) else {}
    names, goals = [*space.keys()], (keys.ACHIEVED_GOAL, keys.DESIRED_GOAL)
    if missing := [key for key in goals if key not in names]:
        raise KeyError(
            f"observation_space must be a dict with {missing} for HER; it has {names}. For a dataset "
            "pass goal_fn= to from_arrays, which computes goals."
        )
    for key in goals:
        if isinstance(space[key], Dict | Composite):
            raise TypeError(
                f"{key} must be one array, got a dictionary of {[*space[key].keys()]}. Flatten both "
                "goals in a gymnasium.ObservationWrapper, as by gymnasium.spaces.flatten(space, "
                "goal), and pass a reward_fn of flattened goals [B, G], which slices them along the "
                "last dimension."
            )
