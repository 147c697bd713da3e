"""The ring of both backends, against the plain-Python model and against each other, bit for bit."""

import pickle
from itertools import cycle, islice

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from oracles import RingOracle
from scipy import stats

from trl_storages.kernels import device, host
from trl_storages.kernels.tables import BOUNDARIES, GOAL_KINDS, GOAL_STRATEGIES, Block

BACKENDS = pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])
CPU = torch.device("cpu")
HIGHEST = 2**63 - 1


def append(ring, done, cut, lanes=None):
    """Takes steps of which nothing is stored; returns their slots as `[L, S]`."""
    kernels = host if isinstance(ring, host.Ring) else device
    places = np.zeros((0, 2), np.int64)
    done = done.contiguous()
    rows = kernels.NewRows([], places, done.numel(), 0, done, done.device)
    cut = None if cut is None else cut.contiguous()
    return ring.append(rows, Block(done.shape[1], lanes, cut=cut)).view(done.shape)


def flags(rows):
    return torch.tensor(rows, dtype=torch.bool)


def noise_of(seed, size):
    return torch.empty(size, dtype=torch.int64).random_(
        generator=torch.Generator().manual_seed(seed)
    )


def below(noise, bound):
    return noise * bound >> 63


def kinds_of(names):
    """How goals are drawn, as numbers; None stands for a row without a drawn goal."""
    return torch.tensor([GOAL_KINDS.get(name, 0) for name in names], dtype=torch.uint8)


def both(rings, ask):
    """The one answer of both rings, whatever its form."""
    answers = [ask(ring) for ring in rings]
    parts = [answer if isinstance(answer, tuple) else (answer,) for answer in answers]
    for one, other in zip(*parts, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    return answers[0]


class RingMachine(RuleBasedStateMachine):
    """Writes of every shape; every answer is compared after each of them."""

    @initialize(
        num_envs=st.integers(1, 4),
        places=st.integers(1, 7),
        over=st.integers(0, 3),
        spare_steps=st.sampled_from([0, 1, 3, None]),
    )
    def start(self, num_envs, places, over, spare_steps):
        size = num_envs * places + min(over, num_envs - 1)
        spare_steps = places if spare_steps is None else spare_steps
        self.rings = [
            kernels.Ring(size, num_envs, CPU, spare_steps=spare_steps) for kernels in (host, device)
        ]
        self.oracle, self.seed = RingOracle(size, num_envs, spare_steps), 0

    @rule(data=st.data())
    def append(self, data):
        num_envs, places = self.oracle.num_envs, self.oracle.places
        lanes = data.draw(
            st.none()
            | st.lists(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs, unique=True)
        )
        num_lanes = num_envs if lanes is None else len(lanes)
        steps = data.draw(st.just(1) | st.integers(1, 2 * places + 3))
        row = st.lists(st.sampled_from([False, False, False, True]), min_size=steps, max_size=steps)
        block = st.lists(row, min_size=num_lanes, max_size=num_lanes)
        done, cut = data.draw(block), data.draw(st.none() | block)
        written = torch.arange(num_envs) if lanes is None else torch.tensor(lanes)
        named = both(self.rings, lambda ring: ring.next_slots(written, steps))
        slots = both(
            self.rings,
            lambda ring: append(
                ring,
                flags(done),
                None if cut is None else flags(cut),
                None if lanes is None else written,
            ),
        )
        assert torch.equal(slots, named)
        lost = max(steps - places, 0)
        expected = self.oracle.append(done, cut, lanes)
        assert slots.tolist() == [[-1] * lost + lane[lost:] for lane in expected]

    @rule(data=st.data())
    def evict(self, data):
        tails = self.rings[0].tails.tolist()
        for lane, history in enumerate(self.oracle.lanes):
            tails[lane] = data.draw(st.integers(tails[lane], len(history)))
        both(self.rings, lambda ring: ring.evict(torch.tensor(tails)) or ring.tails)
        self.oracle.evict(tails)

    @invariant()
    def knows_the_same(self):
        both(self.rings, lambda ring: ring.lanes)
        live = [*self.oracle.live()]
        both(self.rings, lambda ring: ring.episode[live])
        both(self.rings, lambda ring: ring.span(torch.tensor(live, dtype=torch.int64)))
        assert self.rings[0].fill.sum() == len(live)

    @invariant()
    def ages_and_extents(self):
        rows = self.oracle.by_age()
        ranks = torch.arange(len(rows))
        slots = both(self.rings, lambda ring: ring.slots_by_age(ranks))
        assert slots.tolist() == [self.oracle.slot(row) for row in rows]
        assert both(self.rings, lambda ring: ring.ages(slots)).tolist() == ranks.tolist()
        behind, ahead = both(self.rings, lambda ring: ring.extent(slots))
        assert behind.tolist() == [self.oracle.behind(row) for row in rows]
        assert ahead.tolist() == [self.oracle.ahead(row) for row in rows]

    @invariant()
    def windows_and_sequences(self):
        rows = self.oracle.by_age()
        slots = torch.tensor([self.oracle.slot(row) for row in rows], dtype=torch.int64)
        for num_rows in (1, 3):
            windows, lengths = both(
                self.rings, lambda ring, num_rows=num_rows: ring.windows(slots, num_rows)
            )
            assert windows.shape == (num_rows, len(rows))
            for column, row, length in zip(windows.T.tolist(), rows, lengths.tolist(), strict=True):
                onward = [other for other in self.oracle.episode(row) if other.step >= row.step]
                expected = [self.oracle.slot(other) for other in onward[:num_rows]]
                assert length == len(expected)
                assert column == expected + expected[-1:] * (num_rows - length)
        for boundary in BOUNDARIES:
            found = both(
                self.rings,
                lambda ring, boundary=boundary: ring.sequences(slots, 2, 5, boundary),
            )
            for row, *answer in zip(rows, *(part.tolist() for part in found), strict=True):
                chosen, valid = self.oracle.sequence(row, 2, 3, boundary)
                begins = [self.oracle.begins(other) for other in chosen]
                assert answer == [[self.oracle.slot(other) for other in chosen], valid, begins]

    @invariant()
    def draws(self):
        rows = self.oracle.by_age()
        if not rows:
            return
        self.seed += 1
        noise = noise_of(self.seed, (2, 8))
        noise[0, :2] = torch.tensor([0, HIGHEST])
        numbers = noise.tolist()
        for window in (None, 1, len(rows) - len(rows) // 2, len(rows), len(rows) + 3):
            count = len(rows) if window is None else min(window, len(rows))
            as_tensor = None if window is None else torch.tensor(window)
            slots = both(self.rings, lambda ring, window=as_tensor: ring.draw(noise[0], window))
            assert slots.tolist() == [
                self.oracle.slot(rows[below(number, count)]) for number in numbers[0]
            ]
            if window is not None:
                starts, stops = both(
                    self.rings,
                    lambda ring, window=as_tensor: ring.newest_ranges(window, ring.ring_steps + 1),
                )
                lengths = (stops - starts).view(2, -1).sum(0)
                lanes = torch.tensor([row.lane for row in rows[:count]])
                assert torch.equal(lengths, torch.bincount(lanes, minlength=self.oracle.num_envs))
        live = self.oracle.live()
        slots = both(self.rings, lambda ring: ring.draw(noise[0]))
        # All in one way, and each in another.
        for strategies in [*zip(GOAL_STRATEGIES), GOAL_STRATEGIES]:
            names = [*islice(cycle([*strategies, None]), len(slots))]
            kinds = kinds_of(names)
            # Between two steps, and beyond any end.
            steps = (noise[1] % 9).double() / 2
            steps[::5] = torch.inf
            goals, mask = both(
                self.rings,
                lambda ring, which=(noise[1], kinds, strategies, steps): ring.goals(slots, *which),
            )
            assert mask.tolist() == [name is not None for name in names]
            numbers = zip(noise[1].tolist(), steps.tolist(), strict=True)
            drawn = zip(slots.tolist(), goals.tolist(), numbers, names, strict=True)
            for slot, goal, (number, step), name in drawn:
                assert goal == self.oracle.slot(self.goal(live[slot], number, step, name, rows))

    def goal(self, row, number, steps, name, rows):
        """The row that lends its goal, by its definition."""
        if name is None:
            return row
        if name == "geometric":
            return self.oracle.goals(row, "future")[int(min(steps, self.oracle.ahead(row)))]
        candidates = rows if name == "random" else self.oracle.goals(row, name)
        return candidates[below(number, len(candidates))]


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=50, stateful_step_count=8)


@BACKENDS
@pytest.mark.parametrize("lanes", [None, [2, 0]])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_rows_are_copied_to_where_the_index_has_them(kernels, lanes, is_ordered):
    """Over the end of the ring, and of more steps than find room the newest only."""
    ring, table = kernels.Ring(13, 3, CPU), torch.zeros(13, 2, dtype=torch.int64)
    expected = table.clone()
    for num_steps in (1, 3, 2, 6):
        rows = torch.randint(99, (len(lanes or "all"), num_steps, 2))
        done = torch.zeros(rows.shape[:2], dtype=torch.bool)
        new = kernels.NewRows([rows], np.array([[0, 16]]), done.numel(), 2, done, CPU)
        order = torch.randperm(done.numel()).view(done.shape) if is_ordered else None
        to = kernels.RowTable(table)
        slots = ring.append(new, Block(num_steps, lanes, order), to)
        kept = slots >= 0
        assert kept.sum() == min(num_steps, 4) * len(rows)
        expected[slots[kept]] = rows.flatten(0, 1)[kept]
        assert torch.equal(table, expected)


def test_nothing_is_appended_after_a_gap():
    """Rows of an observation and the next one, of which the first must be the next one before it."""
    ring, table = host.Ring(8, 1, CPU), torch.zeros(8, 2, dtype=torch.int64)

    def append(*rows):
        done = torch.zeros(1, len(rows), dtype=torch.bool)
        places = np.array([[0, 8], [8, 8]])
        fields = [torch.tensor(values) for values in zip(*rows, strict=True)]
        new = host.NewRows(fields, places, len(rows), 2, done, CPU)
        return ring.append(new, Block(len(rows)), host.RowTable(table), pairs=np.array([[0, 1]]))

    assert append([1, 2], [2, 3]).tolist() == [0, 1]
    assert append([4, 5]) is None
    assert append([3, 4], [5, 6]) is None
    assert append([3, 4]).tolist() == [2]
    assert table[:4].tolist() == [[1, 2], [2, 3], [3, 4], [0, 0]]


@BACKENDS
@pytest.mark.parametrize("num_rows", [2**31 - 1, 2**31, 2**40 + 7])
def test_draws_below_any_bound(kernels, num_rows):
    """Scaled below 2^31, by remainder beyond; never through floats, which would miss most rows."""
    ring = kernels.Ring(8, 1, CPU)
    # As large as no machine's memory: draws look at cursors only.
    ring.capacity = ring.steps_per_lane = ring.ring_steps = num_rows
    ring.lanes[0, 0] = num_rows
    noise = noise_of(3, 50)
    noise[:2] = torch.tensor([0, HIGHEST])
    draw = (lambda x: below(x, num_rows)) if num_rows < 2**31 else (lambda x: x % num_rows)
    expected = [num_rows - 1 - draw(number) for number in noise.tolist()]
    assert ring.draw(noise).tolist() == expected


@BACKENDS
@pytest.mark.parametrize("slot", [6, -1, 2**40])
def test_a_slot_beyond_the_ring(kernels, slot):
    ring = kernels.Ring(6, 2, CPU)
    append(ring, flags([[0, 0, 1]] * 2), None)
    slots = torch.tensor([0, slot])
    for ask in (
        lambda: ring.windows(slots, 2),
        lambda: ring.sequences(slots, 1, 3, "cross"),
        lambda: ring.goals(slots, noise_of(0, 2), kinds_of(["future"] * 2), ("future",)),
    ):
        with pytest.raises(IndexError):
            ask()


@BACKENDS
@pytest.mark.parametrize("strategy", [None, "future", "final", "episode", "random"])
def test_draws_are_uniform(kernels, strategy):
    """Over lanes of unequal fill, one of which has wrapped, with 20,000 draws."""
    ring, oracle = kernels.Ring(36, 3, CPU), RingOracle(36, 3)
    for done, lane in (([0, 0, 1] * 7, 2), ([0] * 7, 0), ([1], 1)):
        append(ring, flags([done]), None, torch.tensor([lane]))
        oracle.append([done], None, [lane])
    anchor = oracle.by_age()[9]
    drawn = ring.draw(noise_of(1, 20_000))
    candidates = [*oracle.live()]
    if strategy is not None:
        anchors = torch.full_like(drawn, oracle.slot(anchor))
        kinds = kinds_of([strategy] * 20_000)
        drawn, _ = ring.goals(anchors, noise_of(2, 20_000), kinds, (strategy,))
        candidates = [oracle.slot(row) for row in oracle.goals(anchor, strategy)]
    counts = torch.bincount(drawn, minlength=36)
    assert counts.nonzero().squeeze(1).tolist() == sorted(candidates)
    if len(candidates) > 1:
        assert stats.chisquare(counts[candidates]).pvalue > 1e-4


def test_copies_and_shared_tables_are_written_where_they_are():
    ring = host.Ring(6, 1, CPU)
    append(ring, flags([[0, 0]]), None)
    copy = pickle.loads(pickle.dumps(ring))
    append(copy, flags([[1]]), None)
    assert (ring.fill.item(), copy.fill.item()) == (2, 3)
    ring.share_memory_()
    append(ring, flags([[0, 0, 0]]), None)
    assert ring.fill.item() == 5
    assert ring.lanes.is_shared()


@pytest.mark.parametrize("num_envs", [1, 3])
def test_nothing_waits_for_a_gpu(gpu, num_envs):
    ring = device.Ring(24, num_envs, gpu, spare_steps=5)
    for num_steps in (1, 5, 40):
        done = torch.zeros(num_envs, num_steps, dtype=torch.bool, device=gpu)
        append(ring, done, None)
        append(ring, done, done)
    append(ring, done[:1], None, torch.zeros(1, dtype=torch.int64, device=gpu))
    ring.evict(ring.cursors - 3)
    noise = torch.empty(2, 8, dtype=torch.int64, device=gpu).random_()
    window = ring.fill.sum().clamp(max=5)
    for newest in (None, window):
        slots = ring.draw(noise[0], newest)
        kinds = torch.full_like(slots, 2, dtype=torch.uint8)
        answers = [*ring.goals(slots, noise[1], kinds, GOAL_STRATEGIES, noise[0].double())]
        for boundary in BOUNDARIES:
            answers += ring.sequences(slots, 1, 4, boundary)
        answers += [*ring.windows(slots, 3), *ring.extent(slots)]
        ages = ring.ages(slots)
        answers += [ages, ring.slots_by_age(ages)]
        answers += ring.newest_ranges(window, 20)
        assert all(answer.device == gpu for answer in answers)


def test_the_loops_take_slots_that_lie_apart():
    """Every second slot of a caller is as good as slots in one piece."""
    rings = [kernels.Ring(12, 2, CPU) for kernels in (host, device)]
    both(rings, lambda ring: append(ring, flags([[0, 1], [0, 0], [0, 0], [1, 0]]).T, None))
    slots, noise = torch.arange(8)[1::2], noise_of(0, 4)
    both(rings, lambda ring: ring.goals(slots, noise, kinds_of(["episode"] * 4), ("episode",)))
    both(rings, lambda ring: ring.windows(slots, 3))
    both(rings, lambda ring: ring.sequences(slots, 1, 3, "pad"))
