"""PERSampler inside TorchRL's buffers and this package's: draws, new rows, late and bad priorities."""

import itertools
import json
import math
import pickle

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scipy.stats import chisquare
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RoundRobinWriter,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import PrioritizedSampler
from torchrl.data.replay_buffers.scheduler import LinearScheduler, StepScheduler

from trl_storages.priorities import ABSENT
from trl_storages.recipes import PrioritizedReplayStorage
from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage
from trl_storages.sample_units import EpisodeSequence
from trl_storages.samplers.base import UniformSampler
from trl_storages.samplers.emphasis import ERESampler, WindowSampler
from trl_storages.samplers.prioritized import PERSampler
from trl_storages.writing import EpisodeWriter


@pytest.fixture(params=["numba", "torch"])
def backend(request, monkeypatch):
    """The suite runs over both trees."""
    monkeypatch.setenv("TRL_STORAGES_BACKEND", request.param)


each_tree = pytest.mark.usefixtures("backend")


def rows(n, first=0):
    steps = torch.arange(first, first + n, dtype=torch.float32).unsqueeze(1)
    return TensorDict(
        {
            "observation": steps.expand(n, 3).clone(),
            "next": {"done": torch.zeros(n, 1, dtype=torch.bool), "reward": steps},
        },
        [n],
    )


def make_buffer(capacity=10, *, storage=LazyTensorStorage, seed=0, device="cpu", **options):
    return TensorDictReplayBuffer(
        storage=storage(capacity, device=device) if storage is not ListStorage else ListStorage(10),
        sampler=PERSampler(capacity, **options),
        generator=torch.Generator().manual_seed(seed),
    )


def reported(buffer, *priorities):
    """Fills the buffer and reports a priority for each of its rows."""
    buffer.extend(rows(len(priorities)))
    buffer.sampler.update_priority(torch.arange(len(priorities)), torch.tensor(priorities))
    return buffer


@pytest.mark.requirement("per-draws")
@each_tree
def test_rows_are_drawn_by_their_priorities():
    buffer = reported(make_buffer(alpha=0.5, beta=0.7), 1.0, 2.0, 3.0, 4.0)
    assert buffer.sampler.normalize == "batch"
    index, info = buffer.sampler.sample(buffer.storage, 50_000)
    roots = [math.sqrt(p) for p in (1, 2, 3, 4)]
    expected = [50_000 * root / sum(roots) for root in roots]
    assert chisquare(torch.bincount(index).numpy(), expected).pvalue > 1e-3
    # (p_min^alpha / p^alpha)^beta
    weights = torch.tensor([p ** (-0.5 * 0.7) for p in (1, 2, 3, 4)])
    torch.testing.assert_close(info["priority_weight"], weights[index], atol=1e-6, rtol=0)
    assert index.dtype is torch.int64
    assert info["priority_weight"].dtype is torch.float32


def exact_weights(drawn, there, alpha, beta, eps, normalize):
    """The weights of drawn priorities among those that could have been drawn, as plain numbers."""
    drawn, there = ([float(p) + eps for p in priorities] for priorities in (drawn, there))
    mean = sum(p**alpha for p in there) / len(there)
    top = {"batch": min(drawn), "storage": min(there)}.get(normalize)
    scale = mean if top is None else top**alpha
    return torch.tensor([(scale / p**alpha) ** beta for p in drawn])


@pytest.mark.requirement("per-draws")
@each_tree
@pytest.mark.parametrize("normalize", ["batch", "storage", "none"])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("windowed", [False, True])
def test_weights_are_normalised_as_they_should_be(normalize, num_envs, windowed):
    options = {"alpha": 0.6, "beta": 0.8, "eps": 1e-3, "normalize": normalize}
    per = PERSampler(40, **options)
    buffer = ReplayStorage(
        storage=PackedStorage(40),
        sampler=ERESampler(0.9, c_min=6, base=per) if windowed else per,
        writer=EpisodeWriter(num_envs),
        batch_size=3,
        generator=torch.Generator().manual_seed(1),
    )
    # Half filled, and wrapped.
    for num_steps in (18, 60):
        data = rows(num_steps)
        buffer.extend(data.reshape(num_envs, -1) if num_envs > 1 else data)
        slots = buffer.episodes.slots_by_age(torch.arange(len(buffer.episodes)))
        # One row without error, which small batches rarely have.
        buffer.update_priority(slots, torch.arange(len(slots)) / 4)
        if windowed:
            buffer.sampler.begin_phase(1)
            slots = slots[:6]
        for _ in range(20):
            batch = buffer.sample()
            drawn, there = per.priorities[batch["index"]], per.priorities[slots]
            expected = exact_weights(drawn, there, **options)
            torch.testing.assert_close(batch["priority_weight"], expected, rtol=1e-5, atol=1e-6)
            assert batch["priority_weight"].dtype is torch.float32
            if normalize == "batch":
                assert batch["priority_weight"].max() == 1


@pytest.mark.requirement("per-draws")
def test_one_row_without_error_leaves_the_weights_of_a_batch_alone():
    weights = {}
    for normalize in ("batch", "storage", "none"):
        buffer = make_buffer(1000, beta=1.0, normalize=normalize)
        reported(buffer, 0.0, *[1.0] * 999)
        weights[normalize] = buffer.sample(64)["priority_weight"]
    assert (weights["batch"] == 1).all()
    # (1e-6 / 1)^0.6
    assert weights["storage"].tolist() == pytest.approx([2.51e-4] * 64, rel=1e-2)
    assert weights["none"].tolist() == pytest.approx([1.0] * 64, rel=1e-2)


@pytest.mark.requirement("per-draws")
@each_tree
def test_weights_without_normalising_are_one_on_average():
    buffer = reported(make_buffer(100, beta=1.0, normalize="none"), *torch.arange(1, 101).tolist())
    weight = buffer.sample(50_000)["priority_weight"]
    assert weight.mean().item() == pytest.approx(1, abs=0.01)


@pytest.mark.requirement("per-draws")
@pytest.mark.requirement("sequences")
def test_each_step_of_a_sequence_has_the_weight_of_its_anchor():
    buffer = ReplayStorage(
        storage=PackedStorage(40),
        sampler=PERSampler(40, alpha=1.0, beta=1.0),
        sample_unit=EpisodeSequence(4, burn_in=1),
        batch_size=8,
    )
    buffer.extend(rows(40))
    buffer.update_priority(torch.arange(40), torch.arange(40.0) + 1)
    batch = buffer.sample()
    priority = batch["anchor_index"] + 1
    torch.testing.assert_close(batch["priority_weight"], priority.min() / priority)


@pytest.mark.requirement("live-parameters")
def test_normalize_may_change_between_samples_and_is_checked():
    buffer = reported(make_buffer(alpha=1.0, beta=1.0, eps=1e-6), 1.0, 4.0, 4.0, 4.0)
    seen = []
    for normalize in ("batch", "storage", "none", "batch"):
        buffer.sampler.normalize = normalize
        buffer.set_rng(torch.Generator().manual_seed(3))
        batch = buffer.sample(2)
        assert batch["index"].min() > 0
        seen.append(batch["priority_weight"][0].item())
    assert seen == pytest.approx([1.0, 0.25, 13 / 16, 1.0], rel=1e-4)
    for bad in ("sum", None, 1, ["batch"]):
        kind = ValueError if bad == "sum" else TypeError
        with pytest.raises(kind, match=r"one of \('batch', 'storage', 'none'\), got"):
            buffer.sampler.normalize = bad
        with pytest.raises(kind, match=r"normalize must be one of"):
            PERSampler(4, normalize=bad)
    assert buffer.sampler.normalize == "batch"


@pytest.mark.requirement("per-draws")
@each_tree
def test_alpha_zero_draws_uniformly():
    buffer = reported(make_buffer(alpha=0.0), 1.0, 100.0, 0.0, 1e6)
    index, info = buffer.sampler.sample(buffer.storage, 20_000)
    assert chisquare(torch.bincount(index).numpy()).pvalue > 1e-3
    assert (info["priority_weight"] == 1).all()


@pytest.mark.requirement("per-draws")
@each_tree
def test_a_row_without_error_is_still_drawn():
    buffer = reported(make_buffer(alpha=1.0, eps=0.5), 0.0, 0.5)
    index, _ = buffer.sampler.sample(buffer.storage, 30_000)
    counts = torch.bincount(index).numpy()
    assert chisquare(counts, [10_000, 20_000]).pvalue > 1e-3


@pytest.mark.requirement("per-draws")
@pytest.mark.parametrize("normalize", ["batch", "storage", "none"])
@pytest.mark.parametrize("num_envs", [0, 1, 3])
def test_both_backends_draw_the_same_batches_bit_for_bit(monkeypatch, normalize, num_envs):
    """Without a window, or (with lanes) within one; each is loaded from a dump of the other halfway."""
    choices, buffers = ("numba", "torch"), []
    for choice in choices:
        monkeypatch.setenv("TRL_STORAGES_BACKEND", choice)
        sampler = PERSampler(999, beta=0.7, normalize=normalize)
        buffers.append(
            ReplayStorage(
                storage=LazyTensorStorage(999),
                sampler=ERESampler(0.9, c_min=50, base=sampler) if num_envs else sampler,
                writer=EpisodeWriter(num_envs or 1),
                generator=torch.Generator().manual_seed(0),
                batch_size=37,
            )
        )
    for step in range(24):
        batches = []
        for choice, buffer in zip(choices, buffers, strict=True):
            monkeypatch.setenv("TRL_STORAGES_BACKEND", choice)
            data = rows(90, 90 * step)
            buffer.extend(data.reshape(num_envs, -1) if num_envs > 1 else data)
            batch = buffer.sample()
            batch["td_error"] = batch["next", "reward"].sin().abs()
            buffer.update_tensordict_priority(batch)
            batches.append(batch)
        for key in ("index", "priority_weight", "priority_stamp"):
            assert torch.equal(batches[0][key], batches[1][key])
        if step == 12:
            states = [buffer.sampler.state_dict() for buffer in buffers]
            for buffer, state in zip(buffers, reversed(states), strict=True):
                buffer.sampler.load_state_dict(state)


@pytest.mark.requirement("per-new")
@each_tree
def test_new_and_overwritten_rows_get_the_largest_raw_priority_at_once():
    buffer = make_buffer(alpha=0.5, eps=1e-6)
    sampler = buffer.sampler
    buffer.extend(rows(4))
    assert sampler.priorities[:5].tolist() == [1.0, 1.0, 1.0, 1.0, ABSENT]
    assert sampler.default_priority == 1.0
    sampler.update_priority(torch.tensor([0, 1]), torch.tensor([9.0, 4.0]))
    buffer.add(rows(1)[0])
    buffer.extend(rows(7))
    assert sampler.priorities.tolist() == [9, 9, 1, 1, 9, 9, 9, 9, 9, 9]
    # alpha once: the weight in the sum is sqrt(9), not 9 and not sqrt(sqrt(9)).
    assert float(sampler._table._tree.total) == pytest.approx(8 * 3 + 2, rel=1e-5)
    # The largest so far stays the largest when no row has it any more.
    sampler.update_priority(torch.arange(10), 0.25)
    buffer.add(rows(1)[0])
    assert sampler.priorities.tolist() == [0.25, 0.25, 9.0] + 7 * [0.25]
    assert sampler.default_priority == 9.0


@pytest.mark.requirement("per-new")
@each_tree
def test_rows_that_were_there_before_are_taken_in():
    buffer = make_buffer(alpha=0.5)
    buffer.extend(rows(6))
    buffer.set_sampler(PERSampler(10))
    assert set(buffer.sample(500)["index"].tolist()) == set(range(6))
    # And by a buffer around a storage that is filled already.
    second = TensorDictReplayBuffer(storage=buffer.storage, sampler=PERSampler(10), batch_size=500)
    assert set(second.sample()["index"].tolist()) == set(range(6))
    second.sampler.validate()


@pytest.mark.requirement("per-beta")
@each_tree
def test_beta_anneals_to_exactly_one_and_stays():
    buffer = reported(make_buffer(beta=0.4), 1.0, 4.0)
    scheduler = LinearScheduler(buffer, "beta", final_value=1.0, num_steps=7)
    seen = []
    for _ in range(20):
        scheduler.step()
        seen.append(buffer.sampler.beta)
    assert seen[:6] == pytest.approx([0.4 + 0.6 * k / 7 for k in range(1, 7)])
    assert seen[6:] == [1.0] * 14
    index, info = buffer.sampler.sample(buffer.storage, 100)
    weights = torch.tensor([1.0, 4**-0.6])[index]
    torch.testing.assert_close(info["priority_weight"], weights, atol=1e-6, rtol=0)


@pytest.mark.requirement("live-parameters")
@each_tree
def test_alpha_may_go_to_zero_and_come_back():
    buffer = reported(make_buffer(alpha=0.6), 0.1, 2.0, 3.0)
    buffer.sampler._rng = None

    def draws():
        torch.manual_seed(5)
        index, info = buffer.sampler.sample(buffer.storage, 64)
        return index, info["priority_weight"]

    before = draws()
    scheduler = StepScheduler(buffer, "alpha", gamma=-0.6, mode="additive", min_value=0.0)
    scheduler.step()
    assert buffer.sampler.alpha == 0.0
    assert (draws()[1] == 1).all()
    buffer.sampler.alpha = np.float64(0.6)
    for was, now in zip(before, draws(), strict=True):
        assert torch.equal(was, now)
    buffer.sampler.eps = 0.5
    draws()
    assert float(buffer.sampler._table._tree.total) == pytest.approx(0.6**0.6 + 2.5**0.6 + 3.5**0.6)
    buffer.sampler.validate()


@pytest.mark.requirement("live-parameters")
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("alpha", -0.1, r"\[0, 4\]"),
        ("alpha", math.nan, r"\[0, 4\]"),
        ("alpha", math.inf, r"\[0, 4\]"),
        ("beta", 1.01, r"\[0, 1\]"),
        ("beta", -1, r"\[0, 1\]"),
        ("eps", 0.0, r"\[1e-30, 1\]"),
        ("eps", 2, r"\[1e-30, 1\]"),
    ],
)
def test_nonsense_parameters_raise_and_change_nothing(name, value, allowed):
    with pytest.raises(ValueError, match=f"{name} must be in {allowed}, got {value}"):
        PERSampler(10, **{name: value})
    sampler = PERSampler(10)
    before = getattr(sampler, name)
    with pytest.raises(ValueError, match=f"{name} must be in {allowed}"):
        setattr(sampler, name, value)
    assert getattr(sampler, name) == before


def test_a_capacity_of_nothing_raises():
    with pytest.raises(ValueError, match="max_capacity must be an integer of at least 1, got 0"):
        PERSampler(0)


@pytest.mark.requirement("per-update")
@each_tree
@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf, -math.inf, -1e-30, 1e39])
def test_bad_priorities_raise_and_change_nothing(bad):
    buffer = reported(make_buffer(), 1.0, 2.0, 3.0)
    before = buffer.sampler.priorities
    priority = torch.tensor([5.0, bad, 6.0], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"finite and at least 0, got .* nothing was changed"):
        buffer.update_priority(torch.arange(3), priority)
    assert torch.equal(buffer.sampler.priorities, before)
    assert buffer.sampler.default_priority == 3.0
    buffer.sampler.validate()


@pytest.mark.requirement("per-update")
@each_tree
def test_minus_zero_is_zero():
    buffer = reported(make_buffer(), 1.0, 2.0)
    buffer.update_priority(torch.arange(2), torch.tensor([-0.0, 3.0]))
    assert buffer.sampler.priorities[:2].tolist() == [0.0, 3.0]
    buffer.sampler.validate()


@pytest.mark.requirement("per-update")
@each_tree
def test_of_repeated_indices_the_last_wins():
    buffer = reported(make_buffer(), 1.0, 1.0, 1.0)
    buffer.update_priority(torch.tensor([1, 2, 1, 1]), torch.tensor([5.0, 6.0, 7.0, 2.0]))
    assert buffer.sampler.priorities[:3].tolist() == [1.0, 2.0, 6.0]


@pytest.mark.requirement("per-update")
@each_tree
def test_indices_of_any_shape():
    buffer = reported(make_buffer(), *[1.0] * 6)
    index = torch.arange(6).reshape(2, 3).t()
    buffer.sampler.update_priority(index, torch.arange(6.0).reshape(3, 2))
    assert buffer.sampler.priorities[:6].tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]
    buffer.sampler.update_priority(index[:, ::2], 8.0)
    assert buffer.sampler.priorities[:6].tolist() == [8.0] * 3 + [1.0, 3.0, 5.0]
    buffer.sampler.update_priority(3, 4.0)
    buffer.sampler.update_priority([4, 5], torch.tensor([[6], [7]], dtype=torch.int32))
    assert buffer.sampler.priorities[3:6].tolist() == [4.0, 6.0, 7.0]
    with pytest.raises(ValueError, match=r"one priority for each of the 6 indices, got 5"):
        buffer.sampler.update_priority(index, torch.ones(5))
    with pytest.raises(ValueError, match="one stamp for each of the 6 indices, got 2"):
        buffer.sampler.update_priority(index, 1.0, stamp=torch.ones(2))
    with pytest.raises(TypeError, match=r"index must hold integers, got torch\.float32"):
        buffer.sampler.update_priority(torch.zeros(1), 1.0)


# What arithmetic between [B] and [B, 1] makes of errors, and of those of sequences [n, S].
SLIPS = {
    "flat": ([4], [4, 4]),
    "flat, with a last dimension": ([4], [4, 4, 1]),
    "mini-batches": ([2, 2], [2, 2, 2]),
    "one line": ([1, 4], [1, 4, 4]),
}


@pytest.mark.requirement("per-update")
@each_tree
@pytest.mark.parametrize(("batch_size", "shape"), SLIPS.values(), ids=SLIPS)
def test_errors_that_were_broadcast_raise_and_change_nothing(batch_size, shape):
    buffer = ReplayStorage(storage=PackedStorage(8), sampler=PERSampler(8), batch_size=4)
    buffer.extend(rows(8))
    batch = buffer.sample().reshape(*batch_size)
    batch["td_error"] = torch.rand(shape)
    before = buffer.sampler.priorities
    with pytest.raises(ValueError, match=r"'td_error' must have one value a row, shape .*, got"):
        buffer.update_tensordict_priority(batch)
    with pytest.raises(ValueError, match=r"one priority for each of the 4 indices, got"):
        buffer.update_priority(batch["index"], torch.rand(4, 4))
    assert torch.equal(buffer.sampler.priorities, before)
    assert buffer.sampler.default_priority == 1.0


@pytest.mark.requirement("per-update")
def test_the_notebook_s_slip_is_told_of():
    """gamma^m of [B, 1, 1] by rewards [B, 1]."""
    buffer = ReplayStorage(storage=PackedStorage(8), sampler=PERSampler(8), batch_size=6)
    buffer.extend(rows(8))
    batch = buffer.sample()
    steps = torch.ones(6, 1)
    batch["td_error"] = 0.9 ** steps.unsqueeze(-1) * batch["next", "reward"]
    with pytest.raises(
        ValueError, match=r"shape \[6\] or \[6, 1\], got \[6, 6, 1\], which comes of"
    ):
        buffer.update_tensordict_priority(batch)
    with pytest.raises(ValueError, match=r"got 36, of shape \[6, 6, 1\]"):
        buffer.update_priority(batch["index"], batch["td_error"])
    assert (buffer.sampler.priorities == 1).all()


@pytest.mark.requirement("per-update")
@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_several_errors_of_a_row_are_reduced(reduction):
    sampler = PERSampler(8, reduction=reduction)
    buffer = ReplayStorage(storage=PackedStorage(8), sampler=sampler, batch_size=6)
    buffer.extend(rows(8))
    for size, shape in (([6], [6, 3]), ([6], [6, 3, 1]), ([2, 3], [2, 3, 4]), ([1], [1, 5])):
        batch = buffer.sample(math.prod(size)).reshape(*size)
        error = batch["index"].reshape(*size, *[1] * (len(shape) - len(size))).expand(shape)
        batch["td_error"] = error.float().clone()
        buffer.update_tensordict_priority(batch)
        index = batch["index"].flatten()
        assert torch.equal(buffer.sampler.priorities[index], index.float())


@pytest.mark.requirement("per-update")
@each_tree
@pytest.mark.parametrize("wrap", [lambda it: it, lambda it: ERESampler(base=it)])
@pytest.mark.parametrize("method", ["add", "extend", "mark_update"])
@pytest.mark.parametrize("wrong", [10, torch.tensor([0, 10**9]), torch.tensor([[2**62, -1]])])
def test_an_index_that_is_no_slot_is_refused(wrong, method, wrap):
    buffer = reported(make_buffer(), 1.0, 2.0)
    priorities = buffer.sampler.priorities
    with pytest.raises(IndexError, match="index must be below max_capacity=10"):
        getattr(wrap(buffer.sampler), method)(wrong)
    assert torch.equal(buffer.sampler.priorities, priorities)
    buffer.sampler.validate()


@pytest.mark.requirement("per-update")
@each_tree
def test_unknown_indices_are_left_alone():
    buffer = reported(make_buffer(), 1.0, 2.0)
    index = torch.tensor([-1, 5, 0, -7])
    buffer.update_priority(index, torch.tensor([30.0, 40.0, 3.0, 50.0]))
    assert buffer.sampler.priorities.tolist() == [3.0, 2.0] + [ABSENT] * 8
    assert buffer.sampler.default_priority == 3.0
    buffer.update_priority(torch.tensor([7]), torch.tensor([9.0]))
    buffer.update_priority(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    with pytest.raises(IndexError, match=r"below max_capacity=10, got 10"):
        buffer.update_priority(torch.tensor([0, 10]), torch.ones(2))
    assert buffer.sampler.priorities.tolist() == [3.0, 2.0] + [ABSENT] * 8
    buffer.sampler.validate()


@pytest.mark.requirement("per-update")
@each_tree
def test_priorities_of_rows_that_are_gone_are_left_alone():
    buffer = reported(make_buffer(4), 1.0, 2.0, 3.0, 4.0)
    batch = buffer.sample(200)
    assert set(batch["index"].tolist()) == {0, 1, 2, 3}
    buffer.extend(rows(2))  # over slots 0 and 1
    buffer.sampler.update_priority(batch["index"], 0.5, stamp=batch["priority_stamp"])
    assert buffer.sampler.priorities.tolist() == [4.0, 4.0, 0.5, 0.5]
    # A later batch knows the new rows.
    batch = buffer.sample(200)
    buffer.sampler.update_priority(batch["index"], 0.25, stamp=batch["priority_stamp"])
    assert buffer.sampler.priorities.tolist() == [0.25] * 4
    # Emptying and loading make all rows others, also where the slot is filled again.
    buffer.sampler.load_state_dict(buffer.sampler.state_dict())
    buffer.sampler.update_priority(batch["index"], 9.0, stamp=batch["priority_stamp"])
    buffer.empty()
    buffer.extend(rows(4))
    buffer.sampler.update_priority(batch["index"], 9.0, stamp=batch["priority_stamp"])
    assert buffer.sampler.priorities.tolist() == [1.0] * 4


@pytest.mark.requirement("per-update")
@pytest.mark.parametrize("storage", [LazyTensorStorage, PackedStorage])
def test_the_container_hands_stamps_back(storage):
    buffer = ReplayStorage(
        storage=storage(4), sampler=PERSampler(4), writer=EpisodeWriter(), batch_size=32
    )
    buffer.extend(rows(4))
    batch = buffer.sample()
    buffer.extend(rows(2))
    batch["td_error"] = torch.full((32, 1), 0.5)
    buffer.update_tensordict_priority(batch)
    assert buffer.sampler.priorities.tolist() == [1.0, 1.0, 0.5, 0.5]


@each_tree
@pytest.mark.parametrize(
    "storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage, PackedStorage]
)
def test_a_loop_in_a_stock_buffer(storage):
    buffer = make_buffer(10, storage=storage, alpha=0.7, beta=0.9)
    assert isinstance(buffer.sampler, PrioritizedSampler)
    for step in range(12):
        if step % 3:
            buffer.add(rows(1, step)[0])
        else:
            buffer.extend(rows(3, step))
        batch = buffer.sample(32)
        assert batch["index"].max() < len(buffer)
        assert batch["priority_weight"].max() <= 1
        batch["td_error"] = torch.rand(32, 1)
        buffer.update_tensordict_priority(batch)
        expected = dict(zip(batch["index"].tolist(), batch["td_error"].flatten(), strict=True))
        priorities = buffer.sampler.priorities
        assert all(priorities[i] == p for i, p in expected.items())
    buffer.sampler.validate()


@each_tree
def test_rows_written_with_a_priority_keep_it():
    buffer = make_buffer()
    data = rows(3).set("td_error", torch.tensor([[1.0], [2.0], [3.0]]))
    buffer.extend(data)
    assert buffer.sampler.priorities[:3].tolist() == [1.0, 2.0, 3.0]
    buffer.add(data[0])
    assert buffer.sampler.priorities[3].item() == 1.0


@each_tree
@pytest.mark.parametrize("bad", [[[1.0], [math.nan], [2.0]], [[-1.0]] * 3, [[1.0, 2.0]] * 3])
def test_rows_with_a_bad_priority_are_not_written(bad):
    writer = EpisodeWriter(keys=["observation", ("next", "done"), ("next", "reward")])
    storage = ReplayStorage(storage=PackedStorage(10), sampler=PERSampler(10), writer=writer)
    storage.extend(rows(3))
    with pytest.raises(ValueError, match="priorit"):
        storage.extend(rows(3).set("td_error", torch.tensor(bad)))
    assert len(storage) == storage.write_count == 3
    storage.validate()


@each_tree
@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("emptied", [None, 0, 1])
def test_rows_that_were_written_while_another_sampler_drew(num_envs, emptied):
    writer, sampler = EpisodeWriter(num_envs), PERSampler(16)
    storage = ReplayStorage(storage=PackedStorage(16), writer=writer, sampler=sampler, batch_size=8)
    storage.extend(in_lanes(num_envs, 4))
    storage.update_priority(torch.arange(4), torch.tensor([3.0, 5.0, 2.0, 4.0]))
    storage.set_sampler(UniformSampler())
    if emptied is not None:
        storage.empty(keep_steps=emptied)
    slots = storage.extend(in_lanes(num_envs, 3, first=4)).flatten()
    storage.set_sampler(sampler)
    storage.validate()
    assert (sampler.priorities[slots] == (5 if emptied is None else 1)).all()
    if emptied is None:
        assert sampler.priorities[:4].tolist() == [3, 5, 2, 4]
    drawn = storage.sample(200)["index"]
    assert storage.episodes.is_live(drawn).all()


@pytest.mark.parametrize("emptied", [False, True])
def test_rows_that_were_written_while_a_sampler_had_another_base(emptied):
    sampler = PERSampler(16)
    storage = ReplayStorage(storage=PackedStorage(16), sampler=ERESampler(1.0, base=sampler))
    storage.extend(rows(8))
    assert storage.sample(4)["index"].max() < 8
    storage.sampler.base = UniformSampler()
    if emptied:
        storage.empty()
    storage.extend(rows(4, first=8))
    assert storage.sample(4)["index"].max() < 12
    storage.sampler.base = sampler
    drawn = storage.sample(400)["index"].unique()
    assert drawn.tolist() == [*range(4 if emptied else 12)]
    storage.validate()


def in_lanes(num_envs, num_steps, first=0):
    data = rows(num_steps, first)
    return data if num_envs == 1 else data.expand(num_envs, num_steps).contiguous()


def test_a_sampler_with_the_priorities_of_other_rows_begins_anew():
    sampler, saved = PERSampler(10), PERSampler(10)
    storage = ReplayStorage(storage=PackedStorage(10), sampler=sampler)
    storage.extend(rows(8))
    storage.update_priority(torch.arange(8), torch.arange(8) + 1.0)
    state = sampler.state_dict()
    storage.set_sampler(UniformSampler())
    for _ in range(2):
        other = ReplayStorage(storage=PackedStorage(10))
        other.extend(rows(2))
        other.set_sampler(sampler)
        other.validate()
        assert other.sample(100)["index"].max() < 2
        other.extend(rows(8, first=2))
        other.set_sampler(UniformSampler())
    other = ReplayStorage(storage=PackedStorage(10), sampler=sampler)
    other.extend(rows(2))
    other.validate()
    # Priorities of these very rows are kept.
    other = ReplayStorage(storage=PackedStorage(10))
    other.extend(rows(8))
    saved.load_state_dict(state)
    other.set_sampler(saved)
    assert saved.priorities[:8].tolist() == [*range(1, 9)]


def test_a_stock_writer_and_prefetching():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50),
        sampler=PERSampler(50),
        writer=RoundRobinWriter(track_generations=True),
        batch_size=32,
        prefetch=2,
    )
    for step in range(20):
        buffer.extend(rows(10, 10 * step))
        batch = buffer.sample()
        buffer.sampler.update_priority(batch["index"], torch.rand(32))
    buffer.sampler.validate()


def test_storages_that_do_not_fit_raise():
    with pytest.raises(ValueError, match="at most max_capacity=5 rows, got ndim=1 and 10"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=PERSampler(5)).extend(rows(2))
    flat = TensorDictReplayBuffer(storage=LazyTensorStorage(10, ndim=2), sampler=PERSampler(10))
    with pytest.raises(ValueError, match="ndim=1 and at most max_capacity=10 rows, got ndim=2"):
        flat.extend(rows(4).reshape(2, 2))
    empty = make_buffer()
    with pytest.raises(RuntimeError, match="the storage is empty"):
        empty.sample(32)
    assert not empty.sampler.can_sample(empty.storage, 4)


@pytest.mark.requirement("ere-per")
@each_tree
@pytest.mark.parametrize("num_envs", [1, 3])
def test_windows_hold_their_own_sum_and_minimum(num_envs):
    buffer = ReplayStorage(
        storage=LazyTensorStorage(30),
        sampler=PERSampler(30, alpha=0.5, beta=1.0),
        writer=EpisodeWriter(num_envs),
        generator=torch.Generator().manual_seed(0),
    )
    sampler = buffer.sampler
    assert isinstance(sampler, WindowSampler)
    for lane in range(num_envs):
        # Unequal lanes, the last of them has wrapped.
        data = rows(7 + 4 * lane).unsqueeze(0)
        buffer.sampler.extend(buffer.writer.extend(data, lanes=[lane]))
    episodes = buffer.episodes
    sampler.update_priority(torch.arange(30), 0.5 + torch.arange(30.0))
    for window in (1, 2, 5, len(episodes) - 1, len(episodes)):
        newest = episodes.slots_by_age(torch.arange(window))
        index, info = sampler.sample_window(buffer.storage, 20_000, torch.tensor(window))
        roots = sampler.priorities[newest].sqrt()
        counts = (index.unsqueeze(1) == newest).sum(0)
        assert counts.sum() == 20_000
        if window > 1:
            expected = (20_000 * roots / roots.sum()).double().numpy()
            expected *= 20_000 / expected.sum()
            assert chisquare(counts.numpy(), expected).pvalue > 1e-4
        weights = roots.min() / sampler.priorities[index].sqrt()
        torch.testing.assert_close(info["priority_weight"], weights, atol=1e-6, rtol=1e-5)
    sampler.validate()
    # Draws from all rows are the same as ever, and so are late priorities.
    batch = buffer.sample(32)
    assert sorted(set(batch["index"].tolist())) == sorted(
        set(batch["index"].tolist())
        & set(episodes.slots_by_age(torch.arange(len(episodes))).tolist())
    )
    batch["td_error"] = torch.full((32,), 0.125)
    buffer.update_tensordict_priority(batch)
    assert (sampler.priorities[batch["index"]] == 0.125).all()


@pytest.mark.requirement("clear")
@each_tree
def test_after_empty_it_is_as_new():
    buffer = reported(make_buffer(), 1.0, 20.0)
    buffer.empty()
    assert (buffer.sampler.priorities == ABSENT).all()
    assert buffer.sampler.default_priority == 1.0
    with pytest.raises(RuntimeError, match="the storage is empty"):
        buffer.sample(32)
    buffer.extend(rows(3))
    assert buffer.sampler.priorities[:4].tolist() == [1.0, 1.0, 1.0, ABSENT]
    buffer.sampler.validate()


@pytest.mark.requirement("persistence")
@each_tree
@pytest.mark.parametrize("through", ["state_dict", "files", "pickle"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_saved_and_loaded_it_draws_the_same(through, num_envs, tmp_path):
    def make(**options):
        return ReplayStorage(
            storage=LazyTensorStorage(20),
            sampler=PERSampler(20, **options),
            writer=EpisodeWriter(num_envs),
            batch_size=16,
        )

    first = make(alpha=0.8, beta=0.5, eps=1e-3, normalize="none")
    for step in range(15):
        first.extend(rows(num_envs * 2, step).reshape(num_envs, 2))
        first.sampler.update_priority(torch.arange(20), torch.rand(20) + step)
    first.sampler.sample_window(first.storage, 4, 3)
    second = make()
    if through == "state_dict":
        second.load_state_dict(first.state_dict())
    elif through == "files":
        first.dumps(tmp_path)
        second.loads(tmp_path)
        state = json.loads((tmp_path / "state.json").read_text())["_sampler"]
        assert state["alpha"] == 0.8
        assert (tmp_path / f"{state['priorities']['file']}.tensor").stat().st_size == 80
    else:
        second = pickle.loads(pickle.dumps(first))
    assert repr(second.sampler) == (
        "PERSampler(20, alpha=0.8, beta=0.5, eps=0.001, normalize='none')"
    )
    assert second.sampler.default_priority == first.sampler.default_priority
    for buffer in (first, second):
        buffer.set_rng(torch.Generator().manual_seed(7))
    for step in range(100):
        batches = [buffer.sample() for buffer in (first, second)]
        assert (batches[0] == batches[1]).exclude("priority_stamp").all()
        for buffer, batch in zip((first, second), batches, strict=True):
            batch["td_error"] = batch["observation"].sum(-1).cos().abs()
            buffer.update_tensordict_priority(batch)
            buffer.extend(rows(num_envs, step).reshape(num_envs, 1))
    second.sampler.validate()


@pytest.mark.requirement("persistence")
def test_a_state_of_another_size_or_a_torn_file_changes_nothing(tmp_path):
    other = reported(make_buffer(8), 1.0, 2.0).sampler
    other.dumps(tmp_path)
    sampler = reported(make_buffer(10), 3.0).sampler
    before = sampler.priorities
    for load in (
        lambda: sampler.load_state_dict(other.state_dict()),
        lambda: sampler.loads(tmp_path),
    ):
        with pytest.raises(ValueError, match=r"max_capacity.* must be 10, .*got 8"):
            load()
    file = tmp_path / "0.tensor"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="must have 32 bytes, got 28"):
        other.loads(tmp_path)
    file.write_bytes(np.array([1, 2, -3, math.nan, 5, 6, 7, 8], dtype="<f4").tobytes())
    with pytest.raises(ValueError, match="at least 0, got 2 others"):
        other.loads(tmp_path)
    assert other.priorities[:3].tolist() == [1.0, 2.0, ABSENT]
    assert torch.equal(sampler.priorities, before)


class TestOnADevice:
    """The path that knows nothing on the host, shown on the CPU, where its results can be read."""

    @pytest.fixture
    def buffer(self, monkeypatch):
        monkeypatch.setenv("TRL_STORAGES_BACKEND", "torch")
        buffer = make_buffer(6)
        buffer.sampler._table._on_host = False
        return reported(buffer, 1.0, 2.0, 3.0)

    @pytest.mark.requirement("per-update")
    def test_it_does_what_the_other_does(self, buffer):
        buffer.update_priority(torch.tensor([-1, 5, 0, 1, 0]), torch.tensor([9.0, 9, 4, 5, 6]))
        assert buffer.sampler.priorities.tolist() == [6.0, 5.0, 3.0] + [ABSENT] * 3
        buffer.extend(rows(4))
        assert buffer.sampler.priorities.tolist() == [6.0, 5.0, 3.0] + [6.0] * 3
        batch = buffer.sample(100)
        buffer.sampler.extend(torch.tensor([1, -1]))
        buffer.sampler.update_priority(batch["index"], 0.5, stamp=batch["priority_stamp"])
        assert buffer.sampler.priorities.tolist() == [0.5, 6.0] + [0.5] * 4
        buffer.empty()
        buffer.extend(rows(1))
        assert buffer.sampler.priorities.tolist() == [1.0] + [ABSENT] * 5
        buffer.sampler.validate()

    @pytest.mark.requirement("per-update")
    @pytest.mark.parametrize(
        ("index", "priority"),
        [([0, 1], [math.nan, 5.0]), ([0, 1], [5.0, -1.0]), ([0, 6], [5.0, 5])],
    )
    def test_what_is_wrong_changes_nothing_and_raises_later(self, buffer, index, priority):
        before = buffer.sampler.priorities
        for later in (
            lambda: buffer.update_priority(torch.tensor([0]), torch.tensor([8.0])),
            buffer.sampler.validate,
            buffer.sampler.state_dict,
        ):
            buffer.update_priority(torch.tensor(index), torch.tensor(priority))
            assert torch.equal(buffer.sampler.priorities, before)
            with pytest.raises(ValueError, match="an earlier update_priority got others"):
                later()
            assert torch.equal(buffer.sampler.priorities, before)
        # Once told, it goes on.
        buffer.update_priority(torch.tensor([0]), torch.tensor([8.0]))
        assert buffer.sampler.default_priority == 8.0


@pytest.mark.requirement("per-update")
@pytest.mark.requirement("devices")
@pytest.mark.parametrize("num_envs", [1, 3])
def test_nothing_waits_for_the_device(gpu, num_envs):
    storage = PackedStorage(24, device=gpu)
    sampler = PERSampler(24, device=gpu)
    buffer = ReplayStorage(storage=storage, sampler=sampler, writer=EpisodeWriter(num_envs))
    # The writer counts on the host, which a simulation cannot: its parts are called one by one.
    slots = buffer.episodes.next_slots(5).reshape(-1)
    data = rows(5 * num_envs).to(gpu)
    storage.set(slots, data, set_cursor=False)
    storage._len = 5 * num_envs
    buffer.episodes.append(torch.zeros(num_envs, 5, dtype=torch.bool, device=gpu))
    sampler.extend(slots)
    sampler.mark_update(slots, storage=storage)
    window = buffer.episodes.num_rows // 2
    draws = (sampler.sample, lambda *size: sampler.sample_window(*size, window))
    for draw, sampler.normalize in itertools.product(draws, ("batch", "storage", "none")):
        index, info = draw(storage, 16)
        assert index.shape == (16,)
        for tensor in (index, *info.values()):
            assert tensor.device == gpu
        priority = torch.rand(16, device=gpu)
        sampler.update_priority(index, priority, storage=storage, stamp=info["priority_stamp"])
    sampler.alpha, sampler.beta = 0.5, 1.0
    assert sampler.priorities.device == gpu


@pytest.mark.gpu
@pytest.mark.requirement("devices")
def test_on_a_gpu_it_draws_what_it_draws_on_the_cpu():
    buffers = [make_buffer(1000, device=device) for device in ("cpu", "cuda")]
    for buffer in buffers:
        reported(buffer, *torch.arange(1, 1001).sqrt().tolist())
        buffer.sampler.validate()
    noise = torch.empty(500, dtype=torch.int64).random_()
    draws = [b.sampler._table.draw(noise.to(b.sampler.device), 0.4, 1000) for b in buffers]
    for cpu, gpu in zip(*draws, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu)
    sampler = buffers[1].sampler
    sampler.update_priority(torch.tensor([3]), torch.tensor([math.nan]))
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="an earlier update_priority got others"):
        sampler.update_priority(torch.tensor([3]), torch.tensor([1.0]))


class SamplerMachine(RuleBasedStateMachine):
    """Random writes, samples, updates and changes in a stock buffer, against lists."""

    @initialize(capacity=st.integers(1, 12))
    def start(self, capacity):
        self.capacity = capacity
        self.buffer = make_buffer(capacity, alpha=0.6)
        self.forget()
        self.batch = None

    def forget(self):
        self.priorities = [ABSENT] * self.capacity
        self.written = [0] * self.capacity
        self.cursor, self.largest = 0, None

    @property
    def sampler(self):
        return self.buffer.sampler

    @rule(n=st.integers(1, 15), one_by_one=st.booleans())
    def write(self, n, one_by_one):
        n = min(n, self.capacity)
        if one_by_one:
            for i in range(n):
                self.buffer.add(rows(1, i)[0])
        else:
            self.buffer.extend(rows(n))
        for _ in range(n):
            self.priorities[self.cursor] = self.largest or 1.0
            self.written[self.cursor] += 1
            self.cursor = (self.cursor + 1) % self.capacity
            if one_by_one:
                # TorchRL's `add` reports the priority of a new row, as if it had been measured.
                self.largest = self.largest or 1.0

    def is_empty(self):
        return all(p == ABSENT for p in self.priorities)

    @precondition(lambda self: not self.is_empty())
    @rule()
    def sample(self):
        self.batch = self.buffer.sample(32)
        self.drawn_at = list(self.written)
        slots = self.batch["index"].tolist()
        least = min(self.priorities[i] for i in slots)
        for i, w in zip(slots, self.batch["priority_weight"].tolist(), strict=True):
            assert self.priorities[i] != ABSENT
            ratio = (least + 1e-6) / (self.priorities[i] + 1e-6)
            assert w == pytest.approx(ratio ** (self.sampler.alpha * self.sampler.beta), rel=1e-5)

    @precondition(lambda self: self.batch is not None)
    @rule(data=st.data())
    def update(self, data):
        index = self.batch["index"].tolist()
        number = st.floats(0, 1000, width=32)
        new = data.draw(st.lists(number, min_size=len(index), max_size=len(index)))
        self.sampler.update_priority(
            self.batch["index"], torch.tensor(new), stamp=self.batch["priority_stamp"]
        )
        for i, priority in zip(index, new, strict=True):
            if self.written[i] == self.drawn_at[i] and self.priorities[i] != ABSENT:
                self.priorities[i] = priority
                self.largest = max(self.largest or 0.0, priority)

    @rule(alpha=st.floats(0, 1), beta=st.floats(0, 1))
    def change(self, alpha, beta):
        self.sampler.alpha, self.sampler.beta = alpha, beta

    @rule(bad=st.sampled_from([math.nan, -1.0, math.inf]))
    def refuse(self, bad):
        with pytest.raises(ValueError, match="finite"):
            self.sampler.update_priority(torch.tensor([0]), torch.tensor([bad]))

    @rule()
    def empty(self):
        self.buffer.empty()
        self.forget()
        self.batch = None

    @rule()
    def save_and_load(self):
        state = self.buffer.state_dict()
        self.buffer = make_buffer(self.capacity)
        self.buffer.load_state_dict(state)
        self.batch = None

    @invariant()
    def holds_what_the_list_holds(self):
        assert self.sampler.priorities.tolist() == self.priorities
        assert self.sampler.default_priority == (self.largest or 1.0)
        self.sampler.validate()


@pytest.mark.requirement("per-update")
class TestSamplerMachine(SamplerMachine.TestCase):
    pass


class TestForgottenPriorities:
    """Priorities that are never reported are missed once, and only there."""

    def draw(self, buffer, count=1_000):
        for _ in range(count):
            buffer.sample(2)

    @pytest.mark.parametrize("is_windowed", [False, True])
    def test_are_missed_once(self, is_windowed):
        sampler = PERSampler(10)
        sampler = ERESampler(base=sampler) if is_windowed else sampler
        buffer = ReplayStorage(storage=PackedStorage(10), sampler=sampler, batch_size=2)
        buffer.extend(rows(10))
        self.draw(buffer, 999)
        with pytest.warns(UserWarning, match="no priority was ever reported") as caught:
            buffer.sample()
        assert [caught[0].filename, len(caught)] == [__file__, 1]
        self.draw(buffer)

    def test_once_reported_or_loaded_are_not_missed(self, tmp_path):
        told = ReplayStorage(storage=PackedStorage(10), sampler=PERSampler(10), batch_size=2)
        told.extend(rows(10))
        told.update_tensordict_priority(told.sample(), torch.ones(2))
        self.draw(told)
        told.dumps(tmp_path)
        loaded = ReplayStorage(storage=PackedStorage(10), sampler=PERSampler(10), batch_size=2)
        loaded.loads(tmp_path)
        self.draw(loaded)

    def test_of_a_directory_are_not_missed(self, tmp_path):
        spaces = Box(-1, 1, (1,)), Box(-1, 1, (1,))
        options = {"storage_size": 10, "batch_size": 2, "path": tmp_path / "rows"}
        made = PrioritizedReplayStorage(*spaces, **options)
        made.record([0.0], [0.0], 0.0, False, True, {}, [0.0])
        reader = ReplayStorage.open(options["path"], mode="r", sampler=PERSampler(10))
        self.draw(reader)
        made.close()
        resumed = PrioritizedReplayStorage(*spaces, **options)
        self.draw(resumed)
        resumed.close()
