"""What tests on a real GPU share."""

import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import trl_storages

__all__ = ["assert_equal_on", "noise_of_the_cpu", "waiting_raises"]

# When the side entries of shared rows seem to be used up, which is seldom, and when TorchRL's own
# storages are written to.
MAY_WAIT = {"make_room", "_put"}
PACKAGE = str(Path(trl_storages.__file__).parent)


def package_line() -> str | None:
    """The innermost line of the package that is being executed, None where a test is at work."""
    lines = list(traceback.walk_stack(sys._getframe(1)))
    if any(frame.f_code.co_name in MAY_WAIT for frame, _ in lines):
        return None
    for frame, line in lines:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{frame.f_code.co_filename}:{line}"
    return None


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Lets the package raise where it waits for the GPU; what a test asks for itself may wait."""

    def show(message: Warning | str, *args: Any) -> None:
        line = package_line()
        if "synchronizing CUDA operation" in str(message) and line:
            raise AssertionError(f"{line} waits for the GPU")

    with warnings.catch_warnings():
        # Says that this mode of torch is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
            warnings.showwarning = show  # type: ignore[assignment]
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def noise_of_the_cpu(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[None]:
    """Lets every device draw the random numbers of one generator on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def random_(values: torch.Tensor, **_: Any) -> torch.Tensor:
        noise = torch.empty(values.shape, dtype=values.dtype)
        torch._C.TensorBase.random_(noise, generator=generator)
        return values.copy_(noise)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "random_", random_)
        yield


def assert_equal_on(
    batch: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]
) -> None:
    """Equal to the last bit, but for floating point, whose powers and roots a GPU rounds in its way.

    The clock of a sampler's writes is its own.
    """
    assert batch.keys() == expected.keys()
    for key, value in expected.items():
        if key == "priority_stamp":
            continue
        there = batch[key]
        assert there.is_cuda, key
        tolerance = (
            {"rtol": 1e-6, "atol": 1e-7} if value.is_floating_point() else {"rtol": 0, "atol": 0}
        )
        torch.testing.assert_close(
            there.cpu(), value, msg=lambda text, key=key: f"{key}: {text}", **tolerance
        )
