"""One profile of hypothesis, one thread of torch and the skips of what is missing, for all tests."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import torch

# Only for processes that tests start.
collect_ignore = ["quick_start"]

# Imports and collected tests stay to the end: garbage collections would only walk them.
gc.disable()

# tensordict's modules ask whether there is pandas whenever they write an entry, and each time
# directories would be searched for it.
if find_spec("pandas") is None:
    sys.modules["pandas"] = None

# Derandomised: a run says something about the code, never about its luck. The "search" profile
# (HYPOTHESIS_PROFILE=search) looks for new counterexamples instead.
settings.register_profile(
    "fixed",
    deadline=None,
    derandomize=True,
    max_examples=50,
    stateful_step_count=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "search", settings.get_profile("fixed"), derandomize=False, max_examples=1000
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # Its workers run the tests, and start the sooner.
    paths = [str(Path(__file__).parent / "quick_start"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # Of processes that tests start, too: there is one test for each core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torchrl

    # "forkserver" starts processes as "spawn" does, from what is pickled, but imports these once.
    torch.multiprocessing.set_forkserver_preload(["torchrl.collectors", "numba"])
    torch.set_num_threads(1)
    # TorchRL's environments and collectors return to this number when they are closed.
    torchrl._THREAD_POOL_INIT = 1
    # The threads that torch computes with do not survive a fork: a child that asks for them waits.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch
    from torchrl.data.replay_buffers.samplers import SumSegmentTreeFp32

    # Long ones come first: one that is left to the end keeps the other workers waiting.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)

    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device"
    if SumSegmentTreeFp32 is None:
        missing["native"] = "TorchRL's compiled part does not load with this torch"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def generator() -> torch.Generator:
    """A generator with a fixed seed, so that statistics never flicker."""
    import torch

    return torch.Generator().manual_seed(20)


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A GPU, also without one: mixed-up devices raise, and so does what waits for it.

    A simulated one has no data, so that every read of it on the host raises, also one in a test.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = torch.device("cuda:0")
    if request.param == "real":
        torch.cuda.set_sync_debug_mode("error")
        yield device
        torch.cuda.set_sync_debug_mode("default")
        return
    if not torch.backends.cuda.is_built():
        pytest.skip("needs a build of torch for CUDA, on any machine")
    with FakeTensorMode():
        yield device


@pytest.fixture
def tutorial(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a tutorial as when it is run: its directory is searched first."""
    import torch

    folder = Path(__file__).parents[1] / "tutorials"
    before, threads = {*sys.modules}, torch.get_num_threads()
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in {*sys.modules} - before:
        if folder in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


@pytest.fixture
def start_processes_by() -> Iterator[Callable[[str], None]]:
    """Chooses how workers start: "spawn" is TorchRL's default, "forkserver" and "fork" import less."""
    import torch.multiprocessing

    previous = torch.multiprocessing.get_start_method(allow_none=True)
    yield lambda method: torch.multiprocessing.set_start_method(method, force=True)
    torch.multiprocessing.set_start_method(previous, force=True)
