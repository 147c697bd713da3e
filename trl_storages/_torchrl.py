"""What this package imports of the private names of TorchRL, tensordict and torch.

They have no public equivalent. `tests/test_package.py` checks each against the installed release, and
the private attributes that subclasses here read or override, so that a breaking release fails there, by
name, and not in a training run.

- `new_tensordict`: builds a TensorDict from tensors known to fit, at a tenth of the constructor's cost.
- `set_entry`: sets a tensor known to fit, at a fifth of the cost of `set`.
- `TensorGuards`: compares dtypes, shapes, strides and devices of several tensors in one call.
- `dispatch_td_nn_modules`: the context in which replay buffers call their transforms.
- `RayClient`: what other processes call a storage in a Ray actor by.
"""

from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules as dispatch_td_nn_modules
from torch._C._dynamo.guards import TensorGuards
from torchrl.data.replay_buffers.ray_buffer import _RayReplayBufferClient as RayClient

__all__ = [
    "RayClient",
    "TensorGuards",
    "dispatch_td_nn_modules",
    "new_tensordict",
    "set_entry",
]


def new_tensordict(
    source: dict[str, Any], batch_size: torch.Size, device: torch.device
) -> TensorDict:
    """Builds a TensorDict from a dict of tensors and TensorDicts that are known to fit."""
    data = TensorDict._new_unsafe(source, batch_size=batch_size, nested=False)
    # Set directly: passing the device to the constructor makes it query torch for devices each time.
    data._device = device
    return data


def set_entry(data: TensorDictBase, key: NestedKey, value: torch.Tensor) -> None:
    """Sets a tensor that is known to fit the batch size and the device of `data`."""
    if isinstance(key, str):
        data._set_str(key, value, inplace=False, validated=True, non_blocking=False)
    else:
        data._set_tuple(key, value, inplace=False, validated=True, non_blocking=False)
