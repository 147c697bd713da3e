"""flashbax: the item and trajectory buffers, compiled by JAX for the CPU."""

import functools
from collections.abc import Callable
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

from tests.benchmarks import data
from tests.benchmarks.data import Columns
from tests.benchmarks.peers.base import Buffer


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
                return self.shown(buffer.sample(state, used).experience), key

            self.samplers[batch_size] = jax.jit(sample)
        return self.samplers[batch_size]

    def shown(self, experience: Columns) -> Columns:
        """Turns what the buffer draws into the batch, as a part of the compiled function."""
        return experience

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


class Prioritized(Uniform):
    """Flat observations; a sample is a draw and the update of its priorities, compiled together."""

    make_buffer = staticmethod(
        functools.partial(
            flashbax.make_prioritised_item_buffer, priority_exponent=data.PRIORITY_ALPHA
        )
    )

    def sampler(self, batch_size: int) -> Callable:
        if batch_size not in self.samplers:
            buffer = self.make(batch_size)
            errors = jnp.linspace(0.1, 1, batch_size)

            def sample(state: Any, key: jax.Array) -> tuple[Any, jax.Array, Any]:
                key, used = jax.random.split(key)
                drawn = buffer.sample(state, used)
                weights = drawn.probabilities**-data.PRIORITY_BETA
                batch = drawn.experience | {"weight": weights / weights.max()}
                return batch, key, buffer.set_priorities(state, drawn.indices, errors)

            self.samplers[batch_size] = jax.jit(sample, donate_argnums=0)
        return self.samplers[batch_size]

    def sample(self, batch_size: int) -> Columns:
        batch, self.key, self.state = self.sampler(batch_size)(self.state, self.key)
        return jax.block_until_ready(batch)


class Extend(Uniform):
    """Writes of several rows at once; one compiled function for each number of them."""

    def __init__(self, columns: Columns, capacity: int):
        super().__init__(columns, capacity)
        self.add = jax.jit(self.make(1, add_batches=True).add, donate_argnums=0)

    @staticmethod
    def prepare(rows: Columns) -> Columns:
        return {name: jnp.asarray(column) for name, column in rows.items()}

    def write(self, prepared: Columns) -> None:
        self.state = self.add(self.state, prepared)
        jax.block_until_ready(self.state)


class Trajectories(Uniform):
    """Stretches of rows in time order, which may cross the ends of episodes."""

    steps: int

    def __init__(self, columns: Columns, capacity: int):
        self.capacity = capacity
        empty = self.make(1).init({name: column[0] for name, column in columns.items()})
        self.add = jax.jit(self.make(1).add, donate_argnums=0)
        self.state = self.add(empty, self.prepare(columns)[0])
        self.key = jax.random.key(0)
        self.samplers: dict[int, Callable] = {}

    def make(self, batch_size: int) -> Any:
        return flashbax.make_trajectory_buffer(
            add_batch_size=1,
            sample_batch_size=batch_size,
            sample_sequence_length=self.steps,
            period=1,
            min_length_time_axis=self.steps,
            max_length_time_axis=self.capacity,
        )

    @staticmethod
    def prepare(rows: Columns) -> list[Columns]:
        return [{name: jnp.asarray(column[None]) for name, column in rows.items()}]


class Sequences(Trajectories):
    """The same, one after another in the batch."""

    steps = data.SEQUENCE_STEPS

    def sampler(self, batch_size: int) -> Callable:
        return super().sampler(batch_size // data.SEQUENCE_STEPS)

    @staticmethod
    def columns_of(batch: Columns) -> dict[str, np.ndarray]:
        return {name: np.asarray(part).reshape(-1, *part.shape[2:]) for name, part in batch.items()}


class NStep(Trajectories):
    """Flat observations, folded at sample time by what is compiled together with the draw."""

    steps = data.N_STEPS

    def shown(self, experience: Columns) -> Columns:
        done = experience["done"]  # [B, n]
        # A step counts if no step before it has ended the episode.
        counts = jnp.cumulative_sum(done, axis=1, include_initial=True)[:, :-1] == 0
        last = counts.sum(1) - 1
        at_last = jnp.arange(len(last)), last
        discounts = data.DISCOUNT ** jnp.arange(data.N_STEPS, dtype=jnp.float32)
        ends = ("next_observation", "terminated", "truncated", "done")
        return {
            "observation": experience["observation"][:, 0],
            "action": experience["action"][:, 0],
            "reward": (experience["reward"] * discounts * counts).sum(1),
            **{name: experience[name][at_last] for name in ends},
        }


WORKS = {
    "uniform": Uniform,
    "n_step": NStep,
    "priorities": Prioritized,
    "sequences": Sequences,
    "extend": Extend,
}
