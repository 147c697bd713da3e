"""Storages in memory work where POSIX ends; directories say that they do not."""

import importlib
import mmap
import pkgutil
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import numpy as np
import torch
from gymnasium import spaces

import trl_storages

with suppress(ImportError):
    # Before platforms are simulated, as torch is.
    import numba  # noqa: F401

POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}

GONE = {
    "darwin": "os.posix_fallocate os.sched_getaffinity os.O_DIRECT",
    "win32": "os.posix_fallocate os.sched_getaffinity os.O_DIRECT os.O_CLOEXEC os.uname os.fork "
    "os.register_at_fork os.getuid os.pread os.pwrite os.sysconf signal.SIGALRM signal.SIGKILL "
    "signal.SIGHUP signal.SIGUSR1 signal.pthread_sigmask signal.setitimer",
}


def live_on(platform: str, path: Path, answers: Connection) -> None:
    """Uses the package, imported anew, as if on another platform."""
    warnings.simplefilter("ignore")
    # What others imported by now stays: it is there on the platforms that they support.
    for name in [*sys.modules]:
        if name.partition(".")[0] == "trl_storages":
            del sys.modules[name]
    for place in GONE[platform].split():
        module, name = place.split(".")
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
    if platform == "win32":
        sys.modules |= dict.fromkeys(POSIX_MODULES)
        for name in [*vars(mmap)]:
            if name.startswith(("MAP_", "MADV_", "PROT_")):
                delattr(mmap, name)
    sys.platform = platform

    package = importlib.import_module("trl_storages")
    for module in pkgutil.walk_packages(package.__path__, "trl_storages."):
        importlib.import_module(module.name)
    use(package)
    for make in (
        lambda: use(package, path=path),
        lambda: package.PackedStorage(4, scratch_dir=path).close(),
        lambda: package.ReplayStorage.open(path).close(),
        lambda: package.ReplayStorage.open(path, mode="r").close(),
    ):
        answers.send(outcome_of(make))


def outcome_of(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return repr(error)
    return "done"


def use(package: ModuleType, **options) -> None:
    """Records, samples and empties."""
    storage = package.EREReplayStorage(
        spaces.Box(-9, 9, (3,)),
        spaces.Discrete(2),
        storage_size=50,
        batch_size=8,
        alpha=0.6,
        n_step=3,
        **options,
    )
    for step in range(80):
        seen = np.full(3, step, np.float32)
        storage.record(seen, 0, 1.0, step % 9 == 8, False, {}, seen + 1)
    batch = storage.sample()
    batch["td_error"] = torch.rand(8)
    storage.update_tensordict_priority(batch)
    storage.empty(keep_steps=5)
    storage.sample()
    with TemporaryDirectory() as folder:
        storage.dumps(folder)
        storage.loads(folder)
    storage.validate()
    storage.close()


def answers_on(platform: str, path: Path) -> list[str]:
    """What comes of the ways to a directory."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=live_on, args=(platform, path, theirs))
    process.start()
    theirs.close()
    process.join(60)
    assert process.exitcode == 0
    return [ours.recv() for _ in range(4)]


def test_windows_has_storages_in_memory(tmp_path):
    rows = trl_storages.PackedStorage(4, scratch_dir=tmp_path, fields={"a": (torch.float32, (1,))})
    trl_storages.ReplayStorage(storage=rows).close()

    answers = answers_on("win32", tmp_path)

    for answer in answers:
        assert answer.startswith("RuntimeError('rows in a directory need a platform with POSIX")
        assert "got win32" in answer
        assert "leave path or scratch_dir out" in answer


def test_macos_has_directories_too(tmp_path):
    made, other_size, *opened = answers_on("darwin", tmp_path / "rows")

    assert made == "done"
    assert "fcntl" not in other_size
    assert opened == ["done"] * 2
