"""A storage in a Ray actor, which several processes write to and sample from remotely.

Letters: B batch, T steps, L lanes written now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase

from trl_storages.samplers import layers_of
from trl_storages.transforms import parts_of

__all__ = ["in_actor"]


def in_actor(storage_class: type) -> type:
    """Returns a storage class for use by several remote processes.

    Calls arrive in any order, without their origin. Hence

    - each `extend` writes an episode segment of its own, unless `lanes` names the lanes to continue;
      each lane must then belong to one process;
    - `add` and `record`, which write single steps, raise;
    - batches are sent as one block of memory;
    - `parameters` replaces attribute access, as clients only have methods.

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

        Assigning on a client, as in `client.beta = 1`, would only set an attribute of the client.

        Args:
            **values: new values, as in `storage.beta = value` on a local storage.

        Raises:
            AttributeError: no part has such a parameter. Nothing is changed then.
            TypeError, ValueError: a value is invalid. Earlier ones have been set.
        """
        with self._replay_lock:
            parts: list[Any] = [*parts_of(self._transform), *layers_of(self._sampler)]
            known = {name for part in parts for name in getattr(part, "live_parameters", ())}
            if others := [name for name in values if name not in known]:
                raise AttributeError(
                    f"this storage has the parameters {sorted(known)}, got {others}: name what is "
                    "missing where the storage is made."
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

    def _sent(self, value: Any) -> Any:
        """Wraps a batch for sending, unless the transport packs it."""
        return _Parcel(value) if self._sends and isinstance(value, TensorDictBase) else value


def _refuse(method: str) -> NoReturn:
    raise RuntimeError(
        f"{method}() must know whose step it is given, and in a Ray actor any process may call it: "
        "gather the steps of an environment and call extend(steps, lanes=[lane]), each process with a "
        "lane of its own; or extend(steps) with whole episodes."
    )
