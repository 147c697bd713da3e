"""Directories whose rows or priorities are not what was written are refused, by writers and readers."""

import numpy as np
import pytest
import torch
from goal_data import goal_transitions
from snapshots import files_of

from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage
from trl_storages.samplers import PERSampler, UniformSampler
from trl_storages.writing import EpisodeWriter

pytestmark = pytest.mark.requirement("refused-is-unchanged")

SIZE = 8


@pytest.fixture
def rows(tmp_path):
    """A directory of rows with priorities, closed."""
    storage = ReplayStorage(
        storage=PackedStorage(SIZE, scratch_dir=tmp_path / "rows"),
        writer=EpisodeWriter(),
        sampler=PERSampler(SIZE),
        batch_size=4,
    )
    steps = torch.arange(6)
    storage.extend(goal_transitions(torch.zeros(6).long(), steps, steps == 3))
    storage.update_priority(steps, steps.float() + 1)
    storage.close()
    return tmp_path / "rows"


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize("which", ["of a row", "the largest"])
def test_priorities(rows, mode, bad, which):
    words = np.fromfile(rows / "priorities.bin", np.int64)
    if which == "of a row":
        words.view(np.float32).reshape(-1, 2)[2, 0] = bad
    else:
        words[-1:].view(np.float64)[0] = bad
    words.tofile(rows / "priorities.bin")
    before = files_of(rows)
    with pytest.raises(ValueError, match=r"priorities\.bin is damaged: .* finite and at least 0"):
        ReplayStorage.open(rows, mode=mode, sampler=PERSampler(SIZE))
    assert files_of(rows) == before
    # Nothing was kept open.
    (rows / "priorities.bin").unlink()
    ReplayStorage.open(rows, sampler=PERSampler(SIZE)).validate()


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_rows_by_their_checksums(rows, mode):
    ReplayStorage.open(rows, mode=mode, sampler=UniformSampler(), check=True).close()
    words = np.fromfile(rows / "rows.bin", np.int64)
    words[1] ^= 1 << 20
    words.tofile(rows / "rows.bin")
    with pytest.raises(RuntimeError, match="do not match their checksums, those in the slots"):
        ReplayStorage.open(rows, mode=mode, sampler=UniformSampler(), check=True)


@pytest.mark.parametrize("bad", [-1.0, np.nan])
def test_validate_looks_at_priorities(bad):
    storage = ReplayStorage(storage=PackedStorage(SIZE), sampler=PERSampler(SIZE), batch_size=4)
    steps = torch.arange(6)
    storage.extend(goal_transitions(torch.zeros(6).long(), steps, steps == 3))
    storage.validate()
    storage.sampler._table._rows.priorities[2] = bad
    with pytest.raises(RuntimeError, match="must be at least 0"):
        storage.validate()
    storage.sampler._table._rows.priorities[2] = np.inf
    with pytest.raises(RuntimeError):
        storage.validate()
