"""Converts the values of an environment loop (arrays, tensors, numbers, lists) to columns of tensors.

Letters: E environments. A column is `[E, *shape]`; a single environment's value has no leading
dimension and becomes a column `[1, *shape]`.
"""

import math
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data.utils import numpy_to_torch_dtype_dict

from trl_storages.arguments import counted

__all__ = ["NUMPY_TO_TORCH", "TORCH_TO_NUMPY", "Column", "as_tensor"]

#: TorchRL's table, with the unsigned integers that it lacks.
NUMPY_TO_TORCH: dict[np.dtype, torch.dtype] = {
    **numpy_to_torch_dtype_dict,
    np.dtype(np.uint16): torch.uint16,
    np.dtype(np.uint32): torch.uint32,
    np.dtype(np.uint64): torch.uint64,
}
TORCH_TO_NUMPY = {theirs: numpys for numpys, theirs in NUMPY_TO_TORCH.items()}

_FLAGS: frozenset[type] = frozenset({bool, np.bool_})
_REAL_DTYPES = frozenset(dtype for dtype in NUMPY_TO_TORCH if dtype.kind in "biuf")
_REALS: frozenset[type] = frozenset({float, np.float64, np.float32})


def as_tensor(value: Any, name: str) -> torch.Tensor:
    """Returns `value` as a tensor, sharing its memory if possible.

    Raises:
        TypeError: tensors lack its dtype, such as that of strings and other objects.
    """
    if isinstance(value, torch.Tensor):
        return value.detach() if value.requires_grad else value
    array = np.asarray(value)
    if array.dtype.newbyteorder("=") not in NUMPY_TO_TORCH:
        raise TypeError(f"{name} must be numbers, got the dtype {array.dtype}")
    return _share(array)


class Column:
    """Reads and checks one field of all environments, without a copy if possible.

    Args:
        dtype: of the column. Arrays and tensors of another dtype are accepted if it holds their
            values exactly, plain Python numbers and lists if they are of the same kind.
        shape: of one environment's value. For `[1]` a value may also be a scalar.
        num_envs: E.
        lossy: accept any real dtype.
    """

    def __init__(
        self, dtype: torch.dtype, shape: torch.Size, num_envs: int, *, lossy: bool = False
    ) -> None:
        self._dtype = dtype
        #: Dtype of arrays that need no conversion; None if NumPy lacks it.
        self.numpy_dtype = TORCH_TO_NUMPY.get(dtype)
        self._shape = tuple(shape)
        self._num_envs = num_envs
        self._vector = (num_envs, *shape)
        self._is_lossy = lossy
        #: Dtypes of arrays that NumPy converts on assignment, even with a loss.
        self.real_dtypes: frozenset[Any] = _REAL_DTYPES if lossy else frozenset()
        #: Types of scalars that may be assigned as they are, without the leading dimension.
        self.numbers: frozenset[type] = frozenset()
        if self._shape == (1,):
            self.numbers = _REALS if lossy else _FLAGS if dtype is torch.bool else frozenset()

    def read(self, value: Any, name: str, label: str, is_vector: bool) -> torch.Tensor:
        """Returns `value` as a column.

        Args:
            value: array, tensor, number or list.
            name: of the argument, for messages.
            label: which entry of the argument, for messages.
            is_vector: whether it has the leading dimension.

        Returns:
            `[E, *shape]`, or `[1, *shape]` without the leading dimension.

        Raises:
            TypeError: another dtype.
            ValueError: another shape.
        """
        rows: Any = value
        if isinstance(value, torch.Tensor):
            rows = value.detach() if value.requires_grad else value
            if rows.dtype is not self._dtype:
                self._check_dtype(TORCH_TO_NUMPY.get(rows.dtype), rows, name + label)
                rows = rows.to(self._dtype)
        else:
            rows = np.asarray(value)
            if rows.dtype != self.numpy_dtype:
                self._check_dtype(rows.dtype, value, name + label)
                # From the plain numbers, as NumPy then raises if one is out of range.
                rows = np.asarray(
                    value if not hasattr(value, "dtype") and not self._is_lossy else rows,
                    dtype=self.numpy_dtype,
                )
        if tuple(rows.shape) == (self._vector if is_vector else self._shape):
            rows = rows if is_vector else rows[None]
        elif self._shape == (1,) and tuple(rows.shape) == (self._vector[:1] if is_vector else ()):
            rows = rows.reshape(-1, 1)
        else:
            raise self._shape_error(list(rows.shape), name + label, is_vector)
        return rows if isinstance(rows, torch.Tensor) else _share(rows)

    def _check_dtype(self, source: Any, value: Any, name: str) -> None:
        is_number = source is not None and source.newbyteorder("=") in NUMPY_TO_TORCH
        if self._is_lossy:
            is_fine = is_number and source.kind != "c"
        else:
            rule: Literal["safe", "same_kind"] = "safe" if hasattr(value, "dtype") else "same_kind"
            is_fine = is_number and self.numpy_dtype and np.can_cast(source, self.numpy_dtype, rule)
        if is_fine:
            return
        wanted = str(self._dtype).removeprefix("torch.")
        got = str(None if value is None else getattr(value, "dtype", source)).removeprefix("torch.")
        if value is None:
            remedy = "which is no value; a flag that an environment does not give is False"
        elif not is_number:
            remedy = "which are not numbers"
        elif self._dtype is torch.bool:
            remedy = "which are no flags; convert them, as by `!= 0`"
        else:
            remedy = (
                "which it can't hold exactly in general; convert it, as by "
                f"np.asarray(value, '{wanted}') (observations: gymnasium.wrappers.DtypeObservation), or "
                f"make the storage for a space or a field of {got}"
            )
        raise TypeError(f"{name} must be {wanted}, got {got}, {remedy}")

    def _shape_error(self, got: list[int], name: str, is_vector: bool) -> ValueError:
        shape, size, remedy = list(self._shape), counted(self._num_envs, "environment"), ""
        must = f"have the shape {shape} for a single environment"
        if is_vector:
            must = f"have the shape {list(self._vector)} ({size}, then {shape} each)"
        if len(shape) > 2 and (one := got[is_vector:]) in (shape[1:], shape[:-1]):
            count = shape[0 if one == shape[1:] else -1]
            remedy = (
                f"pass stacks of {count} frames, as gymnasium.wrappers.FrameStackObservation(env, "
                f"{count}) makes them, or of as many channels"
            )
        elif not is_vector:
            remedy = "for a vector of environments all arguments have a leading dimension, flags included"
            if got[:1] == [1] and math.prod(got) == math.prod(shape):
                remedy = f"pass it without the leading 1, as by value.reshape({shape})"
        elif got[:1] != [self._num_envs] == got[1:2]:
            must = f"hold {size} in its first dimension"
            remedy = (
                f"pass value.transpose(0, 1), for a field of the shape {[got[0], *got[2:]]} each"
            )
            if got[0] == 1 and got[2:] == shape:
                remedy = "pass value[0]"
            remedy = f"as torch's recurrent networks return their states: {remedy}"
        elif got and (got[1:] == shape or (shape == [1] and len(got) == 1)):
            return ValueError(
                f"{name} must hold {size}, got {got[0]}; make the storage with num_envs={got[0]}"
            )
        elif got == shape and self._num_envs == shape[0]:
            remedy = (
                "make the storage of the spaces of one environment, single_observation_space and "
                "single_action_space"
            )
        return ValueError(f"{name} must {must}, got {got}" + (f"; {remedy}" if remedy else ""))


def _share(array: NDArray[Any]) -> torch.Tensor:
    # PyTorch has no read-only tensors, and warns if it is given a read-only array.
    if not array.flags.writeable:
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except ValueError:
        # Tensors lack negative strides and foreign byte orders.
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
