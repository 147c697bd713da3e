"""What was written to each lane of a directory, and whether it is there."""

# ruff: noqa: N806

import numpy as np
import torch

from trl_storages.directory import Directory
from trl_storages.streams import Block, FrameStack, Layout

CPU = torch.device("cpu")


def layout_of(k=1):
    fields = {
        "observation": (torch.float32, (3,)),
        ("next", "observation"): (torch.float32, (3,)),
        "action": (torch.int16, (2,)),
        ("next", "reward"): (torch.float64, (1,)),
        ("next", "done"): (torch.bool, (1,)),
    }
    if k > 1:
        stack = FrameStack(k)
        fields["pixels"] = fields["next", "pixels"] = (torch.uint8, (k, 3), stack)
    return Layout(fields)


class Lane:
    """Steps from `first` on: their rows, whether each begins an episode, and ends it."""

    def __init__(self):
        self.rows, self.begins, self.done = [], [], []
        self.is_open = False
        self.last = None

    def cut_at(self, cursor):
        del self.rows[cursor:], self.begins[cursor:], self.done[cursor:]
        self.is_open, self.last = False, None


class History:
    """Writes rows by chance, and knows what they were.

    Args:
        rng: of NumPy.
        layout: of the rows.
        num_envs: how many lanes.
    """

    def __init__(self, rng, layout, num_envs):
        self.rng, self.layout, self.num_envs = rng, layout, num_envs
        self.lanes = [Lane() for _ in range(num_envs)]
        self.durable = [(0, 0)] * num_envs
        self.goes_on = rng.choice([0.0, 0.8, 1.0])
        self.ends = rng.choice([0.02, 0.3])

    def _row(self, last, done):
        rng, row = self.rng, torch.zeros(1, self.layout.row_words, dtype=torch.int64)
        views = {}
        for key, (dtype, shape, *_) in self.layout.described.items():
            views[key] = torch.from_numpy(rng.integers(0, 3, tuple(shape))).to(dtype)
        if last is not None and rng.random() < self.goes_on:
            views.update(last)
        views["next", "done"] = torch.tensor([done])
        if "pixels" in views:
            new = torch.cat([views["pixels"][1:], views["next", "pixels"][-1:]])
            views["next", "pixels"] = new
        for key, value in views.items():
            self.layout.fill(key, row, value[None])
        after = {key: views["next", key] for key in ("observation", "pixels") if key in views}
        return row[0].numpy(), after, last is not None and _same(views, last)

    def block(self, most):
        """Returns a block of rows, and for each lane its rows with what is known of them."""
        rng = self.rng
        counts = np.where(
            rng.random(self.num_envs) < 0.3, 0, rng.integers(0, most + 1, self.num_envs)
        )
        rows, done, cut, added = [], [], [], []
        for lane, count in zip(self.lanes, counts, strict=True):
            last, is_open, mine = lane.last, lane.is_open, []
            for _ in range(count):
                ends, begins = rng.random() < self.ends, rng.random() < 0.05
                row, last, same = self._row(last, bool(ends))
                mine.append((row, not is_open or begins or not same, bool(ends), last))
                is_open = not ends
                rows.append(row)
                done.append(ends)
                cut.append(begins)
            added.append(mine)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        words = np.array(rows, np.int64).reshape(len(rows), self.layout.row_words)
        flags = np.array(done, bool), np.array(cut, bool)
        return Block(np.arange(self.num_envs), offsets, words, *flags), added

    def write(self, directory, most=None):
        block, added = self.block(most or directory.index.most_steps)
        directory.rows.append(block, cuts_gaps=True)
        self.add(added)

    def add(self, added):
        """Takes in what `block` said of its rows."""
        for lane, mine in zip(self.lanes, added, strict=True):
            for row, begins, done, last in mine:
                lane.rows.append(row)
                lane.begins.append(begins)
                lane.done.append(done)
                lane.is_open, lane.last = not done, last

    def end_episodes(self, directory):
        directory.index.end_episodes()
        for lane in self.lanes:
            lane.is_open = False

    def flush(self, directory):
        directory.flush()
        self.flushed(directory.index)

    def flushed(self, index):
        """Takes in that all is durable."""
        self.durable = [*zip(index.tails.tolist(), index.cursors.tolist(), strict=True)]

    def check(self, directory, *, is_whole=True):
        """Checks that rows are as written, and all there if `is_whole`."""
        index = directory.index
        index.validate()
        for e, lane in enumerate(self.lanes):
            tail, cursor = int(index.tails[e]), int(index.cursors[e])
            if is_whole:
                assert cursor == len(lane.rows)
                assert cursor - tail <= index.steps_per_lane
            assert cursor <= len(lane.rows)
            steps = np.arange(tail, cursor)
            slots = torch.from_numpy(e * index.steps_per_lane + steps % index.steps_per_lane)
            places = index.entries_of(slots)
            rows = directory.rows.gather(places, places).numpy()
            assert np.array_equal(
                rows, np.array(lane.rows, np.int64).reshape(-1, rows.shape[1])[steps]
            )
            first = [max(i for i in range(s + 1) if lane.begins[i]) for s in steps]
            behind = [s - max(f, tail) for s, f in zip(steps, first, strict=True)]
            assert index.behind(slots).tolist() == behind
            assert index.is_done(slots).tolist() == [lane.done[s] for s in steps]

    def survives(self, directory, tails):
        """Checks what is there after a power cut, and goes on from that.

        Args:
            tails: `[E]` the steps that had not given way when the power was cut.
        """
        self.check(directory, is_whole=False)
        index = directory.index
        for e, lane in enumerate(self.lanes):
            tail, cursor = int(index.tails[e]), int(index.cursors[e])
            flushed_tail, flushed = self.durable[e]
            oldest = max(flushed_tail, int(tails[e]))
            if oldest < flushed:
                assert tail <= oldest, (e, tail, cursor, oldest, flushed)
                assert flushed <= cursor
            lane.cut_at(cursor)
        self.flushed(index)


def _same(views, last):
    return all(
        torch.equal(views[key], value) for key, value in last.items() if key == "observation"
    )


def make(path, rng, *, fresh=False):
    """Makes a small directory by chance, and its history."""
    k = int(rng.choice([1, 1, 3]))
    E, T = int(rng.integers(1, 4)), int(rng.choice([2, 5, 40, 150]))
    entries = E * (5 * k + 2 + int(rng.integers(0, (k + 1) * T))) if rng.random() < 0.3 else None
    layout = layout_of(k)
    directory = Directory.create(path, layout, E * T, E, max_entries=entries, fresh=fresh)
    return directory, History(rng, layout, E)
