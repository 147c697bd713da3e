"""The transitions of one replay buffer go into another one of any size and number of lanes."""

import itertools

import numpy as np
import pytest
import torch
from contract.in_pairs import in_pairs
from contract.lanes import HISTORIES, Lanes, ends
from contract.make import PLACES, library, make, new_folder
from contract.model import assert_folded
from contract.steps import Player, assert_batches, ids_of, rows, write
from contract.writers import LANES, Script, opened, writing
from gymnasium.spaces import Box, Discrete

pytestmark = pytest.mark.requirement("persistence")

N_STEP = {"n_step": 3, "discount": 0.9}


def assert_holds(storage, lanes):
    """All transitions of a history, each with the window that it had."""
    storage.set_sampler(library.UniformSampler(without_replacement=True))
    batch = storage.sample(len(storage))
    assert_folded(batch, lanes, **N_STEP)
    assert {*ids_of(batch).tolist()} == {step.id for step in lanes.live()}
    storage.validate()


@in_pairs(place=PLACES, history=[*HISTORIES], num_envs=[1, 2, 3])
def test_any_number_of_lanes_into_any(place, history, num_envs):
    history = HISTORIES[history]
    old, new = (
        make("n-step", place=place, lanes=lanes, size=size, **N_STEP)
        for lanes, size in ((history.lanes, history.size), (num_envs, 60 * num_envs))
    )
    lanes = history.write(old)
    new.extend_from(old)
    assert len(new) == len(old)
    assert_holds(new, lanes)
    keeps_lanes = num_envs == history.lanes
    listed = [storage.episodes.table() for storage in (old, new)]
    assert sorted(listed[0]["length"].tolist()) == sorted(listed[1]["length"].tolist())
    if keeps_lanes:
        assert all((listed[0][key] == listed[1][key]).all() for key in ("lane", "whole", "length"))
    else:
        assert not new.episodes.is_open.any()


@pytest.mark.parametrize("layout", ["vector", "mixed", "frames"])
def test_layouts_and_what_is_stored_once(place, layout):
    old, new = (
        make("n-step", place=place, layout=layout, size=size, max_entries=most, **N_STEP)
        # With room for one entry a step, and a few for beginnings.
        for size, most in ((50, 400), (40, 40 + 2 * 16))
    )
    write(old, [Player().play([20, 13, 25])], layout)
    new.extend_from(old)
    assert len(new) == 40
    assert_batches(new[:], old[-40:])
    new.validate()


@pytest.mark.parametrize("kind", ["uniform", "all"])
def test_equal_buffers_sample_the_same_next(place, kind):
    old, new = (make(kind, place=place, lanes=2, size=34) for _ in range(2))
    lanes = Lanes(34, 2)
    lanes.write(old, [ends([4, 6, 3, 5, 2, 4], 3)] * 2)
    for slot, priority in enumerate(np.random.default_rng(0).random(34)):
        old.update_priority(torch.tensor([slot]), torch.tensor(priority))
    lanes.write(old, [ends([2], 1)] * 2)
    new.extend_from(old)
    for done in ([False, True], [False]):
        for _ in range(5):
            assert_batches(new.sample(), old.sample())
            assert torch.equal(new.sample()["index"], old.sample()["index"])
        more = lanes.steps([done] * 2)
        assert torch.equal(new.extend(more.clone()), old.extend(more))
    assert_batches(new.sample_episodes(9), old.sample_episodes(9))


def test_priorities_are_kept():
    old, new = (make("prioritized", lanes=lanes, size=30) for lanes in (2, 3))
    slots = Lanes(30, 2).write(old, [ends([5, 4], 2)] * 2).flatten()
    old.update_priority(slots, 1.0 + torch.arange(22))
    new.extend_from(old)
    found = []
    for storage in (old, new):
        live = storage.episodes.live_slots()
        columns = ids_of(storage[live]), storage.sampler.priorities[live]
        found.append(sorted(torch.stack(columns, 1).tolist()))
    assert found[0] == found[1]


def test_running_episodes_of_the_target_are_split():
    old, new = (make("n-step", size=60) for _ in range(2))
    write(new, [Player().play([], 4)])
    old.extend(rows(Player().play([], 9)[4:]))  # begins with what the target ends with
    new.extend_from(old)
    assert new.episodes.table()["length"].tolist() == [4, 5]


def test_an_environment_that_is_only_reset_next_is_known():
    step = (
        np.zeros((1, 1), np.float32),
        [0],
        [1.0],
        [True],
        [False],
        {},
        np.ones((1, 1), np.float32),
    )
    old, new = (
        library.UniformReplayStorage(Box(-9, 9, (1,)), Discrete(2), autoreset_mode="NextStep")
        for _ in range(2)
    )
    old.record(*step)
    new.extend_from(old)
    assert new.record(*step) is None


def test_chunks_are_joined():
    old, new, one_lane = (
        library.UniformReplayStorage(
            Box(-1, 1, (40_000,)),
            Discrete(2),
            storage_size=size,
            num_envs=num_envs,
            autoreset_mode="Disabled",
            batch_size=9,
        )
        for size, num_envs in ((130, 2), (130, 2), (200, 1))
    )
    step = [np.full((2, 40_000), it, np.float32) for it in range(81)]
    for before, after in itertools.pairwise(step):
        old.record(before, np.zeros(2, int), np.ones(2), *np.zeros((2, 2), bool), {}, after)
    for each in (new, one_lane):
        each.extend_from(old)
        assert each.episodes.table()["length"].tolist() == [65, 65]
        assert each[:]["observation"][:, 0].sort().values.tolist() == sorted(2 * [*range(15, 80)])


def test_infos_at_the_root_go_to_fields_under_next(tmp_path):
    box, path = Box(-9, 9, (1,)), tmp_path / "old"
    fields = {"force": (torch.float32, (1,))}
    old = library.UniformReplayStorage(box, Discrete(2), path=path, extra_fields=fields)
    for number in range(3):
        at, force = (np.full(1, it, np.float32) for it in (number, number + 0.5))
        old.record(at, 0, 1.0, False, False, {"force": force}, at + 1)
    old.close()
    new = library.UniformReplayStorage(box, Discrete(2), info_keys=[("next", "force")])
    new.extend_from(library.ReplayStorage.open(path, mode="r"))
    assert new[:]["next", "force"].flatten().tolist() == [0.5, 1.5, 2.5]


def test_fields_that_do_not_fit_are_named():
    old = make(layout="goals")
    write(old, [Player().play([5])])
    fields = {"observation": (torch.float64, [3]), "mood": (torch.int8, [])}
    fields |= {("next", name): (torch.bool, [1]) for name in ("done", "terminated", "truncated")}
    new = library.ReplayStorage(storage=library.PackedStorage(9, fields=fields))
    with pytest.raises(
        ValueError, match=r"'observation'.*float64 \[3\], got float32.*'mood' is mis"
    ):
        new.extend_from(old)
    with pytest.raises(ValueError, match="another replay buffer"):
        old.extend_from(old)
    with pytest.raises(TypeError, match="other"):
        new.extend_from(old[:])
    stacks = make(layout="frames")
    vectors = make(layout="frames", frame_stack=None, on_gap="ignore")
    moved = rows(Player().play([5]), "frames")
    moved["next", "observation"] = moved["next", "observation"] + 1
    vectors.extend(moved)
    with pytest.raises(ValueError, match="moved by one frame"):
        stacks.extend_from(vectors)
    assert len(new) == len(stacks) == 0
    assert new.write_count == stacks.write_count == 0


def test_fields_that_are_left_out_are_named_before_anything_is_written():
    old, new = make(layout="goals"), make(layout="vector")
    write(old, [Player().play([5])])
    with pytest.warns(UserWarning, match="no fields for.*achieved_goal.*desired_goal"):
        new.extend_from(old)
    assert torch.equal(ids_of(new[:]), ids_of(old[:]))
    new.empty()
    with pytest.raises(UserWarning):  # as -W error makes of it
        new.extend_from(old)
    assert len(new) == 0


def test_a_buffer_without_fields_takes_those_of_the_other():
    old = make(layout="frames")
    write(old, [Player().play([5, 3], 2)], "frames")
    new = library.ReplayStorage(storage=library.PackedStorage(30))
    new.extend_from(make(layout="frames"))  # has nothing
    assert not new.storage.initialized
    new.extend_from(old)
    assert new.storage.layout == old.storage.layout
    assert_batches(new[:], old[:])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*was not closed:RuntimeWarning")
def test_beside_a_process_that_writes():
    path = new_folder() / "rows"
    opened(path, 40).close()
    with writing(path, 40, Script(0)) as writer:
        writer.wait_for(40)
        reader = library.ReplayStorage.open(path, mode="r")
        for num_envs in (1, LANES):
            new = make("n-step", lanes=num_envs, size=2000, n_step=50, discount=1.0)
            for number in range(10):
                new.extend_from(reader)
                writer.wait_for(writer.num_written + 3)
                assert number == 0 or len(new) > 80
            batch = new.sample(2000)
            after = ids_of(batch["next"])
            assert torch.equal(after, ids_of(batch) + batch["steps_to_next_obs"][:, 0])
