"""A replay buffer in a Ray actor, and the objects by which other processes call it.

The handle of the actor is TorchRL's `RayReplayBuffer`. A handle that is sent to another process becomes a
client.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase
from torchrl.data import RayReplayBuffer

from trl_storages.buffer.loader import pack_tensordicts
from trl_storages.buffer.replay_storage import ReplayStorage
from trl_storages.settings import ComponentSetting, Strict
from trl_storages.torchrl_compat import RayClient
from trl_storages.validation import Lanes

__all__ = ["StorageClient", "StorageHandle", "in_actor"]

_SETTINGS = {name for name, it in vars(ReplayStorage).items() if isinstance(it, ComponentSetting)}


class StorageClient(Strict, RayClient):  # type: ignore[misc]
    """Calls the methods of a replay buffer in another process, and reads and sets its parameters.

    A client cannot end the process of the buffer.
    """

    # TorchRL's constructor sets this attribute.
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
        return super().extend(self._pack(tensordicts), **options)

    def update_tensordict_priority(
        self, data: TensorDictBase, priority: torch.Tensor | None = None
    ) -> None:
        """Updates the priorities of a sampled batch, as `ReplayStorage.update_tensordict_priority`."""
        super().__getattr__("update_tensordict_priority")(self._pack(data), priority)

    def _pack(self, data: Any) -> Any:
        moves_to_cpu = isinstance(data, TensorDictBase) and not self.has_gpu
        return pack_tensordicts(data.to("cpu") if moves_to_cpu else data)


class StorageHandle(Strict, RayReplayBuffer):  # type: ignore[misc]
    """The handle of a replay buffer in an actor, with all methods of the buffer.

    `service_backend="ray"` returns a handle.
    """

    has_gpu = False

    def client(self) -> StorageClient:
        """Returns a client, by which another process calls the buffer."""
        return StorageClient(self._rb, has_gpu=self.has_gpu)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether a batch can be sampled."""
        return bool(self.client().can_sample(batch_size))

    def extend(self, tensordicts: TensorDictBase, **options: Any) -> Any:
        """Writes steps, as `ReplayStorage.extend`."""
        return self.client().extend(tensordicts, **options)

    def update_tensordict_priority(
        self, data: TensorDictBase, priority: torch.Tensor | None = None
    ) -> None:
        """Updates the priorities of a sampled batch, as `ReplayStorage.update_tensordict_priority`."""
        self.client().update_tensordict_priority(data, priority)

    def __getattr__(self, name: str) -> Any:
        if name[0] == "_":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return getattr(self.client(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        target = self.client() if name in _SETTINGS else super()
        target.__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(StorageClient, has_gpu=self.has_gpu), (self._rb,)

    __repr__ = object.__repr__


def in_actor(storage_class: type[ReplayStorage]) -> type[ReplayStorage]:
    """Returns a subclass of a buffer class for an actor, whose calls arrive from several processes.

    - `extend` without `lanes` writes separate episodes. `extend` with `lanes` continues the episodes of
      these lanes, each of which must belong to one process.
    - `add` and `record`, which write single steps, raise.
    - `storage`, `writer` and `sampler` may be functions that create the component, and
      `transform_factory` creates the transform.
    """
    doc = {"__doc__": storage_class.__doc__}
    return type(storage_class.__name__, (_InActor, storage_class), doc)


class _InActor(ReplayStorage):
    """The methods that differ in a buffer that several processes call."""

    # TorchRL reads this attribute.
    is_remote = True

    def __init__(
        self,
        *args: Any,
        delayed_init: bool = False,  # passed by TorchRL's handle
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
        self, tensordicts: TensorDictBase, *, lanes: Lanes = None, **options: Any
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
            "a single step in a Ray actor may come from any process: use extend(steps, lanes=[lane]) "
            "with different lanes for each process, or extend(whole_episodes)."
        )

    add = record

    def sample(self, *args: Any, **options: Any) -> Any:
        return pack_tensordicts(super().sample(*args, **options))

    def sample_episodes(self, n: int) -> Any:
        return pack_tensordicts(super().sample_episodes(n))

    def __getitem__(self, index: Any) -> Any:
        return pack_tensordicts(super().__getitem__(index))

    def get_parameter(self, name: str) -> Any:
        return getattr(self, name)

    def set_parameter(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # A method that returns the buffer returns None to other processes.
        return type(None), ()
