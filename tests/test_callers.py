"""Warnings point at the script, however many calls of this package and of TorchRL lie between."""

import warnings

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from trl_storages import EpisodeWriter, PackedStorage, ReplayStorage
from trl_storages.callers import warn_caller


def rows(first):
    steps = torch.arange(first, first + 3, dtype=torch.float32).unsqueeze(-1)
    flags = torch.zeros(3, 1, dtype=torch.bool)
    return TensorDict(
        {"observation": steps, "next": {"observation": steps + 1, "done": flags}}, [3]
    )


@pytest.mark.parametrize("kind", [ReplayStorage, TensorDictReplayBuffer])
@pytest.mark.parametrize("write", ["extend", "add"])
def test_a_warning_points_at_the_loop(kind, write):
    buffer = kind(storage=PackedStorage(20), writer=EpisodeWriter(), batch_size=2)
    buffer.extend(rows(0))
    with pytest.warns(UserWarning, match="does not begin with the observation") as warned:
        buffer.extend(rows(9)) if write == "extend" else buffer.add(rows(9)[0])
    assert warned[0].filename == __file__


def test_without_a_script():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        exec("warn('careful')", {"__name__": "trl_storages.inner", "warn": warn_caller})
    assert [(str(each.message), each.filename) for each in warned] == [("careful", __file__)]
