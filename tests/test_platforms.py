"""Storages in memory work on every system, and directories where there are file locks."""

import importlib
import mmap
import sys
import warnings
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

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
    use(package)
    said = ""
    try:
        use(package, path=path)
    except RuntimeError as error:
        said = str(error)
    answers.send(said)


def use(package, **options):
    """Records, samples and empties."""
    storage = package.EREReplayStorage(
        *(spaces.Box(-9, 9, (3,)), spaces.Discrete(2)),
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
    storage.validate()


@pytest.mark.parametrize(("platform", "said"), [("win32", "POSIX"), ("darwin", "")])
def test_rows_in_memory_work_everywhere_and_directories_where_there_are_locks(
    platform, said, tmp_path
):
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=live_on, args=(platform, tmp_path / "rows", theirs))
    process.start()
    theirs.close()
    answer = ours.recv()
    assert said in answer
    assert bool(said) == bool(answer)
    process.join(60)
    assert process.exitcode == 0
