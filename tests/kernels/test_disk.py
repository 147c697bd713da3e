"""Marks, checksums, commits and sealed priorities of both backends, against plain Python integers."""

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_storages.kernels import device, host
from trl_storages.kernels.host import disk as host_disk
from trl_storages.kernels.marks import is_of, pack_marks
from trl_storages.kernels.tables import Block, steps_between

KERNELS = (host, device)
BACKENDS = pytest.mark.parametrize("kernels", KERNELS, ids=["host", "device"])
CPU = torch.device("cpu")
ALL = 2**64 - 1
words = st.integers(-(2**63), 2**63 - 1)


def ints(values):
    return torch.tensor(values, dtype=torch.int64)


def append(ring, done, cut, lanes):
    """Takes steps of which nothing is stored; returns their slots as `[L, S]`."""
    kernels = host if isinstance(ring, host.Ring) else device
    rows = kernels.NewRows([], np.zeros((0, 2), np.int64), done.numel(), 0, done, done.device)
    return ring.append(rows, Block(done.shape[1], lanes, cut=cut)).view(done.shape)


def splitmix(state):
    """The last steps of the generator, on an integer of 64 bits."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & ALL
    state = (state ^ state >> 27) * 0x94D049BB133111EB & ALL
    return state ^ state >> 31


def factor(position):
    return splitmix((position + 1) * 0x9E3779B97F4A7C15 & ALL) | 1


def checksum(row, mark, slot):
    total = 0x9E3779B97F4A7C15
    for position, word in enumerate([mark, slot, *row]):
        total += factor(position) * ((word & ALL) ^ (word & ALL) >> 31)
    total = splitmix(total & ALL)
    return total - 2**64 if total >> 63 else total


def both(ask):
    one, other = (ask(kernels) for kernels in KERNELS)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (one, other)), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    return one


class Table:
    """Rows of a ring with marks in the memory of one backend."""

    def __init__(self, kernels, num_slots, num_words=3):
        self.kernels = kernels
        self.rows = torch.zeros(num_slots, num_words, dtype=torch.int64)
        self.marks = torch.zeros(num_slots, 2, dtype=torch.int64)
        self.marked = kernels.MarkedRows(self.rows, self.marks)

    def store(self, slots, rows, marks):
        slots, rows, marks = ints(slots), ints(rows), ints(marks)
        self.rows[slots], self.marks[slots, 0] = rows, marks
        self.marks[slots, 1] = self.kernels.checksums(rows, marks, slots)


def test_the_first_constants_are_those_of_splitmix64():
    """The generator's published numbers from state 0."""
    assert [factor(i) for i in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1]


@given(st.integers(0, 9), st.integers(0, 5), st.data())
def test_checksums_are_the_sums_they_say(num_words, num_rows, data):
    rows = [
        data.draw(st.lists(words, min_size=num_words, max_size=num_words)) for _ in range(num_rows)
    ]
    marks, slots = (data.draw(st.lists(words, min_size=num_rows, max_size=num_rows)) for _ in "ab")
    block = ints(rows).reshape(num_rows, num_words)
    found = both(lambda kernels: kernels.checksums(block, ints(marks), ints(slots)))
    assert found.tolist() == [*map(checksum, rows, marks, slots)]


@pytest.mark.parametrize("flipped", [2**63 - 2**64, 2**62, 2**31, 2**62 + 2**30, 1])
def test_changes_of_the_same_bits_do_not_cancel(flipped):
    """Signs, or the doubling of equal numbers: in any one, two or three words of a row."""
    row = torch.arange(24) * 0x0123456789ABCDEF
    places = torch.arange(24)
    chosen = [places[:, None], torch.combinations(places, 2), torch.combinations(places, 3)]
    changed = [row.repeat(len(some), 1) for some in chosen]
    for rows, some in zip(changed, chosen, strict=True):
        rows.scatter_(1, some, rows.gather(1, some) ^ flipped)
    changed = torch.cat([row[None], *changed])
    zero = torch.zeros(len(changed), dtype=torch.int64)
    assert len(host.checksums(changed, zero, zero).unique()) == len(changed)


def test_every_bit_of_a_row_its_mark_and_slot_counts():
    bits = torch.ones(64, dtype=torch.int64) << torch.arange(64)
    plain = torch.zeros(64, 1, dtype=torch.int64)
    zero = torch.zeros(64, dtype=torch.int64)
    sums = [
        host.checksums(plain, zero, zero)[:1],
        host.checksums(bits[:, None], zero, zero),
        host.checksums(plain, bits, zero),
        host.checksums(plain, zero, bits),
    ]
    assert len(torch.cat(sums).unique()) == 3 * 64 + 1


@given(st.integers(0, 2**60 - 1), st.booleans(), st.booleans())
def test_marks_say_what_was_packed(step, begins, ends):
    mark = pack_marks(ints([step]), torch.tensor([begins]), torch.tensor([ends]))
    assert mark.item() == step << 3 | ends << 2 | begins << 1 | 1
    assert is_of(mark, ints([step]))
    assert not is_of(mark, ints([step ^ 1]))
    assert not is_of(mark - 1, ints([step]))


@BACKENDS
class TestCheck:
    def test_a_damaged_row_mark_or_checksum(self, kernels):
        for damage in range(5):
            table = Table(kernels, 4)
            table.store([1, 2], [[1, 2, 3], [4, 5, 6]], [11, 21])
            flat = (table.rows if damage < 3 else table.marks)[1]
            flat[damage % 3] ^= 1 << 20
            assert table.marked.check(ints([2, 1])).tolist() == [True, False]

    def test_a_row_of_another_slot(self, kernels):
        table = Table(kernels, 4)
        table.store([1], [[1, 2, 3]], [11])
        table.rows[2], table.marks[2] = table.rows[1], table.marks[1]
        assert table.marked.check(ints([1, 2])).tolist() == [True, False]

    @pytest.mark.parametrize("slot", [4, 2**40])
    def test_a_slot_beyond_the_table(self, kernels, slot):
        with pytest.raises(IndexError):
            Table(kernels, 4).marked.check(ints([slot]))


def next_places(ring, num_steps, lanes):
    """The slots of the next steps of some lanes, but not of more than the ring has."""
    lanes = torch.tensor(lanes)[:, None]
    step = ring.cursors[lanes] + torch.arange(max(num_steps - ring.ring_steps, 0), num_steps)
    return (step % ring.ring_steps * ring.num_envs + lanes).reshape(-1)


class Lanes:
    """Rings and tables of both backends that are written alike, and what each step's mark must be."""

    def __init__(self, num_envs, places, spare_steps):
        self.rings = [
            kernels.Ring(num_envs * places, num_envs, CPU, spare_steps=spare_steps)
            for kernels in KERNELS
        ]
        self.tables = [Table(kernels, self.rings[0].num_slots, 2) for kernels in KERNELS]
        self.commits = [
            kernels.Commits(ints([0]), torch.zeros(2, 2 + 4 * num_envs, dtype=torch.int64))
            for kernels in KERNELS
        ]
        self.marks, self.is_open = [[] for _ in range(num_envs)], [False] * num_envs

    def write(self, done, cut, lanes, priorities=(None, None)):
        which = [*range(len(self.marks))] if lanes is None else lanes
        flags = torch.tensor(done)
        for i, lane in enumerate(which):
            for s, ends in enumerate(done[i]):
                begins = not self.is_open[lane] or (cut is not None and cut[i][s])
                mark = len(self.marks[lane]) << 3 | ends << 2 | begins << 1 | 1
                self.marks[lane].append(mark)
                self.is_open[lane] = not ends
        rows = torch.randint(2**40, (*flags.shape, 2))
        every = self.rings, self.tables, priorities, self.commits
        for ring, table, kept, commits in zip(*every, strict=True):
            before = table.marks.clone()
            cleared = next_places(ring, flags.shape[1], which)
            table.marked.clear(ring, flags.shape[1], lanes, commits)
            some = None if lanes is None else ints(lanes)
            slots = append(ring, flags, None if cut is None else torch.tensor(cut), some)
            written = slots[slots >= 0]
            # Of more steps than find room, those that do not are gone as well.
            before[cleared, 0] = 0
            assert torch.equal(table.marks, before)
            table.rows[written] = rows[slots >= 0]
            table.marked.seal(ring, flags.shape[1], lanes, kept)
            expected = ints([self.marks[lane][-flags.shape[1] :] for lane in which])[slots >= 0]
            assert torch.equal(table.marks[written, 0], expected)
            assert table.marked.check(written).all()
        assert torch.equal(self.tables[0].marks, self.tables[1].marks)
        assert torch.equal(self.tables[0].rows, self.tables[1].rows)


@given(st.data())
def test_marks_of_writes_of_every_shape(data):
    num_envs, places = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    lanes = Lanes(num_envs, places, data.draw(st.sampled_from([0, 1, 3])))
    for _ in range(data.draw(st.integers(1, 5))):
        which = data.draw(
            st.none() | st.lists(st.integers(0, num_envs - 1), min_size=1, unique=True)
        )
        steps = data.draw(st.integers(1, places + 2))
        row = st.lists(st.booleans(), min_size=steps, max_size=steps)
        size = num_envs if which is None else len(which)
        block = st.lists(row, min_size=size, max_size=size)
        lanes.write(data.draw(block), data.draw(st.none() | block), which)
    ring = lanes.rings[0]
    tails, cursors = ring.tails.clone(), ring.cursors.clone()
    tables = dict(zip(KERNELS, lanes.tables, strict=True))
    spans = [*zip(lanes.marks, tails.tolist(), cursors.tolist(), strict=True)]
    expected = [mark for marks, tail, cursor in spans for mark in marks[tail:cursor]]
    lane, step = map(torch.from_numpy, steps_between(tails.numpy(), cursors.numpy()))
    assert step.tolist() == [step for _, tail, cursor in spans for step in range(tail, cursor)]
    at = ring.slots_at(step, lane)
    assert both(lambda kernels: tables[kernels].marks[at, 0]).tolist() == expected
    live = ring.slots_by_age(torch.arange(len(expected)))
    for kernels, one in zip(KERNELS, lanes.rings, strict=True):
        assert tables[kernels].marked.hold(one, live.view(1, -1))
    # One row goes: nobody takes its slot for it.
    slot = data.draw(st.sampled_from(live.tolist()))
    other = data.draw(st.sampled_from([0, 1 << 43 | 1]))
    for kernels, one in zip(KERNELS, lanes.rings, strict=True):
        tables[kernels].marks[slot, 0] = other
        assert not tables[kernels].marked.hold(one, live)


@BACKENDS
def test_what_is_committed_keeps_its_marks(kernels):
    """A write that is done once more, of which some lanes were committed."""
    ring = kernels.Ring(6, 2, CPU, spare_steps=1)
    selector, tables = ints([0]), torch.zeros(2, 2 + 4 * 2, dtype=torch.int64)
    commits, table = kernels.Commits(selector, tables), Table(kernels, 8)
    commits.publish(ints([0, 0, 2, 0, 0, 0, 0, 0, 0]))
    table.marks[:, 0] = 1
    table.marked.clear(ring, 2, None, commits)
    assert table.marks[:, 0].tolist() == [0, 1, 0, 1, 1, 1, 1, 1]


@BACKENDS
@pytest.mark.parametrize("past_steps", [0, 1, 3])
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_rows_are_held_with_those_before_them_in_their_episode(kernels, num_lanes, past_steps):
    """Also with rows that were evicted, as long as they are of the same episode."""
    ring = kernels.Ring(4 * num_lanes, num_lanes, CPU, spare_steps=4)
    rows = torch.zeros(8 * num_lanes, 2, dtype=torch.int64)
    marks = torch.zeros(8 * num_lanes, 2, dtype=torch.int64)
    marked = kernels.MarkedRows(rows, marks, None, None, past_steps)
    # Steps 0 to 4 are an episode, 5 to 9 another one; those from 6 on are live.
    for step in range(10):
        done = torch.full((num_lanes, 1), step == 4)
        ring.append(
            kernels.NewRows([], np.zeros((0, 2), np.int64), num_lanes, 0, done, CPU), Block(1)
        )
        marked.seal(ring, 1)
    whole = marks.clone()
    lane = num_lanes - 1
    for seen in range(6, 10):
        slots = torch.tensor([seen % 8 * num_lanes + lane])
        for lost in range(2, 10):
            marks.copy_(whole)
            marks[lost % 8 * num_lanes + lane] = 0
            is_read = max(seen - past_steps, 5) <= lost <= seen
            assert marked.hold(ring, slots) == (not is_read), (seen, lost)


@BACKENDS
class TestCommits:
    @pytest.fixture
    def commits(self, kernels):
        self.selector, self.tables = ints([0]), torch.zeros(2, 4, dtype=torch.int64)
        return kernels.Commits(self.selector, self.tables)

    def test_the_last_words(self, commits):
        assert commits.read() is None
        for number in range(1, 6):
            commits.publish(ints([number, -number, 2**62]))
            assert commits.number == number
            assert commits.read().tolist() == [number, -number, 2**62]

    def test_the_words_before_stay_until_the_selector_moves(self, commits):
        commits.publish(ints([1, 2, 3]))
        commits.publish(ints([4, 5, 6]))
        self.selector[0] = 1
        assert commits.read().tolist() == [1, 2, 3]
        # Neither is a table of another commit taken for this one.
        self.selector[0] = 3
        assert commits.read() is None

    def test_any_damaged_word(self, commits):
        for place in range(4):
            commits.publish(ints([1, 2, 3]))
            self.tables[commits.number & 1, place] ^= 1
            assert commits.read() is None

    def test_as_many_words_as_there_is_room_for(self, commits):
        with pytest.raises(ValueError, match="as many words"):
            commits.publish(ints([1, 2]))
        assert commits.number == 0


def test_backends_read_each_others_commits():
    selector, tables = ints([0]), torch.zeros(2, 4, dtype=torch.int64)
    one, other = (kernels.Commits(selector, tables) for kernels in KERNELS)
    one.publish(ints([1, 2, 3]))
    assert other.read().tolist() == [1, 2, 3]
    other.publish(ints([4, 5, 6]))
    assert one.read().tolist() == [4, 5, 6]


def sealed(bits, mark):
    """A word of a priority, in Python integers."""
    check = splitmix(
        0x9E3779B97F4A7C15
        + sum(factor(i) * (w ^ w >> 31) for i, w in enumerate((bits, mark & ALL)))
        & ALL
    )
    word = check >> 32 << 32 | bits
    return word - 2**64 if word >> 63 else word


class Priorities:
    """Words of priorities of both backends, of rows with these marks."""

    def __init__(self, marks):
        self.marks = torch.stack([ints(marks), torch.zeros(len(marks), dtype=torch.int64)], 1)
        self.words = {
            kernels: torch.zeros(len(marks) + 1, dtype=torch.int64) for kernels in KERNELS
        }
        self.kept = {
            kernels: kernels.PriorityWords(words, self.marks)
            for kernels, words in self.words.items()
        }

    def put(self, slots, priorities):
        for kept in self.kept.values():
            kept.put(ints(slots), torch.tensor(priorities, dtype=torch.float32))
        return both(lambda kernels: self.words[kernels])

    def get(self, slots):
        return both(lambda kernels: self.kept[kernels].get(ints(slots)).view(torch.int32)).view(
            torch.float32
        )


@given(st.lists(st.tuples(st.floats(width=32), words), min_size=1, max_size=8))
def test_priorities_are_sealed(pairs):
    priorities, marks = map(list, zip(*pairs, strict=True))
    table, slots = Priorities(marks), [*range(len(pairs))]
    bits = torch.tensor(priorities, dtype=torch.float32).view(torch.int32).long() & 2**32 - 1
    assert table.put(slots, priorities)[:-1].tolist() == [*map(sealed, bits.tolist(), marks)]
    found = table.get(slots)
    for value, priority in zip(found.tolist(), priorities, strict=True):
        # What is no priority is never there.
        assert value == priority if 0 <= priority < np.inf else np.isnan(value)
    for damage in (1, 2**40):
        for words in table.words.values():
            words.bitwise_xor_(damage)
        assert table.get(slots).isnan().all()
        for words in table.words.values():
            words.bitwise_xor_(damage)
    table.marks[:, 0] ^= 8
    assert table.get(slots).isnan().all()


def test_the_largest_priority_lies_behind_the_others():
    table = Priorities([8 | 1, 0])
    assert all(kept.is_new for kept in table.kept.values())
    assert table.get([0, 1, 2]).isnan().all()
    table.put([2], [7.5])
    assert table.get([2]).item() == 7.5
    assert not any(kept.is_new for kept in table.kept.values())
    table.put([2], [0.0])
    assert not any(kept.is_new for kept in table.kept.values())


@given(words)
def test_rows_have_their_own_stamps(mark):
    table = Priorities([mark, mark ^ 8, mark ^ 1 << 44])
    found = both(lambda kernels: table.kept[kernels].stamps(ints([0, 1, 2])))
    assert found.min() >= 1
    assert len(found.unique()) == 3


@given(st.data())
def test_priorities_follow_the_rows(data):
    """A ring that is written, and another process that looks at what is said of its rows."""
    num_envs, places = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    lanes = Lanes(num_envs, places, data.draw(st.sampled_from([1, 3])))
    size = lanes.rings[0].num_slots
    raw = [kernels.RawPriorities(size) for kernels in KERNELS]
    kept = [
        kernels.PriorityWords(torch.zeros(size + 1, dtype=torch.int64), table.marks)
        for kernels, table in zip(KERNELS, lanes.tables, strict=True)
    ]
    tails, known = np.zeros(num_envs, np.int64), [torch.full((size,), -1) for _ in KERNELS]
    largest, given_to, seen = 1.0, {}, {}
    for _ in range(data.draw(st.integers(1, 6))):
        steps = data.draw(st.integers(1, places + 2))
        before = lanes.rings[0].cursors.tolist()
        lanes.write([[False] * steps] * num_envs, None, None, kept)
        newest = [
            (lane, step)
            for lane, cursor in enumerate(before)
            for step in range(cursor + steps - min(steps, places), cursor + steps)
        ]
        slots = [step % lanes.rings[0].ring_steps * num_envs + lane for lane, step in newest]
        # They have the largest priority before anybody says so.
        for words in kept:
            assert words.get(ints(slots)).tolist() == [largest] * len(slots)
        touched = [
            words.renew(table, ints([*slots, -1]), ring, tails)
            for words, table, ring in zip(kept, raw, lanes.rings, strict=True)
        ]
        live = {slot: step for slot, (_, step) in zip(slots, newest, strict=True)}
        tail = lanes.rings[0].tails.tolist()
        gone = {slot for slot, step in given_to.items() if step[0] < tail[slot % num_envs]}
        gone -= live.keys()
        for priority, evicted in touched:
            assert float(priority) == largest
            assert gone <= set(evicted.tolist())
            assert not live.keys() & set(evicted.tolist())
        assert torch.equal(touched[0][1], touched[1][1])
        tails[:] = lanes.rings[0].tails
        given_to = {slot: it for slot, it in given_to.items() if slot not in gone}
        given_to |= {slot: (step, largest) for slot, step in live.items()}
        if data.draw(st.booleans()):
            slot = data.draw(st.sampled_from([*given_to]))
            value = data.draw(st.sampled_from([0.5, 2.0, 8.0]))
            largest = max(largest, value) if largest > 1 or value > 1 else largest
            for words, table in zip(kept, raw, strict=True):
                table.report(ints([slot]), torch.tensor([value]), 0.0)
                table.largest.fill_(largest if largest > 1 else 0.0)
                words.put(ints([size]), table.largest.reshape(1))
                words.put(ints([slot]), torch.tensor([value]))
            given_to[slot] = given_to[slot][0], value
        expected = torch.full((size,), torch.inf)
        for slot, (_, value) in given_to.items():
            expected[slot] = value
        for table in raw:
            assert torch.equal(table.priorities, expected)
        assert torch.equal(raw[0].stamps, raw[1].stamps)
        if data.draw(st.booleans()):
            news = [
                words.news(ring, last)
                for words, ring, last in zip(kept, lanes.rings, known, strict=True)
            ]
            for one, other in zip(*news, strict=True):
                assert torch.equal(one, other)
            found = dict(zip(news[0][0].tolist(), news[0][2].tolist(), strict=True))
            assert found == {
                slot: value
                for slot, (step, value) in given_to.items()
                if seen.get(slot) != (step, value)
            }
            seen = dict(given_to)
            for last, (slots, words, _) in zip(known, news, strict=True):
                last[slots] = words
    for words, ring in zip(kept, lanes.rings, strict=True):
        assert len(words.news(ring, None)[0]) == len(given_to)


@BACKENDS
def test_no_priority_is_written_to_a_slot_that_there_is_not(kernels):
    ring, table = kernels.Ring(4, 1, CPU, spare_steps=1), kernels.RawPriorities(5)
    words = torch.zeros(6, dtype=torch.int64)
    kept = kernels.PriorityWords(words, torch.zeros(5, 2, dtype=torch.int64))
    priority, evicted = kept.renew(table, ints([0, 5]), ring, np.zeros(1, np.int64))
    assert priority < 0
    assert not len(evicted)
    assert not words.any()
    assert table.priorities.isinf().all()


@BACKENDS
def test_lanes_are_committed_as_their_words(kernels):
    ring = kernels.Ring(6, 2, CPU, spare_steps=1)
    append(ring, torch.tensor([[False, True, False, False, False]] * 2), None, None)
    append(ring, torch.tensor([[True]]), None, ints([1]))
    selector, tables = ints([4]), torch.zeros(2, 1 + 4 * 2 + 1, dtype=torch.int64)
    commits = kernels.Commits(selector, tables)
    commits.publish_lanes(ring, 11, np.array([7, 8]))
    assert commits.number == 5
    assert commits.read().tolist() == [11, 5, 6, 2, 3, 1, 0, 7, 8]
    with pytest.raises(ValueError, match="as many words"):
        kernels.Commits(selector, tables[:, :-1].contiguous()).publish_lanes(
            ring, 11, np.array([7, 8])
        )


def test_fences_and_processors(monkeypatch):
    assert host.orders_stores() is True
    for machine, is_ordered in (("x86_64", True), ("AMD64", True), ("arm64", False)):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert device.orders_stores() is is_ordered


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="looks at what is compiled")
@pytest.mark.parametrize(
    ("loop", "num_fences"), [("_clear", 1), ("_mark", 2), ("_publish", 3), ("_hold", 1)]
)
def test_compiled_loops_hold_their_fences(loop, num_fences):
    """In the program as it is optimised, where stores that another one hides could be left out."""
    lanes = Lanes(1, 4, 1)
    lanes.write([[False] * 3], None, None)
    lanes.tables[0].marked.hold(lanes.rings[0], ints([0]))
    host.Commits(ints([0]), torch.zeros(2, 4, dtype=torch.int64)).publish(ints([1, 2, 3]))
    words = torch.zeros(2, 6, dtype=torch.int64)
    host.Commits(ints([0]), words).publish_lanes(lanes.rings[0], 2, np.array([3]))
    compiled = getattr(host_disk, loop)
    anew = numba.njit(compiled.py_func)  # what comes from the cache can't be looked at
    anew.compile(compiled.signatures[0])
    (code,) = anew.inspect_llvm().values()
    assert code.count("fence seq_cst") >= num_fences
