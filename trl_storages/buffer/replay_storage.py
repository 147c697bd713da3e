"""The replay buffer: transitions are recorded or extended, sampled and transformed.

Letters: B batch, E lanes (environments), L lanes that are written, T steps, N transitions.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from multiprocessing.context import get_spawning_popen
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Compose, Transform

from trl_storages import validation
from trl_storages.buffer.explain import Explanation, explain
from trl_storages.buffer.loader import make_loader
from trl_storages.buffer.prefetch import Prefetcher
from trl_storages.buffer.priorities import reduce_priorities, sampled_priorities
from trl_storages.buffer.sampling import SamplingPipeline
from trl_storages.buffer.state import (
    component_state,
    prepare_load_component,
    prepare_load_generator,
    prepare_load_samplers,
)
from trl_storages.directory.files import ProcessLock
from trl_storages.index import EmptyError, EpisodeIndex
from trl_storages.keys import have_next
from trl_storages.samplers import (
    EpisodeSequence,
    PERSampler,
    UniformSampler,
    checked_priorities,
    layers_of,
    resolve_sampler,
)
from trl_storages.serialization import Adopt, State, all_of, from_json, required_items, to_json
from trl_storages.settings import ComponentSetting, Strict
from trl_storages.storage import dumps
from trl_storages.storage.packed_storage import PackedStorage
from trl_storages.torchrl_compat import (
    UNSUPPORTED,
    UnsupportedMethods,
    dispatch_td_nn_modules,
    reject_torchrl_components,
)
from trl_storages.transforms import NStep, transforms_in
from trl_storages.validation import Lanes, deprecated_method, lane_numbers, renamed
from trl_storages.writing.lanes import Routing
from trl_storages.writing.recorder import Recorder
from trl_storages.writing.staged_step import StagedStep
from trl_storages.writing.writer import EpisodeWriter

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from typing_extensions import Self

__all__ = ["ReplayStorage"]

_OF_STORAGE = (
    "storage=PackedStorage(max_size), or a preset such as UniformReplayStorage(storage_size=)"
)
# Our keyword, with its value -> keywords of other libraries and of the presets.
_SYNONYMS = {_OF_STORAGE: "buffer_size capacity max_capacity max_length max_size size storage_size"}
# Arguments that add a component with a setting.
_PASS_N_STEP = "transform=NStep(...) to ReplayStorage"
_PASS_PER = "alpha > 0 to a preset, or sampler=PERSampler(...) to ReplayStorage"
_PASS_ERE = "eta < 1 to a preset, or sampler=ERESampler(...) to ReplayStorage"
_PASS_HER = "reward_fn to HERReplayStorage, or sampler=HERSampler(...) to ReplayStorage"
# No batch is sampled while a setting changes.
_setting = partial(ComponentSetting, lock_of=attrgetter("_replay_lock"))
_NO_LOCK = nullcontext()
_STATE = ("parts", "writer", "recorder", "generator", "cursors")
_NOT_COPIED = ("_iterator", "_pipeline", "_replay_lock", "_rng")
# Seconds between two checks while `sample` waits for transitions.
_PAUSE = 0.005


class ReplayStorage(UnsupportedMethods, Strict, TensorDictReplayBuffer):  # type: ignore[misc]
    """A replay buffer over lanes of episodes, which is a `TensorDictReplayBuffer` of TorchRL.

    TorchRL's buffers add the sampler's fields to a batch after the transforms have run, so a sampled
    goal never reaches the transform that must write it. Here each `ReplayTransform` reads these fields
    and other transitions of the storage, under the buffer's locks, as of one moment.

    Args:
        storage: holds the transitions.
        num_envs: E, the number of lanes; None takes that of the writer, else that of the storage.
        sampler: chooses the transitions of a batch; None samples uniformly. A `UniformSampler` replaces
            TorchRL's `RandomSampler` and `SamplerWithoutReplacement`; TorchRL's other samplers raise. A
            sampler of your own must return slots of stored transitions.
        writer: writes transitions; None creates `EpisodeWriter(num_envs)`.
        transform: is applied to each batch: a TorchRL transform (except `MultiStepTransform` and
            `CatFrames`) or a function of a batch.
        sample_unit: expands each sampled transition, as `EpisodeSequence` does; None leaves it.
        batch_size: B; None requires a size with each `sample`.
        recorder: reads the steps of `record`; None takes the fields from the first step.
        prefetch: number of batches to prefetch in a background thread. Threads and their locks do not
            survive a fork: create the buffer in the process that samples.
        generator: random numbers of the sampler, on the CPU; None uses torch's default generator.
        priority_key: key of the priorities in written steps and in batches.
        pin_memory: whether batches are in pinned memory.
        shared: whether to `share()` at once.
        service_backend: "ray" creates the buffer in a Ray actor, and returns a handle.
        service_backend_options: `remote_config` and `ray_init_config` of that actor.

    Raises:
        TypeError: a component of TorchRL does not support episodes; the message names its equivalent.
        ValueError: the writer does not fit the storage, or the sampler has no room for its transitions.

    >>> from tensordict import TensorDict
    >>> from trl_storages import NStep, PackedStorage
    >>> buffer = ReplayStorage(storage=PackedStorage(100), transform=NStep(2, 0.9), batch_size=3)
    >>> outcome = {"reward": torch.ones(4, 1), "done": torch.zeros(4, 1, dtype=torch.bool)}
    >>> path = torch.rand(5, 2)
    >>> after = {"observation": path[1:], **outcome, "terminated": outcome["done"]}
    >>> buffer.extend(TensorDict({"observation": path[:-1], "next": after}, [4])).tolist()
    [0, 1, 2, 3]
    >>> buffer.sample()["next", "reward"].shape
    torch.Size([3, 1])
    """

    # Attributes that the constructor of TorchRL's buffers sets, and that its other methods read.
    shared, priority_key, dim_extend = False, "td_error", 0
    _initialized, _delayed_init, _service_shutdown = True, False, False
    _accepts_transport_backend, _is_epoch_over = False, False
    _sample_call_count_value, _sampled_item_count_value = 0, 0
    _process_lock: ProcessLock | None = None
    _rng: torch.Generator | None = None
    n_step = _setting("n of the n-step returns (`NStep`).", _PASS_N_STEP)
    discount = _setting(
        "Discount of n-step returns and geometric goals; reading returns that of `NStep`.",
        _PASS_N_STEP,
    )
    alpha = _setting("Priority exponent (`PERSampler`).", _PASS_PER)
    beta = _setting("Exponent of the importance weights (`PERSampler`).", _PASS_PER)
    normalize = _setting("How importance weights are normalised (`PERSampler`).", _PASS_PER)
    eps = _setting("Is added to each priority (`PERSampler`).", _PASS_PER)
    eta = _setting("Recency strength (`ERESampler`).", _PASS_ERE)
    c_min = _setting("Smallest recency window, in transitions (`ERESampler`).", _PASS_ERE)
    num_goals = _setting("Relabelled transitions per transition left as stored.", _PASS_HER)
    strategy = _setting("The strategy, or mixture of strategies, of goals.", _PASS_HER)

    @renamed(_SYNONYMS)
    def __init__(
        self,
        *,
        storage: PackedStorage,
        num_envs: int | None = None,
        sampler: Sampler | None = None,
        writer: EpisodeWriter | None = None,
        transform: Transform | Callable[..., Any] | None = None,
        sample_unit: EpisodeSequence | None = None,
        batch_size: int | None = None,
        recorder: Recorder | None = None,
        prefetch: int | None = None,
        generator: torch.Generator | None = None,
        priority_key: NestedKey = "td_error",
        pin_memory: bool = False,
        shared: bool = False,
        service_backend: str | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        # TorchRL's metaclass handles service_backend.
        reject_torchrl_components(storage, writer, sample_unit)
        validation.instance("storage", storage, PackedStorage)
        validation.optional(validation.instance, "writer", writer, EpisodeWriter)
        validation.optional(validation.instance, "recorder", recorder, Recorder)
        validation.optional(validation.instance, "sample_unit", sample_unit, EpisodeSequence)
        self._replay_lock = threading.RLock()
        if writer is None:
            writer = EpisodeWriter(storage.episodes.num_envs if num_envs is None else num_envs)
        elif num_envs not in (None, writer.num_envs):
            raise ValueError(
                f"num_envs must be that of the writer, {writer.num_envs}, got {num_envs}."
            )
        self._storage, self._writer = storage, writer
        self._recorder = Recorder(writer.num_envs) if recorder is None else recorder
        self._batch_size = validation.optional(
            validation.integer, "batch_size", batch_size, at_least=1
        )
        self.priority_key = validation.key("priority_key", priority_key)
        self._pin_memory = validation.flag("pin_memory", pin_memory)
        self._unit = sample_unit
        self._sampler = resolve_sampler(UniformSampler() if sampler is None else sampler)
        self._transform = transform if isinstance(transform, Compose) else Compose()
        reject_torchrl_components(*transforms_in(self._transform.eval()))
        if not isinstance(transform, Compose | None):
            self.append_transform(transform)
        prefetch = validation.integer("prefetch", prefetch or 0)
        if prefetch and batch_size is None:
            raise ValueError("batch_size must be given with prefetch, got None.")
        self._prefetch_queue = Prefetcher(self._prefetch, prefetch)
        # The number of batches that this object has returned, and of transitions in them.
        self._num_sampled = [0, 0]
        self.set_rng(generator)
        writer.register_storage(storage)
        if (prioritized := self._prioritized) is not None:
            prioritized.update_priorities_from(storage.view())
        self.share(shared)
        # A directory is created after all checks.
        storage.prepare()
        if (saved := storage.backend.state) and storage.backend.is_writer:
            try:
                adopt = self._prepare_load_components(from_json(saved), reopened=True)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{storage.path} is damaged: {error}") from error
            adopt()

    @classmethod
    def _ServiceClass(  # noqa: N802  (TorchRL's name)
        cls, service_backend: str, *args: Any, service_backend_options: Any, **options: Any
    ) -> Any:
        # Imported here, because remote imports this module.
        from trl_storages.buffer import remote

        validation.choice("service_backend", service_backend, ("direct", "ray"))
        options |= service_backend_options
        return remote.StorageHandle(*args, replay_buffer_cls=remote.in_actor(cls), **options)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        mode: str = "r+",
        check: bool = False,
        cold: bool | None = None,
        **options: Any,
    ) -> Self:
        """Opens the transitions of a directory, with components of your choice.

        To open a preset, create it again with the same `path`.

        Args:
            path: the `path` of a replay buffer.
            mode: "r+" continues writing, as the only writer; "r" reads while another process may write.
            check: whether to check each transition, as `validate` does. After an unclean shutdown each
                one is checked in any case.
            cold: whether the directory is larger than the memory, see `PackedStorage`.
            **options: as in the constructor: sampler, transform, batch_size, generator, ...

        Raises:
            FileNotFoundError: the directory contains no replay buffer.
            ValueError: the directory is damaged, or has another format.
            RuntimeError: the directory has another writer.
        """
        packed = PackedStorage(None, path=path, mode=mode, cold=cold)
        try:
            if check:
                packed.validate()
            opened = cls.__new__(cls)
            ReplayStorage.__init__(opened, storage=packed, **options)
        except BaseException:
            packed.close()
            raise
        return opened

    # Contents

    @property
    def episodes(self) -> EpisodeIndex:
        """The index of stored transitions and their episodes."""
        return self._storage.episodes

    @property
    def sample_unit(self) -> EpisodeSequence | None:
        """Expands sampled transitions, as `EpisodeSequence` does; None if they are left as they are."""
        return self._unit

    @property
    def is_full(self) -> bool:
        """Whether every slot holds a transition, so that the next write evicts the oldest."""
        return bool(self.episodes.is_full)

    def components(self) -> list[Any]:
        """Returns the samplers and the transforms."""
        return [*layers_of(self._sampler), *transforms_in(self._transform)]

    parts = deprecated_method("parts", "components")  # removed in 0.6

    @property
    def _prioritized(self) -> Any:
        return _prioritized(self._sampler)

    @property
    def _write_lock(self) -> AbstractContextManager[Any]:
        lock = self._process_lock
        return _NO_LOCK if lock is None else lock.hold()

    def __len__(self) -> int:
        with self._replay_lock:
            return len(self._storage.view().episodes)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether a batch can be sampled; `batch_size` defaults to the constructor's."""
        validation.optional(validation.integer, "batch_size", batch_size, at_least=1)
        return len(self) > 0

    def __dir__(self) -> list[str]:
        """Lists public names, without the methods of TorchRL's buffers that raise."""
        return [name for name in super().__dir__() if name[0] != "_" and name not in UNSUPPORTED]

    def __repr__(self) -> str:
        parts = [self._storage, self._sampler, self._writer, *transforms_in(self._transform)]
        lines = "".join(f"\n    {part}," for part in parts)
        return f"{type(self).__name__}({lines}\n    batch_size={self._batch_size})"

    # Writing

    def extend(
        self,
        tensordicts: TensorDictBase,
        *,
        lanes: Lanes = None,
        update_priority: bool | None = None,
    ) -> torch.Tensor:
        """Writes steps.

        Args:
            tensordicts: `[T]` or `[]` for one lane; `[L, T]` (time last) or `[L]` (one step each) for
                several lanes; or `[N]` transitions with trajectory ids, see `EpisodeWriter`.
            lanes: the L distinct lanes to write, as numbers or as a mask; None writes all lanes.
            update_priority: whether to use the field `priority_key`, if present, as priorities; None is
                True.

        Returns:
            int64 slots, with the batch size of the steps; -1 for transitions that the same write
            overwrote.

        Raises:
            ValueError, KeyError, TypeError: the steps do not fit, a priority is negative or not finite,
                or next observations are missing and `n_step` exceeds 1. Nothing was written.
        """
        validation.optional(validation.flag, "update_priority", update_priority)
        data = self._inverse(validation.tensordict("tensordicts", tensordicts))
        if data is None:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        sampler: Any = None if update_priority is False else self._prioritized
        priority = None if sampler is None else data.get(self.priority_key, None)
        if priority is not None:
            priority = reduce_priorities(priority, data.numel(), sampler.reduction)
            priority = checked_priorities(priority, data.numel())
        layout = self._storage.layout
        if layout is None or not layout.has_next:
            for part in self.components():
                if isinstance(part, NStep):
                    part.check_next(have_next(data.keys(True, True)))
        with self._replay_lock, self._write_lock:
            slots = self._writer.extend(data, lanes=lanes)
            if priority is not None:
                sampler.set_priorities(self._storage, slots, priority)
        return slots

    def add(self, data: TensorDictBase, *step: Any) -> torch.Tensor:
        """Writes one step: a transition `[]` of a single lane, or `[E]` of all lanes.

        Args:
            data: the step.
            *step: for a message; `record` takes the values of a step one by one.

        Returns:
            int64 slots of the batch size of `data`.

        Raises:
            TypeError: `data` is not a single TensorDict.
        """
        if step:
            raise TypeError(
                f"add() takes one TensorDict, got {1 + len(step)} values. Use record(observations, "
                "actions, rewards, terminateds, truncateds, infos, next_observations)."
            )
        return self.extend(data)

    def record(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
        infos: Any,
        next_observations: Any,
    ) -> torch.Tensor | None:
        """Writes one step of a plain gymnasium loop.

        Args:
            observations: the observations the actions were chosen for: an array, or a dict of them;
                `[E, ...]` for a vector environment, without the leading dimension for a single one.
            actions: the actions taken.
            rewards: as returned by `step`, like all that follow.
            terminateds: whether the state is terminal.
            truncateds: whether the episode was truncated, as by a time limit.
            infos: gymnasium's dict.
            next_observations: as returned by `step`. After an automatic reset this is the first
                observation of the next episode; `autoreset_mode` says where the last one is found.

        Returns:
            int64 slots of the written transitions; None if every environment was only reset, or if a
            transform withheld the transitions.

        Raises:
            ValueError, TypeError, KeyError: a value does not fit. Nothing was written.
        """
        step = observations, actions, rewards, terminateds, truncateds, infos, next_observations
        with self._replay_lock, self._write_lock:
            staged = self._recorder.read(step, self._storage)
            if staged is None:
                return None
            if self._pipeline.batch_transforms:
                return self._put(*staged)
            return self._writer.append(*staged, step)

    def _put(self, staged: StagedStep, routing: Routing) -> torch.Tensor | None:
        """Writes a recorded step after applying the inverse transforms."""
        words = torch.from_numpy(staged.block(routing).words.copy())
        rows = self._inverse(staged.layout.tensordict(words))
        return None if rows is None else self._writer.extend(rows, lanes=routing.lanes.tolist())

    def _inverse(self, data: TensorDictBase) -> TensorDictBase | None:
        """Applies the inverse transforms; returns None if one withholds the transitions."""
        if not self._pipeline.batch_transforms:
            return data
        with dispatch_td_nn_modules(True):
            return self._transform.inv(data)

    def extend_from(self, other: ReplayStorage) -> None:
        """Writes the transitions of another replay buffer, of any size and number of lanes.

        Episodes are copied one after another, oldest first, in chunks of some megabytes. Their ends,
        splits and priorities are kept. With equally many lanes each transition stays in its lane, and
        running episodes continue; otherwise each episode goes to the lane with the fewest transitions,
        and running episodes are split. If this replay buffer is empty and of the same size and number
        of lanes, it samples with the same seed the same transitions as the other one.

        Args:
            other: a replay buffer, such as `ReplayStorage.open(path, mode="r")`. Fields are matched by
                name, and infos at its root also to fields under `next`; a warning names those left out.

        Raises:
            ValueError: fields are missing, or have another dtype or shape. Nothing is written then.
            TypeError: `other` is no `ReplayStorage`.
        """
        if validation.instance("other", other, ReplayStorage) is self:
            raise ValueError("other must be another replay buffer, got this one.")
        sampler, source = self._prioritized, other._prioritized
        self.synchronize()
        with other._replay_lock, other._write_lock:
            if source is not None:
                source.update_priorities_from(other._storage.view())
            with self._replay_lock, self._write_lock:
                self._writer.extend_from(other._writer)
                if self._writer.num_envs == other._writer.num_envs:
                    self._recorder.prepare_load(other._recorder.state())()
                if sampler is not None and source is not None:
                    largest = max(it.state()["largest"] or 0.0 for it in (sampler, source))
                    sampler.load_state_dict({"largest": largest})
                    sampler.update_priorities_from(self._storage.view())

    def end_episodes(self, lanes: Lanes = None) -> None:
        """Ends the running episodes of some lanes, or of all: the next steps begin new episodes.

        Call it when environments are reset before an episode has ended. Do not call it between the end of
        an episode and a reset by gymnasium's NextStep mode: the reset would be stored as a transition.

        Args:
            lanes: numbers, or a mask `[E]`; None ends the episodes of all lanes.

        Raises:
            ValueError: there is no such lane. Nothing was changed.
        """
        numbers = [*lane_numbers(lanes, self._writer.num_envs)]
        with self._replay_lock, self._write_lock:
            self._storage.end_episodes(numbers)
            self._recorder.reset(numbers)

    def rewrite(self, index: Any, values: Any) -> None:
        """Overwrites values of stored steps, such as rewards; see `PackedStorage.rewrite`."""
        with self._replay_lock, self._write_lock:
            self._storage.rewrite(index, values)

    def empty(self, empty_write_count: bool = True, *, keep_steps: int = 0) -> None:
        """Evicts all transitions except the last `keep_steps` of each lane.

        Args:
            empty_write_count: whether to reset the write counter.
            keep_steps: how many of the last steps of each lane are kept, such as the burn-in of a
                recurrent network; their priorities are reset.

        Raises:
            ValueError: `keep_steps` is negative.
            OSError: the buffer is in a directory, and the disk is full. Nothing was changed.
        """
        empty_write_count = validation.flag("empty_write_count", empty_write_count)
        keep_steps = validation.integer("keep_steps", keep_steps)
        self.synchronize()
        with self._replay_lock, self._write_lock:
            self._storage.empty(keep_steps)
            self._prefetch_queue.clear()
            self._writer._empty(empty_write_count)
            self._sampler._empty()

    def share(self, shared: bool = True) -> Self:
        """Lets other processes write, such as the workers of TorchRL's multi-process collectors.

        Transitions, episodes and counters move to memory that forked processes share. One process
        samples. A file lock lets one process write or sample at a time. The operating system releases it
        when its holder is killed: earlier transitions are intact, and the other processes continue. Fork
        workers while no other thread of this process samples or writes, because a fork copies the locks
        of threads as they are.

        Returns:
            the buffer.

        Raises:
            RuntimeError: the transitions are on a GPU or in a directory, or the platform has no file
                locks.
            ValueError: `prefetch` is set.
        """
        if validation.flag("shared", shared) and not self.shared:
            if self._prefetch_queue.number:
                raise ValueError("prefetch must be 0 in a shared replay buffer: leave it out.")
            lock = ProcessLock()
            with self._replay_lock:
                if (sampler := self._prioritized) is not None:
                    sampler.reload_priorities()
                self._storage.share()
                self._writer.share()
                self._process_lock, self.shared = lock, True
        return self

    # Transitions as they were stored

    def __getitem__(self, index: Any) -> Any:
        """Reads transitions as stored: `[i]` and `[mask]` by slot, `[i:j]` in time order.

        No transforms apply, and the transitions are copied.

        Args:
            index: a slice of the history in time order, oldest transition first; or slots, as an int, a
                list, an integer tensor of any shape B or a mask `[N]` over all slots; or a key, for one
                field of the history.

        Raises:
            IndexError: a slot holds no transition, or a mask has another shape.
        """
        with self._replay_lock, self._write_lock:
            if isinstance(index, tuple | str):
                return self[:][validation.key("index", index)]
            if isinstance(index, slice):
                view = self._storage.view()
                slots = torch.from_numpy(view.episodes.slots_by_age().numpy()[index].copy())
                batch, overwritten = view.read(slots), view.overwritten(slots)
                return batch if overwritten is None else batch[~overwritten]
            slots = validation.values("index", index)
            if slots.dtype is torch.bool:
                if slots.shape != (capacity := self._storage.max_size,):
                    raise IndexError(
                        f"a mask must have one value per slot, [{capacity}], got {[*slots.shape]}."
                    )
                slots = slots.nonzero().squeeze(-1)
            return self._storage.get(validation.slots(slots))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Raises a RuntimeError: transitions are not overwritten in place."""
        raise RuntimeError(
            "transitions are not overwritten in place. Use rewrite(index, values) for values of a step."
        )

    # Sampling

    @overload
    def sample(
        self,
        batch_size: int | None = ...,
        return_info: Literal[False] = ...,
        *,
        wait: bool = ...,
        timeout: float | None = ...,
        cancel_event: threading.Event | None = ...,
    ) -> TensorDictBase: ...

    @overload
    def sample(
        self,
        batch_size: int | None = ...,
        *,
        return_info: Literal[True],
        wait: bool = ...,
        timeout: float | None = ...,
        cancel_event: threading.Event | None = ...,
    ) -> tuple[TensorDictBase, dict[NestedKey, torch.Tensor]]: ...

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        wait: bool = False,
        timeout: float | None = None,
        cancel_event: threading.Event | None = None,
    ) -> TensorDictBase | tuple[TensorDictBase, dict[NestedKey, torch.Tensor]]:
        """Samples a batch.

        Args:
            batch_size: B; None uses the constructor's. Only batches of that size are prefetched.
            return_info: whether to return the sampler's fields as a dict, too.
            wait: whether to wait until there are transitions.
            timeout: seconds to wait at most; None waits forever.
            cancel_event: ends the wait when it is set.

        Returns:
            TensorDict `[B]` of the stored fields, after the transforms, with `index`, `index_generation`
            and the sampler's other fields; the steps of a `sample_unit` are consecutive.

        Raises:
            ValueError: `batch_size` is below 1.
            RuntimeError: the buffer is empty or shut down, the wait was cancelled, no batch size is
                known, or a `HERSampler` chooses goals that no transform writes.
            TimeoutError: no transitions were written in time.
        """
        if wait:
            end = math.inf if timeout is None else time.monotonic() + timeout
            while self.wait_until_sampleable(
                batch_size, timeout=end - time.monotonic(), cancel_event=cancel_event
            ):
                with suppress(EmptyError):  # another process may empty the buffer meanwhile
                    return self.sample(batch_size, return_info)  # type: ignore[call-overload]
            if cancel_event is not None and cancel_event.is_set():
                raise RuntimeError("the wait for a batch was cancelled.")
            raise TimeoutError(f"no batch could be sampled within {timeout} seconds.")
        size = self._batch_size
        if batch_size is not None:
            size = validation.integer("batch_size", batch_size, at_least=1)
        self._check_not_shut_down()
        if size is None:
            raise RuntimeError("batch_size is unknown: pass it to the constructor or to sample().")
        if self._prefetch_queue.number and size == self._batch_size:
            batch, info, self._is_epoch_over = self._prefetch_queue.take()
        else:
            if self._prefetch_queue.number:  # so that a seed samples the same batches
                self.synchronize()
            with self._replay_lock, self._write_lock:
                batch, info = self._pipeline.sample(size)
        self._count(batch)
        if self._pin_memory:
            batch = batch.pin_memory()
        return (batch, info) if return_info else batch

    def wait_until_sampleable(
        self,
        min_items: int | None = None,
        timeout: float | None = None,
        cancel_event: threading.Event | None = None,
    ) -> bool:
        """Waits until a batch can be sampled, `timeout` seconds at most; returns whether it can.

        Args:
            min_items: B; one transition is enough to sample a batch of any size.
            timeout: seconds to wait at most; None waits forever.
            cancel_event: ends the wait when it is set.

        Raises:
            RuntimeError: the buffer is shut down.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        cancelled = threading.Event() if cancel_event is None else cancel_event
        while True:
            self._check_not_shut_down()
            if self.can_sample(min_items):
                return True
            if time.monotonic() >= end or cancelled.wait(_PAUSE):
                return False

    def _check_not_shut_down(self) -> None:
        if self._service_shutdown:
            raise RuntimeError("the replay buffer was shut down: it samples no more batches.")

    def _count(self, batch: TensorDictBase) -> None:
        self._num_sampled[0] += 1
        self._num_sampled[1] += batch.numel()

    def _new_pipeline(self) -> SamplingPipeline:
        return SamplingPipeline(
            self._storage, self._sampler, self._unit, self._transform, self._rng
        )

    def _prefetch(self) -> tuple[TensorDictBase, dict[Any, Any], bool]:
        with self._replay_lock, self._write_lock:
            batch, info = self._pipeline.sample(self._batch_size)  # type: ignore[arg-type]
            return batch, info, self._sampler.ran_out

    def sample_share(self, batch_size: int) -> TensorDictBase:
        """Samples a part of a larger batch, without prefetching and normalising of weights."""
        self._check_not_shut_down()
        sampler = self._prioritized
        with self._replay_lock, self._write_lock:
            if sampler is None:
                batch, _ = self._pipeline.sample(batch_size)
            else:
                normalize, sampler.normalize = sampler.normalize, "none"
                try:
                    batch, _ = self._pipeline.sample(batch_size)
                finally:
                    sampler.normalize = normalize
        self._count(batch)
        return batch

    def sample_episodes(self, n: int) -> TensorDictBase:
        """Samples complete episodes uniformly: finished episodes without evicted transitions.

        Returns:
            TensorDict `[n, T]` of the stored transitions, T the longest episode's length, padded with
            zeros where `("collector", "mask")` is false, with `index`. Transforms apply, except
            `ReplayTransform`s. `returns_to_go` computes their returns.

        Raises:
            ValueError: `n` is below 1.
            RuntimeError: no complete episode is stored, or the buffer is shut down.
        """
        n = validation.integer("n", n, at_least=1)
        self._check_not_shut_down()
        self.synchronize()  # so that a seed samples the same episodes
        with self._replay_lock, self._write_lock:
            batch = self._pipeline.sample_episodes(n)
        self._count(batch)
        return batch

    def batches(
        self, num_batches: int, batch_size: int | None = None, epochs: int = 1
    ) -> Iterator[TensorDictBase]:
        """Returns an iterator over `num_batches * epochs` batches."""
        num_batches = validation.integer("num_batches", num_batches)
        num_batches *= validation.integer("epochs", epochs)
        return (self.sample(batch_size) for _ in range(num_batches))

    def loader(
        self,
        num_workers: int = 0,
        *,
        batch_size: int | None = None,
        pin_memory: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> DataLoader[TensorDictBase]:
        """Returns a `DataLoader` whose workers sample from the directory while this process writes.

        Each worker has its own seed, and copies of this buffer's sampler, sample unit and transforms as
        they are now. Only this buffer updates priorities.

        Args:
            num_workers: processes that sample; they wait a minute for the first transitions. 0 samples
                in this process, and raises like `sample` while the buffer is empty.
            batch_size: B; None uses the constructor's.
            pin_memory: whether batches arrive in pinned memory, where there is CUDA.
            seed: seed of the workers; None uses torch's default generator.
            **options: as in `torch.utils.data.DataLoader`: prefetch_factor, multiprocessing_context, ...

        Raises:
            RuntimeError: the buffer is not in a directory, or its fields are not known yet.
            ValueError: a number is too small, or no batch size is known.
        """
        with self._replay_lock:
            options |= {"num_workers": num_workers, "pin_memory": pin_memory}
            return make_loader(self, batch_size, seed, options)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Samples batches, until the end of an epoch if the sampler samples without replacement."""
        while True:
            yield self.sample()
            if self._is_epoch_over if self._prefetch_queue.number else self._sampler.ran_out:
                return

    def synchronize(self) -> None:
        """Waits until all requested batches are prefetched."""
        self._prefetch_queue.wait()

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the prefetching thread after the requested batches; sampling raises from then on.

        Args:
            timeout: is ignored, because the thread always ends once it has sampled the requested batches.
        """
        self._service_shutdown = True
        self._prefetch_queue.close()

    # Components

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replaces the sampler, and returns the previous one. The new one gets the buffer's generator.

        Prefetched batches are discarded.

        Raises:
            TypeError: it is a TorchRL sampler that does not support lanes. Nothing was changed.
            ValueError: it uses priorities, and has room for fewer transitions. Nothing was changed.
        """
        sampler = resolve_sampler(sampler)
        self.synchronize()
        with self._replay_lock, self._write_lock:
            if (prioritized := _prioritized(sampler)) is not None:
                prioritized.update_priorities_from(self._storage.view())
            self._prefetch_queue.clear()
            previous, self._sampler = self._sampler, sampler
            sampler._rng = self._rng
            self._pipeline = self._new_pipeline()
        return previous

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Replaces the generator of random numbers; None uses torch's default generator.

        Prefetched batches are discarded.
        """
        validation.optional(validation.instance, "generator", generator, torch.Generator)
        self.synchronize()
        with self._replay_lock, self._write_lock:
            self._prefetch_queue.clear()
            self._adopt_rng(generator)

    def _adopt_rng(self, generator: torch.Generator | None) -> None:
        super().set_rng(generator)
        self._pipeline = self._new_pipeline()

    def append_transform(
        self, transform: Transform | Callable[..., Any], *, invert: bool = False
    ) -> Self:
        """Appends a transform; returns the buffer.

        Args:
            transform: a TorchRL transform, or a function of a batch. Its inverse, if any, is applied to
                written steps: that of `DoubleToFloat` makes actions float64, unless `in_keys` is given.
            invert: whether to swap the directions: forward on writes, inverse on samples.
        """
        reject_torchrl_components(
            *transforms_in(validation.function("transform", transform, "of a batch"))
        )
        # A batch that is sampled meanwhile must see all transforms or none of the change.
        with self._replay_lock:
            super().append_transform(transform, invert=validation.flag("invert", invert))
        return self

    def insert_transform(self, index: int, transform: Transform, *, invert: bool = False) -> Self:
        """Inserts a transform after the first `index` ones; returns the buffer."""
        index = validation.integer("index", index)
        reject_torchrl_components(
            *transforms_in(validation.instance("transform", transform, Transform))
        )
        with self._replay_lock:
            super().insert_transform(index, transform, invert=validation.flag("invert", invert))
        return self

    # Priorities

    def update_tensordict_priority(
        self, data: TensorDictBase, priority: torch.Tensor | None = None
    ) -> None:
        """Updates the priorities of a sampled batch, from its field `priority_key` or from `priority`.

        Padding and transitions that were overwritten since are skipped. A sequence has one priority, that
        of its anchor: the one passed for the sequence, or the largest of its valid learning steps.
        Without priorities in the sampler this does nothing, so training loops can call it in any case.

        Args:
            data: a sampled batch or a part of it, possibly reshaped to sequences by
                `batch.reshape(-1, num_steps)`. Its priorities are `[B]`, `[B, 1]`, or `[B, ...]`, reduced
                by the sampler's `reduction`.
            priority: the priorities, if they are not a field of the batch: one per transition, `[B]`, or
                `[n, S]` for n sequences of S steps; or one per sequence, `[n]`, as from
                `sequence_priority`.

        Raises:
            KeyError: the batch has no priorities, or no `index`.
            ValueError: a priority is negative or not finite, or the shape does not fit. No priority was
                updated.
        """
        validation.tensordict("data", data)
        if (sampler := self._prioritized) is None:
            return
        updates = sampled_priorities(data, self.priority_key, priority, sampler.reduction)
        with self._replay_lock, self._write_lock:
            sampler.set_priorities(self._storage, *updates)

    def update_priority(self, index: torch.Tensor, priority: torch.Tensor) -> None:
        """Sets the priorities of transitions by their slots, such as those that `extend` returned.

        For a sampled batch call `update_tensordict_priority`, which skips transitions that were
        overwritten since, and supports sequences.

        Raises:
            ValueError: a priority is negative or not finite. No priority was updated.
        """
        if (sampler := self._prioritized) is not None:
            with self._replay_lock, self._write_lock:
                sampler.set_priorities(self._storage, index, priority)

    # State

    def state_dict(self) -> State:
        """Returns everything that the next writes and samples depend on.

        It consists of tensors, numbers, strings, lists and dicts. Prefetched batches are not part of it.
        """
        self.synchronize()
        with self._replay_lock, self._write_lock:
            components = self._component_states()  # first, as new transitions get priorities
            return copy.deepcopy({"rows": self._storage.state(), "rest": components})

    def load_state_dict(self, state_dict: State) -> None:
        """Continues from a state that `state_dict` returned, parameters included.

        Raises:
            ValueError, TypeError, KeyError: the state is damaged, or belongs to a buffer with another
                size, layout, number of lanes, or other components. Nothing was changed.
        """
        self.synchronize()
        with self._replay_lock, self._write_lock:
            rows, components = required_items("a replay buffer", state_dict, ("rows", "rest"))
            adopt = self._prepare_load_components(components)
            # Transitions first, because the disk may be too full for them.
            all_of(
                self._storage.prepare_load(rows, to_json(components)),
                self._prefetch_queue.clear,
                adopt,
            )()

    def _component_states(self) -> State:
        """Returns the state except the transitions."""
        if (prioritized := self._prioritized) is not None:
            prioritized.update_priorities_from(self._storage.view())
        return {
            "parts": [*map(component_state, self.components())],
            "writer": self._writer.state(),
            "recorder": self._recorder.state(),
            "generator": None if self._rng is None else self._rng.get_state(),
            "cursors": self.episodes.cursors.tolist(),
        }

    def _prepare_load_components(self, state: Any, *, reopened: bool = False) -> Adopt:
        """Checks a state, and returns a function by which all but the transitions continues from it.

        A buffer that is `reopened` keeps the parameters of its constructor, and may have other
        components. The states of writer and recorder belong to the last transition that was written. If a
        killed writer wrote more transitions after the state was saved, only their number is adopted.
        """
        parts, writer, recorder, rng, cursors = required_items("a replay buffer", state, _STATE)
        components = self.components()
        if not isinstance(parts, list) or (len(parts) != len(components) and not reopened):
            raise ValueError(f"the state must have {len(components)} components: nothing changed.")
        if reopened:
            adopts = prepare_load_samplers(components, parts)
        else:
            adopts = [*map(prepare_load_component, components, parts)]
        if rng is not None:
            generator = self._rng or torch.Generator()
            adopts += [prepare_load_generator(generator, rng), partial(self._adopt_rng, generator)]
        if not isinstance(cursors, list) or not all(type(cursor) is int for cursor in cursors):
            raise ValueError("cursors must be a list of integers: nothing changed.")
        if reopened and cursors != (current := self.episodes.cursors.tolist()):
            count = writer["write_count"] + sum(current) - sum(cursors)
            writer = {**self._writer.state(), "write_count": count}
            recorder = self._recorder.state()
        return all_of(
            *adopts, self._writer.prepare_load(writer), self._recorder.prepare_load(recorder)
        )

    def dumps(self, path: Any) -> None:
        """Saves the state in a directory. Loading it runs no code.

        An earlier dump at the same path is replaced once this one is on the disk: after an error, a kill
        or a power cut, one of the two is complete.

        Args:
            path: the directory; it is created if it does not exist.

        Raises:
            RuntimeError: the fields are not known yet, or the directory is open for writing.
            OSError: the disk is full, or the directory contains other files.
        """
        path = validation.directory("path", path)
        self.synchronize()
        with self._replay_lock, self._write_lock:
            self._storage.dumps(path, to_json(self._component_states()))

    def loads(self, path: Any) -> None:
        """Continues from a state that `dumps` saved, parameters included.

        Args:
            path: the directory.

        Raises:
            FileNotFoundError: the directory contains no dump.
            ValueError, TypeError, KeyError: the dump is damaged, or does not fit; see `load_state_dict`.
                Nothing was changed.
        """
        rows, components = dumps.read(validation.directory("path", path))
        self.load_state_dict({"rows": rows, "rest": from_json(components)})

    # In a directory

    def flush(self) -> None:
        """Waits until all transitions are on the disk, with the state of the other components.

        Afterwards they survive a power cut, unless they are evicted. Kills need no `flush`: written
        transitions survive them in any case. In memory this does nothing. If the state of the other
        components reaches 8 MiB, as that of a large network does, only transitions are stored, and a
        warning is given.

        Raises:
            OSError: the disk is full. The transitions are stored as after a kill.
        """
        with self._replay_lock, self._write_lock:
            self._storage.flush(to_json(self._component_states()))

    def close(self, *, keep: bool = True) -> None:
        """Flushes a directory as `flush`, and lets another process write. This buffer can still sample.

        Args:
            keep: whether to keep the directory; False removes it.

        Raises:
            OSError: the disk is full. The transitions are stored as after a kill.
        """
        keep = validation.flag("keep", keep)
        with self._replay_lock, self._write_lock:
            self._storage.close(to_json(self._component_states()), keep=keep)

    def __getstate__(self) -> State:
        """Returns the state of a copy, which has its own transitions."""
        self.synchronize()
        with self._replay_lock, self._write_lock:
            state = {**self.__dict__, "_prefetch_queue": self._prefetch_queue.number}
            if not self.shared or get_spawning_popen() is None:  # a copy is not shared
                state.update(_process_lock=None, shared=False)
                # Pickled: tensors that are sent to a spawned process must outlive this call.
                state["rest"] = pickle.dumps(self._component_states())
        return {name: value for name, value in state.items() if name not in _NOT_COPIED}

    def __setstate__(self, state: State) -> None:
        components, prefetch = state.pop("rest", None), state.pop("_prefetch_queue")
        self.__dict__.update(state)
        self._replay_lock = threading.RLock()
        self._prefetch_queue = Prefetcher(self._prefetch, prefetch)
        self._pipeline = self._new_pipeline()
        if components is not None:
            # This buffer may have written to the directory since.
            is_reopened = self._storage.path is not None
            self._prepare_load_components(pickle.loads(components), reopened=is_reopened)()

    # Inspection

    def explain(self, batch: TensorDictBase) -> Explanation:
        """Reports which transition each sample is and how it was transformed; prints as a table.

        The columns, int64 unless noted; the last four groups appear only if the batch has their fields:

        - `slot`, `lane`: where the transition is stored.
        - `age`: the number of later steps of its lane; the newest transition of each lane has age 0.
        - `episode`: a number for its episode; `step`, `length`: its position among the stored transitions
          of that episode, from 0, and their number.
        - `valid`: bool, False for padding in a sequence or episode.
        - `steps`: the number of rewards that its n-step return sums; `[B, A]` if A agents have their own.
        - `weight`: float, its importance weight.
        - `relabelled`: bool, whether its goal was replaced by an achieved goal; `goal_slot`: the slot of
          the transition that achieved this goal (its own slot if not relabelled); `goal_same_episode`:
          bool; `goal_offset`: how many steps later in the lane the goal was achieved, 0 for other
          episodes. For a goal with another key, such as `actor_goal`, the columns are
          `actor_goal_relabelled`, ...

        Args:
            batch: a batch of this buffer, whose transitions are still stored.

        Returns:
            the columns by name, each `[B]`.

        Raises:
            KeyError: the batch has no `index`.
            IndexError: a transition of the batch was overwritten since.
        """
        validation.tensordict("batch", batch)
        with self._replay_lock, self._write_lock:
            return explain(batch, self.episodes, self._sampler)

    def stats(self) -> dict[str, int | float | bool]:
        """Returns numbers to log, such as by TorchRL's `LoggerMonitor`.

        The call changes nothing. With priorities it takes some milliseconds per million transitions.

        The age of a transition is the number of later steps of its lane, as in `explain`. Batches of
        `sample_episodes` count as sampled, with their padding.

        Returns:
            the numbers of TorchRL's buffers: `size`, `write_count`, `capacity`, `utilization`,
            `prefetch_queue_size` and `initialized`; and

            - `episodes`: number of episodes that have stored transitions.
            - `oldest_age`, `mean_age`: over the stored transitions.
            - `sample_calls`, `samples_returned`: batches that this object has sampled, transitions in
              them.
            - `largest_priority`, `mean_priority`: if the sampler uses priorities.

            Ages and priorities of an empty buffer are 0.
        """
        with self._replay_lock, self._write_lock:
            stats, view = super().stats(), self._storage.view()
            fill, sampler = view.episodes.fill, self._prioritized
            stats["episodes"] = view.episodes.num_episodes
            stats["oldest_age"] = int((fill - 1).max(initial=0))
            stats["mean_age"] = float((fill * (fill - 1)).sum() / 2 / max(fill.sum(), 1))
            stats["sample_calls"], stats["samples_returned"] = self._num_sampled
            if sampler is not None:
                priorities = sampler.update_priorities_from(view).by_slot()
                priorities = priorities[priorities < math.inf]
                stats["largest_priority"] = float(priorities.max(initial=0))
                stats["mean_priority"] = float(priorities.sum() / max(len(priorities), 1))
        return stats

    def validate(self) -> None:
        """Checks the index, and in a directory each transition.

        Raises:
            RuntimeError, ValueError: the index contradicts itself, or a transition is damaged.
        """
        with self._replay_lock, self._write_lock:
            self._storage.validate()


def _prioritized(sampler: Any) -> Any:
    """Returns the layer of a sampler that uses priorities; None if there is none."""
    layer = layers_of(sampler)[-1]
    return layer if isinstance(layer, PERSampler) else None
