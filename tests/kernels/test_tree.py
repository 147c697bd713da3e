"""The sum tree, its order of leaves and raw priorities: by hand, against lists, on both backends."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from trl_storages.kernels.tables import ABSENT, level_starts
from trl_storages.ring import EpisodeIndex

from trl_storages.kernels import device, host

BACKENDS = {"host": host, "device": device}
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def ranges(first, last):
    return torch.stack([torch.as_tensor(first), torch.as_tensor(last)])


def noise_of(uniform):
    """The 63-bit numbers that become numbers in [0, 1)."""
    return (uniform * 2.0**53).long() << 10


def random_noise(n, seed=0):
    return torch.empty(n, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed))


def planted(backend, weights, num_leaves=None):
    tree = backend.SumTree(num_leaves or len(weights))
    tree.set(torch.arange(len(weights)), torch.as_tensor(weights, dtype=torch.float64))
    return tree


def added_by_halves(numbers):
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [numbers[at] + numbers[at + half] for at in range(half)]
    return numbers[0]


def node_sums(weights):
    """The sums of a tree, level by level from below, each node added by halves."""
    levels = [list(weights)]
    while len(levels[-1]) > 1:
        children = levels[-1]
        parts = [children[at : at + 8] for at in range(0, len(children), 8)]
        levels.append([added_by_halves(part + [0.0] * (8 - len(part))) for part in parts])
    return levels


class TestByHand:
    """Leaves that weigh 1.5, 3.5, 0, 0.5, 4.5, together 10."""

    @pytest.fixture(params=BACKENDS.values(), ids=BACKENDS)
    def tree(self, request):
        return planted(request.param, [1.5, 3.5, 0.0, 0.5, 4.5])

    def test_sums_and_minimum(self, tree):
        assert tree.total.item() == 10.0
        assert tree.weights.tolist() == [1.5, 3.5, 0.0, 0.5, 4.5]
        parts = ranges([0, 1, 2, 1, 0, 5], [2, 5, 3, 2, 5, 5])
        assert tree.range_sums(parts).tolist() == [5.0, 8.5, 0.0, 3.5, 10.0, 0.0]
        assert tree.least().item() == 0.5
        assert tree.least(ranges([0, 4], [2, 5])).item() == 1.5
        assert tree.least(ranges([2, 0], [3, 0])).item() == ABSENT

    def test_draws_follow_the_cumulative_sum(self, tree):
        # Masses lie in [0, 1.5), [1.5, 5), [5, 5.5), [5.5, 10).
        marks = doubles(0.0, 0.14, 0.16, 0.49, 0.51, 0.54, 0.56, 0.999)
        leaf, ratio = tree.draw(noise_of(marks))
        assert leaf.tolist() == [0, 0, 1, 1, 3, 3, 4, 4]
        weight = [1.5, 1.5, 3.5, 3.5, 0.5, 0.5, 4.5, 4.5]
        assert ratio.tolist() == [0.5 / each for each in weight]
        _, ratio = tree.draw(noise_of(marks), reference=doubles(7.0).squeeze())
        assert ratio.tolist() == [7.0 / each for each in weight]

    def test_draws_within_ranges(self, tree):
        # Leaves 1 and 4 weigh 3.5 and 4.5.
        parts = ranges([1, 0, 4], [3, 0, 5])
        leaf, ratio = tree.draw(noise_of(doubles(0.0, 0.43, 0.44, 0.999)), parts)
        assert leaf.tolist() == [1, 1, 4, 4]
        assert ratio.tolist() == [1.0, 1.0, 3.5 / 4.5, 3.5 / 4.5]

    def test_of_a_leaf_that_occurs_twice_the_last_weight_stays(self, tree):
        tree.set(ints(2, -1, 0, 2, 0, -5), doubles(7, 9, 8, 2, 1, 9))
        assert tree.weights.tolist() == [1.0, 3.5, 2.0, 0.5, 4.5]
        assert tree.total.item() == 11.5

    def test_the_least_is_tracked_once_it_was_asked_for(self, tree):
        tree.set(ints(3), doubles(0.125))
        assert not tree.tracks_least
        assert tree.least(ranges([3], [5])).item() == 0.125
        assert tree.tracks_least
        tree.set(ints(3, 0), doubles(0.25, 0.0))
        assert tree.least().item() == 0.25
        tree.renew(doubles(0, 0, 3, 0, 0))
        assert tree.least().item() == 3.0


def test_where_levels_lie():
    # Behind the last leaf there is one more; a node has eight children.
    assert level_starts(1) == [0, 8, 16]
    assert level_starts(7) == [0, 8, 16]
    assert level_starts(8) == [0, 8, 16, 32]
    assert level_starts(64) == [0, 8, 16, 32, 104]


@each_backend
def test_a_leaf_that_weighs_nothing_is_never_drawn(backend):
    tree = backend.SumTree(5000)
    assert tree.total.item() == 0.0
    tree.set(ints(0, 7, 4999), doubles(3, 3, 3))
    assert set(tree.draw(random_noise(2000))[0].tolist()) == {0, 7, 4999}
    tree.set(ints(7), doubles(0))
    assert set(tree.draw(random_noise(2000))[0].tolist()) == {0, 4999}
    edges = torch.tensor([0, 2**63 - 1])
    assert tree.draw(edges)[0].tolist() == [0, 4999]
    assert tree.draw(edges, ranges([0, 3], [0, 5000]))[0].tolist() == [4999, 4999]


@each_backend
@pytest.mark.parametrize(
    ("weights", "last"), [((1e16, 1, 1, 1, 1, 1, 1, 1), 0), ((0, 1e16, 4, 1, 1, 1, 1, 0), 2)]
)
def test_a_mass_beyond_the_sum_in_order_is_of_the_last_leaf_that_counts(backend, weights, last):
    # By halves the light leaves add up first; one by one each is lost in the heavy one.
    tree = planted(backend, weights)
    assert tree.total.item() > np.cumsum(weights)[-1]
    assert tree.draw(torch.tensor([2**63 - 1]))[0].tolist() == [last]


@each_backend
@pytest.mark.parametrize("size", [1, 7, 8, 9, 63, 64, 65, 1023, 40_000])
@pytest.mark.requirement("per-draws")
def test_the_share_of_each_leaf_is_exact(backend, size):
    # Evenly spaced numbers instead of random ones: counts are then shares, rounded.
    weights = 0.5 + torch.rand(size, generator=torch.Generator().manual_seed(size)).double()
    tree = planted(backend, weights)
    num_draws = 8 * size
    grid = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    first, last = size // 5, size - size // 7
    for parts, start, stop in ((None, 0, size), (ranges([first], [last]), first, last)):
        counts = torch.bincount(tree.draw(noise_of(grid), parts)[0], minlength=size)
        share = weights[start:stop] / weights[start:stop].sum() * num_draws
        assert (counts[start:stop] - share).abs().max() < 1.0
        assert counts[start:stop].sum() == num_draws


@each_backend
@pytest.mark.requirement("per-draws")
def test_draws_are_as_likely_as_they_should_be(backend):
    weights = torch.arange(1.0, 31.0, dtype=torch.float64)
    tree = planted(backend, weights)
    for parts in (ranges([0], [30]), ranges([20, 3, 11], [30, 9, 11])):
        there = torch.zeros(30, dtype=torch.bool)
        for first, last in parts.T.tolist():
            there[first:last] = True
        counts = torch.bincount(tree.draw(random_noise(50_000), parts)[0], minlength=30)
        assert counts[there].sum() == 50_000
        expected = 50_000 * weights[there] / weights[there].sum()
        assert chisquare(counts[there], expected).pvalue > 1e-3


@each_backend
@pytest.mark.requirement("ere-per")
def test_a_light_range_beside_heavy_leaves_is_drawn_exactly(backend):
    # Sums up to a leaf, taken from one another, would have lost these weights altogether.
    weights = torch.full((1000,), 1e15, dtype=torch.float64)
    weights[500:504] = doubles(1e-6, 2e-6, 3e-6, 4e-6)
    tree = planted(backend, weights)
    parts = ranges([500], [504])
    assert tree.range_sums(parts).item() == 1e-6 + 2e-6 + 3e-6 + 4e-6
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    leaf, _ = tree.draw(noise_of(grid), parts)
    assert torch.bincount(leaf, minlength=504)[500:].tolist() == [100, 200, 300, 400]


@each_backend
@pytest.mark.requirement("per-update")
def test_the_root_is_the_sum_after_a_million_updates(backend):
    size = 50_000
    tree = backend.SumTree(size)
    generator = torch.Generator().manual_seed(3)
    for _ in range(100):
        leaves = torch.randint(size, (10_000,), generator=generator)
        # Over twelve orders of magnitude, where sums that are added to would drift.
        weights = 10 ** (12 * torch.rand(10_000, generator=generator, dtype=torch.float64) - 6)
        tree.set(leaves, weights)
    assert tree.total.item() == pytest.approx(tree.weights.sum().item(), rel=1e-6)
    # Equal weights make equal trees, whatever their history.
    fresh = backend.SumTree(size)
    fresh.renew(tree.weights)
    assert fresh.total.item() == tree.total.item()


magnitudes = st.sampled_from([(0.0, 1.0), (1e-120, 1e-100), (1e-10, 1e30), (1e200, 1e300)])


@st.composite
def histories(draw):
    """Writes to a tree of some size, then ranges, and a seed for noise."""
    size = draw(st.sampled_from([1, 7, 8, 9, 60, 64, 65, 500, 513, 4097]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    writes = []
    for _ in range(draw(st.integers(1, 4))):
        batch = draw(st.sampled_from([1, 3, 8, 40, 700]))
        low, high = draw(magnitudes)
        weights = rng.uniform(low, high, batch)
        # Some weigh nothing, and some name no leaf.
        weights[rng.random(batch) < draw(st.sampled_from([0.0, 0.3, 0.9]))] = 0.0
        leaves = rng.integers(-1 if draw(st.booleans()) else 0, size, batch)
        writes.append((leaves, weights))
    bounds = np.sort(rng.integers(0, size + 1, 2 * draw(st.integers(1, 4))))
    order = rng.permutation(len(bounds) // 2)
    return size, writes, bounds[::2][order], bounds[1::2][order], int(rng.integers(2**31))


@settings(max_examples=50)
@given(histories())
def test_both_trees_answer_bit_for_bit_as_a_list_does(history):
    size, writes, first, last, seed = history
    trees = [backend.SumTree(size) for backend in BACKENDS.values()]
    trees[0].least()
    plain = np.zeros(size)
    for leaves, weights in writes:
        for leaf, weight in zip(leaves, weights, strict=True):
            if leaf >= 0:
                plain[leaf] = weight
        for tree in trees:
            tree.set(torch.from_numpy(leaves), torch.from_numpy(weights))
    total = node_sums(plain)[-1][0]
    parts, noise = ranges(first, last), random_noise(64, seed)
    inside = [leaf for a, b in zip(first, last, strict=True) for leaf in range(a, b)]
    sums = [plain[a:b].sum() for a, b in zip(first, last, strict=True)]
    low = min((plain[leaf] for leaf in inside if plain[leaf]), default=ABSENT)
    for tree in trees:
        assert tree.weights.tolist() == plain.tolist()
        assert tree.total.item() == total
        assert tree.range_sums(parts).tolist() == pytest.approx(sums, rel=1e-12)
        assert tree.least(parts).item() == low
        assert tree.least().item() == min((w for w in plain if w), default=ABSENT)
    assert torch.equal(*(tree.range_sums(parts) for tree in trees))
    for within, there in ((None, range(size)), (parts, inside)):
        if not any(plain[leaf] for leaf in there):
            continue
        host_draw, device_draw = (tree.draw(noise, within) for tree in trees)
        assert torch.equal(host_draw[0], device_draw[0])
        assert torch.equal(host_draw[1], device_draw[1])
        drawn = host_draw[0].tolist()
        assert set(drawn) <= set(there)
        weights = [plain[leaf] for leaf in drawn]
        assert min(weights) > 0
        assert host_draw[1].tolist() == [min(weights) / weight for weight in weights]


@st.composite
def reports(draw):
    """Rows that were written, then reports with lags, and one that may be wrong."""
    size = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        slots = rng.integers(-2, size, draw(st.integers(1, 20)))
        priorities = rng.random(len(slots)).astype(np.float32) * 10
        wrong = draw(st.sampled_from(["", "", "", "nan", "negative", "inf", "slot"]))
        where = rng.integers(len(slots))
        if wrong == "slot":
            slots[where] = size + rng.integers(3)
        elif wrong:
            priorities[where] = {"nan": np.nan, "negative": -1e-30, "inf": np.inf}[wrong]
        lags = rng.integers(0, 2, len(slots)) if draw(st.booleans()) else None
        steps.append((draw(st.booleans()), slots, priorities, lags, bool(wrong)))
    return size, steps


@settings(max_examples=50)
@given(reports())
@pytest.mark.requirement("per-update")
def test_both_keep_what_was_reported_as_lists_do(case):
    size, steps = case
    tables = [backend.RawPriorities(size) for backend in BACKENDS.values()]
    priorities, taken, largest = [ABSENT] * size, [0] * size, 0.0
    for is_write, slots, new, lags, wrong in steps:
        if is_write:
            refused = (slots >= size).any()
            for slot in {slot for slot in slots if slot >= 0 and not refused}:
                priorities[slot] = largest or 1.0
                taken[slot] += 1
            for table in tables:
                given = float(table.renew(torch.from_numpy(slots)))
                assert given == (-1 if refused else largest or 1.0)
        else:
            stamps, expected = None, []
            if lags is not None:
                stamps = [
                    taken[slot] - lag if 0 <= slot < size else 0
                    for slot, lag in zip(slots, lags, strict=True)
                ]
                stamps = torch.tensor(stamps, dtype=torch.int32)
            for i, slot in enumerate(slots):
                there = not wrong and slot >= 0 and priorities[slot] != ABSENT
                there = there and (lags is None or lags[i] == 0)
                expected.append(int(slot) if there else -1)
                if there:
                    largest = max(largest, float(new[i]))
            for slot, priority in zip(expected, new.tolist(), strict=True):
                if slot >= 0:
                    priorities[slot] = priority
            for table in tables:
                priority = torch.from_numpy(new)
                written, raised, refused = table.report(
                    torch.from_numpy(slots), priority, 0.1, stamps
                )
                assert written.tolist() == expected
                assert torch.equal(raised.isnan(), priority.isnan())
                assert torch.equal(raised.nan_to_num(), (priority.double() + 0.1).nan_to_num())
                assert bool(refused) == wrong
        for table in tables:
            assert table.priorities.tolist() == priorities
            assert table.stamps.tolist() == taken
            assert table.largest.item() == largest


@each_backend
class TestLanes:
    @settings(max_examples=50)
    @given(st.integers(1, 5), st.integers(1, 30), st.data())
    def test_draws_are_of_slots(self, backend, num_lanes, capacity, data):
        tree, renewed = (backend.SumTree(capacity, num_lanes) for _ in range(2))
        assert capacity <= tree.num_leaves == tree.lane_leaves * num_lanes < capacity + num_lanes
        slots = data.draw(st.permutations(range(capacity)))[: data.draw(st.integers(1, capacity))]
        weights = torch.arange(1.0, len(slots) + 1, dtype=torch.float64)
        tree.set(ints(*slots, -1, -7), torch.cat([weights, doubles(5.0, 6.0)]))
        weight_of = dict(zip(slots, weights.tolist(), strict=True))
        drawn, found = tree.draw(random_noise(64))
        weights = [weight_of[slot] for slot in drawn.tolist()]
        assert [min(weights) / weight for weight in weights] == found.tolist()
        renewed.renew(doubles(*(weight_of.get(slot, 0.0) for slot in range(capacity))))
        assert torch.equal(renewed.weights, tree.weights)
        assert torch.equal(renewed.total, tree.total)

    @pytest.mark.requirement("ere-per")
    @settings(max_examples=50)
    @given(st.integers(1, 4), st.integers(1, 6), st.data())
    def test_the_newest_rows_are_the_ranges(self, backend, num_lanes, steps, data):
        capacity = num_lanes * steps + data.draw(st.integers(0, num_lanes - 1))
        episodes = EpisodeIndex(capacity, num_lanes)
        for _ in range(data.draw(st.integers(1, 8))):
            lanes = sorted(data.draw(st.sets(st.integers(0, num_lanes - 1), min_size=1)))
            length = data.draw(st.integers(1, steps + 1))
            episodes.append(torch.zeros(len(lanes), length, dtype=torch.bool), lanes=lanes)
        for window in range(len(episodes) + 2):
            newest = episodes.slots_by_age(torch.arange(min(window, len(episodes))))
            tree = backend.SumTree(capacity, num_lanes)
            parts = episodes.ring.newest_ranges(torch.tensor(window), tree.lane_leaves)
            tree.set(newest, doubles(1.0))
            assert tree.range_sums(parts).sum() == parts.diff(dim=0).sum() == len(newest)


@pytest.mark.requirement("devices")
def test_nothing_waits_for_the_device(gpu):
    tree, rows = (kind(5000, device=gpu) for kind in (device.SumTree, device.RawPriorities))
    slots = torch.arange(16, device=gpu)
    noise = torch.empty(16, dtype=torch.int64, device=gpu).random_()
    tree.least()
    answers = [rows.renew(slots)]
    stamps = rows.stamps[slots]
    answers += rows.report(slots, torch.rand(16, device=gpu), 0.1, stamps)
    tree.set(slots, torch.rand(16, dtype=torch.float64, device=gpu))
    tree.renew(torch.rand(5000, dtype=torch.float64, device=gpu))
    for parts in (None, slots[:6].view(2, 3)):
        answers += tree.draw(noise, parts)
        answers.append(tree.least(parts))
    answers += [tree.range_sums(parts), tree.total, tree.weights]
    assert all(answer.device == gpu for answer in answers)
