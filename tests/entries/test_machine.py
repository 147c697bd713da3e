"""Streams against a plain list of the written rows, over random operations and interrupted writes."""

# Letters as in the package.
# ruff: noqa: N806, B007, PERF403

import shutil
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from entries import fill
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tensordict import unravel_key

from trl_storages.directory import Directory
from trl_storages.entries import (
    Arena,
    Block,
    DeviceEntries,
    FrameStack,
    Layout,
    arena_sizes,
)
from trl_storages.entries.frames import host_entries
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import checksums, entries, frames

#: A smaller counterexample is looked for by the long search, as it takes minutes.
QUICK = [Phase.explicit, Phase.generate]
CPU = torch.device("cpu")
#: Fields that have a next value, and those of the step.
OBSERVED = {
    "observation": (torch.float32, (3,)),
    ("agents", "view"): (torch.int16, (1, 3)),
    "achieved_goal": (torch.float64, (1,)),
    "desired_goal": (torch.float64, (1,)),
    "hidden": (torch.bfloat16, (2,)),
    "pixels": (torch.uint8, (2, 1)),
    "camera": (torch.uint8, (3, 7)),
}
STEPS = {
    "action": (torch.float32, (3,)),
    "phase": (torch.complex128, (1,)),
    ("next", "reward"): (torch.float64, (1,)),
    ("next", "done"): (torch.bool, (1,)),
    ("next", "info", "count"): (torch.int8, ()),
}


def next_of(key: Any) -> Any:
    return unravel_key(("next", key))


def sample_values(rng, dtype, shape):
    """Few values, so that rows go on with others by chance too, and some that compare as bits alone."""
    values = rng.integers(0, 2, shape).astype(float)
    if dtype is torch.uint8:
        values *= rng.choice([1, 255])
    if dtype.is_floating_point or dtype.is_complex:
        odd = rng.random(shape) < 0.1
        values = np.where(odd, rng.choice([-0.0, np.nan, -np.nan], shape), values)
    return torch.from_numpy(np.asarray(values)).to(dtype)


def same_bits(one, other):
    one, other = (it.contiguous().reshape(-1).view(torch.uint8) for it in (one, other))
    return torch.equal(one, other)


class Lane:
    """What was written to a lane: its rows, the number of the episode of each, and its last one's end."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []
        self.episodes: list[int] = []
        self.done: list[bool] = []
        self.last: dict[Any, torch.Tensor] | None = None
        self.is_open = False


class Machine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32 - 1))
    def make(self, seed):
        self.rng = rng = np.random.default_rng(seed)
        names = [key for key in OBSERVED if key not in ("pixels", "camera")]
        chosen = [key for key in names if rng.random() < 0.5]
        k = int(rng.integers(2, 5)) if rng.random() < 0.4 else 1
        fields: dict[Any, Any] = {}
        for key in chosen:
            fields[key] = fields[next_of(key)] = OBSERVED[key]
        if k > 1:
            stack = FrameStack(k, int(rng.choice([0, -1])))
            shape = (2 * k, 3) if stack.dim == 0 else (3, k)
            fields["pixels"] = fields["next", "pixels"] = (torch.uint8, shape, stack)
        for key, kind in STEPS.items():
            if key == ("next", "done") or rng.random() < 0.6:
                fields[key] = kind
        # Frames are compressed, or not.
        keyframes = int(rng.choice([0, 0, 0, 1, 2, 5, 16]))
        if keyframes and (k == 1 or rng.random() < 0.5):
            chosen.append("camera")
            fields["camera"] = fields["next", "camera"] = OBSERVED["camera"]
        self.layout = layout = Layout(fields, keyframes=keyframes)
        seen = [*chosen, *(["pixels"] if k > 1 else [])]
        self.observed = seen
        self.decides = (
            ["observation"]
            if "observation" in seen
            else [it for it in seen if it != "desired_goal"]
        )
        E, T = int(rng.integers(1, 5)), int(rng.choice([2, 3, 5, 12, 40, 150]))
        self.small = rng.random() < (0.6 if keyframes else 0.3)
        least = 4 * k + layout.depth + 2
        entries = E * int(rng.integers(least, least + (k + 1) * T)) if self.small else None
        # Rows of files never begin at slot 0 again.
        self.path, self.has_file = tempfile.mkdtemp(), rng.random() < 0.3
        self.forms = []
        for is_on_device in [False] if keyframes else [False, True, True]:
            index = EpisodeIndex(E * T, E, stack=k, depth=layout.depth, max_entries=entries)
            if is_on_device:
                rows = DeviceEntries(layout, index, CPU)
            else:
                rows = host_entries(layout, index, Arena(**arena_sizes(layout, index)))
            self.forms.append((index, rows))
        if self.has_file:
            self.directory = Directory.create(self.path, layout, E * T, E, max_entries=entries)
            self.forms.append((self.directory.index, self.directory.entries))
        self.E, self.T, self.k = E, T, k
        self.lanes = [Lane() for _ in range(E)]
        self.room = np.zeros(E, np.int64)  # what writes that were cut off made room for
        self.goes_on = rng.choice([0.0, 0.5, 0.95, 1.0])
        self.ends = rng.choice([0.0, 0.05, 0.7])

    def teardown(self):
        shutil.rmtree(self.path)

    def values(self, last):
        """One row that goes on from `last`, or from a part of it, or does not."""
        rng, row = self.rng, {}
        for key, (dtype, shape, *stack) in self.layout.described.items():
            if key in self.observed and last is not None and rng.random() < self.goes_on:
                row[key] = last[key]
            else:
                row[key] = sample_values(rng, dtype, tuple(shape))
        for key in self.observed:
            dtype, shape, *stack = self.layout.described[key]
            new = sample_values(rng, dtype, tuple(shape))
            if dtype is torch.uint8:  # small changes, too
                kept = torch.from_numpy(rng.random(tuple(shape)) < rng.choice([0, 0.9, 1]))
                new = torch.where(kept, row[key], new)
            if stack:
                before, after = (stack[0].frames(it, shape) for it in (row[key], new))
                new = stack[0].stacks(torch.cat([before[1:], after[-1:]]), shape).clone()
            row[next_of(key)] = new
        return row

    def make_block(self, counts):
        """A block with these numbers of rows of lanes, and the lanes as they are behind it."""
        rng = self.rng
        total = int(sum(counts))
        words = torch.zeros(total, self.layout.row_words, dtype=torch.int64)
        done, cut = rng.random(total) < self.ends, rng.random(total) < 0.05
        behind, i = [], 0
        for lane, count in zip(self.lanes, counts, strict=True):
            last, added = lane.last, []
            for _ in range(count):
                row = self.values(last)
                row["next", "done"] = torch.tensor([bool(done[i])])
                for key, value in row.items():
                    fill(self.layout, key, words[i : i + 1], value[None])
                goes_on = last is not None and all(
                    same_bits(row[key], last[key]) for key in self.decides
                )
                last = {key: row[next_of(key)] for key in self.observed}
                added.append((i, goes_on, last))
                i += 1
            behind.append(added)
        # Lanes without rows are named, or not.
        named = (counts > 0) | (rng.random(self.E) < 0.5) | (total == 0)
        offsets = np.concatenate([[0], np.cumsum(counts[named])]).astype(np.int64)
        return Block(np.flatnonzero(named), offsets, words.numpy(), done, cut), behind

    @staticmethod
    def copy_of(block, as_tensors):
        arrays = [it.copy() for it in block[2:]]
        arrays = [torch.from_numpy(it) for it in arrays] if as_tensors else arrays
        return Block(block.lanes.copy(), block.offsets.copy(), *arrays)

    def counts_up_to(self, most):
        shape = self.rng.integers(0, most + 1, self.E)
        return np.where(self.rng.random(self.E) < 0.3, 0, shape)

    @rule(cuts_gaps=st.booleans(), size=st.sampled_from(["step", "some", "part", "wide"]))
    def write(self, cuts_gaps, size):
        most = self.forms[0][0].most_steps
        top = {"step": 1, "some": min(most, 5), "part": most, "wide": min(3 * self.T // 2, 200)}[
            size
        ]
        counts = self.counts_up_to(top)
        block, behind = self.make_block(counts)
        results = []
        for number, (index, rows) in enumerate(self.forms):
            as_tensors = number == 2 and isinstance(rows, DeviceEntries)
            copied = self.copy_of(block, as_tensors)
            results.append(rows.append(copied, cuts_gaps=cuts_gaps, most_gaps=-1)[1])
            for part in copied.parts(most):
                slots, _ = rows.append(part, cuts_gaps=cuts_gaps)
                assert len(slots) == len(part.words)
        gaps = self.took(block, self.lanes, behind, cuts_gaps)
        assert results == [gaps] * len(self.forms)

    @staticmethod
    def took(block, lanes, behind, cuts_gaps):
        """Some lanes took their rows of a block; returns how many gaps they have."""
        gaps = 0
        for lane, added in zip(lanes, behind, strict=True):
            for i, goes_on, last in added:
                is_gap = lane.is_open and not block.cut[i] and not goes_on
                gaps += is_gap
                begins = not lane.is_open or block.cut[i] or (is_gap and cuts_gaps)
                number = lane.episodes[-1] if lane.episodes else -1
                lane.rows.append(block.words[i].copy())
                lane.episodes.append(number + begins)
                lane.done.append(bool(block.done[i]))
                lane.last, lane.is_open = last, not block.done[i]
        return gaps

    @rule(
        stores=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
        after=st.sampled_from(["room", "enter", "copy", "publish"]),
    )
    def cut_off(self, stores, after):
        """A write makes only some of its stores: only published lanes contain their rows."""
        counts = self.counts_up_to(self.forms[0][0].most_steps)
        block, behind = self.make_block(counts)
        lanes, offsets, words, done, cut = self.copy_of(block, False)
        chance = np.random.default_rng(self.rng.integers(2**32)).random
        made = [chance(it.shape) < stores for it in self.forms[0][0].tables[:4]]
        has_room = (chance(self.E) < stores) | (after != "room")
        copied = (chance(len(words)) < stores) | (after == "publish")
        first = int(stores * len(lanes)) if after == "publish" else 0  # so many lanes are published
        for index, rows in self.forms:
            tables, n, is_on_device = index.tables, len(words), isinstance(rows, DeviceEntries)
            is_compressed, continuity = bool(self.layout.keyframes), np.empty(n, np.uint8)
            arguments = lanes, offsets, words, continuity
            if is_on_device:
                continuity, _, _, last = rows._compare(block)
            elif is_compressed:
                frames.update_tips(tables, rows.store, lanes)
                store = frames.Store(*rows.store)
                entries.compare_with_tips(tables, store.tips, store.sizes, *arguments)
            else:
                entries.compare(tables, rows.store, *arguments)
            entry, slots, numbers = np.empty((3, n), np.int64)
            saved = [it.copy() for it in tables[:5]]
            entries.make_room(tables, lanes, offsets, continuity, entry)
            if after == "room":
                np.copyto(tables[4], saved[4], where=~has_room[:, None])
                continue
            flags = done, cut
            entries.enter(tables, lanes, offsets, continuity, entry, *flags, False, slots, numbers)
            if after == "enter":
                for table, before, is_made in zip(tables, saved, made, strict=False):
                    np.copyto(table, before, where=~is_made)
                continue
            part = words[copied], continuity[copied], entry[copied]
            if is_on_device:
                rows._copy_in(torch.from_numpy(part[0]), torch.from_numpy(part[2]))
            elif is_compressed:
                begins = np.append(0, copied.cumsum())[offsets]
                frames.copy_in(rows.store, lanes, begins, *part, rows.checksum_tables)
            else:
                entries.copy_in(rows.store, *part, 0, len(part[0]))
            if self.has_file and rows is self.directory.entries:
                before, tables_of_file = rows.checksums.copy(), rows.checksum_tables
                sizes = self.layout.observation_words, self.k
                if is_compressed:
                    sizes = self.layout.observation_words - self.layout.record_words + 1, self.k
                    checksums.write_step_checksums(
                        rows.entries, *sizes, tables_of_file, entry, numbers
                    )
                else:
                    checksums.write_checksums(
                        rows.entries, *sizes, tables_of_file, continuity, entry, numbers
                    )
                if after == "copy":
                    np.copyto(rows.checksums, before, where=chance(before.shape) >= stores)
            entries.publish(tables, lanes[:first], offsets[: first + 1])
            if is_on_device:
                has_rows = lanes[:first][np.diff(offsets)[:first] > 0]
                rows._set_tips(has_rows, last[: len(has_rows)])
        for e, lane in enumerate(self.lanes):  # no more than its rows need
            if counts[e] and has_room[e]:
                self.room[e] = max(self.room[e], len(lane.rows) + counts[e] - self.T)
        named = lanes[:first]
        self.took(block, [self.lanes[e] for e in named], [behind[e] for e in named], False)
        if self.has_file:  # its process was killed
            self.forms.pop()
            self.directory = None
            self.directory = Directory.open(self.path)
            self.forms.append((self.directory.index, self.directory.entries))

    @rule(keep=st.sampled_from([0, 1, 3]))
    def empty(self, keep):
        keep = max(keep, int(self.has_file))
        for index, _ in self.forms:
            index.evict(keep) if keep else index.reset()
        for e, lane in enumerate(self.lanes):
            if keep:
                self.room[e] = max(self.room[e], len(lane.rows) - keep)
            else:
                self.lanes[e], self.room[e] = Lane(), 0

    @rule(some=st.booleans())
    def end_episodes(self, some):
        lanes = np.flatnonzero(self.rng.random(self.E) < 0.5) if some else None
        for index, _ in self.forms:
            index.end_episodes(lanes)
        for e, lane in enumerate(self.lanes):
            lane.is_open = lane.is_open and lanes is not None and e not in lanes

    @invariant()
    def agrees(self):
        if not hasattr(self, "forms"):
            return
        E, T = self.E, self.T
        tails = self.forms[0][0].tails.copy()
        for e, lane in enumerate(self.lanes):
            assert tails[e] >= max(len(lane.rows) - T, 0)
            assert not lane.rows or tails[e] < len(lane.rows)
            if not self.small:
                assert tails[e] == max(len(lane.rows) - T, int(self.room[e]), 0)
        steps = [(e, s) for e in range(E) for s in range(int(tails[e]), len(self.lanes[e].rows))]
        slots = torch.tensor([e * T + s % T for e, s in steps], dtype=torch.int64)
        expected = np.array([self.lanes[e].rows[s] for e, s in steps])
        for index, rows in self.forms:
            index.validate()
            assert index.tails.tolist() == tails.tolist()
            assert index.cursors.tolist() == [len(lane.rows) for lane in self.lanes]
            assert index.is_open.tolist() == [lane.is_open for lane in self.lanes]
            assert torch.equal(index.live_slots(), slots)
            self.check_episodes(index, tails)
            if steps:
                places = rows.entries_of(slots)
                assert np.array_equal(rows.gather(places, places).numpy(), expected)
        if self.has_file:
            self.directory.validate()

    def check_episodes(self, index, tails):
        expected = []
        for e, lane in enumerate(self.lanes):
            tail = int(tails[e])
            for number in sorted(set(lane.episodes[tail:])):
                steps = [s for s, episode in enumerate(lane.episodes) if episode == number]
                first, last = max(steps[0], tail), steps[-1]
                slot, is_whole = e * self.T + first % self.T, steps[0] == first
                expected.append((slot, last - first + 1, e, lane.done[last], is_whole))
        listed = index.table()
        columns = [listed[key].tolist() for key in ("first", "length", "lane", "finished", "whole")]
        assert [*zip(*columns, strict=True)] == expected


TestStreams = pytest.mark.requirement("stored-once")(Machine.TestCase)
TestStreams.settings = settings(max_examples=300, stateful_step_count=12, phases=QUICK)


@pytest.mark.search
class TestStreamsAtLength(Machine.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=30, derandomize=False)


def test_index_whose_steps_share_an_entry_is_damaged():
    index, never = EpisodeIndex(4, max_entries=7), np.zeros(4, bool)
    places = np.array([2, 3, 5, 0])
    index.restore_lane(0, np.arange(4), places, never, never, first=0, tail=0)
    index.validate()
    index.where[0] = 1  # which holds the next observation of the newest step
    with pytest.raises(RuntimeError, match="share"):
        index.validate()
