"""No library: one plain compiled function for each answer, over rows of known fields.

Nobody would train with it: it checks nothing, takes no locks, makes no TensorDict, and knows these fields
and episodes only. What a library takes beyond it buys all of that; where this package misses a target, it
says how far the machine would go.

Letters: N rows, E lanes, W words of 8 bytes a row, B batch, G goal size, n steps of a window.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from tests.benchmarks import data
from tests.benchmarks.data import Columns
from tests.benchmarks.peers.base import as_columns
from tests.benchmarks.peers.ours import goal_reward
from tests.benchmarks.peers.raw import Raw
from trl_storages.kernels.compile import inlined, prefetch

# Kept as long as this file is as it was.
loop = numba.njit(nogil=True, cache=True)
FAN_OUT = 8
# About as far as memory is away.
SAMPLES_AHEAD = 6
GOALS = ("desired_goal", "next_desired_goal")
EPS = 1e-6
# The smallest window of recent rows, and how strongly the newest are emphasised, as by `ERESampler()`.
C_MIN, ETA = 5000, 0.996


class Ring(NamedTuple):
    """Rows and their episodes.

    Attributes:
        rows: `[N, W]` the rows; `words` are the same as `[N, 2W]` float32.
        words: see `rows`.
        episode: `[N]` the episode of each row.
        last: `[N]` the last row of each episode.
        begun: `[E]` how many episodes each lane has begun.
        is_open: `[E]` whether the episode of each lane goes on.
    """

    rows: np.ndarray
    words: np.ndarray
    episode: np.ndarray
    last: np.ndarray
    begun: np.ndarray
    is_open: np.ndarray


class Fields(NamedTuple):
    """Where fields are in rows, in words of 4 bytes.

    Attributes:
        achieved: what a step reached.
        reward: its reward.
        goals: `[2]` where goals are written to.
        following: `[*, 2]` from and to: what tells where a step led to.
    """

    achieved: int
    reward: int
    goals: np.ndarray
    following: np.ndarray


class Plain(Raw):
    """Rows in a ring of E lanes, with an episode for each; goals and windows are of one lane."""

    lanes = 1
    relabels = False
    steps = 1

    def __init__(self, columns: Columns, capacity: int):
        super().__init__(columns, capacity)
        words = self.rows.view(np.float32).reshape(capacity, -1)
        episodes = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
        lanes = np.zeros(self.lanes, np.int64), np.zeros(self.lanes, bool)
        self.ring = Ring(self.bytes, words, *episodes, *lanes)
        self.cursor = 0
        self.append(self.block(columns))
        following = [name for name in self.names if name.startswith("next_")]
        ends = [(self.word(name), columns[name][0].size) for name in following]
        ends.append((self.word("done"), 1))  # the flags share one
        self.fields = Fields(
            self.word("next_achieved_goal"),
            self.word("reward"),
            np.array([self.word(name) for name in GOALS]),
            np.array([(start, start + size) for start, size in ends]),
        )

    def word(self, name: str) -> int:
        """Returns which 4-byte word of a row a field begins in; 0 where there is none."""
        return self.dtype.fields[name][1] // 4 if name in self.names else 0

    def block(self, columns: Columns) -> np.ndarray:
        """Lays new rows out as the stored ones."""
        block = np.empty(len(columns["done"]), self.dtype)
        for name in self.names:
            block[name] = columns[name]
        return block

    def append(self, block: np.ndarray) -> None:
        rows = block.view(np.int64).reshape(len(block), -1)
        append(self.ring, self.cursor, rows, block["done"])
        self.cursor += len(block)

    def write(self, prepared: Columns) -> None:
        self.append(self.block(prepared))

    @property
    def num_rows(self) -> int:
        return min(self.cursor, self.capacity)

    def draw(self, batch_size: int) -> np.ndarray:
        """Returns `[B]` slots."""
        slots = np.empty(batch_size, np.int64)
        draw(self.noise(batch_size), self.num_rows, slots)
        return slots

    def noise(self, batch_size: int) -> np.ndarray:
        return self.rng.integers(0, np.iinfo(np.int64).max, batch_size)

    def sample(self, batch_size: int) -> dict[str, torch.Tensor]:
        return self.seen(self.draw(batch_size))

    def seen(self, slots: np.ndarray) -> dict[str, torch.Tensor]:
        """Returns the fields of drawn rows: relabelled, folded."""
        batch_size = len(slots)
        count = (
            batch_size * data.HINDSIGHT_GOALS // (data.HINDSIGHT_GOALS + 1) if self.relabels else 0
        )
        out = np.empty((batch_size, self.bytes.shape[1]), np.int64)
        rewards = np.empty((self.steps, batch_size), np.float32)
        achieved = np.empty((self.steps, count, data.GOAL_SIZE), np.float32)
        length = np.empty(batch_size, np.int64)
        words = out.view(np.float32)
        noise = self.noise(count)
        see(self.ring, self.fields, slots, noise, out, words, achieved, rewards, length)
        batch = out.view(self.dtype)[:, 0]
        fields = {name: torch.from_numpy(batch[name]) for name in self.names}
        if count:
            goals = fields["desired_goal"][:count].expand(self.steps, -1, -1)
            judged = goal_reward(torch.from_numpy(achieved), goals, {})
            rewards[:, :count] = judged.numpy()
        if count or self.steps > 1:
            fold(rewards, length, data.DISCOUNT, batch["reward"])
        return fields

    columns_of = staticmethod(as_columns)


class Hindsight(Plain):
    """Goals of later steps of the episode."""

    relabels = True


class NStep(Plain):
    """Rewards of three steps."""

    steps = data.N_STEPS


class HindsightNStep(Plain):
    """Rewards of three steps for the goal that was drawn."""

    relabels, steps = True, data.N_STEPS


class Prioritized(Plain):
    """Draws by priority from a tree of sums; a sample is a draw and the update of its priorities."""

    is_recent = False

    def __init__(self, columns: Columns, capacity: int):
        depth = 1
        while FAN_OUT**depth < capacity:
            depth += 1
        sizes = FAN_OUT ** np.arange(1, depth + 1)
        self.starts = np.cumsum([0, *sizes[:-1]])
        self.tree = np.zeros(sizes.sum())
        super().__init__(columns, capacity)

    def append(self, block: np.ndarray) -> None:
        slots = np.arange(self.cursor, self.cursor + len(block)) % self.capacity
        super().append(block)
        set_leaves(self.tree, self.starts, slots, np.ones(len(slots)))

    def sample(self, batch_size: int) -> dict[str, torch.Tensor]:
        newest = self.num_rows
        if self.is_recent:
            newest = min(newest, max(int(newest * ETA**1000), C_MIN))
        slots, weights = np.empty(batch_size, np.int64), np.empty(batch_size)
        oldest = (self.cursor - newest) % self.capacity
        draw_leaves(
            self.tree, self.starts, oldest, newest, self.capacity, self.rng.random(batch_size),
            slots, weights,
        )  # fmt: skip
        batch = self.seen(slots)
        batch["priority_weight"] = torch.from_numpy(
            (weights / weights.min()) ** -data.PRIORITY_BETA
        )
        errors = np.linspace(0.1, 1, batch_size)
        set_leaves(self.tree, self.starts, slots, (errors + EPS) ** data.PRIORITY_ALPHA)
        return batch


class Everything(Prioritized):
    """Hindsight, folded, drawn by priority among recent rows; and the update of the priorities."""

    relabels, steps, is_recent = True, data.N_STEPS, True


class Record(Plain):
    """Steps of a plain loop over one environment: arrays as gymnasium gives them."""

    @staticmethod
    def prepare(rows: Columns) -> list[dict[str, Any]]:
        return [
            {name: column[row] for name, column in rows.items()} for row in range(len(rows["done"]))
        ]

    def write(self, prepared: list[dict[str, Any]]) -> None:
        for step in prepared:
            block = np.empty(1, self.dtype)
            for name in self.names:
                block[name] = step[name]
            self.append(block)


class RecordLanes(Plain):
    """Steps of eight environments at once, the rows of the data dealt out to them."""

    lanes = data.LANES

    @staticmethod
    def prepare(rows: Columns) -> list[Columns]:
        return [data.take_rows(rows, *step) for step in data.lane_steps(rows)]

    def write(self, prepared: list[Columns]) -> None:
        for step in prepared:
            super().write(step)


WORKS = {
    "uniform": Plain,
    "her": Hindsight,
    "her_n_step": HindsightNStep,
    "everything": Everything,
    "n_step": NStep,
    "priorities": Prioritized,
    "extend": Plain,
    "record": Record,
    "record_lanes": RecordLanes,
}


@loop
def append(ring, cursor, block, done):
    """Copies rows `[S, W]` behind those that are there, one to each lane in turn.

    Args:
        ring: where to.
        cursor: how many rows were written before.
        block: `[S, W]` the new ones.
        done: `[S]` whether they end their episodes.
    """
    table, _, episode, last, begun, is_open = ring
    num_lanes, capacity = len(begun), len(table)
    for row in range(len(block)):
        slot, lane = (cursor + row) % capacity, (cursor + row) % num_lanes
        for word in range(table.shape[1]):
            table[slot, word] = block[row, word]
        begun[lane] += not is_open[lane]
        number = begun[lane] * num_lanes % capacity + lane
        episode[slot], last[number] = number, slot
        is_open[lane] = not done[row]


@inlined
def below(noise, bound):
    """Returns floor(noise * bound / 2^63) for a bound below 2^31."""
    return ((noise >> 32) * bound + ((noise & 0xFFFFFFFF) * bound >> 32)) >> 31


@loop
def draw(noise, num_rows, slots):
    """Draws `[B]` slots from `[B]` noise."""
    for i in range(len(slots)):
        slots[i] = below(noise[i], num_rows)


@loop
def see(ring, fields, slots, noise, out, out_words, achieved, rewards, length):
    """Copies rows, those that end their windows and the goals that later rows reached.

    Args:
        ring: the rows.
        fields: where they are in them.
        slots: `[B]` the rows that were drawn.
        noise: of the first rows, as many as are given goals.
        out: `[B, W]` the batch; `out_words` is the same as `[B, 2W]` float32.
        out_words: see `out`.
        achieved: `[n, count, G]` what the steps of windows reached, for rows with goals.
        rewards: `[n, B]` the rewards of windows.
        length: `[B]` how many steps a window has.
    """
    table, words, episode, last, _, _ = ring
    achieved_word, reward_word, goal_words, following_words = fields
    capacity, num_words, num_steps = table.shape[0], table.shape[1], len(rewards)
    count = len(noise)
    goals, ahead = np.empty(count, np.int64), np.empty(len(slots), np.int64)
    if count or num_steps > 1:
        for i in range(len(slots)):
            prefetch(episode, slots[i])
        for i in range(len(slots)):
            ahead[i] = episode[slots[i]]
            prefetch(last, ahead[i])
        for i in range(len(slots)):
            ahead[i] = last[ahead[i]] - slots[i]
            if ahead[i] < 0:
                ahead[i] += capacity
            length[i] = min(num_steps, ahead[i] + 1)
    for i in range(count):
        goals[i] = (slots[i] + below(noise[i], ahead[i] + 1)) % capacity
    for i in range(len(slots)):
        j = i + SAMPLES_AHEAD
        if j < len(slots):
            prefetch(table, slots[j], 0, 8 * num_words * num_steps)
            if j < count:
                prefetch(table, goals[j], 4 * achieved_word, 4 * achieved_word + 8)
        for word in range(num_words):
            out[i, word] = table[slots[i], word]
        if num_steps > 1:
            for step in range(length[i]):
                slot = (slots[i] + step) % capacity
                rewards[step, i] = words[slot, reward_word]
                if i < count:
                    for word in range(achieved.shape[2]):
                        achieved[step, i, word] = words[slot, achieved_word + word]
            end = (slots[i] + length[i] - 1) % capacity
            for span in range(len(following_words)):
                for word in range(following_words[span, 0], following_words[span, 1]):
                    out_words[i, word] = words[end, word]
        elif count:
            rewards[0, i] = out_words[i, reward_word]
        if i < count:
            for word in range(achieved.shape[2]):
                if num_steps == 1:
                    achieved[0, i, word] = out_words[i, achieved_word + word]
                for target in goal_words:
                    out_words[i, target + word] = words[goals[i], achieved_word + word]


@loop
def fold(rewards, length, discount, out):
    """Sums discounted `[n, B]` rewards into `[B]`."""
    for i in range(len(length)):
        total, weight = 0.0, 1.0
        for step in range(length[i]):
            total += weight * rewards[step, i]
            weight *= discount
        out[i] = total


@loop
def sum_before(tree, starts, leaf):
    """Sums the weights of all leaves before one."""
    total = 0.0
    for level in range(len(starts)):
        node = leaf // FAN_OUT ** (len(starts) - 1 - level)
        for sibling in range(node // FAN_OUT * FAN_OUT, node):
            total += tree[starts[level] + sibling]
    return total


@loop
def draw_leaves(tree, starts, oldest, newest, capacity, uniform, leaves, weights):
    """Draws leaves by weight, level by level over the batch.

    Args:
        tree: sums of eight, level after level.
        starts: where the levels begin.
        oldest: the first leaf that may be drawn.
        newest: how many from there on, around the end of the ring.
        capacity: of the ring.
        uniform: `[B]` from 0 to 1.
        leaves: `[B]` what is drawn.
        weights: `[B]` their weights.
    """
    total = 0.0
    for node in range(FAN_OUT):
        total += tree[node]
    skipped, window = 0.0, total
    if newest < capacity:
        skipped, end = sum_before(tree, starts, oldest), (oldest + newest) % capacity
        window = sum_before(tree, starts, end) - skipped
        if end <= oldest:
            window += total
    rest = np.empty(len(leaves))
    for i in range(len(leaves)):
        rest[i] = skipped + uniform[i] * window
        if rest[i] >= total:
            rest[i] -= total
        leaves[i] = 0
    for level in range(len(starts)):
        for i in range(len(leaves)):
            first = starts[level] + leaves[i] * FAN_OUT
            before, chosen, summed = 0.0, 0, 0.0
            for node in range(FAN_OUT):
                # Rounding may leave a rest beyond the last leaf with a weight.
                if tree[first + node] > 0 and rest[i] >= summed:
                    chosen, before = node, summed
                summed += tree[first + node]
            rest[i] -= before
            leaves[i] = leaves[i] * FAN_OUT + chosen
            if level + 1 < len(starts):
                prefetch(tree, starts[level + 1] + leaves[i] * FAN_OUT)
    for i in range(len(leaves)):
        weights[i] = tree[starts[-1] + leaves[i]]


@loop
def set_leaves(tree, starts, leaves, weights):
    """Sets `[B]` weights, and sums anew what lies above, from below."""
    nodes = leaves.copy()
    for i in range(len(leaves)):
        tree[starts[-1] + leaves[i]] = weights[i]
    for level in range(len(starts) - 2, -1, -1):
        for i in range(len(leaves)):
            nodes[i] //= FAN_OUT
            summed = 0.0
            for child in range(FAN_OUT):
                summed += tree[starts[level + 1] + nodes[i] * FAN_OUT + child]
            tree[starts[level] + nodes[i]] = summed
