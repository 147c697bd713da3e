"""What does not fit raises, and leaves the storage, its draws and its directory as they were."""

import math
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from contract.lanes import HISTORIES
from contract.make import assemble, library, make, make_of, new_folder, spaces
from contract.steps import Player, Transition, as_bits, reward_fn, rows

pytestmark = pytest.mark.requirement("refused-is-unchanged")

#: Out of range or of the wrong kind: which of them is the storage's affair.
BAD = (ValueError, TypeError)


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


class Pair:
    """Two storages that are the same; what is refused by one of them must not tell them apart."""

    def __init__(self, place, **options):
        self.folder = new_folder() / "rows" if place == "directory" else None
        options = {"place": place, "lanes": 2, "size": 24, "batch_size": 8, **options}
        self.tried = make("all", path=self.folder, **options)
        self.twin = make("all", **options)
        self.players = [Player(0), Player(1)]
        for unfinished in (2, 3):
            self.write(unfinished)
        for storage in self.both():
            batch = storage.sample()
            batch["td_error"] = torch.arange(8.0)
            storage.update_tensordict_priority(batch)
        self.batch = batch.exclude("td_error")
        self.keep_files()
        self.is_unchanged = False

    def both(self):
        return self.tried, self.twin

    def write(self, num_steps):
        data = torch.stack([rows(player.play([4], num_steps)) for player in self.players])
        for storage in self.both():
            storage.extend(data)
            storage.end_episodes()
        for player in self.players:
            player.reset()

    def assert_unchanged(self):
        self.is_unchanged = False
        if self.folder:
            assert files_of(self.folder) == self.files
        assert len(self.tried) == len(self.twin)
        assert self.tried.write_count == self.twin.write_count
        for _ in range(2):
            one, other = (storage.sample() for storage in self.both())
            assert set(one.keys(True, True)) == set(other.keys(True, True))
            for key, value in one.items(True, True):
                assert torch.equal(as_bits(value), as_bits(other[key])), key
            # Episodes and priorities that go on are the same too.
            self.write(1)
            for storage, batch in zip(self.both(), (one, other), strict=True):
                batch["td_error"] = batch["next", "reward"].abs()
                storage.update_tensordict_priority(batch)
        self.keep_files()
        self.is_unchanged = True

    def keep_files(self):
        if self.folder:
            self.tried.flush()
            self.files = files_of(self.folder)


# What is written


def block(change=lambda data: None, num_steps=3, lanes=2):
    """[L, T] rows that would fit, changed."""
    data = torch.stack([rows(Player(9 + lane).play([], num_steps)) for lane in range(lanes)])
    changed = change(data)
    return data if changed is None else changed


def terminal(at):
    """Rows of which one is terminal and not done: n-step returns would sum past it."""

    def change(data):
        data["next", "terminated"] = torch.zeros_like(data["next", "done"])
        data["next", "terminated"][1, at] = True

    return change


def flagged(data):
    data["next", "done"] = data["next", "done"].squeeze(-1)


WRITES = {
    "three lanes": (lambda s: s.extend(block(lanes=3)), ValueError),
    "one step of one lane": (lambda s: s.add(block()[0, 0]), ValueError),
    "no TensorDict": (lambda s: s.extend([1, 2]), BAD),
    "a number": (lambda s: s.extend(7), TypeError),
    "an unknown lane": (lambda s: s.extend(block(), lanes=[0, 2]), ValueError),
    "a lane twice": (lambda s: s.extend(block(), lanes=[1, 1]), ValueError),
    "half a lane": (lambda s: s.extend(block(), lanes=[0.5, 1]), ValueError),
    "a mask of three lanes": (lambda s: s.extend(block(), lanes=[True, True, False]), ValueError),
    "no steps": (lambda s: s.extend(block()[:, :0]), ValueError),
    "too few lanes": (lambda s: s.extend(block(), lanes=[1]), ValueError),
    "to end an unknown lane": (lambda s: s.end_episodes([5]), ValueError),
    **{
        name: (lambda s, change=change: s.extend(block(change)), error)
        for name, change, error in [
            ("no action", lambda d: d.exclude("action"), KeyError),
            ("no done", lambda d: d.exclude(("next", "done")), KeyError),
            ("no reward", lambda d: d.exclude(("next", "reward")), KeyError),
            ("no truncated", lambda d: d.exclude(("next", "truncated")), KeyError),
            ("no next goal", lambda d: d.exclude(("next", "achieved_goal")), KeyError),
            ("no info", lambda d: d.exclude(("next", "effort")), KeyError),
            ("a flag without its dimension", flagged, ValueError),
            ("a first row that is terminal and not done", terminal(0), ValueError),
            ("a last row that is terminal and not done", terminal(-1), ValueError),
            ("a shape", lambda d: d.set("action", torch.zeros(2, 3, 5)), ValueError),
            ("padding", lambda d: d.set("collector", {"mask": torch.eye(2, 3).bool()}), ValueError),
            ("a dtype", lambda d: d.set("observation", d["observation"].double()), BAD),
            ("a flag of numbers", lambda d: d.set(("next", "done"), torch.zeros(2, 3, 1)), BAD),
            ("flags of agents", lambda d: d.set(("next", "done"), d["action"] > 0), ValueError),
            (
                "a priority that is not a number",
                lambda d: d.set("td_error", torch.full((2, 3, 1), math.nan)),
                ValueError,
            ),
            (
                "a negative priority",
                lambda d: d.set("td_error", torch.full((2, 3, 1), -1.0)),
                ValueError,
            ),
        ]
    },
}

#: What is said of some of them.
MESSAGES = {
    "a shape": r"'action' must be .* \[2\], got \[5\]",
    "flags of agents": "combine them",
    "no truncated": "add_truncated_keys",
    "record flags of one": "num_envs=2, got 1",
}


def step(**changes):
    """The seven values of a step of two environments, changed."""
    data = rows([Transition(9 << 20, 9 << 20), Transition(10 << 20, 10 << 20)])
    seen, after = (
        {key: part[key].numpy() for key in ("observation", "achieved_goal", "desired_goal")}
        for part in (data, data["next"])
    )
    flags = np.zeros(2, bool)
    values = {
        "observations": seen,
        "actions": data["action"].numpy(),
        "rewards": np.zeros(2),
        "terminateds": flags,
        "truncateds": flags,
        "infos": {"effort": data["next", "effort"].numpy()},
        "next_observations": after,
    }
    return {**values, **changes}


RECORDS = {
    "a number as observation": ({"observations": 5}, (*BAD, KeyError)),
    "another shape": (
        {"observations": {**step()["observations"], "observation": np.zeros((2, 4), "f")}},
        ValueError,
    ),
    "another dtype": (
        {"observations": {**step()["observations"], "observation": np.zeros((2, 3))}},
        TypeError,
    ),
    "no goal": ({"observations": {"observation": np.zeros((2, 3), np.float32)}}, KeyError),
    "no next goal": ({"next_observations": {"observation": np.zeros((2, 3), "f")}}, KeyError),
    "actions of three": ({"actions": np.zeros((3, 2), np.float32)}, ValueError),
    "actions of another shape": ({"actions": np.zeros((2, 5), np.float32)}, ValueError),
    "rewards of three": ({"rewards": np.zeros(3)}, ValueError),
    "words as rewards": ({"rewards": ["high", "low"]}, BAD),
    "flags of one": ({"terminateds": np.zeros(1, bool)}, ValueError),
    "one flag": ({"truncateds": True}, BAD),
    "flags as numbers": ({"terminateds": np.array([0.5, 0])}, BAD),
    "no infos": ({"infos": {}}, KeyError),
    "a word as infos": ({"infos": "effort"}, TypeError),
    "infos of nothing": ({"infos": None}, (KeyError, TypeError)),
}

# What is drawn, set and loaded

DRAWS = {
    **{
        f"sample({size!r})": (lambda s, size=size: s.sample(size), error)
        for size, error in [(0, ValueError), (-3, ValueError), (2.5, BAD), ("x", BAD)]
    },
    "sample_episodes(0)": (lambda s: s.sample_episodes(0), ValueError),
    "batches(-1)": (lambda s: s.batches(-1), ValueError),
    "can_sample(0)": (lambda s: s.can_sample(0), ValueError),
    **{
        f"a mask {shape}": (lambda s, shape=shape: s[torch.ones(shape) > 0], IndexError)
        for shape in [(), (2, 2), (3,)]
    },
}

PRIORITIES = {
    "not a number": (lambda i: (i, torch.tensor([1.0, math.nan])), ValueError),
    "negative": (lambda i: (i, torch.tensor([1.0, -1.0])), ValueError),
    "infinite": (lambda i: (i, torch.tensor([1.0, math.inf])), ValueError),
    "too many": (lambda i: (i, torch.ones(3)), ValueError),
    "of an unknown row": (lambda i: (i + 10_000, torch.ones(2)), IndexError),
    "below -1, of a row that gave way": (lambda i: (i - 2, torch.ones(2)), IndexError),
    "by fractions": (lambda i: (i.float(), torch.ones(2)), TypeError),
}

PARAMETERS = {
    "alpha": [-0.1, 4.1, math.nan, math.inf, "x", None, [1.0]],
    "beta": [-0.1, 1.1, math.nan, "x", None],
    "eta": [0, -1.0, 1.1, math.nan, "x", None],
    "c_min": [0, -5, "x", 2.5, None],
    "n_step": [0, -1, "x", 1.5, None, True],
    "discount": [-0.1, 1.1, math.nan, "x", None],
    "num_goals": [-1, math.nan, 1.5, "x", None],
    "strategy": ["past", {"future": 0.5}, {"past": 1.0}, {}, {"future": 1.5, "final": -0.5}, 5],
}


def tables():
    """All calls that must raise: (call, error)."""
    yield from ((name, *entry) for name, entry in {**WRITES, **DRAWS}.items())
    for name, (changes, error) in RECORDS.items():
        yield f"record {name}", partial(_record, changes), error
    for name, (wrong, error) in PRIORITIES.items():
        yield f"priority {name}", partial(_update, wrong), error
    for name, values in PARAMETERS.items():
        for value in values:
            yield f"{name}={value!r}", partial(_assign, name, value), BAD


def _record(changes, storage):
    storage.record(*step(**changes).values())


def _update(wrong, storage):
    storage.update_priority(*wrong(torch.zeros(2, dtype=torch.int64)))


def _assign(name, value, storage):
    setattr(storage, name, value)


@pytest.mark.parametrize("shape", [(8, 8), (7,), (1, 8, 8)], ids=str)
def test_errors_that_arithmetic_has_spread_are_refused(pair, shape):
    """[B] and [B, 1] make [B, B]."""
    batch = pair.batch.clone()
    batch["td_error"] = torch.rand(8)
    with pytest.raises(ValueError, match=r"\[8\]|8"):
        pair.tried.update_tensordict_priority(batch, torch.rand(shape))
    with pytest.raises(KeyError, match="td_error"):
        pair.tried.update_tensordict_priority(batch.exclude("td_error"))
    with pytest.raises(KeyError, match="index"):
        pair.tried.update_tensordict_priority(batch.exclude("index"))
    pair.assert_unchanged()


_unchanged = {}


@pytest.fixture(params=["memory", "directory"])
def pair(request):
    """One pair for all, as what is refused changes nothing; another one after a test that failed."""
    pair = _unchanged.pop(request.param, None) or Pair(request.param)
    yield pair
    if pair.is_unchanged:
        _unchanged[request.param] = pair


@pytest.mark.parametrize("call", [partial(_record, {}), lambda s: s.extend(block())])
def test_what_the_tables_change_would_fit(call):
    storage = make("all", lanes=2, size=24)
    call(storage)
    assert len(storage) >= 2


@pytest.mark.parametrize(
    ("name", "call", "error"), [pytest.param(*entry, id=entry[0]) for entry in tables()]
)
def test_it_raises_and_changes_nothing(pair, name, call, error):
    with pytest.raises(error, match=MESSAGES.get(name)):
        call(pair.tried)
    pair.assert_unchanged()


# Loading and opening


def dump_of(*args, **options):
    storage, folder = make(*args, **options), new_folder() / "dump"
    players = [Player(lane) for lane in range(options.get("lanes", 1))]
    data = torch.stack(
        [rows(player.play([4], 8), options.get("layout", "goals")) for player in players]
    )
    storage.extend(data if len(data) > 1 else data[0])
    storage.dumps(folder)
    return folder


DUMPS = {
    "nothing": (lambda: new_folder() / "nothing", FileNotFoundError),
    "an empty folder": (new_folder, FileNotFoundError),
    "a number": (lambda: 5, TypeError),
    "another number of lanes": (lambda: dump_of("all", lanes=3, size=24), ValueError),
    "another size": (lambda: dump_of("all", lanes=2, size=26), ValueError),
    "one lane": (lambda: dump_of("all", size=24), ValueError),
    "other observations": (lambda: dump_of("all", layout="mixed", lanes=2, size=24), BAD),
    "no priorities": (lambda: dump_of("hindsight", lanes=2, size=24), (KeyError, *BAD)),
}


@pytest.mark.parametrize(("made", "error"), DUMPS.values(), ids=DUMPS)
def test_dumps_that_do_not_fit(pair, made, error):
    path = made()
    with pytest.raises(error):
        pair.tried.loads(path)
    pair.assert_unchanged()


def test_states_that_do_not_fit(pair):
    others = {"lanes": 3}, {"lanes": 2, "layout": "mixed"}, {"lanes": 2, "size": 26}
    states = [{}, 5, *(make("all", **{"size": 24, **it}).state_dict() for it in others)]
    states.append({**pair.twin.state_dict(), "unknown": 1})
    whole = pair.twin.state_dict()
    states += [{name: whole[name] for name in whole if name != key} for key in whole]
    for state in states:
        with pytest.raises((KeyError, *BAD)):
            pair.tried.load_state_dict(state)
    pair.assert_unchanged()


def anew(path):
    return library.PackedStorage(24, path=path, fields=make().storage.fields, fresh=True)


at = partial(make, place="directory")
OPENS = {
    "nothing": (lambda path: library.ReplayStorage.open(path / "no"), FileNotFoundError),
    "no rows": (lambda path: library.ReplayStorage.open(path / "no", mode="r"), FileNotFoundError),
    "a file": (lambda path: library.ReplayStorage.open(__file__), (OSError, ValueError)),
    "a number": (lambda path: library.ReplayStorage.open(5), TypeError),
    "another mode": (lambda path: library.ReplayStorage.open(path, mode="w"), ValueError),
    "a setting that there is not": (lambda path: library.ReplayStorage.open(path, x=3), TypeError),
    "another size": (lambda path: at(path=path, size=26), ValueError),
    "other lanes": (lambda path: at(path=path, lanes=2, size=24), ValueError),
    "other observations": (lambda path: at(path=path, layout="mixed", size=24), (KeyError, *BAD)),
    "to be shared": (lambda path: assemble(storage=anew(path), shared=True), RuntimeError),
}


@pytest.mark.parametrize(("call", "error"), OPENS.values(), ids=OPENS)
def test_directories_that_do_not_fit(call, error):
    path = new_folder() / "rows"
    storage = at(path=path, size=24)
    storage.extend(rows(Player().play([4], 3)))
    storage.close()
    files = files_of(path)
    with pytest.raises(error):
        call(path)
    assert files_of(path) == files
    storage = at(path=path, size=24)
    assert len(storage) == 7
    storage.close()


# Constructors

OPTIONS = {
    "storage_size": [0, -3, 1.5, "x", None],
    "num_envs": [0, -1, 1.5, "x"],
    "batch_size": [0, -1, 1.5, "x"],
    "device": ["nowhere", 5, []],
    "mode": ["w", 5],
    "max_entries": [6, 1.5, "x"],
    **PARAMETERS,
    "reward_fn": [None, 5, "x"],
    "terminated_fn": [5, "x"],
    "prefetch": [-1, 1.5, "x"],
    "seed": [-1, 1.5, "x"],
    "sample_unit": [5, "x"],
    "transform": [5, [5]],
    "autoreset_mode": ["sometimes", 5],
    "on_gap": ["stop", 5],
    "frame_stack": [1, 0, 1.5, "x"],
    "compress": [1, "x"],
    "info_keys": [
        5,
        "word",
        ["reward"],
        ["action"],
        {"observation": gymnasium.spaces.Box(-1, 1, (2,))},
    ],
    "extra_fields": [5, {"x": 3}, {"action": (torch.float32, (2,))}, {"index": (torch.int64, ())}],
    "unknown": [1],
}
OPTIONS["alpha"] = OPTIONS["alpha"][:-2]  # None and a list are tried with the parameters.


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_ready_made_storages(name):
    for value in OPTIONS[name]:
        folder = new_folder() / "rows"
        with pytest.raises(BAD):
            make("all", path=folder, place="directory", **{name: value})
        assert not folder.exists() or not files_of(folder), value


SPACES = spaces()
PARTS = {
    "no storage": lambda: library.ReplayStorage(storage=5),
    "an option of a part that is not made": lambda: make(discount=5.0),
    "a class as sampler": lambda: assemble(sampler=5),
    "a class as transform": lambda: assemble(transform=5),
    "no lanes": lambda: assemble(lanes=0),
    "fewer rows than lanes": lambda: assemble(2, 3),
    "n of 0": lambda: library.NStep(0),
    "a discount of 2": lambda: library.NStep(3, 2.0),
    "crops of one text": lambda: library.RandomCrop("observation"),
    "a negative padding": lambda: library.RandomCrop(["observation"], -1),
    "a probability of 2": lambda: library.RandomCrop(["observation"], probability=2),
    "no reward function": lambda: library.GoalRelabel(5),
    "flags without rewards": lambda: library.GoalRelabel(
        None, goal_key="actor_goal", terminated_fn=reward_fn
    ),
    "infos without rewards": lambda: library.GoalRelabel(
        None, goal_key="actor_goal", info_keys=["effort"]
    ),
    "no strategy": lambda: library.HERSampler("past"),
    "two samplers of one goal": lambda: library.HERSampler(base=library.HERSampler()),
    "hindsight below recency": lambda: library.ERESampler(base=library.HERSampler()),
    "priorities of nothing": lambda: library.PERSampler(0),
    "an unknown norm": lambda: library.PERSampler(8, normalize="sum"),
    "priorities of too few rows": lambda: filled(sampler=library.PERSampler(8)),
    "an unknown reference": lambda: library.ERESampler(reference="rows"),
    "a phase of nothing": lambda: library.ERESampler().begin_phase(0),
    "returns of nothing": lambda: library.ReturnImprovementEta(library.EpisodeWriter()),
    "sequences of nothing": lambda: library.EpisodeSequence(0),
    "an unknown boundary": lambda: library.EpisodeSequence(3, boundary="wrap"),
    "a negative burn-in": lambda: library.EpisodeSequence(3, burn_in=-1),
    "stacks of no frames": lambda: library.FrameStack(2).frame_shape((0, 4)),
    "stacks of three halves": lambda: library.FrameStack(2).frame_shape((3,)),
    "stacks of more frames": lambda: library.FrameStack(2, -1).frame_shape((4, 6)),
    "an observation that is called reward": lambda: step_of(seen={"reward": 0.5}),
    "an observation that is called index": lambda: step_of(seen={"index": 0.5}),
    "stacks of two and of three": lambda: make_of(
        gymnasium.spaces.Dict({str(k): gymnasium.spaces.Box(0, 1, (k,)) for k in (2, 3)}),
        gymnasium.spaces.Discrete(2),
        frame_stack={str(k): library.FrameStack(k) for k in (2, 3)},
    ),
    "a stack without a next one": lambda: library.PackedStorage(
        9, fields={"x": (torch.uint8, (2,), library.FrameStack(2))}
    ),
    "no storages": lambda: library.ReplayStorageEnsemble(),
    "shares of others": lambda: library.ReplayStorageEnsemble(assemble(), shares=(0.5, 0.5)),
}


def step_of(seen):
    storage = library.ReplayStorage(storage=library.PackedStorage(9))
    storage.record(seen, 1, 0.0, False, False, {}, seen)


def filled(**parts):
    storage = assemble(24, 2, **parts)
    HISTORIES["unequal fill"].write(storage)
    return storage


@pytest.mark.parametrize("make_part", PARTS.values(), ids=PARTS)
def test_parts(make_part):
    with pytest.raises((KeyError, IndexError, *BAD)):
        make_part()


def test_hindsight_needs_goals():
    box = gymnasium.spaces.Box(-1, 1, (3,))
    with pytest.raises(KeyError, match="desired_goal"):
        library.HERReplayStorage(box, box, reward_fn=reward_fn)


@pytest.mark.parametrize("name", ["register_save_hook", "register_load_hook"])
def test_hooks_are_refused(name):
    with pytest.raises(RuntimeError, match="hooks"):
        getattr(make(), name)(lambda data: data)
