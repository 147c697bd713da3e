"""ReplayStorageEnsemble: shares, order, weights and priorities, against plain loops."""

from fractions import Fraction
from itertools import product

import gymnasium
import numpy as np
import pytest
import torch
from goal_data import HISTORIES, distance_reward, goal_transitions
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, SamplerWithoutReplacement
from torchrl.envs.transforms import Compose, DTypeCastTransform, ExcludeTransform

from trl_storages import (
    EpisodeReplayStorage,
    EpisodeSequence,
    EpisodeWriter,
    ERESampler,
    GoalRelabel,
    HERSampler,
    NStep,
    PackedStorage,
    PERSampler,
    ReplayStorage,
    ReplayStorageEnsemble,
    UniformSampler,
)
from trl_storages.functional.draws import even_order, num_of_each

pytestmark = pytest.mark.requirement("ensembles")


def rows(num_rows, first=0):
    steps = torch.arange(first, first + num_rows)
    return goal_transitions(torch.zeros_like(steps), steps, steps % 4 == 3)


def make(num_rows=20, first=0, *, seed=0, capacity=40, device="cpu", path=None, **parts):
    """A storage of one lane, whose rows say by their step which one they are."""
    storage = ReplayStorage(
        storage=PackedStorage(capacity, device=device, scratch_dir=path),
        writer=EpisodeWriter(on_gap="ignore"),
        generator=torch.Generator(device).manual_seed(seed) if device == "cpu" else None,
        **parts,
    )
    if num_rows:
        storage.extend(rows(num_rows, first).to(device))
    return storage


def steps_of(batch):
    return batch["observation"][..., 0].long()


# Shares


@given(
    total=st.integers(0, 300),
    parts=st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
)
def test_shares_are_exact(total, parts):
    due = [Fraction(total * part, sum(parts)) for part in parts]
    counts = num_of_each(total, [part / sum(parts) for part in parts])
    assert sum(counts) == total
    left = [each - int(each) for each in due]
    extra = [count - int(each) for count, each in zip(counts, due, strict=True)]
    assert set(extra) <= {0, 1}
    # Nobody who gets no further one is due more of it than one who does.
    got = [part for part, more in zip(left, extra, strict=True) if more]
    not_got = [part for part, more in zip(left, extra, strict=True) if not more]
    assert not got or not not_got or min(got) >= max(not_got)


def test_shares_by_hand():
    assert num_of_each(7, (0.5, 0.5)) == [4, 3]
    assert num_of_each(3, (1 / 3,) * 3) == [1, 1, 1]
    assert num_of_each(1, (0.3, 0.7)) == [0, 1]
    assert num_of_each(10, (0.0, 1.0)) == [0, 10]


@given(counts=st.tuples(st.integers(0, 40), st.integers(0, 40)).filter(any))
def test_every_part_of_a_batch_has_its_share(counts):
    order = even_order(counts)
    assert sorted(order.tolist()) == list(range(sum(counts)))
    is_first = (order < counts[0]).long()
    # What one storage drew keeps its order.
    for mine in (order[is_first == 1], order[is_first == 0]):
        assert mine.tolist() == sorted(mine.tolist())
    sums = [0, *is_first.cumsum(0).tolist()]
    for start in range(len(sums)):
        for stop in range(start, len(sums)):
            due = Fraction((stop - start) * counts[0], sum(counts))
            assert abs(sums[stop] - sums[start] - due) <= 1


@pytest.mark.parametrize(
    ("shares", "batch_size", "counts"),
    [((0.5, 0.5), 9, [5, 4]), ((0.9, 0.1), 20, [18, 2]), (None, 8, [4, 4]), ((0, 1), 6, [0, 6])],
)
def test_a_batch(shares, batch_size, counts):
    ensemble = ReplayStorageEnsemble(
        make(20), make(30, first=1000), shares=shares, batch_size=batch_size
    )
    assert len(ensemble) == 50
    for batch in (ensemble.sample(), *ensemble.batches(2), ensemble.sample(batch_size)):
        assert batch.batch_size == (batch_size,)
        ids, steps = batch["buffer_ids"], steps_of(batch)
        assert torch.bincount(ids, minlength=2).tolist() == counts
        # Each row says where it lies, in its own storage.
        assert torch.equal(steps, batch["index"] + 1000 * ids)
        assert batch["next"].batch_size == batch.batch_size


def test_every_row_is_drawn_equally_often():
    ensemble = ReplayStorageEnsemble(make(8), make(5, first=100), shares=(0.25, 0.75))
    steps = steps_of(ensemble.sample(40_000))
    counts = torch.bincount(steps, minlength=105)
    assert counts.sum() == counts[:8].sum() + counts[100:].sum()
    assert counts[:8].sum() == 10_000
    assert stats.chisquare(counts[:8]).pvalue > 1e-4
    assert stats.chisquare(counts[100:]).pvalue > 1e-4


def test_seeds_and_one_generator():
    def storages():
        return make(20, seed=1), make(30, first=1000, seed=2)

    first, second = (ReplayStorageEnsemble(*storages(), batch_size=8) for _ in range(2))
    assert torch.equal(steps_of(first.sample()), steps_of(second.sample()))
    own = [
        ReplayStorageEnsemble(
            *storages(), batch_size=8, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (5, 5, 6)
    ]
    drawn = [steps_of(ensemble.sample()).tolist() for ensemble in own]
    assert drawn[0] == drawn[1] != drawn[2]


def test_members_draw_what_they_would_draw_alone():
    alone = [make(20, seed=1).sample(6), make(30, first=1000, seed=2).sample(2)]
    ensemble = ReplayStorageEnsemble(
        make(20, seed=1), make(30, first=1000, seed=2), shares=(0.75, 0.25)
    )
    batch, info = ensemble.sample(8, return_info=True)
    for number, expected in enumerate(alone):
        part = batch[batch["buffer_ids"] == number]
        assert torch.equal(steps_of(part), steps_of(expected))
    assert set(info) == {"buffer_ids", "index"}
    assert torch.equal(info["index"], batch["index"])
    # Whatever they draw ahead for themselves.
    ahead = ReplayStorageEnsemble(
        make(20, seed=1, prefetch=2, batch_size=9), make(30, first=1000), batch_size=4
    )
    assert ahead.sample().batch_size == (4,)


#: Rows that are gathered in one piece or field by field, and TorchRL's own.
KINDS = {
    "packed": (PackedStorage, 1),
    "packed and long": (PackedStorage, 2000),
    "TorchRL's": (LazyTensorStorage, 1),
}
SEEN = {
    "as stored": list,
    "in hindsight": lambda: [GoalRelabel(distance_reward)],
    "over n steps in hindsight": lambda: [GoalRelabel(distance_reward), NStep(3, 0.5)],
    "by a transform of TorchRL": lambda: [
        *(GoalRelabel(distance_reward), NStep(3, 0.5)),
        DTypeCastTransform(torch.float32, torch.float64, in_keys=["extra"]),
    ],
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize(
    ("first", "second"),
    # Batches of one ensemble have rows of one size.
    [pair for pair in product(KINDS, KINDS) if len({KINDS[kind][1] for kind in pair}) == 1],
)
def test_members_of_any_kind_are_seen_as_they_are_alone(first, second, seen):
    def member(kind, first):
        made, size = KINDS[kind]
        sampler = HERSampler(num_goals=2) if SEEN[seen]() else None
        storage = ReplayStorage(
            storage=made(40),
            sampler=sampler,
            transform=Compose(*SEEN[seen]()),
            writer=EpisodeWriter(on_gap="ignore"),
            generator=torch.Generator().manual_seed(first),
        )
        steps = rows(20, first)
        steps["extra"] = torch.rand(20, size, generator=torch.Generator().manual_seed(first))
        storage.extend(steps)
        return storage

    alone = [member(first, 0).sample(6), member(second, 1000).sample(2)]
    ensemble = ReplayStorageEnsemble(member(first, 0), member(second, 1000), shares=(0.75, 0.25))
    batch = ensemble.sample(8)
    for number, expected in enumerate(alone):
        part = batch[batch["buffer_ids"] == number].exclude("buffer_ids")
        assert {*part.keys(True, True)} == {*expected.keys(True, True)}
        assert (part == expected).all()
    # What was drawn stays as it was.
    before = batch.clone()
    ensemble.storages[0].extend(ensemble.storages[0][:])
    assert (batch == before).all()


def test_rows_and_samplers_of_torchrl():
    """Samplers that keep a state of their own, and rows in another storage."""
    theirs = ReplayStorage(storage=LazyTensorStorage(40), sampler=SamplerWithoutReplacement())
    theirs.extend(rows(20))
    ensemble = ReplayStorageEnsemble(theirs, make(30, first=1000), batch_size=8)
    seen = torch.cat([steps_of(batch) for batch in ensemble.batches(5)])
    assert sorted(seen[seen < 1000].tolist()) == list(range(20))
    assert len(seen[seen >= 1000]) == 20


# Goals, n steps, sequences


def test_each_storage_is_seen_through_its_own_transforms():
    offline = make(20, transform=NStep(3, 0.5))
    online = make(
        20,
        first=1000,
        sampler=HERSampler("future", num_goals=float("inf")),
        transform=Compose(GoalRelabel(distance_reward), NStep(1, 0.5)),
    )
    batch = ReplayStorageEnsemble(offline, online, batch_size=40).sample()
    is_online = batch["buffer_ids"] == 1
    assert torch.equal(batch["her_mask"], is_online)
    assert (batch["steps_to_next_obs"][is_online] == 1).all()
    assert (batch["steps_to_next_obs"][~is_online] == 3).any()
    # Where nobody drew a goal a row is its own.
    assert torch.equal(batch["goal_index"][~is_online], batch["index"][~is_online])
    goal_steps = batch["desired_goal"][is_online][:, 1].long()
    assert torch.equal(goal_steps, batch["goal_index"][is_online] + 1000)


@pytest.mark.parametrize("boundary", ["pad", "fit", "cross"])
def test_sequences_stay_whole(boundary):
    unit = EpisodeSequence(2, burn_in=1, bootstrap=1, boundary=boundary)
    storages = [
        make(20, sample_unit=unit, sampler=PERSampler(40, alpha=1.0)),
        make(30, 1000, sample_unit=unit),
    ]
    ensemble = ReplayStorageEnsemble(*storages, shares=(0.25, 0.75), batch_size=8)
    batch = ensemble.sample().reshape(8, 4)
    ids = batch["buffer_ids"]
    assert (ids == ids[:, :1]).all()
    assert ids[:, 0].tolist() == [1, 0, 1, 1, 1, 0, 1, 1]
    assert torch.equal(batch["sequence_id"], torch.arange(8).unsqueeze(1).expand(8, 4))
    assert torch.equal(batch["step_in_sequence"], torch.arange(4).expand(8, 4))
    steps = steps_of(batch)
    valid = batch["validity_mask"][:, 1:] & batch["validity_mask"][:, :-1]
    assert (steps.diff(dim=1)[valid] == 1).all()

    batch["td_error"] = torch.arange(1.0, 33.0).view(8, 4)
    ensemble.update_tensordict_priority(batch)
    expected = [1.0] * 20 + [float("inf")] * 20
    for line in (1, 5):
        learnt = batch["validity_mask"][line] & batch["learning_mask"][line]
        expected[batch["anchor_index"][line, 0]] = batch["td_error"][line][learnt].max().item()
    assert storages[0].sampler.priorities.tolist() == expected


# Priorities


def weights_by_hand(batch, samplers, alpha, beta):
    """(N P(i))^-beta of each row in its own storage, 1 where draws are uniform, by the largest of all."""
    weights = []
    for number, slot in zip(batch["buffer_ids"].tolist(), batch["index"].tolist(), strict=True):
        if samplers[number] is None:
            weights.append(1.0)
            continue
        priorities = samplers[number].priorities.double()
        weight = (priorities[priorities < float("inf")] + samplers[number].eps) ** alpha
        weights.append(float((weight.mean() / weight[slot]) ** beta))
    return torch.tensor([weight / max(weights) for weight in weights])


@pytest.mark.parametrize("normalize", ["batch", "storage", "none"])
@pytest.mark.parametrize("both", [False, True])
def test_weights_are_normalised_over_all_of_it(normalize, both):
    samplers = [
        PERSampler(40, alpha=0.7, beta=0.6, normalize=normalize) if both or number else None
        for number in range(2)
    ]
    storages = [make(20, sampler=samplers[0]), make(30, first=1000, sampler=samplers[1])]
    for number, sampler in enumerate(samplers):
        if sampler is not None:
            slots = torch.arange(len(storages[number]))
            storages[number].update_priority(slots, slots / 7 + number)
    ensemble = ReplayStorageEnsemble(*storages, batch_size=64)
    batch = ensemble.sample()
    expected = weights_by_hand(batch, samplers, 0.7, 0.6)
    torch.testing.assert_close(batch["priority_weight"], expected, rtol=1e-5, atol=0)
    # Alone, they weigh as they did.
    alone = storages[1].sample(500)["priority_weight"]
    assert samplers[1].normalize == normalize
    assert (alone.max() == 1) == (normalize != "none")


def test_weights_within_a_window_of_recent_rows():
    per = PERSampler(40, alpha=1.0, beta=1.0)
    online = make(30, first=1000, sampler=ERESampler(0.9, c_min=5, base=per))
    online.update_priority(torch.arange(30), torch.arange(1.0, 31.0))
    online.sampler.begin_phase(1)
    batch = ReplayStorageEnsemble(make(20), online, batch_size=20).sample()
    drawn = batch[batch["buffer_ids"] == 1]
    assert (drawn["index"] >= 25).all()
    # Slots 25 .. 29 have priorities 26 .. 30, 28 on average.
    weight = 28 / (drawn["index"] + 1 + per.eps)
    largest = max(float(weight.max()), 1.0)
    torch.testing.assert_close(drawn["priority_weight"], (weight / largest).float())


@pytest.mark.requirement("per-update")
@pytest.mark.parametrize("shape", [[12], [3, 4]])
def test_priorities_go_back_to_where_the_rows_are(shape):
    samplers = [PERSampler(40, alpha=1.0), None, PERSampler(40, alpha=1.0)]
    storages = [
        make(20, first=1000 * number, sampler=sampler) for number, sampler in enumerate(samplers)
    ]
    ensemble = ReplayStorageEnsemble(*storages, batch_size=12)
    batch = ensemble.sample().reshape(shape)
    batch["td_error"] = torch.arange(1.0, 13.0).view(*shape, 1)
    # A row that was overwritten meanwhile is left alone.
    storages[2].extend(rows(40, first=5000))
    ensemble.update_tensordict_priority(batch)
    expected = torch.ones(20)
    for row in batch.reshape(-1):
        if row["buffer_ids"] == 0:
            expected[row["index"]] = row["td_error"].item()
    assert torch.equal(samplers[0].priorities[:20], expected)
    assert (samplers[2].priorities == 1).all()

    ensemble.update_priority(torch.tensor([3, 3]), torch.tensor([7.0, 9.0]), torch.tensor([0, 2]))
    assert (samplers[0].priorities[3], samplers[2].priorities[3]) == (7, 9)


def test_priorities_go_back_to_rows_in_directories(tmp_path):
    """They lie in more slots than there are rows."""
    samplers = [PERSampler(40, alpha=1.0), PERSampler(40, alpha=1.0)]
    storages = [
        make(70, sampler=sampler, path=tmp_path / name)
        for name, sampler in zip("ab", samplers, strict=True)
    ]
    ensemble = ReplayStorageEnsemble(*storages, batch_size=64)
    batch = ensemble.sample()
    assert (batch["index"] >= 40).any()
    batch["td_error"] = 2.0 + batch["index"]
    ensemble.update_tensordict_priority(batch)
    for number, sampler in enumerate(samplers):
        drawn = batch[batch["buffer_ids"] == number]["index"]
        assert torch.equal(sampler.priorities[drawn], 2.0 + drawn)


@pytest.mark.parametrize(
    ("index", "buffer_ids", "error"),
    [
        ([1, 2], [0, 2], ValueError("buffer_ids must be numbers of storages, below 2, got 2")),
        ([1, 2], [0, -1], ValueError("buffer_ids must be numbers of storages, below 2, got -1")),
        (
            [1, 40],
            [0, 1],
            IndexError("index must be below 40, the number of slots of storage 1, got 40"),
        ),
    ],
)
@pytest.mark.parametrize("of_a_batch", [False, True])
def test_priorities_of_rows_that_no_storage_has_change_nothing(
    index, buffer_ids, error, of_a_batch
):
    samplers = [PERSampler(40), PERSampler(40)]
    ensemble = ReplayStorageEnsemble(*(make(20, sampler=sampler) for sampler in samplers))
    batch = ensemble.sample(2)
    batch["index"], batch["buffer_ids"] = torch.tensor(index), torch.tensor(buffer_ids)
    batch["td_error"] = torch.full((2,), 5.0)
    update, given = ensemble.update_priority, ("index", "td_error", "buffer_ids")
    arguments = [batch[key] for key in given]
    if of_a_batch:
        update, arguments = ensemble.update_tensordict_priority, [batch]
    with pytest.raises(type(error), match=str(error)):
        update(*arguments)
    assert all((sampler.priorities[:20] == 1).all() for sampler in samplers)


def test_attributes_of_an_ensemble_can_not_be_misspelt():
    ensemble = ReplayStorageEnsemble(make(8), make(8))
    with pytest.raises(AttributeError, match="no attribute 'share'; do you mean shares"):
        ensemble.share = (0, 1)
    ensemble.shares = np.array([0.25, 0.75])
    assert ensemble.shares == (0.25, 0.75)


def test_priorities_that_must_not_be_change_nothing():
    samplers = [PERSampler(40), PERSampler(40)]
    ensemble = ReplayStorageEnsemble(*(make(20, sampler=sampler) for sampler in samplers))
    batch = ensemble.sample(8)
    with pytest.raises(KeyError, match="td_error"):
        ensemble.update_tensordict_priority(batch)
    # In the second storage only: the first one is not updated either.
    batch["td_error"] = torch.where(batch["buffer_ids"] == 1, torch.nan, 5.0)
    with pytest.raises(ValueError, match="finite"):
        ensemble.update_tensordict_priority(batch)
    with pytest.raises(KeyError, match="buffer_ids"):
        ensemble.update_tensordict_priority(batch.exclude("buffer_ids"))
    with pytest.raises(
        ValueError, match=r"buffer_ids must have the shape of index, \[2\], got \[1\]"
    ):
        ensemble.update_priority(torch.arange(2), torch.rand(2), torch.zeros(1, dtype=torch.int64))
    for sampler in samplers:
        assert (sampler.priorities[:20] == 1).all()


def test_a_member_may_get_another_sampler():
    storages = make(20), make(20)
    ensemble = ReplayStorageEnsemble(*storages, batch_size=8)
    storages[1].set_sampler(PERSampler(40, normalize="batch"))
    batch = ensemble.sample()
    assert (batch["priority_weight"] == 1).all()
    batch["td_error"] = torch.full((8,), 7.0)
    ensemble.update_tensordict_priority(batch)
    drawn = batch["index"][batch["buffer_ids"] == 1]
    assert (storages[1].sampler.priorities[drawn] == 7).all()
    ensemble.update_priority(torch.tensor([3]), torch.tensor([9.0]), torch.tensor([1]))
    assert storages[1].sampler.priorities[3] == 9
    storages[1].set_sampler(UniformSampler())
    assert "priority_weight" not in ensemble.sample().keys()  # noqa: SIM118


def test_threads_that_draw_batches_of_different_sizes():
    class Overtaken(ReplayStorageEnsemble):
        """Another thread draws as soon as the order of a batch is known."""

        @property
        def _order(self):
            return self.__dict__["kept"]

        @_order.setter
        def _order(self, value):
            self.__dict__["kept"] = value
            if value[0] is not None and sum(value[0][0]) == 8:
                self._order_of([1, 1], 1, torch.device("cpu"))

    ensemble = Overtaken(make(20), make(20), batch_size=8)
    assert ensemble.sample()["buffer_ids"].tolist() == [0, 1] * 4


def test_without_priorities_nothing_happens():
    ensemble = ReplayStorageEnsemble(make(20), make(20))
    batch = ensemble.sample(8)
    assert "priority_weight" not in batch.keys()  # noqa: SIM118
    ensemble.update_tensordict_priority(batch)


# What does not go together


def state_of(ensemble):
    return [
        (storage._rng.get_state().tolist(), getattr(storage.sampler, "update", None))
        for storage in ensemble.storages
    ]


def cast(key, dtype):
    return DTypeCastTransform(torch.float32, dtype, in_keys=[key])


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            lambda: ExcludeTransform("effort"),
            r"'effort' is torch\.float64 \[1\] on cpu in storage 0 and missing",
        ),
        (
            lambda: ExcludeTransform(("next", "reward")),
            r"\('next', 'reward'\) is .* missing in storage 1",
        ),
        (
            lambda: cast(("next", "reward"), torch.float64),
            r"reward'\) is torch\.float32 \[1\] on cpu in storage 0 and torch\.float64 \[1\] on cpu in",
        ),
        (lambda: NStep(2), "'steps_to_next_obs' is missing in storage 0 and torch.int64"),
    ],
)
def test_other_entries_are_an_error_and_nothing_is_drawn(transform, message):
    sampler = ERESampler(c_min=3)
    ensemble = ReplayStorageEnsemble(
        make(20, sampler=sampler), make(20, transform=transform()), batch_size=8
    )
    sampler.begin_phase(5)
    before = state_of(ensemble)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            ensemble.sample()
        assert state_of(ensemble) == before
    # One of them alone goes.
    ensemble.shares = (1.0, 0.0)
    assert ensemble.sample().batch_size == (8,)
    assert ensemble.shares == (1.0, 0.0)


def test_a_storage_that_cant_give_its_share():
    full, empty = make(20), make(0)
    ensemble = ReplayStorageEnsemble(full, empty, batch_size=8)
    before = state_of(ensemble)
    assert not ensemble.can_sample()
    with pytest.raises(
        RuntimeError, match="storage 1 of the ensemble must give 4 samples, but it holds 0"
    ):
        ensemble.sample()
    assert state_of(ensemble) == before
    # Of a single sample it gives none.
    assert ensemble.can_sample(1)
    assert ensemble.sample(1)["buffer_ids"].tolist() == [0]
    empty.extend(rows(3))
    assert ensemble.can_sample()
    assert ensemble.sample().batch_size == (8,)


def test_an_interrupt_is_raised_as_it_is(monkeypatch):
    storages = make(20), make(0)

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(storages[0], "_sample_part", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ReplayStorageEnsemble(*storages).sample(8)


def test_goals_that_no_transform_writes():
    ensemble = ReplayStorageEnsemble(make(20), make(20, sampler=HERSampler()), batch_size=8)
    before = state_of(ensemble)
    with pytest.raises(RuntimeError, match="GoalRelabel"):
        ensemble.sample()
    assert state_of(ensemble) == before


def test_samples_of_unequal_size():
    sequences = make(20, sample_unit=EpisodeSequence(3))
    with pytest.raises(
        ValueError, match=r"equally many rows .* \[4, 12\] rows of \[4, 4\] samples"
    ):
        ReplayStorageEnsemble(make(20), sequences, batch_size=8).sample()
    space = gymnasium.spaces.Box(-1, 1, (2,))
    episodes = EpisodeReplayStorage(space, space, storage_size=20, batch_size=2, on_gap="ignore")
    flags = {key: torch.tensor([[False], [True]]) for key in ("done", "terminated")}
    flags["truncated"] = torch.zeros(2, 1, dtype=torch.bool)
    data = {"observation": torch.rand(2, 2), "action": torch.rand(2, 2)}
    data["next"] = {"observation": torch.rand(2, 2), "reward": torch.rand(2, 1), **flags}
    episodes.extend(TensorDict(data, [2]))
    with pytest.raises(ValueError, match="EpisodeReplayStorage gives whole episodes"):
        ReplayStorageEnsemble(episodes, batch_size=2).sample()


def test_storages_that_do_not_fit():
    storage = make(20)
    with pytest.raises(TypeError, match="ReplayStorages, got"):
        ReplayStorageEnsemble(storage, PackedStorage(3))
    for wrong in ((), (storage, storage)):
        with pytest.raises(ValueError, match="different ones, at least one"):
            ReplayStorageEnsemble(*wrong)
    for shares in ((0.5, 0.6), (1.0,), (0.5, 0.25, 0.25)):
        with pytest.raises(ValueError, match="2 numbers, one for each storage, which add up to 1"):
            ReplayStorageEnsemble(storage, make(20), shares=shares)
    with pytest.raises(RuntimeError, match="batch_size must be given"):
        ReplayStorageEnsemble(storage).sample()


@pytest.mark.native
def test_priorities_of_torchrl_do_not_fit():
    theirs = ReplayStorage(storage=LazyTensorStorage(40), sampler=PrioritizedSampler(40, 1.0, 1.0))
    with pytest.raises(ValueError, match="PERSampler, got PrioritizedSampler"):
        ReplayStorageEnsemble(make(20), theirs)


# Care


def test_explain():
    online = make(
        20,
        first=1000,
        sampler=HERSampler(base=PERSampler(40)),
        transform=GoalRelabel(distance_reward),
    )
    ensemble = ReplayStorageEnsemble(make(20), online, batch_size=10)
    batch = ensemble.sample()
    explanation = ensemble.explain(batch)
    assert torch.equal(explanation["storage"], batch["buffer_ids"])
    assert torch.equal(explanation["slot"], batch["index"])
    assert torch.equal(explanation["relabelled"], batch["her_mask"])
    assert torch.equal(explanation["age"], 19 - batch["index"])
    assert "10 samples of 40 rows" in str(explanation)
    text = repr(ensemble)
    assert "0.5 of ReplayStorage(" in text
    assert "batch_size=10" in text


@pytest.mark.requirement("devices")
def test_nothing_waits_for_the_gpu(gpu):
    def parts():
        return {"sampler": PERSampler(40), "device": gpu}

    relabelled = {
        "sampler": HERSampler(base=PERSampler(40)),
        "transform": GoalRelabel(distance_reward),
        "device": gpu,
    }
    ensemble = ReplayStorageEnsemble(make(20, **parts()), make(20, **relabelled), batch_size=8)
    batch = ensemble.sample()
    assert all(value.device == gpu for value in batch.values(True, True))
    batch["td_error"] = torch.rand(8, device=gpu)
    ensemble.update_tensordict_priority(batch)


@pytest.mark.parametrize("history", ["lanes", "wrapped"])
def test_over_lanes(history):
    storages = []
    for _ in range(2):
        history_of = HISTORIES[history]
        storages.append(
            ReplayStorage(
                storage=PackedStorage(history_of.capacity),
                writer=EpisodeWriter(history_of.num_envs),
                sampler=PERSampler(history_of.capacity),
            )
        )
        model = history_of.write(storages[-1])
    batch = ReplayStorageEnsemble(*storages, batch_size=30).sample()
    live = model.live()
    for slot, observation in zip(
        batch["index"].tolist(), batch["observation"].tolist(), strict=True
    ):
        assert observation[:2] == [live[slot].step, live[slot].lane]
