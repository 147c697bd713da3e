"""What was saved goes on exactly as what it was saved from; what is refused changes nothing."""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.make import PLACES, library, make, make_of, new_folder
from contract.steps import Player, assert_same, ids_of, without_slots, write
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

pytestmark = pytest.mark.requirement("persistence")

LANES, STEPS = 2, 12


def storage_of(kind: str, place: str, seed: int = 3, **options: Any) -> Any:
    sizes = {"lanes": LANES, "size": LANES * STEPS, "batch_size": 8, **options}
    return make(kind, place=place, seed=seed, **sizes)


def written(kind: str, place: str, num_steps: int) -> tuple[Any, list[Player]]:
    """A storage in the middle of its episodes, with priorities of its own."""
    storage, players = storage_of(kind, place), [Player(lane) for lane in range(LANES)]
    go_on(storage, players, num_steps)
    train(storage)
    return storage, players


def go_on(storage: Any, players: list[Player], num_steps: int) -> list[Any]:
    """Plays episodes of different lengths, and leaves the last ones running."""
    steps = [
        [player.step("terminated" if (at + lane) % 5 == 4 else "") for at in range(num_steps)]
        for lane, player in enumerate(players)
    ]
    write(storage, steps)
    return steps


def train(storage: Any) -> Any:
    """Draws a batch and hands back its errors."""
    batch = storage.sample()
    batch["td_error"] = ids_of(batch).float() % 7
    storage.update_tensordict_priority(batch)
    return without_slots(batch)


def dumped(storage: Any, again: Any) -> None:
    folder = new_folder()
    storage.dumps(folder)
    again.loads(folder)


def handed_over(storage: Any, again: Any) -> None:
    again.load_state_dict(copy.deepcopy(storage.state_dict()))


@pytest.mark.parametrize("reload", [dumped, handed_over])
@pytest.mark.parametrize("num_steps", [7, 31])
@pytest.mark.parametrize("kind", ["uniform", "hindsight", "prioritized", "recency", "all"])
def test_what_is_loaded_goes_on_alike(kind, num_steps, reload, place):
    storage, players = written(kind, place, num_steps)
    again, others = storage_of(kind, place, seed=4), copy.deepcopy(players)
    reload(storage, again)
    for _ in range(20):
        assert_same(train(again), train(storage))
    for num_more in (1, 4):
        go_on(again, others, num_more)
        go_on(storage, players, num_more)
        for _ in range(10):
            assert_same(train(again), train(storage))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("place", [place for place in PLACES if place != "directory"])
def test_copies_go_on_alike_and_apart(copied, place):
    storage, players = written("all", place, 31)
    again, others = copied(storage), copy.deepcopy(players)
    for num_more in (0, 1, 4):
        go_on(again, others, num_more) if num_more else None
        go_on(storage, players, num_more) if num_more else None
        for _ in range(10):
            assert_same(train(again), train(storage))
    go_on(again, others, 30)
    assert not {*ids_of(again[:]).tolist()} & {*ids_of(storage[:]).tolist()}


@pytest.mark.parametrize("reload", [dumped, handed_over])
def test_what_was_never_written_is_loaded_in_place_of_rows(reload, place):
    storage, _ = written("all", place, 31)
    reload(storage_of("all", place), storage)
    assert len(storage) == 0
    assert not storage.can_sample()
    players = [Player(lane) for lane in range(LANES)]
    steps = go_on(storage, players, 5)
    assert {*ids_of(storage[:]).tolist()} == {step.id for its in steps for step in its}
    # What was loaded is saved again.
    reload(storage, again := storage_of("all", place, seed=9))
    assert_same(train(again), train(storage))


def test_a_phase_of_recency_that_is_over_stays_so(place):
    storage, _ = written("recency", place, 31)
    storage.sampler.begin_phase(40)
    for _ in range(40):
        storage.sample()
    handed_over(storage, again := storage_of("recency", place, seed=9))
    for _ in range(10):
        assert_same(train(again), train(storage))


@pytest.mark.parametrize("kind", ["uniform", "all"])
def test_a_directory_that_is_closed_goes_on(kind, tmp_path):
    storage = storage_of(kind, "directory", path=tmp_path)
    stays, players = storage_of(kind, "memory"), [Player(lane) for lane in range(LANES)]
    others = copy.deepcopy(players)
    for num_steps in (7, 20, 1):
        go_on(storage, players, num_steps)
        go_on(stays, others, num_steps)
        for _ in range(5):
            assert_same(train(storage), train(stays))
        storage.close()
        storage = storage_of(kind, "directory", seed=9, path=tmp_path)


class Bomb:
    """Leaves a folder behind where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.requirement("refused-is-unchanged")
def test_damaged_dumps_are_refused_or_right_and_run_no_code(tmp_path):
    """Each file in turn is shortened, changed, removed, or a pickle."""
    source, _ = written("all", "memory", 17)
    source.dumps(tmp_path / "dump")
    right, luck = source[:], random.Random(0)
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    storage, _ = written("all", "memory", 5)
    for file in sorted(path for path in (tmp_path / "dump").rglob("*") if path.is_file()):
        data = file.read_bytes()
        for damage in ("shorter", *5 * ["bit"], "removed", "pickle"):
            changed = bytearray(data)
            if damage == "shorter":
                del changed[luck.randrange(len(data) or 1) :]
            elif damage == "bit" and data:
                changed[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
            elif damage == "pickle":
                changed = bytearray(bomb)
            file.write_bytes(changed)
            if damage == "removed":
                file.unlink()
            before = storage[:]
            try:
                storage.loads(tmp_path / "dump")
            except (ValueError, KeyError, TypeError, OSError):
                assert_same(storage[:], before)
            else:
                assert_same(storage[:], right)
                storage, _ = written("all", "memory", 5)
            assert not (tmp_path / "exploded").exists()
        file.write_bytes(data)
    storage.loads(tmp_path / "dump")
    assert_same(storage[:], right)


@pytest.mark.requirement("stored-once")
@pytest.mark.parametrize(("frame_stack", "most"), [(None, 0.7), (2, 0.5), (4, 0.3)])
def test_each_observation_is_stored_once(tmp_path, frame_stack, most):
    """A directory takes much less than whole rows of observation and next observation."""
    shape, size = (128,) if frame_stack is None else (frame_stack, 128), 2048
    path = tmp_path / "rows"
    options = {"path": path, "storage_size": size + 1, "frame_stack": frame_stack}
    storage = make_of(Box(-9, 9, shape), Discrete(2), **options)
    frames = torch.arange(size + 4.0).clamp(min=3).unsqueeze(1).expand(-1, 128)
    seen = frames if frame_stack is None else frames.unfold(0, frame_stack, 1).transpose(1, 2)
    flags = torch.zeros(size, 1, dtype=torch.bool)
    after = dict.fromkeys(("done", "terminated", "truncated"), flags)
    after |= {"observation": seen[1 : size + 1], "reward": torch.zeros(size, 1)}
    written = {"observation": seen[:size], "action": torch.zeros(size).long(), "next": after}
    storage.extend(TensorDict(written, [size]))
    storage.flush()
    assert_same(library.ReplayStorage.open(path, mode="r")[:], TensorDict(written, [size]))
    whole = 2 * seen[:size].numel() * 4
    taken = sum(file.stat().st_blocks * 512 for file in path.rglob("*"))
    assert taken < whole * most
    for _ in range(4):  # what gives way gives its room back
        storage.end_episodes()
        storage.extend(TensorDict(written, [size]))
    storage.flush()
    status = (path / "rows.1").stat()
    assert status.st_blocks * 512 < 0.75 * status.st_size


def entries_in(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Lists the paths of all entries of nested dicts and lists."""
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from entries_in(value, (*path, key))


def another(value: Any, luck: random.Random) -> Any:
    """Returns what may stand in the place of a value, by mistake or by malice."""
    others = [None, -1, 0, 3, 2**62, 10**30, 2.5, float("nan"), "x", [], {}, True, b"x", (1,)]
    others += [torch.zeros(0), torch.zeros(2, 2).to_sparse(), torch.zeros(3, requires_grad=True)]
    if isinstance(value, torch.Tensor) and value.numel() and luck.random() < 0.7:
        changed = value.clone()
        numbers = [0.0, -1.0, float("inf")] if value.is_floating_point() else [0, 1, 2, 5, 100]
        numbers += [] if value.dtype in (torch.uint8, torch.bool, torch.float32) else [-1, 2**62]
        changed.view(-1)[luck.randrange(value.numel())] = luck.choice(numbers)
        others = [changed, value[:-1], torch.cat([value, value]), value.double()]
    return luck.choice(others)


@pytest.mark.requirement("refused-is-unchanged")
@pytest.mark.parametrize("seed", range(2))
def test_a_state_with_another_value_is_refused_or_whole(place, seed):
    source, _ = written("all", place, 31)
    state, luck = source.state_dict(), random.Random(seed)
    storage, players = written("all", place, 9)
    before, own, paths = storage[:], storage.state_dict(), [*entries_in(state)]
    for _ in range(150):
        *above, name = luck.choice(paths)
        if name == "n_step":
            continue  # any will do
        changed = holder = copy.deepcopy(state)
        for key in above:
            holder = holder[key]
        holder[name] = another(holder[name], luck)
        try:
            storage.load_state_dict(changed)
        except (ValueError, KeyError, TypeError):
            assert_same(storage[:], before)
        else:
            storage.validate()
            train(storage)
            go_on(storage, copy.deepcopy(players), 3)
            storage.validate()
            storage.load_state_dict(own)


@pytest.mark.requirement("persistence")
@pytest.mark.filterwarnings("ignore:.*transitions fit")
@pytest.mark.parametrize("layout", ["goals", "frames"])
def test_the_newest_rows_are_loaded_where_not_all_fit(layout, place):
    """Of episodes of one step a storage with fewer entries takes what it has room for."""
    sizes = {"layout": layout, "lanes": LANES, "size": 200}
    source, players = make("prioritized", **sizes), [Player(lane) for lane in range(LANES)]
    ends = [[player.step("terminated") for _ in range(130)] for player in players]
    write(source, ends, layout)
    source.dumps(folder := new_folder())
    storage = make("prioritized", place=place, max_entries=160, **sizes)
    storage.loads(folder)
    for steps in range(3):
        storage.validate()
        for lane in range(LANES):
            rows_of = [it.episodes.live_slots() for it in (storage, source)]
            own, theirs = (slots[slots // 100 == lane] for slots in rows_of)
            assert (5 if steps else 19) < len(own) < 100
            if not steps:
                assert own.tolist() == theirs[-len(own) :].tolist()
                assert_same(storage[own], source[own])
        write(
            storage, [[player.step("terminated") for _ in range(30)] for player in players], layout
        )
