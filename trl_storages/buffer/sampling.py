"""The way of a batch: sampler, sample unit, rows, transforms; and batches that are drawn ahead.

Letters: B batch, S rows of a sequence.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Compose, Transform

from trl_storages import keys, validation
from trl_storages.index import EpisodeIndex
from trl_storages.samplers import EpisodeSequence, HERSampler, ReplaySampler
from trl_storages.storage import BatchRows, PackedStorage, StorageView
from trl_storages.torchrl_compat import dispatch_td_nn_modules, reject_torchrl_components
from trl_storages.transforms import GoalRelabel, ReplayTransform, transforms_in

__all__ = ["Prefetcher", "SamplingPipeline", "draw_episodes", "read"]

Entries = dict[Any, torch.Tensor]
# How many transitions must have been stored.
_ENOUGH_TO_AUDIT = 1000


class SamplingPipeline:
    """The steps that make a batch: our transforms see rows, TorchRL's see TensorDicts.

    Args:
        storage: holds the rows.
        sampler: draws slots; those of a sampler of the user's are checked.
        unit: expands them; None leaves them.
        transform: all transforms.

    Raises:
        TypeError: a transform is one of TorchRL's that would be wrong over lanes of episodes.

    Attributes:
        transforms: the transforms by name; others may be added to the `Compose` itself.
        num_transforms: how many there were.
        others: the transforms that know batches alone.
    """

    def __init__(
        self,
        storage: PackedStorage,
        sampler: Sampler,
        unit: EpisodeSequence | None,
        transform: Compose,
    ) -> None:
        self._storage = storage
        layers = sampler.layers if isinstance(sampler, ReplaySampler) else []
        self._slots: Callable[..., tuple[torch.Tensor, Entries]] = (
            sampler.sample_view if layers else partial(_live, sampler, storage)
        )
        self._unit = unit
        parts = transforms_in(transform)
        # The public accessors of a module take several times as long.
        self.transforms = transform._modules["transforms"]._modules
        self.num_transforms = len(self.transforms)
        replayed = [part for part in parts if isinstance(part, ReplayTransform)]
        self.others = [part for part in parts if not isinstance(part, ReplayTransform)]
        reject_torchrl_components(*self.others)
        written = [part.goal_key for part in replayed if part.uses_goals]
        self._goals = [layer for layer in layers if isinstance(layer, HERSampler)]
        drawn = [layer.goal_key for layer in self._goals]
        self._unwritten = [] if None in written else [key for key in drawn if key not in written]
        # Most parts need no further transitions.
        idle = ReplayTransform.prepare
        self._prepares = [part.prepare for part in replayed if type(part).prepare is not idle]
        self._unaudited = [part for part in replayed if isinstance(part, GoalRelabel)]
        self._replays = [
            part.replay if isinstance(part, ReplayTransform) else partial(_transform, part)
            for part in parts
        ]

    def _audit(self, episodes: EpisodeIndex) -> None:
        """Audits each transform that relabels, once, if 1,000 transitions have been stored.

        Raises:
            RuntimeError: the storage is empty.
        """
        self._unaudited = [part for part in self._unaudited if part.is_audit_due]
        num_goals = {layer.goal_key: layer.num_goals for layer in self._goals}
        for part in self._unaudited:
            number = num_goals.get(part.goal_key, 1)  # a sampler of the user's may draw goals, too
            if number and episodes.cursors.sum() >= _ENOUGH_TO_AUDIT:
                episodes.check_filled()
                part.audit_once(self._storage, mixes_rewards=math.isfinite(number))

    def sample(self, batch_size: int) -> tuple[TensorDictBase, Entries, torch.Tensor | None]:
        """Samples a batch `[B]`.

        Returns:
            the batch; the entries of sampler and sample unit; and which samples `[B]` another process has
            overwritten meanwhile, None if there are none.

        Raises:
            RuntimeError: the storage is empty, or the sampler draws goals that no transform writes.
        """
        view = self._storage.view()
        if self._unaudited and view.is_exclusive:
            self._audit(view.episodes)
        slots, info = self._slots(view, batch_size)
        if self._unwritten:
            raise RuntimeError(
                f"the goals {self._unwritten} that are drawn must be written by a transform: pass "
                "transform=GoalRelabel(reward_fn), with the goal_key of the sampler."
            )
        if self._unit is not None:
            slots, info = self._unit.expand(slots, info, view)
        info[keys.INDEX] = slots
        rows = BatchRows(view, slots, info)
        for prepare in self._prepares:
            prepare(rows)
        for replay in self._replays:
            replay(rows)
        batch = rows.tensordict()
        return batch, info, self._torn(view, len(slots))

    def _torn(self, view: StorageView, batch_size: int) -> torch.Tensor | None:
        """Returns which samples `[B]` were overwritten; the steps of a sequence belong together."""
        torn = view.torn(batch_size)
        if torn is None or self._unit is None:
            return torn
        S = self._unit.num_steps
        return torn.view(-1, S).any(1).repeat_interleave(S)

    def sample_complete(self, batch_size: int) -> tuple[TensorDictBase, Entries]:
        """Samples a batch, and replaces samples that another process overwrites meanwhile.

        They are replaced by those of further batches, so that a reader makes progress however fast the
        writer is.
        """
        batch, info, torn = self.sample(batch_size)
        while torn is not None:
            other, others, is_torn = self.sample(batch_size)
            if len(torn) != batch.numel():  # a transform has changed the number of samples
                batch, info, torn = other, others, is_torn
                continue
            taken = torn if is_torn is None else torn & ~is_torn
            batch = torch.where(taken.view(batch.batch_size).to(other.device), other, batch)
            for key, value in info.items():
                info[key] = torch.where(expand_as_right(taken, value), others[key], value)
            torn = None if torn.equal(taken) else torn & ~taken
        return batch, info


def _live(
    sampler: Sampler, storage: PackedStorage, view: StorageView, batch_size: int
) -> tuple[torch.Tensor, Entries]:
    """Draws by a sampler of the user's.

    Raises:
        RuntimeError: the storage is empty.
        IndexError: a slot holds no row, nor did when the draw began: rows that are overwritten meanwhile
            are found by the view.
    """
    index = view.episodes
    index.check_filled()
    tails = index.tails.copy()
    slots, info = sampler.sample(storage, batch_size)
    slots = torch.as_tensor(slots, device="cpu").long()
    index.check_live(slots, tails)
    return slots, {key: torch.as_tensor(value, device="cpu") for key, value in info.items()}


def _transform(part: Transform, rows: BatchRows) -> None:
    with dispatch_td_nn_modules(True):
        rows.transform(part)


def read(storage: PackedStorage, index: Any) -> Any:
    """Reads rows by a slice of the history, oldest first, by slots or a mask; or an entry of all.

    Raises:
        IndexError: a slot holds no row.
        TypeError: the index is none of these.
    """
    if isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str)):
        return read(storage, slice(None))[index]
    if isinstance(index, slice):
        view = storage.view()
        slots = torch.from_numpy(view.episodes.slots_by_age().numpy()[index].copy())
        batch, overwritten = view.read(slots), view.overwritten(slots)
        return batch if overwritten is None else batch[~overwritten]
    if isinstance(index, tuple):
        raise TypeError(
            f"an index must be a slice, an int, a list, a mask, integer slots or a key, got {index!r}."
        )
    slots = validation.values("index", index)
    is_mask = slots.dtype is torch.bool
    return storage.get(validation.slots(slots.nonzero().squeeze(-1) if is_mask else slots))


def draw_episodes(
    storage: PackedStorage, n: int, generator: torch.Generator | None
) -> TensorDictBase:
    """Draws whole, finished episodes `[n, T]`, padded with zeros where the mask says so.

    Episodes that were overwritten while they were read are drawn again.
    """
    parts: list[TensorDictBase] = []
    while (missing := n - sum(map(len, parts))) > 0:
        parts.append(_draw_episodes(storage, missing, generator))
    if len(parts) == 1:
        return parts[0]
    longest = max(part.shape[1] for part in parts)
    return torch.cat([_padded(part, longest) for part in parts])


def _padded(batch: TensorDictBase, length: int) -> TensorDictBase:
    """Returns episodes `[n, T]` as `[n, length]`, with zeros at the end."""
    zeros = torch.zeros_like(batch[:, :1]).expand(-1, length - batch.shape[1])
    return torch.cat([batch, zeros], 1)


def _draw_episodes(
    storage: PackedStorage, n: int, generator: torch.Generator | None
) -> TensorDictBase:
    """Returns those of n drawn episodes that were not overwritten while they were read."""
    view = storage.view()
    episodes = view.episodes
    first = episodes.random_episodes(n, generator)
    length = episodes.num_after(first) + 1
    step = torch.arange(int(length.max()), device="cpu").expand(n, -1)
    offset = step.minimum(length[:, None] - 1)
    slots = episodes.shift(first[:, None], offset)
    mask = (step < length[:, None]).to(storage.device)
    batch, overwritten = view.read(slots, mask), view.overwritten(slots)
    batch = batch.set(keys.INDEX, slots.to(storage.device)).set(keys.MASK, mask)
    return batch if overwritten is None else batch[~overwritten.any(1)]


class Prefetcher(deque[SimpleQueue[Any]]):
    """Batches that are drawn before they are asked for, in the order in which they would be drawn.

    Each item is a queue that gets one batch, from a thread. An interrupt may come between any two
    lines: all that waits is a queue or lock written in C, and an interrupt drops one batch at most.

    Args:
        draw: returns a batch.
        number: how many there are; 0 draws none ahead.

    Attributes:
        lock: taken before the locks of the storage.
    """

    def __init__(self, draw: Callable[[], Any], number: int) -> None:
        super().__init__()
        self._draw, self.number = draw, number
        self.lock = threading.RLock()
        # What a thread of this process is asked for; several threads would reorder the draws.
        self._process, self._requests = -1, SimpleQueue[Any]()
        self._end: Callable[[], Any] = self.clear

    def take(self) -> Any:
        """Returns the next batch, and has others drawn.

        Raises:
            Exception: the error that the draw of this batch has raised.
        """
        with self.lock:
            if self._process != os.getpid():
                self._start()
            # It leaves the deque first: no later call waits for a batch that this one has received.
            batch, error = self.popleft().get() if self else (self._draw(), None)
            if error is not None:
                raise error
            while len(self) < self.number:
                answer = SimpleQueue[Any]()
                self._requests.put((self._draw, answer))
                self.append(answer)
            return batch

    def _start(self) -> None:
        """Starts a thread, such as in a forked process, which receives none of the earlier batches."""
        requests = SimpleQueue[Any]()
        thread = threading.Thread(target=_answer, args=(requests,), daemon=True)
        thread.start()
        self.clear()
        self._requests = requests
        # Also when the storage is collected, and before the interpreter ends.
        self._end = weakref.finalize(self, _end, requests, thread, os.getpid())
        self._process = os.getpid()

    def finished(self) -> AbstractContextManager[None]:
        """Waits until all batches are drawn; with the lock held none is drawn before it is given back."""
        if self._process == os.getpid():
            answer = SimpleQueue[Any]()
            self._requests.put((_nothing, answer))
            answer.get()
        return nullcontext()

    def close(self) -> None:
        """Drops all batches, and ends the thread."""
        with self.lock:
            self.clear()
            self._process = -1
            self._end()


def _nothing() -> None:
    """Is drawn by who waits for the draws before."""


def _answer(requests: SimpleQueue[Any]) -> None:
    """Answers each request by a batch and None, or by None and the error, until a request is None."""
    while (request := requests.get()) is not None:
        draw, answer = request
        try:
            answer.put((draw(), None))
        except BaseException as error:
            answer.put((None, error))
        # While it waits it keeps no storage alive.
        del draw, answer, request


def _end(requests: SimpleQueue[Any], thread: threading.Thread, process: int) -> None:
    """Ends the thread of a process after the requests that it has."""
    requests.put(None)
    if thread is not threading.current_thread() and process == os.getpid():
        thread.join()
