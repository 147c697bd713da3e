"""Frames stored as what changed: the same batches, in less room."""

from __future__ import annotations

import copy
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.make import library, new_folder
from contract.steps import assert_same
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDict

from trl_storages.datasets import from_arrays

pytestmark = pytest.mark.requirement("stored-once")

SIDE, FRAMES = 12, 3


def image(*shape: int) -> Box:
    return Box(0, 255, shape, np.uint8)


def reached(achieved: torch.Tensor, desired: torch.Tensor, infos: Any) -> torch.Tensor:
    return (achieved == desired).flatten(1).float().mean(1)


def game(num_steps: int, seed: int = 0, shape: tuple[int, ...] = (SIDE, SIDE)) -> TensorDict:
    """Episodes in which a few pixels of a picture change: stacks, a second camera, and goals."""
    rng, pictures, first = np.random.default_rng(seed), [], []
    done = rng.random(num_steps) < 0.05
    done[-1] = True
    picture = rng.integers(0, 256, shape).astype(np.uint8)
    for step in range(num_steps):
        if step == 0 or done[step - 1]:
            picture = rng.integers(0, 256, shape).astype(np.uint8)
            begin = len(pictures)
            pictures.append(picture)
            first.append(begin)
        picture = picture.copy()
        picture.flat[rng.integers(0, picture.size, rng.integers(0, 6))] = rng.integers(0, 256)
        pictures.append(picture)
        first.append(begin)
    starts = np.flatnonzero(np.diff(first, append=-1) == 0)
    frames, firsts = torch.from_numpy(np.stack(pictures)), torch.tensor(first)
    at = torch.from_numpy(starts)

    def seen(at: torch.Tensor) -> dict[str, torch.Tensor]:
        stacked = (at[:, None] + torch.arange(1 - FRAMES, 1)).maximum(firsts[at][:, None])
        return {
            "observation": frames[stacked],
            "camera": frames[at].flip(1),
            "achieved_goal": frames[at],
            "desired_goal": frames[firsts[at]],
            "speed": at[:, None].float(),
        }

    flags = {"done": torch.from_numpy(done)[:, None]}
    flags |= {"terminated": flags["done"], "truncated": torch.zeros_like(flags["done"])}
    outcome = {"reward": at[:, None] / 7, **flags}
    data = {**seen(at), "action": torch.arange(num_steps) % 2, "next": {**seen(at + 1), **outcome}}
    return TensorDict(data, [num_steps])


SPACE = Dict(
    {
        "observation": image(FRAMES, SIDE, SIDE),
        "camera": image(SIDE, SIDE),
        "achieved_goal": image(SIDE, SIDE),
        "desired_goal": image(SIDE, SIDE),
        "speed": Box(-np.inf, np.inf, (1,), np.float32),
    }
)
STACK = {"observation": library.FrameStack(FRAMES)}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "n-step": ("PrioritizedReplayStorage", {"n_step": 3}),
    "hindsight": ("HERReplayStorage", {"reward_fn": reached, "n_step": 2}),
    "sequences": (
        "UniformReplayStorage",
        {"sample_unit": library.EpisodeSequence(5, burn_in=1, bootstrap=1)},
    ),
}


def made(kind: str = "n-step", **options: Any) -> Any:
    recipe, keywords = KINDS[kind]
    sizes = {"storage_size": 150, "batch_size": 8, "seed": 0, "frame_stack": STACK}
    return getattr(library, recipe)(SPACE, Discrete(2), **{**sizes, **keywords, **options})


def digest(storage: Any, num_batches: int) -> str:
    found = sha256()
    for _ in range(num_batches):
        batch = storage.sample()
        for key in sorted(batch.keys(True, True), key=str):
            found.update(batch[key].numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_in_directory", [False, True])
def test_batches_are_those_of_a_plain_storage(kind, is_in_directory):
    path = new_folder() / "rows" if is_in_directory else None
    plain, compressed = made(kind), made(kind, compress=True, path=path)
    for part in range(4):
        for storage in (plain, compressed):
            storage.extend(game(90, part))
        assert digest(compressed, 60) == digest(plain, 60)
    assert_same(compressed[:], plain[:])
    compressed.validate()


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_dumps_go_on_as_the_storage(kind, tmp_path):
    storage = made(kind, compress=True)
    for part in range(3):
        storage.extend(game(90, part))
    storage.dumps(tmp_path / "dump")
    others = [made(kind, compress=True, max_entries=entries) for entries in (None, 700)]
    others.append(made(kind, compress=True, path=tmp_path / "rows"))
    for other in others:
        other.load_state_dict(copy.deepcopy(storage.state_dict()))
    others.append(made(kind, compress=True))
    others[-1].loads(tmp_path / "dump")
    expected = storage[:], digest(storage, 10)
    storage.extend(game(70, 5))
    for other in others:
        assert_same(other[:], expected[0])
        assert digest(other, 10) == expected[1]
        other.extend(game(70, 5))
        assert_same(other[:], storage[:])
        other.validate()


def test_a_damaged_state_is_refused():
    storage, other = made(compress=True), made(compress=True)
    storage.extend(game(90))
    other.extend(game(20, 1))
    before = other[:]

    def changed(change):
        state = copy.deepcopy(storage.state_dict())
        (lane,) = next(it["lanes"] for it in parts_of(state) if "lanes" in it)
        change(lane)
        return state

    for change in (
        lambda lane: lane.update(records=lane["records"][:0]),
        lambda lane: lane.update(records=[part[:-1] for part in lane["records"]]),
        lambda lane: lane.update(position=lane["position"] + 1),
        lambda lane: lane["entries"][0][0, 0].add_(1),
        lambda lane: lane["entries"][0][5, 0].add_(1),
        lambda lane: lane["entries"][0][5, 0].add_(1 << 50),
        lambda lane: lane["records"].append(torch.zeros(3)),
        lambda lane: lane.pop("position"),
    ):
        with pytest.raises((ValueError, TypeError)):
            other.load_state_dict(changed(change))
        assert_same(other[:], before)


def parts_of(state: Any) -> Any:
    if isinstance(state, dict):
        yield state
        for value in state.values():
            yield from parts_of(value)


def test_storages_of_another_kind_say_how_to_copy(tmp_path):
    plain, compressed = made(), made(compress=True, path=tmp_path / "rows")
    plain.extend(game(90))
    with pytest.raises(ValueError, match="extend_from"):
        compressed.load_state_dict(plain.state_dict())
    compressed.extend(game(90))
    with pytest.raises(ValueError, match="extend_from"):
        plain.load_state_dict(compressed.state_dict())
    compressed.close()
    with pytest.raises(ValueError, match="compress must be True"):
        made(path=tmp_path / "rows")
    opened = library.ReplayStorage.open(tmp_path / "rows", mode="r")
    assert_same(opened[:], plain[:])


@pytest.mark.parametrize(
    ("space", "options", "match"),
    [
        (Box(0, 1, (4,)), {}, "uint8 with two"),
        (image(4), {}, "uint8 with two"),
        (image(8, 8), {"device": "cuda"}, "pin_memory"),
        (image(8, 8), {"compress": 1}, "compress"),
    ],
)
def test_what_can_not_be_compressed_is_refused(space, options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        library.UniformReplayStorage(space, Discrete(2), **{"compress": True, **options})


def test_fields_of_a_first_write_are_compressed():
    storage = library.ReplayStorage(storage=library.PackedStorage(100, compress=True))
    with pytest.raises(ValueError, match="uint8 with two"):
        storage.extend(game(60).select("speed", "action", ("next", "speed"), ("next", "done")))
    storage.extend(game(60))
    assert_same(storage[:], game(60).exclude(("next", "reward")))


def test_from_arrays_compresses_frames():
    pictures = game(200)["camera"].numpy()
    data = {"observations": pictures, "actions": np.zeros((200, 1)), "rewards": np.arange(200)}
    data["timeouts"] = np.arange(200) % 50 == 49
    plain, compressed = (from_arrays(data, compress=it) for it in (False, True))
    assert_same(compressed[:], plain[:])


@pytest.mark.parametrize("kind", KINDS)
def test_ensembles_of_compressed_and_plain_storages_sample_the_same_batches(kind):
    digests = []
    for flags in ((False, False), (True, False), (True, True)):
        storages = [made(kind, compress=it, seed=seed) for seed, it in enumerate(flags)]
        for seed, storage in enumerate(storages):
            storage.extend(game(90, seed))
        ensemble = library.ReplayStorageEnsemble(*storages, batch_size=9)
        digests.append(digest(ensemble, 20))
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_that_share_memory_write_in_turn():
    storage, plain, parts = made(compress=True).share(), made(), [game(40, it) for it in range(4)]
    for number, part in enumerate(parts):
        plain.extend(part)
        if number % 2 and not (pid := os.fork()):
            torch.set_num_threads(1)
            storage.extend(part)
            os._exit(0)
        os.waitpid(pid, 0) if number % 2 else storage.extend(part)
    assert_same(storage[:], plain[:])


def test_files_take_what_records_need(tmp_path):
    num_steps, side = 3000, 84
    picture = image(side, side)
    storage = library.UniformReplayStorage(
        picture, Discrete(2), storage_size=num_steps, path=tmp_path / "rows", compress=True
    )
    data = game(num_steps, shape=(side, side))
    data["observation"], data["next", "observation"] = data["camera"], data["next", "camera"]
    names = "observation", "reward", "done", "terminated", "truncated"
    storage.extend(data.select("observation", "action", *(("next", name) for name in names)))
    (file,) = Path(tmp_path / "rows").glob("rows.*")
    # The frames alone are 21 MB, and at their worst entries are more than 50.
    assert file.stat().st_blocks * 512 < 8e6
    assert torch.equal(storage[:]["observation"], data["observation"])
