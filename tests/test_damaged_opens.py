"""Directories whose rows or priorities are not what was written are refused, by writers and readers."""

import numpy as np
import pytest
import torch
from disk.moments import parts_of
from goal_data import goal_transitions
from snapshots import files_of

from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage
from trl_storages.samplers import PERSampler, UniformSampler
from trl_storages.writing import EpisodeWriter

pytestmark = pytest.mark.requirement("refused-is-unchanged")

SIZE = 8


@pytest.fixture(params=["closed", "killed"])
def rows(tmp_path, request):
    """A directory of rows with priorities."""
    storage = ReplayStorage(
        storage=PackedStorage(SIZE, scratch_dir=tmp_path / "rows"),
        writer=EpisodeWriter(),
        sampler=PERSampler(SIZE),
        batch_size=4,
    )
    steps = torch.arange(6)
    storage.extend(goal_transitions(torch.zeros(6).long(), steps, steps == 3))
    storage.update_priority(steps, steps.float() + 1)
    storage.close() if request.param == "closed" else storage.storage.directory.abandon()
    return tmp_path / "rows"


@pytest.mark.parametrize("which", [2, -1])
def test_priorities(rows, which):
    """Each has a check: what is damaged gets the largest priority."""
    data = bytearray((rows / "storage.1.rows").read_bytes())
    words = np.frombuffer(data, np.uint8)[parts_of(rows)["priorities"]].view(np.int64)
    words[which] ^= 1 << 20
    (rows / "storage.1.rows").write_bytes(data)
    reader = ReplayStorage.open(rows, mode="r", sampler=PERSampler(SIZE))
    storage = ReplayStorage.open(rows, sampler=PERSampler(SIZE))
    expected = torch.arange(6) + 1.0
    expected[2] = 6 if which == 2 else 3
    for opened in (storage, reader):
        assert torch.equal(opened.sampler.priorities[:6], expected)
        opened.validate()
    assert storage.sampler.default_priority == 6


@pytest.mark.parametrize("rows", ["closed"], indirect=True)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_rows_by_their_checksums(rows, mode):
    ReplayStorage.open(rows, mode=mode, sampler=UniformSampler(), check=True).close()
    words = np.fromfile(rows / "storage.1.rows", np.int64)
    words[1] ^= 1 << 20
    words.tofile(rows / "storage.1.rows")
    before = files_of(rows)
    with pytest.raises(ValueError, match="damaged"):
        ReplayStorage.open(rows, mode=mode, sampler=UniformSampler(), check=True)
    assert files_of(rows) == before
    storage = ReplayStorage.open(rows, mode=mode, sampler=UniformSampler())
    with pytest.raises(RuntimeError, match="do not match their checksums, those in the slots"):
        storage.validate()
