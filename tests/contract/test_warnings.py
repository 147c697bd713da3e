"""Warnings come before anything is stored, so that as errors they leave everything unchanged."""

import os
import warnings

import numpy as np
import pytest
import torch
from contract.make import PLACES, assemble, library
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict


def steps(*observations, is_done=False):
    seen = torch.tensor(observations, dtype=torch.float64)[:, None]
    done = torch.full((len(seen), 1), is_done)
    outcome = {"reward": torch.ones(len(seen), 1), "done": done, "terminated": done}
    return TensorDict(
        {"observation": seen, "next": {"observation": seen + 1, **outcome}}, [len(seen)]
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("later", [(7,), (3, 4, 9), tuple(range(20, 60))])
def test_discontinuity_that_is_an_error_stores_nothing(place, later):
    storage = assemble(64, place=place)
    storage.extend(steps(0, 1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="end_episodes"):
            storage.extend(steps(*later))
        assert storage[:]["observation"].flatten().tolist() == [0, 1, 2]
        storage.extend(steps(*later))  # it is said once
    assert storage[:]["observation"].flatten().tolist() == [0, 1, 2, *later]
    assert len(storage.episodes.table()) == 2
    storage.validate()


def test_eviction_of_short_episodes_is_reported_before_the_next_transitions():
    storage = assemble(storage=library.PackedStorage(64, max_entries=96), batch_size=2)
    for number in range(60):
        storage.extend(steps(10 * number, is_done=True))
        if len(storage) <= number:
            break
    before = storage[:]
    with pytest.warns(UserWarning, match=r"transitions fit[\s\S]*max_entries"):
        storage.sample()
    assert (storage[:] == before).all()
    storage.sample()  # it is said once


def test_priorities_that_are_never_updated_are_reported_once():
    storage = assemble(64, sampler=library.PERSampler(64), batch_size=2)
    storage.extend(steps(0))
    for number in range(1000):
        storage.alpha = 0.5 + number // 400 / 10  # does not restart the count
        storage.sample()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="update_tensordict_priority"):
            storage.sample()
        storage.sample()


def test_priorities_that_are_updated_once_are_not_reported():
    storage = assemble(64, sampler=library.PERSampler(64), batch_size=2)
    storage.update_priority(storage.extend(steps(0)), 1.0)
    for _ in range(1001):
        storage.sample()


def test_storage_larger_than_the_memory_of_the_machine_is_reported_once_at_the_first_write():
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    storage = assemble(pages // 80_000 * 2)
    rows = TensorDict({"observation": torch.zeros(2, 10_000)}, [2])
    rows["next"] = {**rows.to_dict(), "done": torch.zeros(2, 1, dtype=torch.bool)}
    rows["next", "done"][:] = True
    rows["next", "observation"] += 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"GB of memory[\s\S]*path="):
            storage.extend(rows)
        assert len(storage) == 0
        storage.extend(rows)
    assert len(storage) == 2


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_other_devices_than_cpu_and_cuda_raise(device):
    with pytest.raises(ValueError, match=f"'cpu' or 'cuda', got '{device}'"):
        library.PackedStorage(10, device=device)
    with pytest.raises(ValueError, match="'cpu' or 'cuda'"):
        library.UniformReplayStorage(
            Box(-1, 1, (2,), np.float32), Discrete(2), storage_size=10, device=device
        )


def test_deprecated_methods_warn_and_call_their_replacements():
    storage = assemble(64)
    storage.extend(steps(0, 1, 2))
    index, slots = storage.episodes, torch.tensor([0, 2])
    with pytest.warns(DeprecationWarning, match=r"episodes\(\) is deprecated.* use table\(\)"):
        assert index.episodes()["length"].tolist() == [3]
    with pytest.warns(DeprecationWarning, match=r"ahead\(\) is deprecated.* use num_after\(\)"):
        assert index.ahead(slots).tolist() == [2, 0]
    with pytest.warns(DeprecationWarning, match=r"behind\(\) is deprecated.* use num_before\(\)"):
        assert index.behind(slots).tolist() == [0, 2]
    with pytest.warns(DeprecationWarning, match=r"parts\(\) is deprecated.* use components\(\)"):
        assert storage.parts() == storage.components()
