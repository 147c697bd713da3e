"""Next observations that are stored once: what users see is what they see without sharing.

A storage with `share_next=True`, one without and a list of rows live the same life; see `stored_once`.
"""

import multiprocessing
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_once import FLAT, GOALS, BesidePlain, as_bits, assert_same, num_kept_apart
from tensordict import TensorDict

from trl_storages import EpisodeWriter, NStep, PackedStorage, PERSampler, ReplayStorage
from trl_storages.kernels.sharing import NUM_TIPS

pytestmark = pytest.mark.requirement("share-next")


class SharedBesidePlain(BesidePlain):
    def new_storage(self, capacity, *, once):
        return PackedStorage(capacity, share_next=once)


class FlatRows(SharedBesidePlain):
    kind = staticmethod(FLAT)


class GoalRows(SharedBesidePlain):
    kind = staticmethod(GOALS)


class FlatRowsInTensorOperations(FlatRows):
    backend = "torch"


class GoalRowsInTensorOperations(GoalRows):
    backend = "torch"


def by_default(machine, examples):
    case = machine.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=12)
    return case


TestFlatRows = by_default(FlatRows, 25)
TestGoalRows = by_default(GoalRows, 25)
TestFlatRowsInTensorOperations = by_default(FlatRowsInTensorOperations, 8)
TestGoalRowsInTensorOperations = by_default(GoalRowsInTensorOperations, 8)


@pytest.mark.search
@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("kind", [FLAT, GOALS])
def test_a_long_search(kind, backend):
    from hypothesis.stateful import run_state_machine_as_test

    class Searched(SharedBesidePlain):
        pass

    Searched.kind, Searched.backend = staticmethod(kind), backend
    long = settings(max_examples=3000, stateful_step_count=25, derandomize=False)
    run_state_machine_as_test(Searched, settings=long)


# Rows that say themselves what is next


def rows(observed, led_to, done):
    """Transitions [*B] of these numbers int64 [*B]; what they led to stands in `witness` as well."""
    return TensorDict(
        {
            "observation": torch.stack([observed, -observed, observed % 7], -1).float(),
            "pixels": (observed[..., None] % 251 + torch.arange(40)).to(torch.uint8),
            "witness": torch.stack([led_to, -led_to, led_to % 7], -1).float(),
            "next": {
                "observation": torch.stack([led_to, -led_to, led_to % 7], -1).float(),
                "pixels": (led_to[..., None] % 251 + torch.arange(40)).to(torch.uint8),
                "reward": observed[..., None].float(),
                "done": done[..., None],
                "terminated": (done & (observed % 2 == 0))[..., None],
                "truncated": (done & (observed % 2 == 1))[..., None],
            },
        },
        observed.shape,
    )


def stream(num_lanes, num_steps, start=0, length=4):
    """[L, T]: every observation is another one, and episodes are of `length` steps."""
    lanes = torch.arange(num_lanes)[:, None] * 10**6
    steps = torch.arange(start, start + num_steps)
    done = (steps % length == length - 1).expand(num_lanes, -1)
    # Each episode has one state more than steps.
    observed = lanes + steps + steps // length
    return rows(observed, observed + 1, done)


def make(size, num_envs=1, *, share_next=True, **options):
    return ReplayStorage(
        storage=PackedStorage(size, share_next=share_next),
        writer=EpisodeWriter(num_envs),
        generator=torch.Generator().manual_seed(3),
        **options,
    )


def assert_true(batch):
    """What is next is what the row led to."""
    assert torch.equal(batch["next", "observation"], batch["witness"])
    pixels = (batch["witness"][..., :1].long() % 251 + torch.arange(40)).to(torch.uint8)
    assert torch.equal(batch["next", "pixels"], pixels)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("chunk", [1, 4, 50])
def test_final_observations_are_true_at_every_end(num_envs, chunk):
    """By hand: the observation after an end is never that of the episode which begins next."""
    storage = make(20 * num_envs, num_envs)
    for start in range(0, 100, chunk):
        data = stream(num_envs, chunk, start)
        storage.extend(data if num_envs > 1 else data[0])
    found = storage[:]
    assert_true(found)
    ends = found["next", "done"][:, 0]
    assert ends.sum() == 5 * num_envs
    assert (found["next", "terminated"] | found["next", "truncated"])[ends].all()
    assert found["next", "terminated"].any()
    assert found["next", "truncated"].any()
    assert torch.equal(found["next", "observation"][..., 0], found["observation"][..., 0] + 1)


def test_the_side_store_grows_and_shrinks_with_the_ends_of_live_segments():
    storage = make(60, 2)
    rows_of_one = storage.storage
    for start in range(0, 60, 2):
        storage.extend(stream(2, 2, start, length=1))
    # The oldest row of a lane still names what the row before it led to, which is gone.
    assert 60 <= num_kept_apart(rows_of_one) <= 62
    storage.end_episodes()
    for start in range(60, 120, 2):
        storage.extend(stream(2, 2, start, length=10**6))
    assert num_kept_apart(rows_of_one) == 2
    assert_true(storage[:])
    storage.end_episodes()
    storage.extend(stream(2, 40, 120, length=4))
    # The longest a segment of 30 rows a lane can hold whole, the newest rows included.
    assert num_kept_apart(rows_of_one) <= 2 * (30 // 4 + 1)
    storage.empty(keep_steps=8)
    assert num_kept_apart(rows_of_one) <= 2 * 3
    assert_true(storage[:])
    storage.empty()
    assert num_kept_apart(rows_of_one) == 2
    storage.extend(stream(2, 3, 0, length=10))
    assert num_kept_apart(rows_of_one) == 2


def test_rows_that_are_kept_go_on_sharing():
    """However many they are, they do not all stand in the side store, not even for a while."""
    storage = make(200, 2)
    storage.extend(stream(2, 150, length=25))
    plain = make(200, 2, share_next=False)
    plain.extend(stream(2, 150, length=25))
    for buffer in (storage, plain):
        buffer.empty(keep_steps=90)
    assert_same(storage[:], plain[:])
    assert_true(storage[:])
    assert num_kept_apart(storage.storage) <= 2 * 5
    assert storage.storage._side.counts[1] <= 2 * 5 + 8 + 2 * NUM_TIPS
    for buffer in (storage, plain):
        buffer.extend(stream(2, 25, 150, length=25))
    assert_same(storage[:], plain[:])


def test_what_is_said_of_the_bytes_is_so():
    storage, plain = make(1000), make(1000, share_next=False)
    for buffer in (storage, plain):
        buffer.extend(stream(1, 1000, length=50)[0])
    once = storage.storage
    assert once.rows.nbytes == once.row_nbytes * 1000
    assert once.side_nbytes == (19 + NUM_TIPS) * once._side.entry_nbytes
    assert once.row_nbytes < plain.storage.row_nbytes
    assert plain.storage.side_nbytes == 0
    for words in (f"row_nbytes={once.row_nbytes}", f"side_nbytes={once.side_nbytes}", "sharing"):
        assert words in repr(once)
    assert "sharing" not in repr(plain.storage)


def test_twins_of_another_dtype_or_shape_are_stored_as_they_are():
    data = stream(1, 9)[0]
    data["odd"], data["next", "odd"] = torch.rand(9, 2), torch.rand(9, 2).double()
    data["short"], data["next", "short"] = torch.rand(9, 2), torch.rand(9, 3)
    data["next", "alone"] = torch.rand(9)
    for name in ("done", "terminated", "reward"):
        data[name] = data["next", name].roll(1, 0)
    storage = make(9)
    storage.extend(data)
    assert_same(storage[:], data)
    shared = repr(storage.storage).rpartition("sharing")[2]
    assert "observation" in shared
    assert "pixels" in shared
    for name in ("odd", "short", "alone", "done", "terminated", "reward"):
        assert name not in shared


@settings(max_examples=25)
@given(
    num_envs=st.integers(2, 4),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    seed=st.integers(0, 2**16),
)
def test_flat_batches_find_their_lanes(num_envs, sizes, seed):
    """Rows [N] of any trajectories: the same lanes, episodes and batches with sharing and without."""
    luck = torch.Generator().manual_seed(seed)
    both = [make(12 * num_envs, num_envs, share_next=share) for share in (False, True)]
    begun, now = 0, []
    for _ in range(num_envs):
        now.append([begun, 0])
        begun += 1
    for size in sizes:
        numbers = []
        for lane in range(num_envs):
            for _ in range(size):
                episode, step = now[lane]
                is_end = bool(torch.rand((), generator=luck) < 0.3)
                numbers.append((episode, 100 * episode + step, is_end))
                now[lane] = [begun, 0] if is_end else [episode, step + 1]
                begun += is_end
        episode, observed, done = map(torch.tensor, zip(*numbers, strict=True))
        data = rows(observed, observed + 1, done)
        data["collector", "traj_ids"] = episode
        slots = [buffer.extend(data.clone()) for buffer in both]
        assert torch.equal(*slots)
        assert_same(*(buffer[:] for buffer in both))
        assert_true(both[1][:])
        assert_same(*(buffer.sample(7) for buffer in both))


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("share_next", [False, True])
def test_flat_batches_whose_lanes_get_different_numbers_of_rows(monkeypatch, backend, share_next):
    """Rows of three environments in any order: each has its own values, at the slot returned for it."""
    monkeypatch.setenv("TRL_STORAGES_BACKEND", backend)
    luck = torch.Generator().manual_seed(0)
    buffer, now = make(60, 3, share_next=share_next), torch.tensor([0, 1000, 2000])
    for _ in range(20):
        sizes = torch.randint(0, 5, (3,), generator=luck) + torch.tensor([1, 0, 0])
        lane = torch.arange(3).repeat_interleave(sizes)
        lane = lane[torch.randperm(len(lane), generator=luck)]
        observed = torch.stack([now[it] + (lane[:at] == it).sum() for at, it in enumerate(lane)])
        now += sizes
        step = observed - 1000 * lane
        data = rows(observed, observed + 1, step % 7 == 6)
        data["collector", "traj_ids"] = 100 * lane + step // 7
        slots = buffer.extend(data.clone())
        assert_same(buffer[slots], data)
        assert_true(buffer[:])
        buffer.validate()


def test_rows_of_agents_keep_their_batch_sizes():
    def agents(value):
        return TensorDict({"observation": value.unsqueeze(-1).expand(-1, 3, 2).clone()}, [6, 3])

    steps = torch.arange(6.0)[:, None].expand(-1, 3)
    done = torch.tensor([False, True, False, False, True, False])[:, None]
    data = TensorDict(
        {"agents": agents(steps), "next": {"agents": agents(steps + 1), "done": done}}, [6]
    )
    plain, once = (make(6, share_next=share) for share in (False, True))
    for buffer in (plain, once):
        for part in data.split([1, 2, 3]):
            buffer.extend(part.clone())
    assert_same(plain[:], once[:])
    batches = [buffer.sample(5) for buffer in (plain, once)]
    assert_same(*batches)
    assert batches[1]["next", "agents"].batch_size == (5, 3)


# Threads and processes


@pytest.mark.parametrize("sampler", [None, PERSampler])
def test_batches_that_are_drawn_ahead_are_the_same(sampler):
    drawn = []
    for share in (False, True):
        storage = make(
            30,
            2,
            share_next=share,
            sampler=None if sampler is None else sampler(30),
            transform=NStep(2, 0.9),
            batch_size=8,
            prefetch=3,
        )
        storage.extend(stream(2, 40))
        drawn.append([storage.sample() for _ in range(6)])
    for plain, once in zip(*drawn, strict=True):
        assert_same(plain, once)


def test_batches_are_true_while_another_thread_writes():
    """Whatever is read while rows are written, overwritten, cut off and moved is whole."""
    storage = make(24, 2, batch_size=32, prefetch=2)
    storage.extend(stream(2, 6))
    failures, is_over = [], threading.Event()

    def write():
        try:
            start = 6
            for turn in range(150):
                storage.extend(stream(2, 1 + turn % 5, start, length=3 + turn % 7))
                start += 1 + turn % 5
                if turn % 11 == 0:
                    storage.empty(keep_steps=2)
                if turn % 5 == 0:
                    storage.end_episodes()
        except Exception as error:
            failures.append(error)
        finally:
            is_over.set()

    # The rows of two blocks of other lengths do not continue one another.
    storage.writer.gaps.on_gap = "ignore"
    writer = threading.Thread(target=write)
    writer.start()
    while not is_over.is_set():
        assert_true(storage.sample())
        assert_true(storage[:])
    writer.join()
    assert not failures
    storage.validate()


def test_several_processes_write_and_one_draws():
    storage = make(40, 2)
    storage.extend(stream(2, 3))
    storage.share()
    context = multiprocessing.get_context("fork")
    for turn in range(4):
        data = stream(2, 9, 100 * turn, length=4)
        child = context.Process(target=write_and_look, args=(storage, data))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert_true(storage[:])
        assert_true(storage.sample(16))
        storage.extend(stream(2, 2, 100 * turn + 50, length=4))
        assert_true(storage[:])
    storage.validate()


def write_and_look(storage, data):
    storage.extend(data)
    assert_true(storage[:])


# Wrong input


def test_a_storage_without_a_writer_of_episodes_is_refused_before_anything_is_written():
    storage = PackedStorage(8, share_next=True)
    with pytest.raises(RuntimeError, match="EpisodeWriter"):
        storage.set(range(2), stream(1, 2)[0])
    assert len(storage) == 0


@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_the_option_is_a_flag(wrong):
    with pytest.raises((TypeError, ValueError), match="share_next"):
        PackedStorage(8, share_next=wrong)


def test_rows_that_do_not_fit_change_nothing():
    storage = make(10)
    storage.extend(stream(1, 8)[0])
    before = {key: as_bits(value) for key, value in storage[:].items(True, True)}
    apart = num_kept_apart(storage.storage)
    for key in ("observation", ("next", "observation"), ("next", "pixels")):
        for change in (torch.Tensor.double, lambda value: value[..., :1]):
            data = stream(1, 3, 8)[0]
            data[key] = change(data[key])
            with pytest.raises((TypeError, ValueError), match="must"):
                storage.extend(data)
        with pytest.raises(KeyError, match="lacks"):
            storage.extend(stream(1, 3, 8)[0].exclude(key))
    assert {key: as_bits(value) for key, value in storage[:].items(True, True)} == before
    assert num_kept_apart(storage.storage) == apart
    storage.extend(stream(1, 3, 8)[0])
    assert_true(storage[:])
