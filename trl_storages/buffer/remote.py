"""A storage for several processes: workers of a `DataLoader` that read it, or callers of a Ray actor.

The workers read its directory. The handle of the actor is TorchRL's `RayReplayBuffer`; passed to another
process it becomes a client.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchrl.data import RayReplayBuffer

from trl_storages import validation
from trl_storages.buffer.packed_batch import packed
from trl_storages.buffer.replay_storage import ReplayStorage
from trl_storages.settings import ComponentSetting, Strict
from trl_storages.torchrl_compat import RayClient

__all__ = ["ReplayBatches", "StorageClient", "StorageHandle", "in_actor", "make_loader"]

# Workers may be started before the first row is written: seconds until they stop.
_PATIENCE = 60.0
# Workers share the memory of batches from so many bytes on, which takes a millisecond whatever their
# size; a pipe copies smaller ones in less.
_SHARED = 1 << 20


class ReplayBatches(IterableDataset[TensorDictBase]):
    """Endless batches of a storage that another process writes.

    Args:
        open_reader: `generator -> ReplayStorage`; opens it for reading in the process that iterates.
        generator: of seeds where there are no workers; None is torch's default one.
    """

    def __init__(self, open_reader: Callable[..., Any], generator: torch.Generator | None) -> None:
        super().__init__()
        self._open_reader, self._generator = open_reader, generator

    def __iter__(self) -> Iterator[TensorDictBase]:
        worker = get_worker_info()
        # DataLoader seeds each worker differently.
        own = torch.randint(2**62, (), generator=self._generator, device="cpu")
        seed = int(own) if worker is None else worker.seed
        # Iterations beside each other each need a sampler and transforms of their own.
        open_reader = copy.deepcopy(self._open_reader)
        reader = open_reader(generator=torch.Generator().manual_seed(seed))
        while True:
            batch = reader.sample(wait=worker is not None, timeout=_PATIENCE)
            yield batch if worker is None or batch.bytes() >= _SHARED else packed(batch)


def make_loader(
    storage: ReplayStorage, batch_size: int | None, seed: int | None, options: dict[str, Any]
) -> DataLoader[TensorDictBase]:
    """Returns a `DataLoader` of endless batches; see `ReplayStorage.loader`."""
    batch_size = validation.optional(validation.integer, "batch_size", batch_size, at_least=1)
    rows = storage.storage
    if rows.path is None or not rows.initialized:
        raise RuntimeError(
            "workers read rows from a directory: make the storage with path=, and write a row first "
            "where the fields are not all known."
        )
    if (batch_size := batch_size or storage.batch_size) is None:
        raise ValueError("batch_size must be known: pass it here, or where the storage is made.")
    sampler = copy.deepcopy(storage.sampler)
    sampler._empty()
    open_reader = partial(
        type(storage).open,
        rows.path,
        mode="r",
        cold=rows.cold,
        sampler=sampler,
        transform=copy.deepcopy(storage.transform) if len(storage.transform) else None,
        sample_unit=storage.sample_unit,
        batch_size=batch_size,
    )
    # Pinning requires CUDA.
    options["pin_memory"] &= torch.cuda.is_available()
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    # Workers take their seeds from DataLoader, and a generator does not survive the way to them.
    own = None if options["num_workers"] else generator
    return DataLoader(
        ReplayBatches(open_reader, own),
        batch_size=None,
        # The default one would rebuild a TensorDict as a dict.
        collate_fn=torch.nn.Identity(),
        generator=generator,
        **options,
    )


_SETTINGS = {name for name, it in vars(ReplayStorage).items() if isinstance(it, ComponentSetting)}


class StorageClient(Strict, RayClient):  # type: ignore[misc]
    """Calls the methods of a storage in another process, and reads and sets its parameters.

    It can't end that process.
    """

    # TorchRL's constructor sets it.
    has_gpu = False

    def __getattr__(self, name: str) -> Any:
        if name in _SETTINGS:
            return self.get_parameter(name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTINGS:
            self.set_parameter(name, value)
        else:
            super().__setattr__(name, value)

    def extend(self, tensordicts: TensorDictBase, **options: Any) -> Any:
        """Writes steps, as `ReplayStorage.extend`."""
        return super().extend(self._sent(tensordicts), **options)

    def update_tensordict_priority(
        self, data: TensorDictBase, priority: torch.Tensor | None = None
    ) -> None:
        """Updates the priorities of a drawn batch, as `ReplayStorage.update_tensordict_priority`."""
        super().__getattr__("update_tensordict_priority")(self._sent(data), priority)

    def _sent(self, data: Any) -> Any:
        is_moved = isinstance(data, TensorDictBase) and not self.has_gpu
        return packed(data.to("cpu") if is_moved else data)


class StorageHandle(Strict, RayReplayBuffer):  # type: ignore[misc]
    """What `service_backend="ray"` returns: the handle of a storage in an actor, with all its methods."""

    has_gpu = False

    def client(self) -> StorageClient:
        """Returns what other processes call the storage by."""
        return StorageClient(self._rb, has_gpu=self.has_gpu)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether a batch can be drawn."""
        return bool(self.client().can_sample(batch_size))

    def extend(self, tensordicts: TensorDictBase, **options: Any) -> Any:
        """Writes steps, as `ReplayStorage.extend`."""
        return self.client().extend(tensordicts, **options)

    def update_tensordict_priority(
        self, data: TensorDictBase, priority: torch.Tensor | None = None
    ) -> None:
        """Updates the priorities of a drawn batch, as `ReplayStorage.update_tensordict_priority`."""
        self.client().update_tensordict_priority(data, priority)

    def __getattr__(self, name: str) -> Any:
        if name[0] == "_":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return getattr(self.client(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        holder = self.client() if name in _SETTINGS else super()
        holder.__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(StorageClient, has_gpu=self.has_gpu), (self._rb,)

    __repr__ = object.__repr__


def in_actor(storage_class: type[ReplayStorage]) -> type[ReplayStorage]:
    """Returns a storage class for calls of several processes, which arrive in any order.

    - Each `extend` writes episodes of its own, unless `lanes` names the lanes that it goes on with; each
      lane is then one process's.
    - `add` and `record`, which write single steps, raise.
    - Parts may be functions that make them: `storage`, `writer`, `sampler`, `transform_factory`.
    """
    doc = {"__doc__": storage_class.__doc__}
    return type(storage_class.__name__, (_InActor, storage_class), doc)


class _InActor(ReplayStorage):
    """What is different in a storage that several processes call."""

    # TorchRL sets it.
    is_remote = True

    def __init__(
        self,
        *args: Any,
        delayed_init: bool = False,  # TorchRL's handle names it
        transform_factory: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        for name in ("storage", "writer", "sampler"):
            if callable(options.get(name)):
                options[name] = options[name]()
        if transform_factory is not None:
            options["transform"] = transform_factory()
        super().__init__(*args, **options)

    def extend(
        self, tensordicts: TensorDictBase, *, lanes: Any = None, **options: Any
    ) -> torch.Tensor:
        with self._replay_lock, self._write_lock:
            if lanes is None:
                self.episodes.end_episodes()
            slots = super().extend(tensordicts, lanes=lanes, **options)
            if lanes is None:
                self.episodes.end_episodes()
        return slots

    def record(self, *step: Any, **named: Any) -> NoReturn:
        raise RuntimeError(
            "a single step must say whose it is, and in a Ray actor any process may call: use "
            "extend(steps, lanes=[lane]), each process with its own, or extend(whole_episodes)."
        )

    add = record

    def sample(self, *args: Any, **options: Any) -> Any:
        return packed(super().sample(*args, **options))

    def sample_episodes(self, n: int) -> Any:
        return packed(super().sample_episodes(n))

    def __getitem__(self, index: Any) -> Any:
        return packed(super().__getitem__(index))

    def get_parameter(self, name: str) -> Any:
        return getattr(self, name)

    def set_parameter(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of a method that returns the storage: its rows stay here.
        return type(None), ()
