"""What this package takes of TorchRL's private names, and what it refuses of its parts and methods.

The private names of TorchRL, tensordict and torch have no public equivalent. `tests/test_package.py`
checks each against the installed release, so that a breaking release fails there, by name, and not in a
training run.

- `new_tensordict`: builds a TensorDict from tensors known to fit, at a tenth of the constructor's cost.
- `copy_all`: copies tensors to others in one call.
- `InferenceMode`: what `torch.inference_mode` enters and leaves.
- `dispatch_td_nn_modules`: the context in which replay buffers call their transforms.
- `RayClient`: what other processes call a storage in a Ray actor by.

What subclasses here read, set or override, by the class that it is of:

- `ReplayBuffer`: `_accepts_transport_backend`, `_batch_size`, `_collate_fn`, `_delayed_init`,
  `_initialized`, `_iterator`, `_prefetch_queue`, `_replay_lock`, `_rng`, `_sampler`, `_service_shutdown`,
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

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from tensordict import TensorDict
from tensordict.nn.utils import _set_dispatch_td_nn_modules as dispatch_td_nn_modules
from torch import _foreach_copy_ as copy_all
from torch._C import _InferenceMode as InferenceMode
from torchrl.data.replay_buffers.ray_buffer import _RayReplayBufferClient as RayClient

__all__ = [
    "UNSUPPORTED",
    "InferenceMode",
    "RayClient",
    "UnsupportedMethods",
    "copy_all",
    "dispatch_td_nn_modules",
    "new_tensordict",
    "reject_torchrl_components",
]


def new_tensordict(
    source: dict[str, Any], batch_size: torch.Size, device: torch.device
) -> TensorDict:
    """Builds a TensorDict from a dict of tensors and TensorDicts that are known to fit."""
    data = TensorDict._new_unsafe(source, batch_size=batch_size, nested=False)
    # Set directly: passing the device to the constructor makes it query torch for devices each time.
    data._device = device
    return data


_OTHER_PARTS = "make another ReplayStorage"
_HOOKS = "there are no hooks: change what state_dict() returns"
_IN_PLACE = "rows are not overwritten, but for values of their steps: use rewrite(index, values)"

#: Method of TorchRL's buffers -> what to do instead.
UNSUPPORTED: dict[str, str] = {
    "mark_update": "what is new is seen when a batch is drawn",
    "query": "use episodes.table(), and storage[slots]",
    "read_all_in_order": "use storage[:]",
    "register_load_hook": _HOOKS,
    "register_save_hook": _HOOKS,
    "set_": _IN_PLACE,
    "set_at_": _IN_PLACE,
    "set_storage": _OTHER_PARTS,
    "set_writer": _OTHER_PARTS,
    "submit_update_if_present": _IN_PLACE,
    "update_": _IN_PLACE,
    "update_if_present": _IN_PLACE,
    "write_all": _IN_PLACE,
}


class UnsupportedMethods:
    """Refuses what is inherited and makes no sense over lanes of episodes."""

    @property
    def _collate_fn(self) -> NoReturn:
        # The constructor of TorchRL's ensemble reads it.
        raise TypeError(
            "TorchRL's ReplayBufferEnsemble does not support the replay buffers of trl_storages. Use "
            "ReplayStorageEnsemble(*storages)."
        )


def _refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"a ReplayStorage has no {name}(): {instead}.")

    refuse.__name__, refuse.__doc__ = name, f"Raises a RuntimeError: {instead}."
    return refuse


for _name, _instead in UNSUPPORTED.items():
    setattr(UnsupportedMethods, _name, _refusing(_name, _instead))


# Class of TorchRL's -> what to use instead.
_INSTEAD = {
    "CatFrames": "frame_stack=k over stacks, or sample_unit=EpisodeSequence(length)",
    "ConsumingSampler": "UniformSampler()",
    "MultiStepTransform": "n_step=3, or transform=NStep(3)",
    "PrioritizedSampler": "PERSampler(capacity)",
    "PromptGroupSampler": "UniformSampler()",
    "SamplerEnsemble": "ReplayStorageEnsemble(*storages)",
    "SamplerWithoutReplacement": "UniformSampler(without_replacement=True)",
    "Sequence": "sample_unit=EpisodeSequence(length)",
    "SliceSampler": "sample_unit=EpisodeSequence(length), or storage.sample_episodes(n)",
    "StalenessAwareSampler": "UniformSampler()",
    "Storage": "PackedStorage(size)",
    "Writer": "EpisodeWriter(num_envs)",
}


def reject_torchrl_components(*parts: Any) -> None:
    """Raises a TypeError if a part is one of TorchRL's that would be wrong over lanes of episodes.

    >>> from torchrl.data import SliceSampler
    >>> refuse_stock(SliceSampler(slice_len=2))
    Traceback (most recent call last):
    TypeError: SliceSampler knows no lanes and episodes: use sample_unit=EpisodeSequence(length), or ...
    """
    for part in parts:
        for kind in type(part).__mro__:
            package = kind.__module__.partition(".")[0]
            if package == "trl_storages":
                break
            if package == "torchrl" and kind.__name__ in _INSTEAD:
                raise TypeError(
                    f"{type(part).__name__} knows no lanes and episodes: use {_INSTEAD[kind.__name__]}."
                )
