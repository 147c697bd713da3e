"""The sampling path on a GPU: no device mix-up, and nothing waits for the host.

On any machine the GPU is simulated: under `FakeTensorMode` tensors have shapes and devices but no
data, so whatever asks for the data on the host (`.item()`, a boolean mask, `nonzero`) raises. On a real
one, so does what torch calls a synchronizing operation.
"""

from functools import partial

import pytest
import torch
from goal_data import distance_reward, goal_transitions
from in_pairs import in_pairs
from torch._subclasses.fake_tensor import DataDependentOutputException
from torchrl.envs.transforms import Compose

from trl_storages.replay import ReplayStorage
from trl_storages.ring import EpisodeIndex
from trl_storages.rows import PackedStorage, read_fields
from trl_storages.sample_units import EpisodeSequence
from trl_storages.samplers import ERESampler, HERSampler, PERSampler, UniformSampler
from trl_storages.transforms import GoalRelabel, NStep
from trl_storages.writing import EpisodeWriter

STRATEGIES = ["future", "final", "episode", "random", "geometric", "current"]
MIXTURE = dict.fromkeys(STRATEGIES, 1 / 6)
STORAGES = [PackedStorage, partial(PackedStorage, share_next=True)]
LANES = [1, 3]
each_storage = pytest.mark.parametrize("storage_type", STORAGES, ids=["packed", "shared"])
each_number_of_lanes = pytest.mark.parametrize("num_envs", LANES)


def make_buffer(device, num_envs, storage_type=PackedStorage, **kwargs):
    """A buffer with five steps in each lane."""
    storage = storage_type(24, device=device)
    buffer = ReplayStorage(storage=storage, writer=EpisodeWriter(num_envs), **kwargs)
    steps = torch.arange(5, device=device).expand(num_envs, 5)
    lanes = torch.arange(num_envs, device=device).unsqueeze(1).expand(num_envs, 5)
    rows = goal_transitions(lanes, steps, steps == 3)
    buffer.extend(rows if num_envs > 1 else rows[0])
    return buffer


def check(batch, device, size):
    for key, value in batch.items(True, True):
        assert value.device == device, key
        assert value.shape[0] == size, key


def test_what_must_raise_does(gpu):
    with pytest.raises(RuntimeError, match="device"):
        torch.arange(3, device=gpu) + torch.arange(3)
    # All that is checked there is read on the host.
    with pytest.raises((DataDependentOutputException, AssertionError), match=r"GPU|aten"):
        make_buffer(gpu, 1).episodes.validate()


@pytest.mark.requirement("devices")
@each_number_of_lanes
def test_packed_rows(gpu, num_envs):
    storage = make_buffer(gpu, num_envs).storage
    for shape in ((4,), (2, 3)):
        index = torch.zeros(shape, dtype=torch.int64, device=gpu)
        check(storage.get(index), gpu, shape[0])
        fields = read_fields(storage, index, ["effort", ("next", "achieved_goal")])
        assert all(field.device == gpu for field in fields.values())
        assert fields["effort"].shape == (*shape, 1)


@pytest.mark.requirement("devices")
@in_pairs(
    num_envs=LANES,
    storage_type=STORAGES,
    sampler=[
        UniformSampler,
        lambda: PERSampler(24),
        ERESampler,
        lambda: HERSampler(num_goals=0, base=ERESampler(base=PERSampler(24))),
    ],
)
@pytest.mark.filterwarnings("ignore:a row that was written did not begin")
def test_writes(gpu, num_envs, storage_type, sampler):
    """Whatever is written, the host counts on its own."""
    buffer = make_buffer(gpu, num_envs, storage_type, sampler=sampler())
    lanes = torch.arange(num_envs, device=gpu)
    step = goal_transitions(lanes, torch.full_like(lanes, 5), lanes == 0)
    slots = buffer.add(step if num_envs > 1 else step[0])
    assert slots.device == gpu
    assert slots.shape == ((num_envs,) if num_envs > 1 else ())
    for _ in range(2):
        # More than the ring has room for, too.
        buffer.extend(step.unsqueeze(1).expand(num_envs, 14) if num_envs > 1 else step.expand(14))
    buffer.writer.extend(step[:1], lanes=[num_envs - 1])
    assert len(buffer) == buffer.episodes.capacity
    check(buffer.sample(8), gpu, 8)


@pytest.mark.requirement("devices")
def test_a_write_without_memory_leaves_the_counters_of_the_host(gpu, monkeypatch):
    index = EpisodeIndex(24, 3, gpu)

    def append(*_):
        raise torch.OutOfMemoryError("of the GPU")

    monkeypatch.setattr(index.ring, "append", append)
    with pytest.raises(torch.OutOfMemoryError):
        index.append(torch.zeros(3, 2, dtype=torch.bool, device=gpu))
    assert not index.host_steps.any()


@pytest.mark.requirement("devices")
@each_storage
@each_number_of_lanes
def test_uniform(gpu, num_envs, storage_type):
    buffer = make_buffer(gpu, num_envs, storage_type, sampler=UniformSampler())
    check(buffer.sample(8), gpu, 8)


@pytest.mark.requirement("devices")
@in_pairs(
    num_envs=LANES,
    storage_type=STORAGES,
    strategy=[*STRATEGIES, MIXTURE],
    num_goals=[0, 4, float("inf")],
)
def test_hindsight(gpu, num_envs, storage_type, strategy, num_goals):
    relabel = GoalRelabel(
        lambda achieved, desired, transition: (
            distance_reward(achieved, desired, None) - transition["effort"].squeeze(-1).float()
        ),
        terminated_fn=lambda achieved, desired, _: (achieved == desired).all(-1),
        info_keys=["effort"],
    )
    sampler = HERSampler(strategy, num_goals)
    buffer = make_buffer(gpu, num_envs, storage_type, sampler=sampler, transform=relabel)
    for size in (1, 8):
        batch = buffer.sample(size)
        check(batch, gpu, size)
        assert batch["desired_goal"].shape == (size, 3)
        assert batch["next", "reward"].shape == (size, 1)
        assert batch["next", "done"].dtype == torch.bool


@pytest.mark.requirement("devices")
@pytest.mark.requirement("n-step")
@in_pairs(num_envs=LANES, storage_type=STORAGES, n_steps=[1, 3])
def test_n_step(gpu, num_envs, storage_type, n_steps):
    n_step = NStep(n_steps, 0.9)
    buffer = make_buffer(gpu, num_envs, storage_type, transform=n_step)
    batch = buffer.sample(8)
    check(batch, gpu, 8)
    assert batch["steps_to_next_obs"].shape == batch["next", "reward"].shape == (8, 1)


@pytest.mark.requirement("devices")
@pytest.mark.requirement("her-n-step")
@in_pairs(num_envs=LANES, storage_type=STORAGES, ends=[False, True])
def test_hindsight_over_n_steps(gpu, num_envs, storage_type, ends):
    relabel = GoalRelabel(
        distance_reward,
        terminated_fn=(lambda achieved, desired, _: (achieved == desired).all(-1))
        if ends
        else None,
        info_keys=["effort"],
    )
    transform = Compose(relabel, NStep(3, 0.9))
    options = {"sampler": HERSampler(), "transform": transform}
    buffer = make_buffer(gpu, num_envs, storage_type, **options)
    check(buffer.sample(8), gpu, 8)


@pytest.mark.requirement("devices")
@pytest.mark.requirement("sequence-boundaries")
@in_pairs(num_envs=LANES, storage_type=STORAGES, boundary=["pad", "fit", "cross"])
def test_sequences(gpu, num_envs, storage_type, boundary):
    per = PERSampler(24, device=gpu)
    options = {
        "sampler": HERSampler(base=ERESampler(0.99, c_min=3, base=per)),
        "transform": Compose(GoalRelabel(distance_reward), NStep(3, 0.9)),
        "sample_unit": EpisodeSequence(2, burn_in=1, bootstrap=1, boundary=boundary),
    }
    buffer = make_buffer(gpu, num_envs, storage_type, **options)
    for _ in range(2):
        batch = buffer.sample(8)
        check(batch, gpu, 32)
        batch["td_error"] = batch["next", "reward"].abs()
        buffer.update_tensordict_priority(batch.reshape(8, 4))


@pytest.mark.requirement("devices")
@pytest.mark.requirement("hpne")
@each_storage
@each_number_of_lanes
def test_full_combination(gpu, num_envs, storage_type):
    per = PERSampler(24, device=gpu)
    ere = ERESampler(0.99, c_min=3, base=per)
    relabel = GoalRelabel(
        distance_reward, terminated_fn=lambda achieved, desired, _: (achieved == desired).all(-1)
    )
    options = {"sampler": HERSampler(base=ere), "transform": Compose(relabel, NStep(3, 0.9))}
    buffer = make_buffer(gpu, num_envs, storage_type, **options)
    per.extend(torch.arange(5 * num_envs, device=gpu))
    ere.begin_phase(2)
    for _ in range(3):
        batch = buffer.sample(8)
        check(batch, gpu, 8)
        batch["td_error"] = batch["next", "reward"].abs()
        buffer.update_tensordict_priority(batch)
        ere.eta, per.alpha, per.beta = 0.999, 0.3, 1.0


@pytest.mark.requirement("devices")
@each_number_of_lanes
def test_answers_of_the_index(gpu, num_envs):
    index = make_buffer(gpu, num_envs).episodes
    slots = index.random_slots(6)
    answers = [
        index.behind(slots),
        index.ahead(slots),
        index.shift(slots, index.ahead(slots)),
        index.ages(slots),
        index.slots_by_age(slots),
        index.episode_id(slots),
        index.is_finished(slots),
        index.is_whole(slots),
        index.num_rows.expand(6),
    ]
    assert all(answer.device == gpu and answer.shape == (6,) for answer in answers)
