"""Loops are compiled whatever disturbs it: a full disk, a damaged cache."""

import errno
import os

import numba
import numpy as np
import pytest

from trl_storages.kernels import compile

compiles = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="looks at what is compiled")


@pytest.fixture
def double(tmp_path, monkeypatch):
    """Makes a loop that is cached in a folder of its own, as a new process does."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def loop(values):
        return 2 * values[0]

    compile._warn_of_no_cache.cache_clear()
    yield lambda: compile.loop(loop)
    compile._warn_of_no_cache.cache_clear()


@compiles
def test_a_full_disk_costs_the_cache_only(double, monkeypatch):
    def full(*paths):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.warns(RuntimeWarning, match="or the disk is full.*NUMBA_CACHE_DIR"):
            assert double()(np.ones(1)) == 2
        # It is said once.
        assert double()(np.ones(1)) == 2
    assert double()(np.ones(1)) == 2
    again = double()
    assert again(np.ones(1)) == 2
    assert again.stats.cache_hits


@compiles
@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
@pytest.mark.parametrize("content", [b"", b"\x80damaged"])
def test_a_damaged_cache_is_made_anew(double, tmp_path, ending, content):
    double()(np.ones(1))
    (file,) = tmp_path.rglob(f"*{ending}")
    file.write_bytes(content)
    assert double()(np.ones(1)) == 2
    again = double()
    assert again(np.ones(1)) == 2
    assert again.stats.cache_hits


@compiles
def test_a_fence_is_one_for_processor_and_compiler():
    fenced = numba.njit(lambda: compile.fence())
    fenced()
    assert "fence seq_cst" in str(fenced.inspect_llvm())
