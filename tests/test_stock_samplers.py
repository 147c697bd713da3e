"""Every sampler and sample unit, TorchRL's and ours, over lanes of equal and of unequal fill.

A batch never holds a slot without a row, and never joins two episodes; where a part can't keep that, it
is refused with the part to use.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torchrl.data.replay_buffers
import torchrl.data.replay_buffers.sample_units
import torchrl.data.replay_buffers.samplers
from goal_data import HISTORIES, AsDrawn, History, episode_flags, write
from scipy import stats
from tensordict import TensorDict
from torchrl.data import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.sample_units import SampleUnit, Sequence, Transition
from torchrl.data.replay_buffers.samplers import Sampler, SumSegmentTreeFp32

import trl_storages
import trl_storages.sample_units
import trl_storages.samplers
from trl_storages import (
    EpisodeSequence,
    EpisodeWriter,
    ERESampler,
    HERSampler,
    PackedStorage,
    PERSampler,
    ReplayStorage,
    UniformSampler,
)
from trl_storages.samplers import WrappingSampler

pytestmark = [
    pytest.mark.requirement("nothing-crosses"),
    pytest.mark.filterwarnings("ignore:A group .* was smaller:UserWarning"),
]

ONE_LANE = HISTORIES["wrapped"]
LEVEL = [
    HISTORIES["lanes"],
    History(24, 2, [([episode_flags([3], 2), episode_flags([1, 4])], None)]),
]
UNEQUAL = [HISTORIES["lanes of unequal fill"], HISTORIES["a lane wrapped, the others not"]]
STORAGES = [PackedStorage, LazyTensorStorage]
BUFFERS = [ReplayStorage, TensorDictReplayBuffer]

ROWS = r"UniformSampler\(\)|PERSampler"
SEQUENCES = r"EpisodeSequence\(length\).*sample_episodes"
DONE = ("next", "done")


@dataclass(frozen=True)
class Case:
    """A part, and what it does over lanes.

    `unequal` is None where it is right, else what the error says once lanes hold unequally many rows.
    `refused` says it of any storage with episodes.
    """

    make: Callable[[int], Sampler | SampleUnit]
    refused: str | None = None
    unequal: str | None = None
    needs_tree: bool = False


def slices(kind):
    return Case(lambda capacity: kind(slice_len=2, end_key=DONE), refused=SEQUENCES)


def staleness(capacity):
    return StalenessAwareSampler(staleness_weight_fn=torch.ones_like, version_key="action")


SAMPLERS = {
    "RandomSampler": Case(lambda capacity: RandomSampler()),
    "SamplerWithoutReplacement": Case(lambda capacity: SamplerWithoutReplacement()),
    "PrioritizedSampler": Case(
        lambda capacity: PrioritizedSampler(capacity, 0.7, 0.5), needs_tree=True
    ),
    "StalenessAwareSampler": Case(staleness, unequal=ROWS),
    "PromptGroupSampler": Case(
        lambda capacity: PromptGroupSampler(samples_per_group=1, group_key=DONE), unequal=ROWS
    ),
    "SliceSampler": slices(SliceSampler),
    "SliceSamplerWithoutReplacement": slices(SliceSamplerWithoutReplacement),
    "StreamingSliceSampler": slices(StreamingSliceSampler),
    "PrioritizedSliceSampler": Case(
        lambda capacity: PrioritizedSliceSampler(capacity, 0.7, 0.5, slice_len=2, end_key=DONE),
        refused=SEQUENCES,
        needs_tree=True,
    ),
    "ConsumingSampler": Case(lambda capacity: ConsumingSampler(), refused="UniformSampler"),
    "SamplerEnsemble": Case(
        lambda capacity: SamplerEnsemble(RandomSampler(), RandomSampler()),
        refused=r"ReplayStorageEnsemble.*UniformSampler",
    ),
    "UniformSampler": Case(lambda capacity: UniformSampler()),
    "PERSampler": Case(PERSampler),
    "ERESampler": Case(lambda capacity: ERESampler(1.0)),
    "HERSampler": Case(lambda capacity: HERSampler()),
}
UNITS = {
    "Transition": Case(lambda capacity: Transition()),
    "Sequence": Case(lambda capacity: Sequence(3), refused=SEQUENCES),
    "Sequence, include_reset": Case(
        lambda capacity: Sequence(3, "include_reset"), refused=SEQUENCES
    ),
    "EpisodeSequence": Case(lambda capacity: EpisodeSequence(3, burn_in=1)),
}
#: Not parts to draw with: what a subclass implements.
ABSTRACT = {"WrappingSampler"}

each_unit = pytest.mark.parametrize("name", UNITS)
each_buffer = pytest.mark.parametrize("kind", BUFFERS)
each_storage = pytest.mark.parametrize("storage_type", STORAGES)
#: A sampler, and what stands on it.
WRAPS = {
    "alone": lambda it: it,
    "under HERSampler": lambda it: HERSampler(goal_key="another_goal", base=it),
}
each_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def exported(base):
    """Returns the names of the samplers or units that TorchRL and this package export."""
    modules = [
        torchrl.data,
        torchrl.data.replay_buffers,
        torchrl.data.replay_buffers.samplers,
        torchrl.data.replay_buffers.sample_units,
        trl_storages,
        trl_storages.samplers,
        trl_storages.sample_units,
    ]
    return {
        name
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and not inspect.isabstract(value)
    }


def test_every_sampler_is_in_the_table():
    assert exported(Sampler) - ABSTRACT == set(SAMPLERS)
    assert inspect.isabstract(WrappingSampler)


def test_every_unit_is_in_the_table():
    assert exported(SampleUnit) == {name.partition(",")[0] for name in UNITS}


def make(kind, storage_type, history, sampler=None, unit=None, **options):
    if kind is ReplayStorage:
        options.setdefault("transform", AsDrawn())
    return kind(
        storage=storage_type(history.capacity),
        sampler=sampler or UniformSampler(),
        sample_unit=unit,
        writer=EpisodeWriter(history.num_envs),
        generator=torch.Generator().manual_seed(0),
        batch_size=6,
        **options,
    )


def part(case, capacity):
    if case.needs_tree and SumSegmentTreeFp32 is None:
        pytest.skip("needs TorchRL's native part")
    return case.make(capacity)


def drawn(buffer, oracle, num_batches=40):
    """Samples batches, and checks that each row is a live one. Returns them as rows of the model."""
    live, batches = oracle.live(), []
    for _ in range(num_batches):
        batch = buffer.sample()
        # TorchRL's buffers keep the coordinates of slices apart.
        rows = [live[slot] for slot in batch["index"].flatten().tolist()]
        assert batch["action"].tolist() == [row.payload * 10 + row.lane for row in rows]
        batches.append((batch, rows))
    return batches


def assert_in_time(rows, valid=None):
    """Each row is the next of its episode, as far as rows are valid."""
    for at, (row, after) in enumerate(pairwise(rows)):
        if valid is None or (valid[at] and valid[at + 1]):
            assert (after.lane, after.episode, after.step) == (row.lane, row.episode, row.step + 1)


def assert_sequences(batch, rows):
    """The rows of each sequence are the next of its episode, as far as they are valid."""
    numbers = batch.get("sequence_id", torch.arange(len(rows)))
    for number in numbers.unique():
        of_it = (numbers == number).nonzero().flatten().tolist()
        valid = [bool(batch["validity_mask"][at]) for at in of_it] if len(of_it) > 1 else None
        assert_in_time([rows[at] for at in of_it], valid)


def check(buffer, history):
    """Draws every live row, and no other."""
    oracle = history.write(buffer)
    seen = {oracle.slot(row) for _, rows in drawn(buffer, oracle) for row in rows}
    assert seen == set(oracle.live())
    buffer.shutdown()


def refuses_unequal(buffer, history, message):
    history.write(buffer)
    with pytest.raises(RuntimeError, match=message):
        buffer.sample()
    buffer.shutdown()


@each_buffer
@each_storage
@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        pytest.param(name, wrap, id=f"{name} {how}")
        for name in SAMPLERS
        for how, wrap in WRAPS.items()
        # HERSampler refuses slices, whatever the storage.
        if how == "alone" or "Slice" not in name
    ],
)
class TestSamplers:
    def wrapped(self, name, wrap, capacity):
        case = SAMPLERS[name]
        return case, wrap(part(case, capacity))

    def test_one_lane(self, name, wrap, storage_type, kind):
        case, sampler = self.wrapped(name, wrap, ONE_LANE.capacity)
        if case.refused:
            with pytest.raises(ValueError, match=case.refused):
                make(kind, storage_type, ONE_LANE, sampler)
        else:
            check(make(kind, storage_type, ONE_LANE, sampler), ONE_LANE)

    def test_lanes_of_equal_fill(self, name, wrap, storage_type, kind):
        for history in LEVEL:
            case, sampler = self.wrapped(name, wrap, history.capacity)
            if case.refused:
                with pytest.raises(ValueError, match=case.refused):
                    make(kind, storage_type, history, sampler)
            else:
                check(make(kind, storage_type, history, sampler), history)

    def test_lanes_of_unequal_fill(self, name, wrap, storage_type, kind):
        for history in UNEQUAL:
            case, sampler = self.wrapped(name, wrap, history.capacity)
            if case.refused:
                continue
            buffer = make(kind, storage_type, history, sampler)
            # TorchRL's own buffer hands TorchRL's own sampler the storage as it is, which draws for
            # the one by itself if it is packed, and knows all slots for the other if it is not.
            message = case.unequal
            if kind is TensorDictReplayBuffer and wrap is WRAPS["alone"]:
                right = {"RandomSampler": PackedStorage, "PrioritizedSampler": LazyTensorStorage}
                stock = type(sampler).__module__.startswith("torchrl")
                if stock and right.get(name) is not storage_type:
                    message = ROWS
            if message:
                refuses_unequal(buffer, history, message)
            else:
                check(buffer, history)


@each_buffer
@each_storage
@each_unit
def test_units(name, storage_type, kind):
    case = UNITS[name]
    for history in [ONE_LANE, *LEVEL, *UNEQUAL]:
        if case.refused:
            with pytest.raises(ValueError, match=case.refused):
                make(kind, storage_type, history, unit=case.make(0))
            continue
        buffer = make(kind, storage_type, history, unit=case.make(0))
        for batch, rows in drawn(buffer, history.write(buffer), 20):
            assert_sequences(batch, rows)


ONE_OF_A_LATER_RELEASE = type("Newest", (Sampler,), dict(vars(RandomSampler)))


def test_a_sampler_that_nobody_knows_yet():
    """TorchRL's next one may take neighbours for steps: it must be looked at first."""
    sampler = ONE_OF_A_LATER_RELEASE()
    with pytest.raises(ValueError, match=f"Newest is not known to be right over 3 lanes.*{ROWS}"):
        make(ReplayStorage, PackedStorage, LEVEL[0], sampler)
    check(make(ReplayStorage, PackedStorage, ONE_LANE, sampler), ONE_LANE)


class OwnSampler(RandomSampler):
    """A user's, who is trusted."""

    def sample(self, storage, batch_size):
        return storage.episodes.random_slots(batch_size, self._rng), {}


@each_buffer
def test_a_sampler_of_one_s_own(kind):
    check(make(kind, LazyTensorStorage, UNEQUAL[0], OwnSampler()), UNEQUAL[0])


@pytest.mark.parametrize("name", SAMPLERS)
def test_emphasis_over_it(name):
    """It keeps to a window only what can be told to."""
    sampler = part(SAMPLERS[name], 24)
    if name in ("UniformSampler", "PERSampler"):
        history = UNEQUAL[0]
        emphasis = ERESampler(1.0, base=sampler)
        check(make(ReplayStorage, PackedStorage, history, emphasis), history)
    else:
        with pytest.raises(TypeError, match=r"PERSampler.*sample_window"):
            ERESampler(base=sampler)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if "Slice" in name])
def test_hindsight_over_slices(name):
    with pytest.raises(TypeError, match="EpisodeSequence"):
        HERSampler(base=part(SAMPLERS[name], 24))


class TestLater:
    """What is set, or written, after buffer and storage have met."""

    @pytest.mark.parametrize("name", [name for name in SAMPLERS if "Slice" in name])
    def test_a_sampler_is_refused_when_it_is_set(self, name):
        storage = make(ReplayStorage, PackedStorage, LEVEL[0])
        before, sampler = storage.sampler, part(SAMPLERS[name], 24)
        with pytest.raises(ValueError, match=SEQUENCES):
            storage.set_sampler(sampler)
        assert storage.sampler is before

    @each_storage
    @pytest.mark.parametrize("name", [name for name in SAMPLERS if "Slice" in name])
    def test_or_when_it_draws(self, name, storage_type):
        """TorchRL's own buffer takes anything."""
        buffer, sampler = (
            make(TensorDictReplayBuffer, storage_type, LEVEL[0]),
            part(SAMPLERS[name], 26),
        )
        buffer.set_sampler(sampler)
        LEVEL[0].write(buffer)
        with pytest.raises(ValueError, match=SEQUENCES):
            buffer.sample()

    def test_rows_that_can_be_consumed_only(self):
        storage = make(ReplayStorage, PackedStorage, ONE_LANE)
        with pytest.raises(ValueError, match="consumed"):
            storage.set_sampler(ConsumingSampler())

    @each_storage
    @each_wrap
    def test_prefetch(self, storage_type, wrap):
        history = UNEQUAL[0]
        storage = make(
            ReplayStorage, storage_type, history, wrap(SamplerWithoutReplacement()), prefetch=2
        )
        check(storage, history)
        storage = make(ReplayStorage, storage_type, history, wrap(staleness(24)), prefetch=2)
        history.write(storage)
        with pytest.raises(RuntimeError, match=ROWS):
            storage.sample()
        storage.shutdown()


class TestUnequalFill:
    @pytest.mark.parametrize("history", UNEQUAL, ids=["two lanes", "three lanes"])
    @each_storage
    @each_wrap
    def test_an_epoch_is_each_row_once(self, history, storage_type, wrap):
        """Also where a full lane is written on meanwhile, which changes no slot that is live."""
        sampler = wrap(SamplerWithoutReplacement(drop_last=True))
        storage = make(ReplayStorage, storage_type, history, sampler)
        oracle = history.write(storage)
        size = len(storage.episodes)
        for _ in range(2):
            epoch = [storage.sample(1)["index"].item() for _ in range(size // 2)]
            full = [
                lane for lane in range(oracle.num_envs) if len(oracle.lanes[lane]) >= oracle.places
            ]
            if full:
                write(storage, oracle, [[False]], full[:1])
            epoch += [storage.sample(1)["index"].item() for _ in range(size - size // 2)]
            assert sorted(epoch) == sorted(oracle.live())

    @pytest.mark.native
    @pytest.mark.parametrize("history", UNEQUAL, ids=["two lanes", "three lanes"])
    @each_storage
    @each_wrap
    def test_priorities(self, history, storage_type, wrap):
        """Every live row by its priority, those that were stored before the sampler came included."""
        rows = make(ReplayStorage, storage_type, history)
        live = sorted(history.write(rows).live())
        sampler = PrioritizedSampler(history.capacity, 1.0, 1.0)
        storage = ReplayStorage(
            storage=rows.storage,
            sampler=wrap(sampler),
            transform=AsDrawn(),
            writer=EpisodeWriter(history.num_envs),
            generator=torch.Generator().manual_seed(1),
        )
        drawn = Counter(storage.sample(4000)["index"].tolist())
        assert stats.chisquare([drawn[slot] for slot in live]).pvalue > 1e-4
        slots = torch.tensor(live)
        sampler.update_priority(slots, (slots + 1).float())
        batch = storage.sample(20_000)
        drawn = Counter(batch["index"].tolist())
        expected = (slots + 1) / (slots + 1).sum() * 20_000
        assert stats.chisquare([drawn[slot] for slot in live], expected).pvalue > 1e-4
        torch.testing.assert_close(batch["priority_weight"], 1.0 / (batch["index"] + 1.0))


@pytest.mark.parametrize(
    "build",
    [
        lambda: {"sampler": SamplerWithoutReplacement()},
        pytest.param(
            lambda: {"sampler": PrioritizedSampler(24, 0.6, 0.4)}, marks=pytest.mark.native
        ),
        lambda: {"sampler": HERSampler(base=SamplerWithoutReplacement())},
    ],
)
@pytest.mark.parametrize("kind", [ReplayStorage, TensorDictReplayBuffer])
def test_those_that_number_slots_are_refused_over_a_directory(tmp_path, kind, build):
    """Its rows lie in some more slots, around a ring, so that the first ones hold none at times."""
    with pytest.raises(ValueError, match=r"directory.*UniformSampler"):
        kind(
            storage=PackedStorage(24, scratch_dir=tmp_path),
            writer=EpisodeWriter(),
            batch_size=4,
            **build(),
        )


def test_rows_whose_first_ones_were_evicted_are_each_drawn_once():
    storage = ReplayStorage(
        storage=PackedStorage(12),
        writer=EpisodeWriter(2),
        sampler=SamplerWithoutReplacement(),
        batch_size=7,
    )
    done = torch.zeros(2, 5, 1, dtype=torch.bool)
    storage.extend(TensorDict({"x": torch.arange(10.0).view(2, 5), "next": {"done": done}}, [2, 5]))
    storage.episodes.evict([3, 0])
    assert sorted(storage.sample()["x"].tolist()) == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
