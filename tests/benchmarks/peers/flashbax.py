"""flashbax: the item buffers, compiled by JAX for the CPU."""

import functools
from collections.abc import Callable
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

from tests.benchmarks.data import PRIORITY_ALPHA, PRIORITY_BETA, Columns
from tests.benchmarks.peers.base import Buffer

TITLE = "flashbax"


class Uniform(Buffer):
    """Uniform draws; one compiled function for each batch size."""

    make_buffer: Callable = staticmethod(flashbax.make_item_buffer)

    def __init__(self, columns: Columns, capacity: int):
        self.make = functools.partial(self.make_buffer, capacity, 1)
        empty = self.make(1).init({name: column[0] for name, column in columns.items()})
        fill = jax.jit(self.make(1, add_batches=True).add, donate_argnums=0)
        self.state = fill(empty, {name: jnp.asarray(column) for name, column in columns.items()})
        self.add = jax.jit(self.make(1).add, donate_argnums=0)
        self.key = jax.random.key(0)
        self.samplers: dict[int, Callable] = {}

    def sampler(self, batch_size: int) -> Callable:
        """Compiles the draw of a batch together with the step of the random key."""
        if batch_size not in self.samplers:
            buffer = self.make(batch_size)

            def sample(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
                key, used = jax.random.split(key)
                return buffer.sample(state, used).experience, key

            self.samplers[batch_size] = jax.jit(sample)
        return self.samplers[batch_size]

    @staticmethod
    def prepare(rows: Columns) -> list[Columns]:
        return [
            {name: jnp.asarray(column[row]) for name, column in rows.items()}
            for row in range(len(rows["done"]))
        ]

    def write(self, prepared: list[Columns]) -> None:
        for step in prepared:
            self.state = self.add(self.state, step)
        jax.block_until_ready(self.state)

    def sample(self, batch_size: int) -> Columns:
        batch, self.key = self.sampler(batch_size)(self.state, self.key)
        return jax.block_until_ready(batch)

    @staticmethod
    def columns_of(batch: Columns) -> dict[str, np.ndarray]:
        return {name: np.asarray(part) for name, part in batch.items()}


class Prioritized(Uniform):
    """Flat observations; a sample is a draw and the update of its priorities, compiled together."""

    make_buffer = staticmethod(
        functools.partial(flashbax.make_prioritised_item_buffer, priority_exponent=PRIORITY_ALPHA)
    )

    def sampler(self, batch_size: int) -> Callable:
        if batch_size not in self.samplers:
            buffer = self.make(batch_size)
            errors = jnp.linspace(0.1, 1, batch_size)

            def sample(state: Any, key: jax.Array) -> tuple[Any, jax.Array, Any]:
                key, used = jax.random.split(key)
                drawn = buffer.sample(state, used)
                weights = drawn.probabilities**-PRIORITY_BETA
                batch = drawn.experience | {"weight": weights / weights.max()}
                return batch, key, buffer.set_priorities(state, drawn.indices, errors)

            self.samplers[batch_size] = jax.jit(sample, donate_argnums=0)
        return self.samplers[batch_size]

    def sample(self, batch_size: int) -> Columns:
        batch, self.key, self.state = self.sampler(batch_size)(self.state, self.key)
        return jax.block_until_ready(batch)


WORKS = {"uniform": Uniform, "priorities": Prioritized}
