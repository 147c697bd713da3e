"""Flattens observation, achieved goal and desired goal into one vector.

Letters: B any batch size, F = the sum of the three sizes.
"""

from __future__ import annotations

from functools import reduce
from operator import getitem
from typing import Any

import gymnasium
import torch
from gymnasium.spaces import Box, Dict
from tensordict import NestedKey, TensorDictBase
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs.transforms import CatTensors

from trl_storages import keys, validation

__all__ = ["FlattenGoal"]


class FlattenGoal(CatTensors):  # type: ignore[misc]
    """Concatenates observation, achieved goal and desired goal, in this order, and splits the vector.

    For policies and losses that take a single observation. As an environment transform it adds the
    vector to every observation; as a storage transform, to the batch at the root and under `next`. A
    storage transform must come after `GoalRelabel`, so that the vector contains the drawn goal. Replay
    buffers store the parts: write the parts, or the result of `unflatten`.

    Args:
        observation_space: a gymnasium `Dict` or TorchRL's `env.observation_spec`, which defines the
            sizes of the parts. None infers the sizes from the environment or from the first parts.
        observation_key: key of the first part.
        achieved_goal_key: key of the second part.
        desired_goal_key: key of the third part, of the same shape as the second.
        out_key: key of the vector; if it is the key of a part, the vector replaces that part.
        del_keys: whether to remove the parts.

    Raises:
        KeyError: a part is missing.
        TypeError: the parts differ in dtype, such as floats and integers.
        ValueError: a part has more than one dimension, or the goals differ in shape.

    >>> flatten = FlattenGoal()
    >>> parts = {"observation": [1.0, 2.0], "achieved_goal": [3.0], "desired_goal": [4.0]}
    >>> flat = flatten.flatten({key: torch.tensor(part) for key, part in parts.items()})
    >>> flat, flatten.unflatten(flat)["desired_goal"]
    (tensor([1., 2., 3., 4.]), tensor([4.]))
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any] | TensorSpec | None = None,
        *,
        observation_key: NestedKey = keys.OBSERVATION,
        achieved_goal_key: NestedKey = keys.ACHIEVED_GOAL,
        desired_goal_key: NestedKey = keys.DESIRED_GOAL,
        out_key: NestedKey = "observation_vector",
        del_keys: bool = False,
    ) -> None:
        parts = [
            validation.key("observation_key", observation_key),
            validation.key("achieved_goal_key", achieved_goal_key),
            validation.key("desired_goal_key", desired_goal_key),
        ]
        super().__init__(
            parts,
            validation.key("out_key", out_key),
            del_keys=validation.flag("del_keys", del_keys),
            sort=False,
        )
        self._shapes: list[torch.Size] | None = None
        if observation_space is not None:
            self._set_space(observation_space)

    # Tensors

    def flatten(self, parts: Any, batch_dims: int | None = None) -> torch.Tensor:
        """Concatenates the three parts.

        Args:
            parts: mapping or TensorDict with the parts, each `[*B, n]`, or `[*B]` for scalars.
            batch_dims: number of dimensions of B; None takes that of a TensorDict, else all dimensions
                of the achieved goal except the last.

        Returns:
            `[*B, F]`.
        """
        validation.mapping("parts", parts, "a mapping or TensorDict with the parts")
        batch_dims = validation.optional(validation.integer, "batch_dims", batch_dims)
        is_tensordict = isinstance(parts, TensorDictBase)
        names = [*(parts.keys(include_nested=True) if is_tensordict else parts)]
        missing = [key for key in self.in_keys if key not in names]
        if missing:
            raise KeyError(f"parts must contain {missing}, got {sorted(names, key=str)}.")
        values = [validation.values(repr(key), parts[key]) for key in self.in_keys]
        if batch_dims is None:
            batch_dims = parts.batch_dims if is_tensordict else max(values[1].ndim - 1, 0)
        shapes = [value.shape[batch_dims:] for value in values]
        self._set_shapes(shapes, [value.dtype for value in values])
        return torch.cat([x.unsqueeze(-1) if x.ndim == batch_dims else x for x in values], -1)

    def unflatten(self, flat: torch.Tensor) -> dict[NestedKey, torch.Tensor]:
        """Splits a vector that `flatten` returned.

        Args:
            flat: `[*B, F]`.

        Returns:
            key -> part, as a view of `flat`.

        Raises:
            RuntimeError: the sizes of the parts are unknown, because no space and no parts were given.
            ValueError: the vector does not have size F.
        """
        if self._shapes is None:
            raise RuntimeError(
                "the sizes of the parts are unknown before the first flatten: pass observation_space to "
                "FlattenGoal."
            )
        validation.tensor("flat", flat)
        sizes = [shape.numel() for shape in self._shapes]
        if not flat.ndim or flat.shape[-1] != sum(sizes):
            raise ValueError(
                f"the vector must have the size {' + '.join(map(str, sizes))} of "
                f"{', '.join(map(repr, self.in_keys))}, got the shape {list(flat.shape)}."
            )
        columns = flat.split(sizes, -1)  # type: ignore[no-untyped-call]
        items = zip(self.in_keys, columns, self._shapes, strict=True)
        return {key: column.view(*flat.shape[:-1], *shape) for key, column, shape in items}

    # TensorDicts

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        next_tensordict.set(self.out_keys[0], self.flatten(next_tensordict))
        if self._del_keys:
            next_tensordict.exclude(*self.keys_to_exclude, inplace=True)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Adds the vectors of the parts at the root and under `next`."""
        validation.tensordict("tensordict", tensordict)
        tensordict = self._call(tensordict)
        next_tensordict = tensordict.get("next", None)
        if next_tensordict is not None:
            if self.in_keys[2] not in next_tensordict.keys(include_nested=True):
                # Without a next desired goal, the goal is constant.
                next_tensordict.set(self.in_keys[2], tensordict.get(self.in_keys[2]))
            self._call(next_tensordict)
        return tensordict

    # Spaces

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """Adds an unbounded spec of the vector."""
        self._set_space(observation_spec)
        size = sum(shape.numel() for shape in self._shapes or ())
        first = observation_spec[self.in_keys[0]]
        vector = Unbounded((*observation_spec.shape, size), dtype=first.dtype, device=first.device)
        if self._del_keys:
            for key in self.keys_to_exclude:
                del observation_spec[key]
        observation_spec[self.out_keys[0]] = vector
        return observation_spec

    def _set_space(self, space: Any) -> None:
        what = f"a gymnasium Dict or a TorchRL Composite with {self.in_keys}"
        validation.instance("observation_space", space, (Dict, Composite), what=what)
        try:
            parts = [reduce(getitem, keys.key_path(key), space) for key in self.in_keys]
        except KeyError as error:
            raise KeyError(f"observation_space must be {what}, got {[*space.keys()]}.") from error
        batch_dims = len(space.shape) if isinstance(space, Composite) else 0
        # As in a replay buffer, a Box without dimensions becomes a vector of size 1.
        shapes = [(1,) if isinstance(x, Box) and not x.shape else x.shape for x in parts]
        self._set_shapes([torch.Size(x[batch_dims:]) for x in shapes], [x.dtype for x in parts])

    def _set_shapes(self, shapes: list[torch.Size], dtypes: list[Any]) -> None:
        if len(set(dtypes)) > 1:
            raise TypeError(
                "observation and goals must have the same dtype, got "
                f"{dict(zip(self.in_keys, map(str, dtypes), strict=True))}; convert them first."
            )
        shape_of = dict(zip(self.in_keys, map(list, shapes), strict=True))
        if any(len(shape) > 1 for shape in shapes):
            raise ValueError(
                f"observation and goals must be vectors or numbers, got {shape_of}; flatten them first, "
                "with TorchRL's FlattenObservation."
            )
        if shapes[1] != shapes[2]:
            raise ValueError(f"both goals must have the same shape, got {shape_of}.")
        self._shapes = shapes

    def __repr__(self) -> str:
        return f"{type(self).__name__}(in_keys={self.in_keys}, out_key={self.out_keys[0]!r})"
