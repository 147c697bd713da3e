"""Private names of TorchRL that this package uses, and parts of TorchRL that it rejects.

The private names of TorchRL, tensordict and torch have no public equivalent. `tests/test_package.py`
checks each against the installed release. A release that renames one therefore fails that test, which
names it, and not a training run.

- `new_tensordict`: builds a TensorDict from tensors known to fit, at a tenth of the constructor's cost.
- `copy_all`: copies tensors to others in one call.
- `InferenceMode`: the context manager in C inside `torch.inference_mode`.
- `dispatch_td_nn_modules`: the context in which replay buffers call their transforms.
- `RayClient`: the client of a replay buffer in a Ray actor.

Private attributes that subclasses here read, set or override, by their class in TorchRL:

- `ReplayBuffer`: `_accepts_transport_backend`, `_batch_size`, `_collate_fn`, `_delayed_init`,
  `_initialized`, `_iterator`, `_prefetch_queue`, `_replay_lock`, `_rng`, `_sampler`, `_service_shutdown`,
  `_ServiceClass`, `_storage`, `_transform`, `_write_lock`, `_writer`
- `RayReplayBuffer`: `_rb`
- `TensorStorage`: `_apply_conditional_patch`, `_attached_entities`, `_conditional_patch_leaf`, `_empty`,
  `_rand_given_ndim`, `_validate_conditional_patch`
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
    """Returns a TensorDict of tensors and TensorDicts without checks of their batch sizes."""
    data = TensorDict._new_unsafe(source, batch_size=batch_size, nested=False)
    # Set directly: passing the device to the constructor makes it query torch for devices each time.
    data._device = device
    return data


_NEW_COMPONENTS = "create another ReplayStorage"
_HOOKS = "there are no hooks: change the dict that state_dict() returns"
_IN_PLACE = "only values of a step, such as rewards, can be overwritten: use rewrite(index, values)"

#: Method of TorchRL's replay buffers -> advice.
UNSUPPORTED: dict[str, str] = {
    "as_dataset": "use loader(num_workers), with the buffer in a directory",
    "export": "use storage[:], which reads all transitions, oldest first",
    "mark_update": "samplers see new transitions when they sample",
    "query": "use episodes.table(), and storage[slots]",
    "read_all_in_order": "use storage[:]",
    "register_load_hook": _HOOKS,
    "register_save_hook": _HOOKS,
    "set_": _IN_PLACE,
    "set_at_": _IN_PLACE,
    "set_storage": _NEW_COMPONENTS,
    "set_writer": _NEW_COMPONENTS,
    "submit_update_if_present": "use update_if_present()",
    "update_": _IN_PLACE,
    "write_all": _IN_PLACE,
}


class UnsupportedMethods:
    """Raises in inherited methods that would be wrong for lanes of episodes."""

    @property
    def _collate_fn(self) -> NoReturn:
        # The constructor of TorchRL's ensemble reads it.
        raise TypeError(
            "TorchRL's ReplayBufferEnsemble does not support the replay buffers of trl_storages. Use "
            "ReplayStorageEnsemble(*storages)."
        )


def _raising_method(name: str, advice: str) -> Callable[..., NoReturn]:
    def reject(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"a ReplayStorage has no {name}(): {advice}.")

    reject.__name__, reject.__doc__ = name, f"Raises a RuntimeError: {advice}."
    return reject


for _name, _advice in UNSUPPORTED.items():
    setattr(UnsupportedMethods, _name, _raising_method(_name, _advice))


# Class of TorchRL -> replacement here.
_REPLACEMENTS = {
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


def reject_torchrl_components(*components: Any) -> None:
    """Raises a TypeError for components of TorchRL that would be wrong for lanes of episodes.

    >>> from torchrl.data import SliceSampler
    >>> reject_torchrl_components(SliceSampler(slice_len=2))
    Traceback (most recent call last):
    TypeError: SliceSampler does not support lanes and episodes: use
        sample_unit=EpisodeSequence(length), or storage.sample_episodes(n).
    """
    for component in components:
        for kind in type(component).__mro__:
            package = kind.__module__.partition(".")[0]
            if package == "trl_storages":
                break
            if package == "torchrl" and kind.__name__ in _REPLACEMENTS:
                raise TypeError(
                    f"{type(component).__name__} does not support lanes and episodes: use "
                    f"{_REPLACEMENTS[kind.__name__]}."
                )
