"""Next observations that are stored once: what users see is what they see without sharing."""

import multiprocessing
import threading

import pytest
import torch
from contract.steps import assert_same
from tensordict import TensorDict

from trl_storages import EpisodeWriter, PackedStorage, ReplayStorage

pytestmark = pytest.mark.requirement("share-next")


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


def test_rows_that_are_kept_go_on_sharing():
    storage = make(200, 2)
    storage.extend(stream(2, 150, length=25))
    plain = make(200, 2, share_next=False)
    plain.extend(stream(2, 150, length=25))
    for buffer in (storage, plain):
        buffer.empty(keep_steps=90)
    assert_same(storage[:], plain[:])
    assert_true(storage[:])
    for buffer in (storage, plain):
        buffer.extend(stream(2, 25, 150, length=25))
    assert_same(storage[:], plain[:])


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
