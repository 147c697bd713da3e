"""A storage in a Ray actor, which several processes write to and sample from remotely.

Letters: B batch, T steps, L lanes written now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase
from torchrl.data import RayReplayBuffer

from trl_storages._torchrl import DistributedClient, RayClient
from trl_storages.replay.parameters import PARAMETERS, parameters_of

__all__ = ["RayHandle", "in_actor"]

# None without Ray: TorchRL then says what to install.
ray: Any = import_module("ray") if find_spec("ray") else None


# What arrives instead of the storage where one of its methods returns it.
_ITSELF = object()


def _itself() -> object:
    return _ITSELF


def _forwarded(name: str) -> Callable[..., Any]:
    """Returns a method that calls the storage's, and returns its own object if that returns itself."""

    def call(self: _WithParameters, *args: Any, **named: Any) -> Any:
        found = ray.get(getattr(self._actor, name).remote(*args, **named))
        return self if found is _ITSELF else found

    call.__name__, call.__doc__ = name, f"Calls `ReplayStorage.{name}`."
    return call


class _WithParameters:
    """The attributes of a handle or a client: those of the storage that can be set."""

    _actor: Any
    _kind: str
    # The class of the storage.
    _service_cls: type
    # Set by TorchRL's constructors.
    has_gpu = False

    append_transform, insert_transform = map(_forwarded, ("append_transform", "insert_transform"))

    def __getattr__(self, name: str) -> Any:
        if name in PARAMETERS:
            return ray.get(self._actor._getattr.remote(name))
        if name[0] != "_":
            self._check_method(name)
        return super().__getattr__(name)  # type: ignore[misc]

    def _check_method(self, name: str) -> None:
        """Raises an AttributeError unless the storage has a method of that name."""
        if name != "parameters" and not callable(getattr(self._service_cls, name, None)):
            raise AttributeError(
                f"the {self._kind} of a storage has no method or parameter {name!r}."
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in PARAMETERS:
            ray.get(self._actor._setattr.remote(name, value))
        elif name[0] == "_" or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            raise AttributeError(
                f"the {self._kind} of a storage has no attribute {name!r} to set, it has "
                f"{', '.join(PARAMETERS)}."
            )


class _Client(_WithParameters, RayClient):  # type: ignore[misc]
    _kind = "client"


class _DistributedClient(_WithParameters, DistributedClient):  # type: ignore[misc]
    _kind = "client"


class RayHandle(_WithParameters, RayReplayBuffer):  # type: ignore[misc]
    """The handle of a storage in a Ray actor, with all of its methods and parameters.

    Passed to another process it arrives as a client, which can't end the actor.

    Raises:
        TypeError: an option of the service is unknown.
        ray.exceptions.RayActorError: the storage can't be made; the message says why.
    """

    _kind = "handle"

    # TorchRL's handle inherits them, and has no rows for them.
    can_sample, query = _forwarded("can_sample"), _forwarded("query")
    set_, set_at_, update_ = map(_forwarded, ("set_", "set_at_", "update_"))

    def __init__(self, *args: Any, where: Mapping[str, Any], **options: Any) -> None:
        super().__init__(*args, **where, **options)
        try:
            ray.get(self._rb.__ray_ready__.remote())
        except BaseException:
            self.shutdown()
            raise

    @property
    def _actor(self) -> Any:
        return self._rb

    def client(self) -> Any:
        """Returns a handle that can be passed to other processes and can't end the actor."""
        client = super().client()
        is_ray = isinstance(client, RayClient)
        client.__class__ = _Client if is_ray else _DistributedClient
        client._service_cls = self._service_cls
        return client

    def update_tensordict_priority(
        self, data: TensorDictBase, priority: torch.Tensor | None = None
    ) -> None:
        """Updates priorities, as `ReplayStorage.update_tensordict_priority`."""
        if priority is None:
            super().update_tensordict_priority(data)
        else:
            ray.get(self._rb.update_tensordict_priority.remote(data, priority))

    def __getattr__(self, name: str) -> Any:
        if name[0] == "_":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in PARAMETERS:
            return super().__getattr__(name)
        self._check_method(name)
        return partial(_forwarded(name), self)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _arriving_as, (self.client(),)

    __repr__ = object.__repr__


def _arriving_as(client: Any) -> Any:
    return client


def in_actor(storage_class: type) -> type:
    """Returns a storage class for use by several remote processes.

    Calls arrive in any order, without their origin. Hence

    - each `extend` writes an episode segment of its own, unless `lanes` names the lanes to continue;
      each lane must then belong to one process;
    - `add` and `record`, which write single steps, raise;
    - batches are sent as one block of memory;
    - `parameters` sets several parameters in one call.

    Args:
        storage_class: a `ReplayStorage`.
    """
    return type(
        storage_class.__name__, (_InActor, storage_class), {"__doc__": storage_class.__doc__}
    )


class _Parcel:
    """Pickles a batch as one block.

    Its entries are views of a few blocks; pickled one by one, each would carry its whole block.
    """

    # Read by TorchRL's `next`, which copies batches of other devices.
    device = "cpu"

    def __init__(self, batch: TensorDictBase) -> None:
        self.batch = batch

    def __reduce__(self) -> tuple[Callable[[TensorDictBase], TensorDictBase], tuple[Any]]:
        return _unpack, (self.batch.consolidate(),)


def _unpack(batch: TensorDictBase) -> TensorDictBase:
    # Cloned, so that entries own their memory and can be added: a consolidated TensorDict would be
    # pickled in its original state.
    return batch.clone()


class _InActor:
    """Overrides for a storage that several processes call."""

    # False with TorchRL's torch.distributed transport, which packs batches itself.
    _sends = True

    # Set by ReplayStorage.
    _sampler: Any
    _transform: Any
    _replay_lock: Any
    _write_lock: Any
    episodes: Any

    def __init__(self, *args: Any, delayed_init: bool = False, **kwargs: Any) -> None:
        # RayReplayBuffer always passes delayed_init; the actor is the storage's final process, so it is
        # constructed at once.
        del delayed_init
        super().__init__(*args, **kwargs)

    def _start_distributed_service(self, transport_options: dict[str, Any]) -> None:
        self._sends = False
        super()._start_distributed_service(transport_options)  # type: ignore[misc]

    def extend(
        self,
        tensordicts: TensorDictBase,
        *,
        lanes: Any = None,
        update_priority: bool | None = None,
    ) -> torch.Tensor:
        with self._replay_lock, self._write_lock:
            if lanes is None:
                self.episodes.end_episodes()
            index: torch.Tensor = super().extend(  # type: ignore[misc]
                tensordicts, lanes=lanes, update_priority=update_priority
            )
            if lanes is None:
                self.episodes.end_episodes()
        return index

    def __repr__(self) -> str:
        # Short, as Ray prefixes each log line with it.
        return type(self).__name__

    def parameters(self, **values: Any) -> dict[str, Any]:
        """Sets parameters of the parts, and returns all parameters.

        Args:
            **values: new values, as in `storage.beta = value` on a local storage.

        Raises:
            AttributeError: no part has such a parameter. Nothing is changed then.
            TypeError, ValueError: a value is invalid. Earlier ones have been set.
        """
        with self._replay_lock:
            known = parameters_of(self)
            if others := [name for name in values if name not in known]:
                raise AttributeError(
                    f"this storage has the parameters {sorted(known)}, got {others}: make it "
                    "with the options that add these."
                )
            for name, value in values.items():
                setattr(self, name, value)
            return {name: getattr(self, name) for name in sorted(known)}

    def add(self, data: TensorDictBase) -> NoReturn:
        _refuse("add")

    def record(self, *step: Any, **named: Any) -> NoReturn:
        _refuse("record")

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().sample(*args, **kwargs)  # type: ignore[misc]
        return tuple(map(self._sent, batch)) if isinstance(batch, tuple) else self._sent(batch)

    def sample_episodes(self, n: int) -> Any:
        return self._sent(super().sample_episodes(n))  # type: ignore[misc]

    def __getitem__(self, index: Any) -> Any:
        return self._sent(super().__getitem__(index))  # type: ignore[misc]

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        # Of a method that returns the storage; the rows stay here.
        return _itself, ()

    def _sent(self, value: Any) -> Any:
        """Wraps a batch for sending, unless the transport packs it."""
        return _Parcel(value) if self._sends and isinstance(value, TensorDictBase) else value


def _refuse(method: str) -> NoReturn:
    raise RuntimeError(
        f"{method}() must know whose step it is given, and in a Ray actor any process may call it: "
        "call extend(steps, lanes=[lane]), each process with its own, or extend(whole_episodes)."
    )
