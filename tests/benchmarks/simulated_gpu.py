"""Counts what a GPU is asked for, also on a machine without one: there the CPU computes in its place."""

from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = ["Counted", "simulated_gpu"]

#: Operations whose results the host waits for.
READS = ("_local_scalar_dense", "nonzero", "equal")
VIEWS = ("unsafe_split_with_sizes",)


class OnGPU(torch.Tensor):
    """A tensor that says it is on "cuda:0"; its values are a tensor on the CPU."""

    device, is_cuda, is_cpu = torch.device("cuda:0"), True, False

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        tensor = cls._make_wrapper_subclass(cls, values.size(), dtype=values.dtype, **layout)
        tensor.values_on_cpu = values
        return tensor

    def cpu(self) -> torch.Tensor:
        counted = torch.utils._python_dispatch._get_current_dispatch_mode()
        counted.waits.append("cpu")
        return self.values_on_cpu.clone()

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        target = options.get("device", args[0] if args else None)
        is_host = isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu"
        return self.cpu() if is_host else super().to(*args, **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{func} of a simulated GPU needs its mode.")


class Counted(TorchDispatchMode):
    """Lists the operations on a GPU (`launches`), and those for which the host waits (`waits`).

    On a real GPU only launches are listed; `torch.cuda.set_sync_debug_mode` tells of the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.overloadpacket.__name__, dict(kwargs or {})
        is_read, is_simulated = False, not torch.cuda.is_available()

        def values(it: Any) -> Any:
            nonlocal is_read
            is_read |= isinstance(it, torch.Tensor) and it.is_cuda
            return it.values_on_cpu if isinstance(it, OnGPU) else it

        plain, plain_options = tree_map(values, args), tree_map(values, options)
        target = options.get("device")
        is_result = is_read if target is None else torch.device(target).type == "cuda"
        if is_simulated:
            if name in ("is_pinned", "_pin_memory"):
                return False if name == "is_pinned" else plain[0]
            plain_options.pop("pin_memory", None)
            plain_options |= {"device": "cpu"} if target is not None else {}
        result = func(*plain, **plain_options)
        is_to_host = name == "copy_" and not args[0].is_cuda
        if is_simulated and is_read and (name in READS or not is_result or is_to_host):
            self.waits.append(name)
        elif (is_read or is_result) and not func.is_view and name not in VIEWS:
            self.launches.append(name)
        if func._schema.is_mutable and result is plain[0]:
            return args[0]
        if not is_simulated or not is_result:
            return result
        return tree_map(lambda it: OnGPU(it) if isinstance(it, torch.Tensor) else it, result)


def simulated_gpu() -> Any:
    """Lets "cuda" name a device where there is none, within `Counted`."""
    return mock.patch("torch.cuda._lazy_init")
