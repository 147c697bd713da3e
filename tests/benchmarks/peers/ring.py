"""No library: a tensor `[E, T, ...]` for each field, E lanes of T steps."""

from typing import Any

import torch
from tensordict import TensorDict

from tests.benchmarks.data import Columns, to_tensordict
from tests.benchmarks.peers.base import Buffer
from tests.benchmarks.peers.torchrl import columns_of


class Ring(Buffer):
    """Uniform draws, and writes of `[E, S]` steps."""

    def __init__(self, columns: Columns, capacity: int):
        self.steps, self.cursor = capacity // self.num_lanes, 0
        rows = to_tensordict(columns).reshape(self.num_lanes, -1)
        self.fields: dict[Any, torch.Tensor] = {
            key: value.new_zeros(self.num_lanes, self.steps, *value.shape[2:], device=self.device)
            for key, value in rows.items(True, True)
        }
        self.write(rows)

    @staticmethod
    def prepare(rows: Columns) -> TensorDict:
        return to_tensordict(rows).unsqueeze(0)

    def write(self, prepared: TensorDict) -> None:
        start, count = self.cursor % self.steps, min(prepared.shape[1], self.steps)
        end = min(start + count, self.steps)
        for key, ring in self.fields.items():
            values = prepared[key]
            ring[:, start:end] = values[:, : end - start]
            if start + count > end:
                ring[:, : start + count - end] = values[:, end - start : count]
        self.cursor += count

    def sample(self, batch_size: int) -> dict[Any, torch.Tensor]:
        size = min(self.cursor, self.steps)
        at = torch.randint(self.num_lanes * size, (batch_size,), device=self.device)
        if size < self.steps:
            at += at // size * (self.steps - size)
        return {key: ring.flatten(0, 1).index_select(0, at) for key, ring in self.fields.items()}

    @staticmethod
    def columns_of(batch: dict[Any, torch.Tensor]) -> Columns:
        return columns_of(TensorDict(batch))


class Lanes(Ring):
    """The same, of one step of each lane."""

    @staticmethod
    def prepare(rows: Columns) -> TensorDict:
        return to_tensordict(rows).unsqueeze(1)


WORKS = {"uniform": Ring, "extend": Ring, "lanes": Lanes}
