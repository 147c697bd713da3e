"""All private names of TorchRL, tensordict and torch that this package uses.

They have no public equivalent. A test checks each against the installed release, so that a breaking
release fails there, by name, and not in a training run.

Imported below:

- `new_tensordict`: builds a TensorDict from tensors known to fit, at a tenth of the constructor's cost.
- `set_entry`: sets a tensor known to fit, at a fifth of the cost of `set`.
- `TensorGuards`: compares dtypes, shapes, strides and devices of several tensors in one call.
- `dispatch_td_nn_modules`: the context in which replay buffers call their transforms.
- `RayClient`, `DistributedClient`: what other processes call a storage in a Ray actor by.

Attributes that subclasses here read or override, with the class that owns them:
"""

from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules as dispatch_td_nn_modules
from torch._C._dynamo.guards import TensorGuards
from torchrl.data.replay_buffers.ray_buffer import _LazyDistributedReplayClient as DistributedClient
from torchrl.data.replay_buffers.ray_buffer import _RayReplayBufferClient as RayClient

__all__ = [
    "PRIVATE_ATTRIBUTES",
    "DistributedClient",
    "RayClient",
    "TensorGuards",
    "dispatch_td_nn_modules",
    "new_tensordict",
    "set_entry",
]

#: Owner -> attributes and methods used.
PRIVATE_ATTRIBUTES = {
    owner: names.split()
    for owner, names in {
        "ReplayBuffer": (
            "_sample _replay_lock _write_lock _storage _sampler _writer _transform _sample_unit "
            "_rng _collate_fn _consume_after_n_samples _batch_size _iterator _prefetch "
            "_prefetch_cap _prefetch_queue _futures_lock _clear_prefetch_queue_locked "
            "_capture_prefetch_state _restore_prefetch_queue_locked _start_distributed_service "
            "_ServiceClass _getattr _setattr"
        ),
        "RayReplayBuffer": "_rb _service_cls",
        "TensorStorage": (
            "_storage _len _len_value _init _empty _rand_given_ndim _set_last_cursor "
            "_last_cursor _last_cursor_index_value _mutation_revision_value _attached_entities_list "
            "_bump_mutation_revision"
        ),
        "RoundRobinWriter": (
            "_cursor _write_count _write_count_value _track_generations _storage _empty "
            "_bump_generation _generation _mark_update_entities"
        ),
        "PrioritizedSampler": "_sum_tree _min_tree",
        "SamplerWithoutReplacement": "_sample_list",
        "Sampler": "_rng _empty _remaining_batches",
        "SliceSampler": "_fetch_traj",
        "CatTensors": "_del_keys",
        "Compose": "_modules",
        "GymWrapper": "_env",
        "TensorDict": "_device _tensordict",
        "UntypedStorage": "_new_shared",
    }.items()
}


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
