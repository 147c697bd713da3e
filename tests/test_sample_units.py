"""EpisodeSequence: which rows an anchor grows into, against the plain-Python ring and TorchRL."""

from types import SimpleNamespace

import gymnasium
import pytest
import torch
from goal_data import HISTORIES, distance_reward, goals
from hypothesis import given
from hypothesis import strategies as st
from n_step_oracle import assert_folded, fold
from oracles import RingOracle
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.sample_units import SampleUnit, Sequence

from trl_storages import UniformReplayStorage, sequence_priority
from trl_storages.replay import ReplayStorage, ReplayStorageEnsemble
from trl_storages.ring import EpisodeIndex
from trl_storages.rows import PackedStorage
from trl_storages.sample_units import EpisodeSequence
from trl_storages.samplers import ERESampler, HERSampler, PERSampler
from trl_storages.transforms import GoalRelabel, NStep
from trl_storages.writing import EpisodeWriter

pytestmark = pytest.mark.requirement("sequences")

ENTRIES = {
    "anchor_index",
    "sequence_id",
    "step_in_sequence",
    "validity_mask",
    "learning_mask",
    "is_init",
}
BOUNDARIES = ["pad", "fit", "cross"]
each_boundary = [
    pytest.mark.parametrize("boundary", BOUNDARIES),
    pytest.mark.requirement("sequence-boundaries"),
]


def at_each_boundary(test):
    for mark in each_boundary:
        test = mark(test)
    return test


def assert_grows(unit, storage, model):
    """Every live row of the ring grows into the rows that the model names."""
    live = model.live()
    anchors = torch.tensor(list(live))
    weight = torch.arange(len(live)) / 8
    index, info = unit.expand(anchors, {"weight": weight, "note": 7}, storage)
    assert set(info) == {*ENTRIES, "weight", "note"}
    assert info.pop("note") == 7
    assert info["is_init"].shape == (len(live) * unit.num_steps, 1)
    index, info = (
        index.view(-1, unit.num_steps),
        {name: value.view(-1, unit.num_steps) for name, value in info.items()},
    )
    for i, (slot, row) in enumerate(live.items()):
        rows, valid = model.sequence(row, unit.burn_in, unit.length + unit.bootstrap, unit.boundary)
        assert index[i].tolist() == [model.slot(other) for other in rows]
        assert info["validity_mask"][i].tolist() == valid
        assert info["is_init"][i].tolist() == [model.begins(other) for other in rows]
        assert info["anchor_index"][i].tolist() == [slot] * unit.num_steps
        assert info["sequence_id"][i].tolist() == [i] * unit.num_steps
        assert info["weight"][i].tolist() == [i / 8] * unit.num_steps
    steps = torch.arange(unit.num_steps)
    learning = (steps >= unit.burn_in) & (steps < unit.burn_in + unit.length)
    assert torch.equal(info["learning_mask"], learning.expand_as(index))
    assert torch.equal(info["step_in_sequence"], steps.expand_as(index))


@pytest.mark.requirement("sequence-boundaries")
@pytest.mark.parametrize(
    ("boundary", "rows", "valid"),
    [
        ("pad", [*(3, 4, 4, 4), *(5, 5, 0, 1), *(0, 1, 2, 2)], "1100 0111 1110"),
        # Of steps 3 and 4 alone, both are there to learn from; 5 .. 8 are as many as are asked for.
        ("fit", [*(3, 3, 4, 4), *(5, 0, 1, 2), *(5, 0, 1, 2)], "0110 1111 1111"),
        ("cross", [*(3, 4, 5, 0), *(4, 5, 0, 1), *(0, 1, 2, 2)], "1111 1111 1110"),
    ],
)
def test_boundaries_by_hand(boundary, rows, valid):
    storage = SimpleNamespace(episodes=EpisodeIndex(6))
    # Steps 0 .. 8 with an end at step 4: slots 0 1 2 hold 6 7 8, and slots 3 4 5 hold 3 4 5.
    storage.episodes.append((torch.arange(9) == 4).unsqueeze(0))
    unit = EpisodeSequence(2, burn_in=1, bootstrap=1, boundary=boundary)
    index, info = unit.expand(torch.tensor([4, 5, 1]), {}, storage)
    assert index.tolist() == rows
    assert info["validity_mask"].tolist() == [flag == "1" for flag in valid if flag != " "]
    assert info["learning_mask"].tolist() == [False, True, True, False] * 3
    assert info["anchor_index"].tolist() == [4] * 4 + [5] * 4 + [1] * 4
    # Step 5 begins an episode; the one before has lost its beginning.
    assert info["is_init"].flatten().tolist() == [row == 5 for row in rows]


def test_a_sequence_by_hand():
    storage = SimpleNamespace(episodes=EpisodeIndex(6))
    # Steps 0 .. 8 with an end at step 4: slots 0 1 2 hold 6 7 8, and slots 3 4 5 hold 3 4 5.
    done = torch.arange(9) == 4
    storage.episodes.append(done.unsqueeze(0))
    unit = EpisodeSequence(2, burn_in=1, bootstrap=1)
    index, info = unit.expand(torch.tensor([4, 5, 1]), {}, storage)
    assert index.tolist() == [3, 4, 4, 4, 5, 5, 0, 1, 0, 1, 2, 2]
    assert info["validity_mask"].tolist() == [
        *(True, True, False, False),
        *(False, True, True, True),
        *(True, True, True, False),
    ]
    assert info["learning_mask"].tolist() == [False, True, True, False] * 3
    assert info["anchor_index"].tolist() == [4] * 4 + [5] * 4 + [1] * 4


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("sizes", [(1, 0, 0), (5, 0, 0), (3, 2, 1), (2, 9, 9)])
@at_each_boundary
def test_all_histories_against_the_model(history, sizes, boundary):
    buffer = ReplayStorage(
        storage=PackedStorage(history.capacity), writer=EpisodeWriter(history.num_envs)
    )
    model = history.write(buffer)
    assert_grows(EpisodeSequence(*sizes, boundary=boundary), buffer.storage, model)


@at_each_boundary
@pytest.mark.parametrize("history", ["wrapped", "lanes of unequal fill"])
def test_on_disk(history, boundary, tmp_path):
    """What the writer and a reader draw, told by what the rows hold."""
    history = HISTORIES[history]
    unit = EpisodeSequence(3, burn_in=2, bootstrap=1, boundary=boundary)
    options = {"sample_unit": unit, "batch_size": 30}
    buffer = ReplayStorage(
        storage=PackedStorage(history.capacity, scratch_dir=tmp_path / "rows"),
        writer=EpisodeWriter(history.num_envs),
        **options,
    )
    model = history.write(buffer)
    rows = {(row.lane, row.step): row for row in model.live().values()}
    buffer.flush()
    reader = ReplayStorage.open(tmp_path / "rows", mode="r", **options)
    for storage in (buffer, reader):
        for line in storage.sample().reshape(-1, unit.num_steps):
            said = line["observation"][:, [1, 0]].long().tolist()
            # The lane and the step of the row that was drawn.
            drawn = storage.storage.get(line["anchor_index"][:1])["observation"][0].long().tolist()
            expected, valid = model.sequence(rows[drawn[1], drawn[0]], 2, 4, boundary)
            assert said == [[row.lane, row.step] for row in expected]
            assert line["validity_mask"].tolist() == valid
            assert line["is_init"].flatten().tolist() == [model.begins(row) for row in expected]
    reader.close()
    buffer.close()


@given(data=st.data())
def test_any_history_against_the_model(data):
    num_envs = data.draw(st.integers(1, 3))
    capacity = data.draw(st.integers(num_envs, 16))
    storage = SimpleNamespace(episodes=EpisodeIndex(capacity, num_envs))
    model = RingOracle(capacity, num_envs)
    lanes = st.lists(st.integers(0, num_envs - 1), min_size=1, unique=True)
    for _ in range(data.draw(st.integers(1, 3))):
        written = data.draw(lanes)
        num_steps = data.draw(st.integers(1, 12))
        flags = st.lists(
            st.lists(st.sampled_from([False, False, True]), min_size=num_steps, max_size=num_steps),
            min_size=len(written),
            max_size=len(written),
        )
        done, cut = data.draw(flags), data.draw(flags)
        storage.episodes.append(torch.tensor(done), torch.tensor(cut), written)
        model.append(done, cut, written)
    size = st.integers(0, 5)
    sizes = data.draw(size) + 1, data.draw(size), data.draw(size)
    for boundary in BOUNDARIES:
        assert_grows(EpisodeSequence(*sizes, boundary=boundary), storage, model)


@pytest.mark.requirement("sequence-boundaries")
@given(
    done=st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=30),
    length=st.integers(1, 5),
    burn_in=st.integers(0, 4),
    bootstrap=st.integers(0, 3),
    boundary=st.sampled_from(["pad", "stop", "include_reset"]),
)
def test_equals_torchrls_sequence(done, length, burn_in, bootstrap, boundary):
    # TorchRL's never moves for the burn-in.
    burn_in = 0 if boundary == "stop" else burn_in
    storage = LazyTensorStorage(12)
    buffer = TensorDictReplayBuffer(storage=storage, writer=EpisodeWriter(), batch_size=5)
    # In pieces, since TorchRL knows the newest row by the last write only.
    for piece in torch.tensor(done).split(5):
        buffer.extend(TensorDict({"next": {"done": piece.unsqueeze(-1)}}, [len(piece)]))
    anchors = torch.arange(len(storage))
    info = {"priority_weight": anchors / 2}
    ours = EpisodeSequence(length, burn_in, bootstrap, boundary=boundary)
    theirs = Sequence(length, boundary, burn_in=burn_in, bootstrap=bootstrap)
    assert ours.episode_boundary == boundary
    index, said = ours.expand(anchors, info, storage)
    expected, expected_info = theirs.expand(anchors, info, storage)
    assert torch.equal(index, expected)
    assert said.pop("is_init").dtype is torch.bool
    assert set(said) == set(expected_info)
    for name, value in expected_info.items():
        assert torch.equal(said[name], value), name
        assert said[name].dtype is value.dtype


@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_a_batch_of_sequences(storage):
    unit = EpisodeSequence(4, burn_in=2, bootstrap=1)
    assert isinstance(unit, SampleUnit)
    buffer = TensorDictReplayBuffer(
        storage=storage(20), writer=EpisodeWriter(), sample_unit=unit, batch_size=16
    )
    step = torch.arange(33)
    done = (step % 6 == 5).unsqueeze(-1)
    buffer.extend(TensorDict({"step": step, "next": {"done": done}}, [33]))
    batch = buffer.sample().reshape(16, unit.num_steps)
    assert torch.equal(batch["step"] % 20, batch["index"])
    valid = batch["validity_mask"]
    assert valid[:, unit.burn_in].all()
    # Valid rows are consecutive steps of the anchor's episode.
    anchor = batch["step"][:, unit.burn_in].unsqueeze(1)
    wanted = anchor + batch["step_in_sequence"] - unit.burn_in
    assert torch.equal(batch["step"][valid], wanted[valid])
    assert torch.equal((batch["step"] // 6)[valid], (anchor // 6).expand(-1, 7)[valid])
    inside = (wanted // 6 == anchor // 6) & (wanted >= 13) & (wanted < 33)
    assert torch.equal(valid, inside)


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@at_each_boundary
def test_a_sequence_has_one_goal(history, boundary):
    unit = EpisodeSequence(3, burn_in=1, bootstrap=2, boundary=boundary)
    buffer = ReplayStorage(
        storage=PackedStorage(history.capacity),
        writer=EpisodeWriter(history.num_envs),
        sampler=HERSampler("future", num_goals=4),
        sample_unit=unit,
        transform=GoalRelabel(distance_reward),
        batch_size=50,
        generator=torch.Generator().manual_seed(1),
    )
    model = history.write(buffer)
    live = model.live()
    flat = buffer.sample()
    batch = flat.reshape(50, unit.num_steps)
    mask = batch["her_mask"]
    assert mask.sum() == 40 * unit.num_steps
    assert (mask == mask[:, :1]).all()
    relabelled = batch[mask[:, 0]]
    goal = relabelled["desired_goal"]
    assert (goal == goal[:, :1]).all()
    for line in relabelled:
        anchor, source = live[int(line["anchor_index"][0])], live[int(line["goal_index"][0])]
        assert source in model.goals(anchor, "future")
        expected = goals(torch.tensor(float(source.lane)), torch.tensor(float(source.step)), 1.0)
        assert torch.equal(line["desired_goal"][0], expected)
    reward = distance_reward(
        relabelled["next", "achieved_goal"], relabelled["desired_goal"], None
    ).unsqueeze(-1)
    torch.testing.assert_close(relabelled["next", "reward"], reward)


@pytest.mark.requirement("per-update")
@pytest.mark.parametrize(
    ("emphasis", "batch_size", "last"),
    [(False, [30], []), (True, [6, 5], []), (False, [-1, 5], [1]), (False, [2, 15], [1, 1])],
)
def test_priorities_of_rows_reach_their_anchors_only(emphasis, batch_size, last):
    unit = EpisodeSequence(3, burn_in=1, bootstrap=1)
    priorities = PERSampler(20, alpha=1.0)
    buffer = ReplayStorage(
        storage=PackedStorage(20),
        writer=EpisodeWriter(),
        sampler=ERESampler(c_min=20, base=priorities) if emphasis else priorities,
        sample_unit=unit,
        batch_size=6,
    )
    done = (torch.arange(33) % 6 == 5).unsqueeze(-1)
    buffer.extend(TensorDict({"next": {"done": done}}, [33]))
    batch = buffer.sample()
    batch = batch.reshape(*batch_size)
    batch["td_error"] = torch.arange(1.0, 31.0).reshape(*batch.batch_size, *last)
    buffer.update_tensordict_priority(batch)

    # The largest error of the valid rows to learn from; of an anchor drawn twice, the last counts.
    expected = [1.0] * 20
    for line in batch.reshape(-1, unit.num_steps):
        learnt = line["validity_mask"] & line["learning_mask"]
        expected[line["anchor_index"][0]] = line["td_error"][learnt].max().item()
    assert priorities.priorities.tolist() == expected


@pytest.mark.requirement("per-update")
@at_each_boundary
@pytest.mark.parametrize("last", [[], [1]])
@pytest.mark.parametrize("per_row", [False, True])
def test_a_batch_of_the_size_of_its_sequences(boundary, last, per_row):
    """One priority a sequence, or one a row, as many rows as sequences too."""
    unit = EpisodeSequence(3, burn_in=1, bootstrap=1, boundary=boundary)
    priorities = PERSampler(20, alpha=1.0)
    buffer = ReplayStorage(
        storage=PackedStorage(20), sampler=priorities, sample_unit=unit, batch_size=5
    )
    done = (torch.arange(33) % 6 == 5).unsqueeze(-1)
    buffer.extend(TensorDict({"next": {"done": done}}, [33]))
    batch = buffer.sample().reshape(5, 5)
    batch.batch_size = [5]
    error = torch.arange(1.0, 26.0).reshape(5, 5)
    learnt = batch["validity_mask"] & batch["learning_mask"]
    mixed = sequence_priority(error, mask=learnt)
    batch["td_error"] = (error if per_row else mixed).reshape(5, *[5] * per_row, *last)
    buffer.update_tensordict_priority(batch)
    expected = torch.ones(20)
    for line in range(5):
        anchor = batch["anchor_index"][line, 0]
        expected[anchor] = error[line][learnt[line]].max() if per_row else mixed[line]
    assert torch.equal(priorities.priorities, expected)

    batch["td_error"] = torch.rand(5, 3)
    with pytest.raises(ValueError, match=r"one value a sequence, shape \[5\], by .* got \[5, 3\]"):
        buffer.update_tensordict_priority(batch)
    assert torch.equal(priorities.priorities, expected)


#: What a training loop may have: how it sees a batch of n sequences, and the shape of its priorities.
SEEN = {
    "as sampled": lambda batch: batch,
    "reshaped": lambda batch: batch.reshape(6, 4),
    "of the size of its sequences": lambda batch: resized(batch.reshape(6, 4)),
}
GIVEN = {
    **{
        f"one a sequence {last}": (lambda it, last=last: it[0].reshape(6, *last))
        for last in ([], [1])
    },
    **{
        f"one a row {shape}": (lambda it, shape=shape: it[1].reshape(shape))
        for shape in ([24], [24, 1], [6, 4], [6, 4, 1])
    },
    "two a row": lambda it: torch.stack([it[1].reshape(24), it[1].reshape(24) / 2], -1),
    "two a row of a sequence": lambda it: torch.stack([it[1] / 2, it[1]], -1),
    "a list": lambda it: it[0].tolist(),
}


def resized(batch):
    batch.batch_size = batch.batch_size[:1]
    return batch


@pytest.mark.requirement("per-update")
@pytest.mark.parametrize("kind", [ReplayStorage, ReplayStorageEnsemble])
@pytest.mark.parametrize("form", GIVEN)
@pytest.mark.parametrize("seen", SEEN)
def test_priorities_of_sequences_in_every_form(seen, form, kind):
    unit = EpisodeSequence(2, burn_in=1, bootstrap=1)
    done = (torch.arange(18) % 6 == 5).unsqueeze(-1)
    samplers = [PERSampler(20, alpha=1.0), PERSampler(20, alpha=1.0)]
    storages = []
    for sampler in samplers:
        storages.append(
            ReplayStorage(
                storage=PackedStorage(20), sampler=sampler, sample_unit=unit, batch_size=6
            )
        )
        storages[-1].extend(TensorDict({"next": {"done": done}}, [18]))
    made = storages[0] if kind is ReplayStorage else kind(*storages, batch_size=6)
    batch = made.sample()
    rows = batch.reshape(6, 4)
    learnt = rows["validity_mask"] & rows["learning_mask"]
    error = torch.rand(6, 4)
    mixed = sequence_priority(error, mask=learnt)

    made.update_tensordict_priority(SEEN[seen](batch), GIVEN[form]((mixed, error)))

    expected = torch.ones(2, 20)
    of_row = torch.where(learnt, error, 0).amax(1)
    for line in range(6):
        storage = 0 if kind is ReplayStorage else rows["buffer_ids"][line, 0]
        value = mixed if form.startswith(("one a sequence", "a list")) else of_row
        expected[storage, rows["anchor_index"][line, 0]] = value[line]
    for sampler, priorities in zip(samplers, expected, strict=True):
        assert torch.equal(sampler.priorities[:18], priorities[:18])
    for wrong in ([5], [6, 3], [4, 6], [23], [24, 24], [1]):
        with pytest.raises(ValueError, match="one value a"):
            made.update_tensordict_priority(SEEN[seen](batch), torch.rand(wrong))
    assert torch.equal(samplers[0].priorities[:18], expected[0, :18])


def test_without_priorities_nobody_needs_to_know():
    buffer = ReplayStorage(storage=PackedStorage(20), sample_unit=EpisodeSequence(2), batch_size=6)
    buffer.extend(TensorDict({"next": {"done": torch.zeros(9, 1, dtype=torch.bool)}}, [9]))
    buffer.update_tensordict_priority(buffer.sample(), torch.rand(6))
    priorities = PERSampler(20)
    buffer.set_sampler(priorities)
    anchors = buffer.sample()["anchor_index"]
    with pytest.raises(
        ValueError, match=r"update_tensordict_priority\(batch, priority\) takes one for"
    ):
        buffer.update_priority(anchors, torch.rand(6))


@at_each_boundary
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_every_row_is_folded_within_its_own_episode(history, boundary):
    """By priority among recent rows: each row of a sequence is the start of its own n steps."""
    unit = EpisodeSequence(2, burn_in=1, bootstrap=1, boundary=boundary)
    buffer = ReplayStorage(
        storage=PackedStorage(history.capacity),
        writer=EpisodeWriter(history.num_envs),
        sampler=ERESampler(c_min=4, base=PERSampler(history.capacity)),
        sample_unit=unit,
        transform=NStep(3, 0.9),
        batch_size=20,
    )
    model = history.write(buffer)
    batch, live = buffer.sample(), model.live()
    rows = [live[slot] for slot in batch["index"].tolist()]
    onward = [[each for each in model.episode(row) if each.step >= row.step] for row in rows]
    assert_folded(batch, [fold(episode, 3, 0.9) for episode in onward])
    anchors = [live[slot] for slot in batch["anchor_index"].view(20, -1)[:, 0].tolist()]
    expected = [model.sequence(anchor, 1, 3, boundary)[0] for anchor in anchors]
    assert rows == [row for sequence in expected for row in sequence]
    weight = batch["priority_weight"].view(20, -1)
    assert (weight == weight[:, :1]).all()


@at_each_boundary
@pytest.mark.parametrize("burn_in", [0, 3])
def test_a_recurrent_state_from_the_first_row_on(boundary, burn_in):
    """A state that was stored with the rows, run through a sequence, comes out as it was stored."""
    torch.manual_seed(0)
    cell = torch.nn.GRUCell(2, 4)
    space = gymnasium.spaces.Box(-1, 1, (2,))
    unit = EpisodeSequence(4, burn_in=burn_in, bootstrap=1, boundary=boundary)
    storage = UniformReplayStorage(
        space,
        space,
        storage_size=60,
        num_envs=2,
        extra_fields={"hidden": (torch.float32, (4,))},
        sample_unit=unit,
        batch_size=64,
        seed=0,
    )
    hidden, observation = torch.zeros(2, 4), torch.rand(2, 2)
    lengths = torch.tensor([[3, 9, 2, 7, 40], [12, 5, 5, 1, 40]]).cumsum(1)
    for step in range(40):
        done = (lengths == step + 1).any(1, keepdim=True)
        following = torch.rand(2, 2)
        flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
        rows = {"observation": observation, "action": observation, "hidden": hidden}
        rows["next"] = {"observation": following, "reward": torch.rand(2, 1), **flags}
        storage.add(TensorDict(rows, [2]))
        with torch.no_grad():
            hidden = torch.where(done, 0, cell(observation, hidden))
        observation = torch.where(done, torch.rand(2, 2), following)

    batch = storage.sample().reshape(-1, unit.num_steps)
    assert batch["is_init"].any()
    assert boundary != "fit" or batch["validity_mask"].float().mean() > 0.8
    begun, state = batch["validity_mask"].cumsum(1) > 1, torch.zeros(64, 4)
    for step in range(unit.num_steps):
        row, valid = batch[:, step], batch["validity_mask"][:, step]
        # The stored state of the first row that is there, and nothing at the beginning of an episode.
        state = torch.where(begun[:, step, None], state, row["hidden"])
        state = torch.where(row["is_init"], 0, state)
        torch.testing.assert_close(state[valid], row["hidden"][valid])
        with torch.no_grad():
            state = cell(row["observation"], state)


@pytest.mark.requirement("per-update")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda batch: batch[:8],
        lambda batch: batch.reshape(6, 5)[:, 1:],
        lambda batch: batch.reshape(6, 5).transpose(0, 1),
    ],
)
def test_sequences_that_are_not_whole_or_in_order_raise(spoil):
    sampler = PERSampler(20)
    unit = EpisodeSequence(3, burn_in=1, bootstrap=1)
    buffer = ReplayStorage(
        storage=PackedStorage(20), sampler=sampler, sample_unit=unit, batch_size=6
    )
    buffer.extend(TensorDict({"next": {"done": torch.zeros(20, 1, dtype=torch.bool)}}, [20]))
    batch = spoil(buffer.sample())
    batch["td_error"] = torch.rand(batch.batch_size)
    with pytest.raises(ValueError, match=r"as \[n \* 5\] or \[n, 5\], got \["):
        buffer.update_tensordict_priority(batch)
    assert (sampler.priorities == 1).all()


@pytest.mark.parametrize("num_envs", [1, 3])
@at_each_boundary
def test_growing_never_waits_for_the_gpu(gpu, num_envs, boundary):
    episodes = EpisodeIndex(30, num_envs, device=gpu)
    episodes.append(torch.zeros(num_envs, 4, dtype=torch.bool, device=gpu))
    anchors = episodes.random_slots(8)
    info = {"goal_index": anchors, "her_mask": anchors > 2}
    unit = EpisodeSequence(3, burn_in=2, bootstrap=1, boundary=boundary)
    index, info = unit.expand(anchors, info, SimpleNamespace(episodes=episodes))
    assert info.pop("is_init").shape == (48, 1)
    for value in (index, *info.values()):
        assert value.device == gpu
        assert value.shape == (48,)


def follow_up(sequence, place, num_steps, episode_of):
    """Finds where in a sequence the row stands that lies so many steps on in the same episode."""
    steps, valid = sequence
    for other, step in enumerate(steps):
        is_meant = valid[other] and step == steps[place] + num_steps
        if is_meant and episode_of[step] == episode_of[steps[place]]:
            return other
    return None


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("bootstrap", [0, 2, 3])
@at_each_boundary
def test_targets_are_those_of_a_loop_over_rows(boundary, bootstrap, n_step):
    lengths = [5, 1, 2, 7, 3, 6]  # the last one goes on
    episode_of = [number for number, length in enumerate(lengths) for _ in range(length)]
    last = torch.tensor(lengths).cumsum(0) - 1
    done, terminated = torch.zeros(2, len(episode_of), 1, dtype=torch.bool)
    done[last[:-1]] = True
    terminated[last[:-1:2]] = True
    steps = torch.arange(len(episode_of))
    flags = {"done": done, "terminated": terminated, "truncated": done & ~terminated}
    reward = torch.rand(len(steps), 1)
    rows = TensorDict({"step": steps, "next": {"reward": reward, **flags}}, [len(steps)])
    unit = EpisodeSequence(3, burn_in=2, bootstrap=bootstrap, boundary=boundary)
    storage = ReplayStorage(
        storage=PackedStorage(len(steps)),
        transform=NStep(n_step, discount=0.5) if n_step > 1 else None,
        sample_unit=unit,
        batch_size=64,
    )
    storage.extend(rows)
    torch.manual_seed(0)
    batch, values = storage.sample(), torch.rand(64, 3 + bootstrap)
    batch_of_rows = batch.reshape(64, -1)
    # What is not there, or follows a terminal state, does not count, whatever the network says of it.
    values[~batch_of_rows["validity_mask"][:, 2:]] = torch.nan

    target, mask = unit.targets(batch, values, discount=0.5)
    again = unit.targets(batch_of_rows, values, discount=0.5)

    assert torch.equal(again[0], target)
    assert torch.equal(again[1], mask)
    for number in range(64):
        sequence = [batch_of_rows[key][number, 2:].tolist() for key in ("step", "validity_mask")]
        for place in range(3):
            step = sequence[0][place]
            available = lengths[episode_of[step]] - (step - sum(lengths[: episode_of[step]]))
            m = min(n_step, available)
            expected = sum(0.5**i * reward[step + i].item() for i in range(m))
            after = follow_up(sequence, place, m, episode_of)
            is_over = bool(terminated[step + m - 1])
            if not is_over and after is not None:
                expected += 0.5**m * values[number, after].item()
            is_known = sequence[1][place] and (is_over or after is not None)
            assert bool(mask[number, place]) == is_known
            if is_known:
                assert target[number, place].item() == pytest.approx(expected)
    assert mask.any()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda rows: rows.exclude("validity_mask"), KeyError, "lacks its entry 'validity_mask'"),
        (lambda rows: rows.exclude(("next", "reward")), KeyError, r"lacks its .*'reward'"),
        (
            lambda rows: rows[:4],
            ValueError,
            r"must be \[B \* 5\] or \[B, 5\], with one .* got \[4\]",
        ),
        (
            lambda rows: rows.set(("next", "reward"), torch.zeros(20, 2)),
            ValueError,
            r"one number a row, got \[20\], and \('next', 'reward'\) of \[20, 2\]",
        ),
    ],
)
def test_a_batch_that_has_no_targets_says_what_is_missing(spoil, error, message):
    unit = EpisodeSequence(3, burn_in=1, bootstrap=1)
    storage = ReplayStorage(storage=PackedStorage(20), sample_unit=unit, batch_size=4)
    flags = {name: torch.zeros(20, 1, dtype=torch.bool) for name in ("done", "terminated")}
    rows = TensorDict({"next": {"reward": torch.zeros(20, 1), **flags}}, [20])
    storage.extend(rows)
    batch = storage.sample()
    with pytest.raises(error, match=message):
        unit.targets(spoil(batch.clone(False)), torch.zeros(4, 4), discount=0.5)
    with pytest.raises(ValueError, match=r"values must be \[4, 4\], of the rows behind .*\[4, 5\]"):
        unit.targets(batch, torch.zeros(4, 5), discount=0.5)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0,), "length must be an integer of at least 1, got 0"),
        ((1, -1), "burn_in must be an integer of at least 0, got -1"),
        ((1, 0, -2), "bootstrap must be an integer of at least 0, got -2"),
    ],
)
def test_nonsense_raises(args, message):
    with pytest.raises(ValueError, match=message):
        EpisodeSequence(*args)


def test_a_storage_without_an_index_says_which_writer_it_needs():
    with pytest.raises(RuntimeError, match="EpisodeWriter"):
        EpisodeSequence(2).expand(torch.tensor([0]), {}, LazyTensorStorage(3))
