"""Loops are compiled whatever disturbs it: signals, a full disk, a damaged cache."""

import errno
import os
import signal

import numba
import numpy as np
import pytest

from trl_storages.interrupts import undisturbed
from trl_storages.kernels.host import compiling

SIGNALS = [signal.SIGINT, signal.SIGTERM]

compiles = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="looks at what is compiled")


class Stopped(BaseException):
    pass


@pytest.fixture
def stopped(request):
    """Handlers that raise."""

    def stop(*which):
        raise Stopped

    before = [signal.signal(number, stop) for number in SIGNALS]
    yield stop
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def double(tmp_path, monkeypatch):
    """Makes a loop that is cached in a folder of its own, as a new process does."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def loop(values):
        return 2 * values[0]

    compiling._warn_of_no_cache.cache_clear()
    yield lambda: compiling.compiled(loop)
    compiling._warn_of_no_cache.cache_clear()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_call_ends_before_the_handler_of_a_signal_runs(stopped, number):
    done = []

    @undisturbed
    def outer():
        inner()
        done.append("outer")

    @undisturbed
    def inner():
        signal.raise_signal(number)
        done.append("inner")
        return 1 / 0 if len(done) > 2 else None

    with pytest.raises(Stopped):
        outer()
    assert done == ["inner", "outer"]
    # As it does after an error.
    with pytest.raises(Stopped):
        outer()
    assert done == ["inner", "outer", "inner"]
    assert [signal.getsignal(each) for each in SIGNALS] == [stopped, stopped]


@compiles
def test_an_interrupted_loop_is_compiled_kept_and_ready(stopped, double, monkeypatch):
    loop = double()
    compile_ = loop._compiler.compile

    def disturbed(*args):
        signal.raise_signal(signal.SIGINT)
        return compile_(*args)

    monkeypatch.setattr(loop._compiler, "compile", disturbed)
    with pytest.raises(Stopped):
        loop(np.ones(1))
    assert loop(np.ones(1)) == 2
    again = double()
    assert again(np.ones(1)) == 2
    assert again.stats.cache_hits


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
