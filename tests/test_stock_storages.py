"""EpisodeWriter over every storage that TorchRL exports: it works there, or says what it needs."""

import inspect

import pytest
import torch
import torchrl.data.replay_buffers
from goal_data import HISTORIES, distance_reward, goal_transitions, write
from oracles import RingOracle
from torchrl.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    Storage,
    StorageEnsemble,
    StoreStorage,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.envs.transforms import Compose

import trl_storages
from trl_storages import (
    EpisodeWriter,
    GoalRelabel,
    HERSampler,
    NStep,
    PackedStorage,
    ReplayStorage,
    ReplayStorageEnsemble,
    UniformSampler,
)

SIZE = 17
HISTORY = HISTORIES["wrapped"]


def rows(num_rows):
    """Rows `[num_rows]` of one lane, whose episodes have four steps each."""
    steps = torch.arange(num_rows)
    return goal_transitions(torch.zeros_like(steps), steps, steps % 4 == 3)


#: Where episodes are kept: a name -> what makes the storage, given a new directory.
WORKING = {
    "LazyTensorStorage": lambda path: LazyTensorStorage(SIZE),
    "LazyTensorStorage, shared": lambda path: LazyTensorStorage(SIZE, shared_init=True),
    "LazyTensorStorage, compilable": lambda path: LazyTensorStorage(SIZE, compilable=True),
    "LazyMemmapStorage": lambda path: LazyMemmapStorage(SIZE),
    "LazyMemmapStorage, scratch_dir": lambda path: LazyMemmapStorage(SIZE, scratch_dir=path),
    "PackedStorage": lambda path: PackedStorage(SIZE),
    "PackedStorage, scratch_dir": lambda path: PackedStorage(SIZE, scratch_dir=path),
}
#: What is refused when buffer and storage meet: a name -> (what makes the storage, error, its message).
NO_TENSORS = (TypeError, r"EpisodeWriter needs a storage of tensors.*LazyTensorStorage, got ")
REFUSED = {
    "ListStorage": (lambda path: ListStorage(SIZE), *NO_TENSORS),
    "ListStorage, device": (
        lambda path: ListStorage(SIZE, device=torch.device("cpu")),
        *NO_TENSORS,
    ),
    "LazyStackStorage": (lambda path: LazyStackStorage(SIZE), *NO_TENSORS),
    "LazyStackStorage, device": (
        lambda path: LazyStackStorage(SIZE, device=torch.device("cpu")),
        *NO_TENSORS,
    ),
    "CompressedListStorage": (lambda path: CompressedListStorage(SIZE), *NO_TENSORS),
    "CompressedListStorage, device": (
        lambda path: CompressedListStorage(SIZE, device=torch.device("cpu")),
        *NO_TENSORS,
    ),
    "StorageEnsemble": (lambda path: StorageEnsemble(LazyTensorStorage(SIZE)), *NO_TENSORS),
    "LazyTensorStorage, device unknown": (
        lambda path: LazyTensorStorage(SIZE, device="auto"),
        *NO_TENSORS,
    ),
    "LazyTensorStorage, two dimensions": (
        lambda path: LazyTensorStorage(SIZE, ndim=2),
        ValueError,
        "ndim=1, got ndim=2: .* pass num_envs to the writer",
    ),
    "TensorStorage": (
        lambda path: TensorStorage(rows(SIZE)),
        ValueError,
        "must be empty, or written by an EpisodeWriter, got 17 rows without episodes: .*extend",
    ),
    "TensorStorage of a tensor": (
        lambda path: TensorStorage(torch.zeros(SIZE, 3)),
        ValueError,
        "must be empty, or written by an EpisodeWriter, got 17 rows",
    ),
}
#: Needs a server, which is not asked for here.
REFUSED["StoreStorage"] = (lambda path: StoreStorage.__new__(StoreStorage), *NO_TENSORS)


def exported(module):
    """Returns the names of the storages that a module exports, without their base."""
    return {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Storage) and value is not Storage
    }


def named_in(table):
    """Returns the classes that the rows of a table are about."""
    return {name.partition(",")[0].partition(" ")[0] for name in table}


def test_every_storage_is_in_the_tables():
    there = exported(torchrl.data) | exported(torchrl.data.replay_buffers) | exported(trl_storages)
    assert there == named_in(WORKING) | named_in(REFUSED)


def make(storage, **options):
    return ReplayStorage(
        storage=storage,
        sampler=HERSampler(),
        transform=Compose(GoalRelabel(distance_reward), NStep(3, 0.5)),
        generator=torch.Generator().manual_seed(0),
        **options,
    )


@pytest.mark.parametrize("make_storage", WORKING.values(), ids=WORKING)
class TestWorking:
    def test_batches_are_those_of_rows_in_memory(self, make_storage, tmp_path):
        """Also after more rows than fit, and after all were forgotten."""
        buffer, model = make(make_storage(tmp_path / "rows")), make(PackedStorage(SIZE))
        for _ in range(2):
            for storage in (buffer, model):
                HISTORY.write(storage)
            assert len(buffer) == SIZE
            batch, expected = buffer.sample(200), model.sample(200)
            for key in ("index", "goal_index"):
                # A directory has slots of its own for the same rows.
                for storage, drawn in ((buffer, batch), (model, expected)):
                    drawn[key] = storage.episodes.ages(drawn[key])
            for key in expected.keys(include_nested=True, leaves_only=True):
                assert torch.equal(batch[key], expected[key]), key
            buffer.validate()
            for storage in (buffer, model):
                storage.empty()
                assert len(storage) == 0

    def test_length_with_lanes_of_unequal_fill(self, make_storage, tmp_path):
        """Slots that no lane has reached yet are no rows, though they lie before others."""
        buffer = make(make_storage(tmp_path / "rows"), writer=EpisodeWriter(2))
        live = 0
        for lanes, flags in (([1], [False, True]), ([0], [False]), ([1], [True])):
            write(buffer, RingOracle(SIZE, 2), [flags], lanes, anew=True)
            live += len(flags)
            assert len(buffer) == len(buffer.episodes) == live

    def test_in_a_stock_buffer(self, make_storage, tmp_path):
        storage = make_storage(tmp_path / "rows")
        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=HERSampler(), writer=EpisodeWriter()
        )
        live = HISTORY.write(buffer).live()
        batch = buffer.sample(200)
        # The slots of a ring without spare steps, which a directory has.
        slots = storage.episodes.steps(batch["index"]) % SIZE
        assert batch["action"].tolist() == [live[slot].payload * 10 for slot in slots.tolist()]


@pytest.mark.parametrize("kind", [ReplayStorage, TensorDictReplayBuffer])
@pytest.mark.parametrize(("make_storage", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(make_storage, error, message, kind, tmp_path):
    with pytest.raises(error, match=message):
        kind(storage=make_storage(tmp_path / "rows"), writer=EpisodeWriter())


@pytest.mark.parametrize("make_storage", [LazyTensorStorage, PackedStorage])
def test_rows_that_no_episode_writer_wrote(make_storage):
    """Draws would be among rows that the episode index knows nothing of."""
    buffer = TensorDictReplayBuffer(storage=make_storage(SIZE), writer=RoundRobinWriter())
    buffer.extend(rows(5))
    with pytest.raises(ValueError, match="got 5 rows without episodes"):
        buffer.set_writer(EpisodeWriter())
    assert getattr(buffer.storage, "episodes", None) is None
    assert len(buffer) == 5


@pytest.mark.requirement("ensembles")
@pytest.mark.parametrize(
    ("sampler", "transform"),
    [
        (UniformSampler, lambda: None),
        (HERSampler, lambda: GoalRelabel(distance_reward)),
        (UniformSampler, lambda: NStep(3, 0.5)),
    ],
    ids=["rows", "goals", "n steps"],
)
def test_torchrls_ensemble_says_what_to_use_instead(sampler, transform):
    """It hands the members' transforms neither their storage nor what was drawn."""
    members = [
        ReplayStorage(
            storage=PackedStorage(SIZE), sampler=sampler(), transform=transform(), batch_size=4
        )
        for _ in range(2)
    ]
    for member in members:
        HISTORY.write(member)
    with pytest.raises(ValueError, match="ReplayStorageEnsemble"):
        ReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True)
    # The members go on as if nobody had asked.
    for member in members:
        assert member.sample().batch_size == (4,)
    assert ReplayStorageEnsemble(*members, batch_size=8).sample().batch_size == (8,)


@pytest.mark.requirement("ensembles")
def test_parts_that_storages_share_are_no_ensemble():
    storage, writer = PackedStorage(SIZE), EpisodeWriter()
    first, second = (ReplayStorage(storage=storage, writer=writer) for _ in range(2))
    HISTORY.write(first)
    assert second.sample(3).batch_size == (3,)
    members = [
        TensorDictReplayBuffer(storage=PackedStorage(SIZE), writer=EpisodeWriter(), batch_size=4)
        for _ in range(2)
    ]
    for member in members:
        HISTORY.write(member)
    # Of TorchRL's own buffers it is one.
    ensemble = ReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True)
    assert ensemble.sample().numel() == 8
