"""Refuses what is TorchRL's and knows no lanes and episodes: parts, and methods of its buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torchrl.data import (
    ConsumingSampler,
    PrioritizedSampler,
    PromptGroupSampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessAwareSampler,
    Storage,
    Writer,
)
from torchrl.data.replay_buffers.sample_units import Sequence
from torchrl.envs.transforms import MultiStepTransform

__all__ = ["REFUSED", "Refusing", "refuse_stock"]

#: Method of TorchRL's buffers -> what to do instead.
REFUSED: dict[str, str] = {
    **dict.fromkeys(["set_storage", "set_writer"], "make another ReplayStorage"),
    **dict.fromkeys(
        [
            "set_",
            "set_at_",
            "update_",
            "update_if_present",
            "submit_update_if_present",
            "write_all",
        ],
        "rows are not overwritten, but for values of their steps: use rewrite(index, values)",
    ),
    **dict.fromkeys(
        ["register_save_hook", "register_load_hook"],
        "there are no hooks: change what state_dict() returns",
    ),
    "mark_update": "what is new is seen when a batch is drawn",
    "query": "use episodes.episodes(), and storage[slots]",
    "read_all_in_order": "use storage[:]",
}


class Refusing:
    """Refuses what is inherited and makes no sense over lanes of episodes."""


def _refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"a ReplayStorage has no {name}(): {instead}.")

    refuse.__name__, refuse.__doc__ = name, f"Raises a RuntimeError: {instead}."
    return refuse


for _name, _instead in REFUSED.items():
    setattr(Refusing, _name, _refusing(_name, _instead))


_INSTEAD: dict[type, str] = {
    ConsumingSampler: "UniformSampler()",
    MultiStepTransform: "n_step=3, or transform=NStep(3)",
    PrioritizedSampler: "PERSampler(capacity)",
    PromptGroupSampler: "UniformSampler()",
    SamplerEnsemble: "ReplayStorageEnsemble(*storages)",
    SamplerWithoutReplacement: "UniformSampler(without_replacement=True)",
    Sequence: "sample_unit=EpisodeSequence(length)",
    SliceSampler: "sample_unit=EpisodeSequence(length), or storage.sample_episodes(n)",
    StalenessAwareSampler: "UniformSampler()",
    Storage: "PackedStorage(size)",
    Writer: "EpisodeWriter(num_envs)",
}


def refuse_stock(part: Any) -> None:
    """Raises a TypeError if a part is one of TorchRL's that would be wrong over lanes of episodes.

    >>> refuse_stock(SliceSampler(slice_len=2))
    Traceback (most recent call last):
    TypeError: SliceSampler knows no lanes and episodes: use sample_unit=EpisodeSequence(length), or ...
    """
    for kind in type(part).__mro__:
        if kind.__module__.startswith("trl_storages."):
            return
        if kind in _INSTEAD:
            raise TypeError(
                f"{type(part).__name__} knows no lanes and episodes: use {_INSTEAD[kind]}."
            )
