"""What this package imports of the private names of TorchRL, tensordict and torch.

They have no public equivalent. `tests/test_package.py` checks each against the installed release, so
that a breaking release fails there, by name, and not in a training run.

- `new_tensordict`: builds a TensorDict from tensors known to fit, at a tenth of the constructor's cost.
- `copy_all`: copies tensors to others in one call.
- `dispatch_td_nn_modules`: the context in which replay buffers call their transforms.
- `RayClient`: what other processes call a storage in a Ray actor by.

What subclasses here read, set or override, by the class that it is of:

- `ReplayBuffer`: `_accepts_transport_backend`, `_batch_size`, `_delayed_init`, `_initialized`,
  `_iterator`, `_prefetch_queue`, `_replay_lock`, `_rng`, `_sampler`, `_service_shutdown`,
  `_ServiceClass`, `_storage`, `_transform`, `_write_lock`, `_writer`
- `RayReplayBuffer`: `_rb`
- `TensorStorage`: `_attached_entities`, `_empty`, `_rand_given_ndim`
- `Writer`: `_empty`, `_storage`, `_write_count`
- `Sampler`: `_empty`, `_rng`
- `CatTensors`: `_del_keys`
- `Compose`: `_modules`
- `GymWrapper`: `_env`
- `TensorDict`: `_device`, `_new_unsafe`
- `FunctionCache`: `_impl`
"""

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn.utils import _set_dispatch_td_nn_modules as dispatch_td_nn_modules
from torch import _foreach_copy_ as copy_all
from torchrl.data.replay_buffers.ray_buffer import _RayReplayBufferClient as RayClient

__all__ = [
    "RayClient",
    "copy_all",
    "dispatch_td_nn_modules",
    "new_tensordict",
]


def new_tensordict(
    source: dict[str, Any], batch_size: torch.Size, device: torch.device
) -> TensorDict:
    """Builds a TensorDict from a dict of tensors and TensorDicts that are known to fit."""
    data = TensorDict._new_unsafe(source, batch_size=batch_size, nested=False)
    # Set directly: passing the device to the constructor makes it query torch for devices each time.
    data._device = device
    return data
